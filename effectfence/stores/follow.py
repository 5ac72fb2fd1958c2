"""Following a ledger: the records that anybody writes, as they are written.

A store that knows of others' writes has a `follow` of its own (see `contract.Follows`); any other
is looked through again and again. Invariants:

1. What is shown is durable, and was written after the following began; each of a record's states
   that lasts is shown, of several in quick succession perhaps the last alone.
2. A renewal is no change: what is shown has a new tag.
3. Looking through a ledger takes at most a tenth of the time, however large it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import Final

from effectfence.stores.contract import Follows, Record, Store, View

_LOOK_SECONDS: Final = 0.5
_REST: Final = 9.0
"""Seconds of rest for each second of looking."""


async def follow(store: Store, labels: Collection[str]) -> AsyncIterator[View]:
    """Views of records that bear one of `labels` and were written from now on."""
    if isinstance(store, Follows):
        async for view in store.follow():
            found = {k: r for k, r in view.records.items() if r is not None and r.label in labels}
            if found:
                yield View(view.now, dict(found), view.gone.intersection(found))
        return
    seen: dict[str, str] | None = None
    while True:
        began = time.monotonic()
        tags: dict[str, str] = {}
        for label in labels:
            async for view in store.scan(label):
                fresh = _fresh(view, seen, tags)
                if fresh:
                    yield View(view.now, dict(fresh), view.gone.intersection(fresh))
        seen = tags
        await asyncio.sleep(max(_LOOK_SECONDS, _REST * (time.monotonic() - began)))


def _fresh(view: View, seen: dict[str, str] | None, tags: dict[str, str]) -> dict[str, Record]:
    """What of the view was not there at the last look; `tags` learns what is there now."""
    fresh = {}
    for key, record in view.records.items():
        if record is not None:
            mark = record.tag or str(record.version)
            if seen is not None and seen.get(key) != mark:
                fresh[key] = record
            tags[key] = mark
    return fresh
