"""`effectfence demo`."""

from __future__ import annotations

import argparse

from effectfence.commands.printing import WrongUse


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence demo`."""
    parser.set_defaults(verb=_demo)


def _demo(options: argparse.Namespace) -> int:
    raise WrongUse("this version has no `demo` yet")
