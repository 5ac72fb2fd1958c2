"""`effectfence scan`, as it is called: outputs, exit codes, what is new, what is ignored."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from effectfence.cli import main
from tests.scan.reading import JAVASCRIPT, PYTHON, write

SCHEMAS = Path(__file__).with_name("schemas")
PAYS = PYTHON + (
    "import requests\n\n\n@mcp.tool()\ndef pay(cents: int) -> str:\n"
    '    return requests.post("https://bank/payments", json={"cents": cents}).text\n'
)
MORE = PAYS + (
    "\n\n@mcp.tool()\ndef refund(cents: int) -> str:\n"
    '    return requests.post("https://bank/refunds", json={"cents": cents}).text\n'
)
LOOKS = PYTHON + '@mcp.tool()\ndef look():\n    """Look."""\n'


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str | Path, cwd: Path | None = None) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        try:
            code = main(["scan", *map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def as_json(*arguments: str | Path) -> dict[str, Any]:
    ran = command(*arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def package(folder: Path, text: str = PAYS, **more: str) -> Path:
    files: Mapping[str, str] = {"server.py": text, **more}
    return write(folder / "package", files)


def test_the_text_shows_the_tool_the_write_and_where(tmp_path: Path) -> None:
    ran = command(package(tmp_path))
    assert ran.returncode == 0
    assert "Money, and a second call does it again" in ran.stdout
    assert "pay  server.py:8" in ran.stdout
    assert "POST https://bank/payments  server.py:9" in ran.stdout


def test_the_report_is_valid_against_the_schema_that_is_shipped(tmp_path: Path) -> None:
    from effectfence.scan.report_json import FORMAT, schema

    report = as_json(package(tmp_path, MORE))
    jsonschema.validate(report, json.loads(schema()))
    assert report["format"] == FORMAT
    assert {tool["name"] for tool in report["tools"]} == {"pay", "refund"}


def test_the_sarif_is_valid_and_shows_the_path_as_a_flow(tmp_path: Path) -> None:
    ran = command(package(tmp_path), "--sarif")
    log = json.loads(ran.stdout)
    jsonschema.validate(
        log,
        json.loads((SCHEMAS / "sarif-2.1.0.json").read_text("utf-8")),
        cls=jsonschema.Draft4Validator,
    )
    (result,) = log["runs"][0]["results"]
    assert result["level"] == "note"
    steps = result["codeFlows"][0]["threadFlows"][0]["locations"]
    lines = [step["location"]["physicalLocation"]["region"]["startLine"] for step in steps]
    assert lines == [8, 9]


def test_a_fingerprint_outlives_moved_code_and_tells_another_write_apart(tmp_path: Path) -> None:
    def marks(text: str, name: str) -> list[str]:
        found = as_json(package(tmp_path / name, text))["findings"]
        return [one["fingerprint"] for one in found]

    here = marks(PAYS, "a")
    assert marks("# moved\n\n\n" + PAYS, "b") == here
    assert marks(PAYS.replace("payments", "transfers"), "c") != here


def test_nothing_it_says_judges(tmp_path: Path) -> None:
    folder = package(tmp_path, MORE, **{"main.go": "package main\n"})
    said = command(folder).stdout + command(folder, "--json").stdout
    said += command(folder, "--sarif").stdout + command("--help").stdout
    words = r"verdict|risk|sever|danger|safe\b|unsafe|vulnerab|critical|insecure|warning|bad\b"
    assert not re.findall(words, said, re.I)


def test_no_tools_never_look_like_a_clean_report(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"main.py": "print('no server here')\n"})
    ran = command(folder)
    assert ran.returncode == 0
    assert "No tools recognised. That is no statement about what this source does." in ran.stdout
    report = as_json(folder)
    assert report["tools_recognised"] is False
    assert report["complete"] is False
    assert command(folder, "--fail-on", "any").returncode == 1


@pytest.mark.parametrize(
    ("text", "arguments", "code"),
    [
        (PAYS, (), 0),
        (PAYS, ("--fail-on", "any"), 1),
        (LOOKS, ("--fail-on", "any"), 0),
        (PAYS, ("--fail-on", "contradiction"), 0),
        (
            PAYS.replace("@mcp.tool()", '@mcp.tool(annotations={"readOnlyHint": True})'),
            ("--fail-on", "contradiction"),
            1,
        ),
    ],
)
def test_the_exit_code_says_what_was_asked(
    text: str, arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    assert command(package(tmp_path, text), *arguments).returncode == code


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-folder",),
        (".", "--fail-on", "new"),
        (".", "--json", "--sarif"),
        (".", "--baseline", "no-such-file"),
        (".", "--diff", "no-such-revision"),
        ("pip:../../etc",),
        ("pip:git+https://x/y",),
        ("npm:--help",),
        ("npm:file:../x",),
    ],
)
def test_wrong_use_ends_with_2_and_one_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = command(*arguments, cwd=package(tmp_path))
    assert ran.returncode == 2, ran.stdout
    assert ran.stderr.startswith("effectfence: ")
    assert ran.stderr.count("\n") == 1


def test_against_a_baseline_only_what_came_since_is_new(tmp_path: Path) -> None:
    folder = package(tmp_path)
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(as_json(folder)))
    assert command(folder, "--baseline", baseline, "--fail-on", "new").returncode == 0
    package(tmp_path, "# moved\n" + MORE)
    ran = command(folder, "--baseline", baseline, "--fail-on", "new")
    assert ran.returncode == 1
    assert "refund" in ran.stdout.split("New since then")[1]
    report = as_json(folder, "--baseline", baseline)
    assert [(one["tool"], one["new"]) for one in report["findings"]] == [
        ("pay", False),
        ("refund", True),
    ]


def test_a_baseline_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    ran = command(package(tmp_path), "--baseline", tmp_path / "x.json")
    assert ran.returncode == 2
    assert "--json >" in ran.stderr


def test_against_a_revision_only_what_came_since_is_new(tmp_path: Path) -> None:
    folder = package(tmp_path)

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert command(folder, "--diff", "HEAD", "--fail-on", "new").returncode == 0
    package(tmp_path, MORE)
    ran = command(folder, "--diff", "HEAD", "--fail-on", "new")
    assert (ran.returncode, "refund" in ran.stdout.split("New since then")[1]) == (1, True)


IGNORE = "# effectfence: ignore[repeats-effect]"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"@mcp.tool()\n{IGNORE} reason=the bank knows the order\ndef pay", "def pay"),
        ("def pay(cents: int) -> str:", f"def pay(cents: int) -> str:  {IGNORE} reason=known"),
        ("    return", f"    {IGNORE} reason=the bank knows the order\n    return"),
    ],
    ids=["above the function", "beside it", "above the write"],
)
def test_a_comment_with_a_reason_ignores_what_it_stands_at(
    before: str, after: str, tmp_path: Path
) -> None:
    text = (
        PAYS.replace(before, after)
        if after.startswith(("def pay(", "    #"))
        else PAYS.replace("@mcp.tool()\n", before.removesuffix("def pay"))
    )
    folder = package(tmp_path, text)
    report = as_json(folder)
    (found,) = report["findings"]
    assert found["ignored"]["reason"] in ("the bank knows the order", "known")
    assert report["ignores"] == []
    assert command(folder, "--fail-on", "any").returncode == 0


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("# effectfence: ignore[repeats-effect]", "gives no reason"),
        ("# effectfence: ignore reason=so", "names no rule"),
        ("# effectfence: ignore[everything] reason=so", "there is no rule `everything`"),
        ("# effectfence: ignore[same-state] reason=so", "matches nothing any more"),
    ],
)
def test_an_ignore_that_ignores_nothing_is_reported(
    comment: str, says: str, tmp_path: Path
) -> None:
    folder = package(tmp_path, PAYS.replace("def pay", f"{comment}\ndef pay"))
    report = as_json(folder)
    assert [says in one["says"] for one in report["ignores"]] == [True]
    assert command(folder, "--fail-on", "any").returncode == 1


def test_comments_in_javascript_ignore_too(tmp_path: Path) -> None:
    text = (
        JAVASCRIPT
        + """
        // effectfence: ignore[repeats-effect] reason=a test account
        server.tool("pay", "d", {}, async () => fetch("https://x", { method: "POST" }));
        """
    )
    (found,) = as_json(write(tmp_path, {"a.js": text}))["findings"]
    assert found["ignored"]["reason"] == "a test account"


def test_a_badge_only_where_everything_was_seen(tmp_path: Path) -> None:
    badge = tmp_path / "badge.svg"
    command(package(tmp_path), "--badge", badge)
    assert "1 tools, 1 unguarded" in badge.read_text()
    badge.unlink()
    package(tmp_path, **{"main.go": "package main\n"})
    ran = command(tmp_path / "package", "--badge", badge)
    assert not badge.exists()
    assert "no badge: something stayed unseen: main.go:1" in ran.stderr


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    block = "import sys; sys.modules['tree_sitter'] = None; from effectfence.cli import main; "
    ran = subprocess.run(
        [sys.executable, "-c", f"{block}sys.exit(main(['scan', {str(package(tmp_path))!r}]))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ran.returncode == 2
    assert "pip install 'effectfence-asyncio[scan]'" in ran.stderr


def test_what_it_prints_commands_no_terminal(tmp_path: Path) -> None:
    text = PYTHON + '@mcp.tool(name="pay\\x1b[31m")\ndef pay():\n    open("x", "a")\n'
    assert "\x1b" not in command(package(tmp_path, text)).stdout
