"""What a client is answered, by the same shop on FastAPI and on aiohttp, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import httpx
import pytest

from tests.web.serving import Shop, new_key, raw_request, until


def problem(answer: httpx.Response) -> str:
    """The kind of a problem, which leads to its words."""
    assert answer.headers["content-type"] == "application/problem+json"
    said = answer.json()
    assert said["status"] == answer.status_code
    assert "idempotent-replayed" not in answer.headers
    return str(said["type"].partition("#")[2])


def in_a_thread(
    work: Callable[[], httpx.Response],
) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


# --- replays --------------------------------------------------------------------------------------


def test_a_duplicate_gets_the_recorded_answer_and_runs_nothing(shop: Shop) -> None:
    key = new_key()
    first, second = shop.charge(key), shop.charge(f'"{key}"')
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.content == first.content
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-shop"] == "open"
    assert second.headers["location"] == "/charges/1"
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert len(shop.effects(key)) == 1


def test_what_belongs_to_one_client_is_never_replayed(shop: Shop) -> None:
    key = new_key()
    first, second = shop.charge(key), shop.charge(key)
    assert first.headers["set-cookie"] == "session=secret"
    assert "set-cookie" not in second.headers
    assert "secret" not in shop.ledger.read_text()


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\x00\xfe" * 100, "Größe ☃ \u0000".encode(), b"\xed\xa0\x80", bytes(range(256))],
    ids=["empty", "binary", "text", "surrogate", "every byte"],
)
def test_a_body_is_replayed_byte_for_byte(shop: Shop, body: bytes) -> None:
    key = new_key()
    headers = {"X-Answer-Type": "application/x-odd; v=1"}
    first = shop.post("/echo", key, content=body, headers=headers)
    second = shop.post("/echo", key, content=body, headers=headers)
    assert first.content == second.content == body
    assert second.headers["content-type"] == "application/x-odd; v=1"
    assert second.headers["content-length"] == str(len(body))
    assert second.headers["idempotent-replayed"] == "true"


def test_the_life_of_a_key_is_published_with_every_answer(shop: Shop) -> None:
    key = new_key()
    assert [shop.charge(key).headers["idempotency-key-lifetime"] for _ in range(2)] == ["86400"] * 2


def test_a_problem_leads_to_a_page_that_the_service_itself_serves(shop: Shop) -> None:
    link = shop.post("/required").json()["type"]
    page, _, anchor = link.partition("#")
    served = shop.get(page)
    assert served.status_code == 200
    assert f'<h2 id="{anchor}">' in served.text
    assert "86400 seconds" in served.text


def test_requests_without_a_key_and_other_methods_pass(shop: Shop) -> None:
    assert shop.charge(None).json() != shop.charge(None).json()
    assert shop.get("/who").status_code == 200


def test_an_unfenced_route_runs_every_time(shop: Shop) -> None:
    key = new_key()
    for _ in range(2):
        assert shop.post("/unfenced", key).status_code == 200
    assert len(shop.effects(key)) == 2


# --- keys -----------------------------------------------------------------------------------------


def test_a_missing_key_is_400_where_the_route_requires_it(shop: Shop) -> None:
    answer = shop.post("/required")
    assert (answer.status_code, problem(answer)) == (400, "key-missing")
    assert shop.post("/required", new_key()).status_code == 200


def test_a_bad_key_is_400_and_says_why(shop: Shop) -> None:
    answer = shop.charge("k" * 256)
    assert (answer.status_code, problem(answer)) == (400, "key-invalid")
    assert "256 characters" in answer.json()["detail"]
    assert not shop.effects("k" * 256)


def test_a_key_sent_twice_is_400(shop: Shop) -> None:
    request = raw_request("/charges", "one", {"cents": 1})
    twice = request.replace(b"Idempotency-Key: one\r\n", b"Idempotency-Key: one\r\n" * 2)
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(twice.replace(b"Host: shop", b"Host: shop\r\nConnection: close"))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"sent 2 times" in answer


# --- conflicts ------------------------------------------------------------------------------------


def test_the_same_key_with_another_request_is_422_and_says_what_differs(shop: Shop) -> None:
    key = new_key()
    assert shop.charge(key).status_code == 201
    other_body = shop.charge(key, cents=1)
    other_query = shop.post("/charges?dry=1", key, json={"cents": 4900})
    other_path = shop.post("/echo", key, json={"cents": 4900})
    found = [answer.json()["differs"] for answer in (other_body, other_query)]
    assert [answer.status_code for answer in (other_body, other_query, other_path)] == [422] * 3
    assert problem(other_body) == "key-reused"
    assert found == [["body"], ["query"]]
    assert "path" in other_path.json()["differs"]
    assert len(shop.effects(key)) == 1


def test_the_order_of_keys_and_of_the_query_does_not_matter(shop: Shop) -> None:
    key, headers = new_key(), {"Content-Type": "application/json"}
    first = shop.post(
        "/charges?a=1&b=2", key, content=b'{"cents": 1, "gate": null}', headers=headers
    )
    second = shop.post("/charges?b=2&a=1", key, content=b'{"gate":null,"cents":1}', headers=headers)
    assert second.headers["idempotent-replayed"] == "true"
    assert first.content == second.content


def test_a_chosen_header_is_part_of_the_request(shop: Shop) -> None:
    key = new_key()
    versions = ("1", "1", "2")
    answers = [shop.post("/versioned", key, headers={"X-Version": v}) for v in versions]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert answers[2].json()["differs"] == ["headers"]


# --- in flight ------------------------------------------------------------------------------------


def test_a_duplicate_waits_for_the_one_in_flight(shop: Shop) -> None:
    key = new_key()
    ask = {"cents": 1, "gate": key}
    leader, first = in_a_thread(lambda: shop.post("/charges", key, json=ask))
    until(lambda: shop.effects(key))
    follower, second = in_a_thread(lambda: shop.post("/charges", key, json=ask))
    shop.open_gate(key)
    leader.join()
    follower.join()
    assert first[0].content == second[0].content
    assert second[0].headers["idempotent-replayed"] == "true"
    assert len(shop.effects(key)) == 1


def test_one_still_in_flight_after_the_wait_is_409_with_retry_after(shop: Shop) -> None:
    key = new_key()
    ask = {"cents": 1, "gate": key}
    leader, first = in_a_thread(lambda: shop.post("/hasty", key, json=ask))
    until(lambda: shop.effects(key))
    answer = shop.post("/hasty", key, json=ask)
    shop.open_gate(key)
    leader.join()
    assert (answer.status_code, problem(answer)) == (409, "in-flight")
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["stripe-should-retry"] == "true"
    assert first[0].status_code == 200
    assert shop.post("/hasty", key, json=ask).headers["idempotent-replayed"] == "true"


# --- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [200, 202, 204, 303, 400, 402, 403, 404, 409, 410, 422, 451])
def test_success_and_definite_refusals_are_replayed(shop: Shop, code: int) -> None:
    key = new_key()
    answers = [shop.post(f"/status/{code}", key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [code, code]
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(shop.effects(key)) == 1


@pytest.mark.parametrize("code", [401, 415, 425, 429])
def test_an_answer_that_says_nothing_ran_frees_the_key(shop: Shop, code: int) -> None:
    key = new_key()
    for _ in range(2):
        answer = shop.post(f"/status/{code}", key)
        assert answer.status_code == code
        assert "idempotent-replayed" not in answer.headers
    assert len(shop.effects(key)) == 2
    assert shop.charge(key).status_code == 201


@pytest.mark.parametrize(
    "path", ["/status/500", "/status/502", "/status/503", "/status/408", "/broken"]
)
def test_a_failure_after_dispatch_is_unknown_and_never_run_again(shop: Shop, path: str) -> None:
    key = new_key()
    first = shop.post(path, key)
    assert first.status_code == int(path[-3:]) if path != "/broken" else 500
    second = shop.post(path, key)
    assert (second.status_code, problem(second)) == (409, "outcome-unknown")
    assert second.json()["ran"] is None
    assert second.json()["intent"] == f"http:{key}"
    assert "retry-after" not in second.headers
    assert second.headers["stripe-should-retry"] == "false"
    assert len(shop.effects(key)) == 1


def test_a_route_may_say_that_its_503_means_nothing_ran(shop: Shop) -> None:
    key = new_key()
    assert [shop.post("/maybe/503", key).status_code for _ in range(2)] == [503, 503]
    assert shop.post("/maybe/502", new_key()).status_code == 502
    assert len(shop.effects(key)) == 2


@pytest.mark.parametrize(
    ("path", "codes"),
    [
        ("/status/503?say=release", [503, 503]),
        ("/status/200?say=unknown", [200, 409]),
        ("/status/500?say=record", [500, 500]),
        ("/status/200?say=nonsense", [200, 409]),
    ],
)
def test_the_handler_has_the_last_word_on_its_answer(
    shop: Shop, path: str, codes: list[int]
) -> None:
    key = new_key()
    answers = [shop.post(path, key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == codes
    assert "effectfence-outcome" not in answers[0].headers


def test_not_executed_is_503_and_frees_the_key(shop: Shop) -> None:
    key = new_key()
    answer = shop.post("/busy", key)
    assert (answer.status_code, problem(answer)) == (503, "not-executed")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["ran"] is False


def test_a_request_that_failed_validation_leaves_its_key_free(shop: Shop) -> None:
    key = new_key()
    assert shop.post("/charges", key, json={"cents": "many"}).status_code in (400, 422)
    corrected = shop.charge(key)
    assert corrected.status_code == 201
    assert "idempotent-replayed" not in corrected.headers


# --- bodies ---------------------------------------------------------------------------------------


def test_a_body_beyond_the_limit_is_413_and_runs_nothing(shop: Shop) -> None:
    key = new_key()
    answer = shop.post("/echo", key, content=b"x" * ((1 << 20) + 1))
    assert (answer.status_code, problem(answer)) == (413, "body-too-large")

    def endless() -> object:
        for _ in range(20):
            yield b"x" * (1 << 16)

    chunked = shop.post("/echo", key, content=endless())
    assert chunked.status_code == 413
    assert not shop.effects(key)


def test_forms_and_files_are_read_by_the_handler_as_ever(shop: Shop) -> None:
    form = shop.post("/form", new_key(), data={"a": "1", "b": "ü"})
    assert form.json() == {"a": "1", "b": "ü"}
    upload = shop.post("/form", new_key(), data={"a": "1"}, files={"f": ("f.txt", b"hello")})
    assert upload.json() == {"a": "1", "f": "hello"}


def test_a_connection_serves_on_after_a_fenced_body(shop: Shop) -> None:
    with httpx.Client(base_url=shop.url, trust_env=False, timeout=60) as client:
        for size in (1, 100_000, 900_000):
            answer = client.post(
                "/echo", content=b"x" * size, headers={"Idempotency-Key": new_key()}
            )
            assert len(answer.content) == size


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_is_replayed_as_far_as_it_fits(shop: Shop) -> None:
    key, ask = new_key(), {"pieces": 1000}
    first, second = (shop.post("/stream", key, json=ask) for _ in range(2))
    assert first.content == second.content
    assert len(second.content) == 8000
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["content-type"] == "text/plain; charset=utf-8"
    assert len(shop.effects(key)) == 1


def test_a_stream_beyond_the_limit_is_done_and_its_duplicate_told_so(shop: Shop) -> None:
    key, ask = new_key(), {"pieces": 10_000}
    assert len(shop.post("/stream", key, json=ask).content) == 80_000
    second = shop.post("/stream", key, json=ask)
    assert (second.status_code, problem(second)) == (409, "result-not-recorded")
    assert second.json()["ran"] is True
    assert len(shop.effects(key)) == 1


def test_an_answer_beyond_the_limit_is_done_and_its_duplicate_told_so(shop: Shop) -> None:
    key = new_key()
    assert len(shop.post("/echo", key, content=b"x" * 70_000).content) == 70_000
    second = shop.post("/echo", key, content=b"x" * 70_000)
    assert (second.status_code, problem(second)) == (409, "result-not-recorded")


def test_a_stream_goes_out_while_it_is_made(shop: Shop) -> None:
    key = new_key()
    ask = {"pieces": 3, "gate": key}
    with (
        httpx.Client(base_url=shop.url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/stream", json=ask, headers={"Idempotency-Key": key}) as answer,
    ):
        arriving = answer.iter_raw()
        assert next(arriving) == b"0000000\n"
        shop.open_gate(key)
        assert b"".join(arriving) == b"0000001\n0000002\n"


# --- principals -----------------------------------------------------------------------------------


def test_equal_keys_of_two_principals_are_two(shop: Shop) -> None:
    key = new_key()
    asked = [shop.charge(key, headers={"Authorization": f"Bearer {who}"}) for who in ("a", "b")]
    again = shop.charge(key, headers={"Authorization": "Bearer a-renewed"})
    assert asked[0].json() != asked[1].json()
    assert again.json() == asked[0].json()
    assert len(shop.effects(key)) == 2


def test_a_caller_whom_nobody_knows_gets_401_and_no_replay(shop: Shop) -> None:
    key = new_key()
    shop.charge(key)
    answer = shop.charge(key, headers={"Authorization": "Bearer nobody"})
    assert (answer.status_code, problem(answer)) == (401, "not-authenticated")
    assert answer.headers["www-authenticate"] == 'Bearer realm="shop"'


# --- what handlers reach --------------------------------------------------------------------------


def test_handlers_reach_the_fence_and_the_key_for_their_provider(shop: Shop) -> None:
    key = new_key()
    first, second = shop.post("/ticket", key), shop.post("/ticket", key)
    assert len(first.json()["key"]) == 32
    assert first.json()["stats"] > 0
    assert first.content == second.content


def test_nothing_of_what_was_asked_stands_in_the_ledger_but_hashes(shop: Shop) -> None:
    key = new_key()
    shop.post("/required?token=t0ps3cret", key, json={"cents": 31337})
    recorded = next(line for line in shop.ledger.read_text().splitlines() if key in line)
    assert "t0ps3cret" not in recorded
    assert "31337" not in recorded
