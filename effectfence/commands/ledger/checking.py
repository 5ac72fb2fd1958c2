"""`ledger verify|export|compact`: what certificates say, and whether they and the file hold.

A certificate's hash is over its content, which names the certificate that caused it: so a chain is
checked link by link, as far as its links are here. One that is not here proves nothing either way,
and is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from pydantic import ValidationError

from effectfence import records
from effectfence.canonical import strict_decode
from effectfence.commands.ledger.looking import Filter, filter_flags
from effectfence.commands.ledger.opened import (
    AddVerb,
    existing,
    file,
    json_flag,
    names,
    opened,
    scope_flag,
    size,
)
from effectfence.commands.printing import WrongUse, print_json, printable, say
from effectfence.fence import EffectFence
from effectfence.models import EffectCert
from effectfence.stores.address import scheme_of
from effectfence.stores.address import shown as address_shown
from effectfence.stores.file import FileStore, verify

_MAX_CERT_BYTES: Final = 8 << 20
_SUMMARY: Final = ("path", "epoch", "lines", "changes", "records", "bytes", "torn_bytes")
_LEDGER_BEGINS: Final = b'{"effectfence":'


# --- verify ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Checked:
    """What was found about certificates, in the order in which they came."""

    certificates: int = 0
    problems: list[str] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    parents: dict[bytes, str] = field(default_factory=dict)
    """Named as a cause and not seen so far, with the intent that names it."""

    def take(self, cert: EffectCert, where: str = "") -> None:
        self.certificates += 1
        if not cert.verify():
            self.problems.append(
                f"{where}the certificate of {cert.intent!r} does not verify: {cert.hash} is not "
                "the hash of what it says"
            )
            return
        self.known.add(_short(cert.hash))
        if cert.parent is not None:
            self.parents[_short(cert.parent)] = cert.intent

    @property
    def missing(self) -> list[str]:
        """The intents whose cause is not here."""
        return [intent for parent, intent in self.parents.items() if parent not in self.known]

    def sentence(self) -> str:
        followed = len(self.parents) - len(self.missing)
        said = f"{self.certificates:,} certificates, {followed:,} causes followed"
        if missing := self.missing:
            said += (
                f"; {len(missing):,} causes are not here (such as that of "
                f"{printable(missing[0])}): their chains were not followed"
            )
        return said

    def facts(self) -> dict[str, Any]:
        return {
            "certificates": self.certificates,
            "causes_not_here": len(self.missing),
            "problems": self.problems,
        }


def _short(digest: str) -> bytes:
    return digest[:32].encode()


async def _verify(options: argparse.Namespace) -> int:
    if options.names == ["-"]:
        return await _verify_certificates(sys.stdin.buffer, "standard input", options)
    ledger = existing(names(options))
    if not scheme_of(ledger) and not _is_ledger(ledger):
        with _opened(ledger) as exported:
            return await _verify_certificates(exported, ledger, options)
    checked = Checked()
    whole: dict[str, Any] = {}
    if scheme_of(ledger):
        async with EffectFence.open(ledger) as fence:
            await _take_all(fence, checked)
        whole = {"path": address_shown(ledger)}
        text = f"{address_shown(ledger)}: every record can be read"
    else:
        summary = verify(ledger, lambda key, label, body: _check(key, label, body, checked))
        whole = {name: getattr(summary, name) for name in _SUMMARY}
        text = (
            f"{printable(ledger)} is whole: {summary.lines:,} lines, {summary.changes:,} changes "
            f"since it was made, {summary.records:,} records, {summary.bytes:,} bytes"
        )
        if summary.torn_bytes:
            text += f"\n{summary.torn_bytes:,} bytes at its end were never acknowledged to anybody"
    return _tell(checked, text, whole, options)


def _opened(path: str) -> IO[bytes]:
    return open(path, "rb")


def _is_ledger(path: str) -> bool:
    with open(path, "rb") as found:
        begins = found.read(len(_LEDGER_BEGINS))
    return begins == _LEDGER_BEGINS or not begins.startswith(b"{")


def _is_kept(path: str) -> bool:
    """Whether it is anything but an export: a ledger above all."""
    return os.path.getsize(path) > 0 and _is_ledger(path)


def _check(key: str, label: str, body: Any, checked: Checked) -> None:
    records.check_body(key, label, body)
    if label == records.DONE:
        checked.take(records.cert_of(body))


async def _take_all(fence: EffectFence, checked: Checked) -> None:
    async for record in fence.intents(nested=True):
        if record.cert is not None:
            checked.take(record.cert)


def _tell(checked: Checked, text: str, whole: dict[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        print_json({"whole": not checked.problems, **whole, **checked.facts()})
    elif not checked.problems:
        print(text)
        print(checked.sentence())
    for problem in checked.problems if not options.json else ():
        say(problem, 1)
    return 1 if checked.problems else 0


# --- certificates from elsewhere ------------------------------------------------------------------


async def _verify_certificates(source: IO[bytes], where: str, options: argparse.Namespace) -> int:
    checked = Checked()
    last: EffectCert | None = None
    for place, cert in _certificates(source, where, checked):
        checked.take(cert, place)
        last = cert
    if not checked.certificates and not checked.problems:
        raise WrongUse(f"{where} holds no certificate")
    chain: list[EffectCert] = []
    if options.parents:
        async with EffectFence.open(existing(options.parents)) as fence:
            chain = await _chain(fence, checked, last)
    text = f"{printable(where)}: all of it verifies"
    for link in chain:
        text += f"\n  caused by {printable(link.intent)}, certificate {link.hash}"
    return _tell(checked, text, {"path": where}, options)


def _certificates(
    source: IO[bytes], where: str, checked: Checked
) -> Iterator[tuple[str, EffectCert]]:
    """One, a list, or one a line; whatever is none is a problem, with its line."""
    for number, text in _pieces(source, where):
        place = f"{printable(where)}, line {number}: "
        try:
            value = strict_decode(text, max_bytes=_MAX_CERT_BYTES)
            found = value if isinstance(value, list) else [value]
            certs = [EffectCert.model_validate(_plain(one)) for one in found]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            member = ".".join(map(str, first["loc"])) or "it"
            checked.problems.append(f"{place}no certificate: {member}: {first['msg']}")
        except (ValueError, TypeError) as error:
            checked.problems.append(f"{place}no certificate: {error}")
        else:
            yield from ((place, cert) for cert in certs)


def _plain(value: Any) -> Any:
    """A certificate alone, or inside what `commit`, `ledger show --json` and replays print."""
    if isinstance(value, dict) and "hash" not in value and isinstance(value.get("cert"), dict):
        return value["cert"]
    return value


def _pieces(source: IO[bytes], where: str) -> Iterator[tuple[int, bytes]]:
    """Lines; or all of it, where one value stands over several."""
    first = source.readline(_MAX_CERT_BYTES + 1)
    if first.strip() in (b"{", b"[") or not _is_json(first):
        rest = first + source.read(_MAX_CERT_BYTES + 1)
        if len(rest) > _MAX_CERT_BYTES:
            raise WrongUse(f"{where}: one value of more than {_MAX_CERT_BYTES} bytes")
        if rest.strip():
            yield 1, rest
        return
    line, number = first, 1
    while line:
        if line.strip():
            yield number, line
        line, number = source.readline(_MAX_CERT_BYTES + 1), number + 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return not line.strip()
    return True


async def _chain(fence: EffectFence, checked: Checked, cert: EffectCert | None) -> list[EffectCert]:
    """What caused `cert`, as far as the ledger knows; every link is checked."""
    by_hash: dict[bytes, EffectCert] = {}
    async for record in fence.intents("done", nested=True):
        if record.cert is not None:
            by_hash[_short(record.cert.hash)] = record.cert
    chain: list[EffectCert] = []
    for parent in tuple(checked.parents):
        link = by_hash.get(parent)
        while link is not None and _short(link.hash) not in checked.known:
            checked.take(link)
            if cert is not None and parent == _short(cert.parent or ""):
                chain.append(link)
            link = by_hash.get(_short(link.parent)) if link.parent else None
    return chain


# --- export ---------------------------------------------------------------------------------------


async def _export(options: argparse.Namespace) -> int:
    wanted = Filter.of(options)
    async with opened(names(options), options) as fence:
        with _written(options.output) as out:
            count = 0
            async for record in fence.intents("done", nested=True):
                if record.cert is not None and wanted.wants(record):
                    out.write(json.dumps(record.cert.model_dump(mode="json")) + "\n")
                    count += 1
    if options.output:
        print(f"{count:,} certificates in {printable(options.output)}")
    return 0


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[IO[str]]:
    """Standard output; or a file that is there once all of it is, and only then."""
    if path is None:
        yield sys.stdout
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder):
        raise WrongUse(f"--output {path}: a file's name, in a folder that is there, is wanted")
    if os.path.lexists(path) and (not os.path.isfile(path) or _is_kept(path)):
        raise WrongUse(f"--output {path}: only an earlier export is replaced; name another file")
    descriptor, temporary = tempfile.mkstemp(prefix=".effectfence-", dir=folder)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# --- compact --------------------------------------------------------------------------------------


async def _compact(options: argparse.Namespace) -> int:
    path = file(names(options))
    store = await FileStore.open(path, check_body=records.check_body)
    before = size(path)
    try:
        await store.compact()
    finally:
        await store.aclose()
    now = size(path)
    if options.json:
        print_json({"path": path, "bytes_before": before, "bytes": now})
    else:
        print(f"{printable(path)}: {before:,} bytes before, {now:,} bytes now")
    return 0


# --- the parsers ----------------------------------------------------------------------------------


def add(verb: AddVerb) -> None:
    verified = verb(
        "verify",
        _verify,
        "read all of a ledger, an export, or certificates on standard input (-), strictly: every "
        "line, number and hash, and each certificate with what caused it",
        "[LEDGER | EXPORT | -] [--parents LEDGER] [--json]",
        "effectfence ledger verify effects.jsonl",
    )
    verified.add_argument(
        "--parents", metavar="LEDGER", help="where causes that were not exported are looked up"
    )
    json_flag(verified, "one JSON object")
    exported = verb(
        "export",
        _export,
        "the certificates, one a line, each after what caused it",
        "[LEDGER] [--output FILE] [--tool NAME] [--agent NAME] [--domain NAME] "
        "[--older-than AGE] [--newer-than AGE] [--scope NAME]",
        "effectfence ledger export effects.jsonl --output certificates.jsonl",
    )
    exported.add_argument("--output", metavar="FILE", help="made, or replaced, when all is written")
    filter_flags(exported, state=False)
    scope_flag(exported, "only those of")
    compacted = verb(
        "compact",
        _compact,
        "drop what has expired from the file",
        "[LEDGER] [--json]",
        "effectfence ledger compact effects.jsonl",
    )
    json_flag(compacted, "one JSON object")
