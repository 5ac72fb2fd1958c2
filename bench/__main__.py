"""Every figure, in one table: claim, target, measured, held.

    python -m bench [--full] [--json]

Each bench runs in a process of its own. Exit 1 if one could not run; a figure that is not reached
is a figure, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

from bench._measure import Row, say, table

BENCHES = (
    "pair",
    "once_memory",
    "decorator",
    "durable",
    "group_commit",
    "processes",
    "storm_durable",
    "opening",
    "wrapped",
    "http",
    "scan",
    "postgres",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--full", action="store_true", help="longer runs, full sizes")
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    failed = 0
    for name in BENCHES:
        say(f"bench.{name} …")
        its = _rows(name, options.full)
        failed += its is None
        rows += its or [Row(f"bench.{name}", "", "could not run; the reason stands above")]
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))
    return 1 if failed else 0


def _rows(name: str, full: bool) -> list[Row] | None:
    command = [sys.executable, "-m", f"bench.{name}", "--json", *(["--full"] if full else [])]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        return None
    return [Row(**row) for row in json.loads(ran.stdout)]


if __name__ == "__main__":
    sys.exit(main())
