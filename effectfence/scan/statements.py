"""SQL and Cypher texts: does one write, and does a second run write again?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from effectfence.scan.model import Repeats
from effectfence.scan.tables import table

_COMMENTS: Final = re.compile(r"/\*.*?\*/|--[^\n]*|^\s*//[^\n]*", re.S | re.M)
_FIRST: Final = re.compile(r"[\s(;]*([A-Za-z]+)")
_READS: Final = table(
    """SELECT SHOW DESCRIBE DESC EXPLAIN PRAGMA VALUES BEGIN COMMIT ROLLBACK SAVEPOINT START SET
    USE LISTEN FETCH DECLARE RETURN RELEASE"""
)
_WRITES: Final[dict[str, Repeats]] = {
    "INSERT": "effect",
    "UPDATE": "same",
    "DELETE": "same",
    "REPLACE": "same",
    "UPSERT": "same",
    "MERGE": "same",
    "DROP": "same",
    "TRUNCATE": "same",
    "ALTER": "same",
    "CREATE": "same",
    "GRANT": "same",
    "REVOKE": "same",
    "CALL": "effect",
    "EXEC": "effect",
    "EXECUTE": "effect",
    "COPY": "effect",
    "NOTIFY": "effect",
    "VACUUM": "same",
    "REINDEX": "same",
    "DETACH": "same",
    "REMOVE": "same",
    "LOAD": "effect",
    "OPTIMIZE": "same",
    "COMMENT": "same",
    "REFRESH": "same",
}
_CYPHER: Final = table("""MATCH OPTIONAL UNWIND WITH CALL FOREACH""")
_CYPHER_WRITE: Final = re.compile(r"\b(CREATE|MERGE|SET|DETACH\s+DELETE|DELETE|REMOVE)\b", re.I)
_CONFLICT: Final = re.compile(
    r"\bON\s+CONFLICT\b|\bOR\s+(?:IGNORE|REPLACE)\b|\bINSERT\s+IGNORE\b|\bON\s+DUPLICATE\s+KEY\b|"
    r"\bWHERE\s+NOT\s+EXISTS\b|\bIF\s+NOT\s+EXISTS\b",
    re.I,
)
_COUNTS: Final = re.compile(
    r"\bSET\b.*?\b(\w+)\s*=\s*(?:COALESCE\()?\s*\1\b[^=]*?[+\-|*]", re.I | re.S
)
_CTE_WRITE: Final = re.compile(r"\b(INSERT\s+INTO|UPDATE\s+\w|DELETE\s+FROM)\b", re.I)


@dataclass(frozen=True, slots=True)
class Statement:
    shown: str
    repeats: Repeats
    because: str
    reads: bool = False
    guard: str = ""
    """`unique`: a constraint or condition turns a second one away"""


def statement(text: str) -> Statement | None:
    """What a text does to a database; `None`: it is not a statement."""
    bare = _COMMENTS.sub(" ", text[:20_000]).strip()
    match = _FIRST.match(bare)
    if match is None or (len(bare) < 6 and bare.upper() not in _READS):
        return None
    word = match[1].upper()
    if word == "WITH" and (found := _CTE_WRITE.search(bare)) is not None:
        word = found[1].split()[0].upper()
    elif word in _CYPHER:
        return _cypher(bare, word)
    if word in _READS:
        return Statement(word, "same", "", reads=True) if _looks(bare, word) else None
    if word not in _WRITES or not _looks(bare, word):
        return None
    repeats = _WRITES[word]
    shown = " ".join(bare.split())[:60]
    if word == "CREATE" and re.match(r"(?i)CREATE\s*\(", bare):
        return Statement(shown, "effect", "`CREATE` makes another node or relation")
    if word == "INSERT":
        if _CONFLICT.search(bare):
            return Statement(shown, "same", "a conflict turns a second row away", guard="unique")
        return Statement(shown, "effect", "`INSERT` adds another row")
    if word == "UPDATE" and _COUNTS.search(bare):
        return Statement(shown, "effect", "`UPDATE` counts on from the value it finds")
    return Statement(shown, repeats, f"`{word}` leaves the same state behind")


def _cypher(bare: str, word: str) -> Statement | None:
    found = [match[1].upper().split()[0] for match in _CYPHER_WRITE.finditer(bare)]
    if not found:
        reads = re.search(r"(?i)\bRETURN\b|\bYIELD\b|\bSELECT\b", bare)
        return Statement(word, "same", "", reads=True) if reads else None
    if not re.search(r"[(\[{]", bare):
        return None
    shown = " ".join(bare.split())[:60]
    if "CREATE" in found and not re.search(r"(?i)ON\s+CREATE", bare):
        return Statement(shown, "effect", "`CREATE` makes another node or relation")
    return Statement(shown, "same", f"`{found[0]}` leaves the same graph behind")


def _looks(bare: str, word: str) -> bool:
    """A statement, not a sentence that begins with its verb."""
    after = bare[len(word) :].lstrip()
    if word in ("UPDATE",):
        return bool(re.search(r"(?i)\bSET\b", bare))
    if word == "INSERT":
        return bool(
            re.search(
                r"(?i)^INSERT\s+(?:OR\s+\w+\s+|IGNORE\s+|OVERWRITE\s+)?(?:INTO|TABLE|\{)", bare
            )
        )
    if word == "DELETE":
        return bool(re.match(r"(?i)FROM\b|\w+\s*$|\w+\s+WHERE", after))
    if word in ("CREATE", "DROP", "ALTER"):
        return bool(
            re.match(
                r"(?i)(?:OR\s+REPLACE\s+)?(?:TEMP(?:ORARY)?\s+|UNIQUE\s+|VIRTUAL\s+|FULLTEXT\s+|"
                r"MATERIALIZED\s+|EXTERNAL\s+|CONSTRAINT|VECTOR\s+|SPACE\s+)*(?:TABLE|INDEX|VIEW|"
                r"DATABASE|SCHEMA|TRIGGER|FUNCTION|PROCEDURE|USER|ROLE|SEQUENCE|EXTENSION|TYPE|"
                r"CONSTRAINT|COLLECTION|POLICY|KEYSPACE|\()",
                after,
            )
        )
    if word in ("SELECT", "SHOW", "PRAGMA", "EXPLAIN", "DESCRIBE", "DESC", "VALUES"):
        return True
    if word in (
        "EXEC",
        "EXECUTE",
        "CALL",
        "COPY",
        "LOAD",
        "COMMENT",
        "NOTIFY",
        "SET",
        "USE",
        "REMOVE",
        "REPLACE",
        "START",
        "FETCH",
        "RETURN",
        "REFRESH",
        "OPTIMIZE",
        "RELEASE",
    ):
        return bool(
            re.match(r"[\w.$\"`{]+(?:\s*\(|\s*$|\s+(?:FROM|TO|ON|INTO|SET|=)\b)", after)
        ) or (word == "REPLACE" and after.upper().startswith("INTO"))
    return True
