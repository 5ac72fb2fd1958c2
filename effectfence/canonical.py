"""Canonical JSON: one value, one text. Fingerprints and certificate hashes rest on it.

What it promises
----------------

1. ``encode`` writes RFC 8785 (JCS), with one extension: an integer outside ±(2^53 - 1) is
   written exactly, in decimal, never rounded. ``1`` and ``1.0`` are one text, key order does not
   matter, and two different integers never share a text.
2. What has no exact form is refused before anything else happens, by ``Unencodable``, which names
   the path of the bad value and never shows the value: it may be secret, and may be huge.
3. ``decode(encode(x))`` encodes to the same bytes again. ``strict_decode`` takes bytes from
   anybody, and raises nothing but ``Undecodable``.

Why there are two ways in, and why they agree
---------------------------------------------

``orjson`` is some fifty times faster than Python, but its text is not always canonical, and it
has forms of its own for values that are to be refused. Its output cannot tell: a NaN leaves as
``null``, and a ``Fragment`` as any bytes at all. So the proof looks at the input. A value is
*plain* (``_items_left_if_plain``) when each of its parts has exactly one of these types:

===================== ============================================================================
``None, bool``        one text each, in both
``int``               decimal; orjson refuses what 64 bits cannot hold, and then the exact way runs
``str``               both escape ``"``, the backslash and the characters below U+0020, with the
                      same seven short forms and lower-case hex, and nothing else; orjson refuses
                      a lone surrogate
``float``             only with 1e-4 < abs(f) < 1e15 and a fraction. There both write the shortest
                      digits that read back as f, the nearest of them, without an exponent. They
                      differ on 1.0 and 1e16; NaN and the infinities are outside the range
``list, tuple``       the parts in order
``dict``              orjson refuses keys that are not exactly ``str``, so two keys never share a
                      text. It sorts by UTF-8 bytes, RFC 8785 by UTF-16 code units. The orders
                      differ only between U+E000..U+FFFF and U+10000 upwards, whose first UTF-8
                      bytes are EE..EF and F0..F4: an output that lacks either is in both orders
===================== ============================================================================

Exactly: subclasses, enums, dataclasses, UUIDs and datetimes are not plain. Depth and size are
counted in the same walk, and so a cycle ends. (Nobody may change the value during the call.)

Every other value goes the exact way: Python converts it into a plain one whose dicts are built in
the right order, orjson joins the pieces without sorting, and a number that it would write its own
way goes in as ready text. The exact way handles plain values too, with the same outcome, which is
what the tests compare.

Reading has one proof as well, the *echo*. If ``dumps(loads(x)) == x``, then nothing was lost on
the way: a doubled key would have left fewer tokens, and an integer beyond 64 bits comes back as a
float, which orjson always writes with a point or an exponent. Bytes that do not echo (white
space, escapes, ``1e+21``) are read again by the standard library, slowly and exactly.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, NoReturn
from uuid import UUID

import orjson
from pydantic_core import to_jsonable_python

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 4300
"""What Python reads and prints by default; fixed here, whatever the process has set."""

MAX_NAME_BYTES = 1024

_DEEPEST = 200  # orjson writes 254 levels


class Unencodable(ValueError):
    """A value that has no canonical JSON form.

    ``path`` says where, e.g. ``args.items[3].due``; ``reason`` says why, as the rest of that
    sentence. Neither shows the value.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{_middle_cut(self.path, 160)} {self.reason}"


class Undecodable(ValueError):
    """Bytes that are not one JSON value within the limits; ``offset`` in bytes, where known."""

    def __init__(self, reason: str, offset: int | None = None) -> None:
        super().__init__(reason, offset)
        self.reason = reason
        self.offset = offset

    def __str__(self) -> str:
        return self.reason if self.offset is None else f"{self.reason} at byte {self.offset}"


