"""The command `effectfence` on a PostgreSQL ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence import EffectFence
from tests.conftest import asked, claimed
from tests.engines import PostgresServer
from tests.remote.test_postgres_server import as_user, configured, schema_of

pytestmark = pytest.mark.rig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.schema_url()


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "effectfence", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_what_init_prints_makes_the_schema(postgres_server: PostgresServer, url: str) -> None:
    schema = schema_of(url)
    printed = command("ledger", "init", "--print-sql", "--schema", schema)
    assert printed.returncode == 0
    postgres_server.sql(printed.stdout)
    assert command("ledger", "init", url).stdout.startswith("ready: postgresql://127.0.0.1")
    assert postgres_server.sql(f"SELECT count(*) FROM {schema}.meta") == "1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schema", "x"], "expected a LEDGER"),
        ([], "expected a LEDGER"),
        (["effects.jsonl"], "only a PostgreSQL ledger"),
        (["--print-sql", "--schema", "a b"], "no name for a schema"),
    ],
)
def test_init_refuses_what_means_nothing(arguments: list[str], says: str) -> None:
    ran = command("ledger", "init", *arguments, EFFECTFENCE_LEDGER="")
    assert ran.returncode == 2
    assert says in ran.stderr


async def test_the_operators_hands_work_on_it(url: str) -> None:
    async with EffectFence.open(url) as fence:
        await fence.abort(await claimed(fence), "the line went dead")
    assert command("ledger", "list", url, "--state", "unknown").stdout.count("charge:o1") == 1
    ran = command(
        "ledger", "settle", "charge:o1", "--result", "1", "--by", "ada", "--reason", "seen",
        EFFECTFENCE_LEDGER=url,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    async with EffectFence.open(url) as fence:
        assert (await fence.lookup("charge:o1")).state == "done"  # type: ignore[union-attr]
        assert (await fence.prepare(asked())).cert.result == 1  # type: ignore[union-attr]


def examined(url: str) -> tuple[int, dict[str, object]]:
    ran = command("doctor", url, "--json")
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def test_doctor_tells_what_the_server_promises_and_changes_nothing(
    postgres_server: PostgresServer, url: str
) -> None:
    code, report = examined(url)
    assert (code, report["findings"]) == (0, [])
    assert report["fsync"] == report["full_page_writes"] == report["synchronous_commit"] == "on"
    assert report["synchronous standbys"] == "none"
    assert "a failover to a standby may forget" in str(report["promise"])
    assert "not there yet" in str(report["schema"])
    assert postgres_server.sql(f"SELECT to_regnamespace('{schema_of(url)}')") == ""
    assert command("ledger", "init", url).returncode == 0
    assert "version 2" in str(examined(url)[1]["schema"])


def test_doctor_names_what_is_wrong_and_the_line_that_mends_it(
    postgres_server: PostgresServer, url: str
) -> None:
    with configured(postgres_server, "fsync", "off"):
        code, report = examined(url)
    assert code == 1
    assert [f["says"].partition(":")[0] for f in report["findings"]] == ["fsync=off"]  # type: ignore[attr-defined]
    role = f"stranger_{schema_of(url)}"
    postgres_server.sql(f"CREATE ROLE {role} LOGIN")
    code, report = examined(as_user(url, role))
    assert code == 1
    assert "may not make a schema" in str(report["findings"])
    code, report = examined("postgresql://ann:s3cr3t@127.0.0.1:1/db")
    assert code == 1
    assert "can't be reached" in str(report["findings"])
    assert "s3cr3t" not in str(report)
