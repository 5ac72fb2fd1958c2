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
from collections import defaultdict
from collections.abc import Callable, Iterable

from effectfence._native import SequenceWords
from effectfence.stores.contract import ABSENT, ANY, NEVER, Change, Record, VersionOf

_DROPPED_PER_WRITE = 4


class Table:
    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.labels: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.floor = 0
        self._expiring: list[tuple[float, str]] = []
        self._words = SequenceWords()
        self._word_of: dict[str, int] = {}
        self.on_put: Callable[[str], None] | None = None
        """Told of the keys whose tag `put` changes."""

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
            if record is not None and record.expires_at <= now:
                record = None
            if expect is ANY or (expect is ABSENT and record is None):
                continue
            if not expect.holds(record):
                return False
        return True

    def write(self, change: Change, now: float, writer: str = "") -> dict[str, Record | None]:
        """Carry out the puts of a change that `holds`; what each left under its key.

        One long body on purpose: it runs twice for every effect.
        """
        if self._expiring and self._expiring[0][0] <= now:
            self.drop_expired(now, _DROPPED_PER_WRITE)
        records = self.records
        written: dict[str, Record | None] = {}
        for put in change.puts:
            key, stamp, expires_in = put.key, put.stamp, put.expires_in
            old = records.get(key)
            if old is not None and old.expires_at <= now:
                self._remove(key, old)
                old = None
            if isinstance(stamp, VersionOf):
                source = written[stamp.key]
                assert source is not None, "put earlier in the same change"
                if source.version > 1 and stamp.key not in self._word_of:
                    self._word_of[stamp.key] = self._words.allocate(source.version)
                stamp = source.version
            if put.newer and old is not None and (stamp or 0) <= old.stamp:
                continue
            if put.delete:
                if old is not None:
                    self.floor = max(self.floor, old.version) if put.floor else self.floor
                    self._remove(key, old)
                written[key] = None
                continue
            if old is None:
                record = Record(
                    self.floor + 1,
                    put.tag or "",
                    stamp or 0,
                    now,
                    put.label or "",
                    put.body or b"",
                    NEVER if expires_in is None else now + expires_in,
                    writer,
                )
            else:
                record = Record(
                    self._bumped(key, old) if put.bump else old.version,
                    old.tag if put.tag is None else put.tag,
                    old.stamp if stamp is None else stamp,
                    now,
                    old.label if put.label is None else put.label,
                    old.body if put.body is None else put.body,
                    old.expires_at if expires_in is None else now + expires_in,
                    writer,
                )
            self._place(key, old, record)
            written[key] = record
        return written

    def put(self, key: str, record: Record | None) -> None:
        """Place a finished record (or none) as it is: replay and undo."""
        old = self.records.get(key)
        if self.on_put is not None and (old is None or record is None or old.tag != record.tag):
            self.on_put(key)
        if record is None:
            if old is not None:
                self._remove(key, old)
            return
        self._place(key, old, record)
        if (word := self._word_of.get(key)) is not None:
            self._set_word(word, record.version)

    def take_listener(self, before: Table) -> None:
        """Go on for a table that this one takes the place of: its listener is told what differs."""
        self.on_put = before.on_put
        if self.on_put is not None:
            for key, record in self.records.items():
                old = before.records.get(key)
                if old is None or old.tag != record.tag:
                    self.on_put(key)

    def drop_expired(self, now: float, limit: int) -> int:
        """Forget up to `limit` records that expired by `now`; how many went."""
        dropped = 0
        while dropped < limit and self._expiring and self._expiring[0][0] <= now:
            _, key = heapq.heappop(self._expiring)
            record = self.records.get(key)
            if record is not None and record.expires_at <= now:
                self._remove(key, record)
                dropped += 1
        return dropped

    def keys_labelled(self, label: str) -> list[str]:
        return list(self.labels.get(label, ()))

    def _bumped(self, key: str, old: Record) -> int:
        """The next version; a counter's is taken by the one atomic step that decides racers."""
        standing = old.version
        word = self._word_of.get(key)
        if word is None:
            return standing + 1
        found = self._words.compare_exchange(word, standing, standing + 1)
        if found != standing:
            raise AssertionError(f"the word of {key!r} is {found}, its record {standing}")
        return standing + 1

    def _place(self, key: str, old: Record | None, record: Record) -> None:
        self.records[key] = record
        label, expires_at = record.label, record.expires_at
        if old is None:
            self.labels[label][key] = None
            if expires_at != NEVER:
                heapq.heappush(self._expiring, (expires_at, key))
            return
        if old.label != label:
            del self.labels[old.label][key]
            self.labels[label][key] = None
        if expires_at not in (NEVER, old.expires_at):
            heapq.heappush(self._expiring, (expires_at, key))

    def _remove(self, key: str, old: Record) -> None:
        del self.records[key]
        del self.labels[old.label][key]
        self._word_of.pop(key, None)

    def _set_word(self, word: int, value: int) -> None:
        found = self._words.load(word)
        while found != value:
            found = self._words.compare_exchange(word, expected := found, value)
            if found == expected:
                return
