"""Parse the TypeScript of a row with tree-sitter; a compiler checks the text of `render_module`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tree_sitter import Language, Parser
from tree_sitter_typescript import language_typescript

from experts.generator.typescript_rows import types_given


@cache
def _parser() -> Parser:
    return Parser(Language(language_typescript()))


def check_row(row: Mapping[str, str]) -> None:
    for text in (row["output"], types_given(dict(row))):
        tree = _parser().parse(text.encode())
        if tree.root_node.has_error:  # covers ERROR and MISSING nodes
            raise ValueError(f"not TypeScript: {text}")
    if not row["output"].strip():
        raise ValueError(f"nothing was written for: {row['instruction']}")


def render_module(row: Mapping[str, str]) -> str:
    """Return a separate module per row, so that rows do not share names."""
    return f"{types_given(dict(row))}\n\n{row['output']}\n\nexport {{}};\n"
