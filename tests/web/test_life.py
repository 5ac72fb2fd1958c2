"""The fence's life with its application, and how many workers there are."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from effectfence import EffectFence, EffectRequest, LedgerUnavailable, NotExecuted
from effectfence.web import desk
from effectfence.web.asgi import IdempotencyMiddleware
from effectfence.web.desk import Unshared, UnsharedWarning, check_shared, own_ledger
from effectfence.web.workers import Workers, count_workers, workers_here
from tests.conftest import until

Message = dict[str, Any]


class Server:
    """The other side of ASGI's lifespan and of one request."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self.state: Message = {}
        self.task: asyncio.Task[None] | None = None

    async def lifespan(self, event: str) -> Message:
        if self.task is None:
            scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
            self.task = asyncio.create_task(self._app(scope, self._to_app.get, self._from_app.put))
        await self._to_app.put({"type": f"lifespan.{event}"})
        return await self._from_app.get()

    async def post(self, key: str, path: str = "/", **more: Any) -> list[Message]:
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"idempotency-key", key.encode())],
            "state": dict(self.state),
            **more,
        }
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self._app(scope, receive, send)
        return sent


async def has_no_lifespan(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["state"]["mark"].encode()})


async def returns_at_once(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await has_no_lifespan(scope, receive, send)


async def fails_to_start(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    raise RuntimeError("no database")


async def lives(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await has_no_lifespan(scope, receive, send)
        return
    await receive()
    scope["state"]["mark"] = "lived"
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def is_open(fence: EffectFence) -> bool:
    try:
        await fence.current("http")
    except LedgerUnavailable:
        return False
    return True


@pytest.mark.parametrize("app", [lives, has_no_lifespan, returns_at_once])
async def test_the_fence_opens_and_closes_with_its_application(app: Any, tmp_path: Path) -> None:
    server = Server(IdempotencyMiddleware(app, ledger=tmp_path / "effects.jsonl"))
    started = await server.lifespan("startup")
    fence = server.state["effectfence"]
    assert started["type"] == "lifespan.startup.complete"
    assert await is_open(fence)
    server.state.setdefault("mark", "served")
    assert (await server.post("k"))[0]["status"] == 200
    stopped = await server.lifespan("shutdown")
    assert stopped["type"] == "lifespan.shutdown.complete"
    assert not await is_open(fence)
    assert server.task is not None
    await server.task


async def test_a_fence_that_was_given_stays_its_owners() -> None:
    async with EffectFence.open("memory:") as fence:
        server = Server(IdempotencyMiddleware(lives, fence=fence))
        await server.lifespan("startup")
        assert server.state["effectfence"] is fence
        await server.lifespan("shutdown")
        assert await is_open(fence)


async def test_a_handler_that_outlasts_the_drain_is_ended_and_its_outcome_unknown() -> None:
    begun = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lives(scope, receive, send)
        begun.set()
        await asyncio.Event().wait()

    async with EffectFence.open("memory:") as fence:
        server = Server(IdempotencyMiddleware(hangs, fence=fence, drain_seconds=0.01))
        await server.lifespan("startup")
        asked = asyncio.create_task(server.post("k"))
        await begun.wait()
        await server.lifespan("shutdown")
        assert asked.done()
        record = await fence.lookup("http:k")
        assert record is not None
        assert (record.state, record.reason) == ("unknown", "cancelled: outcome unknown")
        assert server.task is not None
        server.task.cancel()
        await asyncio.wait([server.task, asked])


async def test_a_ledger_that_cannot_be_opened_keeps_the_application_from_starting(
    tmp_path: Path,
) -> None:
    (tmp_path / "effects.jsonl").write_text("not a ledger\n")
    server = Server(IdempotencyMiddleware(lives, ledger=tmp_path / "effects.jsonl"))
    failed = await server.lifespan("startup")
    assert failed["type"] == "lifespan.startup.failed"
    assert "damaged at line 1" in failed["message"]
    assert server.task is not None
    await server.task


async def test_an_application_that_fails_to_start_says_so_itself_and_the_fence_is_closed() -> None:
    server = Server(IdempotencyMiddleware(fails_to_start, ledger="memory:"))
    starting = asyncio.ensure_future(server.lifespan("startup"))
    await until(lambda: server.task is not None and server.task.done())
    assert server.task is not None
    assert str(server.task.exception()) == "no database"
    starting.cancel()


async def test_without_a_lifespan_the_first_request_opens_the_fence(tmp_path: Path) -> None:
    middleware = IdempotencyMiddleware(lives, ledger=tmp_path / "effects.jsonl")
    server = Server(middleware)
    server.state["mark"] = "first"
    first = await server.post("k")
    server.state["mark"] = "second"
    assert (await server.post("k"))[1]["body"] == first[1]["body"] == b"first"
    await middleware._desk.close()


async def test_a_ledger_that_is_damaged_refuses_what_is_fenced_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "effects.jsonl").write_text("not a ledger\n")
    server = Server(IdempotencyMiddleware(lives, ledger=tmp_path / "effects.jsonl"))
    server.state["mark"] = "served"
    assert (await server.post("k"))[0]["status"] == 503
    assert (await server.post("k", headers=[]))[0]["status"] == 200


async def test_a_client_that_leaves_before_its_body_is_whole_ran_nothing() -> None:
    messages = iter(
        [
            {"type": "http.request", "body": b"half", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Message:
        return next(messages)

    async def send(_message: Message) -> None:
        raise AssertionError("nobody is there to be answered")

    async with EffectFence.open("memory:") as fence:
        app = IdempotencyMiddleware(lives, fence=fence)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(b"idempotency-key", b"k")],
        }
        await app(scope, receive, send)
        assert fence.stats().total == 0


async def test_what_is_raised_after_an_answer_adds_nothing_to_it() -> None:
    sent: list[str] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"charged"})
        raise NotExecuted("of something else")

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
    async with EffectFence.open("memory:") as fence:
        with pytest.raises(NotExecuted):
            await IdempotencyMiddleware(app, fence=fence)(scope, receive, send)
        record = await fence.lookup("http:k")
    assert sent == ["http.response.start", "http.response.body"]
    assert record is not None
    assert record.state == "done"


@pytest.mark.parametrize("path", ["/charges", "/shop/charges"])
async def test_routes_and_links_are_those_of_a_mounted_application(path: str) -> None:
    async with EffectFence.open("memory:") as fence:
        routes = {"POST /charges": desk.Policy(required=True)}
        server = Server(IdempotencyMiddleware(lives, fence=fence, routes=routes))
        root = path.removesuffix("/charges")
        sent = await server.post("", path, headers=[], root_path=root)
        assert sent[0]["status"] == 400
        assert f'"{root}/.well-known/idempotency-key#key-missing"'.encode() in sent[1]["body"]


def test_a_fence_is_given_or_its_ledger_and_not_both() -> None:
    with pytest.raises(ValueError, match="give it, or those two"):
        IdempotencyMiddleware(lives, fence=EffectFence(), ledger="memory:")


def test_the_ledger_is_a_file_if_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert own_ledger() == tmp_path / "effectfence" / "http.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_ledger() == tmp_path / ".local" / "state" / "effectfence" / "http.jsonl"


async def test_a_ledger_that_closed_itself_is_opened_anew_for_the_next_request(
    tmp_path: Path,
) -> None:
    one = desk.Desk(ledger=tmp_path / "effects.jsonl")
    before = await one.open()
    request = EffectRequest(intent="http:k", domain="http", tool="POST /", agent="http")
    failed = LedgerUnavailable(ledger="effects.jsonl", reason="a sync failed", closed=True)
    problem = await one.explain(failed, before, request, desk.Policy())
    assert problem.kind.slug == "ledger-unavailable"
    after = await one.open()
    assert after is not before
    assert await is_open(after)
    await one.close()
    assert not await is_open(before)


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "command", "count"),
    [
        ({}, "uvicorn shop:app", 1),
        ({}, "/usr/bin/python3 -m uvicorn shop:app --workers 4", 4),
        ({}, "/usr/bin/python3 /usr/bin/uvicorn shop:app --workers=4", 4),
        ({"WEB_CONCURRENCY": "3"}, "uvicorn shop:app", 3),
        ({"UVICORN_WORKERS": "2", "WEB_CONCURRENCY": "3"}, "uvicorn shop:app", 2),
        ({"WEB_CONCURRENCY": "3"}, "uvicorn shop:app --workers 1", 1),
        ({}, "gunicorn -w 4 shop:app", 4),
        ({}, "gunicorn -w4 shop:app", 4),
        ({"GUNICORN_CMD_ARGS": "--workers=5"}, "gunicorn shop:app", 5),
        ({}, "gunicorn shop:app", None),
        ({}, "hypercorn shop:app -w 2", 2),
        ({}, "hypercorn shop:app", 1),
        ({}, "hypercorn -c hyper.toml shop:app", None),
        ({"WEB_CONCURRENCY": "3"}, "hypercorn shop:app", 1),
        ({}, "granian shop:app --interface asgi --workers 4", 4),
        ({"GRANIAN_WORKERS": "2"}, "granian shop:app", 2),
        ({}, "fastapi run shop.py --workers 4", 4),
        ({}, "python main.py", 1),
        ({"WEB_CONCURRENCY": "3"}, "python main.py", 3),
        ({"WEB_CONCURRENCY": "auto"}, "python main.py", 1),
    ],
)
def test_what_a_command_line_says_of_workers(
    environment: dict[str, str], command: str, count: int | None
) -> None:
    assert count_workers(environment, [command.split()], supervised=False).count == count


