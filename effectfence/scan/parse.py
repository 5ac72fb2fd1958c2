"""The grammars: which file is which language, and its syntax tree."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

ENDINGS: Final = {
    ".py": "python",
    ".pyw": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".jsx": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
    ".cts": "typescript",
    ".tsx": "tsx",
}
NOT_READ: Final = {
    ".go": "Go",
    ".rs": "Rust",
    ".java": "Java",
    ".kt": "Kotlin",
    ".cs": "C#",
    ".rb": "Ruby",
    ".php": "PHP",
    ".swift": "Swift",
    ".ex": "Elixir",
    ".scala": "Scala",
}
"""Languages in which MCP servers are written and that this scanner does not read."""

_GRAMMARS: Final = {
    "python": ("tree_sitter_python", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
}


class GrammarMissing(Exception):
    """The extra `scan` is not installed."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"effectfence scan reads source through {missing}, which is not installed; nothing "
            "was scanned: pip install 'effectfence-asyncio[scan]'"
        )


def check() -> None:
    """Raise `GrammarMissing` where the extra is not there, before anything is read."""
    for language in _GRAMMARS:
        _language(language)


def parse(text: bytes, language: str) -> Any:
    """The syntax tree. Any bytes have one; what was not understood is marked in it."""
    import tree_sitter

    return tree_sitter.Parser(_language(language)).parse(text)


@cache
def _language(language: str) -> Any:
    module, function = _GRAMMARS[language]
    try:
        import tree_sitter

        return tree_sitter.Language(getattr(import_module(module), function)())
    except ImportError as error:
        raise GrammarMissing(str(error.name or module)) from None
