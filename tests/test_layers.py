"""Imports only ever point up this list. A new file must be given its place in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import effectfence

ROOT = Path(effectfence.__file__).parent
LAYERS = (
    "effectfence._native",
    "effectfence.canonical",
    "effectfence.clock",
    "effectfence.models",
    "effectfence.errors",
    "effectfence.background",
    "effectfence.templates",
    "effectfence.stores.contract",
    "effectfence.claims",
    "effectfence.records",
    "effectfence.rules",
    "effectfence.stores.watchers",
    "effectfence.stores.table",
    "effectfence.stores.memory",
    "effectfence.stores.machine",
    "effectfence.stores.holders",
    "effectfence.stores.order_lock",
    "effectfence.stores.ledger_format",
    "effectfence.stores.ledger_file",
    "effectfence.stores.file",
    "effectfence.stores.address",
    "effectfence.stores.postgres_server",
    "effectfence.stores.postgres_watch",
    "effectfence.stores.postgres_doctor",
    "effectfence.stores.postgres",
    "effectfence.stores.opening",
    "effectfence.stores.follow",
    "effectfence.events",
    "effectfence.custody",
    "effectfence.leases",
    "effectfence.effects",
    "effectfence.reconcile",
    "effectfence.threads",
    "effectfence.fence",
    "effectfence.prometheus",
    "effectfence.otel",
    "effectfence.blocking",
    "effectfence.testing",
    "effectfence.doctor",
    "effectfence.web.workers",
    "effectfence.web.idempotency",
    "effectfence.web.desk",
    "effectfence.web.asgi",
    "effectfence.web.aiohttp",
    "effectfence.commands.printing",
    "effectfence.scan.tables",
    "effectfence.scan.parse",
    "effectfence.scan.ir",
    "effectfence.scan.lower_python",
    "effectfence.scan.lower_javascript",
    "effectfence.scan.program",
    "effectfence.scan.values",
    "effectfence.scan.natives",
    "effectfence.scan.machine",
    "effectfence.scan.model",
    "effectfence.scan.words",
    "effectfence.scan.statements",
    "effectfence.scan.commands_run",
    "effectfence.scan.writes",
    "effectfence.scan.guards",
    "effectfence.scan.retries",
    "effectfence.scan.hints",
    "effectfence.scan.declared",
    "effectfence.scan.effects",
    "effectfence.scan.files",
    "effectfence.scan.workers",
    "effectfence.scan.scan",
    "effectfence.scan.findings",
    "effectfence.scan.suppress",
    "effectfence.scan.packages",
    "effectfence.scan.baseline",
    "effectfence.scan.report_text",
    "effectfence.scan.report_json",
    "effectfence.scan.sarif",
    "effectfence.scan.badge",
    "effectfence.mcp.wire",
    "effectfence.mcp.pipes",
    "effectfence.mcp.child",
    "effectfence.mcp.observe",
    "effectfence.mcp.policy",
    "effectfence.mcp.call",
    "effectfence.mcp.tools",
    "effectfence.mcp.fenced",
    "effectfence.mcp.inprocess",
    "effectfence.mcp.wrap",
    "effectfence.mcp.border",
    "effectfence.mcp.server",
    "effectfence.mcp.http",
    "effectfence.mcp.charge_server",
    "effectfence.mcp.client",
    "effectfence.mcp.evidence",
    "effectfence.mcp.probe",
    "effectfence.mcp.demo",
    "effectfence.commands.ledger.opened",
    "effectfence.commands.ledger.shown",
    "effectfence.commands.ledger.looking",
    "effectfence.commands.ledger.following",
    "effectfence.commands.ledger.saying",
    "effectfence.commands.ledger.checking",
    "effectfence.commands.ledger.preparing",
    "effectfence.commands.doctor",
    "effectfence.commands.serve",
    "effectfence.commands.wrap",
    "effectfence.commands.probe",
    "effectfence.commands.scan",
    "effectfence.commands.demo",
    "effectfence.cli",
    "effectfence.__main__",
)
"""From the floor up; `effectfence` itself is the shop window and stands above them all."""

KNOWS_NOTHING_OF_INTENTS = ("claims", "records", "rules", "custody", "effects", "fence")
SURFACES = tuple(
    name
    for name in LAYERS
    if name.startswith(
        ("effectfence.cli", "effectfence.commands.", "effectfence.mcp.", "effectfence.web.")
    )
    or name in ("effectfence.doctor", "effectfence.__main__")
)


def module_of(path: Path) -> str:
    return ".".join(("effectfence", *path.relative_to(ROOT).with_suffix("").parts))


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py")) if path.name != "__init__.py"}


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, lazily or not, except for types alone."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            known = [name for name in names if name in FILES]
            yield from known or [module]


def ours(path: Path) -> list[str]:
    return [name for name in imports(path) if name.split(".")[0] == "effectfence"]


def test_every_file_has_its_place() -> None:
    assert set(FILES) == set(LAYERS), "give it a place in LAYERS, and say in DESIGN what it owns"


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_up_the_list(module: str) -> None:
    below = LAYERS[: LAYERS.index(module)]
    allowed = {*below, "effectfence._core"} if module == "effectfence._native" else set(below)
    assert set(ours(FILES[module])) <= allowed


@pytest.mark.parametrize("module", [name for name in LAYERS if ".stores." in name])
def test_stores_know_nothing_of_intents(module: str) -> None:
    named = {name.rpartition(".")[2] for name in ours(FILES[module])}
    assert not named & set(KNOWS_NOTHING_OF_INTENTS)


@pytest.mark.parametrize("module", [name for name in LAYERS if ".scan." in name])
def test_the_scanner_stands_alone(module: str) -> None:
    assert all(
        name.startswith("effectfence.scan.") for name in ours(FILES[module]) if name in FILES
    )


@pytest.mark.parametrize("module", ["claims", "records", "rules"])
def test_the_rules_have_no_clock_no_randomness_and_no_io(module: str) -> None:
    impure = {"time", "datetime", "random", "secrets", "os", "io", "asyncio", "threading", "socket"}
    assert not impure & set(imports(FILES[f"effectfence.{module}"]))
    tree = ast.parse(FILES[f"effectfence.{module}"].read_text("utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFor)]


@pytest.mark.parametrize("module", SURFACES)
def test_surfaces_never_use_the_rules(module: str) -> None:
    assert "effectfence.rules" not in ours(FILES[module])


def test_one_module_imports_the_extension() -> None:
    assert [name for name, path in FILES.items() if "effectfence._core" in imports(path)] == [
        "effectfence._native"
    ]
