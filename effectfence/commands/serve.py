"""`effectfence serve`."""

from __future__ import annotations

import argparse

from effectfence.commands.printing import WrongUse


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence serve`."""
    parser.set_defaults(verb=_serve)


def _serve(options: argparse.Namespace) -> int:
    raise WrongUse("this version has no `serve` yet")
