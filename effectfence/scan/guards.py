"""What stands between a write and its second time, by kind, as far as source shows it.

| kind | seen | holds over calls |
| --- | --- | --- |
| key | a key that the call or its content determines is passed on | yes |
| optional | a parameter of the tool, passed on where the caller gives one | only then |
| fresh | a new random id at each call | no: every call is new to the service |
| available | the client has a parameter for one, and nobody passes it | no |
| check | it looks first, and leaves if it is there | not against two at once |
| dedupe | a record of what was done, consulted before | yes |
| unique | a constraint or condition turns the second away | yes |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from effectfence.scan.ir import Block, Node
from effectfence.scan.model import Guard, Place
from effectfence.scan.tables import table
from effectfence.scan.values import (
    NOTHING,
    Const,
    Env,
    Many,
    Sym,
    Text,
    Value,
    inside,
    syms,
)
from effectfence.scan.words import words

if TYPE_CHECKING:
    from effectfence.scan.machine import Call, Machine

_KEY: Final = re.compile(
    r"idempoten|dedup|client_?request_?(?:id|token)|^x?_?request_?id$|client_?token|"
    r"client_?order_?id|client_?reference_?id|unique_?request|creation_?token|"
    r"^retry_?token$|^message_?dedup|client_?msg_?id|^txn_?id$|transaction_?key|"
    r"^nonce$|external_?id$|^invocation_?id$|^job_?id$|^correlation_?id$|caller_?reference|"
    r"^request_?token$|^x-request-id$|^uuid$|^message-?id$",
    re.I,
)
_STRONG_KEY: Final = re.compile(r"idempoten|dedup|client_?(?:request_?)?(?:token|id)", re.I)
_FRESH: Final = table(
    """uuid4 uuid1 uuid7 v4 v1 v7 randomUUID nanoid uuidv4 uuidv7 ulid token_hex token_urlsafe
    token_bytes randomBytes cuid createId random now time time_ns getRandomValues uuid ObjectId
    monotonic randint getrandbits generate_uuid urandom utcnow toISOString randrange randomInt
    hrtime Date timestamp isoformat strftime uniqueId perf_counter new_id typeid ksuid"""
)
_HASHES: Final = table(
    """sha256 sha1 md5 createHash uuid5 v5 uuid3 v3 blake2b hexdigest digest sha512 hash createHmac
    new xxhash murmurhash blake3"""
)
_PRESENT: Final = table(
    """exist exists existing existed already duplicate duplicates seen processed handled running
    done sent completed recorded present prior previous claimed active started known dup"""
)
_ABSENT: Final = table("""not missing error invalid failed failure status code no""")
_STORE: Final = table(
    """seen processed dedup dedupe deduplicated idempotent idempotency handled done sent recorded
    receipts receipt completed ledger outbox inbox journal claims claimed delivered"""
)
_CLAIMS: Final = table("""setnx claim acquire reserve insert new first""")
_NEW_KEY: Final = re.compile(
    r"(?:(?:unique|new|fresh|different|random)\b[^.\n]{0,60}\b(?:key|token|uuid|id|identifier)\b"
    r"[^.\n]{0,60}\b(?:each|every|per|for all)\b[^.\n]{0,20}\b(?:call|request|attempt|invocation|"
    r"time|retry|try|submission|use)\b)|"
    r"(?:\b(?:each|every)\b[^.\n]{0,20}\b(?:call|request|attempt|invocation|retry|time)\b[^.\n]{0,60}"
    r"\b(?:unique|new|fresh|different)\b[^.\n]{0,40}\b(?:key|token|uuid|id|identifier)\b)|"
    r"(?:\bidempotency[\s_-]*(?:key|token)\b[^.\n]{0,80}\b(?:must|should|needs? to|has to|always)\b"
    r"[^.\n]{0,40}\b(?:unique|new|fresh|different)\b)|"
    r"(?:\b(?:generate|create|use|pass|supply|provide)\b[^.\n]{0,30}\b(?:new|fresh|unique|random)\b"
    r"[^.\n]{0,40}\b(?:idempotency|dedup\w*|request)[\s_-]*(?:key|id|token)\b)|"
    r"(?:\bnever\b[^.\n]{0,20}\breuse\b[^.\n]{0,40}\b(?:key|token|request id)\b)",
    re.I,
)
_SAME_KEY: Final = re.compile(
    r"(?<!never )(?<!not )(?<!n't )\b(?:same|reuse|identical|repeat)\b[^.\n]{0,60}"
    r"\b(?:retry|retries|retrying|again|key)\b|"
    r"\bper (?:logical|order|payment|operation|action|intent)\b|"
    r"\bfor each (?:order|payment|intent)\b",
    re.I,
)


def is_key(name: str) -> bool:
    """Whether a name is one under which a call is known again: camel case, snake, header."""
    plain = "_".join(words(name)) if not name.startswith("x-") else name
    return bool(_KEY.search(name) or _KEY.search(plain))


def asks_for_new_keys(description: str) -> bool:
    """Whether a description tells the model to make its key new at every call."""
    return bool(_NEW_KEY.search(description)) and not _SAME_KEY.search(description)


# --- keys that are passed -------------------------------------------------------------------------
def of_call(machine: Machine, call: Call, kind: str, sql_guard: str) -> Iterator[Guard]:
    """The guards that a write's own arguments show, and those of the calls around it."""
    place = Place(call.file, call.line)
    if sql_guard == "unique":
        yield Guard("unique", "a conflict is turned away", place)
    elif sql_guard == "nx":
        yield Guard("unique", "set only where it is not yet", place)
    found = list(_keys_in(call))
    for name, value in found:
        judged = _kind_of_key(value, machine, strong=bool(_STRONG_KEY.search(name)))
        if judged:
            yield Guard(judged, name, place)
    if not any(_STRONG_KEY.search(name) for name, _ in found):
        yield from _available(machine)


