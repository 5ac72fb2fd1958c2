"""Packages by name: fetched by the registry's own client, unpacked within bounds, never executed.

1. Only wheels and npm tarballs are fetched: building an sdist would run its code.
2. What is unpacked is source text alone, below one folder; links, devices and names that lead out
   of it are left out.
3. Time and size are bounded before anything is trusted: an archive's own numbers count for nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Final

from effectfence.scan.files import LARGEST_FILE, MOST_BYTES, MOST_FILES
from effectfence.scan.model import Place, Unseen
from effectfence.scan.parse import ENDINGS, NOT_READ

_SECONDS: Final = 180
_LARGEST_ARCHIVE: Final = 256 << 20
_PYTHONS: Final = ("", "3.13", "3.12")
_PIP: Final = re.compile(
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._,-]*\])?(?:==[A-Za-z0-9.!+_-]+)?$"
)
_NPM: Final = re.compile(
    r"^(?:@[a-z0-9][a-z0-9._~-]*/)?[A-Za-z0-9][A-Za-z0-9._~-]*(?:@[A-Za-z0-9][A-Za-z0-9.+-]*)?$"
)
_KEPT: Final = frozenset((*ENDINGS, *NOT_READ))


class CannotScan(Exception):
    """What was named can't be scanned; nothing was."""


@dataclass(slots=True)
class Unpacked:
    """A package's source, in a folder that goes again."""

    folder: Path
    unseen: list[Unseen] = field(default_factory=list)


def is_package(name: str) -> bool:
    return name.startswith(("pip:", "npm:"))


@contextmanager
def fetched(name: str) -> Iterator[Unpacked]:
    """`pip:name==1.2` or `npm:@scope/name@1.2`, fetched and unpacked."""
    registry, _, wanted = name.partition(":")
    pattern = _PIP if registry == "pip" else _NPM
    if not pattern.match(wanted):
        example = "pip:mcp-server-git==2026.10.19" if registry == "pip" else "npm:@scope/name@1.2.3"
        raise CannotScan(f"{name}: not a package of the registry; as in {example}")
    with tempfile.TemporaryDirectory(prefix="effectfence-scan-") as place:
        folder = Path(place)
        archive = (_pip if registry == "pip" else _npm)(wanted, folder)
        unpacked = Unpacked(folder / "source")
        if archive.suffix == ".whl":
            unpacked.unseen = unpack_zip(archive, unpacked.folder)
        else:
            unpacked.unseen = unpack_tar(archive, unpacked.folder)
            unpacked.folder = _npm_root(unpacked.folder)
        yield unpacked


def _pip(wanted: str, folder: Path) -> Path:
    said = ""
    for python in _PYTHONS:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
            "--dest",
            str(folder),
        ]
        command += ["--python-version", python] if python else []
        said = _run([*command, "--", wanted], folder, f"pip:{wanted}")
        archives = sorted(folder.glob("*.whl"))
        if archives:
            return archives[0]
    raise CannotScan(
        f"pip:{wanted} could not be fetched: {said or 'it has no wheel'} (only wheels are: "
        "building anything else would run it); nothing was scanned"
    )


def _npm(wanted: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise CannotScan(f"npm:{wanted} needs npm, which was not found; nothing was scanned")
    command = [npm, "pack", "--ignore-scripts", "--silent", "--pack-destination", str(folder)]
    said = _run([*command, "--", wanted], folder, f"npm:{wanted}")
    archives = sorted(folder.glob("*.tgz"))
    if not archives:
        raise CannotScan(f"npm:{wanted} could not be fetched: {said}; nothing was scanned")
    return archives[0]


def _run(command: list[str], folder: Path, shown: str) -> str:
    """Run a registry's client; the last thing it said, should it have failed."""
    try:
        ran = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=_bounded if os.name == "posix" else None,
        )
    except subprocess.TimeoutExpired:
        raise CannotScan(f"{shown} took longer than {_SECONDS} s; nothing was scanned") from None
    lines = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["its client says nothing"])[-1].strip()[:200]


def _bounded() -> None:
    """In the client's process: no file of it grows beyond what is taken."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_ARCHIVE, _LARGEST_ARCHIVE))


# --- unpacking ------------------------------------------------------------------------------------


class _Budget:
    """What may still be written, whatever an archive says of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = MOST_FILES
        self.bytes = MOST_BYTES
        self.unseen: list[Unseen] = []
        self.full = False

    def take(self, name: str, open_: Callable[[], IO[bytes] | None]) -> None:
        inside = PurePosixPath(name.replace("\\", "/"))
        if inside.is_absolute() or ".." in inside.parts or inside.suffix.lower() not in _KEPT:
            return
        if len(name) > 1000 or len(inside.parts) > 60:
            return
        if self.files <= 0 or self.bytes <= 0:
            if not self.full:
                self._leave(name, "more is packed than is read: the rest was left out")
            self.full = True
            return
        target = self.folder / inside
        try:
            with open_() or _nothing() as source:
                text = source.read(min(LARGEST_FILE, self.bytes) + 1)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
        except (
            OSError,
            RuntimeError,
            ValueError,
            zipfile.BadZipFile,
            EOFError,
            tarfile.TarError,
            NotImplementedError,
        ) as error:
            self._leave(name, f"could not be unpacked: {str(error)[:100]}")
            return
        self.files -= 1
        self.bytes -= len(text)

    def _leave(self, name: str, says: str) -> None:
        self.unseen.append(Unseen("bounded", says, Place(name[:200], 1)))


def _nothing() -> IO[bytes]:
    import io

    return io.BytesIO()


def unpack_zip(archive: Path, folder: Path) -> list[Unseen]:
    """A wheel's source, within bounds."""
    budget = _Budget(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                linked = (member.external_attr >> 16) & 0o170000 == 0o120000
                if not member.is_dir() and not linked:
                    budget.take(member.filename, lambda m=member: packed.open(m))  # type: ignore[misc]
                if budget.full:
                    break
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise CannotScan(f"{archive.name} is no archive: {error}; nothing was scanned") from None
    return budget.unseen


def unpack_tar(archive: Path, folder: Path) -> list[Unseen]:
    """A tarball's source, within bounds; read as a stream, so that a bomb ends where it must."""
    budget = _Budget(folder)
    folder.mkdir(parents=True, exist_ok=True)
    passed = 0
    try:
        with tarfile.open(archive, "r|*") as packed:
            for member in packed:
                passed += member.size
                if member.isreg():
                    budget.take(member.name, lambda m=member: packed.extractfile(m))  # type: ignore[misc]
                if passed > 4 * MOST_BYTES:
                    budget._leave(member.name, "more is packed than is read: the rest was left out")
                    break
                if budget.full:
                    break
    except (tarfile.TarError, ValueError, OSError, EOFError) as error:
        raise CannotScan(f"{archive.name} is no archive: {error}; nothing was scanned") from None
    return budget.unseen


def _npm_root(folder: Path) -> Path:
    """npm's tarballs hold one folder, mostly `package`."""
    inner = [path for path in folder.iterdir() if path.is_dir()]
    return inner[0] if len(inner) == 1 else folder
