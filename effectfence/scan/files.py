"""Which files are read: what a package's source is, and the bounds on it.

1. Folders of other people's code, of tests and of tools are skipped by their names below the
   scanned root; the root's own path never counts.
2. Nothing is followed out of the root: no symbolic link is entered, none is read.
3. Where there is source, what was built from it is not read too.
4. Whatever is left out is said, with its place.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from effectfence.scan.model import Place, Unseen
from effectfence.scan.parse import ENDINGS, NOT_READ
from effectfence.scan.program import Source
from effectfence.scan.tables import table

MOST_FILES: Final = 20_000
LARGEST_FILE: Final = 8 << 20
MOST_BYTES: Final = 400 << 20
DEEPEST: Final = 40

SKIPPED: Final = table(
    """node_modules bower_components vendor vendored third_party site-packages .venv venv env .env
    .tox .nox .git .hg .svn __pycache__ .mypy_cache .pytest_cache .ruff_cache .cache .idea
    .vscode tests test __tests__ testing spec specs e2e fixtures __mocks__ mocks __fixtures__
    benchmarks bench examples example docs doc website .next .nuxt .turbo .svelte-kit coverage
    htmlcov .storybook storybook-static .yarn .pnpm-store .github .husky .gradle .eggs _vendor"""
)
_TESTS: Final = re.compile(
    r"(?:^|/)(?:test_[^/]*|[^/]*_test|conftest|setup|noxfile)\.py$|"
    r"\.(?:test|spec|stories|bench)\.[cm]?[jt]sx?$|"
    r"\.d\.[cm]?ts$|(?:^|/)(?:jest|vite|vitest|rollup|webpack|eslint|babel|tsup|esbuild|postcss|"
    r"tailwind|prettier)\.config\.[cm]?[jt]s$"
)
_BUILT: Final = table("""dist build lib out esm cjs bundle output""")
_FROM_SOURCE: Final = (".ts", ".tsx", ".mts", ".js", ".mjs", ".jsx")
_SOURCE: Final = frozenset(("src", "source"))


@dataclass(slots=True)
class Taken:
    """What was read, and what was not."""

    sources: dict[str, Source] = field(default_factory=dict)
    unseen: list[Unseen] = field(default_factory=list)


def take(root: Path) -> Taken:
    """The sources below a folder, or the one file that was named."""
    taken = Taken()
    paths: list[tuple[str, int]] = []
    if root.is_file():
        if root.suffix.lower() not in ENDINGS:
            says = f"not a file that is read: {', '.join(ENDINGS)} are"
            taken.unseen.append(Unseen("language", says, Place(root.name, 1)))
            return taken
        paths = [(root.name, root.stat().st_size)]
        root = root.parent
    else:
        _walk(root, "", 0, paths, taken)
    paths = _chosen(sorted(paths), taken)
    total = 0
    for path, size in paths:
        total += size
        if total > MOST_BYTES:
            taken.unseen.append(Unseen("bounded", "more source than is read", Place(path, 1)))
            break
        _read(root, path, taken)
    return taken


def _walk(root: Path, inside: str, depth: int, paths: list[tuple[str, int]], taken: Taken) -> None:
    try:
        entries = sorted(os.scandir(root / inside), key=lambda entry: entry.name)
    except OSError as error:
        taken.unseen.append(
            Unseen("unreadable", f"could not be opened: {error.strerror}", Place(inside or ".", 1))
        )
        return
    for entry in entries:
        path = f"{inside}/{entry.name}" if inside else entry.name
        path = path.encode("utf-8", "replace").decode("utf-8", "replace")
        if entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name in SKIPPED or entry.name.endswith((".egg-info", ".dist-info")):
                continue
            if depth >= DEEPEST:
                taken.unseen.append(
                    Unseen("bounded", "folders are nested deeper than is read", Place(path, 1))
                )
                continue
            _walk(root, path, depth + 1, paths, taken)
        elif entry.is_file(follow_symlinks=False):
            _consider(entry, path, paths, taken)
        if len(paths) > MOST_FILES:
            return


def _consider(
    entry: os.DirEntry[str], path: str, paths: list[tuple[str, int]], taken: Taken
) -> None:
    ending = os.path.splitext(entry.name)[1].lower()
    if ending in NOT_READ:
        language = NOT_READ[ending]
        says = f"{language} is not read"
        if not any(unseen.says == says for unseen in taken.unseen):
            taken.unseen.append(Unseen("language", says, Place(path, 1)))
        return
    if ending not in ENDINGS or _TESTS.search(path):
        return
    if len(paths) == MOST_FILES:
        taken.unseen.append(
            Unseen(
                "bounded", f"more than {MOST_FILES:,} files: the rest was not read", Place(path, 1)
            )
        )
    paths.append((path, entry.stat(follow_symlinks=False).st_size))


def _chosen(paths: list[tuple[str, int]], taken: Taken) -> list[tuple[str, int]]:
    """Without what was built from source that is here too, and without second builds."""
    kept = paths[:MOST_FILES]
    sources: dict[str, int] = {}
    builds: dict[str, int] = {}
    for path, _ in kept:
        parts = path.split("/")[:-1]
        for at, part in enumerate(parts):
            if part in _SOURCE and path.endswith(_FROM_SOURCE):
                above = "/".join(parts[:at])
                sources[above] = sources.get(above, 0) + 1
                break
            if part in _BUILT and not path.endswith(".py"):
                above = "/".join(parts[:at])
                builds[above] = builds.get(above, 0) + 1
                break
    out: list[tuple[str, int]] = []
    for path, size in kept:
        parts = path.split("/")[:-1]
        built = next((at for at, part in enumerate(parts) if part in _BUILT), None)
        if built is not None and not path.endswith(".py"):
            above = "/".join(parts[:built])
            whole = 2 * sources.get(above, 0) >= builds.get(above, 0)
            if sources.get(above) and whole and not any(p in _SOURCE for p in parts[:built]):
                continue
        out.append((path, size))
    return _one_build(out)


def _one_build(paths: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Of `cjs` beside `esm` (or `x.js` beside `x.mjs` and `x.cjs`) the first."""
    known = {path for path, _ in paths}
    out: list[tuple[str, int]] = []
    for path, size in paths:
        twin = [
            re.sub(r"(^|/)cjs/", rf"\1{other}/", path) for other in ("esm", "es", "mjs", "module")
        ]
        twin += [re.sub(r"\.cjs$", other, path) for other in (".mjs", ".js")]
        if "cjs" in path and any(other != path and other in known for other in twin):
            continue
        if path.endswith(".mjs") and f"{path[:-4]}.js" in known:
            continue
        if path.endswith(".js") and f"{path[:-3]}.ts" in known:
            continue
        out.append((path, size))
    return out


def _read(root: Path, path: str, taken: Taken) -> None:
    language = ENDINGS[os.path.splitext(path)[1].lower()]
    try:
        with open(root / path, "rb") as file:
            text = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        taken.unseen.append(Unseen("unreadable", f"could not be read: {why}", Place(path, 1)))
        return
    if len(text) > LARGEST_FILE:
        says = f"larger than {LARGEST_FILE >> 20} MiB: not read"
        taken.unseen.append(Unseen("bounded", says, Place(path, 1)))
        return
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = text.decode("utf-16", "replace").encode()
    elif b"\0" in text[:4096]:
        taken.unseen.append(Unseen("unreadable", "is not text: not read", Place(path, 1)))
        return
    taken.sources[path] = Source(path, text, language, text.count(b"\n") + 1)
