"""`effectfence wrap`."""

from __future__ import annotations

import argparse

from effectfence.commands.printing import WrongUse


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence wrap`."""
    parser.set_defaults(verb=_wrap)


def _wrap(options: argparse.Namespace) -> int:
    raise WrongUse("this version has no `wrap` yet")
