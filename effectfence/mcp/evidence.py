"""What the outcomes of N identical calls prove. Pure: no I/O, no clock.

**An effect that was counted** (`--observe`) outweighs everything that a server says about itself.

**Answers** are weaker, in both directions. Equal ones prove nothing: "charged" twelve times may be
one charge or twelve. Unequal ones prove that something was made anew for each call, and that is an
effect only if it was not a clock. A server that does fire once may well answer each duplicate with
other words ("already exists"), another time of day, another request id, a higher count of attempts.
So answers are compared by the *names* in them, and two answers name two effects when

* at the same place of both (one path of the structured content, one text block),
* each has a name that the other lacks ("ch_1" and "ch_1, see order 7" are one effect),
* where a name is a number, or a word with a digit in it (an id, a sequence number, a hash, a
  balance), or whatever a member called id, key, reference, url … holds,
* and no time of day, date, duration, epoch near now, request or trace id, or count of attempts or
  duplicates: those differ on every answer without any effect.

A tool that declares `readOnlyHint` is never proven by its answers: reading twice is not an effect,
and what it read may have moved. What remains is a tool that makes up a number without doing
anything (dice) and does not say that it only reads: the report shows the two values, and --observe
settles.

What the fence marks as a replay (`_meta["effectfence/replay"]`) is not an effect of its own, and
what it refuses (`effectfence/refused`) did not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

PROVEN: Final = "PROVEN DOUBLE-FIRE"
INCONCLUSIVE: Final = "INCONCLUSIVE"
ONE: Final = "one succeeded"
NOT_AGAIN: Final = "not executed again"

EXIT_CODES: Final = {ONE: 0, NOT_AGAIN: 0, PROVEN: 1, INCONCLUSIVE: 3}


class Kind(Enum):
    """How one call ended."""

    SUCCEEDED = "succeeded"
    TOOL_ERROR = "tool errors"
    RPC_ERROR = "JSON-RPC errors"
    TRANSPORT = "transport failures"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call: how it ended, and its canonical answer or, of a failure, its words."""

    kind: Kind
    answer: Any = None
    says: str = ""
    replay: bool = False
    refused: bool = False

    @property
    def fresh(self) -> bool:
        """It succeeded, and not by a record of an earlier success."""
        return self.kind is Kind.SUCCEEDED and not self.replay


@dataclass(frozen=True, slots=True)
class Observed:
    """What `--observe` printed before and after, as counts; `None` where it can't be counted."""

    before: int | None
    after: int | None
    how: str

    @property
    def effects(self) -> int | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Names:
    """How many effects the answers name, and the two values that tell two of them apart."""

    effects: int
    difference: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    because: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.name]


def outcome_of(response: Mapping[str, Any]) -> Outcome:
    """Of a whole JSON-RPC response."""
    if "error" in response:
        error = response["error"]
        words = error.get("message") if isinstance(error, dict) else error
        code = f" ({error.get('code')})" if isinstance(error, dict) else ""
        return Outcome(Kind.RPC_ERROR, says=f"{words}{code}")
    result = response.get("result")
    if not isinstance(result, dict):
        return Outcome(Kind.RPC_ERROR, says="its result is not a tool's")
    meta = result.get("_meta")
    marks = meta if isinstance(meta, dict) else {}
    replay, refused = "effectfence/replay" in marks, "effectfence/refused" in marks
    if result.get("resultType", "complete") != "complete":
        return Outcome(Kind.TOOL_ERROR, says=f"not complete: {result['resultType']}")
    if result.get("isError") is True:
        return Outcome(Kind.TOOL_ERROR, says=_words(result), refused=refused)
    return Outcome(Kind.SUCCEEDED, answer=canonical(result), replay=replay)


def canonical(result: Mapping[str, Any]) -> dict[str, Any]:
    """The answer itself: its content and structured content, without `_meta`. Text that is JSON is
    read as such."""
    blocks = result.get("content")
    answer: dict[str, Any] = {"content": [_block(block) for block in blocks or ()]}
    if "structuredContent" in result:
        answer["structuredContent"] = result["structuredContent"]
    if not isinstance(blocks, list) and "structuredContent" not in result:
        return {name: value for name, value in result.items() if name != "_meta"}
    return answer