def encode(
    value: object,
    *,
    max_depth: int = MAX_DEPTH,
    max_bytes: int | None = None,
    name: str = "value",
) -> bytes:
    """The canonical JSON of ``value``, in UTF-8.

    Takes what JSON has, and converts what pydantic has a JSON form for: Decimal, aware datetime
    and time, date, timedelta, UUID, path, Enum, dataclass, pydantic model. Tuples are arrays,
    mappings objects. A scalar has depth 0, ``[]`` depth 1. Raises ``Unencodable``, with a path
    that starts with ``name``, for anything else and for what exceeds the limits.
    """
    assert max_depth <= _DEEPEST
    items = _MOST_ITEMS if max_bytes is None else max_bytes // _LEAST_BYTES
    data = None
    try:
        kind = type(value)
        if kind in _SCALARS or (
            kind in _CONTAINERS and _items_left_if_plain(value, max_depth, items) >= 0
        ):
            data = _joined(value)
    except TypeError:
        pass  # a type without a hash, which is none of the plain ones
    try:
        if data is None:
            data = _Exact(max_depth, items).encode(value)
    except _Refusal as refusal:
        raise Unencodable(refusal.path(name), refusal.reason) from None
    if max_bytes is not None and len(data) > max_bytes:
        raise Unencodable(name, f"takes {len(data)} bytes, more than the limit of {max_bytes}")
    return data


encode_text: Final[Callable[[str], bytes]] = orjson.dumps
"""The canonical JSON of a string that is known to have one (a checked name)."""


def detached(value: object, data: bytes) -> Any:
    """What `decode(data)` gives, for the value that ``data`` was encoded from: a JSON value of its
    own, which later changes to ``value`` do not reach."""
    if type(value) in _SCALARS:
        return value
    if type(value) is dict and _SCALARS.issuperset(map(type, value.values())):
        return value.copy()
    return decode(data)


def decode(data: bytes) -> Any:
    """The value of canonical bytes: it encodes to ``data`` again, integers of any size included.

    For bytes that ``encode`` wrote; ``Undecodable`` if they are not JSON.
    """
    try:
        value = orjson.loads(data)
        if orjson.dumps(value) == data:
            return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # too large an integer, too deep: the slow way decides
    return _read(data)


def strict_decode(data: bytes, *, max_depth: int = MAX_DEPTH, max_bytes: int) -> Any:
    """The value of untrusted bytes, or ``Undecodable``, and nothing else.

    UTF-8 without a byte order mark, one value, no key twice, finite numbers, integers exact,
    strings that can be encoded again. Size and depth are bounded before anything is parsed.
    """
    assert max_depth <= _DEEPEST
    if len(data) > max_bytes:
        raise Undecodable(f"{len(data)} bytes are more than the limit of {max_bytes}")
    if data.count(b"[") + data.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise Undecodable(f"nested deeper than {max_depth} levels")
    try:
        value = orjson.loads(data)
        if orjson.dumps(value) == data:
            return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # the slow way says what is wrong, and where
    value = _read(data)
    if b"\\u" in data:
        _refuse_lone_surrogates(value, max_depth)
    return value


def sha256_hex(data: bytes) -> str:
    """SHA-256 in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def fingerprint(*, tool: bytes, domain: bytes, args: bytes) -> bytes:
    """What makes two requests with one intent the same action: the hash, in lower-case hex, of
    their canonical ``{args, domain, tool}``, from members that are canonical already."""
    content = b'{"args":%b,"domain":%b,"tool":%b}' % (args, domain, tool)
    return hashlib.sha256(content).hexdigest().encode()


def check_name(value: object, *, what: str) -> str:
    """``value``, if it can name an intent, a domain, a tool or an agent: 1 to 1,024 bytes of
    UTF-8, no NUL, no lone surrogate. Else ``TypeError`` or ``ValueError``, which begins with
    ``what`` and does not show the value."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is {_a(value)}, not a string")
    text = _exact_text(value)
    if not text:
        raise ValueError(f"{what} is empty")
    if "\0" in text:
        raise ValueError(f"{what} holds a NUL character")
    if _has_lone_surrogate(text):
        raise ValueError(f"{what} holds a lone surrogate, which UTF-8 cannot express")
    if len(text) * 4 > MAX_NAME_BYTES and (size := len(text.encode())) > MAX_NAME_BYTES:
        raise ValueError(f"{what} takes {size} bytes, more than the limit of {MAX_NAME_BYTES}")
    return text


# The fast way: proven plain, then orjson alone.

_dumps, _SORTED = orjson.dumps, orjson.OPT_SORT_KEYS
_SCALARS = frozenset({str, int, bool, type(None)})
_CONTAINERS = frozenset({dict, list, tuple})

