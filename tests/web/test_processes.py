"""Several workers on one ledger, workers that die, clients that hang up."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.web.serving import Shop, command, new_key, raw_request, serving, until

AT_ONCE = 40


def forty_at_once(shop: Shop, key: str) -> list[httpx.Response]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda _: shop.charge(key), range(AT_ONCE)))


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian"])
def test_forty_at_once_on_four_workers_run_once(tmp_path: Path, server: str) -> None:
    with serving(tmp_path / "shop", server, workers=4) as shop:
        shop.all_answer(4)
        key = new_key()
        answers = forty_at_once(shop, key)
        assert [answer.status_code for answer in answers] == [201] * AT_ONCE
        assert len({answer.content for answer in answers}) == 1
        assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
        assert len(shop.effects(key)) == 1


def test_a_killed_worker_leaves_unknown_which_an_operator_settles_and_all_replay(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "shop", "uvicorn", workers=4) as shop:
        shop.all_answer(4)
        key = new_key()
        ask = {"cents": 4900, "gate": "never"}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(shop.post, "/charges", key, json=ask)
            until(lambda: shop.effects(key))
            os.kill(shop.effects(key)[0], signal.SIGKILL)
            assert isinstance(asked.exception(), httpx.TransportError)
        answer = shop.post("/charges", key, json=ask)
        assert answer.status_code == 409
        assert answer.json()["type"].endswith("#outcome-unknown")
        assert "retry-after" not in answer.headers
        assert shop.state(key) == "unknown"

        result = '{"http_status": 201, "http_body": {"charge": "ch_1", "cents": 4900}}'
        why = ("--by", "ada", "--reason", "the bank's own page shows it")
        shop.ledger_said("settle", f"http:{key}", "--result", result, *why)
        replayed = [shop.post("/charges", key, json=ask) for _ in range(8)]
        assert {answer.status_code for answer in replayed} == {201}
        assert {answer.headers["idempotent-replayed"] for answer in replayed} == {"true"}
        assert replayed[0].json() == {"charge": "ch_1", "cents": 4900}
        assert replayed[0].headers["content-type"] == "application/json"
        assert len(shop.effects(key)) == 1


@pytest.mark.parametrize(
    "server", ["uvicorn", "hypercorn", "granian", "aiohttp", "aiohttp --cancels"]
)
def test_a_client_that_hangs_up_ends_nothing_and_its_retry_replays(
    tmp_path: Path, server: str
) -> None:
    with serving(tmp_path / "shop", server) as shop:
        for path, ask in (
            ("/charges", {"cents": 1, "gate": "open"}),
            ("/stream", {"pieces": 100, "gate": "open"}),
        ):
            key = new_key()
            (shop.folder / "gates" / "open").unlink(missing_ok=True)
            shop.hang_up_during(path, key, ask)
            until(lambda: not connections(shop.port))
            shop.open_gate("open")
            answer = shop.post(path, key, json=ask)
            assert answer.status_code in (200, 201)
            assert answer.headers["idempotent-replayed"] == "true"
            assert len(shop.effects(key)) == 1
            if path == "/stream":
                assert len(answer.content) == 800


@pytest.mark.parametrize("server", ["uvicorn", "aiohttp"])
@pytest.mark.parametrize("path", ["/charges", "/stream", "/required"])
def test_no_client_sees_the_end_of_an_answer_that_is_not_recorded(
    tmp_path: Path, server: str, path: str
) -> None:
    with serving(tmp_path / "shop", server) as shop:
        key = new_key()
        ask = {"cents": 1, "pieces": 2, "gate": key}
        with socket.create_connection(("127.0.0.1", shop.port)) as client:
            client.sendall(raw_request(path, key, ask))
            until(lambda: shop.effects(key))
            with shop.paused():
                shop.open_gate(key)
                until(lambda: waits_for_a_lock(shop.effects(key)[0]))
                seen = _arrived(client)
            assert b'"ch_1"' not in seen
            assert b"\r\n0\r\n" not in seen
            answer = seen
            while not answer.endswith((b'"cents":1}', b'"cents": 1}', b"\r\n0\r\n\r\n")):
                answer += client.recv(65536)
        again = shop.post(path, key, json=ask)
        assert again.headers["idempotent-replayed"] == "true"


def _arrived(client: socket.socket) -> bytes:
    """What the client could read by now."""
    client.setblocking(False)
    try:
        return client.recv(65536)
    except BlockingIOError:
        return b""
    finally:
        client.setblocking(True)


def waits_for_a_lock(process: int) -> bool:
    """Whether the system's list says so: `1: -> FLOCK ADVISORY WRITE <process> …`"""
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(row[1] == "->" and row[5] == str(process) for row in rows)


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian", "aiohttp"])
def test_a_server_that_is_stopped_records_what_it_could_not_finish_as_unknown(
    tmp_path: Path, server: str
) -> None:
    shop = Shop(tmp_path / "shop")
    try:
        shop.start(command(server, shop.port), SHOP_DRAIN="0.1")
        shop.answers()
        key = new_key()
        shop.hang_up_during("/charges", key, {"cents": 1, "gate": "never"})
        shop.stop()
        assert shop.state(key) == "unknown"
        shop.start(command(server, shop.port))
        shop.answers()
        assert shop.post("/charges", key, json={"cents": 1, "gate": "never"}).status_code == 409
        assert len(shop.effects(key)) == 1
    finally:
        shop.stop()


def test_outcomes_survive_a_restart(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop")
    try:
        key = new_key()
        contents = set()
        for _ in range(2):
            shop.start(command("uvicorn", shop.port))
            shop.answers()
            contents.add(shop.charge(key).content)
            shop.stop()
        assert len(contents) == 1
        assert len(shop.effects(key)) == 1
    finally:
        shop.stop()


def connections(port: int) -> int:
    """How many established connections this machine has to a port of its own."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
