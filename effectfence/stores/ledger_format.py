"""The file ledger's bytes: changes to lines, and lines back to changes. No I/O, no clock.

A ledger is lines of JSON, each one ended by `\\n` and each one closed by the same member, last:

    {"effectfence":"ledger", "version":1, "epoch":…, "base":…, "floor":…, "now":…, …    the header
    {"kept":[…], "bodies":[…]                            records that a compaction carried over
    {"compacted":"<hash>", "line":9                      the end of what a compaction wrote
    {"batch":2, "bytes":731, "now":…, "boot":…, "boottime":…, "writer":…, "wall":…   opens a batch
    {"n":17, "puts":[{"key":…,"version":3,"tag":…,"size":12}], "bodies":[{"a":"text"}]  one change
    …,"hash":"<64 hex digits>"}                          every line

Invariants

1.  `hash` is the SHA-256 over the file's bytes from the first digit of the hash of the line before
    (the file's first byte, for the header) up to its own first digit. So a line vouches for itself
    and for everything before it, and a whole file is checked by one call over spans of one buffer.
2.  A line holds the records that its change left behind, whole: nothing in it depends on what stood
    before, so reading needs no rules, and a record that expired meanwhile is never missed.
3.  A body comes back byte for byte. If it is JSON in the form in which the encoder here would write
    it, it stands in `bodies` as it is and is cut out again by its `size`; else it stands in its put
    as `text`, or as `base64` if it is not UTF-8.
4.  Every line is its own echo: decoded and encoded again it is the same bytes. That one comparison
    refuses doubled members, NaN, big integers, odd escapes and stray white space, and it is fast.
    The writer makes its lines so that this holds, so it never writes what it would refuse.
5.  Running numbers grow by one from the header's `base`; time never goes back; a batch is as many
    lines and bytes as it says. If one was cut (its process died), the next one says so by `cut`.
6.  Nothing but `Damage` comes out of hostile bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from sys import intern
from typing import Any, Final

import orjson

from effectfence._native import sha256_spans
from effectfence.canonical import Undecodable, strict_decode
from effectfence.stores.contract import NEVER, Record

VERSION: Final = 1
MAX_LINE: Final = 64 << 20
_BODY_DEPTH: Final = 200
"""Deeper than anything that is put, so that what was written can always be read."""
"""No line is longer; a change that would need one is refused before it is written."""
SECTOR: Final = 512

_LARGEST: Final = 1 << 62
_HASH: Final = b',"hash":"'
_BODIES: Final = b'],"bodies":['
_CLOSE: Final = b'"}\n'
_TAIL: Final = 64 + len(_CLOSE)
_SHORTEST_LINE: Final = len(b'{"n":1') + len(_HASH) + _TAIL
_KEPT_LINE_BYTES: Final = 64 << 10

_HEADER = (
    "effectfence", "version", "epoch", "compacted", "base", "floor",
    "now", "boot", "boottime", "wall", "hash",
)  # fmt: skip
_OPENER = ("batch", "bytes", "now", "boot", "boottime", "writer", "wall", "hash")
_OPENER_AFTER_CUT = ("batch", "bytes", "cut", *_OPENER[2:])
_CHANGE = ("n", "puts", "bodies", "hash")
_CHANGE_WITH_FLOOR = ("n", "floor", "puts", "bodies", "hash")
_KEPT = ("kept", "bodies", "hash")
_SEAM = ("compacted", "line", "hash")
_PUT = ("key", "version", "tag", "stamp", "label", "expires_at", "size", "text", "base64")
_BODY_FORMS = ("size", "text", "base64")
_KEPT_PUTS = {
    ("key", "version", "tag", "stamp", "label", "at", "writer", *expiry, *body)
    for expiry in ((), ("expires_at",))
    for body in ((), ("size",), ("text",), ("base64",))
}
_TYPES = {
    "key": str, "version": int, "tag": str, "stamp": int, "label": str, "at": float, "writer": str,
    "expires_at": float, "size": int, "text": str, "base64": str,
}  # fmt: skip


class Damage(Exception):
    """A line that this library cannot have written."""

    def __init__(self, line: int, offset: int, reason: str) -> None:
        super().__init__(f"line {line}, byte {offset}: {reason}")
        self.line = line
        self.offset = offset
        self.reason = reason


class Unwritable(ValueError):
    """A change that no line can hold: not UTF-8, a number beyond 64 bits, too large."""


@dataclass(slots=True)
class Anchor:
    """Ledger time `now` was when the clock of this boot showed `boottime`."""

    now: float
    boot: str
    boottime: float
    wall: str


@dataclass(slots=True)
class Header:
    epoch: str
    compacted: bool
    base: int
    floor: int
    anchor: Anchor


@dataclass(slots=True)
class Tip:
    """Where a reader or writer stands: all that the next line depends on."""

    offset: int = 0
    line: int = 0
    hash: bytes = b""
    n: int = 0
    lines_left: int = 0
    """Lines of the present batch still to come; not 0 at the end of a file: it was cut."""
    batch_end: int = 0
    anchor: Anchor = field(default_factory=lambda: Anchor(0.0, "", 0.0, ""))


# Writing ------------------------------------------------------------------------------------------


def seal(before: bytes, content: bytes) -> tuple[bytes, bytes]:
    """The whole line, and its hash; `content` ends where the hash begins."""
    digest = hashlib.sha256(before + _CLOSE + content if before else content).hexdigest().encode()
    return content + digest + _CLOSE, digest


def encode_header(header: Header) -> tuple[bytes, bytes]:
    anchor = header.anchor
    values = (
        "ledger", VERSION, header.epoch, header.compacted, header.base, header.floor,
        anchor.now, anchor.boot, anchor.boottime, anchor.wall,
    )  # fmt: skip
    return seal(b"", _content(dict(zip(_HEADER, values, strict=False))))


def encode_change(n: int, written: Mapping[str, Record | None], floor: int | None) -> bytes:
    """A change's line up to its hash; `Unwritable` if there is no such line."""
    puts: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    for key, record in written.items():
        if record is None:
            puts.append({"key": key})
            continue
        put: dict[str, Any] = {"key": key, "version": record.version}
        if record.tag:
            put["tag"] = record.tag
        if record.stamp:
            put["stamp"] = record.stamp
        if record.label:
            put["label"] = record.label
        if (expires_at := record.expires_at) != NEVER:
            if not -NEVER < expires_at < NEVER:
                raise Unwritable(f"{key!r} would expire at {expires_at}")
            put["expires_at"] = expires_at
        if record.body:
            put["size"] = len(record.body)
            bodies.append(record.body)
        puts.append(put)
    if floor is None:
        return _with_bodies({"n": n, "puts": puts}, puts, bodies)
    return _with_bodies({"n": n, "floor": floor, "puts": puts}, puts, bodies)