def distinct(answers: Sequence[Any]) -> int:
    return len({json.dumps(answer, sort_keys=True) for answer in answers})


def names(answers: Sequence[Any], *, now: float) -> Names:
    """How many effects these answers name; `now` is the epoch in seconds when they came."""
    apart: list[dict[str, frozenset[str]]] = []
    difference = None
    for named in {_key(each): each for each in (_names(a, now) for a in answers)}.values():
        differences = [_differ(named, other) for other in apart]
        if all(differences):
            apart.append(named)
            difference = difference or next(iter(differences), None)
    return Names(len(apart), difference)


def counted(before: str, after: str) -> Observed:
    """Two outputs of the observing command as two counts.

    A number, when both are one line that holds just a number, or a number and a name, as of
    `wc -l FILE`. Otherwise the number of lines that are not blank.
    """
    first, second = _lone_number(before), _lone_number(after)
    if first and second and first[1] == second[1]:
        return Observed(first[0], second[0], "the number it prints")
    lines = [sum(1 for line in text.splitlines() if line.strip()) for text in (before, after)]
    if not before.strip() and second and second[0] > 1:
        how = "it printed nothing, then a number: let it print 0 when there is nothing"
        return Observed(None, None, how)
    if lines[0] == lines[1] and before != after:
        how = "its output changed, but not the number of its lines: let it print one number"
        return Observed(None, None, how)
    return Observed(lines[0], lines[1], "its lines")


def judge(
    outcomes: Sequence[Outcome], named: Names, observed: Observed | None, *, read_only: bool
) -> Verdict:
    """The verdict on all calls; what was counted comes before what was answered."""
    if observed is not None:
        return _by_the_count(outcomes, observed)
    return _by_the_answers(outcomes, named, read_only)


def _by_the_count(outcomes: Sequence[Outcome], observed: Observed) -> Verdict:
    effects = observed.effects
    ran = any(each.fresh for each in outcomes)
    if effects is None:
        return Verdict(INCONCLUSIVE, f"--observe could not be counted: {observed.how}")
    if effects < 0:
        return Verdict(INCONCLUSIVE, "--observe counted fewer after the calls than before")
    if effects > 1:
        return Verdict(PROVEN, f"{effects} effects of one action were observed")
    if effects == 1:
        return Verdict(ONE if ran else NOT_AGAIN, "1 effect was observed")
    if ran:
        doubt = "calls succeeded, and --observe saw no effect: does it look where this tool acts?"
        return Verdict(INCONCLUSIVE, doubt)
    return _nothing_ran(outcomes)


def _by_the_answers(outcomes: Sequence[Outcome], named: Names, read_only: bool) -> Verdict:
    fresh = sum(each.fresh for each in outcomes)
    unanswered = sum(each.kind is Kind.TRANSPORT for each in outcomes)
    if fresh == 0:
        return _nothing_ran(outcomes)
    if named.effects > 1 and read_only:
        return Verdict(INCONCLUSIVE, "the answers differ, but the tool declares that it only reads")
    if named.effects > 1:
        return Verdict(PROVEN, f"the answers name {named.effects} different effects of one action")
    if fresh > 1:
        equal = distinct([each.answer for each in outcomes if each.fresh]) == 1
        what = "equal answers prove nothing" if equal else "the answers differ in no name or number"
        return Verdict(INCONCLUSIVE, f"{what}: count the effects with --observe")
    if unanswered and not any(each.replay or each.refused for each in outcomes):
        return Verdict(
            INCONCLUSIVE, "one succeeded, and who got no answer may have fired: use --observe"
        )
    return Verdict(ONE, "one call ran; no other did")


def _nothing_ran(outcomes: Sequence[Outcome]) -> Verdict:
    if any(each.replay for each in outcomes):
        return Verdict(NOT_AGAIN, "answered with the result of an earlier call")
    if any(each.refused for each in outcomes):
        return Verdict(NOT_AGAIN, "the fence refused to run it again")
    if all(each.kind is Kind.TRANSPORT for each in outcomes):
        return Verdict(INCONCLUSIVE, "no call was answered")
    return Verdict(INCONCLUSIVE, "no call succeeded: does the tool accept these arguments?")


