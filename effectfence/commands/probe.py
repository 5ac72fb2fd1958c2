"""`effectfence probe`."""

from __future__ import annotations

import argparse

from effectfence.commands.printing import WrongUse


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence probe`."""
    parser.set_defaults(verb=_probe)


def _probe(options: argparse.Namespace) -> int:
    raise WrongUse("this version has no `probe` yet")
