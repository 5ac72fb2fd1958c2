"""The only importer of the C core, and what stands in for it where it can't be built.

Invariants:

1. Both cores keep the same promises, raise the same errors and give the same digests;
   the test suite runs on each.
2. Which one is active is decided once, at import, and can be asked (`ACTIVE`,
   `describe()`). A core that was demanded and isn't there is an error, never a quiet
   change of core.
3. Nothing reaches the C core unchecked: indexes, values and spans that don't fit are
   refused there (`csrc/effectfence.h`), and turned into Python's errors here.

``EFFECTFENCE_CORE=python`` selects the stand-in, ``EFFECTFENCE_CORE=c`` demands the
extension; unset, the extension is taken if it is there.

One hash alone: `hashlib` is faster than a call into here, which lets go of the global
lock. The gain is in `sha256_spans`, one call for a whole ledger.
"""

from __future__ import annotations

import hashlib
import operator
import os
import threading
from array import array
from mmap import mmap
from typing import Any, Final, Literal

__all__ = ["ACTIVE", "SequenceWords", "describe", "sha256", "sha256_spans"]

LARGEST: Final = 2**64 - 1
DIGEST_SIZE: Final = 32


class SequenceWords:
    """Numbers that any threads may read and change, each change one atomic step.

    A word is named by the index `allocate` gave; indexes count up from 0 and stay good
    for the arena's life. Values are 0 to 2**64 - 1 and never wrap. An index that was not
    allocated raises `IndexError`, a value that doesn't fit `OverflowError`; then nothing
    has changed. `SequenceWords()` gives the active core's.
    """

    __slots__ = ()

    def __new__(cls) -> SequenceWords:
        return super().__new__(_WORDS if cls is SequenceWords else cls)

    def allocate(self, value: int = 0) -> int:
        """Make a word that holds `value`; its index. `MemoryError` when there is no room."""
        raise NotImplementedError

    def load(self, index: int) -> int:
        """The word's value."""
        raise NotImplementedError

    def compare_exchange(self, index: int, expected: int, desired: int) -> int:
        """Write `desired` if the word holds `expected`; what it held.

        An answer equal to `expected` means that it was written, by this caller alone.
        """
        raise NotImplementedError

    def fetch_add(self, index: int, amount: int) -> int:
        """Add `amount`; what the word held before. A sum past 2**64 - 1 is refused."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many words were allocated."""
        raise NotImplementedError


def sha256(*pieces: bytes) -> bytes:
    """The SHA-256 digest (32 bytes, FIPS 180-4) of the pieces one after the other."""
    if _core is None:
        return _sha256_python(*pieces)
    return _sha256_c(_implementation, *pieces)


def sha256_spans(
    data: bytes | bytearray | memoryview | mmap, starts: array[int], ends: array[int]
) -> bytes:
    """The SHA-256 digests of the spans `data[starts[i]:ends[i]]`, 32 bytes each, joined.

    `starts` and `ends` are ``array('Q')`` of one length. Spans may overlap and be empty; one
    that ends before it starts or past the data raises `ValueError`, and nothing is
    hashed. `data` is held while this runs (a mapping can't be closed, a bytearray not
    resized); its bytes should not change meanwhile.
    """
    if starts.typecode != "Q" or ends.typecode != "Q":
        raise ValueError("starts and ends must be array('Q')")
    if len(starts) != len(ends):
        raise ValueError(f"{len(starts)} starts, but {len(ends)} ends")
    with memoryview(data) as view, view.cast("B") as plain:
        if _core is None:
            return _sha256_spans_python(plain, starts, ends)
        return _sha256_spans_c(_implementation, plain, starts, ends)


def describe() -> str:
    """The active core in words, such as ``c (sha-ni)``, or why it is the stand-in."""
    return f"{ACTIVE} ({_detail})"


# --- The stand-in -------------------------------------------------------------------------


class PythonWords(SequenceWords):
    """The stand-in: a list of ints under one lock."""

    __slots__ = ("_lock", "_values")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[int] = []

    def allocate(self, value: int = 0) -> int:
        _check_value(value)
        with self._lock:
            self._values.append(value)
            return len(self._values) - 1

    def load(self, index: int) -> int:
        with self._lock:
            self._check_index(index)
            return self._values[index]

    def compare_exchange(self, index: int, expected: int, desired: int) -> int:
        _check_value(expected)
        _check_value(desired)
        with self._lock:
            self._check_index(index)
            held = self._values[index]
            if held == expected:
                self._values[index] = desired
            return held

    def fetch_add(self, index: int, amount: int) -> int:
        _check_value(amount)
        with self._lock:
            self._check_index(index)
            held = self._values[index]
            if held + amount > LARGEST:
                raise OverflowError(_too_large(held, amount))
            self._values[index] = held + amount
            return held

    def __len__(self) -> int:
        return len(self._values)

    def _check_index(self, index: int) -> None:
        if not 0 <= operator.index(index) < len(self._values):
            raise IndexError(_no_such_word(index))


def _sha256_python(*pieces: bytes) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _sha256_spans_python(data: memoryview, starts: array[int], ends: array[int]) -> bytes:
    size = len(data)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not start <= end <= size:
            raise ValueError(_bad_span(number, start, end, size))
    one = hashlib.sha256
    return b"".join(one(data[start:end]).digest() for start, end in zip(starts, ends, strict=True))


# --- The C core ---------------------------------------------------------------------------


