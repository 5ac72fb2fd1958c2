"""Programs that a tool starts: which of their commands change something."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from effectfence.scan.model import Repeats
from effectfence.scan.tables import table
from effectfence.scan.values import Const, Rec, Seq, Value, alternatives, syms, texts
from effectfence.scan.words import meaning

if TYPE_CHECKING:
    from effectfence.scan.machine import Call

_READS: Final[dict[str, frozenset[str]]] = {
    "git": table(
        """status diff log show branch rev-parse ls-files blame remote describe cat-file config grep
    shortlog ls-remote ls-tree reflog for-each-ref --version rev-list merge-base diff-tree"""
    ),
    "kubectl": table(
        """get describe logs explain api-resources api-versions version top cluster-info auth diff
    events wait"""
    ),
    "helm": table("""list status get history show search template lint version env"""),
    "docker": table(
        """ps images logs inspect version info stats top port search events history diff"""
    ),
    "npm": table("""view ls list outdated search info audit --version config"""),
    "gh": frozenset(["view", "list", "status", "search"]),
    "pip": frozenset(["list", "show", "freeze", "index", "--version"]),
}
_READERS: Final = table(
    """ls cat head tail grep rg find which where whoami uname ps df du stat file wc echo date env
    printenv pwd hostname uptime id groups ping traceroute nslookup dig host netstat ss lsof
    tree sort uniq cut awk jq yq diff cmp md5sum sha256sum ffprobe mdfind pgrep sw_vers sysctl
    ipconfig ifconfig tasklist systeminfo vm_stat top free lscpu nvidia-smi locate test true
    false exiftool pdftotext tesseract node --version tsc eslint ruff mypy pylint pytest semgrep
    bandit type fc-list xdotool_get pbpaste xclip_get osv-scanner kubectl-get rustc"""
)
_REPEATS: Final[dict[str, frozenset[str]]] = {
    "git": frozenset(("commit", "stash", "revert", "cherry-pick", "merge")),
    "kubectl": table("""rollout run expose port-forward debug autoscale"""),
    "docker": frozenset(("run", "create", "build", "commit", "exec")),
    "gh": frozenset(("create", "comment", "run", "release")),
    "npm": frozenset(("publish", "version", "run")),
    "helm": frozenset(("rollback", "push")),
}
_SEND: Final = table("""osascript sendmail mail say open xdg-open notify-send curl wget""")
_GIVEN_ONE: Final = "a command it is given"
_GIVEN: Final = frozenset(("exec", "attach", "cp"))


@dataclass(frozen=True, slots=True)
class Command:
    shown: str
    repeats: Repeats
    because: str
    reads: bool = False
    given: bool = False
    """what is run comes from the call itself"""


def command(call: Call) -> Command:
    """What a started program changes, by its own words."""
    argv = _words(call)
    from_call = any(sym.root == "input" for arg in call.args[:1] for sym in syms(arg))
    program = posixpath.basename(argv[0]).removesuffix(".exe") if argv else ""
    if (
        program in ("sudo", "npx", "uvx", "env", "bash", "sh", "cmd", "powershell")
        and len(argv) > 1
    ):
        rest = [word for word in argv[1:] if not word.startswith("-") and word != "/c"]
        if rest and " " in rest[0]:
            rest = rest[0].split()
        if rest and program not in ("npx", "uvx"):
            argv, program = rest, posixpath.basename(rest[0])
    if program == "{}" and not from_call:
        return _by_verbs(argv)
    if not program or "{}" in program:
        return Command(_GIVEN_ONE, "depends", "the command comes from the call", given=True)
    verbs = [word for word in argv[1:] if word[:1].isalpha() and not set("={}:/ ") & set(word)]
    known = next((word for word in verbs[:5] if _knows(program, word)), verbs[0] if verbs else "")
    shown = " ".join(filter(None, (program, known)))
    reads = program in _READERS or known in _READS.get(program, ())
    if reads and not ({"-exec", "-delete", "tee"} & set(argv) or ">" in " ".join(argv)):
        return Command(shown, "same", "", reads=True)
    if program in ("python", "python3", "node", "deno", "bun", "ssh"):
        return Command(shown, "depends", "what it runs decides")
    if known in _GIVEN or (not known and program in _READS):
        if known == "cp":
            return Command(shown, "same", f"`{shown}` leaves the same files behind")
        return Command(shown, "depends", "the command comes from the call", given=True)
    if program == "osascript":
        return Command(shown, "depends", "its script decides")
    if program == "curl":
        return _curl(argv)
    if known in _REPEATS.get(program, ()) or program in _SEND:
        return Command(shown, "effect", f"`{shown}` does it once more")
    if program in _READS:
        return Command(shown, "same", f"`{shown}` leaves the same state behind")
    said = meaning(known) or meaning(program)
    if said == "read" or known in ("export", "dump", "print", "ls"):
        return Command(shown, "same", "", reads=True)
    if said is None:
        return Command(shown, "depends", f"what `{program}` changes is its own affair")
    return Command(shown, said, f"`{shown}` by its verb")


def _by_verbs(argv: list[str]) -> Command:
    """A program found at run time, with words that are known."""
    spoken = [word for word in argv[1:4] if word[:1].isalpha() and "{}" not in word]
    reading = next((word for word in spoken[:2] if meaning(word) == "read"), None)
    if reading:
        return Command(f"… {reading}", "same", "", reads=True)
    for word in argv[1:5]:
        said = meaning(word) if word[:1].isalpha() and "{}" not in word else None
        if said == "read":
            return Command(f"… {word}", "same", "", reads=True)
        if said is not None:
            return Command(f"… {word}", said, f"`{word}` by its verb")
    return Command(_GIVEN_ONE, "depends", "the command comes from the call", given=True)


def _curl(argv: list[str]) -> Command:
    for flag in ("-X", "--request"):
        if flag in argv and argv.index(flag) + 1 < len(argv):
            verb = argv[argv.index(flag) + 1].upper()
            if verb in ("PUT", "PATCH", "DELETE"):
                return Command(f"curl {verb}", "same", f"{verb} leaves the same state behind")
            if verb == "POST":
                return Command("curl POST", "effect", "POST makes something new at each call")
    writes = any(word in ("-d", "--data", "-F", "--data-binary", "--json") for word in argv)
    if writes:
        return Command("curl POST", "effect", "POST makes something new at each call")
    return Command("curl", "same", "", reads=True)


def _knows(program: str, word: str) -> bool:
    return (
        word in _READS.get(program, ())
        or word in _REPEATS.get(program, ())
        or (program not in _READS or meaning(word) is not None)
    )


def _words(call: Call) -> list[str]:
    """The command line as far as it is known, `{}` for words that are not."""
    out: list[str] = []
    args: list[Value] = list(call.args)
    if not args and "args" in call.named:
        args = [call.named["args"]]
    for arg in args:
        for one in alternatives(arg)[:1]:
            if isinstance(one, Seq):
                out += [_word(item) for item in one.items]
            elif isinstance(one, Rec):
                continue
            elif texts(one):
                text = texts(one)[0]
                out += text.split() if len(args) < 3 or " " in text.strip() else [text]
            elif isinstance(one, Const):
                continue
            else:
                out.append("{}")
    return out[:60]


def _word(value: Value) -> str:
    found = texts(value)
    return found[0] if found else "{}"
