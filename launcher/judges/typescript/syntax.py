"""TypeScript syntax trees by tree-sitter: syntax errors, top-level declarations, equality of formatted code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import zip_longest
from typing import TYPE_CHECKING

from launcher.core.errors import InputError
from launcher.core.worker import WorkerError
from launcher.judges.worker import make_module_worker

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, QueryCursor

_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*")
# What the grammar accepts and TypeScript rejects: `a && b = c`, `f(, a)`, `{ , a }`.
_LENIENT = """
(binary_expression right: [(assignment_expression) (augmented_assignment_expression)] @fault)
(arguments . "(" . "," @fault)
(object . "{" . "," @fault)
"""
_CLOSING = frozenset({")", "]", "}", ">"})
_DECLARATIONS = frozenset(
    {
        "interface_declaration", "type_alias_declaration", "enum_declaration", "class_declaration",
        "abstract_class_declaration", "function_declaration", "function_signature", "lexical_declaration",
        "variable_declaration", "ambient_declaration", "export_statement",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A top-level statement."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Result of parsing a TypeScript text: its first syntax error, or its top-level statements."""

    fault: str  # empty: no syntax error
    statements: tuple[Statement, ...] = ()

    @property
    def has_only_declarations(self) -> bool:
        """Return whether there are statements, and all are declarations."""
        return bool(self.statements) and all(statement.kind in _DECLARATIONS for statement in self.statements)


class SourceReader:
    """Parses TypeScript in a worker process, which can be killed: error recovery of the parser takes quadratic time."""

    def __init__(self, *, seconds: float = 5.0) -> None:
        self._worker = make_module_worker(__name__, seconds=seconds, memory_mib=1024)

    def read(self, text: str) -> Source:
        """Parse a text."""
        try:
            source = json.loads(self._worker.request(json.dumps([text])))
        except WorkerError as error:
            return Source(fault=f"the parser {error}")
        statements = tuple(Statement(**statement) for statement in source["statements"])
        return Source(fault=source["fault"], statements=statements)

    def is_equal(self, one: str, other: str) -> bool:
        """Return whether two TypeScript texts are equal except for formatting; False if parsing them fails."""
        try:
            return bool(json.loads(self._worker.request(json.dumps([one, other]))))
        except WorkerError:
            return False

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def serve() -> None:
    """Run the worker process: each line of stdin has one text to parse, or two texts to compare."""
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        reply = are_equal(*texts) if len(texts) == 2 else asdict(read_source(*texts))
        print(json.dumps(reply), flush=True)


def are_equal(one: str, other: str) -> bool:
    """Return whether two TypeScript texts are equal except for formatting."""
    pairs = zip_longest(_read_tokens(_parse(one)), _read_tokens(_parse(other)))
    return all(first == second for first, second in pairs)


def name_checker() -> str:
    """Return name and version of the package tree-sitter-typescript; raises InputError if it is not installed."""
    _make_parser()
    return f"tree-sitter-typescript {version('tree-sitter-typescript')}"


def read_source(text: str) -> Source:
    """Parse a text."""
    root = _parse(text)
    if root.has_error:  # ERROR and MISSING nodes
        return Source(fault=_describe_error(root))
    if lenient := _make_lenient_query().captures(root):
        return Source(fault=f"not TypeScript at {_format_location(lenient['fault'][0])}")
    statements = tuple(
        Statement(kind=node.type, text=_text_of(node))
        for node in root.children
        if node.type not in {"comment", ";", "empty_statement"}
    )
    return Source(fault="" if statements else "contains no statement", statements=statements)


def _parse(text: str) -> Node:
    """Parse a text; lone surrogates become question marks."""
    return _make_parser().parse(text.encode(errors="replace")).root_node


def _describe_error(root: Node) -> str:
    """Describe the first error, found by descending into the child that has it."""
    node: Node | None = root
    while node is not None and not (node.is_error or node.is_missing):
        node = next((child for child in node.children if child.has_error or child.is_missing), None)
    what = f"{node.type!r} is missing" if node is not None and node.is_missing else "not TypeScript"
    return f"{what} at {_format_location(node or root)}"


def _format_location(node: Node) -> str:
    row, column = node.start_point
    return f"line {row + 1}, column {column + 1}"


def _read_tokens(top: Node) -> Iterator[str]:
    """Yield the tokens of code without differences of formatting: quotes, trailing commas, semicolons and comments.

    Node types are included, since a line break can end a statement. No recursion: a tree can be deep.
    """
    stack: list[Node | str] = [top]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
            continue
        leaf = _read_leaf(node)
        if leaf is not None:
            yield from leaf
            continue
        if node.type == "union_type" and (node.parent is None or node.parent.type != "union_type"):
            yield "("
            stack.append(")union_type")
        elif node.type != "union_type":
            yield f"({node.type}"
            stack.append(f"){node.type}")
        stack.extend(reversed(_kept_children(node)))


def _read_leaf(node: Node) -> list[str] | None:
    """Return the tokens of a string or of a node without children; None if the children have to be read."""
    if node.type == "string":
        value = _text_of(node)[1:-1].replace("\\'", "'").replace('\\"', '"')
        is_key = node.parent is not None and node in (
            node.parent.child_by_field_name("key"),
            node.parent.child_by_field_name("name"),
        )
        return [value] if is_key and _IDENTIFIER.fullmatch(value) else [f'"{value}"']
    if node.child_count == 0:
        is_single = (
            node.type == "identifier"
            and node.parent is not None
            and node.parent.type == "arrow_function"
            and node == node.parent.child_by_field_name("parameter")
        )
        text = _text_of(node)
        if is_single:
            return [
                "(formal_parameters",
                "(",
                "(required_parameter",
                text,
                ")required_parameter",
                ")",
                ")formal_parameters",
            ]
        return [text]
    return None


def _kept_children(node: Node) -> list[Node]:
    children = [child for child in node.children if child.type not in {"comment", "html_comment"}]
    kept: list[Node] = []
    for index, child in enumerate(children):
        following = children[index + 1].type if index + 1 < len(children) else ""
        is_last_comma = child.type == "," and following in _CLOSING
        is_separator = child.type == ";" and node.type != "for_statement"
        is_member_end = child.type == "," and node.type in {"object_type", "interface_body"}
        is_bar = child.type == "|" and node.type == "union_type"
        if not (is_last_comma or is_separator or is_member_end or is_bar):
            kept.append(child)
    return kept


def _text_of(node: Node) -> str:
    return node.text.decode() if node.text else ""


@cache
def _make_lenient_query() -> QueryCursor:
    from tree_sitter import Query, QueryCursor

    language = _make_parser().language
    assert language is not None
    return QueryCursor(Query(language, _LENIENT))


@cache
def _make_parser() -> Parser:
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_typescript import language_typescript
    except ImportError:
        raise InputError(
            "TypeScript answers are read by tree-sitter and tree-sitter-typescript, which are not installed",
            hint="pip install 'expert-launcher[quality]'",
        ) from None
    return Parser(Language(language_typescript()))