def encode_batch(
    tip: Tip, contents: Sequence[bytes], anchor: Anchor, writer: str
) -> tuple[bytes, Tip]:
    """The bytes of one batch, and where they leave the ledger."""
    size = sum(map(len, contents)) + _TAIL * len(contents)
    opener: dict[str, Any] = {"batch": len(contents), "bytes": size}
    if tip.lines_left:
        opener["cut"] = True
    opener["now"] = anchor.now
    opener["boot"] = anchor.boot
    opener["boottime"] = anchor.boottime
    opener["writer"] = writer
    opener["wall"] = anchor.wall
    line, digest = seal(tip.hash, _content(opener))
    lines = [line]
    sha256 = hashlib.sha256
    for content in contents:
        digest = sha256(digest + _CLOSE + content).hexdigest().encode()
        lines += (content, digest, _CLOSE)
    data = b"".join(lines)
    end = tip.offset + len(data)
    return data, Tip(
        end, tip.line + 1 + len(contents), digest, tip.n + len(contents), 0, end, anchor
    )


def encode_kept(records: Iterable[tuple[str, Record]], before: bytes) -> Iterator[bytes]:
    """Lines of about 64 KiB with these records, chained on to the hash `before`.

    The records of one line have the same members: a million of them are read column by column.
    """
    groups: dict[tuple[str, ...], _Group] = {}
    for key, record in records:
        put: dict[str, Any] = {
            "key": key, "version": record.version, "tag": record.tag, "stamp": record.stamp,
            "label": record.label, "at": record.at, "writer": record.writer,
        }  # fmt: skip
        if record.expires_at != NEVER:
            put["expires_at"] = record.expires_at
        bodies = _place_body(put, record.body) if record.body else []
        names = tuple(put)
        group = groups.get(names)
        if group is None:
            group = groups[names] = _Group()
        group.puts.append(put)
        group.bodies += bodies
        group.size += 250 + len(record.body)
        if group.size >= _KEPT_LINE_BYTES:
            line, before = seal(before, group.content())
            yield line
            del groups[names]
    for group in groups.values():
        line, before = seal(before, group.content())
        yield line


