"""What was known before: an earlier `--json` report, or the same tree at another revision."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from effectfence.scan.packages import CannotScan, unpack_tar

_LARGEST: int = 64 << 20


def known(path: Path) -> set[str]:
    """The fingerprints in an earlier report; `CannotScan` where it is none."""
    try:
        if path.stat().st_size > _LARGEST:
            raise CannotScan(f"the baseline {path} is larger than a report can be")
        report = json.loads(path.read_text("utf-8"))
        return {str(one["fingerprint"]) for one in report["findings"]}
    except OSError as error:
        raise CannotScan(f"the baseline {path} could not be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CannotScan(
            f"the baseline {path} is no report: make one with `effectfence scan … --json > {path}`"
        ) from None


@contextmanager
def at_revision(root: Path, revision: str) -> Iterator[Path]:
    """The tree of a git revision, beside the work tree, which is left alone."""
    if revision.startswith("-"):
        raise CannotScan(f"--diff {revision}: not a revision")
    folder = root if root.is_dir() else root.parent
    with tempfile.TemporaryDirectory(prefix="effectfence-scan-") as place:
        archive = Path(place) / "tree.tar"
        command = [
            "git",
            "-C",
            str(folder),
            "archive",
            "--format=tar",
            f"--output={archive}",
            revision,
            ".",
        ]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except FileNotFoundError:
            raise CannotScan("--diff needs git, which was not found") from None
        except subprocess.TimeoutExpired:
            raise CannotScan(f"--diff {revision}: git took longer than 120 s") from None
        if ran.returncode:
            said = (ran.stderr.strip().splitlines() or ["git failed"])[0]
            raise CannotScan(f"--diff {revision}: {said}; nothing was compared")
        unpacked = Path(place) / "tree"
        unpack_tar(archive, unpacked)
        yield unpacked if root.is_dir() else unpacked / root.name
