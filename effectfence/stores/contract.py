"""What a store must do: compare some records and, if all hold, write others, as one step.

A store keeps *records* under keys and knows nothing of intents, leases or certificates. Everything
the fence needs is one operation, `swap`; the rules that use it live in `effectfence.rules`.

Promises, kept by every store and checked by one conformance suite (`tests/stores`):

1.  One instant. A `swap` sees all its expectations and writes all its puts at one instant, and
    those instants are in one order for everybody (linearizable). A `View` shows one instant.
2.  All or nothing. A refused swap leaves nothing behind, not even a row for a compared key.
3.  Durable first. Whatever a method returns, a refusal's view too, can no longer be lost by what
    this engine promises to survive.
4.  `version` starts above the store's floor and grows by one with every bumping put. A key that
    is absent, deleted or expired reads as version 0. Deleting with `floor=True` raises the floor
    to the deleted version, so no (key, version) is issued twice.
5.  `tag` is opaque, kept unless a put names one; `body` comes back byte for byte.
6.  `stamp` may copy another key's *new* version out of the same change (`VersionOf`).
7.  `at` is the store's own time of the last put; `now` is the same clock. It never goes back.
8.  An expired record is absent, for every purpose, from the instant `expires_at` on.
9.  In order. Calls on one store object take effect in the order they were made.
10. Cancelled, a swap may still be applied; undoing it is the caller's work. Sending the identical
    change again is safe: the view then bears the caller's own tag.
11. `LedgerUnavailable` with `ran=False` means that nothing was written, with `ran=None` that it may
    have been.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

NEVER: Final = math.inf
"""`Put.expires_in` of a record that stays."""


@dataclass(slots=True)
class Record:
    """What stands under a key. Never changed in place: a put makes a new one."""

    version: int
    tag: str
    stamp: int
    at: float
    label: str
    body: bytes
    expires_at: float = NEVER
    writer: str = ""


@dataclass(slots=True)
class Expect:
    """Equality on the fields given; `Expect()` compares nothing but still locks the key."""

    version: int | None = None
    tag: str | None = None
    stamp: int | None = None

    def holds(self, record: Record | None) -> bool:
        if record is None:
            return not self.version and self.tag is None and self.stamp is None
        return (
            (self.version is None or self.version == record.version)
            and (self.tag is None or self.tag == record.tag)
            and (self.stamp is None or self.stamp == record.stamp)
        )


ABSENT: Final = Expect(version=0)
ANY: Final = Expect()


@dataclass(slots=True)
class VersionOf:
    """A stamp to be copied from the new version of `key`, put earlier in the same change."""

    key: str


@dataclass(slots=True)
class Put:
    """One write. `None` keeps what stands (a new record gets `""`, 0, `b""`, never expires)."""

    key: str
    tag: str | None = None
    stamp: int | VersionOf | None = None
    label: str | None = None
    body: bytes | None = None
    bump: bool = True
    newer: bool = False
    """Skip this one put unless its stamp is higher than the one that stands."""
    expires_in: float | None = None
    """Seconds from the store's now; `NEVER`; `None` keeps."""
    delete: bool = False
    floor: bool = False
    """With `delete`: versions of records made later start above the deleted one."""


@dataclass(slots=True)
class Change:
    expect: Mapping[str, Expect]
    puts: tuple[Put, ...]


@dataclass(slots=True)
class View:
    """Records of one instant; a key that is asked for and absent maps to `None`.

    `gone` names the keys whose last writer's process is known to be dead (file ledger only).
    """

    now: float
    records: dict[str, Record | None]
    gone: frozenset[str] = frozenset()


@dataclass(slots=True)
class Applied:
    """The change was written; `records` holds what each put left (`None`: deleted)."""

    now: float
    records: dict[str, Record | None] = field(default_factory=dict)


class Store(Protocol):
    """See the promises at the head of this file."""

    epoch: str
    """32 hex digits, new with every ledger; every token begins with it."""

    name: str
    """For messages: a path, `memory:`, or a URL without credentials."""

    durable: bool
    """Whether what is recorded outlives this process."""

    def peek(self, key: str) -> bool:
        """Whether something probably stands under `key`: a hint from memory alone, maybe stale.

        It saves the work of a hopeful change where a duplicate is likely; nothing rests on it.
        """
        ...

    async def load(self, keys: Iterable[str]) -> View:
        """The records under `keys`."""
        ...

    async def swap(self, change: Change) -> Applied | View:
        """Write `change.puts` if every expectation holds, else give what is there instead.

        The view holds every key the change names, expected or put.
        """
        ...

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        """Return as soon as `key` no longer bears `tag`, its writer died, or `seconds` passed.

        Level, not edge: if it has moved on already, returns at once (`""` stands for absent).
        """
        ...

    def scan(self, label: str) -> AsyncIterator[View]:
        """All records that bear `label`, in pages, each page of one instant."""
        ...

    async def purge(self, limit: int = 1000) -> int:
        """Forget up to `limit` expired records; how many went."""
        ...

    async def aclose(self) -> None:
        """Finish what was begun and let go of files, threads and connections; idempotent."""
        ...


@runtime_checkable
class Follows(Protocol):
    """What a store may add that learns of others' writes; `stores.follow` does it for the rest."""

    def follow(self) -> AsyncIterator[View]:
        """Records whose tag changed, of anybody's writing, as soon as they are durable. Of several
        changes of one record in quick succession the last may be all that is shown."""
        ...
