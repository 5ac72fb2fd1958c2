"""The policy file of `wrap`: what a tool's calls mean, where the tool itself can't say it.

[defaults]                      # every tool, unless it says otherwise
wait_seconds = 30

[tools.charge_card]
identity = ["order_id"]         # these arguments name the action; the others must be equal
ignore = ["request_id"]         # differ between attempts: neither hashed nor stored
secret = ["card.token"]         # the same, and never shown in a report
domain = "order:{order_id}"
on_error = "unknown"            # an error answer may come after the charge
result_ttl = 604800             # seconds, or "forever"

[tools.search]
fence = false                   # passes; `true` fences it though it says it only reads
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from effectfence.commands.printing import WrongUse


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """One tool's line in it. Times in seconds; `result_ttl` `inf` means for ever."""

    fence: bool | None = None
    identity: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    secret: tuple[str, ...] = ()
    domain: str | None = None
    result_ttl: float | None = None
    wait_seconds: float = 30.0
    on_error: Literal["release", "unknown"] = "release"

    @property
    def unhashed(self) -> tuple[str, ...]:
        return self.ignore + self.secret


@dataclass(frozen=True, slots=True)
class Policy:
    defaults: ToolPolicy
    tools: dict[str, ToolPolicy]

    def of(self, tool: str) -> ToolPolicy:
        return self.tools.get(tool, self.defaults)

    @classmethod
    def load(cls, path: str | None, defaults: ToolPolicy) -> Self:
        """The file at `path` over `defaults`. Raises `WrongUse` that names the bad entry."""
        if path is None:
            return cls(defaults, {})
        import tomllib

        try:
            with open(path, "rb") as file:
                document = tomllib.load(file)
        except OSError as error:
            raise WrongUse(f"the policy {path} can't be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise WrongUse(f"the policy {path} is not TOML: {error}") from None
        unknown = document.keys() - {"defaults", "tools"}
        if unknown:
            raise WrongUse(
                f"{path}: {min(unknown)!r} is not known; [defaults] and [tools.NAME] are"
            )
        defaults = _over(defaults, document.get("defaults", {}), f"{path}: defaults")
        tools = _table(document.get("tools", {}), f"{path}: tools")
        return cls(
            defaults,
            {
                name: _over(defaults, table, f"{path}: tools.{name}")
                for name, table in tools.items()
            },
        )


def _over(base: ToolPolicy, table: Any, where: str) -> ToolPolicy:
    given = _table(table, where)
    unknown = given.keys() - {field.name for field in fields(ToolPolicy)}
    if unknown:
        known = ", ".join(field.name for field in fields(ToolPolicy))
        raise WrongUse(f"{where}.{min(unknown)} is not known; these are: {known}")
    changes: dict[str, Any] = {
        name: _READ[name](value, f"{where}.{name}") for name, value in given.items()
    }
    return replace(base, **changes)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongUse(f"{where} must be a table")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise WrongUse(f"{where} must be true or false")
    return value


def _paths(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
        raise WrongUse(f'{where} must be a list of argument names such as ["card.token"]')
    return tuple(value)


def _template(value: Any, where: str) -> str:
    from effectfence.templates import Template

    if not isinstance(value, str) or not value:
        raise WrongUse(f"{where} must be a text such as 'order:{{order_id}}'")
    try:
        Template(value)
    except ValueError as error:
        raise WrongUse(f"{where}: {error}") from None
    return value


def _lifetime(value: Any, where: str) -> float:
    if value == "forever":
        return math.inf
    seconds = _number(value, where)
    if not 0 < seconds < math.inf:
        raise WrongUse(f"{where} must be a number of seconds above 0, or 'forever'")
    return seconds


def _patience(value: Any, where: str) -> float:
    seconds = _number(value, where)
    if not 0 <= seconds < math.inf:
        raise WrongUse(f"{where} must be a number of seconds, 0 or more")
    return seconds


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongUse(f"{where} must be a number of seconds")
    return float(value)


def _on_error(value: Any, where: str) -> str:
    if value not in ("release", "unknown"):
        raise WrongUse(f"{where} must be 'release' or 'unknown'")
    return str(value)


_READ = {
    "fence": _flag,
    "identity": _paths,
    "ignore": _paths,
    "secret": _paths,
    "domain": _template,
    "result_ttl": _lifetime,
    "wait_seconds": _patience,
    "on_error": _on_error,
}