def test_a_worker_looks_at_the_command_line_of_who_started_it() -> None:
    spawned = ["python", "-c", "from multiprocessing.spawn import spawn_main", "--fork"]
    starts = ["uvicorn", "shop:app", "--workers", "4"]
    assert count_workers({}, [spawned, starts], supervised=True).count == 4
    assert count_workers({}, [spawned, ["python", "main.py"]], supervised=True).count is None


def test_this_very_process_has_no_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    assert workers_here().count == 1


def test_a_ledger_in_memory_is_refused_with_several_workers_and_warned_about_with_maybe() -> None:
    check_shared("memory:", Workers(1, "test"))
    check_shared("effects.jsonl", Workers(4, "test"))
    with pytest.raises(Unshared, match=r"4 workers serve this application \(the test\)"):
        check_shared("memory:", Workers(4, "the test"))
    with pytest.warns(UnsharedWarning, match="there may be several workers"):
        check_shared("memory:", Workers(None, "the test"))


async def test_a_given_fence_in_memory_is_held_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    async with EffectFence.open("memory:") as fence:
        server = Server(IdempotencyMiddleware(lives, fence=fence))
        failed = await server.lifespan("startup")
    assert failed["type"] == "lifespan.startup.failed"
    assert "4 workers" in failed["message"]
    assert server.task is not None
    await server.task


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_forked_worker_opens_the_ledger_anew(tmp_path: Path) -> None:
    one = desk.Desk(ledger=tmp_path / "effects.jsonl")
    before = await one.open()
    assert await one.open() is before
    one._process = os.getppid()  # as if this process had been forked from it
    after = await one.open()
    assert after is not before
    await before.aclose()
    await one.close()
