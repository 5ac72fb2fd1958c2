"""`effectfence scan` against 552 tools of 30 published packages that people labelled by hand.

    python -m bench.scan            fetch the packages (once), scan, and print the figures

`scan_labels.jsonl` holds, for each tool: file, line, whether it writes, whether a second call has a
second effect, the line that does it, the guard, the annotations. `candidate`: it writes without an
effective visible guard. Labels that are certainly wrong stand in `CORRECTIONS`, each with its
reason; the table is by the corrected labels, and says what the labels as they came would give.
`scan_challenge.jsonl` names six packages whose tools can hardly be read from source.

Packages are fetched by the scanner itself, with pip and npm, and kept in `.cache/scan`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench._measure import Row, main, say
from effectfence.scan.model import Report, Tool
from effectfence.scan.packages import fetched
from effectfence.scan.scan import scan

HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parent / ".cache" / "scan"
GUARDS: Final = HERE.parent / "tests" / "scan" / "guards"
HINTS: Final = ("readOnlyHint", "destructiveHint", "idempotentHint")
NEAR: Final = 4
BUNDLE_LINES: Final = 50_000

_ALSO_NOT_DESTRUCTIVE: Final = (
    {"annotations": {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True}},
    "its declaration says destructive_hint=False too",
)
CORRECTIONS: Final[dict[tuple[str, str], tuple[dict[str, Any], str]]] = {
    ("mcp-server-fetch", "fetch"): _ALSO_NOT_DESTRUCTIVE,
    **{
        ("mcp-server-git", f"git_{name}"): _ALSO_NOT_DESTRUCTIVE
        for name in ("status", "diff_unstaged", "diff_staged", "diff", "log", "show", "branch")
    },
    ("gmail-mcp", "send-approved-email"): (
        {"evidence": "gmail_mcp/tools.py:426"},
        "gmail_send.py, which the label names, is imported by nobody",
    ),
    ("mcp-server-kubernetes", "cleanup"): (
        {"evidence": "dist/utils/kubernetes-manager.js:229"},
        "it deletes through the API; execFileSyncSafe, which the label names, is never reached",
    ),
}


@dataclass
class Share:
    """So many of so many."""

    held: int = 0
    of: int = 0

    def count(self, holds: bool) -> None:
        self.held += holds
        self.of += 1

    @property
    def value(self) -> float:
        return self.held / self.of if self.of else 0.0

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({self.held}/{self.of})"


@dataclass
class Figures:
    tools_recall: Share = field(default_factory=Share)
    tools_precision: Share = field(default_factory=Share)
    candidates_recall: Share = field(default_factory=Share)
    candidates_precision: Share = field(default_factory=Share)
    repeats_recall: Share = field(default_factory=Share)
    near: Share = field(default_factory=Share)
    annotations: Share = field(default_factory=Share)


def measure(full: bool) -> list[Row]:
    labels = _lines("scan_labels.jsonl")
    reports = {
        (one["package"], one["version"], one["registry"]): None for one in (*labels, *_challenges())
    }
    scanned = {key[0]: _scanned(*key) for key in reports}
    corrected, as_came = Figures(), Figures()
    for package in dict.fromkeys(one["package"] for one in labels):
        its = [one for one in labels if one["package"] == package]
        _judge(corrected, scanned[package][0], [_corrected(one) for one in its])
        _judge(as_came, scanned[package][0], its)
    return [
        *_figures(corrected, as_came),
        *_guards(),
        _challenge(scanned),
        *_speed(scanned),
    ]


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text("utf-8").splitlines()]


def _challenges() -> list[dict[str, Any]]:
    return _lines("scan_challenge.jsonl")


def _corrected(label: dict[str, Any]) -> dict[str, Any]:
    found = CORRECTIONS.get((label["package"], label["tool"]))
    return {**label, **found[0]} if found else label


def _scanned(package: str, version: str, registry: str) -> tuple[Report, float, Path]:
    """A package's report, how long it took, and where its source is kept."""
    folder = CACHE / f"{package.replace('/', '__')}-{version}"
    if not folder.exists():
        name = f"{registry}:{package}{'==' if registry == 'pip' else '@'}{version}"
        say(f"fetching {name}")
        with fetched(name) as unpacked:
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(unpacked.folder, folder)
    begun = time.perf_counter()
    report = scan(folder).report
    return report, time.perf_counter() - begun, folder


# --- the labels -----------------------------------------------------------------------------------


def _judge(figures: Figures, report: Report, labels: list[dict[str, Any]]) -> None:
    """Count one package's tools into the figures."""
    found: dict[str, Tool] = {}
    for tool in report.tools:
        found.setdefault(tool.name, tool)
    by_name = {label["tool"]: label for label in labels}
    for name, label in by_name.items():
        tool_ = found.get(name)
        figures.tools_recall.count(tool_ is not None)
        if tool_ is not None:
            figures.annotations.count(_hints(tool_.annotations) == _hints(label["annotations"]))
        if label["candidate"]:
            _judge_candidate(figures, tool_, label)
    for name, tool_ in found.items():
        figures.tools_precision.count(name in by_name)
        if tool_.candidate:
            figures.candidates_precision.count(by_name.get(name, {}).get("candidate", False))


