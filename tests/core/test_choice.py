"""Which core runs, who says so, and what a wheel is called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from effectfence import _native

ROOT = Path(__file__).parents[2]
ASK = "from effectfence import _native; print(_native.ACTIVE, '|', _native.describe())"
HIDE_C_CORE = "import sys; sys.modules['effectfence._core'] = None; "


def ask(core: str | None, code: str = ASK) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EFFECTFENCE_CORE": core or ""}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )


def test_the_stand_in_can_be_chosen() -> None:
    assert ask("python").stdout == "python | python (chosen by EFFECTFENCE_CORE)\n"


def test_the_stand_in_says_why_it_runs_where_the_c_core_is_missing() -> None:
    answer = ask(None, HIDE_C_CORE + ASK).stdout
    assert answer.startswith("python | python (no C core: ")
    assert "effectfence._core" in answer


def test_a_demanded_core_that_is_missing_is_an_error_that_says_what_to_do() -> None:
    refused = ask("c", HIDE_C_CORE + ASK)
    assert refused.returncode != 0
    assert "Install a C compiler and reinstall effectfence-asyncio" in refused.stderr


def test_an_unknown_core_is_an_error() -> None:
    refused = ask("rust")
    assert refused.returncode != 0
    assert "EFFECTFENCE_CORE is 'rust'; it can be 'c', 'python' or unset" in refused.stderr


def test_ci_runs_each_core_when_it_says_so() -> None:
    if demanded := os.environ.get("EFFECTFENCE_CORE"):
        assert demanded == _native.ACTIVE
    assert _native.describe().startswith(f"{_native.ACTIVE} (")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a source distribution holds, with nothing built in it."""
    tree = tmp_path / "checkout"
    shutil.copytree(ROOT / "csrc", tree / "csrc", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "effectfence").mkdir()
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    for name in ("__init__.py", "_native.py", "py.typed"):
        shutil.copy(ROOT / "effectfence" / name, tree / "effectfence" / name)
    return tree


def wheel(checkout: Path, compiler: str | None) -> Path:
    """Builds with every warning an error, and offline: the `test` extra has what it requires."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "EFFECTFENCE_WERROR": "1"}
    if compiler is not None:
        environment["CC"] = compiler
    command = "from setuptools.build_meta import build_wheel; print(build_wheel('out'))"
    (checkout / "out").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=checkout,
    )
    assert done.returncode == 0, done.stderr
    return checkout / "out" / done.stdout.splitlines()[-1]


@pytest.mark.compiler
def test_a_wheel_with_the_c_core_serves_every_python_of_the_platform(checkout: Path) -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("free-threaded Pythons get their own wheel")
    if shutil.which(os.environ.get("CC") or "cc") is None:
        pytest.skip("needs a C compiler")
    built = wheel(checkout, None)
    assert "-cp311-abi3-" in built.name
    assert "effectfence/_core.abi3.so" in zipfile.ZipFile(built).namelist()


@pytest.mark.compiler
def test_a_wheel_without_the_c_core_is_pure_whatever_was_built_before(checkout: Path) -> None:
    wheel(checkout, None)
    built = wheel(checkout, "false")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
