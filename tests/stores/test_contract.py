"""The one conformance suite: every promise of `effectfence.stores.contract`, for every store."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effectfence.stores.contract import (
    ABSENT,
    NEVER,
    Applied,
    Change,
    Expect,
    Put,
    Record,
    Store,
    VersionOf,
    View,
)
from effectfence.stores.file import FileStore
from effectfence.stores.memory import MemoryStore
from tests.stores.conftest import DATABASES, HandClock, HandMachine


def write(*puts: Put, **expect: Expect) -> Change:
    return Change(expect, puts)


async def applied(store: Store, change: Change) -> Applied:
    answer = await store.swap(change)
    assert isinstance(answer, Applied)
    return answer


async def record(store: Store, key: str) -> Record | None:
    return (await store.load([key])).records[key]


# Reading and writing


async def test_nothing_stands_under_a_key_that_was_never_written(store: Store) -> None:
    view = await store.load(["a", "b"])
    assert view.records == {"a": None, "b": None}


async def test_a_store_has_an_epoch_of_32_hex_digits(store: Store) -> None:
    assert len(bytes.fromhex(store.epoch)) == 16


async def test_a_put_is_read_back_as_it_was_written(store: Store, clock: HandClock) -> None:
    answer = await applied(
        store,
        write(Put("a", tag="t", stamp=7, label="l", body=b'{"x":1}', expires_in=9.0), a=ABSENT),
    )
    view = await store.load(["a"])
    assert view.records["a"] == answer.records["a"]
    found = view.records["a"]
    assert found is not None
    assert (found.version, found.tag, found.stamp, found.label) == (1, "t", 7, "l")
    assert found.body == b'{"x":1}'
    assert found.at == answer.now
    assert found.expires_at == pytest.approx(answer.now + 9.0)


async def test_a_put_that_names_nothing_makes_an_empty_record(store: Store) -> None:
    await store.swap(write(Put("a")))
    found = await record(store, "a")
    assert found is not None
    assert (found.version, found.tag, found.stamp, found.label) == (1, "", 0, "")
    assert (found.body, found.expires_at) == (b"", NEVER)


async def test_what_a_put_leaves_out_is_kept(store: Store) -> None:
    await store.swap(write(Put("a", tag="t", stamp=7, label="l", body=b"1", expires_in=50.0)))
    first = await record(store, "a")
    await store.swap(write(Put("a")))
    second = await record(store, "a")
    assert first is not None
    assert second is not None
    assert (second.tag, second.stamp, second.label, second.body, second.expires_at) == (
        first.tag, first.stamp, first.label, first.body, first.expires_at,
    )  # fmt: skip
    assert second.version == 2


async def test_a_change_writes_all_its_puts(store: Store) -> None:
    await store.swap(write(Put("a", tag="1"), Put("b", tag="2"), Put("c", tag="3")))
    view = await store.load("abc")
    assert [r and r.tag for r in view.records.values()] == ["1", "2", "3"]


async def test_a_put_that_does_not_bump_keeps_the_version(store: Store) -> None:
    await store.swap(write(Put("a")))
    answer = await applied(store, write(Put("a", tag="t", bump=False)))
    assert answer.records["a"] is not None
    assert answer.records["a"].version == 1
    assert answer.records["a"].tag == "t"


async def test_only_a_higher_stamp_passes_newer(store: Store) -> None:
    await store.swap(write(Put("a", stamp=6, tag="six")))
    for stamp, tag, expected in ((5, "five", "six"), (6, "again", "six"), (7, "seven", "seven")):
        await store.swap(write(Put("a", stamp=stamp, tag=tag, newer=True), Put("b", tag=tag)))
        view = await store.load("ab")
        assert view.records["a"] is not None
        assert view.records["a"].tag == expected
        assert view.records["b"] is not None
        assert view.records["b"].tag == tag, "the other puts are not held up"


async def test_newer_writes_where_nothing_stands(store: Store) -> None:
    await store.swap(write(Put("a", stamp=0, tag="t", newer=True)))
    found = await record(store, "a")
    assert found is not None
    assert found.tag == "t"


async def test_a_stamp_copies_another_keys_new_version(store: Store) -> None:
    for expected in (1, 2, 3):
        answer = await applied(store, write(Put("d"), Put("i", stamp=VersionOf("d"))))
        assert answer.records["i"] is not None
        assert answer.records["i"].stamp == expected


async def test_a_deleted_record_is_absent_and_may_be_made_again(store: Store) -> None:
    await store.swap(write(Put("a", tag="t", label="l")))
    answer = await applied(store, write(Put("a", delete=True), a=Expect(tag="t")))
    assert answer.records == {"a": None}
    assert await record(store, "a") is None
    assert isinstance(await store.swap(write(Put("a"), a=ABSENT)), Applied)


async def test_versions_go_on_above_the_floor_that_a_deletion_left(store: Store) -> None:
    for _ in range(5):
        await store.swap(write(Put("d"), Put("i", stamp=VersionOf("d"))))
    await store.swap(write(Put("d", delete=True, floor=True)))
    answer = await applied(store, write(Put("d"), Put("other")))
    assert answer.records["d"] is not None
    assert answer.records["d"].version == 6
    assert answer.records["other"] is not None
    assert answer.records["other"].version == 6


ODD_BODIES = [
    b"", b"{}", b"[]", b"null", b"1", b"1.50", b"1e400", b"-0", b"-0.0", b'"\\u00e9"',
    '"\u00e9\u2028\U0001f600"'.encode(), b'{"a":1,"a":2}', b'{"a": 1}', b"[1]\n", b"\n", b"\0",
    b"\xff\xfe\x00", b'"\\ud800"', b"123456789012345678901234567890", b"NaN", b"1,2", b"[1", b"2]",
    b'1],"bodies":[2', b'{}],"hash":"' + b"0" * 64, b"[" * 300 + b"]" * 300,
    b"[" * 252 + b"]" * 252, b"[" * 253 + b"]" * 253, b'"' + b"x" * 200_000 + b'"',
]  # fmt: skip


async def test_bodies_come_back_byte_for_byte(store: Store) -> None:
    await store.swap(write(*(Put(f"k{i}", body=body) for i, body in enumerate(ODD_BODIES))))
    view = await store.load([f"k{i}" for i in range(len(ODD_BODIES))])
    assert [r and r.body for r in view.records.values()] == ODD_BODIES


@pytest.mark.parametrize("key", ["é", "a b", 'a"b\\c', "a\nb", "\u2028", "k" * 2000, "\x7f"])
async def test_any_text_is_a_key_a_tag_and_a_label(store: Store, key: str) -> None:
    await store.swap(write(Put(key, tag=key, label=key)))
    found = await record(store, key)
    assert found is not None
    assert (found.tag, found.label) == (key, key)


# Expectations


@pytest.mark.parametrize(
    "expect",
    [Expect(), Expect(version=2), Expect(tag="t"), Expect(stamp=7), Expect(2, "t", 7)],
)
async def test_an_expectation_that_holds_lets_the_change_pass(store: Store, expect: Expect) -> None:
    await store.swap(write(Put("a", tag="t", stamp=7)))
    await store.swap(write(Put("a")))
    assert isinstance(await store.swap(write(Put("b"), a=expect)), Applied)


@pytest.mark.parametrize(
    "expect",
    [
        Expect(version=0), Expect(version=1), Expect(version=3), Expect(tag=""), Expect(tag="u"),
        Expect(stamp=0), Expect(2, "u", 7), Expect(2, "t", 8), Expect(1, "t", 7),
    ],
)  # fmt: skip
async def test_one_expectation_that_fails_refuses_the_whole_change(
    store: Store, expect: Expect
) -> None:
    await store.swap(write(Put("a", tag="t", stamp=7)))
    await store.swap(write(Put("a")))
    before = await record(store, "a")
    answer = await store.swap(write(Put("a", tag="new"), Put("b"), a=expect, c=ABSENT))
    assert isinstance(answer, View)
    assert answer.records == {"a": before, "b": None, "c": None}
    assert (await store.load("abc")).records == answer.records


@pytest.mark.parametrize("expect", [Expect(version=1), Expect(tag=""), Expect(stamp=0)])
async def test_what_is_absent_has_no_fields(store: Store, expect: Expect) -> None:
    assert isinstance(await store.swap(write(Put("b"), a=expect)), View)


async def test_the_identical_change_again_shows_ones_own_tag(store: Store) -> None:
    change = write(Put("a", tag="mine"), a=ABSENT)
    await store.swap(change)
    answer = await store.swap(change)
    assert isinstance(answer, View)
    assert answer.records["a"] is not None
    assert answer.records["a"].tag == "mine"


# Time


async def test_a_record_is_absent_from_the_instant_it_expires(
    store: Store, clock: HandClock
) -> None:
    await store.swap(write(Put("a", tag="t", label="l", expires_in=8.0)))
    clock.advance(7.5)
    assert await record(store, "a") is not None
    clock.advance(0.5)
    assert await record(store, "a") is None
    assert [view.records async for view in store.scan("l") if view.records] == []
    assert isinstance(await store.swap(write(Put("a", tag="u"), a=ABSENT)), Applied)
    found = await record(store, "a")
    assert found is not None
    assert (found.version, found.label, found.expires_at) == (1, "", NEVER)


async def test_an_expiry_can_be_renewed_and_taken_away(store: Store, clock: HandClock) -> None:
    await store.swap(write(Put("a", expires_in=8.0)))
    clock.advance(6.0)
    await store.swap(write(Put("a", expires_in=8.0, bump=False)))
    clock.advance(6.0)
    assert await record(store, "a") is not None
    await store.swap(write(Put("a", expires_in=NEVER)))
    clock.advance(1e6)
    assert await record(store, "a") is not None


async def test_the_clock_runs_with_the_engines_and_never_back(
    store: Store, clock: HandClock
) -> None:
    first = (await store.load(["a"])).now
    clock.advance(2.5)
    second = (await applied(store, write(Put("a")))).now
    assert second - first == pytest.approx(2.5)
    if not isinstance(store, MemoryStore):  # there the clock that is handed in is the promise
        clock.advance(-100)
        assert (await store.load(["a"])).now >= second


# Order


async def test_calls_take_effect_in_the_order_in_which_they_were_made(store: Store) -> None:
    calls = [store.swap(write(Put("a", tag=str(i)), a=Expect(version=i))) for i in range(50)]
    assert all(isinstance(answer, Applied) for answer in await asyncio.gather(*calls))
    seen, _, again = await asyncio.gather(
        store.load(["a"]), store.swap(write(Put("a", tag="x"))), store.load(["a"])
    )
    assert seen.records["a"] is not None
    assert seen.records["a"].tag == "49"
    assert again.records["a"] is not None
    assert again.records["a"].tag == "x"


async def test_one_of_many_racers_wins(store: Store) -> None:
    for wave in range(20):
        key = f"intent-{wave}"
        answers = await asyncio.gather(
            *(store.swap(write(Put(key, tag=str(i)), **{key: ABSENT})) for i in range(25))
        )
        assert sum(isinstance(answer, Applied) for answer in answers) == 1


async def test_racers_of_several_threads_and_loops_are_in_one_order(store: Store) -> None:
    wins: list[int] = []

    async def race(me: int) -> None:
        for i in range(50):
            answer = await store.swap(write(Put(f"k{i}", tag=str(me)), **{f"k{i}": ABSENT}))
            if isinstance(answer, Applied):
                wins.append(i)

    threads = [threading.Thread(target=lambda me=me: asyncio.run(race(me))) for me in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert sorted(wins) == list(range(50))


async def test_a_counter_gives_each_number_once(store: Store) -> None:
    answers = await asyncio.gather(
        *(
            applied(store, write(Put("d"), Put(f"i{i}", stamp=VersionOf("d")), **{f"i{i}": ABSENT}))
            for i in range(100)
        )
    )
    stamps = sorted(r.stamp for a in answers for k, r in a.records.items() if r and k != "d")
    assert stamps == list(range(1, 101))


async def test_a_cancelled_swap_leaves_the_store_usable(store: Store) -> None:
    task = asyncio.create_task(store.swap(write(Put("a", tag="t"))))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = await record(store, "a")
    assert found is None or found.tag == "t"
    assert isinstance(await store.swap(write(Put("b"))), Applied)


# Waiting


async def test_changed_returns_at_once_if_it_has_moved_on_already(store: Store) -> None:
    await store.swap(write(Put("a", tag="t")))
    await asyncio.wait_for(store.changed("a", "old", 60.0), 10)
    await asyncio.wait_for(store.changed("a", "", 60.0), 10)
    await asyncio.wait_for(store.changed("b", "t", 60.0), 10)


async def test_changed_wakes_everybody_who_waits_for_the_key(store: Store) -> None:
    await store.swap(write(Put("a", tag="t")))
    waiters = [asyncio.create_task(store.changed("a", "t", 60.0)) for _ in range(10)]
    other = asyncio.create_task(store.changed("b", "", 60.0))
    await store.load(["a"])  # behind the waiters, in order
    assert not any(waiter.done() for waiter in waiters)
    await store.swap(write(Put("a", tag="u")))
    await asyncio.wait_for(asyncio.gather(*waiters), 10)
    assert not other.done()
    await store.swap(write(Put("b", tag="t")))
    await asyncio.wait_for(other, 10)


async def test_changed_gives_up_after_its_seconds(store: Store) -> None:
    started = time.monotonic()
    await store.changed("a", "", 0.05)
    assert time.monotonic() - started >= 0.04
    await store.changed("a", "", 0.0)


async def test_a_waiter_that_is_cancelled_is_forgotten(store: Store) -> None:
    task = asyncio.create_task(store.changed("a", "", 60.0))
    await store.load(["a"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.swap(write(Put("a", tag="t")))
    await store.changed("a", "", 60.0)


async def test_a_waiter_of_another_loop_is_woken(store: Store) -> None:
    waiting = threading.Event()

    async def wait() -> None:
        task = asyncio.create_task(store.changed("a", "", 60.0))
        await store.load(["a"])
        waiting.set()
        await asyncio.wait_for(task, 10)

    thread = threading.Thread(target=lambda: asyncio.run(wait()))
    thread.start()
    await asyncio.to_thread(waiting.wait, 10)
    await store.swap(write(Put("a", tag="t")))
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


# Listing and forgetting


async def test_a_scan_gives_every_record_that_bears_the_label(store: Store) -> None:
    names = [f"k{i}" for i in range(600)]
    await store.swap(write(*(Put(name, label="l") for name in names), Put("x", label="m")))
    await store.swap(write(Put("k0", label="m"), Put("k1", delete=True)))
    found = [key async for view in store.scan("l") for key in view.records]
    assert sorted(found) == sorted(names[2:])
    assert sorted([key async for view in store.scan("m") for key in view.records]) == ["k0", "x"]
    assert [key async for view in store.scan("none") for key in view.records] == []


async def test_purge_forgets_what_expired_and_counts_it(store: Store, clock: HandClock) -> None:
    await store.swap(write(*(Put(f"k{i}", expires_in=5.0) for i in range(10)), Put("stays")))
    assert await store.purge() == 0
    clock.advance(5.0)
    assert await store.purge(4) == 4
    assert await store.purge() == 6
    assert await store.purge() == 0
    assert await record(store, "stays") is not None


async def test_peek_knows_what_was_just_written(store: Store) -> None:
    assert not store.peek("a")
    await store.swap(write(Put("a")))
    assert store.peek("a")


async def test_closing_twice_is_closing_once(store: Store) -> None:
    await store.swap(write(Put("a")))
    await store.aclose()
    await store.aclose()


# Every store does the same


KEYS = st.sampled_from(["a", "b", "c"])
EXPECTS = st.builds(
    Expect,
    version=st.none() | st.integers(0, 3),
    tag=st.none() | st.sampled_from(["", "t", "u"]),
    stamp=st.none() | st.integers(0, 2),
)
PUTS = st.builds(
    lambda key, stamp, newer, **rest: Put(
        key, stamp=stamp, newer=newer and stamp is not None, **rest
    ),
    KEYS,
    tag=st.none() | st.sampled_from(["", "t", "u"]),
    stamp=st.none() | st.integers(0, 3),
    label=st.none() | st.sampled_from(["", "l", "m"]),
    body=st.none() | st.sampled_from([b"", b"{}", b'{"x":1.0}', b"\xff"]),
    bump=st.booleans(),
    newer=st.booleans(),
    expires_in=st.none() | st.sampled_from([0.0, 1.0, 2.0, NEVER]),
    delete=st.booleans(),
    floor=st.booleans(),
)
CHANGES = st.builds(
    lambda expect, puts: Change(expect, tuple({put.key: put for put in puts}.values())),
    st.dictionaries(KEYS, st.one_of(st.just(Expect()), EXPECTS), max_size=2),
    st.lists(PUTS, max_size=3),
)
STEPS = st.lists(
    st.one_of(CHANGES, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from(["compact", "reopen"])),
    max_size=25,
)


def plain(answer: Applied | View) -> object:
    """An answer without what differs by nature: the writer, and where time began."""
    records = {
        key: record
        and (
            record.version, record.tag, record.stamp, record.label, record.body,
            round(answer.now - record.at, 3), round(record.expires_at - answer.now, 3),
        )
        for key, record in answer.records.items()
    }  # fmt: skip
    return type(answer), records


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
async def test_the_file_does_what_memory_does(
    steps: list[Change | float | str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = HandClock()
    path = tmp_path_factory.mktemp("same") / "effects.jsonl"
    memory, file = MemoryStore(clock), await FileStore.open(path, machine=HandMachine(clock))
    try:
        for step in steps:
            match step:
                case Change():
                    assert plain(await file.swap(step)) == plain(await memory.swap(step))
                case float():
                    clock.advance(step)
                case "compact":
                    await file.compact()
                case _:
                    await file.aclose()
                    file = await FileStore.open(path, machine=HandMachine(clock))
            assert plain(await file.load("abc")) == plain(await memory.load("abc"))
            for label in ("l", "m"):
                listed = [{k async for view in s.scan(label) for k in view.records}
                          for s in (file, memory)]  # fmt: skip
                assert listed[0] == listed[1]
    finally:
        await file.aclose()


@pytest.mark.parametrize("store", DATABASES, indirect=True)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
async def test_a_database_does_what_memory_does(
    store: Store, clock: HandClock, same: MemoryStore, steps: list[Change | float | str]
) -> None:
    for one in (store, same):
        await one.swap(write(*(Put(key, delete=True) for key in "abc")))
    for step in steps:
        match step:
            case Change():
                assert plain(await store.swap(step)) == plain(await same.swap(step))
            case float():
                clock.advance(step)
            case _:
                await store.purge()  # memory drops some as it goes, so counts may differ
                await same.purge()
        assert plain(await store.load("abc")) == plain(await same.load("abc"))
        for label in ("l", "m"):
            listed = [
                sorted([key async for view in one.scan(label) for key in view.records])
                for one in (store, same)
            ]
            assert listed[0] == listed[1]


async def test_a_waiter_asked_for_behind_a_write_waits_for_the_next_one(store: Store) -> None:
    wrote = asyncio.create_task(store.swap(write(Put("a", tag="t"))))  # type: ignore[arg-type]
    waiter = asyncio.create_task(store.changed("a", "t", 60.0))
    await wrote
    await store.load(["a"])
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await store.swap(write(Put("a", tag="u")))
    await asyncio.wait_for(waiter, 10)
