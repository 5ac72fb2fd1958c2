"""`effectfence scan`: which tools of an MCP server could fire twice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from effectfence.commands.printing import WrongUse, print_json, printable, say

if TYPE_CHECKING:
    from effectfence.scan.findings import Found
    from effectfence.scan.model import Report, Unseen
    from effectfence.scan.suppress import Judged

_FAIL_ON: Final = ("new", "any", "contradiction")


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence scan`."""
    parser.usage = "effectfence scan [PATH | pip:NAME==VERSION | npm:NAME@VERSION] [OPTION ...]"
    parser.description = (
        "Read the source of an MCP server, and say which of its tools change the world, by which "
        "path, what guards the path, and what could not be seen. Nothing of it is run. Exit code 0 "
        "whatever is found; with --fail-on, 1 if it is; 2: nothing could be scanned."
    )
    parser.epilog = "example: effectfence scan npm:resend-mcp@2.6.0"
    parser.add_argument("path", nargs="?", default=".", help="a folder, a file or a package (.)")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    parser.add_argument("--sarif", action="store_true", help="the report as SARIF 2.1.0")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write there, and the text to the terminal"
    )
    parser.add_argument(
        "--baseline", metavar="FILE", type=Path, help="an earlier --json report: what is new since?"
    )
    parser.add_argument("--diff", metavar="REV", help="what is new since that git revision?")
    parser.add_argument(
        "--fail-on",
        choices=_FAIL_ON,
        help="exit 1 on a finding that is new; on any; on a hint that the code contradicts",
    )
    parser.add_argument(
        "--badge", metavar="FILE", type=Path, help="an SVG, only if nothing stayed unseen"
    )
    parser.set_defaults(verb=_scan)


def _scan(options: argparse.Namespace) -> int:
    _check(options)
    from effectfence.scan.packages import CannotScan
    from effectfence.scan.parse import GrammarMissing

    try:
        with _source(options.path) as (root, unpacked):
            report, judged, new = _report(options, root)
            report.unseen = [*unpacked, *report.unseen]
            report.root = options.path
    except (CannotScan, GrammarMissing) as error:
        raise WrongUse(str(error)) from None
    _write(options, report, judged, new)
    _badge(options, report)
    return _exit_code(options, report, judged, new)


def _check(options: argparse.Namespace) -> None:
    if options.json and options.sarif:
        raise WrongUse("--json and --sarif are two answers: choose one; nothing was scanned")
    if options.fail_on == "new" and not (options.baseline or options.diff):
        raise WrongUse("--fail-on new: new since what? give --baseline FILE or --diff REV")


@contextmanager
def _source(named: str) -> Iterator[tuple[Path, list[Unseen]]]:
    from effectfence.scan.packages import fetched, is_package

    if is_package(named):
        with fetched(named) as unpacked:
            yield unpacked.folder, list(unpacked.unseen)
        return
    path = Path(named)
    if not path.exists():
        raise WrongUse(f"{named}: there is no such file or folder; nothing was scanned")
    yield path, []


def _report(options: argparse.Namespace, root: Path) -> tuple[Report, Judged, set[str] | None]:
    from effectfence.scan.baseline import at_revision, known
    from effectfence.scan.findings import findings
    from effectfence.scan.scan import scan
    from effectfence.scan.suppress import judge

    before: set[str] | None = known(options.baseline) if options.baseline else None
    if options.diff:
        with at_revision(root, options.diff) as then:
            earlier = {one.fingerprint for one in findings(scan(then).report)}
        before = earlier if before is None else before | earlier
    done = scan(root)
    judged = judge(findings(done.report), done.sources)
    return done.report, judged, _new(judged.kept, before)


def _new(kept: list[Found], before: set[str] | None) -> set[str] | None:
    return None if before is None else {one.fingerprint for one in kept} - before


def _write(
    options: argparse.Namespace, report: Report, judged: Judged, new: set[str] | None
) -> None:
    from effectfence.scan.report_json import as_json
    from effectfence.scan.report_text import as_text
    from effectfence.scan.sarif import as_sarif

    shown: object = None
    if options.sarif:
        from effectfence.doctor import version

        shown = as_sarif(report, judged, version(), new)
    elif options.json or options.output:
        shown = as_json(report, judged, new)
    if options.output:
        text = json.dumps(shown, indent=1)
        options.output.write_text(text + "\n", "utf-8")
    elif shown is not None:
        print_json(shown)
        return
    for line in as_text(report, judged, new).splitlines():
        print(printable(line))


def _badge(options: argparse.Namespace, report: Report) -> None:
    if not options.badge:
        return
    from effectfence.scan.badge import badge, refused

    why = refused(report)
    if why:
        say(f"no badge: {why}", 0)
    else:
        options.badge.write_text(badge(report), "utf-8")


def _exit_code(
    options: argparse.Namespace, report: Report, judged: Judged, new: set[str] | None
) -> int:
    from effectfence.scan.findings import CONTRADICTIONS, WRITES

    if options.fail_on is None:
        return 0
    if not report.tools:
        say("--fail-on: no tools were recognised, so nothing was looked at", 0)
        return int(options.fail_on == "any")
    if options.fail_on == "new":
        failing = [one for one in judged.kept if one.fingerprint in (new or ())]
    elif options.fail_on == "contradiction":
        failing = [one for one in judged.kept if one.rule in CONTRADICTIONS]
    else:
        failing = [one for one in judged.kept if one.rule in (*WRITES, *CONTRADICTIONS)]
    if failing:
        say(f"--fail-on {options.fail_on}: {len(failing)}, the first at {failing[0].place}", 1)
    sys.stdout.flush()
    return int(bool(failing))
