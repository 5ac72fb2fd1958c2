"""`effectfence doctor`: what is installed, and what a ledger really promises here."""

from __future__ import annotations

import argparse
import os

from effectfence import doctor
from effectfence.commands.printing import print_facts, print_json, printable


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence doctor`."""
    parser.usage = "effectfence doctor [LEDGER] [--json]"
    parser.description = (
        "What is installed, which core is active, and what the ledger really promises here."
    )
    parser.epilog = "example: effectfence doctor effects.jsonl"
    parser.add_argument("ledger", nargs="?", help="a path; left out, what EFFECTFENCE_LEDGER names")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(verb=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    named = options.ledger or os.environ.get("EFFECTFENCE_LEDGER")
    report = doctor.examine(named or None)
    if options.json:
        findings = [vars(finding) for finding in report.findings]
        print_json({**report.facts, "findings": findings, "healthy": report.healthy})
    else:
        print_facts(report.facts)
        for finding in report.findings:
            print(f"{'PROBLEM' if finding.broken else 'warning'}: {printable(finding.says)}")
            print(f"  mend it: {printable(finding.mend)}")
    return 0 if report.healthy else 1
