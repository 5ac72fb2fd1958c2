"""The C code alone, without Python: under sanitizers, in numbers that Python can't reach.

Each detector is also shown to catch a bug planted for it. What is missing here (a
compiler, its sanitizers, an arm64 emulator) is skipped with its name, except in CI.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(600)]

CSRC = Path(__file__).parents[2] / "csrc"
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]
PLAIN = ["-O2"]
THREAD = ["-O1", "-g", "-fsanitize=thread"]
ADDRESS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILDS = pytest.mark.parametrize(
    "flags", [PLAIN, ADDRESS, THREAD], ids=["plain", "address and undefined", "thread"]
)

LONG = bool(os.environ.get("EFFECTFENCE_LONG"))
EXCHANGES = 100_000_000
EXCHANGES_UNDER_TSAN = EXCHANGES if LONG else 10_000_000
LONGEST = 2000 if LONG else 320

Build = Callable[..., list[str]]


def not_here(what: str) -> NoReturn:
    if os.environ.get("EFFECTFENCE_CI"):
        pytest.fail(f"CI must have {what}")
    pytest.skip(f"needs {what}")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles sources of csrc; the command that runs the result."""

    def compiled(*sources: str, flags: list[str]) -> list[str]:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        if shutil.which(compiler[0]) is None:
            not_here("a C compiler (CC)")
        empty = tmp_path / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        program = tmp_path / "program"
        probe = [*compiler, *flags, str(empty), "-o", str(program)]
        if subprocess.run(probe, capture_output=True).returncode:
            not_here(f"a compiler that takes {shlex.join(flags)}")
        compile_ = [*compiler, *STRICT, *flags, *(str(CSRC / s) for s in sources)]
        done = subprocess.run(
            [*compile_, "-o", str(program)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [str(program)]

    return compiled


def run(command: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=0 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=1 exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def expected_digests(longest: int) -> list[str]:
    """What csrc/tests/digests.c has to print."""
    data = bytes((151 * byte + 97) % 256 for byte in range(longest))
    digests = [hashlib.sha256(data[:length]).hexdigest() for length in range(longest + 1)]
    lines = []
    for length, digest in enumerate(digests):
        lines += [f"whole {length} {digest}", f"pieces {length} {digest}"]
    lines += [f"span {length} {digest}" for length, digest in enumerate(digests)]
    return [*lines, f"refused 4 {longest // 2}"]


@BUILDS
def test_four_threads_never_win_a_number_twice(build: Build, flags: list[str]) -> None:
    exchanges = EXCHANGES_UNDER_TSAN if flags is THREAD else EXCHANGES
    done = run(build("counter.c", "tests/stress.c", flags=flags), exchanges)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    match = re.match(r"exchanges (\d+): (\d+) won, stands at (\d+), 0 backwards\n", done.stdout)
    assert match, done.stdout
    assert match[2] == match[3]
    assert "each once" in done.stdout
    assert "growth: 80000 words, 0 wrong" in done.stdout


@BUILDS
@pytest.mark.parametrize("implementation", [0, 1, 2], ids=["portable", "sha-ni", "arm64"])
def test_digests_agree_with_hashlib(build: Build, flags: list[str], implementation: int) -> None:
    done = run(build("sha256.c", "tests/digests.c", flags=flags), implementation, LONGEST)
    if done.returncode == 3:  # this CPU lacks it
        assert done.stdout.startswith("not here")
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected_digests(LONGEST)


@pytest.mark.parametrize("implementation", [0, 2], ids=["portable", "arm64"])
def test_digests_agree_on_arm64_too(tmp_path: Path, implementation: int) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        not_here("aarch64-linux-gnu-gcc and qemu-aarch64")
    program = tmp_path / "digests"
    sources = [str(CSRC / "sha256.c"), str(CSRC / "tests/digests.c")]
    subprocess.run([compiler, *STRICT, *PLAIN, "-static", *sources, "-o", program], check=True)
    done = run([emulator, str(program)], implementation, 320)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected_digests(320)


def test_a_planted_check_then_act_wins_a_number_twice(build: Build) -> None:
    """The stress test's own count notices it, without a sanitizer."""
    flags = [*PLAIN, "-DEFFECTFENCE_PLANT_RACE"]
    done = run(build("counter.c", "tests/stress.c", flags=flags), 1_000_000)
    assert done.returncode == 1, done.stdout


def test_a_planted_race_is_reported_by_thread_sanitizer(build: Build) -> None:
    flags = [*THREAD, "-DEFFECTFENCE_PLANT_RACE"]
    done = run(build("counter.c", "tests/stress.c", flags=flags), 1_000_000)
    assert done.returncode == 66, done.stdout
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert "counter.c" in done.stderr


def test_a_planted_overflow_is_reported_by_address_sanitizer(build: Build) -> None:
    flags = [*ADDRESS, "-DEFFECTFENCE_PLANT_OVERFLOW"]
    done = run(build("sha256.c", "tests/digests.c", flags=flags), 0, 320)
    assert done.returncode == 66, done.stdout
    assert "heap-buffer-overflow" in done.stderr
    assert "ef_sha256_spans" in done.stderr


def test_a_planted_undefined_shift_is_reported_by_ubsan(build: Build) -> None:
    flags = [*ADDRESS, "-DEFFECTFENCE_PLANT_UB"]
    done = run(build("sha256.c", "tests/digests.c", flags=flags), 0, 320)
    assert done.returncode != 0
    assert re.search(r"sha256\.c:\d+:\d+: runtime error: left shift of \d+ by 24", done.stderr)
