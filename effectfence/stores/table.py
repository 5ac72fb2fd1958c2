"""The records of one ledger in this process's memory: what the memory and the file store share.

Pure and synchronous; whoever owns a table serialises the calls. Invariants:

1. A record object never changes once it stands; a put replaces it.
2. `labels[label]` holds exactly the keys whose record bears that label.
3. A key that others' stamps were taken from (`VersionOf`) is a *counter*: its version is a sequence
   word, moved by one compare-and-exchange, and equals the record's version between calls.
4. An expired record is treated as absent, whether it was dropped already or not; a few are dropped
   with every write, so that memory follows what is alive.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from effectfence._native import SequenceWords
from effectfence.stores.contract import NEVER, Change, Put, Record, VersionOf

_DROPPED_PER_WRITE = 4


class Table:
    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.labels: dict[str, dict[str, None]] = {}
        self.floor = 0
        self._expiring: list[tuple[float, str]] = []
        self._words = SequenceWords()
        self._word_of: dict[str, int] = {}

    def get(self, key: str, now: float) -> Record | None:
        record = self.records.get(key)
        if record is not None and record.expires_at <= now:
            return None
        return record

    def view(self, keys: Iterable[str], now: float) -> dict[str, Record | None]:
        return {key: self.get(key, now) for key in keys}

    def holds(self, change: Change, now: float) -> bool:
        """Whether every expectation of `change` is met at `now`."""
        records = self.records
        for key, expect in change.expect.items():
            record = records.get(key)
            if record is None:
                if expect.version or expect.tag is not None or expect.stamp is not None:
                    return False
            elif not expect.holds(None if record.expires_at <= now else record):
                return False
        return True

    def write(self, change: Change, now: float, writer: str = "") -> dict[str, Record | None]:
        """Carry out the puts of a change that `holds`; what each left under its key."""
        if self._expiring and self._expiring[0][0] <= now:
            self.drop_expired(now, _DROPPED_PER_WRITE)
        for put in change.puts:
            if type(put.stamp) is VersionOf and put.stamp.key not in self._word_of:
                self._make_counter(put.stamp.key, now)
        written: dict[str, Record | None] = {}
        for put in change.puts:
            old = self._standing(put.key, now)
            if put.newer and old is not None and _stamp(put, written, old) <= old.stamp:
                continue
            if put.delete:
                if put.floor and old is not None:
                    self.floor = max(self.floor, old.version)
                record = None
            else:
                version = self._next_version(put, old)
                record = _made(put, old, version, _stamp(put, written, old), now, writer)
            self._place(put.key, old, record)
            written[put.key] = record
        return written

    def put(self, key: str, record: Record | None) -> None:
        """Place a finished record (or none) as it is: replay and undo."""
        self._place(key, self.records.get(key), record)
        if record is not None and (word := self._word_of.get(key)) is not None:
            self._set_word(word, record.version)

    def drop_expired(self, now: float, limit: int) -> int:
        """Forget up to `limit` records that expired by `now`; how many went."""
        dropped = 0
        while dropped < limit and self._expiring and self._expiring[0][0] <= now:
            _, key = heapq.heappop(self._expiring)
            record = self.records.get(key)
            if record is not None and record.expires_at <= now:
                self.put(key, None)
                dropped += 1
        return dropped

    def keys_labelled(self, label: str) -> list[str]:
        return list(self.labels.get(label, ()))

    def _standing(self, key: str, now: float) -> Record | None:
        """What stands under a key that is about to be written; an expired record goes first."""
        record = self.records.get(key)
        if record is not None and record.expires_at <= now:
            self._place(key, record, None)
            return None
        return record

    def _next_version(self, put: Put, old: Record | None) -> int:
        standing = self.floor if old is None else old.version
        if not put.bump and old is not None:
            return standing
        word = self._word_of.get(put.key)
        if word is not None:  # the atomic step that decides same-instant racers
            found = self._words.compare_exchange(word, standing, standing + 1)
            if found != standing:
                raise AssertionError(f"word of {put.key!r} is {found}, its record {standing}")
        return standing + 1

    def _place(self, key: str, old: Record | None, record: Record | None) -> None:
        if record is None:
            self.records.pop(key, None)
            self._word_of.pop(key, None)
        else:
            self.records[key] = record
            expires_at = record.expires_at
            if expires_at != NEVER and (old is None or old.expires_at != expires_at):
                heapq.heappush(self._expiring, (expires_at, key))
        if old is None or record is None or old.label != record.label:
            self._relabel(key, old, record)

    def _make_counter(self, key: str, now: float) -> None:
        old = self._standing(key, now)
        self._word_of[key] = self._words.allocate(self.floor if old is None else old.version)

    def _set_word(self, word: int, value: int) -> None:
        found = self._words.load(word)
        while found != value:
            found = self._words.compare_exchange(word, expected := found, value)
            if found == expected:
                return

    def _relabel(self, key: str, old: Record | None, new: Record | None) -> None:
        if old is not None and (keys := self.labels.get(old.label)) is not None:
            keys.pop(key, None)
        if new is not None:
            self.labels.setdefault(new.label, {})[key] = None


def _made(
    put: Put, old: Record | None, version: int, stamp: int, now: float, writer: str
) -> Record:
    if old is None:
        expires_at = NEVER if put.expires_in is None else now + put.expires_in
        return Record(
            version, put.tag or "", stamp, now, put.label or "", put.body or b"", expires_at, writer
        )
    return Record(
        version,
        old.tag if put.tag is None else put.tag,
        stamp,
        now,
        old.label if put.label is None else put.label,
        old.body if put.body is None else put.body,
        old.expires_at if put.expires_in is None else now + put.expires_in,
        writer,
    )


def _stamp(put: Put, written: dict[str, Record | None], old: Record | None) -> int:
    stamp = put.stamp
    if type(stamp) is VersionOf:
        source = written[stamp.key]
        assert source is not None, "a stamp's source is put earlier in the same change"
        return source.version
    if stamp is None:
        return 0 if old is None else old.stamp
    assert type(stamp) is int
    return stamp
