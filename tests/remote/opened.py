"""A fence that a test leaves without waiting for what it still holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from effectfence import EffectFence, FenceConfig


@asynccontextmanager
async def opened(url: str, **config: Any) -> AsyncIterator[EffectFence]:
    fence = await EffectFence.open(url, FenceConfig(**config))
    try:
        yield fence
    finally:
        await fence.aclose(drain_seconds=0)