class _Group:
    """The records of the next kept line of one shape."""

    __slots__ = ("bodies", "puts", "size")

    def __init__(self) -> None:
        self.puts: list[dict[str, Any]] = []
        self.bodies: list[Any] = []
        self.size = 0

    def content(self) -> bytes:
        return _content({"kept": self.puts, "bodies": self.bodies})


def encode_seam(replaced: bytes, line: int, before: bytes) -> tuple[bytes, bytes]:
    """The line that ends what a compaction wrote, and its hash.

    `replaced` is the old file's last hash, `line` the number of this line.
    """
    return seal(before, _content({"compacted": replaced.decode(), "line": line}))


def decode_seam(line: bytes) -> tuple[bytes, int, bytes]:
    """What `encode_seam` was given and gave; for one who has read the file that was replaced."""
    try:
        value = orjson.loads(line)
        if tuple(value) == _SEAM and orjson.dumps(value) + b"\n" == line:
            return _text(value["compacted"]).encode(), _count(value["line"]), line[-67:-3]
    except (ValueError, TypeError, _Refused):
        pass
    return b"", 0, b""


def _content(value: dict[str, Any]) -> bytes:
    return _dumped(value)[:-1] + _HASH


def _dumped(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise Unwritable(f"cannot be written to a ledger: {error}") from None


def _with_bodies(line: dict[str, Any], puts: list[dict[str, Any]], bodies: list[bytes]) -> bytes:
    """The line with its bodies, up to its hash.

    The bodies are decoded and encoded again with the rest, then compared with what they were: what
    comes out is an echo by construction, and so are the bodies in it if they are still the same.
    """
    try:
        line["bodies"] = [orjson.loads(body) for body in bodies]
        text = orjson.dumps(line)
        same = not bodies or text.endswith(_BODIES + b",".join(bodies) + b"]}")
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        same = False
    if not same:
        line["bodies"] = _plain_bodies(puts, bodies)
        text = _dumped(line)
    if len(text) + len(_HASH) + _TAIL > MAX_LINE:
        raise Unwritable(f"a change of {len(text)} bytes; a ledger's line holds {MAX_LINE}")
    return text[:-1] + _HASH


def _plain_bodies(puts: list[dict[str, Any]], bodies: list[bytes]) -> list[Any]:
    """The values of the bodies that echo; the other bodies are moved into their puts."""
    plain: list[Any] = []
    remaining = iter(bodies)
    for put in puts:
        if "size" in put:
            del put["size"]
            plain += _place_body(put, next(remaining))
    return plain


def _place_body(put: dict[str, Any], body: bytes) -> list[Any]:
    """Say in the put where its body stands; its value, if that is among the bodies."""
    try:
        value = orjson.loads(body)
        if orjson.dumps({"bodies": [value]}) == b'{"bodies":[' + body + b"]}":
            put["size"] = len(body)
            return [value]
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass
    try:
        put["text"] = body.decode()
    except UnicodeDecodeError:
        put["base64"] = base64.b64encode(body).decode()
    return []


# Reading ------------------------------------------------------------------------------------------


class Reader:
    """Bytes of a ledger, handed over in order, become calls of `put(key, record or None)`.

    `tip` is where it stands: everything before it was checked and handed on, nothing after it.
    """

    def __init__(
        self,
        put: Callable[[str, Record | None], None],
        raise_floor: Callable[[int], None],
        check_body: Callable[[str, str, Any], None] | None = None,
    ) -> None:
        self.tip = Tip()
        self.header: Header | None = None
        self.seam_end = 0
        """Where the part that a compaction wrote ends; 0 while it has not been read."""
        self.records_read = 0
        """Puts so far, the superseded ones too."""
        self.replaced = b""
        """By the seam: the last hash of the file that this one took the place of."""
        self._put = put
        self._raise_floor = raise_floor
        self._check_body = check_body
        self._shapes: set[tuple[str, ...]] = set()
        self._writer = ""

    def lacks_its_beginning(self) -> bool:
        """Whether what must have been on the disk before the file had its name is not all read."""
        header = self.header
        return header is None or (header.compacted and not self.seam_end)

    def feed(self, data: bytes) -> None:
        """Read the whole lines in `data`, whose first byte is the one at `tip.offset`."""
        ends = _line_ends(data)
        if not ends:
            return
        bad = self._first_bad_line(data, ends)
        start = 0
        tip = self.tip
        for end in ends[:bad]:
            try:
                self._read(data, start, end)
            except (_Refused, TypeError, ValueError, KeyError, OverflowError) as error:
                raise Damage(tip.line + 1, tip.offset, _reason(error)) from None
            tip.hash = data[end - 66 : end - 2]
            tip.line += 1
            tip.offset += end + 1 - start
            start = end + 1
        if bad < len(ends):
            raise Damage(tip.line + 1, tip.offset, _bad_line(data, start, ends[bad]))

    def _first_bad_line(self, data: bytes, ends: list[int]) -> int:
        """The index of the first line whose hash is wrong; the number of lines if none is."""
        lengths_ok = _long_enough(ends)
        ends = ends[:lengths_ok]
        if not ends:
            return 0
        known = self.tip.hash
        prefix = known + _CLOSE if known else b""
        first = hashlib.sha256(prefix + data[: ends[0] - 66]).digest()
        starts = array("Q", [end - 66 for end in ends[:-1]])
        stops = array("Q", [end - 66 for end in ends[1:]])
        found = (first + sha256_spans(data, starts, stops)).hex().encode()
        said = b"".join([data[end - 66 : end - 2] for end in ends])
        if found == said:
            return len(ends)
        return next(
            i for i in range(len(ends)) if found[64 * i : 64 * i + 64] != said[64 * i : 64 * i + 64]
        )

    def _read(self, data: bytes, start: int, end: int) -> None:
        line = data[start:end]
        value = orjson.loads(line)
        if type(value) is not dict:
            raise _Refused("not an object")
        names = tuple(value)
        texts: list[bytes] = []
        if names == _KEPT and type(value["bodies"]) is list:
            texts = list(map(orjson.dumps, value["bodies"]))
            echo = _kept_echo(value, texts)
        else:
            echo = orjson.dumps(value)
        if echo != line:
            raise _Refused("not in the form in which it was written")
        if names[-1:] != ("hash",) or len(_text(value["hash"])) != 64:
            raise _Refused("it does not end with its hash")
        tip = self.tip
        if names in (_CHANGE, _CHANGE_WITH_FLOOR):
            self._read_change(value, line)
        elif names in (_OPENER, _OPENER_AFTER_CUT):
            self._read_opener(value, tip.offset + len(line) + 1)
        elif names == _KEPT:
            self._read_kept(value, line, texts)
        elif names == _HEADER and tip.line == 0:
            self._read_header(value)
        elif names == _SEAM:
            self._read_seam(value, tip.offset + len(line) + 1)
        else:
            raise _Refused("not a kind of line that belongs here")

    def _read_header(self, value: dict[str, Any]) -> None:
        if value["effectfence"] != "ledger" or value["version"] != VERSION:
            raise _Refused(f"not version {VERSION} of an effectfence ledger")
        epoch, compacted = _text(value["epoch"]), value["compacted"]
        if len(epoch) != 32 or epoch.strip("0123456789abcdef") or type(compacted) is not bool:
            raise _Refused("not the header of a ledger")
        header = Header(
            epoch, compacted, _count(value["base"]), _count(value["floor"]), _anchor(value)
        )
        self.header = header
        self.tip.n = header.base
        self.tip.anchor = header.anchor
        self._raise_floor(header.floor)

    def _read_kept(self, value: dict[str, Any], line: bytes, texts: list[bytes]) -> None:
        """The records of a kept line have the same members, so each member is one column.

        `texts`: the bodies as they stand in the line.
        """
        if self.header is None or not self.header.compacted or self.seam_end:
            raise _Refused("a record of a compaction outside of one")
        puts, bodies = value["kept"], value["bodies"]
        if type(puts) is not list or type(bodies) is not list or set(map(type, puts)) != {dict}:
            raise _Refused("not a list of records")
        shapes = set(map(tuple, puts))
        names = shapes.pop()
        if shapes or names not in _KEPT_PUTS:
            raise _Refused("not the members of a record that was kept")
        columns = dict(zip(names, zip(*map(dict.values, puts), strict=True), strict=True))
        for name, column in columns.items():
            if set(map(type, column)) != {_TYPES[name]}:
                raise _Refused(f"{name!r} of the wrong kind")
        keys, versions, stamps = columns["key"], columns["version"], columns["stamp"]
        if "" in keys or min(versions) < 1 or max(*versions, *map(abs, stamps)) > _LARGEST:
            raise _Refused("a field is out of range")
        labels = [intern(label) for label in columns["label"]]
        found = self._kept_bodies(columns, labels, bodies, line, texts)
        records = map(
            Record, versions, columns["tag"], stamps, columns["at"], labels, found,
            columns.get("expires_at", repeat(NEVER)), map(intern, columns["writer"]),
        )  # fmt: skip
        put = self._put
        for key, record in zip(keys, records, strict=True):
            put(key, record)
        self.records_read += len(keys)

    def _kept_bodies(
        self,
        columns: dict[str, Any],
        labels: list[str],
        bodies: list[Any],
        line: bytes,
        texts: list[bytes],
    ) -> Iterable[bytes]:
        check, values = self._check_body, bodies
        found: Iterable[bytes]
        if "size" in columns:
            found = _cuts(line, columns["size"], texts)
        elif bodies:
            raise _Refused("bodies that belong to nobody")
        elif "text" in columns:
            found = [text.encode() for text in columns["text"]]
            values = [_value_of(body) for body in found] if check else []
        elif "base64" in columns:
            found = values = [_unbase64(text) for text in columns["base64"]]
        else:
            found, values = repeat(b""), [b""] * len(labels)
        if check is not None:
            for key, label, value in zip(columns["key"], labels, values, strict=True):
                check(key, label, value)
        return found

    def _read_seam(self, value: dict[str, Any], end: int) -> None:
        if self.header is None or not self.header.compacted or self.seam_end:
            raise _Refused("the end of a compaction outside of one")
        if self.tip.lines_left or value["line"] != self.tip.line + 1:
            raise _Refused("lines before it are missing")
        self.replaced = _text(value["compacted"]).encode()
        self.seam_end = end

    def _read_opener(self, value: dict[str, Any], end: int) -> None:
        tip = self.tip
        if self.lacks_its_beginning():
            raise _Refused("the lines before it are missing")
        cut = value.get("cut", False)
        if type(cut) is not bool or cut != bool(tip.lines_left):
            raise _Refused("lines of the batch before are missing")
        anchor = _anchor(value)
        if anchor.now < tip.anchor.now:
            raise _Refused("time went back")
        lines, size = _count(value["batch"]), _count(value["bytes"])
        if lines == 0:
            raise _Refused("a batch of nothing")
        self._writer = intern(_text(value["writer"]))
        tip.lines_left = lines
        tip.batch_end = end + size
        tip.anchor = anchor

    def _read_change(self, value: dict[str, Any], line: bytes) -> None:
        tip = self.tip
        if tip.lines_left == 0:
            raise _Refused("a change outside of a batch")
        n = value["n"]
        if type(n) is not int or n != tip.n + 1:
            raise _Refused(f"number {n} where {tip.n + 1} is due")
        if tip.lines_left == 1 and tip.offset + len(line) + 1 != tip.batch_end:
            raise _Refused("the batch is not as long as it says")
        floor = _count(value.get("floor", 0))
        self._read_puts(value["puts"], value["bodies"], line, tip.anchor.now)
        self.records_read += len(value["puts"])
        if floor:
            self._raise_floor(floor)
        tip.n = n
        tip.lines_left -= 1

    def _read_puts(self, puts: Any, bodies: Any, line: bytes, now: float) -> None:
        """Hand on the records of one line. One long body on purpose: it runs for every record."""
        if type(puts) is not list or type(bodies) is not list:
            raise _Refused("not a list of records")
        shapes, writer, check, put_one = self._shapes, self._writer, self._check_body, self._put
        used = 0
        cut_at = line.index(_BODIES) + len(_BODIES)
        for put in puts:
            if type(put) is not dict:
                raise _Refused("not a record")
            names = tuple(put)
            if names not in shapes:
                _check_shape(names)
                shapes.add(names)
            get = put.get
            key, version, size = put["key"], get("version", 1), get("size")
            tag, stamp, label = get("tag", ""), get("stamp", 0), get("label", "")
            expires_at = get("expires_at", NEVER)
            if not (
                type(key) is str and type(version) is int and type(tag) is str
                and type(stamp) is int and type(label) is str and type(expires_at) is float
            ):  # fmt: skip
                raise _Refused(f"a field of {key!r} is of the wrong kind")
            if not key or not 0 < version <= _LARGEST or not -_LARGEST <= stamp <= _LARGEST:
                raise _Refused(f"a field of {key!r} is out of range")
            if size is not None:
                if type(size) is not int or size < 1 or used == len(bodies):
                    raise _Refused(f"the body of {key!r} is not where it should be")
                body = line[cut_at : cut_at + size]
                cut_at += size + 1
                if used < len(bodies) - 1 and size != len(orjson.dumps(bodies[used])):
                    raise _Refused(f"the body of {key!r} is not as long as it says")
                if check is not None:
                    check(key, label, bodies[used])
                used += 1
            elif names[-1] in _BODY_FORMS:
                body = _other_body(put)
                if check is not None:
                    check(key, label, _value_of(body))
            else:
                body = b""
                if check is not None and len(names) > 1:
                    check(key, label, body)
            if len(names) == 1:
                put_one(key, None)
            else:
                put_one(
                    key,
                    Record(version, tag, stamp, now, intern(label), body, expires_at, writer),
                )
        if used != len(bodies) or cut_at != len(line) - len(_HASH) - _TAIL + 1 - (not used):
            raise _Refused("the bodies are not as long as they say")


class _Refused(Exception):
    """Why a line is not one of ours."""


def _reason(error: Exception) -> str:
    if isinstance(error, orjson.JSONDecodeError):
        return "not JSON"
    return str(error) or type(error).__name__


def _line_ends(data: bytes) -> list[int]:
    ends: list[int] = []
    find = data.find
    end = find(b"\n")
    while end >= 0:
        ends.append(end)
        end = find(b"\n", end + 1)
    return ends


def _long_enough(ends: list[int]) -> int:
    """How many lines, from the first, are long enough to hold a hash."""
    start = 0
    for i, end in enumerate(ends):
        if end + 1 - start < _SHORTEST_LINE:
            return i
        start = end + 1
    return len(ends)


def _bad_line(data: bytes, start: int, end: int) -> str:
    if 0 in data[start:end]:
        return "it holds NUL bytes"
    return "its hash does not match: it, or a line before it, was changed, lost or moved"


def _cuts(line: bytes, sizes: Sequence[int], texts: Sequence[bytes]) -> list[bytes]:
    """The exact bytes of the bodies, which stand at the end of the line before its hash.

    They equal `texts`, but what the encoder gives leaves gaps in memory where it is kept: 8,000
    bytes an intent instead of 600.
    """
    if list(sizes) != list(map(len, texts)):
        raise _Refused("the bodies are not as long as they say")
    at = line.index(_BODIES) + len(_BODIES)
    starts = accumulate(sizes, lambda at, size: at + size + 1, initial=at)
    return [line[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _kept_echo(value: dict[str, Any], texts: list[bytes]) -> bytes:
    """The line again, from the texts of its bodies: their sizes are wanted anyway."""
    kept, digest = orjson.dumps(value["kept"]), orjson.dumps(value["hash"])
    return b'{"kept":%b,"bodies":[%b],"hash":%b}' % (kept, b",".join(texts), digest)


def _other_body(put: dict[str, Any]) -> bytes:
    text = put.get("text")
    return _text(text).encode() if text is not None else _unbase64(_text(put["base64"]))


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise _Refused("not base64") from None


def _value_of(body: bytes) -> Any:
    """The value of a body that is JSON in a form of its own; of any other one, its bytes."""
    try:
        return strict_decode(body, max_depth=_BODY_DEPTH, max_bytes=len(body))
    except Undecodable:
        return body


def _check_shape(names: tuple[str, ...]) -> None:
    """The members of a put come in one order, and a body in one form."""
    if names == ("key",):
        return
    order = [_PUT.index(name) if name in _PUT else -1 for name in names]
    ordered = all(a < b for a, b in pairwise(order))
    if names[:2] != ("key", "version") or -1 in order or not ordered:
        raise _Refused("unknown members in a record")
    if sum(name in _BODY_FORMS for name in names) > 1:
        raise _Refused("two bodies in one record")


def _anchor(value: dict[str, Any]) -> Anchor:
    now, boottime = value["now"], value["boottime"]
    if type(now) is not float or type(boottime) is not float or now < 0:
        raise _Refused("not a time")
    return Anchor(now, _text(value["boot"]), boottime, _text(value["wall"]))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Refused("not a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _Refused("not a count")
    return value


# Torn or corrupt ----------------------------------------------------------------------------------


def is_torn(tail: bytes, offset: int, tip: Tip) -> bool:
    """Whether `tail`, the bytes from the first line that does not check to the end, is a batch
    that a crash left half on the disk, and not damage to something that was acknowledged.

    A growing file tears in two ways: it ends early, or sectors of its last write stayed NUL.
    A batch of its full length without such sectors is no torn one, even if its end is damaged.
    `offset` is where the tail begins, `tip` where reading stopped.
    """
    end = offset + len(tail)
    newline = tail.find(b"\n")
    if newline < 0:
        return not tip.lines_left or end < tip.batch_end or tail.endswith(b"\0")
    if b'\n{"batch":' in tail or (tip.lines_left and end > tip.batch_end):
        return False  # another batch was begun after it: it had been synced
    return _has_lost_sector(tail, tail[:newline], offset)


def _has_lost_sector(tail: bytes, first_line: bytes, offset: int) -> bool:
    start = first_line.find(b"\0")
    if start < 0:
        return False
    end = start
    while end < len(tail) and tail[end] == 0:
        end += 1
    return (start == 0 or (offset + start) % SECTOR == 0) and (offset + end) % SECTOR == 0