_LEAST_BYTES = 2
"""No item of an array or object takes less: itself, and a comma or its share of the brackets."""
_MOST_ITEMS = 1 << 24
"""Where no size is given. A value whose parts are shared can hold 2^64 items in 64 levels."""

_from_u10000_up = re.compile(rb"[\xf0-\xf4]").search
_from_ue000_to_uffff = re.compile(rb"[\xee\xef]").search


def _items_left_if_plain(container: Any, levels: int, items: int) -> int:
    """How much of ``items`` is left when this container is counted; -1 when it is not plain, or
    deeper or larger than allowed (the exact way then says where)."""
    items -= len(container)
    if levels < 1 or items < 0:
        return -1
    parts = container.values() if type(container) is dict else container
    if _SCALARS.issuperset(map(type, parts)):
        return items
    for item in parts:
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is float:
            if not _prints_alike(item):
                return -1
        elif kind in _CONTAINERS:
            items = _items_left_if_plain(item, levels - 1, items)
            if items < 0:
                return -1
        else:
            return -1
    return items


def _prints_alike(number: float) -> bool:
    """Whether orjson and RFC 8785 are known to write the same digits, and no exponent."""
    return 1e-4 < abs(number) < 1e15 and number % 1 != 0


def _joined(plain: Any) -> bytes | None:
    """A plain value's canonical JSON, or ``None`` where orjson's differs or does not exist."""
    try:
        data = _dumps(plain, option=_SORTED)
    except orjson.JSONEncodeError:
        return None
    if data.isascii() or not (_from_u10000_up(data) and _from_ue000_to_uffff(data)):
        return data
    return None


# The exact way: convert, in order, then join.


class _Refusal(Exception):
    """Why, and on its way up through the containers, where."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def inside(self, step: str | int) -> None:
        self.steps.append(f"[{step}]" if isinstance(step, int) else _member(step))

    def path(self, name: str) -> str:
        return name + "".join(reversed(self.steps))


class _TooMany(_Refusal):
    """Of the whole, wherever the count ran out."""

    def inside(self, step: str | int) -> None:
        pass


class _Exact:
    """One value's conversion into what orjson joins to its canonical JSON."""

    def __init__(self, max_depth: int, max_items: int) -> None:
        self.max_depth = max_depth
        self.max_items = max_items
        self.items = 0

    def encode(self, value: object) -> bytes:
        return orjson.dumps(self.convert(value, self.max_depth))

    def convert(self, value: Any, levels: int) -> Any:
        kind = type(value)
        if kind is str:
            if value.isascii() or not _has_lone_surrogate(value):
                return value
            raise _Refusal("holds a lone surrogate, which UTF-8 cannot express")
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if _LEAST_INT64 <= value <= _MOST_INT64 else _ready(_integer_text(value))
        if kind is float:
            return value if _prints_alike(value) else _ready(_float_text(value))
        if kind is dict:
            return self.members(value, levels)
        if kind is list or kind is tuple:
            return self.elements(value, levels)
        return self.convert_other(value, levels)

    def elements(self, elements: Collection[object], levels: int) -> list[Any]:
        self.enter(elements, levels)
        converted: list[Any] = []
        try:
            for element in elements:
                converted.append(self.convert(element, levels - 1))
        except _Refusal as refusal:
            refusal.inside(len(converted))
            raise
        return converted

    def members(self, members: Mapping[Any, object], levels: int) -> dict[str, Any]:
        self.enter(members, levels)
        converted: dict[str, Any] = {}
        if not all(type(key) is str for key in members):
            members = _with_exact_keys(members)
        for key in _ordered(members):
            try:
                converted[key] = self.convert(members[key], levels - 1)
            except _Refusal as refusal:
                refusal.inside(key)
                raise
        return converted

    def enter(self, container: Collection[object], levels: int) -> None:
        if levels < 1:
            raise _Refusal(f"is nested deeper than {self.max_depth} levels")
        self.items += len(container)
        if self.items > self.max_items:
            raise _TooMany(
                f"holds more than {self.max_items} items, "
                f"so takes more than {self.max_items * _LEAST_BYTES} bytes"
            )

    def convert_other(self, value: object, levels: int) -> Any:
        """Everything that is not exactly one of JSON's own types, as pydantic's JSON mode has it.
        What runs here may be the caller's code."""
        try:
            match value:
                case Enum():
                    return self.convert(value.value, levels)
                case str():
                    return self.convert(_exact_text(value), levels)
                case int():
                    return self.convert(int.__int__(value), levels)
                case float():
                    return self.convert(float.__float__(value), levels)
            _refuse_lossy(value)
            match value:
                case Decimal():
                    return str(value).upper()  # a context may say capitals=0
                case UUID() | PurePath():
                    return self.convert(str(value), levels)
                case datetime.date() | datetime.time() | datetime.timedelta():
                    return self.convert(to_jsonable_python(value), levels)
            if hasattr(type(value), "__pydantic_serializer__"):
                return self.convert(_dumped(value, levels), levels)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                return self.members(_fields(value), levels)
            match value:
                case dict():
                    return self.members(dict(dict.items(value)), levels)
                case Mapping():
                    return self.members(dict(value.items()), levels)
                case list():
                    return self.elements(list(list.__iter__(value)), levels)
                case tuple():
                    return self.elements(list(tuple.__iter__(value)), levels)
        except (_Refusal, MemoryError):
            raise
        except Exception as error:
            raised = type(error).__name__
            raise _Refusal(f"is {_a(value)}, whose conversion raised {raised}") from None
        raise _Refusal(f"is {_a(value)}, which has no JSON form")