def _judge_candidate(figures: Figures, tool: Tool | None, label: dict[str, Any]) -> None:
    held = tool is not None and tool.candidate
    figures.candidates_recall.count(held)
    if label["repeat"] == "effect_repeats":
        figures.repeats_recall.count(held and tool is not None and tool.repeats == "effect")
    if held and tool is not None and label["evidence"]:
        file, _, line = label["evidence"].rpartition(":")
        figures.near.count(
            any(
                write.place.file == file and abs(write.place.line - int(line)) <= NEAR
                for write in tool.writes
            )
        )


def _hints(given: dict[str, Any] | None) -> dict[str, bool]:
    return {key: value for key, value in (given or {}).items() if key in HINTS}


def _figures(corrected: Figures, as_came: Figures) -> Iterable[Row]:
    for claim, name, target in (
        ("tools found: recall", "tools_recall", 0.98),
        ("tools found: precision", "tools_precision", 0.99),
        ("candidates: recall", "candidates_recall", 0.93),
        ("candidates: precision", "candidates_precision", 0.95),
        ("candidates that repeat: recall", "repeats_recall", 0.95),
        (f"write within {NEAR} lines of the label's", "near", 0.95),
        ("annotations right", "annotations", 1.0),
    ):
        share: Share = getattr(corrected, name)
        came: Share = getattr(as_came, name)
        told = str(share) if share == came else f"{share}; as labelled {came}"
        yield Row(f"scan: {claim}", f"{100 * target:.0f} %", told, share.value >= target)


# --- guards, challenges, speed --------------------------------------------------------------------


def _guards() -> Iterable[Row]:
    recall, precision = Share(), Share()
    files = sorted(GUARDS.glob("*.[pj][ys]"))
    for file in files:
        kinds = file.read_text("utf-8").splitlines()[0].split("guards:")[1].split(",")
        expected = {kind.strip() for kind in kinds} - {"none"}
        tools = scan(file).report.tools
        seen = {guard.kind for tool in tools for write in tool.writes for guard in write.guards}
        for kind in expected:
            recall.count(kind in seen)
        for kind in seen:
            precision.count(kind in expected)
    claim = f"scan: guards on {len(files)} files"
    yield Row(f"{claim}: recall", "90 %", str(recall), recall.value >= 0.9)
    yield Row(f"{claim}: precision", "90 %", str(precision), precision.value >= 0.9)


def _challenge(scanned: dict[str, tuple[Report, float, Path]]) -> Row:
    held = Share()
    for one in _challenges():
        report = scanned[one["package"]][0]
        held.count(bool(report.unseen) or report.complete)
    told = "a tool set in full, or what was not seen with file and line"
    return Row(f"scan: challenges: {told}", "all", str(held), held.held == held.of)


def _speed(scanned: dict[str, tuple[Report, float, Path]]) -> Iterable[Row]:
    """All packages one after the other, as they come; and one large bundle."""
    files = sum(report.files for report, _, _ in scanned.values())
    seconds = sum(spent for _, spent, _ in scanned.values())
    rate = files / seconds
    yield Row("scan: speed, servers alone", "300 files/s", f"{rate:.0f} files/s", rate >= 300)
    with tempfile.TemporaryDirectory() as place:
        tree = _tree(Path(place), scanned["mcp-server-kubernetes"][2])
        begun = time.perf_counter()
        report = scan(tree).report
        rate = report.files / (time.perf_counter() - begun)
        told = f"{rate:.0f} files/s ({report.files:,} files, {len(report.tools)} tools)"
        yield Row("scan: speed, a server in a larger source tree", "300 files/s", told, rate >= 300)
        bundle = _bundle(Path(place), scanned["@netlify/mcp"][2])
        begun = time.perf_counter()
        report = scan(bundle).report
        spent = time.perf_counter() - begun
        told = f"{spent:.2f} s ({report.lines:,} lines, {len(report.tools)} tools)"
        yield Row("scan: speed, a bundle of 50,000 lines", "2 s", told, spent <= 2)


def _tree(place: Path, server: Path) -> Path:
    """A server among two thousand files of other code: Python's own library."""
    tree = place / "tree"
    shutil.copytree(server, tree / "server")
    library = Path(json.__file__).parent.parent
    for at, file in enumerate(sorted(library.rglob("*.py"))):
        if at >= 4_000 or "site-packages" in file.parts or "test" in file.parts:
            continue
        target = tree / "library" / file.relative_to(library)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return tree


def _bundle(place: Path, server: Path) -> Path:
    """A bundled server behind as much other code as makes 50,000 lines."""
    own = next(server.glob("dist/*.js")).read_text("utf-8")
    library = "\n".join(
        f"function lib{n}(a, b) {{\n  const c = a.map((x) => x + b);\n  if (c.length > {n}) {{\n"
        f"    return lib{max(0, n - 1)}(c, b);\n  }}\n  return c.join('-');\n}}"
        for n in range((BUNDLE_LINES - own.count("\n")) // 7)
    )
    place = place / "bundle"
    place.mkdir()
    (place / "bundle.js").write_text(f"{own}\n{library}\n", "utf-8")
    return place


if __name__ == "__main__":
    main(measure, "the scanner against hand-labelled packages")
    sys.exit(0)