def _keys_in(call: Call) -> Iterator[tuple[str, Value]]:
    for name, value in call.named.items():
        if is_key(name):
            yield name, value
        for inner, part in inside(value):
            if is_key(inner):
                yield inner, part
    for arg in call.args:
        for inner, part in inside(arg):
            if is_key(inner):
                yield inner, part
    seen = [name for name in call.callee.path if is_key(name)]
    for name in seen[:1]:
        yield name, UNKNOWN_KEY


UNKNOWN_KEY: Final = Sym("unknown", ("key",))


def _kind_of_key(value: Value, machine: Machine, *, strong: bool) -> str:
    if isinstance(value, Many):
        kinds = [_kind_of_key(one, machine, strong=strong) for one in value.values]
        present = [kind for kind in kinds if kind]
        if "optional" in present or len(present) < len(kinds):
            return "fresh" if set(present) == {"fresh"} else "optional" if present else ""
        if set(present) == {"fresh"}:
            return "fresh"
        if "fresh" in present:
            return "optional"
        return present[0] if present else ""
    if value == NOTHING:
        return ""
    if isinstance(value, Const):
        return "key" if strong and isinstance(value.value, str) and value.value else ""
    parts = list(syms(value))
    if not parts:
        return "key" if strong and isinstance(value, Text) else ""
    if any(set(part.path) & _HASHES for part in parts):
        return "key"
    if any(is_fresh(part) for part in parts):
        return "fresh"
    given = [part for part in parts if part.root == "input"]
    if given and any(_is_optional(machine, part) for part in given):
        return "optional"
    if given:
        return "key" if strong else ""
    return "key" if strong and all(part.root != "unknown" for part in parts) else ""


def is_fresh(sym: Sym) -> bool:
    """A value that is another one at every call."""
    if sym.root == "fresh":
        return True
    if sym.root not in ("module", "global"):
        return False
    return bool(set(sym.path) & _FRESH)


def _is_optional(machine: Machine, sym: Sym) -> bool:
    optional: set[str] = getattr(machine.listener, "optional_inputs", set())
    return bool(sym.path) and sym.path[-1] in optional


