"""effectfence: the fence in front of the side effect. One intent runs once.

Everything importable from here is public; everything else may change.
"""

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
    Replay,
)

__all__ = [
    "Admission",
    "CausalConflict",
    "CommitConflict",
    "CommitStale",
    "DomainRace",
    "EffectCert",
    "EffectFence",
    "EffectRequest",
    "FenceConfig",
    "FenceError",
    "FenceStats",
    "Fresh",
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
    "Refused",
    "Replay",
    "ResultNotRecorded",
    "VectorClock",
    "current_effect",
    "lease_lost",
]


def __getattr__(name: str) -> str:
    """`effectfence.__version__`, looked up when somebody asks: it costs more than the import."""
    if name != "__version__":
        raise AttributeError(f"module 'effectfence' has no attribute {name!r}")
    from importlib.metadata import version

    return version("effectfence-asyncio")
