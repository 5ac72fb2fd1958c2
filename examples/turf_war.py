"""Three agents react to one latency spike, and fight over one cluster.

    python -m examples.turf_war

The autoscaler scales the node pool up. The cost optimizer wants to scale it down, for a reading
that the scale-up has made old. The deploy bot wants to roll back, and never looked at what the
others did. Each is right for what it saw; all three together wreck the cluster. Nothing here
decides anything: the agents observe and ask, and what is printed is what the fence said.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from effectfence import (
    CausalConflict,
    EffectCert,
    EffectFence,
    EffectRequest,
    FenceConfig,
    ReadSetStale,
    Refused,
    VectorClock,
)

CLUSTER = "cluster:prod-us-east-1"
METRICS = "metrics:prod-us-east-1"

ran: list[str] = []  # what really reached the cluster


async def kubectl(command: str) -> dict[str, Any]:
    ran.append(command)
    return {"applied": command}


async def propose(fence: EffectFence, title: str, request: EffectRequest) -> EffectCert | Refused:
    """One agent asks; print what it was told."""
    print(f"{title}\n  proposes: kubectl {request.args['command']}")
    try:
        cert = await fence.run(request, kubectl, request.args["command"])
    except Refused as refused:
        print(f"  REFUSED before kubectl ran: {refused}\n")
        return refused
    print(f"  ADMITTED and run, as seq {cert.seq} of {cert.domain}.")
    print(f"  certificate {cert.hash[:16]}…, verify() -> {cert.verify()}\n")
    return cert


async def turf_war() -> bool:
    """Whether the fence said what this example is there to show."""
    async with EffectFence.open("memory:", FenceConfig(causal="strict")) as fence:
        before = await fence.observe(METRICS, CLUSTER)  # the spike, as two of the agents see it

        scale_up = await propose(
            fence,
            "Agent A (autoscaler): scale the node pool UP",
            EffectRequest(
                intent="scale-up:prod-us-east-1:spike-1",
                domain=CLUSTER,
                tool="kubectl",
                args={"command": "scale nodepool/workers --replicas=12"},
                agent="autoscaler",
                read_set=before.read_set,
                known_clock=before.clock,
            ),
        )
        await fence.reserve(METRICS, 0)  # monitoring publishes a reading with the new nodes in it

        scale_down = await propose(
            fence,
            "Agent B (cost-optimizer): scale the same pool DOWN",
            EffectRequest(
                intent="scale-down:prod-us-east-1:idle-1",
                domain=CLUSTER,
                tool="kubectl",
                args={"command": "scale nodepool/workers --replicas=2"},
                agent="cost-optimizer",
                read_set=before.read_set,
                known_clock=before.clock,
            ),
        )

        now = await fence.observe(METRICS)  # fresh, but of the metrics alone
        own_view = VectorClock(now.clock)
        own_view.tick("deploy-bot")
        roll_back = await propose(
            fence,
            "Agent C (deploy-bot): roll the deployment BACK",
            EffectRequest(
                intent="rollback:prod-us-east-1:release-42",
                domain=CLUSTER,
                tool="kubectl",
                args={"command": "rollout undo deployment/api"},
                agent="deploy-bot",
                read_set=now.read_set,
                known_clock=own_view,
            ),
        )
        await show_views(fence, own_view)
        print(f"Actions proposed: {fence.stats().total}   executed: {len(ran)}")
        print(fence.stats().log_line())

    return (
        isinstance(scale_up, EffectCert)
        and scale_up.verify()
        and isinstance(scale_down, ReadSetStale)
        and (scale_down.expected, scale_down.actual) == (0, 1)
        and isinstance(roll_back, CausalConflict)
        and ran == ["scale nodepool/workers --replicas=12"]
    )


async def show_views(fence: EffectFence, view: VectorClock) -> None:
    head = (await fence.observe(CLUSTER)).clock
    print(f"  the cluster's last effect: {head}   deploy-bot's view: {view}")
    print(f"  concurrent: {view.concurrent(head)}\n")


if __name__ == "__main__":
    if not asyncio.run(turf_war()):
        sys.exit("the fence did not say what this example is there to show")
