"""The sequence words, on every core that this installation has."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from effectfence import _native
from effectfence._native import CWords, PythonWords, SequenceWords

LARGEST = 2**64 - 1
THREADS = 4
T = TypeVar("T")
CORES: list[type[SequenceWords]] = [PythonWords, *([CWords] if _native._lib else [])]


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads change places within a method, not only after thousands of them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture(params=CORES)
def words(request: pytest.FixtureRequest) -> SequenceWords:
    arena: SequenceWords = request.param()
    return arena


def race(body: Callable[[int], T]) -> list[T]:
    """What `body` gave in each of four threads that started together."""
    line = threading.Barrier(THREADS)

    def run(number: int) -> T:
        line.wait()
        return body(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_the_active_core_makes_the_words() -> None:
    expected = CWords if _native.ACTIVE == "c" else PythonWords
    assert type(SequenceWords()) is expected


def test_words_count_up_from_index_0_and_keep_their_first_value(words: SequenceWords) -> None:
    assert [words.allocate(value) for value in (7, 0, LARGEST)] == [0, 1, 2]
    assert [words.load(index) for index in range(3)] == [7, 0, LARGEST]
    assert len(words) == 3


def test_a_word_starts_at_0_if_nothing_is_said(words: SequenceWords) -> None:
    assert words.load(words.allocate()) == 0


def test_an_exchange_writes_if_the_word_holds_what_was_expected(words: SequenceWords) -> None:
    word = words.allocate(5)
    assert words.compare_exchange(word, 5, 9) == 5
    assert words.load(word) == 9


def test_an_exchange_answers_what_stands_there_and_writes_nothing(words: SequenceWords) -> None:
    word = words.allocate(5)
    assert words.compare_exchange(word, 4, 9) == 5
    assert words.load(word) == 5


def test_an_addition_answers_the_number_before_it(words: SequenceWords) -> None:
    word = words.allocate(5)
    assert words.fetch_add(word, 3) == 5
    assert words.fetch_add(word, 0) == 8
    assert words.load(word) == 8


def test_a_word_never_wraps(words: SequenceWords) -> None:
    word = words.allocate(LARGEST - 1)
    with pytest.raises(OverflowError, match="never wrap"):
        words.fetch_add(word, 2)
    assert words.fetch_add(word, 1) == LARGEST - 1
    with pytest.raises(OverflowError):
        words.fetch_add(word, LARGEST)
    assert words.load(word) == LARGEST


@pytest.mark.parametrize("index", [1, 63, 64, 10**6, 2**50, LARGEST, 2**64, 2**200, -1, -(2**70)])
def test_an_index_that_was_not_allocated_is_refused(words: SequenceWords, index: int) -> None:
    words.allocate()
    with pytest.raises(IndexError, match="no sequence word"):
        words.load(index)
    with pytest.raises(IndexError, match="no sequence word"):
        words.compare_exchange(index, 0, 1)
    with pytest.raises(IndexError, match="no sequence word"):
        words.fetch_add(index, 1)
    assert len(words) == 1
    assert words.load(0) == 0


@pytest.mark.parametrize("value", [-1, 2**64, 2**200, -(2**70)])
def test_a_value_that_does_not_fit_is_refused(words: SequenceWords, value: int) -> None:
    word = words.allocate(3)
    with pytest.raises(OverflowError):
        words.allocate(value)
    with pytest.raises(OverflowError):
        words.compare_exchange(word, value, 1)
    with pytest.raises(OverflowError):
        words.compare_exchange(word, 3, value)
    with pytest.raises(OverflowError):
        words.fetch_add(word, value)
    assert words.load(word) == 3
    assert len(words) == 1


@pytest.mark.parametrize("nonsense", [1.0, "1", None, b"1"])
def test_what_is_no_integer_is_a_type_error(words: SequenceWords, nonsense: Any) -> None:
    word = words.allocate(3)
    for call in (
        lambda: words.allocate(nonsense),
        lambda: words.load(nonsense),
        lambda: words.compare_exchange(word, nonsense, 1),
        lambda: words.compare_exchange(word, 3, nonsense),
        lambda: words.fetch_add(word, nonsense),
    ):
        with pytest.raises(TypeError):
            call()
    assert words.load(word) == 3


def test_arenas_do_not_share_words(words: SequenceWords) -> None:
    other = type(words)()
    words.allocate(1)
    other.allocate(2)
    assert (words.load(0), other.load(0)) == (1, 2)


def test_growing_leaves_every_word_as_it_was(words: SequenceWords) -> None:
    count = 5000
    for value in range(count):
        assert words.allocate(value * 3) == value
    assert [words.load(index) for index in range(count)] == [3 * index for index in range(count)]


def climb_together(words: SequenceWords, goal: int) -> list[int]:
    """The numbers below `goal` that four threads say they took from one word."""
    word = words.allocate()

    def climb(_: int) -> list[int]:
        won = []
        seen = words.load(word)
        while seen < goal:
            held = words.compare_exchange(word, seen, seen + 1)
            if held == seen:
                won.append(seen)
                seen += 1
            else:
                seen = held
        return won

    return sorted(number for won in race(climb) for number in won)


def test_every_number_is_won_once(words: SequenceWords) -> None:
    goal = 30_000
    assert climb_together(words, goal) == list(range(goal))


def test_a_check_then_act_would_be_noticed() -> None:
    class Careless(PythonWords):
        def compare_exchange(self, index: int, expected: int, desired: int) -> int:
            held = self.load(index)
            os.sched_yield()
            if held == expected:
                self._values[index] = desired
            return held

    goal = 3000
    assert climb_together(Careless(), goal) != list(range(goal))


def test_no_addition_is_lost_or_doubled(words: SequenceWords) -> None:
    word, each = words.allocate(), 20_000
    taken = race(lambda _: [words.fetch_add(word, 1) for _ in range(each)])
    everybody = [number for numbers in taken for number in numbers]
    assert sorted(everybody) == list(range(THREADS * each))


def test_an_arena_grows_under_threads(words: SequenceWords) -> None:
    each = 5000

    def grow(number: int) -> list[tuple[int, int]]:
        made = []
        for turn in range(each):
            value = (number + 1) * 10**6 + turn
            index = words.allocate(value)
            assert words.load(index) == value
            made.append((index, value))
        return made

    everybody = [pair for pairs in race(grow) for pair in pairs]
    assert sorted(index for index, _ in everybody) == list(range(THREADS * each))
    assert all(words.load(index) == value for index, value in everybody)


def test_a_word_that_is_being_made_is_not_there_or_holds_its_first_value(
    words: SequenceWords,
) -> None:
    each = 5000

    def peek(number: int) -> int:
        early = 0
        for _ in range(each):
            if number % 2:
                words.allocate(1)
                continue
            with contextlib.suppress(IndexError):
                early += words.load(len(words)) == 0
        return early

    assert race(peek) == [0] * THREADS