def _available(machine: Machine) -> Iterator[Guard]:
    """A function on the path takes a key, and was called without one."""
    for frame in machine.frames[1:]:
        for parameter in frame.function.parameters:
            if not _STRONG_KEY.search(parameter.name) and not is_key(parameter.name):
                continue
            value = frame.arguments.vars.get(parameter.name)
            if value is None or value == NOTHING:
                yield Guard(
                    "available", parameter.name, Place(frame.function.file, frame.function.line)
                )
                return


# --- checks before the write ----------------------------------------------------------------------
def of_test(machine: Machine, test: Node, then: Block, env: Env) -> Guard | None:
    """A condition that leaves where the thing is there already."""
    shown = _shown(test)[:60]
    named = [part for name in _names_in(test) for part in words(name)]
    place = Place(env.file, machine.line)
    if test[0] == "not":
        tried = _called(test[1])
        if (tried and set(words(tried)) & _CLAIMS and len(words(tried)) > 1) or tried == "setnx":
            return Guard("dedupe", shown, place)
        return None
    if test[0] == "cmp" and test[1] == "==" and "None" in shown:
        return None
    if test[0] == "cmp" and test[1] == "in":
        held = {part for name in _names_in(test[3]) for part in words(name)}
        return Guard("dedupe", shown, place) if held & _STORE else None
    found = set(named)
    if _called(test) in (
        "has",
        "get",
        "exists",
        "sismember",
        "contains",
        "includes",
        "sIsMember",
    ) and (found & _STORE):
        return Guard("dedupe", shown, place)
    if not found & _ABSENT and any(map(_says_present, _names_in(test))):
        return Guard("check", shown, place)
    if any(_ALREADY.search(text) for text in _texts_of(then)):
        return Guard("check", shown, place)
    return None


_ALREADY: Final = re.compile(
    r"\balready\b(?! (?:closed|disconnected|stopped|deleted|removed))", re.I
)
_BEFORE: Final = table("existing duplicate already prior previous exists exist")
_ASKING: Final = table("is has was have already been in")


def _says_present(name: str) -> bool:
    """`existing_order`, `isRunning`, `already_sent`, `was_processed`; not `processedUpdate`."""
    parts = words(name)
    if not parts:
        return False
    if parts[0] in _BEFORE:
        return True
    return parts[-1] in _PRESENT and (len(parts) == 1 or parts[0] in _ASKING or "already" in parts)


def _texts_of(block: object) -> list[str]:
    """The texts that stand in a block, as long as they are few."""
    out: list[str] = []
    stack: list[object] = [block]
    steps = 0
    while stack and steps < 400:
        steps += 1
        part = stack.pop()
        if isinstance(part, tuple):
            if len(part) == 2 and part[0] == "const" and isinstance(part[1], str):
                out.append(part[1])
            else:
                stack.extend(part)
    return out


def _called(node: Node) -> str:
    """The name of the function that a condition asks."""
    if node[0] == "call":
        return str(node[1][2] if node[1][0] == "attr" else node[1][1])
    return ""


def _names_in(node: object) -> list[str]:
    out: list[str] = []
    stack: list[object] = [node]
    while stack and len(out) < 40:
        part = stack.pop()
        if isinstance(part, tuple):
            if part and part[0] == "name" and len(part) > 1:
                out.append(str(part[1]))
            elif part and part[0] == "attr" and len(part) > 2:
                out.append(str(part[2]))
                stack.append(part[1])
            else:
                stack.extend(part[1:] if part and isinstance(part[0], str) else part)
    return out


def _shown(node: Node) -> str:
    kind = node[0]
    if kind == "name":
        return str(node[1])
    if kind == "attr":
        return f"{_shown(node[1])}.{node[2]}"
    if kind == "const":
        return repr(node[1])
    if kind == "call":
        return f"{_shown(node[1])}({', '.join(_shown(arg) for arg in node[2][:2])})"
    if kind == "not":
        return f"not {_shown(node[1])}"
    if kind == "cmp":
        return f"{_shown(node[2])} {node[1]} {_shown(node[3])}"
    if kind == "logic":
        return f"{_shown(node[2])} {node[1]} {_shown(node[3])}"
    if kind == "index":
        return f"{_shown(node[1])}[{_shown(node[2])}]"
    return "…"
