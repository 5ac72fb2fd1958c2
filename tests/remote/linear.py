"""Whether what callers were told of one intent has an order in which it is all true.

Each operation has a beginning and an end; somewhere in between it must have taken effect, at once.
The search is that of Wing and Gong, with a memory: try every operation that may come next.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE, HELD, DONE, UNKNOWN = "free", "held", "done", "unknown"
_GHOST = "\0"
"""The holder of a claim whose caller never heard of it."""

State = tuple[str, str]


@dataclass(frozen=True)
class Op:
    began: int
    ended: int
    told: str
    """fresh, replay, in_flight, unknown, committed; or nothing: whether it took effect is open"""
    value: str = ""
    """The ticket of a fresh one; the certificate of a replay; both of a commit, by a space."""


def linearizable(ops: list[Op]) -> bool:
    """A call that ended in the ledger's absence may have claimed, and been undone, at any time."""
    told = sorted((op for op in ops if op.told), key=lambda op: op.began)
    ghosts = any(not op.told for op in ops)
    everything = (1 << len(told)) - 1
    seen: set[tuple[int, State]] = set()
    open_ends: list[tuple[int, State]] = [(0, (FREE, ""))]
    while open_ends:
        done, state = open_ends.pop()
        if done == everything:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        left = [n for n in range(len(told)) if not done >> n & 1]
        horizon = min(told[n].ended for n in left)
        for possible in _drift(state) if ghosts else (state,):
            for n in left:
                if told[n].began > horizon:
                    break
                after = _apply(told[n], possible)
                if after is not None:
                    open_ends.append((done | 1 << n, after))
    return False


def _drift(state: State) -> tuple[State, ...]:
    """Where claims that nobody heard of may have led meanwhile."""
    if state[0] == FREE or state == (HELD, _GHOST):
        return ((FREE, ""), (HELD, _GHOST), (UNKNOWN, ""))
    return (state,)


def _apply(op: Op, state: State) -> State | None:
    kind, what = state
    match op.told:
        case "fresh":
            return (HELD, op.value) if kind == FREE else None
        case "replay":
            return state if state == (DONE, op.value) else None
        case "in_flight":
            return state if kind == HELD else None
        case "unknown":
            return state if kind == UNKNOWN else None
        case "committed":
            ticket, digest = op.value.split()
            if (kind, what) in ((HELD, ticket), (DONE, digest)):
                return DONE, digest
            return None
    raise AssertionError(op.told)