_LEAST_INT64, _MOST_INT64 = -(2**63), 2**63 - 1
_BEYOND_INTEGERS = 10**MAX_INTEGER_DIGITS


def _ready(text: str) -> orjson.Fragment:
    return orjson.Fragment(text.encode())


def _integer_text(number: int) -> str:
    if not -_BEYOND_INTEGERS < number < _BEYOND_INTEGERS:
        raise _Refusal(f"is an integer of more than {MAX_INTEGER_DIGITS} digits")
    return format(Decimal(number), "f")  # exact, and str() may have a lower limit


def _float_text(number: float) -> str:
    """As ECMAScript's Number::toString has it. ``repr`` finds the same digits (the shortest that
    read back, the nearest of them); the two differ in when an exponent begins, and how it looks."""
    if not math.isfinite(number):
        raise _Refusal("is not a finite number")
    if number == 0:
        return "0"
    digits, _, exponent_text = repr(number).removesuffix(".0").partition("e")
    if not exponent_text:
        return digits
    exponent = int(exponent_text)
    if exponent < -6 or exponent > 20:
        return f"{digits}e{exponent:+d}"
    sign = "-" * digits.startswith("-")
    digits = digits.lstrip("-").replace(".", "")
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    return sign + digits.ljust(exponent + 1, "0")


def _ordered(keys: Iterable[str]) -> list[str]:
    """By UTF-16 code units; among ASCII that is how Python compares."""
    if "".join(keys).isascii():
        return sorted(keys)
    try:
        return sorted(keys, key=lambda key: key.encode("utf-16-be"))
    except UnicodeEncodeError:
        refusal = _Refusal("is a key with a lone surrogate, which UTF-8 cannot express")
        refusal.inside(next(filter(_has_lone_surrogate, keys)))
        raise refusal from None


def _with_exact_keys(members: Mapping[Any, object]) -> dict[str, object]:
    exact = {}
    for key, value in members.items():
        text = key.value if isinstance(key, Enum) else key
        if not isinstance(key, str) or not isinstance(text, str):
            raise _Refusal(f"has {_a(key)} among its keys, which must be strings")
        exact[_exact_text(text)] = value
    if len(exact) < len(members):
        raise _Refusal("has two keys with the same text")
    return exact


