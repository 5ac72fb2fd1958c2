"""Faults that people reported in public, over HTTP: shared/CASES.md 3, 7, 21, 28, 31, 32, 33."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from effectfence import EffectFence, FenceConfig
from effectfence.web.aiohttp import idempotent, setup
from effectfence.web.asgi import IdempotencyMiddleware
from effectfence.web.idempotency import Policy
from tests.web.serving import Shop, command, new_key, serving, until


def test_case_3_a_dry_run_never_answers_the_real_request(shop: Shop) -> None:
    key = new_key()
    dry = shop.post("/charges?dry=1", key, json={"cents": 4900})
    real = shop.post("/charges", key, json={"cents": 4900})
    assert (dry.status_code, real.status_code) == (201, 422)
    assert real.headers["content-type"] == "application/problem+json"
    assert real.json()["differs"] == ["query"]


def test_case_7_two_tenants_with_the_same_key_are_separate(shop: Shop) -> None:
    key = new_key()
    answers = {
        tenant: [shop.charge(key, headers={"Authorization": f"Bearer {tenant}"}) for _ in range(2)]
        for tenant in ("tenant_a", "tenant_b")
    }
    bodies = {tenant: {one.content for one in both} for tenant, both in answers.items()}
    assert [len(bodies[tenant]) for tenant in bodies] == [1, 1]
    assert bodies["tenant_a"] != bodies["tenant_b"]
    assert len(shop.effects(key)) == 2


def test_case_21_a_503_before_any_effect_frees_the_key_and_one_after_does_not(
    tmp_path: Path,
) -> None:
    for server in ("uvicorn", "aiohttp"):
        with serving(tmp_path / server, server) as shop:
            before, after = new_key(), new_key()
            assert [shop.post("/busy", before).status_code for _ in range(3)] == [503] * 3
            shop.open_gate("ready")
            assert shop.post("/busy", before).status_code == 200
            assert shop.post("/busy", before).headers["idempotent-replayed"] == "true"
            assert len(shop.effects(before)) == 1

            assert shop.post("/status/503", after).status_code == 503
            assert shop.post("/status/503", after).json()["type"].endswith("#outcome-unknown")
            assert len(shop.effects(after)) == 1


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian"])
def test_case_28_four_workers_on_a_ledger_in_memory_are_refused(
    tmp_path: Path, server: str
) -> None:
    shop = Shop(tmp_path / "shop")
    try:
        shop.start(command(server, shop.port, 4), EFFECTFENCE_LEDGER="memory:")
        until(lambda: "4 workers serve this application" in shop.said())
        assert "EFFECTFENCE_LEDGER=effects.jsonl" in shop.said()
        with pytest.raises(httpx.TransportError):
            shop.charge(new_key())
    finally:
        shop.stop()


def test_case_28_a_number_that_nobody_can_know_is_said_loudly(tmp_path: Path) -> None:
    program = (
        "import uvicorn\nif __name__ == '__main__':\n"
        "    uvicorn.run('tests.web.shop:app', port={port}, workers=4)\n"
    )
    shop = Shop(tmp_path / "shop")
    script = tmp_path / "main.py"
    script.write_text(program.format(port=shop.port))
    try:
        shop.start([*command("uvicorn", 0)[:1], str(script)], EFFECTFENCE_LEDGER="memory:")
        shop.answers()
        until(lambda: shop.said().count("there may be several workers") >= 4)
    finally:
        shop.stop()


def test_case_28_with_the_file_ledger_four_workers_run_forty_requests_once(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "shop", "uvicorn", workers=4) as shop:
        shop.all_answer(4)
        key = new_key()
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: shop.charge(key), range(40)))
        assert {answer.status_code for answer in answers} == {201}
        assert len(shop.effects(key)) == 1


def test_case_31_another_body_or_route_with_the_same_key_is_422(shop: Shop) -> None:
    key = new_key()
    assert shop.charge(key).status_code == 201
    for other in (
        shop.charge(key, cents=1),
        shop.post("/echo", key, json={"cents": 4900}),
        shop.post("/versioned", key, json={"cents": 4900}),
    ):
        assert other.status_code == 422
        assert other.headers["content-type"] == "application/problem+json"
        assert other.json()["type"].endswith("#key-reused")
    assert len(shop.effects(key)) == 1


def test_case_32_a_key_whose_answer_expired_is_free_again(shop: Shop) -> None:
    key = new_key()
    answers = []

    def ran_twice() -> bool:
        answers.append(shop.post("/brief", key))
        return len(shop.effects(key)) == 2

    until(ran_twice)
    assert {answer.status_code for answer in answers} == {200}
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 2


async def nothing(*_: object) -> None:
    pass


def test_case_33_retries_beyond_the_life_of_a_key_are_refused_at_configuration() -> None:
    day = FenceConfig(retry_horizon=86400.0)
    hour = Policy(result_ttl=3600.0)
    for given in ({"policy": hour}, {"routes": {"/charges": hour}}):
        with pytest.raises(
            ValueError, match=r"retry_horizon \(86400 s\) is longer than result_ttl"
        ):
            IdempotencyMiddleware(nothing, config=day, **given)
        with pytest.raises(ValueError, match="would run a second time"):
            IdempotencyMiddleware(nothing, fence=EffectFence(day), **given)
        with pytest.raises(ValueError, match="would run a second time"):
            setup(web.Application(), config=day, **given)
    with pytest.raises(ValueError, match="would run a second time"):
        FenceConfig(retry_horizon=86400.0, result_ttl=3600.0)


async def test_case_33_a_decorated_handlers_policy_is_refused_before_anything_is_served() -> None:
    @idempotent(result_ttl=3600.0)
    async def charge(_request: web.Request) -> web.Response:
        raise NotImplementedError

    app = web.Application()
    app.router.add_post("/charges", charge)
    setup(app, ledger="memory:", config=FenceConfig(retry_horizon=86400.0))
    runner = web.AppRunner(app)
    with pytest.raises(ValueError, match="would run a second time"):
        await runner.setup()
    await runner.cleanup()