# --- the names in an answer -----------------------------------------------------------------------

_ID_KEY: Final = re.compile(
    r"(^|_)(id|ids|uuid|guid|key|ref|reference|number|url|uri|sha|hash|commit|receipt|token)$"
)
_DIFFERS_ANYWAY: Final = re.compile(
    r"(^|_)(time|timestamp|date|datetime|clock|now|at|on|since|until|expires|expiry|elapsed|took"
    r"|duration|latency|uptime|age|ttl|ms|secs?|seconds|created|updated|modified"
    r"|attempts?|retry|retries|tries|duplicates?|replays?|replayed|hits|cached"
    r"|traceparent|(request|trace|span|correlation)_(id|uuid))$"
)
_TELLS_NOTHING: Final = re.compile(
    r"""
      \d{4}-\d\d-\d\d (?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?\s?(?:Z|[+-]\d\d:?\d\d|UTC)?)?
    | \b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b
    | \b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AP]M\b)?
    | \b\d{1,2}\s(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?(?:\s\d{4})?\b
    | \b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s\d{1,2}\b(?:,?\s\d{4}\b)?
    | \b\d+(?:[.,]\d+)?\s?(?:ns|µs|us|ms|s|secs?|seconds?|mins?|minutes?|h|hours?)\b
    | \b(?:request|trace|span|correlation)[\s_-]?id\W{0,3}[\w-]+
    | \b(?:attempts?|retry|retries|try|tries|duplicates?|replays?)\W{0,3}\d+
    """,
    re.VERBOSE | re.IGNORECASE,
)
_WORD: Final = re.compile(r"[^\W_](?:[\w-]*[^\W_])?")
_EPOCH_UNITS: Final = (1, 1_000, 1_000_000, 1_000_000_000)
_A_DAY: Final = 86_400
_DEEPEST: Final = 100
"""No name is looked for below."""


def _names(answer: Any, now: float) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for path, key, leaf in _leaves(answer, "", ""):
        if not _DIFFERS_ANYWAY.search(key) and (named := _names_in(leaf, key, now)):
            found[path] = named
    return found


def _names_in(leaf: str | int | float, key: str, now: float) -> frozenset[str]:
    if _ID_KEY.search(key):
        return frozenset([str(leaf)])
    words = _WORD.findall(_TELLS_NOTHING.sub(" ", leaf)) if isinstance(leaf, str) else [str(leaf)]
    return frozenset(
        word for word in words if any(c.isdigit() for c in word) and not _is_now(word, now)
    )


def _leaves(
    value: Any, path: str, key: str, deep: int = 0
) -> Iterator[tuple[str, str, str | int | float]]:
    if deep > _DEEPEST:
        return
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{path}/{name}", _snake(name), deep + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}/{index}", key, deep + 1)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path, key, value


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _is_now(word: str, now: float) -> bool:
    try:
        number = float(word)
    except ValueError:
        return False
    return any(abs(number / unit - now) < _A_DAY for unit in _EPOCH_UNITS)


def _differ(one: dict[str, frozenset[str]], other: dict[str, frozenset[str]]) -> str | None:
    """Where each names what the other does not."""
    for path in sorted(one.keys() & other.keys(), reverse=True):  # structured content first
        mine, theirs = one[path] - other[path], other[path] - one[path]
        if mine and theirs:
            return f"{path}: {min(theirs)} and {min(mine)}"
    return None


def _key(named: dict[str, frozenset[str]]) -> frozenset[tuple[str, frozenset[str]]]:
    return frozenset(named.items())


def _block(block: Any) -> Any:
    if not isinstance(block, dict):
        return block
    kept = {name: value for name, value in block.items() if name not in ("_meta", "annotations")}
    if kept.get("type") in ("image", "audio"):
        return {"type": kept["type"]}  # pixels are no name
    text = kept.get("text")
    if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            kept["text"] = json.loads(text)
    return kept


def _words(result: Mapping[str, Any]) -> str:
    for block in result.get("content") or ():
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            return str(block["text"])
    return "an error without words"


def _lone_number(text: str) -> tuple[int, str | None] | None:
    found = re.fullmatch(r"(\d{1,18})(?:\s+(\S+))?", text.strip())
    return None if found is None else (int(found[1]), found[2])
