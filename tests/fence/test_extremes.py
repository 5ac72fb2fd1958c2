"""Whatever was accepted once can be read again: by this process, by another, after a restart."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effectfence import EffectFence, EffectRequest, Fresh, Replay
from effectfence.canonical import MAX_DEPTH

NUMBERS = (2**64, -(2**200), 2**53 + 1, 1e16, 1e-7, 1e21, 5, 0.1, -0.0)


def nested(leaf: Any, depth: int, *, lists: bool) -> Any:
    for _ in range(depth):
        leaf = [leaf] if lists else {"a": leaf}
    return leaf


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    leaf=st.sampled_from(NUMBERS),
    depth=st.sampled_from([0, 1, 61, 62, 63, MAX_DEPTH - 1]),
    result_depth=st.sampled_from([0, 63, MAX_DEPTH]),
    lists=st.booleans(),
)
async def test_what_was_accepted_is_read_again_after_a_restart(
    leaf: Any, depth: int, result_depth: int, lists: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ledger = Path(tmp_path_factory.mktemp("ledger")) / "l.jsonl"
    request = EffectRequest(
        intent="i", domain="d", tool="t", args={"x": nested(leaf, depth, lists=lists)}, agent="a"
    )
    async with EffectFence.open(ledger) as fence:
        admission = await fence.prepare(request)
        assert isinstance(admission, Fresh)
        async with EffectFence.open(ledger) as other:
            assert await other.lookup("i") is not None
        result = nested(leaf, result_depth, lists=lists)
        cert = await fence.commit(admission.prepared, result)
        assert cert.verify()
    async with EffectFence.open(ledger) as fence:
        replay = await fence.prepare(request)
        assert isinstance(replay, Replay)
        assert replay.cert.hash == cert.hash
        assert replay.cert.result == result
        assert replay.cert.verify()
