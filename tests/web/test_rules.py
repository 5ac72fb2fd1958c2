"""The rules alone: keys, fingerprints, outcomes, records. No server."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectfence import (
    EffectCert,
    IntentConflict,
    IntentInFlight,
    LedgerUnavailable,
    OutcomeUnknown,
    ReadSetStale,
    ResultNotRecorded,
)
from effectfence.web import idempotency
from effectfence.web.idempotency import (
    OUTCOMES,
    PROBLEMS,
    BadKey,
    Headers,
    Policy,
    Problem,
    Recorded,
    Routes,
    is_validation_answer,
    kept_headers,
    parse_key,
    principal_scope,
    problem_of,
    request_of,
)

JSON: Headers = (("content-type", "application/json; charset=utf-8"),)


def asked(**fields: Any) -> Any:
    """The arguments of the request that a call asks for."""
    base: dict[str, Any] = {
        "key": "k",
        "method": "POST",
        "path": "/entries",
        "query": b"",
        "headers": JSON,
        "body": b'{"a": 1}',
        "domain": "http",
        "policy": Policy(),
    }
    return request_of(**{**base, **fields}).args


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        (["abc"], "abc"),
        (['"abc"'], "abc"),
        (['  "abc"  '], "abc"),
        (["8e03978e-40d5-43e8-bc93-6894a57f9324"], "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (['"8e03978e-40d5-43e8-bc93-6894a57f9324"'], "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (['"a b, c"'], "a b, c"),
        ([r'"a\"b\\c"'], r'a"b\c'),
        (['"abc"; v=1;q=0.5;z="x";t=*a/b;b=?1;n=:YQ==:;only'], "abc"),
        (["order:123/+=;x"], "order:123/+=;x"),
        (["k" * 255], "k" * 255),
        (['"' + r"\\" * 255 + '"'], "\\" * 255),
    ],
)
def test_a_key_is_a_quoted_string_or_the_same_bare(fields: list[str], key: str) -> None:
    assert parse_key(fields) == key


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([""], "empty"),
        (['""'], "empty"),
        (["   "], "empty"),
        (["k" * 256], "256 characters"),
        (['"' + "k" * 256 + '"'], "256 characters"),
        (["k" * 100_000], "100000 characters"),
        (["a", "a"], "sent 2 times"),
        (["a, b"], "without quotes"),
        (["a b"], "without quotes"),
        (['"abc'], "begins with a quote"),
        (['"abc" x'], "begins with a quote"),
        (['"abc"; A=1'], "begins with a quote"),
        ([r'"a\b"'], "begins with a quote"),
        (['"a", "b"'], "begins with a quote"),
        (['"gr\u00f6\u00dfe"'], "begins with a quote"),
        (["gr\u00f6\u00dfe"], "without quotes"),
        (["a\x00b"], "without quotes"),
        (['a"b'], "without quotes"),
    ],
)
def test_what_is_no_key_says_why(fields: list[str], why: str) -> None:
    with pytest.raises(BadKey, match=why):
        parse_key(fields)


@given(st.lists(st.text(max_size=300), max_size=2))
def test_whatever_is_sent_is_a_key_or_a_bad_key(fields: list[str]) -> None:
    try:
        key = parse_key(fields)
    except BadKey:
        return
    assert 1 <= len(key) <= 255
    assert key.isascii()
    assert key.isprintable()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255))
def test_every_printable_key_can_be_quoted(key: str) -> None:
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_key([quoted]) == key


# --- the same request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"body": b' {"a":1.0}\n'},
        {"headers": (("content-type", "application/json"), ("x-request-id", "7"))},
        {"headers": (("content-type", "APPLICATION/JSON"),)},
        {"key": "other"},
    ],
    ids=str,
)
def test_what_does_not_make_another_request(other: dict[str, Any]) -> None:
    assert asked(**other) == asked()


@pytest.mark.parametrize(
    "other",
    [
        {"method": "PATCH"},
        {"path": "/entries/"},
        {"path": "/entries%2F"},
        {"query": b"dry=1"},
        {"body": b'{"a": 2}'},
        {"body": b""},
        {"body": b"{}"},
        {"body": b'{"a": 1, "a": 1}'},
        {"headers": (("content-type", "text/plain"),)},
        {"headers": (*JSON, ("content-encoding", "gzip"))},
        {"path": "/" + "x" * 10_000},
    ],
    ids=lambda other: str(other)[:40],
)
def test_what_makes_another_request(other: dict[str, Any]) -> None:
    assert asked(**other) != asked()


def test_json_bodies_are_compared_as_what_they_say() -> None:
    one = asked(body=b'{"a":1,"b":{"x":[1,2],"y":2}}')
    assert asked(body=b'{"b": {"y": 2, "x": [1, 2]}, "a": 1}') == one
    assert asked(body=b'{"a":1,"b":{"x":[2,1],"y":2}}') != one
    big = [asked(body=b'{"id":%d}' % number) for number in (9007199254740992, 9007199254740993)]
    assert big[0] != big[1]


def test_other_bodies_are_compared_byte_by_byte() -> None:
    text: Headers = (("content-type", "text/plain"),)
    one = asked(headers=text, body=b'{"a":1}')
    assert asked(headers=text, body=b'{"a": 1}') != one
    assert asked(headers=JSON, body=b"{broken") != asked(headers=JSON, body=b"{ broken")


def test_a_query_is_compared_in_the_order_of_its_names() -> None:
    assert asked(query=b"b=2&a=1&a=3") == asked(query=b"a=1&a=3&b=2")
    assert asked(query=b"a=1&a=3") != asked(query=b"a=3&a=1")
    assert asked(query=b"a=x+y") == asked(query=b"a=x%20y")
    assert asked(query=b"a=1&b=2") != asked(query=b"a=1%26b=2")


@given(
    st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=4),
    st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=4),
)
def test_two_lists_have_one_digest_only_if_they_are_equal(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    digests = [
        idempotency._digest([(a.encode(), b.encode()) for a, b in pairs]) for pairs in (one, other)
    ]
    assert (digests[0] == digests[1]) == (one == other)


def test_chosen_headers_are_part_of_the_request() -> None:
    policy = Policy(request_headers=("X-Version",))
    versions = [(*JSON, ("x-version", version)) for version in ("1", " 1 ", "2")]
    one, spaced, two = (asked(policy=policy, headers=headers) for headers in versions)
    assert one == spaced != two


def test_the_intent_is_the_key_alone() -> None:
    request = request_of(
        key="k 1", method="POST", path="/a", query=b"", headers=(), body=b"x",
        domain="orders", policy=Policy(result_ttl=60),
    )  # fmt: skip
    assert (request.intent, request.domain, request.agent) == ("http:k 1", "orders", "http")
    assert (request.tool, request.result_ttl) == ("POST /a", 60.0)


@pytest.mark.parametrize("principal", ["", 7, b"a"])
def test_a_principal_is_a_non_empty_string(principal: object) -> None:
    with pytest.raises(ValueError, match="principal"):
        principal_scope(principal)


def test_a_long_principal_goes_by_its_hash() -> None:
    scopes = [principal_scope("x" * 5000 + end) for end in "ab"]
    assert scopes[0] != scopes[1]
    assert all(scope is not None and len(scope) < 80 for scope in scopes)
    assert principal_scope(None) is None


# --- policies -------------------------------------------------------------------------------------


def test_a_policy_is_data_that_can_be_printed_and_changed() -> None:
    policy = Policy(outcomes={"503": "release"})
    changed = policy.but(required=True, outcomes={"4xx": "release"})
    assert Policy(outcomes={503: "release"}) == policy  # type: ignore[dict-item]  # people do
    assert (changed.verdict(503), changed.verdict(409), changed.verdict(500)) == (
        "release",
        "release",
        "unknown",
    )
    assert (policy.verdict(409), policy.required) == ("record", False)
    assert "503         release" in str(changed).splitlines()
    assert "5xx         unknown" in str(changed).splitlines()
    with pytest.raises(AttributeError):
        policy.required = True  # type: ignore[misc]  # that is what is tested


def test_a_routes_own_word_on_a_class_goes_before_the_default_on_a_status() -> None:
    assert Policy().verdict(429) == "release"
    assert Policy(outcomes={"4xx": "record"}).verdict(429) == "record"
    assert Policy(outcomes={"4xx": "record", "429": "unknown"}).verdict(429) == "unknown"


def test_every_status_has_a_verdict_and_a_strange_one_is_unknown() -> None:
    assert {Policy().verdict(status) for status in range(200, 600)} == {
        "record",
        "release",
        "unknown",
    }
    assert Policy().verdict(999) == "unknown"
    assert not [name for name, verdict in OUTCOMES.items() if name[0] == "5" != verdict[0] == "r"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"outcomes": {"6xx": "record"}}, "no status"),
        ({"outcomes": {"503": "forget"}}, "none of record"),
        ({"wait_seconds": -1}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"max_request_bytes": -1}, "max_request_bytes"),
        ({"retry_after_seconds": 0}, "retry_after_seconds"),
        ({"result_ttl": 0}, "result_ttl"),
        ({"result_ttl": float("nan")}, "result_ttl"),
        ({"methods": "POST"}, "methods"),
        ({"request_headers": "X-Version"}, "request_headers"),
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        Policy(**fields)


def test_routes_are_matched_in_order() -> None:
    strict, free = Policy(required=True), Policy()
    routes = Routes(
        free,
        {
            "POST /orders/{id}/refund": strict,
            "/files/{rest:path}": None,
            "PATCH /a.b": strict,
        },
    )
    assert routes.match("POST", "/orders/7/refund").policy is strict
    assert routes.match("POST", "/orders/7/refund").name == "http:POST /orders/{id}/refund"
    assert routes.match("PATCH", "/orders/7/refund").policy is free
    assert routes.match("POST", "/orders/7/8/refund").policy is free
    assert routes.match("POST", "/files/a/b").policy is None
    assert routes.match("PATCH", "/aXb").name == "http"


@pytest.mark.parametrize("pattern", ["orders", "POST orders", "P0ST /orders"])
def test_what_is_no_route_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="no route"):
        Routes(Policy(), {pattern: None})


FASTAPI = {"detail": [{"type": "missing", "loc": ["body", "cents"], "msg": "required"}]}
LITESTAR = {
    "status_code": 400,
    "detail": "Validation failed for POST /charges",
    "extra": [{"message": "Expected `int`", "key": "cents", "source": "body"}],
}


@pytest.mark.parametrize(("status", "said"), [(422, FASTAPI), (400, LITESTAR)])
def test_a_frameworks_own_validation_answer_frees_the_key(status: int, said: object) -> None:
    body = json.dumps(said).encode()
    assert Policy().judge(status, None, body) == "release"
    assert Policy(outcomes={"validation": "record"}).judge(status, None, body) == "record"
    assert Policy().judge(status, "record", body) == "record"


@pytest.mark.parametrize(
    "said",
    [
        {"detail": "no funds"},
        {"detail": []},
        {"detail": [{"loc": ["account"], "msg": "no funds"}]},
        {"detail": ["no"]},
        {**FASTAPI, "charge": "ch_1"},
        ["detail"],
        {"status_code": 422, "detail": "Validation failed for x", "extra": []},
    ],
    ids=str,
)
def test_a_business_refusal_is_no_validation_answer(said: object) -> None:
    body = json.dumps(said).encode()
    assert not is_validation_answer(422, body)
    assert Policy().judge(422, None, body) == "record"
    assert not is_validation_answer(422, b'{"detail"')


# --- records --------------------------------------------------------------------------------------


@given(
    st.integers(200, 599),
    st.lists(
        st.tuples(st.from_regex(r"[a-z-]{1,9}", fullmatch=True), st.text("ab \xe9")), max_size=4
    ),
    st.binary(max_size=200),
)
def test_an_answer_is_the_same_after_the_ledger(
    status: int, headers: list[tuple[str, str]], body: bytes
) -> None:
    kept = Recorded(status, tuple(headers), body)
    assert Recorded.of(json.loads(json.dumps(kept.as_result()))) == kept


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ({"charge": "ch_1"}, (200, b'{"charge":"ch_1"}')),
        (None, (200, b"null")),
        ("text", (200, b'"text"')),
        ({"http_status": 201}, (201, b"")),
        ({"http_status": 201, "http_body": "as it is"}, (201, b"as it is")),
        ({"http_status": 201, "http_body": {"b": 1, "a": 2}}, (201, b'{"a":2,"b":1}')),
        ({"http_status": 700}, (200, b'{"http_status":700}')),
        ({"http_status": 200, "other": 1}, (200, b'{"http_status":200,"other":1}')),
        ({"http_status": 200, "http_body_base64": "!"}, (200, None)),
        ({"http_status": 200, "http_headers": [["a", "b\r\nSet-Cookie: x"]]}, (200, None)),
        ({"http_status": 200, "http_headers": "x"}, (200, None)),
    ],
    ids=str,
)
def test_an_operators_word_is_answered_as_it_stands(
    word: Any, answer: tuple[int, bytes | None]
) -> None:
    recorded = Recorded.of(word)
    assert recorded.status == answer[0]
    if answer[1] is None:
        assert json.loads(recorded.body) == word
    else:
        assert recorded.body == answer[1]
    assert all("\n" not in value for _, value in recorded.headers)


def test_headers_of_one_exchange_or_one_client_are_not_kept() -> None:
    sent = [
        (name, "x")
        for name in (
            "content-type", "set-cookie", "date", "connection", "transfer-encoding", "server",
            "content-length", "keep-alive", "location", "x-mine", "retry-after", "etag",
        )
    ]  # fmt: skip
    kept = kept_headers(sent, Policy(unrecorded_headers=("X-Mine",)))
    assert [name for name, _ in kept] == ["content-type", "location", "etag"]


# --- problems -------------------------------------------------------------------------------------

CERT = EffectCert(
    intent="http:k", parent=None, domain="d", seq=1, tool="t", args={}, result=None,
    vector_clock={}, read_set=(), agent="a", hash="0" * 64,
)  # fmt: skip
REFUSALS = {
    "key-reused": IntentConflict(intent="http:k", differs=("args",)),
    "in-flight": IntentInFlight(intent="http:k", agent="http", attempt=1, seconds_left=60.0),
    "outcome-unknown": OutcomeUnknown(intent="http:k", reason="secret", agent="http", attempt=1),
    "result-not-recorded": ResultNotRecorded(cert=CERT, reason="too long"),
    "ledger-unavailable": LedgerUnavailable(ledger="/secret/path", reason="secret"),
    "refused": ReadSetStale(domain="d", expected=0, actual=1),
}


@pytest.mark.parametrize("slug", REFUSALS)
def test_every_refusal_has_its_problem(slug: str) -> None:
    problem = problem_of(REFUSALS[slug], Policy(retry_after_seconds=3))
    answer = problem.answer("https://shop.example/docs")
    said = json.loads(answer.body)
    assert said["type"] == f"https://shop.example/docs#{slug}"
    assert said["status"] == answer.status == PROBLEMS[slug].status
    assert said["ran"] is REFUSALS[slug].ran
    assert "secret" not in answer.body.decode()
    headers = dict(answer.headers)
    assert ("retry-after" in headers) == (slug in ("in-flight", "ledger-unavailable"))
    assert headers.get("retry-after", "3") == "3"


def test_no_automatic_retry_is_suggested_where_none_would_help() -> None:
    for slug in ("outcome-unknown", "result-not-recorded", "refused"):
        headers = dict(Problem.named(slug, "").answer("/d").headers)
        assert headers["stripe-should-retry"] == "false"
        assert "retry-after" not in headers


def test_errors_of_the_rules_survive_pickle() -> None:
    error = pickle.loads(pickle.dumps(idempotency.Unauthenticated("Basic")))
    assert error.challenge == "Basic"
