"""SHA-256, by every implementation that this CPU has and by the stand-in."""

from __future__ import annotations

import hashlib
import mmap
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from effectfence import _native
from effectfence._native import sha256, sha256_spans

# FIPS 180-4's examples (NIST, "Examples with Intermediate Values"; the last from FIPS 180-2).
EXAMPLES = [
    (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    (
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
    ),
    (
        b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
        b"ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    ),
    (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
]
IMPLEMENTATIONS = [None, *(n for n in range(3) if _native._lib and _native._lib.ef_sha256_has(n))]
NAMES = {None: "python", 0: "portable", 1: "sha-ni", 2: "arm64"}

Pieces = Callable[..., bytes]
Spans = Callable[[memoryview, "array[int]", "array[int]"], bytes]


@pytest.fixture(params=IMPLEMENTATIONS, ids=NAMES.get)
def implementation(request: pytest.FixtureRequest) -> int | None:
    chosen: int | None = request.param
    return chosen


@pytest.fixture
def pieces(implementation: int | None) -> Pieces:
    if implementation is None:
        return _native._sha256_python
    return lambda *given: _native._sha256_c(implementation, *given)


@pytest.fixture
def spans(implementation: int | None) -> Spans:
    if implementation is None:
        return _native._sha256_spans_python
    return lambda *given: _native._sha256_spans_c(implementation, *given)


def one_by_one(data: bytes, starts: array[int], ends: array[int]) -> bytes:
    return b"".join(
        hashlib.sha256(data[start:end]).digest() for start, end in zip(starts, ends, strict=True)
    )


@pytest.mark.parametrize(("message", "digest"), EXAMPLES)
def test_the_standard_s_examples(pieces: Pieces, message: bytes, digest: str) -> None:
    assert pieces(message).hex() == digest


def test_every_length_around_the_block_borders_agrees_with_hashlib(pieces: Pieces) -> None:
    dice = random.Random(180_4)
    for length in (*range(321), 511, 512, 513, 4095, 4096, 4097, 100_003):
        message = dice.randbytes(length)
        assert pieces(message) == hashlib.sha256(message).digest(), length


def test_any_way_to_cut_a_message_gives_its_digest(pieces: Pieces) -> None:
    dice = random.Random(180_5)
    for _ in range(500):
        cut = [dice.randbytes(dice.choice((0, 1, 7, 55, 56, 63, 64, 65, 130))) for _ in range(5)]
        assert pieces(*cut) == hashlib.sha256(b"".join(cut)).digest()


def test_no_piece_at_all_is_the_empty_message(pieces: Pieces) -> None:
    assert pieces() == hashlib.sha256().digest()


def test_spans_of_every_length_and_place_agree_with_hashlib(spans: Spans) -> None:
    dice = random.Random(180_6)
    data = dice.randbytes(5000)
    starts, ends = array("Q"), array("Q")
    for length in range(321):
        starts.append(start := dice.randrange(len(data) - length))
        ends.append(start + length)
    assert spans(memoryview(data), starts, ends) == one_by_one(data, starts, ends)


def test_spans_may_overlap_stand_in_any_order_and_be_empty(spans: Spans) -> None:
    data = bytes(range(200))
    starts, ends = array("Q", [100, 0, 200, 0, 0]), array("Q", [200, 200, 200, 0, 64])
    assert spans(memoryview(data), starts, ends) == one_by_one(data, starts, ends)


def test_no_span_gives_no_digest(spans: Spans) -> None:
    assert spans(memoryview(b"abc"), array("Q"), array("Q")) == b""
    assert spans(memoryview(b""), array("Q"), array("Q")) == b""


def test_an_empty_buffer_has_an_empty_span(spans: Spans) -> None:
    nothing = array("Q", [0])
    assert spans(memoryview(b""), nothing, nothing) == hashlib.sha256().digest()


@pytest.mark.parametrize(
    ("start", "end"), [(2, 1), (0, 11), (11, 11), (2**63, 2**63), (2**64 - 1, 0), (0, 2**64 - 1)]
)
def test_a_bad_span_is_named_and_nothing_is_read(spans: Spans, start: int, end: int) -> None:
    starts, ends = array("Q", [0, start]), array("Q", [10, end])
    with pytest.raises(ValueError, match=f"span 1 is {start} to {end}, not inside the 10 bytes"):
        spans(memoryview(b"0123456789"), starts, ends)


def test_starts_and_ends_must_be_equally_many_unsigned_64_bit_numbers() -> None:
    with pytest.raises(ValueError, match="1 starts, but 2 ends"):
        sha256_spans(b"abc", array("Q", [0]), array("Q", [1, 2]))
    with pytest.raises(ValueError, match="array"):
        sha256_spans(b"abc", array("I", [0]), array("Q", [1]))
    with pytest.raises(ValueError, match="array"):
        sha256_spans(b"abc", array("Q", [0]), array("q", [1]))


def test_every_kind_of_buffer_is_taken(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20
    starts, ends = array("Q", [0, 5]), array("Q", [len(data), 4000])
    expected = one_by_one(data, starts, ends)
    (tmp_path / "lines").write_bytes(data)
    with (
        (tmp_path / "lines").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sha256_spans(mapped, starts, ends) == expected
    assert sha256_spans(data, starts, ends) == expected
    assert sha256_spans(bytearray(data), starts, ends) == expected
    assert sha256_spans(memoryview(data), starts, ends) == expected
    assert sha256_spans(memoryview(data).cast("I"), starts, ends) == expected


def test_a_buffer_is_free_again_afterwards_even_if_a_span_was_bad() -> None:
    data = bytearray(b"abc")
    sha256_spans(data, array("Q", [0]), array("Q", [3]))
    with pytest.raises(ValueError, match="span 0"):
        sha256_spans(data, array("Q", [0]), array("Q", [4]))
    data.extend(b"def")
    assert data == b"abcdef"


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(TypeError):
        sha256_spans(memoryview(b"abcdef")[::2], array("Q", [0]), array("Q", [3]))


def test_the_public_functions_use_the_active_core() -> None:
    assert sha256(b"a", b"", b"bc").hex() == EXAMPLES[1][1]
    assert sha256_spans(b"xabc", array("Q", [1]), array("Q", [4])).hex() == EXAMPLES[1][1]


if _native._lib:  # on the stand-in there is nothing to choose from

    @pytest.mark.parametrize("unknown", [-1, 3, 2**31 - 1])
    def test_an_implementation_that_the_cpu_lacks_is_refused(unknown: int) -> None:
        with pytest.raises(ValueError, match="no such implementation"):
            _native._sha256_c(unknown, b"abc")
        with pytest.raises(ValueError, match="no such implementation"):
            _native._sha256_spans_c(unknown, memoryview(b""), array("Q"), array("Q"))