class CWords(SequenceWords):
    """The C core's arena: no lock, and no thread waits for another."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        words = _lib.ef_words_new()
        if words == _ffi.NULL:
            raise MemoryError("no room for an arena of sequence words")
        # Any call holds `self`, so the arena outlives every call into it.
        self._words = _ffi.gc(words, _lib.ef_words_free)

    def allocate(self, value: int = 0) -> int:
        try:
            answer = _lib.ef_words_allocate(self._words, value)
        except OverflowError:
            _check_value(value)
            raise
        if answer.status:
            raise MemoryError("no room for another sequence word")
        index: int = answer.value
        return index

    def load(self, index: int) -> int:
        try:
            answer = _lib.ef_words_load(self._words, index)
        except OverflowError:
            raise IndexError(_no_such_word(index)) from None
        if answer.status:
            raise IndexError(_no_such_word(index))
        held: int = answer.value
        return held

    def compare_exchange(self, index: int, expected: int, desired: int) -> int:
        try:
            answer = _lib.ef_words_compare_exchange(self._words, index, expected, desired)
        except OverflowError:
            _check_value(expected)
            _check_value(desired)
            raise IndexError(_no_such_word(index)) from None
        if answer.status:
            raise IndexError(_no_such_word(index))
        held: int = answer.value
        return held

    def fetch_add(self, index: int, amount: int) -> int:
        try:
            answer = _lib.ef_words_fetch_add(self._words, index, amount)
        except OverflowError:
            _check_value(amount)
            raise IndexError(_no_such_word(index)) from None
        if answer.status == _lib.EF_TOO_LARGE:
            raise OverflowError(_too_large(answer.value, amount))
        if answer.status:
            raise IndexError(_no_such_word(index))
        held: int = answer.value
        return held

    def __len__(self) -> int:
        length: int = _lib.ef_words_length(self._words)
        return length


def _sha256_c(implementation: int, *pieces: bytes) -> bytes:
    # The list keeps every piece in place until the call is over.
    held = [_ffi.from_buffer(piece) for piece in pieces]
    addresses = _ffi.new("const uint8_t *[]", [_ffi.cast("uint8_t *", piece) for piece in held])
    lengths = _ffi.new("uint64_t[]", [len(piece) for piece in held])
    digest = _ffi.new("uint8_t[]", DIGEST_SIZE)
    _check_there(_lib.ef_sha256(implementation, addresses, lengths, len(held), digest))
    return bytes(_ffi.buffer(digest))


def _sha256_spans_c(
    implementation: int, data: memoryview, starts: array[int], ends: array[int]
) -> bytes:
    size, count = len(data), len(starts)
    digests = bytearray(DIGEST_SIZE * count)
    with (
        _ffi.from_buffer("uint8_t[]", data) as bytes_there,
        _ffi.from_buffer("uint64_t[]", starts) as first,
        _ffi.from_buffer("uint64_t[]", ends) as last,
        _ffi.from_buffer("uint8_t[]", digests) as out,
    ):
        answer = _lib.ef_sha256_spans(implementation, bytes_there, size, first, last, count, out)
    if answer.status == _lib.EF_BAD_SPAN:
        bad: int = answer.value
        raise ValueError(_bad_span(bad, starts[bad], ends[bad], size))
    _check_there(answer.status)
    return bytes(digests)


def _check_there(status: int) -> None:
    if status == _lib.EF_NOT_HERE:
        raise ValueError("this CPU has no such implementation of SHA-256")
    assert status == _lib.EF_OK


# --- What both say ------------------------------------------------------------------------


def _check_value(value: int) -> None:
    if not 0 <= operator.index(value) <= LARGEST:
        raise OverflowError(f"a sequence word holds 0 to 2**64 - 1, not {value}")


def _no_such_word(index: int) -> str:
    return f"no sequence word {index} was allocated"


def _too_large(held: int, amount: int) -> str:
    return f"{held} + {amount} is past 2**64 - 1; sequence words never wrap"


def _bad_span(number: int, start: int, end: int, size: int) -> str:
    return f"span {number} is {start} to {end}, not inside the {size} bytes"


# --- The choice ---------------------------------------------------------------------------


def _load_extension(choice: str) -> tuple[Any, str]:
    """The C core, or None and the reason."""
    if choice not in ("", "c", "python"):
        raise ImportError(f"EFFECTFENCE_CORE is {choice!r}; it can be 'c', 'python' or unset")
    if choice == "python":
        return None, "chosen by EFFECTFENCE_CORE"
    try:
        import effectfence._core as core
    except ImportError as reason:
        if choice == "c":
            raise ImportError(
                "EFFECTFENCE_CORE=c demands the C core, but it is not there: "
                f"{reason}. Install a C compiler and reinstall effectfence-asyncio, "
                "or unset EFFECTFENCE_CORE to run on the stand-in."
            ) from reason
        return None, f"no C core: {reason}"
    names = {
        core.lib.EF_SHA256_PORTABLE: "portable sha-256",
        core.lib.EF_SHA256_SHA_NI: "sha-ni",
        core.lib.EF_SHA256_ARM64: "arm64 sha2",
    }
    return core, names[core.lib.ef_sha256_best()]


_core, _detail = _load_extension(os.environ.get("EFFECTFENCE_CORE", ""))
# Any: cffi's modules have no stubs. The functions above that use them run on the C core only.
_lib: Any = _core.lib if _core else None
_ffi: Any = _core.ffi if _core else None
_implementation: int = _core.lib.ef_sha256_best() if _core else 0
_WORDS: type[SequenceWords] = CWords if _core else PythonWords
ACTIVE: Final[Literal["c", "python"]] = "c" if _core else "python"
