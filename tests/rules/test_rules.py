"""Every verb in every state under every condition, against what PROTOCOL says in words.

`expected_of` and its helpers were written from the protocol's text and never look at `rules.TABLE`.
A `World` is one intent's records in a bare table: no fence, no loop, no clock but the test's own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from effectfence import (
    CommitConflict,
    EffectRequest,
    FenceConfig,
    HolderAlive,
    OutcomeUnknown,
    ReadSetEntry,
    VectorClock,
    claims,
    records,
    rules,
)
from effectfence.models import UNRECORDED
from effectfence.rules import Does, State, Verb
from effectfence.stores.contract import NEVER, Record, View
from effectfence.stores.table import Table

LEASE = 10.0
CONFIG = FenceConfig(lease_ttl=LEASE, result_ttl=1000.0, history_ttl=5000.0)
INTENT, DOMAIN, FACT = "intent/i", "domain/d", "domain/fact"
RESULT = claims.Result(b'{"ok":true}', {"ok": True})
OTHER_RESULT = claims.Result(b'{"ok":false}', {"ok": False})
OPERATOR = records.Word("history/word", "ops", "looked at the provider's log")

STANDS = (
    "absent",
    "cleared",
    "in_flight",
    "expired",
    "unknown",
    "unknown, its commit was stale",
    "in_flight, its process gone",
    "expired, its process gone",
    "unknown, its process gone",
    "done",
)
TICKETS = ("current", "replaced", "forged", "renumbered")


def request_of(**fields: Any) -> EffectRequest:
    base: dict[str, Any] = {
        "intent": "i",
        "domain": "d",
        "tool": "charge",
        "args": {"n": 1},
        "agent": "a",
    }
    return EffectRequest(**{**base, **fields})


class World:
    """One intent, its domain, and one fact that it was decided on."""

    def __init__(self) -> None:
        self.table = Table()
        self.now = 0.0
        self.gone: frozenset[str] = frozenset()
        self._nonce = itertools.count()

    def view(self, *keys: str) -> View:
        names = dict.fromkeys((INTENT, DOMAIN, FACT, "domain/other", *keys))
        return View(self.now, self.table.view(names, self.now), self.gone)

    def offer(self) -> claims.Offer:
        number = next(self._nonce)
        return claims.Offer(f"{number:064x}", f"key-{number}", 1_000 + number)

    def apply(self, decision: rules.Decision) -> rules.Answer:
        if decision.change is not None:
            assert self.table.holds(decision.change, self.now), "decided on what is not there"
            self.table.write(decision.change, self.now)
        return decision.answer

    def prepare(
        self, claim: claims.Claim, config: FenceConfig = CONFIG, opens: Any = ()
    ) -> rules.Answer:
        return self.apply(rules.prepare(self.view(), claim, self.offer, config, opens))

    def admit(self, claim: claims.Claim) -> tuple[claims.Holder, int]:
        answer = self.prepare(claim)
        assert isinstance(answer, rules.Admit)
        return answer.holder, self.record().stamp

    def move(self, domain_key: str) -> None:
        found = self.table.get(domain_key, self.now)
        self.table.write(rules.reserve(domain_key, 0 if found is None else found.version), self.now)

    def record(self) -> Record:
        record = self.table.get(INTENT, self.now)
        assert record is not None
        return record

    def words(self) -> list[dict[str, Any]]:
        return [
            json.loads(self.table.records[k].body) for k in self.table.labels.get("history", ())
        ]

    def stands(self) -> str:
        """What anybody would find now, read off the record itself."""
        record = self.table.get(INTENT, self.now)
        if record is None:
            return "absent"
        body = json.loads(record.body)
        if record.label in ("cleared", "done"):
            return record.label
        assert record.label == "open"
        if body["state"] == "unknown":
            return "unknown"
        return "in_flight" if record.at + body["lease"] > self.now else "expired"


@dataclass
class Case:
    """A world in one state, and the two tickets that ever were in it."""

    world: World
    claim: claims.Claim
    holder: claims.Holder
    seq: int
    replaced: tuple[claims.Holder, int]

    def ticket(self, which: str) -> tuple[claims.Holder, int]:
        if which == "replaced":
            return self.replaced
        if which == "renumbered":
            return self.holder, self.seq + 100
        if which == "forged":
            forged = rules.holder_of(
                self.claim,
                attempt=self.holder.attempt,
                token="f" * 64,
                idempotency_key=self.holder.idempotency_key,
                started_ms=self.holder.started_ms,
            )
            return forged, self.seq
        return self.holder, self.seq


def made(stands: str, attempt: int, *, policy: str = "fence") -> Case:
    """A world brought into a state by the verbs themselves."""
    world = World()
    world.move(FACT)
    claim = claims.claim_of(
        request_of(read_set=(ReadSetEntry(domain="fact", seq=1),), on_lease_expiry=policy), CONFIG
    )
    earlier = world.admit(claim)
    if attempt == 1:  # the earlier ticket certainly did not run
        released = rules.release(world.view(), claim, *earlier, "refused", CONFIG, "history/0")
        world.apply(released)
    else:
        word = records.Word("history/0", "ops", "did not run", forced=True)
        world.apply(rules.clear(world.view(), "i", INTENT, word, CONFIG))
    holder, seq = world.admit(claim)
    assert holder.attempt == attempt
    case = Case(world, claim, holder, seq, earlier)
    if stands.startswith("unknown, its commit was stale"):
        moved = world.table.get(FACT, world.now)
        world.move(FACT)
        world.apply(rules.commit(world.view(), claim, holder, seq, RESULT, CONFIG))
        assert moved is not None
        world.table.put(FACT, moved)  # the mark must do, even where the facts look fresh again
    elif stands.startswith("unknown"):
        world.apply(rules.abort(world.view(), claim, holder, seq, "socket closed", CONFIG))
    elif stands == "done":
        world.apply(rules.commit(world.view(), claim, holder, seq, RESULT, CONFIG))
    elif stands in ("absent", "cleared"):
        forced = records.Word("history/1", "ops", "did not run", forced=True)
        world.apply(rules.clear(world.view(), "i", INTENT, forced, CONFIG))
        if stands == "absent":
            world.table.put(INTENT, None)
    elif stands.startswith("expired"):
        world.now += LEASE
    if stands.endswith("gone"):
        world.gone = frozenset({INTENT})
    return case


@dataclass(frozen=True)
class Outcome:
    """What the caller is told, and where the intent stands afterwards."""

    told: str
    stands: str
    holder: str = "the same"
    word: str | None = None


def told(answer: rules.Answer) -> str:
    if isinstance(answer, rules.Refuse | rules.Late):
        return type(answer.error).__name__
    return type(answer).__name__


def outcome(case: Case, answer: rules.Answer, words_before: int) -> Outcome:
    record = case.world.table.get(INTENT, case.world.now)
    words = case.world.words()[words_before:]
    assert len(words) <= 1
    return Outcome(
        told(answer),
        case.world.stands(),
        "the same" if record is None or record.tag[2:66] == case.holder.seal else "another",
        words[0]["word"] if words else None,
    )


# --- what the protocol says -----------------------------------------------------------------------


def untouched(stands: str) -> str:
    """The state as it is written down, whatever is known about its process."""
    return stands.split(",")[0]


def judged(stands: str) -> str:
    """The state as it is judged: a dead holder's intent is unknown at once."""
    return "unknown" if stands.endswith("gone") else untouched(stands)


