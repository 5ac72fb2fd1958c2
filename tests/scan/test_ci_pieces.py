"""The hook, the action and the page say what the program does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from effectfence.scan.findings import RULES
from effectfence.scan.report_json import schema
from tests.scan.test_command import PAYS, package

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scan.md").read_text("utf-8")
HOOK = (ROOT / ".pre-commit-hooks.yaml").read_text("utf-8")
ACTION = (ROOT / "scan-action" / "action.yml").read_text("utf-8")


def test_the_hook_installs_what_the_extra_names() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["scan"]
    assert re.findall(r"^    - (\S+)$", HOOK, re.M) == extra


def test_the_page_names_every_rule_and_every_member_of_the_report() -> None:
    assert all(f"`{rule}`" in PAGE for rule in RULES)
    members = json.loads(schema())
    known = [
        members,
        members["$defs"]["tool"],
        members["$defs"]["write"],
        members["$defs"]["finding"],
    ]
    for one in known:
        assert all(f"`{name}" in PAGE for name in one["properties"])


def test_the_action_s_script_scans_and_ends_as_it_was_asked(tmp_path: Path) -> None:
    """Its own shell script, with the program that is being tested in place of pip's."""
    script = ACTION.split("run: |\n")[1].replace("\n        ", "\n")
    stub = tmp_path / "bin"
    stub.mkdir()
    (stub / "python3").write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\ncp "$STUBS/pip" "$STUBS/effectfence" "$3/bin/"\n'
    )
    (stub / "pip").write_text('#!/bin/sh\necho "$@" > "$INSTALLED"\n')
    (stub / "effectfence").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m effectfence "$@"\n')
    for file in stub.iterdir():
        file.chmod(0o755)
    folder = package(tmp_path, PAYS)
    for fail_on, code in (("", 0), ("any", 1), ("contradiction", 0)):
        ran = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={
                **os.environ,
                "PATH": f"{stub}:{os.environ['PATH']}",
                "STUBS": str(stub),
                "INSTALLED": str(tmp_path / "installed"),
                "PYTHONPATH": str(ROOT),
                "SCAN_PATH": ".",
                "SCAN_FAIL_ON": fail_on,
                "SCAN_SARIF": "out.sarif",
                "SCAN_VERSION": "1.2.3",
            },
        )
        assert ran.returncode == code, ran.stderr
        assert json.loads((folder / "out.sarif").read_text())["version"] == "2.1.0"
    assert "effectfence-asyncio[scan]==1.2.3" in (tmp_path / "installed").read_text()