def _fields(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dumped(model: Any, levels: int) -> Any:
    """A pydantic model or dataclass as its own serializer says. In JSON mode that makes text of
    bytes, a list of a set and stars of a secret, so the Python mode is looked through first."""
    serializer = type(model).__pydantic_serializer__
    _look_through(serializer.to_python(model, mode="python", warnings=False), levels)
    return serializer.to_python(model, mode="json", warnings=False)


def _look_through(dumped: Any, levels: int) -> None:
    """Refuse what JSON mode would lose. Deeper than ``levels`` is refused later."""
    while isinstance(dumped, Enum):
        dumped = dumped.value
    _refuse_lossy(dumped)
    if levels < 1:
        return
    parts: Iterable[tuple[Any, object]] = ()
    if isinstance(dumped, Mapping):
        _refuse_colliding_keys(dumped)
        parts = dumped.items()
    elif isinstance(dumped, (list, tuple, deque)):
        parts = enumerate(dumped)
    for step, part in parts:
        try:
            _look_through(part, levels - 1)
        except _Refusal as refusal:
            refusal.inside(step if isinstance(step, int) else str(step))
            raise


def _refuse_lossy(value: object) -> None:
    """Refuse what pydantic would give a JSON form, but one that says less than the value."""
    match value:
        case bytes() | bytearray() | memoryview():
            raise _Refusal(f"is {_a(value)}, not text: decode it, or send it as base64")
        case set() | frozenset():
            raise _Refusal(f"is {_a(value)}, which has no order: send a sorted list")
        case float() if not math.isfinite(value):
            raise _Refusal("is not a finite number")
        case Decimal() if not value.is_finite():
            raise _Refusal("is not a finite number")
        case datetime.datetime() | datetime.time():
            _refuse_unclear_time(value)
        case object(get_secret_value=_):
            raise _Refusal(f"is {_a(value)}, which would be sent as stars")
        case object(__next__=_):
            raise _Refusal(f"is {_a(value)}, which can be read only once: send a list")


def _refuse_unclear_time(value: datetime.datetime | datetime.time) -> None:
    offset = value.utcoffset()
    if offset is None:
        raise _Refusal(f"is {_a(value)} without a time zone")
    if offset % datetime.timedelta(minutes=1):
        raise _Refusal(f"is {_a(value)} whose UTC offset has seconds, which would be cut off")


def _refuse_colliding_keys(members: Mapping[Any, object]) -> None:
    """Of one kind, different keys have different texts; of several, ``1`` and ``"1"`` do not."""
    kinds = {type(key.value if isinstance(key, Enum) else key) for key in members}
    if not kinds <= _KEY_KINDS or len(kinds) > 1:
        raise _Refusal("has keys that could share one text")


_KEY_KINDS = frozenset({str, int, UUID, datetime.date})


# Reading exactly.

_ROUND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURELY_READ = 640  # digits; no process can set int()'s own limit lower


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Whether a parser could get deeper than ``max_depth`` before it ends or stumbles.

    Without strings and with one kind of bracket, each round removes the innermost pairs: one
    level. What never finds its partner counts as open."""
    outside_strings = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    brackets = b"".join(outside_strings).translate(_ROUND, _NOT_BRACKETS)
    for depth in range(max_depth + 1):
        rest = brackets.replace(b"[]", b"")
        if len(rest) == len(brackets):
            return depth + rest.count(b"[") > max_depth
        brackets = rest
    return True


def _read(data: bytes) -> Any:
    try:
        return _READER.decode(data.decode())
    except UnicodeDecodeError as error:
        raise Undecodable("not UTF-8", error.start) from None
    except json.JSONDecodeError as error:
        offset = len(error.doc[: error.pos].encode())
        raise Undecodable(f"not JSON: {error.msg}", offset) from None
    except RecursionError:
        raise Undecodable("nested too deep to be read") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise Undecodable("an object has one key twice")
    return members


def _integer(text: str) -> int:
    if len(text) <= _SURELY_READ:
        return int(text)
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise Undecodable(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    return int(Decimal(text))


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Undecodable("a number is too large for a double")
    return number


def _no_constant(text: str) -> NoReturn:
    raise Undecodable(f"not JSON: {text}")


_READER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_no_constant,
)


def _refuse_lone_surrogates(value: Any, max_depth: int) -> None:
    """The standard library lets an escaped one pass."""
    try:
        _Exact(max_depth, _MOST_ITEMS).convert(value, max_depth)
    except _Refusal as refusal:
        raise Undecodable(f"{_middle_cut(refusal.path('value'), 160)} {refusal.reason}") from None


# Text.


def _exact_text(text: str) -> str:
    """Of a subclass too, whatever it says of itself."""
    return str.__str__(text)


def _has_lone_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _member(key: str) -> str:
    if len(key) <= 64 and key.isidentifier():
        return f".{key}"
    return f"[{json.dumps(_middle_cut(key, 64), ensure_ascii=not key.isprintable())}]"


def _middle_cut(text: str, length: int) -> str:
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def _a(value: object) -> str:
    name = _middle_cut(type(value).__name__, 64)
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