def expected_prepare(
    stands: str, *, policy: str, same_action: bool, facts: str, own: str
) -> Outcome:
    now, before = judged(stands), untouched(stands)
    if now not in ("absent", "cleared"):
        if not same_action:
            return Outcome("IntentConflict", before)
        if now == "done":
            return Outcome("Replayed", "done")
        if now == "unknown":
            return Outcome("OutcomeUnknown", "unknown")
        if now == "in_flight":
            return Outcome("IntentInFlight", "in_flight")
        if policy == "fence":
            return Outcome("OutcomeUnknown", "unknown")
    if facts == "stale":
        return Outcome("ReadSetStale", before)
    if own == "stale":
        return Outcome("DomainRace", before)
    return Outcome("Admit", "in_flight", "another")


def refused_ticket(stands: str, ticket: str) -> Outcome | None:
    """Only the holder of the current token speaks for the intent."""
    before = untouched(stands)
    if before == "absent":
        return Outcome("LeaseLost", "absent")
    if ticket == "replaced":
        return Outcome("LeaseLost", before)
    if ticket in ("forged", "renumbered"):
        if before == "cleared" and ticket == "renumbered":
            return Outcome("LeaseLost", before)
        return Outcome("InvalidTicket", before)
    return Outcome("LeaseLost", before) if before == "cleared" else None


