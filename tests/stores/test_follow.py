"""Following a ledger, on every store: each record whose tag changed, whoever wrote it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from effectfence.errors import LedgerUnavailable
from effectfence.stores import follow as following
from effectfence.stores.contract import ABSENT, ANY, Applied, Change, Put, Store, View
from effectfence.stores.file import FileStore
from effectfence.stores.follow import follow


async def put(store: Store, key: str, tag: str, label: str = "l", body: bytes = b"1") -> None:
    change = Change({key: ANY}, (Put(key, tag=tag, label=label, body=body),))
    assert isinstance(await store.swap(change), Applied)


class Followed:
    """Goes on for as long as the test asks; `begun` returns once it surely follows."""

    def __init__(self, store: Store) -> None:
        self.views: AsyncIterator[View] = follow(store, ("l",))
        self.seen: list[tuple[str, str]] = []
        self._next: asyncio.Future[View] | None = None

    async def begun(self, store: Store) -> None:
        for number in range(10_000):
            await put(store, "first", f"t{number}")
            if await self._one(0.05):
                await self._rest(("first", f"t{number}"))
                return
        raise AssertionError("it never began")

    async def until(self, wanted: tuple[str, str]) -> list[tuple[str, str]]:
        self.seen.clear()
        await self._rest(wanted)
        return self.seen

    async def _rest(self, wanted: tuple[str, str]) -> None:
        while wanted not in self.seen:
            assert await self._one(30), self.seen

    async def _one(self, seconds: float) -> bool:
        if self._next is None:
            self._next = asyncio.ensure_future(_awaited(anext(self.views)))
        await asyncio.wait((self._next,), timeout=seconds)
        if not self._next.done():
            return False
        view, self._next = self._next.result(), None
        self.seen += [(k, r.tag) for k, r in view.records.items() if r is not None]
        return True

    async def end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._next
        await self.views.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _awaited(view: Awaitable[View]) -> View:
    return await view


@pytest.fixture
async def followed(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.01)
    followed = Followed(store)
    await followed.begun(store)
    yield followed
    await followed.end()


async def test_who_follows_is_shown_what_is_written(store: Store, followed: Followed) -> None:
    await put(store, "a", "t1")
    assert await followed.until(("a", "t1")) == [("a", "t1")]
    await put(store, "a", "t2")
    assert await followed.until(("a", "t2")) == [("a", "t2")]


async def test_other_labels_and_renewals_are_not_shown(store: Store, followed: Followed) -> None:
    await put(store, "other", "t1", label="another")
    await put(store, "a", "t1")
    await followed.until(("a", "t1"))
    await put(store, "a", "t1", body=b"renewed")
    await put(store, "b", "t1")
    assert await followed.until(("b", "t1")) == [("b", "t1")]


async def test_a_refused_swap_shows_nothing(store: Store, followed: Followed) -> None:
    await put(store, "a", "t1")
    await followed.until(("a", "t1"))
    refused = Change({"a": ABSENT}, (Put("a", tag="t2", label="l"), Put("c", tag="t2", label="l")))
    assert isinstance(await store.swap(refused), View)
    await put(store, "b", "t1")
    assert await followed.until(("b", "t1")) == [("b", "t1")]


# A file, and those who share it


async def test_another_stores_writes_are_shown(ledger: Path) -> None:
    mine, other = await FileStore.open(ledger), await FileStore.open(ledger)
    followed = Followed(mine)
    await followed.begun(other)
    for number in range(3):
        await put(other, f"theirs-{number}", "t")
        await put(mine, f"mine-{number}", "t")
    wanted = {(f"{who}-{number}", "t") for who in ("theirs", "mine") for number in range(3)}
    seen = set(await followed.until(("mine-2", "t")))
    while seen != wanted:
        assert await followed._one(30)
        seen |= set(followed.seen)
    await followed.end()
    await mine.aclose()
    await other.aclose()


async def test_a_compaction_by_another_store_hides_nothing_and_repeats_nothing(
    ledger: Path,
) -> None:
    mine, other = await FileStore.open(ledger), await FileStore.open(ledger)
    await put(other, "old", "t")
    followed = Followed(mine)
    await followed.begun(other)
    await put(other, "before", "t")
    await other.compact()
    await put(other, "after", "t")
    seen = await followed.until(("after", "t"))
    assert set(seen) == {("before", "t"), ("after", "t")}
    await followed.end()
    await mine.aclose()
    await other.aclose()


async def test_who_stops_following_is_forgotten(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    followed = Followed(store)
    await followed.begun(store)
    await followed.end()
    await put(store, "a", "t1")
    await put(store, "b", "t1")
    assert not store._followers
    await store.aclose()


async def test_following_ends_with_the_store(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    followed = Followed(store)
    await followed.begun(store)
    waiting = asyncio.ensure_future(_awaited(anext(followed.views)))
    await put(store, "a", "t1")
    assert (await waiting).records.keys() == {"a"}
    waiting = asyncio.ensure_future(_awaited(anext(followed.views)))
    await asyncio.sleep(0)
    await store.aclose()
    with pytest.raises(LedgerUnavailable, match="closed"):
        await waiting
