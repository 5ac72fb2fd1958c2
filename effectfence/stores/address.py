"""A ledger's address, and what of it may be shown: never a password, a user or a key.

1. `shown(url)` holds what tells one ledger from another: scheme, hosts, database, schema, prefix.
   Whatever it does not know, it leaves out.
2. `scrubbed(text, url)` is for what drivers say: no secret of the URL is left in it.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

_SHOWN_OPTIONS: Final = ("schema", "prefix", "db", "host", "port")
_SECRET: Final = re.compile(r"(?i)(password|passwd|pwd|secret|token|key)")


def scheme_of(ledger: str) -> str:
    """`postgresql` of `postgresql://…`; empty for a path, and for `memory:`."""
    before, slashes, _ = ledger.partition("://")
    return before.lower() if slashes else ""


def shown(url: str) -> str:
    """The address without credentials, for messages and names; a path as it is."""
    if not scheme_of(url):
        return url
    scheme, _, rest = url.partition("://")
    before_query, _, query = rest.partition("?")
    place = before_query.rpartition("@")[2]
    options = [(name, value) for name, value in _options(query) if name in _SHOWN_OPTIONS]
    return f"{scheme}://{place}" + (f"?{urlencode(options)}" if options else "")


def scrubbed(text: str, url: str) -> str:
    """`text` with everything of `url` that may be secret replaced by `***`."""
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(url: str) -> set[str]:
    rest = url.partition("://")[2]
    before_query, _, query = rest.partition("?")
    credentials = before_query.rpartition("@")[0]
    password = credentials.partition(":")[2]
    found = {url, credentials, password, unquote(password)}
    found.update(value for name, value in _options(query) if _SECRET.search(name))
    return {secret for secret in found if secret}


def _options(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query, keep_blank_values=True)
