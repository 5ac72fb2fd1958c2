"""How records and words look to a person. Recorded text is shown, never obeyed (`printable`)."""

from __future__ import annotations

import datetime
import json
import shlex

from effectfence.commands.printing import pasted, printable
from effectfence.models import EffectCert, IntentRecord, RecordedWord
from effectfence.stores.address import shown as address_shown


def line(record: IntentRecord) -> str:
    """One line of a list."""
    reason = f": {record.reason}" if record.reason else ""
    return printable(
        f"{record.state:<9}  {record.intent}  {record.tool} by {record.agent}, "
        f"attempt {record.attempt}, seq {record.seq} of {record.domain}{_scope(record.scope)}, "
        f"{ago(record.age_seconds)}{reason}"
    )


def word(said: RecordedWord) -> str:
    """One line of what was said."""
    forced = " (forced)" if said.forced else ""
    return printable(
        f"{said.word:<9}  {said.intent}  by {said.by}{forced}, seq {said.seq}{_scope(said.scope)}, "
        f"{ago(said.age_seconds)}: {said.reason}"
    )


def facts(record: IntentRecord) -> dict[str, str]:
    found = {
        "intent": record.intent,
        "scope": " / ".join(record.scope),
        "state": record.state,
        "reason": record.reason or "",
        "domain": f"{record.domain}, seq {record.seq}",
        "tool": record.tool,
        "args": json.dumps(record.args, ensure_ascii=False),
        "agent": record.agent,
        "attempt": str(record.attempt),
        "started": _instant(record.started_at),
        "changed": ago(record.age_seconds),
        "lease": _lease(record.lease_seconds_left),
        "idempotency key": record.idempotency_key,
        **_cert_facts(record.cert),
    }
    return {name: value for name, value in found.items() if value}


def what_to_do(ledger: str, record: IntentRecord, scopes: list[str]) -> str:
    """The next move, for an outcome that nobody knows."""
    place = address_shown(ledger)
    rest = f"{printable(place)} {pasted(record.intent)}"
    rest += "".join(f" --scope {shlex.quote(printable(name))}" for name in scopes)
    end = f"--attempt {record.attempt} --by YOU --reason HOW_YOU_KNOW"
    return (
        "\nLook at the tool's own records. If it ran:\n"
        f"  effectfence ledger settle {rest} --result JSON {end}\n"
        "If it did not:\n"
        f"  effectfence ledger clear {rest} {end}"
    )


def ago(seconds: float) -> str:
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _scope(scope: tuple[str, ...]) -> str:
    return f" in scope {' / '.join(scope)}" if scope else ""


def _cert_facts(cert: EffectCert | None) -> dict[str, str]:
    if cert is None:
        return {}
    return {
        "result": json.dumps(cert.result, ensure_ascii=False),
        "certificate": f"{cert.hash}{'' if cert.verify() else '  DOES NOT VERIFY'}",
        "follows": cert.parent or "",
        "clock": str(cert.vector_clock),
    }


def _instant(unix_seconds: float) -> str:
    try:
        then = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds} s after 1970, says the holder's clock"
    return then.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def _lease(seconds_left: float | None) -> str:
    if seconds_left is None:
        return ""
    if seconds_left > 0:
        return f"ends in {seconds_left:.1f} s unless renewed"
    return f"ended {ago(-seconds_left)}"
