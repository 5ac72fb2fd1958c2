"""Packages by name: the registries' own clients fetch them, and nothing of them runs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.scan.reading import JAVASCRIPT, PYTHON
from tests.scan.test_command import command

TOOL = PYTHON + "@mcp.tool()\ndef pay():\n    open('x', 'a')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for all there is."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")


def test_a_wheel_is_fetched_by_pip_and_scanned(index: Path) -> None:
    wheel(index, "some_server", {"some_server/server.py": TOOL})
    ran = command("pip:some-server==1.0")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("pip:some-server==1.0: 1 file")
    assert "pay  some_server/server.py:6" in ran.stdout


def test_what_would_have_to_be_built_is_refused_and_not_run(index: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    setup = (
        f"open({str(mark)!r}, 'w')\nfrom setuptools import setup\nsetup(name='x', version='1.0')\n"
    )
    with tarfile.open(index / "evil-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", "Name: evil\nVersion: 1.0\n")):
            member = tarfile.TarInfo(f"evil-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    ran = command("pip:evil==1.0")
    assert (ran.returncode, mark.exists()) == (2, False)
    assert "nothing was scanned" in ran.stderr


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """A registry on this machine that npm is told to use: path to answer."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: apt-get install npm")
    answers: dict[str, bytes] = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"{}")

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
        monkeypatch.setenv("npm_config_userconfig", os.devnull)
        answers["host"] = f"http://127.0.0.1:{server.server_port}".encode()
        yield answers
        server.shutdown()
        thread.join()


def test_a_package_is_fetched_by_npm_and_its_scripts_do_not_run(
    registry: dict[str, bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    scripts = dict.fromkeys(("prepack", "prepare", "install", "postpack"), f"touch {mark}")
    manifest = {"name": "@some/server", "version": "1.0.0", "scripts": scripts}
    text = (
        JAVASCRIPT
        + 'server.registerTool("pay", {}, async () => fetch("/x", { method: "POST" }));\n'
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, body in (("package.json", json.dumps(manifest)), ("index.js", text)):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body.encode()))
    digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    dist = {
        "tarball": f"{registry['host'].decode()}/server.tgz",
        "integrity": f"sha512-{digest}",
    }
    registry["/server.tgz"] = packed.getvalue()
    registry["/@some%2fserver"] = json.dumps(
        {
            "name": "@some/server",
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": {**manifest, "dist": dist}},
        }
    ).encode()
    ran = command("npm:@some/server@1.0.0")
    assert ran.returncode == 0, ran.stderr
    assert "pay  index.js:4" in ran.stdout
    assert not mark.exists()


def test_a_package_that_is_not_there_is_one_sentence(registry: dict[str, bytes]) -> None:
    ran = command("npm:no-such-package@1.0.0")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
