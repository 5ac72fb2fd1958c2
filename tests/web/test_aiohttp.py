"""What is aiohttp's own: decorators, views, odd answers. Real sockets, in this process."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from effectfence import EffectFence, NotExecuted
from effectfence.web.aiohttp import FENCE, idempotent, setup
from effectfence.web.idempotency import Policy

KEY = {"Idempotency-Key": "k"}
ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.fixture
async def fence() -> AsyncIterator[EffectFence]:
    async with EffectFence.open("memory:") as opened:
        yield opened


def client_of(app: web.Application) -> Any:
    return TestClient(TestServer(app))


def app_of(handler: Any, **more: Any) -> web.Application:
    app = web.Application()
    app.router.add_post("/", handler)
    setup(app, **more)
    return app


async def twice(client: Any, path: str = "/") -> list[tuple[int, bytes, bool]]:
    answers = []
    for _ in range(2):
        async with client.post(path, headers=KEY) as answer:
            replayed = "Idempotent-Replayed" in answer.headers
            answers.append((answer.status, await answer.read(), replayed))
    return answers


async def plain(_request: web.Request) -> web.Response:
    ran.append("plain")
    return web.Response(text="plain")


@idempotent(required=True)
async def decorated(_request: web.Request) -> web.Response:
    ran.append("decorated")
    return web.Response(text="decorated")


class Desk:
    @idempotent(Policy(required=True))
    async def method(self, _request: web.Request) -> web.Response:
        ran.append("method")
        return web.Response(text="method")


class View(web.View):
    @idempotent()
    async def post(self) -> web.StreamResponse:
        ran.append(await self.request.text())
        return web.Response(text="view")


async def test_decorated_handlers_alone_are_fenced_if_that_is_wanted(fence: EffectFence) -> None:
    app = web.Application()
    app.router.add_post("/plain", plain)
    app.router.add_post("/decorated", decorated)
    app.router.add_post("/method", Desk().method)
    app.router.add_view("/view", View)
    setup(app, fence=fence, everywhere=False)
    async with client_of(app) as client:
        for path in ("/decorated", "/method"):
            assert (await client.post(path)).status == 400
        for path in ("/plain", "/decorated", "/method", "/view"):
            key = {"Idempotency-Key": path}
            for _ in range(2):
                answer = await client.post(path, headers=key)
                assert (answer.status, await answer.text()) == (200, path[1:])
    assert ran == ["plain", "plain", "decorated", "method", ""]
    assert decorated.__name__ == "decorated"


async def test_a_decorated_handler_without_setup_says_so() -> None:
    app = web.Application()
    app.router.add_post("/", decorated)
    async with client_of(app) as client:
        assert (await client.post("/", headers=KEY)).status == 500
    assert ran == []


@pytest.mark.parametrize("changes", [{"outcomes": {"x": "record"}}, {"wait_seconds": -1}])
def test_wrong_words_are_said_where_they_stand(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"outcomes|wait_seconds"):
        idempotent(**changes)


async def test_the_fence_opens_and_closes_with_the_application(tmp_path: Path) -> None:
    app = app_of(plain, ledger=tmp_path / "effects.jsonl")
    async with client_of(app) as client:
        assert await twice(client) == [(200, b"plain", False), (200, b"plain", True)]
        assert app[FENCE].stats().replayed == 1
    async with client_of(app_of(plain, ledger=tmp_path / "effects.jsonl")) as client:
        assert (await twice(client))[0] == (200, b"plain", True)
    assert ran == ["plain"]


async def test_a_subapplications_handlers_are_fenced_by_the_applications_fence(
    fence: EffectFence,
) -> None:
    sub = web.Application()
    sub.router.add_post("/plain", plain)
    sub.router.add_post("/decorated", decorated)
    app = web.Application()
    app.add_subapp("/sub", sub)
    setup(app, fence=fence)
    async with client_of(app) as client:
        assert await twice(client, "/sub/plain") == [(200, b"plain", False), (200, b"plain", True)]
        assert (await client.post("/sub/decorated")).status == 400


async def test_a_raised_answer_is_an_answer(fence: EffectFence) -> None:
    async def declined(_request: web.Request) -> web.Response:
        ran.append("declined")
        raise web.HTTPPaymentRequired(text="no funds")

    async with client_of(app_of(declined, fence=fence)) as client:
        assert await twice(client) == [(402, b"no funds", False), (402, b"no funds", True)]
    assert ran == ["declined"]


async def test_a_compressed_answer_is_recorded_as_it_is_and_replayed_plain(
    fence: EffectFence,
) -> None:
    async def small(_request: web.Request) -> web.Response:
        response = web.Response(text="x" * 5000)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        await response.write(b"x" * 5000)
        return response

    for number, handler in enumerate((small, stream)):
        app = app_of(handler, fence=fence.scoped(str(number)))
        async with client_of(app) as client:
            answers = await twice(client)
        assert answers == [(200, b"x" * 5000, False), (200, b"x" * 5000, True)]


@pytest.mark.parametrize("kind", ["file", "payload"])
async def test_what_cannot_be_kept_is_done_and_said(
    fence: EffectFence, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "receipt").write_bytes(b"receipt")

    async def charge(_request: web.Request) -> web.StreamResponse:
        ran.append(kind)
        if kind == "file":
            return web.FileResponse(tmp_path / "receipt")
        return web.Response(body=io.BytesIO(b"receipt"))

    async with client_of(app_of(charge, fence=fence)) as client:
        first, second = await twice(client)
    assert first == (200, b"receipt", False)
    assert second[0] == 409
    assert b"result-not-recorded" in second[1]
    assert ran == [kind]


async def test_a_stream_that_says_not_executed_in_the_middle_frees_its_key(
    fence: EffectFence,
) -> None:
    async def charge(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"looking")
        raise NotExecuted("sold out")

    async with client_of(app_of(charge, fence=fence)) as client:
        with pytest.raises(Exception, match=r".*"):
            await (await client.post("/", headers=KEY)).read()
        assert await fence.lookup("http:k") is None


async def test_the_handlers_word_on_a_stream_is_not_sent(fence: EffectFence) -> None:
    async def charge(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Effectfence-Outcome": "release"})
        await response.prepare(request)
        ran.append("charge")
        return response

    async with client_of(app_of(charge, fence=fence)) as client:
        for _ in range(2):
            async with client.post("/", headers=KEY) as answer:
                assert "Effectfence-Outcome" not in answer.headers
                assert answer.headers["Idempotency-Key-Lifetime"] == "86400"
    assert ran == ["charge", "charge"]


async def test_what_no_route_answers_is_not_fenced(fence: EffectFence) -> None:
    async with client_of(app_of(plain, fence=fence)) as client:
        assert await twice(client, "/nowhere") == [(404, b"404: Not Found", False)] * 2
    assert fence.stats().total == 0


async def test_a_domain_is_the_routes_own_or_named(fence: EffectFence) -> None:
    async def named(request: web.Request) -> str:
        await asyncio.sleep(0)
        return f"order:{request.match_info['id']}"

    for domain, key in ((None, "routed"), (named, "named")):
        app = web.Application()
        app.router.add_post("/orders/{id}", plain)
        setup(app, fence=fence, domain=domain)
        async with client_of(app) as client:
            await client.post("/orders/7", headers={"Idempotency-Key": key})
    found = {record.intent: record.domain async for record in fence.intents()}
    assert found == {"http:routed": "http:POST /orders/{id}", "http:named": "order:7"}
