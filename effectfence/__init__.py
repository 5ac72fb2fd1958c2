"""effectfence: the fence in front of the side effect. One intent runs once.

Everything importable from here is public; everything else may change. A name's module is loaded
when somebody asks for the name: `effectfence wrap` starts its child before anything heavy is.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from effectfence.clock import VectorClock
    from effectfence.effects import current_effect, lease_lost
    from effectfence.errors import (
        CausalConflict,
        CommitConflict,
        CommitStale,
        DomainRace,
        FenceError,
        HolderAlive,
        IntentConflict,
        IntentFailed,
        IntentInFlight,
        InvalidTicket,
        LeaseLost,
        LedgerCorrupt,
        LedgerUnavailable,
        NoSuchIntent,
        NotExecuted,
        OutcomeUnknown,
        ReadSetStale,
        Refused,
        ResultNotRecorded,
    )
    from effectfence.events import FenceEvent
    from effectfence.fence import EffectFence
    from effectfence.models import (
        Admission,
        EffectCert,
        EffectRequest,
        FenceConfig,
        FenceStats,
        Fresh,
        Head,
        IntentRecord,
        Observation,
        PreparedEffect,
        ReadSetEntry,
        RecordedWord,
        Replay,
    )
    from effectfence.reconcile import (
        DidNotHappen,
        Happened,
        Reconciled,
        StillUnknown,
        UnknownEffect,
    )
    from effectfence.threads import BlockingFence

__all__ = [
    "Admission",
    "BlockingFence",
    "CausalConflict",
    "CommitConflict",
    "CommitStale",
    "DidNotHappen",
    "DomainRace",
    "EffectCert",
    "EffectFence",
    "EffectRequest",
    "FenceConfig",
    "FenceError",
    "FenceEvent",
    "FenceStats",
    "Fresh",
    "Happened",
    "Head",
    "HolderAlive",
    "IntentConflict",
    "IntentFailed",
    "IntentInFlight",
    "IntentRecord",
    "InvalidTicket",
    "LeaseLost",
    "LedgerCorrupt",
    "LedgerUnavailable",
    "NoSuchIntent",
    "NotExecuted",
    "Observation",
    "OutcomeUnknown",
    "PreparedEffect",
    "ReadSetEntry",
    "ReadSetStale",
    "Reconciled",
    "RecordedWord",
    "Refused",
    "Replay",
    "ResultNotRecorded",
    "StillUnknown",
    "UnknownEffect",
    "VectorClock",
    "current_effect",
    "lease_lost",
]

_HOMES = {
    "clock": ("VectorClock",),
    "effects": (
        "current_effect",
        "lease_lost",
    ),
    "errors": (
        "CausalConflict",
        "CommitConflict",
        "CommitStale",
        "DomainRace",
        "FenceError",
        "HolderAlive",
        "IntentConflict",
        "IntentFailed",
        "IntentInFlight",
        "InvalidTicket",
        "LeaseLost",
        "LedgerCorrupt",
        "LedgerUnavailable",
        "NoSuchIntent",
        "NotExecuted",
        "OutcomeUnknown",
        "ReadSetStale",
        "Refused",
        "ResultNotRecorded",
    ),
    "events": ("FenceEvent",),
    "fence": ("EffectFence",),
    "models": (
        "Admission",
        "EffectCert",
        "EffectRequest",
        "FenceConfig",
        "FenceStats",
        "Fresh",
        "Head",
        "IntentRecord",
        "Observation",
        "PreparedEffect",
        "ReadSetEntry",
        "RecordedWord",
        "Replay",
    ),
    "reconcile": ("DidNotHappen", "Happened", "Reconciled", "StillUnknown", "UnknownEffect"),
    "threads": ("BlockingFence",),
}


def __getattr__(name: str) -> typing.Any:
    """A public name, or `effectfence.__version__`, from where it lives."""
    if name == "__version__":
        from importlib.metadata import version

        return version("effectfence-asyncio")
    if name == "blocking":  # so that `import effectfence` is enough for `effectfence.blocking.open`
        return importlib.import_module("effectfence.blocking")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"effectfence.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'effectfence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
