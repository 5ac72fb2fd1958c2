"""Source that was made to break a reader is bounded and reported, and never run."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from effectfence.scan import files, packages
from tests.scan.reading import PYTHON, named, read, scan, write

TOOL = PYTHON + "@mcp.tool()\ndef pay(): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 20_000,
        "x = " + "[" * 5_000 + "]" * 5_000,
        "x = " + "-" * 50_000 + "1",
        "x = " + "a." * 30_000 + "a",
        "x = " + "f(" * 3_000 + ")" * 3_000,
        "if x:\n" + "".join(" " * depth + "if x:\n" for depth in range(1, 400)),
        "@" * 9_000,
        "def f(" + "a=(" * 3_000,
        "f'{" * 3_000,
    ],
    ids=range(9),
)
def test_deep_nesting_is_survived_beside_a_tool_that_is_still_found(
    text: str, tmp_path: Path
) -> None:
    report = read(
        tmp_path, {"deep.py": text + "\n", "server.py": TOOL + "from deep import x\nx()\n"}
    )
    assert set(named(report.tools)) == {"pay"}


@pytest.mark.parametrize(
    "text",
    ["const x = " + "[" * 5_000, "{" * 20_000, "x" + "=>x" * 5_000, "a?" * 5_000, "`${" * 4_000],
    ids=range(5),
)
def test_deep_nesting_in_javascript_is_survived(text: str, tmp_path: Path) -> None:
    tool = 'import { x } from "./deep.js";\nserver.registerTool("pay", {}, async () => x());\n'
    report = read(tmp_path, {"deep.js": text, "server.js": tool})
    assert set(named(report.tools)) == {"pay"}


def test_functions_that_call_each_other_for_ever_end(tmp_path: Path) -> None:
    body = "\n".join(
        f"def f{n}(x):\n    return f{(n + 1) % 40}([x, f{(n * 7) % 40}(x)]) or f{(n * 3) % 40}(x)"
        for n in range(40)
    )
    report = read(
        tmp_path, {"server.py": PYTHON + body + "\n@mcp.tool()\ndef pay(x): return f0(x)\n"}
    )
    assert set(named(report.tools)) == {"pay"}


def test_a_file_beyond_the_bound_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE", 1_000)
    report = read(tmp_path, {"server.py": TOOL, "big.py": "x = 1\n" * 500})
    assert [(one.kind, one.place.file) for one in report.unseen] == [("bounded", "big.py")]


def test_more_files_than_are_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    report = read(tmp_path, {f"f{n}.py": "x = 1\n" for n in range(9)})
    assert report.files == 3
    assert [one.kind for one in report.unseen] == ["bounded"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = write(tmp_path / "package", {"server.py": TOOL})
    write(tmp_path / "outside", {"other.py": TOOL.replace("pay", "outside")})
    os.symlink(folder, folder / "loop")
    os.symlink(tmp_path / "outside", folder / "out")
    os.symlink(tmp_path / "outside" / "other.py", folder / "other.py")
    report = scan(folder).report
    assert (report.files, set(named(report.tools))) == (1, {"pay"})


def test_bad_encodings_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = write(tmp_path, {"server.py": TOOL})
    (folder / "latin.py").write_bytes(TOOL.replace("pay", "lat").encode() + b"# \xe9\xff\n")
    (folder / "wide.py").write_bytes(TOOL.replace("pay", "wide").encode("utf-16"))
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbf" + TOOL.replace("pay", "bom").encode())
    (folder / "binary.py").write_bytes(b"\0\1\2" * 500)
    report = scan(folder).report
    assert set(named(report.tools)) == {"pay", "lat", "wide", "bom"}
    assert "binary.py" in {one.place.file for one in report.unseen}


def test_broken_syntax_is_said_with_its_line(tmp_path: Path) -> None:
    report = read(tmp_path, {"server.py": TOOL + "def broken(:\n    ???\n"})
    assert set(named(report.tools)) == {"pay"}
    assert [one.kind for one in report.unseen] == ["syntax"]


def test_vendored_and_test_folders_are_skipped_below_the_root_only(tmp_path: Path) -> None:
    text = {"server.py": TOOL}
    inside = {
        f"{name}/server.py": TOOL for name in ("node_modules/x", "tests", "vendor", ".venv/l")
    }
    report = read(tmp_path / "tests" / "node_modules" / "mine", {**text, **inside})
    assert [str(tool.place) for tool in report.tools] == ["server.py:5"]


def test_nothing_of_what_is_scanned_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\n" + TOOL.replace("...", f"open({str(mark)!r}, 'w')")
    assert set(named(read(tmp_path / "package", {"server.py": text}).tools)) == {"pay"}
    assert not mark.exists()


# --- archives ------------------------------------------------------------------------------------


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_a_zip_bomb_is_bounded_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST_BYTES", 100_000)
    bomb = zipped(tmp_path / "x.whl", {f"f{n}.py": b"#" * 60_000 for n in range(50)})
    unseen = packages.unpack_zip(bomb, tmp_path / "out")
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.py"))
    assert written <= 200_000
    assert [one.kind for one in unseen] == ["bounded"]


def test_names_that_lead_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    archive = zipped(
        tmp_path / "x.whl",
        {"../out.py": b"x", "/abs.py": b"x", "a\\..\\..\\b.py": b"x", "in.py": b"x"},
    )
    packages.unpack_zip(archive, tmp_path / "to" / "here")
    assert [path.name for path in tmp_path.rglob("*.py")] == ["in.py"]


def test_links_and_devices_in_a_tarball_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as archive:
        for name, kind in (("link.py", tarfile.SYMTYPE), ("hard.py", tarfile.LNKTYPE),
                           ("fifo.py", tarfile.FIFOTYPE)):  # fmt: skip
            member = tarfile.TarInfo(f"package/{name}")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        member = tarfile.TarInfo("package/in.py")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    packages.unpack_tar(tmp_path / "x.tgz", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.py")] == ["in.py"]


@pytest.mark.parametrize("text", [b"", b"PK\3\4 no zip", b"\x1f\x8b no gzip"])
def test_what_is_no_archive_is_refused_in_one_sentence(text: bytes, tmp_path: Path) -> None:
    for name, unpack in (("x.whl", packages.unpack_zip), ("x.tgz", packages.unpack_tar)):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(packages.CannotScan, match="nothing was scanned"):
            unpack(tmp_path / name, tmp_path / "out")
