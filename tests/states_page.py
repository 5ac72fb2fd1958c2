"""Draws docs/states.md from `rules.TABLE`.

python -m tests.states_page > docs/states.md
"""

from __future__ import annotations

from collections.abc import Mapping

from effectfence.rules import TABLE, Does, State, Verb

HEAD = """\
# Every verb in every state

Drawn from `TABLE` in `effectfence/rules.py`; a test fails when this page and the code differ.
Draw it again: `python -m tests.states_page > docs/states.md`

| state | means |
| --- | --- |
| `absent` | nothing is recorded, or an operator cleared it (attempts then count on) |
| `in_flight` | somebody holds it and is presumed alive |
| `expired` | somebody holds it, but has not renewed in time |
| `unknown` | it may or may not have fired; or the process that held it is known to be dead |
| `done` | certified |

`expired` is not written down: it is how a record in flight is judged when somebody looks. The
intent's fingerprint comes first: in every state but `absent`, `prepare` for another action (other
tool, domain or args) is an `IntentConflict`.
"""

WITHOUT = """
## Without a ticket: a request, and an operator's words

"""

WITH = """
## With a ticket

*Current*: the ticket speaks for what is recorded. *Other*: it was replaced, or what it spoke for is
gone. An altered or forged ticket is an `InvalidTicket` in every state, and changes nothing.

"""

FOOT = """
## What the answers mean

"""

MEANINGS: Mapping[Does, str] = {
    Does.CLAIM: (
        "`Fresh`, if the other gates let it through: `ReadSetStale`, `CausalConflict` and "
        "`DomainRace` leave nothing behind"
    ),
    Does.TAKE_OVER: (
        'under `on_lease_expiry="takeover"` the same, as attempt + 1 with a new token; under '
        '`"fence"`, the default, the intent becomes unknown: `OutcomeUnknown`'
    ),
    Does.REPLAY: "`Replay`, also when the duplicate's read set is stale by now",
    Does.MINT: (
        "done. A commit whose read set has moved gets `CommitStale` instead, and the intent "
        "becomes unknown for good; an operator's word is not held to the read set"
    ),
    Does.SAME_CERT: "the certificate that stands; with another result `CommitConflict`",
    Does.FENCE_OFF: "the intent becomes unknown; the ticket stays current",
    Does.FREE: (
        "attempt 1: absent. A later attempt: unknown, since an earlier one may have fired. After "
        "a stale commit: `OutcomeUnknown`, since its own commit said that it ran"
    ),
    Does.RENEW: "the lease runs from now, at most to `max_hold`",
    Does.CLEAR: "absent for `prepare`; attempts and the idempotency key go on",
    Does.NOTHING: "`False`: there was nothing to clear",
    Does.IN_FLIGHT: "refused, or waits for the outcome if the caller asked to",
    Does.UNKNOWN: "refused, nothing changes",
    Does.LOST: "refused; a replaced holder's commit is kept and counted as late",
    Does.ALIVE: "refused; forced, the word is taken: settle mints, clear clears",
    Does.NO_SUCH: "refused",
}


def page() -> str:
    plain = {verb: row for verb, row in TABLE.items() if not isinstance(row[State.DONE], tuple)}
    paired = {verb: row for verb, row in TABLE.items() if verb not in plain}
    lines = [HEAD, WITHOUT, *_header(list(plain))]
    for state in State:
        lines.append(_row([f"`{state}`", *(_shown(row[state]) for row in plain.values())]))
    lines += [WITH, *_header(list(paired))]
    for state in State:
        lines.append(_row([f"`{state}`", *(_shown(row[state]) for row in paired.values())]))
    lines += [FOOT, _row(["answer", "means"]), _row(["---", "---"])]
    lines += [_row([_code(does), meaning]) for does, meaning in MEANINGS.items()]
    return "".join(lines)


def _header(verbs: list[Verb]) -> list[str]:
    return [_row(["", *(f"`{verb}`" for verb in verbs)]), _row(["---"] * (len(verbs) + 1))]


def _shown(entry: Does | tuple[Does, Does]) -> str:
    if not isinstance(entry, tuple):
        return _code(entry)
    current, other = entry
    if current is other:
        return _code(current)
    return f"current: {_code(current)}; other: {_code(other)}"


def _code(does: Does) -> str:
    """Errors are named like their class."""
    return f"`{does}`" if does.value[0].isupper() else does.value


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(page(), end="")