def expected_commit(stands: str, *, ticket: str, facts: str, same_result: bool) -> Outcome:
    refused = refused_ticket(stands, ticket)
    if refused is not None:
        replaced = refused.told == "LeaseLost" and refused.stands != "absent"
        return Outcome(
            refused.told, refused.stands, refused.holder, "late commit" if replaced else None
        )
    if stands == "done":
        return Outcome("Certify" if same_result else "CommitConflict", "done")
    if facts == "stale" or "commit was stale" in stands:
        return Outcome("CommitStale", "unknown")
    return Outcome("Certify", "done")


def expected_abort(stands: str, *, ticket: str) -> Outcome:
    if refused := refused_ticket(stands, ticket):
        return refused
    if stands == "done":
        return Outcome("LeaseLost", "done")
    if judged(stands) == "unknown":
        return Outcome("OutcomeUnknown", untouched(stands))
    return Outcome("Said", "unknown")


def expected_release(stands: str, *, ticket: str, attempt: int) -> Outcome:
    if refused := refused_ticket(stands, ticket):
        return refused
    if stands == "done":
        return Outcome("LeaseLost", "done")
    if "commit was stale" in stands:
        return Outcome("OutcomeUnknown", "unknown")
    return Outcome("Said", "absent" if attempt == 1 else "unknown", word="release")


def expected_heartbeat(stands: str, *, ticket: str) -> Outcome:
    if refused := refused_ticket(stands, ticket):
        return refused
    if stands == "done":
        return Outcome("LeaseLost", "done")
    if judged(stands) == "unknown":
        return Outcome("OutcomeUnknown", untouched(stands))
    return Outcome("Said", "in_flight")


def expected_settle(stands: str, *, forced: bool, same_result: bool) -> Outcome:
    now = judged(stands)
    if now in ("absent", "cleared"):
        return Outcome("NoSuchIntent", now)
    if now == "done":
        return Outcome("Certify" if same_result else "CommitConflict", "done")
    if now == "in_flight" and not forced:
        return Outcome("HolderAlive", "in_flight")
    return Outcome("Certify", "done", word="settle")


def expected_clear(stands: str, *, forced: bool) -> Outcome:
    now = judged(stands)
    if now in ("absent", "cleared"):
        return Outcome("Said", now)
    if now in ("in_flight", "done") and not forced:
        return Outcome("HolderAlive", untouched(stands))
    return Outcome("Said", "cleared", word="clear")


# --- the walk -------------------------------------------------------------------------------------


