"""What is installed here, and what a ledger really promises here. Looks, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import platform
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec

from effectfence import _native, records
from effectfence.errors import LedgerCorrupt, LedgerUnavailable
from effectfence.stores import machine
from effectfence.stores.address import scheme_of, shown
from effectfence.stores.file import verify
from effectfence.stores.opening import ENGINES

DISTRIBUTION = "effectfence-asyncio"
_OTHER_PROJECT = "effectfence"
_READ_AT_MOST = 64 << 20
"""Bytes; a longer ledger is left to `ledger verify`."""

_GONE_AT_POWER_OFF = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, and the line that mends it."""

    says: str
    mend: str
    broken: bool = False
    """Whether it keeps the fence from working, rather than from working well."""


@dataclass
class Report:
    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(finding.broken for finding in self.findings)


def version() -> str:
    """Of the installed distribution; `0` with a word on it when run from a source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0 (not installed: run from a source tree)"


def examine(ledger: str | None) -> Report:
    """Look at the installation, and at `ledger` (a path, `memory:` or a database's address) if one
    is named.

    Raises `ValueError` for a kind of ledger that this version does not have.
    """
    scheme = scheme_of(ledger or "")
    if scheme and not _has_doctor(scheme):
        raise ValueError(f"no store for {scheme}:// in this version")
    report = Report()
    report.facts.update(_installation())
    report.findings.extend(_installation_findings())
    if ledger is None:
        report.facts["ledger"] = "none named (name one, or set EFFECTFENCE_LEDGER)"
    elif ledger in ("memory", "memory:"):
        report.facts["ledger"] = "memory:"
        report.facts["promise"] = (
            "one effect per intent within one process, for as long as it lives; forgotten with it"
        )
    elif scheme:
        _examine_database(ledger, scheme, report)
    else:
        _examine_file(os.path.abspath(ledger), report)
    return report


# --- the installation -----------------------------------------------------------------------------


def _installation() -> dict[str, str]:
    threads = " free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    libraries = (f"{name} {_version_of(name)}" for name in ("pydantic", "orjson", "cffi"))
    return {
        "effectfence": version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}{threads}",
        "executable": sys.executable,
        "platform": platform.platform(),
        "core": _native.describe(),
        "libraries": ", ".join(libraries),
        "mcp server": _mcp_server(),
    }


def _mcp_server() -> str:
    """Whether `effectfence serve` has what it needs."""
    if find_spec("mcp_types") is None or find_spec("mcp") is None:
        return f"not installed: pip install '{DISTRIBUTION}[mcp]'"
    return f"mcp {_version_of('mcp')}"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _installation_findings() -> Iterator[Finding]:
    if _native.ACTIVE == "python" and os.environ.get("EFFECTFENCE_CORE") != "python":
        yield Finding(
            "the C core is not there; the stand-in keeps the same promises, more slowly",
            "install a C compiler, then: pip install --force-reinstall --no-cache-dir "
            f"--no-binary {DISTRIBUTION} {DISTRIBUTION}",
        )
    if _version_of(_OTHER_PROJECT) != "(not installed)":
        yield Finding(
            f"the distribution {_OTHER_PROJECT!r} is installed too; it is another project, and the "
            "two overwrite each other's files",
            f"pip uninstall -y {_OTHER_PROJECT} {DISTRIBUTION} && pip install {DISTRIBUTION}",
            broken=True,
        )


# --- a database -----------------------------------------------------------------------------------


def _has_doctor(scheme: str) -> bool:
    engine = ENGINES.get(scheme)
    return engine is not None and find_spec(f"effectfence.stores.{engine[0]}_doctor") is not None


def _examine_database(ledger: str, scheme: str, report: Report) -> None:
    """What the engine's own module finds."""
    engine = ENGINES[scheme][0]
    try:
        module = import_module(f"effectfence.stores.{engine}_doctor")
    except ModuleNotFoundError as error:
        report.facts["ledger"] = shown(ledger)
        mend = f"pip install '{DISTRIBUTION}[{engine}]'"
        report.findings.append(Finding(f"{error.name} is not installed", mend, broken=True))
        return
    facts, words = asyncio.run(module.examine(ledger))
    report.facts.update(facts)
    report.findings.extend(Finding(*word) for word in words)


# --- a ledger file --------------------------------------------------------------------------------


def _examine_file(path: str, report: Report) -> None:
    folder = os.path.dirname(path)
    facts, findings = report.facts, report.findings
    facts["ledger"] = path
    facts["promise"] = (
        "one effect per intent among all processes of this machine that use this file, over their "
        "crashes and restarts, and over power cuts as far as the disk keeps what it says it synced"
    )
    findings.extend(_folder_findings(folder, facts))
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        facts["state"] = "not there yet; made when it is first opened"
        return
    except OSError as error:
        findings.append(Finding(machine.explain(path, error), f"ls -ld {path}", broken=True))
        return
    facts["permissions"] = f"{stat.filemode(found.st_mode)}, owner {found.st_uid}"
    facts["size"] = f"{found.st_size:,} bytes"
    findings.extend(_file_findings(path, found, facts))


def _folder_findings(folder: str, facts: dict[str, str]) -> Iterator[Finding]:
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)  # what is missing will be made
    try:
        kind = _file_system(folder)
        machine.check_folder(folder)
    except (machine.Unsuitable, OSError) as error:
        yield Finding(str(error), _mend(str(error), folder), broken=True)
        return
    facts["file system"] = kind or "unknown"
    if kind in _GONE_AT_POWER_OFF:
        yield Finding(
            f"{folder} is on {kind}, in memory: at power-off the ledger is forgotten",
            "name a ledger on a disk: EFFECTFENCE_LEDGER=~/.local/state/effectfence/ledger.jsonl",
        )
    if not os.access(folder, os.W_OK):
        yield Finding(f"{folder} can't be written by this user", f"ls -ld {folder}", broken=True)


def _file_findings(path: str, found: os.stat_result, facts: dict[str, str]) -> Iterator[Finding]:
    try:
        descriptor = machine.open_file(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        yield Finding(machine.explain(path, error), f"ls -ld {path}", broken=True)
        return
    try:
        machine.check_file(path, descriptor)
    except machine.Unsuitable as error:
        yield Finding(str(error), _mend(str(error), path), broken=True)
        return
    finally:
        machine.close_file(descriptor)
    if stat.S_IMODE(found.st_mode) & 0o077:
        yield Finding("others may read what the agents did", f"chmod 600 {path}")
    if found.st_size > _READ_AT_MOST:
        facts["state"] = f"not read here, it is long: effectfence ledger verify {path}"
        return
    yield from _content_findings(path, facts)


def _content_findings(path: str, facts: dict[str, str]) -> Iterator[Finding]:
    try:
        summary = verify(path, records.check_body)
    except (LedgerCorrupt, LedgerUnavailable) as error:
        yield Finding(str(error), f"effectfence ledger verify {path}", broken=True)
        return
    facts["state"] = f"whole: {summary.lines:,} lines, {summary.records:,} records"
    if summary.torn_bytes:
        facts["state"] += f", {summary.torn_bytes:,} bytes beyond what was acknowledged"


def _file_system(folder: str) -> str:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return machine._mount_of(descriptor)[1]
    finally:
        os.close(descriptor)


def _mend(sentence: str, path: str) -> str:
    """The line that a sentence of `machine` names itself, else one that shows what there is."""
    _, quote, rest = sentence.partition("`")
    return rest.partition("`")[0] if quote else f"ls -ld {path}"