def conditions(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


EITHER = (True, False)
FACTS = ("fresh", "stale")


@pytest.mark.parametrize("stands", STANDS)
def test_prepare_does_what_the_protocol_says(stands: str) -> None:
    for given in conditions(
        policy=("fence", "takeover"),
        same_action=EITHER,
        facts=FACTS,
        own=("unnamed", "fresh", "stale"),
        attempt=(1, 2),
    ):
        attempt = given.pop("attempt")
        case = made(stands, attempt, policy=given["policy"])
        world = case.world
        domain = world.table.get(DOMAIN, world.now)
        assert domain is not None
        facts = [ReadSetEntry(domain="fact", seq=1 if given["facts"] == "fresh" else 7)]
        if given["own"] != "unnamed":
            stale_by = 0 if given["own"] == "fresh" else 1
            facts.append(ReadSetEntry(domain="d", seq=domain.version - stale_by))
        asked = claims.claim_of(
            request_of(
                read_set=tuple(facts),
                args={"n": 1 if given["same_action"] else 2},
                on_lease_expiry=given["policy"],
            ),
            CONFIG,
        )
        words, record = len(world.words()), world.table.get(INTENT, world.now)
        answer = world.prepare(asked)
        assert outcome(case, answer, words) == expected_prepare(stands, **given), (given, attempt)
        if isinstance(answer, rules.Admit):
            inherits = record is not None
            assert answer.holder.attempt == (attempt + 1 if inherits else 1)
            same_key = answer.holder.idempotency_key == case.holder.idempotency_key
            assert same_key is (inherits and given["same_action"])
            assert world.record().stamp == domain.version + 1
        elif not isinstance(answer, rules.Replayed):
            after = world.table.get(DOMAIN, world.now)
            assert after == domain, "a refused attempt takes no number"


@pytest.mark.parametrize("stands", STANDS)
def test_the_hopeful_claim_is_taken_only_where_the_gates_would_admit(stands: str) -> None:
    for given in conditions(facts=FACTS, own=("unnamed", "fresh", "stale")):
        case = made(stands, 1)
        domain = case.world.table.get(DOMAIN, case.world.now)
        assert domain is not None
        facts = [ReadSetEntry(domain="fact", seq=1 if given["facts"] == "fresh" else 7)]
        if given["own"] != "unnamed":
            seq = domain.version - (given["own"] == "stale")
            facts.append(ReadSetEntry(domain="d", seq=seq))
        asked = claims.claim_of(request_of(read_set=tuple(facts)), CONFIG)
        change = rules.claim(asked, case.world.offer()).change
        assert change is not None
        taken = case.world.table.holds(change, case.world.now)
        assert taken is (stands == "absent" and "stale" not in given.values()), given


@pytest.mark.parametrize("stands", STANDS)
def test_commit_does_what_the_protocol_says(stands: str) -> None:
    for given in conditions(ticket=TICKETS, facts=FACTS, same_result=EITHER, attempt=(1, 2)):
        attempt = given.pop("attempt")
        case = made(stands, attempt)
        holder, seq = case.ticket(given["ticket"])
        if given["facts"] == "stale":
            case.world.move(FACT)
        result = RESULT if given["same_result"] else OTHER_RESULT
        words = len(case.world.words())
        decided = rules.commit(case.world.view(), case.claim, holder, seq, result, CONFIG)
        answer = case.world.apply(decided)
        expected = expected_commit(stands, **given)
        assert outcome(case, answer, words) == expected, (given, attempt)
        if isinstance(answer, rules.Refuse | rules.Late):
            assert answer.error.ran is True, "whoever commits says that it ran"
        else:
            assert isinstance(answer, rules.Certify)
            assert answer.cert.verify()
            assert (answer.cert.seq, answer.cert.result) == (seq, result.value)


@pytest.mark.parametrize("stands", STANDS)
def test_the_hopeful_seal_is_taken_only_where_commit_would_certify(stands: str) -> None:
    for given in conditions(ticket=TICKETS, facts=FACTS):
        case = made(stands, 1)
        holder, seq = case.ticket(given["ticket"])
        if given["facts"] == "stale":
            case.world.move(FACT)
        change = rules.seal(case.claim, holder, seq, RESULT).change
        assert change is not None
        if case.world.table.holds(change, case.world.now):
            assert expected_commit(stands, same_result=True, **given).told == "Certify", given
            assert untouched(stands) in ("in_flight", "expired")


@pytest.mark.parametrize("stands", STANDS)
@pytest.mark.parametrize("verb", ["abort", "release", "heartbeat"])
def test_reports_do_what_the_protocol_says(stands: str, verb: str) -> None:
    for ticket, attempt in itertools.product(TICKETS, (1, 2)):
        case = made(stands, attempt)
        holder, seq = case.ticket(ticket)
        words, view = len(case.world.words()), case.world.view()
        if verb == "abort":
            decided = rules.abort(view, case.claim, holder, seq, "socket closed", CONFIG)
            expected = expected_abort(stands, ticket=ticket)
        elif verb == "release":
            decided = rules.release(
                view, case.claim, holder, seq, "refused", CONFIG, "history/word"
            )
            expected = expected_release(stands, ticket=ticket, attempt=attempt)
        else:
            decided = rules.heartbeat(view, case.claim, holder, seq, CONFIG)
            expected = expected_heartbeat(stands, ticket=ticket)
        answer = case.world.apply(decided)
        assert outcome(case, answer, words) == expected, (ticket, attempt)


@pytest.mark.parametrize("stands", STANDS)
def test_an_operators_words_do_what_the_protocol_says(stands: str) -> None:
    for given in conditions(forced=EITHER, same_result=EITHER, attempt=(1, 2)):
        attempt, same_result = given.pop("attempt"), given.pop("same_result")
        word = records.Word("history/word", "ops", "looked", forced=given["forced"])
        case = made(stands, attempt)
        words = len(case.world.words())
        result = RESULT.data if same_result else OTHER_RESULT.data
        view = case.world.view()
        answer = case.world.apply(rules.settle(view, "i", INTENT, "", result, word, CONFIG))
        expected = expected_settle(stands, same_result=same_result, **given)
        assert outcome(case, answer, words) == expected, (given, attempt)
        if isinstance(answer, rules.Certify):
            assert answer.cert.verify()

        case = made(stands, attempt)
        words = len(case.world.words())
        answer = case.world.apply(rules.clear(case.world.view(), "i", INTENT, word, CONFIG))
        assert outcome(case, answer, words) == expected_clear(stands, **given), (given, attempt)
        if isinstance(answer, rules.Said):
            assert answer.value is (judged(stands) not in ("absent", "cleared"))


def test_the_table_has_an_entry_for_every_verb_state_and_token() -> None:
    speaks = {Verb.COMMIT, Verb.ABORT, Verb.RELEASE, Verb.HEARTBEAT}
    assert set(rules.TABLE) == set(Verb)
    for verb, row in rules.TABLE.items():
        assert set(row) == set(State)
        assert {isinstance(entry, tuple) for entry in row.values()} == {verb in speaks}


def test_the_table_says_what_the_functions_do() -> None:
    """Each entry of the table against the outcome that the walk above holds the code to."""
    names = {
        Does.CLAIM: "Admit",
        Does.REPLAY: "Replayed",
        Does.MINT: "Certify",
        Does.SAME_CERT: "Certify",
        Does.FENCE_OFF: "Said",
        Does.FREE: "Said",
        Does.RENEW: "Said",
        Does.CLEAR: "Said",
        Does.NOTHING: "Said",
    }
    for state in State:
        stands = state.value
        for current, ticket in ((True, "current"), (False, "replaced")):
            expected = {
                Verb.COMMIT: expected_commit(
                    stands, ticket=ticket, facts="fresh", same_result=True
                ),
                Verb.ABORT: expected_abort(stands, ticket=ticket),
                Verb.RELEASE: expected_release(stands, ticket=ticket, attempt=1),
                Verb.HEARTBEAT: expected_heartbeat(stands, ticket=ticket),
                Verb.SETTLE: expected_settle(stands, forced=False, same_result=True),
                Verb.CLEAR: expected_clear(stands, forced=False),
            }
            for verb, outcome_ in expected.items():
                does = rules.does(verb, state, current=current)
                assert names.get(does, does.value) == outcome_.told, (verb, state, ticket)
        for policy in ("fence", "takeover"):
            does = rules.does(Verb.PREPARE, state)
            asked = expected_prepare(
                stands, policy=policy, same_action=True, facts="fresh", own="unnamed"
            )
            if does is Does.TAKE_OVER:
                assert asked.told == ("Admit" if policy == "takeover" else "OutcomeUnknown")
            else:
                assert names.get(does, does.value) == asked.told


# --- what a record says ---------------------------------------------------------------------------


def test_a_late_commit_is_kept_once_however_often_it_comes() -> None:
    case = made("in_flight", 2)
    holder, seq = case.replaced
    late = f"history/late/{holder.seal}"

    def commit() -> rules.Answer:
        view = case.world.view(late)
        return case.world.apply(rules.commit(view, case.claim, holder, seq, RESULT, CONFIG))

    assert isinstance(commit(), rules.Late)
    again = commit()
    assert isinstance(again, rules.Refuse)
    assert told(again) == "LeaseLost"
    assert [word["word"] for word in case.world.words()].count("late commit") == 1


def test_certificates_with_other_results_never_share_a_tag() -> None:
    """Who sends a commit again, its answer lost, takes a view with its own tag for its own work."""
    tags = []
    for result in (RESULT, OTHER_RESULT):
        case = made("in_flight", 1)
        decided = rules.commit(case.world.view(), case.claim, case.holder, case.seq, result, CONFIG)
        case.world.apply(decided)
        tags.append(case.world.record().tag)
        case = made("unknown", 1)
        view = case.world.view()
        case.world.apply(rules.settle(view, "i", INTENT, "", result.data, OPERATOR, CONFIG))
        tags.append(case.world.record().tag)
    committed, settled, other_committed, other_settled = tags
    assert committed == settled
    assert other_committed == other_settled
    assert committed != other_committed


def test_a_release_that_is_sent_again_is_taken_once() -> None:
    for attempt in (1, 2):
        case = made("in_flight", attempt)
        for _ in range(2):
            view = case.world.view("history/word")
            answer = case.world.apply(
                rules.release(
                    view, case.claim, case.holder, case.seq, "refused", CONFIG, "history/word"
                )
            )
            assert answer == rules.Said()


def test_a_genuine_ticket_replaced_from_another_domain_is_lost_and_not_forged() -> None:
    """Numbers are a domain's own: equal ones of two domains are two attempts."""
    world = World()
    world.move("domain/other")
    first = claims.claim_of(request_of(domain="other"), CONFIG)
    holder, seq = world.admit(first)
    world.apply(rules.release(world.view(), first, holder, seq, "refused", CONFIG, "history/0"))
    world.move(DOMAIN)
    _, other_seq = world.admit(claims.claim_of(request_of(), CONFIG))
    assert other_seq == seq
    answer = rules.commit(world.view(), first, holder, seq, RESULT, CONFIG).answer
    assert told(answer) == "LeaseLost"


def test_max_hold_ends_the_renewals() -> None:
    config = FenceConfig(lease_ttl=LEASE, max_hold=25.0)
    case = made("in_flight", 1)
    world = case.world

    def heartbeat() -> rules.Answer:
        decided = rules.heartbeat(world.view(), case.claim, case.holder, case.seq, config)
        return world.apply(decided)

    granted = []
    for world.now in (8.0, 16.0, 24.0):
        answer = heartbeat()
        assert isinstance(answer, rules.Said)
        granted.append(answer.value)
    assert granted == [10.0, 9.0, 1.0]
    world.now = 25.0
    assert world.stands() == "expired"
    assert told(heartbeat()) == "LeaseLost"


def test_a_conflict_says_what_differs() -> None:
    world = World()
    world.admit(claims.claim_of(request_of(), CONFIG))
    for fields, differs in (
        ({"args": {"n": 2}}, ("args",)),
        ({"tool": "refund", "domain": "other"}, ("tool", "domain")),
        ({"tool": "refund", "args": {}, "domain": "other"}, ("tool", "domain", "args")),
        ({"tool": "refund", "agent": "b"}, ("tool",)),
    ):
        answer = world.prepare(claims.claim_of(request_of(**fields), CONFIG))
        assert isinstance(answer, rules.Refuse)
        assert answer.error.differs == differs  # type: ignore[attr-defined]


def test_a_conflict_with_a_certified_action_says_what_differs() -> None:
    case = made("done", 1)
    answer = case.world.prepare(claims.claim_of(request_of(args={}), CONFIG))
    assert isinstance(answer, rules.Refuse)
    assert answer.error.differs == ("args",)  # type: ignore[attr-defined]


STRICT = FenceConfig(lease_ttl=LEASE, causal="strict")


def test_strict_causality_wants_the_head_in_the_past_and_nothing_open_above_it() -> None:
    case = made("done", 1)
    world = case.world
    head = world.table.get(DOMAIN, world.now)
    assert head is not None
    blind = claims.claim_of(request_of(intent="j"), STRICT)
    knows = claims.claim_of(
        request_of(intent="j", known_clock=VectorClock({"a": 1, "b": 4})), STRICT
    )
    world.table.put("intent/j", None)

    def ask(claim: claims.Claim, opens: list[tuple[str, int]]) -> str:
        names = world.view(claim.intent_key)
        return told(rules.prepare(names, claim, world.offer, STRICT, opens).answer)

    assert ask(blind, []) == "CausalConflict"
    assert ask(knows, [(DOMAIN, head.stamp + 1)]) == "CausalConflict"
    assert ask(knows, [(DOMAIN, head.stamp - 1), (FACT, 99)]) == "Admit"


def test_strict_causality_admits_into_a_domain_that_nobody_certified() -> None:
    world = World()
    assert told(world.prepare(claims.claim_of(request_of(), STRICT), STRICT)) == "Admit"
    fresh = claims.claim_of(request_of(intent="j"), STRICT)
    view = world.view("intent/j")
    assert told(rules.prepare(view, fresh, world.offer, STRICT, []).answer) == "Admit"
    opens = [(DOMAIN, 1)]
    assert told(rules.prepare(view, fresh, world.offer, STRICT, opens).answer) == "CausalConflict"


def test_strict_causality_loses_against_a_certificate_that_came_between() -> None:
    """A commit moves a domain's head and not its number: both are compared in the swap."""
    case = made("in_flight", 1)
    world = case.world
    asked = claims.claim_of(request_of(intent="j", known_clock=VectorClock({"z": 1})), STRICT)
    decided = rules.prepare(world.view("intent/j"), asked, world.offer, STRICT, [])
    assert told(decided.answer) == "Admit"
    sealed = rules.commit(world.view(), case.claim, case.holder, case.seq, RESULT, CONFIG)
    world.apply(sealed)
    assert decided.change is not None
    assert not world.table.holds(decided.change, world.now)


def test_a_head_only_moves_up() -> None:
    world = World()
    asked_for = [claims.claim_of(request_of(intent="i"), CONFIG)]
    holder, seq = world.admit(asked_for[0])
    late = claims.claim_of(request_of(intent="j"), CONFIG)
    view = world.view("intent/j")
    answer = world.apply(rules.prepare(view, late, world.offer, CONFIG))
    assert isinstance(answer, rules.Admit)
    stood = world.table.get("intent/j", 0.0)
    assert stood is not None
    world.apply(
        rules.commit(world.view("intent/j"), late, answer.holder, stood.stamp, OTHER_RESULT, CONFIG)
    )
    head = world.table.get(DOMAIN, world.now)
    world.apply(rules.commit(world.view(), asked_for[0], holder, seq, RESULT, CONFIG))
    assert world.table.get(DOMAIN, world.now) == head


def test_a_domain_is_evicted_only_when_nobody_needs_it_and_its_numbers_go_on() -> None:
    world = World()

    def refused(opens: list[tuple[str, int]], config: FenceConfig = CONFIG) -> str:
        return str(rules.evict(world.view(), "d", DOMAIN, opens, config))

    assert refused([]) == "None"
    world.move(DOMAIN)
    assert "an open intent holds seq 1" in refused([(DOMAIN, 1)])
    assert "moved within result_ttl" in refused([(FACT, 1)])
    world.now += 1000.0
    assert "moved within result_ttl" in refused([], FenceConfig(result_ttl=None))
    assert refused([(FACT, 1)]) == "None"
    for step in (rules.move_on, rules.forget):
        record = world.table.get(DOMAIN, world.now)
        assert record is not None
        world.table.write(step(DOMAIN, record), world.now)
    assert world.table.get(DOMAIN, world.now) is None
    _, seq = world.admit(claims.claim_of(request_of(), CONFIG))
    assert seq == 3


def test_head_of_is_none_until_a_certificate_stands() -> None:
    world = World()
    assert records.head_of(None) is None
    world.move(DOMAIN)
    assert records.head_of(world.table.get(DOMAIN, 0.0)) is None
    case = made("done", 1)
    head = records.head_of(case.world.table.get(DOMAIN, 0.0))
    assert head is not None
    assert head["clock"] == {"a": 1}


def test_an_open_record_names_its_domain_in_its_own_scope() -> None:
    world = World()
    facts = (ReadSetEntry(domain="fact", seq=0),)
    claim = claims.claim_of(request_of(read_set=facts), CONFIG, "tenant")
    assert claim.intent_key == "intent@tenant/i"
    view = View(0.0, dict.fromkeys(claim.expect_fresh))
    world.apply(rules.prepare(view, claim, world.offer, CONFIG))
    record = world.table.get(claim.intent_key, 0.0)
    assert record is not None
    assert records.open_number(record, claim.intent_key) == ("domain@tenant/d", 1)
    assert records.open_facts(record, claim.intent_key) == [("domain@tenant/fact", 0)]


@pytest.mark.parametrize("stands", [s for s in STANDS if s != "absent"])
def test_a_record_is_described_for_people(stands: str) -> None:
    case = made(stands, 2)
    gone = stands.endswith("gone")
    gone_keys = frozenset({INTENT} if gone else ())
    shown = rules.describe(INTENT, View(case.world.now, {INTENT: case.world.record()}, gone_keys))
    assert (shown.intent, shown.domain, shown.agent, shown.attempt) == ("i", "d", "a", 2)
    assert shown.state == judged(stands)
    assert (shown.cert is not None) is (stands == "done")
    assert (shown.lease_seconds_left is not None) is (shown.state in ("in_flight", "expired"))
    reason = shown.reason or ""
    if shown.state == "unknown":
        assert reason == {
            "unknown, its commit was stale": "it ran, but its facts had moved",
        }.get(stands, "socket closed" if stands.startswith("unknown") else "its process died")
    else:
        assert not reason


def test_lifetimes_are_fixed_when_an_outcome_is_recorded() -> None:
    case = made("done", 1)
    assert case.world.record().expires_at == CONFIG.result_ttl
    case.world.now = 1000.0
    assert case.world.stands() == "absent"
    case = made("unknown", 1)
    assert case.world.record().expires_at == NEVER
    case = made("cleared", 1)
    assert case.world.record().expires_at == CONFIG.history_ttl


def test_an_unknown_outcome_expires_only_if_that_was_set_on_purpose() -> None:
    case = made("in_flight", 1)
    config = FenceConfig(unknown_ttl=5.0)
    view = case.world.view()
    case.world.apply(rules.abort(view, case.claim, case.holder, case.seq, "why", config))
    assert case.world.record().expires_at == 5.0


def test_a_requests_own_lifetime_wins_and_for_ever_is_possible() -> None:
    for request_ttl, config_ttl, lives in ((7.0, 9.0, 7.0), (None, 9.0, 9.0), (None, None, NEVER)):
        world = World()
        config = FenceConfig(result_ttl=config_ttl)
        claim = claims.claim_of(request_of(result_ttl=request_ttl), config)
        for settled in EITHER:
            world = World()
            holder, seq = world.admit(claim)
            if settled:
                word = records.Word("history/0", "ops", "it ran", forced=True)
                decided = rules.settle(world.view(), "i", INTENT, "", RESULT.data, word, config)
            else:
                decided = rules.commit(world.view(), claim, holder, seq, RESULT, config)
            world.apply(decided)
            assert world.record().expires_at == lives


def test_every_body_that_the_rules_write_passes_their_own_check() -> None:
    for stands in STANDS:
        case = made(stands, 2)
        for key, record in case.world.table.records.items():
            body = json.loads(record.body) if record.body else b""
            records.check_body(key, record.label, body)


@pytest.mark.parametrize(
    ("stands", "spoil"),
    [
        ("in_flight", lambda body: body.pop("attempt")),
        ("in_flight", lambda body: body.update(attempt=True)),
        ("in_flight", lambda body: body.update(lease="10")),
        ("in_flight", lambda body: body.update(state="done")),
        ("in_flight", lambda body: body["request"].pop("tool")),
        ("in_flight", lambda body: body["request"].update(args=[])),
        ("in_flight", lambda body: body["request"].update(read_set=[{"domain": "x"}])),
        ("in_flight", lambda body: body["request"].update(read_set=["x"])),
        ("in_flight", lambda body: body["request"].update(vector_clock={"a": -1})),
        ("in_flight", lambda body: body.update(attempt=0)),
        ("in_flight", lambda body: body.update(idempotency_key='"')),
        ("in_flight", lambda body: body["request"].update(parent=1)),
        ("unknown", lambda body: body.update(reason=None)),
        ("cleared", lambda body: body.update(request={})),
        ("done", lambda body: body["cert"].pop("result")),
        ("done", lambda body: body["cert"].update(seq="1")),
        ("done", lambda body: body["cert"].update(agent=None)),
        ("done", lambda body: body.update(hash=1)),
    ],
)
def test_a_body_that_the_rules_never_write_is_refused(stands: str, spoil: Any) -> None:
    record = made(stands, 1).world.record()
    body = json.loads(record.body)
    records.check_body(INTENT, record.label, body)
    spoil(body)
    with pytest.raises(ValueError, match=r"\w"):
        records.check_body(INTENT, record.label, body)


def test_a_record_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        records.check_body(INTENT, "surprise", {})
    with pytest.raises(ValueError, match="not the body"):
        records.check_body(INTENT, "open", [])


def test_the_marker_of_a_result_that_was_not_recorded_is_json() -> None:
    assert json.loads(records.unrecorded("too large").data) == {UNRECORDED: "too large"}


def test_errors_of_the_rules_carry_their_facts() -> None:
    case = made("done", 1)
    answer = rules.settle(case.world.view(), "i", INTENT, "", b"1", OPERATOR, CONFIG).answer
    assert isinstance(answer, rules.Refuse)
    assert isinstance(answer.error, CommitConflict)
    assert answer.error.cert.result == {"ok": True}
    answer = rules.clear(case.world.view(), "i", INTENT, OPERATOR, CONFIG).answer
    assert isinstance(answer, rules.Refuse)
    assert isinstance(answer.error, HolderAlive)
    assert "it ran" in answer.error.reason
    case = made("in_flight, its process gone", 2)
    answer = case.world.prepare(case.claim)
    assert isinstance(answer, rules.Refuse)
    assert isinstance(answer.error, OutcomeUnknown)
    assert (answer.error.reason, answer.error.attempt) == ("its process died", 2)


def test_a_ticket_says_what_its_holder_needs_and_shows_no_token() -> None:
    case = made("in_flight", 2)
    ticket = claims.ticket_of(case.claim, case.holder, case.seq)
    assert (ticket.intent, ticket.seq, ticket.attempt) == ("i", case.seq, 2)
    assert ticket.vector_clock == {"a": 1}
    assert case.holder.token not in repr(ticket)


@pytest.mark.parametrize("key", ["domain/i", "history/i", "intents/i", "i"])
def test_a_record_under_a_key_of_another_kind_is_refused(key: str) -> None:
    """Seed 74740 of the hostile ledgers: an operator's word under an intent's key."""
    record = made("done", 1).world.record()
    with pytest.raises(ValueError, match="has no business under"):
        records.check_body(key, record.label, json.loads(record.body))
    with pytest.raises(ValueError, match="has no business under"):
        records.check_body(INTENT, records.HISTORY, {})
