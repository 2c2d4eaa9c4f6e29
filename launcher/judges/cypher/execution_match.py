"""Execution match of two Cypher queries: an embedded graph database runs both on generated graphs.

The engine is not Neo4j. If it lacks a feature, or may behave differently, the result is None (not judged).

    reference   MATCH (p:Person)-[:MADE]->(f:Film) WHERE f.year > 1999 RETURN p.name ORDER BY p.name LIMIT 3
    answer      MATCH (a:Person)-[:MADE]->(b:Film) WHERE b.year >= 2000 RETURN a.name ORDER BY a.name LIMIT 3

Tails (`LIMIT 3`) are compared as tokens, and bodies are run without them, so that differences beyond the third row are
seen. Numbers that counts are compared with are made small, as the graphs are. If the rows differ (in order only if the
reference sorts them), the reference runs again with nodes inserted in reverse: if its rows change, they decide nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise

from launcher.core.worker import WorkerError
from launcher.judges.cypher.engine_dialect import (
    CLAUSES,
    is_predicate,
    may_reuse_edges,
    separate_edges,
    split_comparisons,
)
from launcher.judges.cypher.graph_generator import find_literals, make_tables, render_setup
from launcher.judges.cypher.lexer import Kind, Token, match_brackets, render_token, strip_end, token_at, words
from launcher.judges.cypher.normalize import find_variables, is_variable
from launcher.judges.cypher.patterns import find_chains
from launcher.judges.cypher.schema import GraphSchema
from launcher.judges.cypher.server_rules import find_acts
from launcher.judges.worker import make_module_worker

_NUM_GRAPHS = 10
_MAX_EMPTIED = 4  # labels of which one graph each has no nodes: an OPTIONAL MATCH differs from a MATCH there
_SECONDS = 15.0
_MEMORY_MIB = 2048
_WORKER = "launcher.judges.cypher.engine_worker"
# Functions that differ from Neo4j's, or depend on the current date.
_DIFFERENT_FUNCTIONS = words(
    "labels id elementid nodes relationships keys properties split substring rand randomuuid timestamp duration left "
    "right point reduce percentilecont percentiledisc round"
)  # fmt: skip
_AGGREGATES = words("COUNT SUM AVG MIN MAX COLLECT STDEV STDEVP")
# After these, an opening parenthesis does not belong to a call.
_BEFORE_PARENTHESES = words(
    "- > , ( MATCH WHERE AND OR XOR NOT IN RETURN WITH BY UNWIND WHEN THEN ELSE CASE DISTINCT"
) | {"{ MATCH"}
_COMPONENTS = words("year month day hour minute second quarter week")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of an execution match: whether both queries return the same rows, or None if that was not judged."""

    same: bool | None
    reason: str


class Engine:
    """Embedded graph database in a worker process, which runs Cypher queries on generated graphs."""

    def __init__(self) -> None:
        self.checker = f"ladybug {version('ladybug')}"
        self._worker = make_module_worker(_WORKER, seconds=_SECONDS, memory_mib=_MEMORY_MIB)
        self._returns_rows: dict[str, bool] = {}  # by schema and reference, which evaluations repeat

    def compare(self, schema: GraphSchema, reference: Sequence[Token], answer: Sequence[Token]) -> Outcome:
        """Compare the rows of two queries on generated graphs, if the reference's do not depend on insertion order."""
        queries: tuple[Sequence[Token], Sequence[Token]] = strip_end(reference), strip_end(answer)
        for query in queries:
            if reason := _find_obstacle(query):
                return Outcome(same=None, reason=reason)
        bodies, tails = zip(*map(_split_tail, queries), strict=True)
        if tails[0] != tails[1]:
            queries = _move_limit(queries[0]), _move_limit(queries[1])
            bodies, tails = zip(*map(_split_tail, queries), strict=True)
        is_ordered = _is_ordered(queries[0])
        texts = [render_for_engine(query) for query in _shrink_limits(_shrink_counts(bodies))]
        is_conclusive = False
        for graph in _make_graphs(schema, queries, texts[0]):
            expected, actual = self.run(graph(is_reversed=False), texts)
            if isinstance(expected, str) or isinstance(actual, str):
                which, error = ("reference", expected) if isinstance(expected, str) else ("answer", actual)
                return Outcome(same=None, reason=f"the engine cannot run the {which}: {error}")
            if tails[0] != tails[1] and not (len(expected) <= 1 and all(map(_keeps_one, tails))):
                return Outcome(same=False, reason="has a different SKIP or LIMIT than the reference")
            if not _matches(expected, actual, is_ordered):
                # The reference may be ambiguous: then its result changes with the insertion order.
                (reversed_rows,) = self.run(graph(is_reversed=True), texts[:1])
                if isinstance(reversed_rows, str) or _sort_rows(reversed_rows) != _sort_rows(expected):
                    continue
                if not _matches(expected, actual, is_ordered and expected == reversed_rows):
                    if any(map(may_reuse_edges, queries)):
                        return Outcome(same=None, reason="the engine may match one relationship twice in a pattern")
                    return Outcome(same=False, reason="returns a different result than the reference")
            is_conclusive = is_conclusive or bool(expected)
        if not is_conclusive:
            return Outcome(same=None, reason="the reference returns no rows on any test graph")
        return Outcome(same=True, reason="")

    def returns_rows(self, schema: GraphSchema, query: Sequence[Token]) -> bool:
        """Return whether a query can be run and returns rows on at least one generated graph."""
        query = strip_end(query)
        key = repr((schema, query))
        if key not in self._returns_rows:
            self._returns_rows[key] = not _find_obstacle(query) and self._find_rows(schema, query)
        return self._returns_rows[key]

    def _find_rows(self, schema: GraphSchema, query: Sequence[Token]) -> bool:
        (body,) = _shrink_counts([_split_tail(query)[0]])
        text = render_for_engine(body)
        for graph in _make_graphs(schema, (query, query), text):
            (rows,) = self.run(graph(is_reversed=False), [text])
            if rows:
                return not isinstance(rows, str)
        return False

    def run(self, setup: list[str], queries: list[str]) -> list[list[object] | str]:
        """Create a graph and return the rows or the error of each query."""
        try:
            reply: list[list[object] | str] = json.loads(
                self._worker.request(json.dumps({"setup": setup, "queries": queries}))
            )
        except (WorkerError, ValueError) as error:
            return [f"the engine {error}"] * len(queries)
        return reply

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _make_graphs(
    schema: GraphSchema, queries: Sequence[Sequence[Token]], text: str
) -> Iterator[Callable[..., list[str]]]:
    """Yield one function per test graph that renders its setup; the last graphs lack all nodes, or those of a label."""
    tables, literals = make_tables(schema, queries), find_literals(queries)
    seed = zlib.crc32(repr((text, sorted(schema.nodes))).encode(errors="replace"))
    labels = list(tables.nodes)
    emptied = [labels, *([[label] for label in labels[:_MAX_EMPTIED]] if len(labels) > 1 else [])]
    for number, empty in enumerate([*[[]] * _NUM_GRAPHS, *emptied]):
        yield partial(render_setup, tables, literals, number=number, seed=seed, empty=empty)


def _matches(expected: list[object], actual: list[object], is_ordered: bool) -> bool:
    return expected == actual if is_ordered else _sort_rows(expected) == _sort_rows(actual)


def _find_obstacle(tokens: Sequence[Token]) -> str:
    """Return why the engine must not run a Cypher query, for example because it writes; empty if it may."""
    if acts := find_acts(tokens):
        return f"a query with {', '.join(sorted(acts))} is not run"
    for index, token in enumerate(tokens):
        if token.kind is Kind.PARAMETER or token.is_mark(";", "$"):
            return f"a query with {token.text} is not run"
        if token.is_word("CALL", "LOAD", "COPY", "ATTACH", "INSTALL", "EXPORT", "IMPORT", "USE", "PROFILE", "EXPLAIN"):
            return f"a query with {token.text.upper()} is not run"
        is_call = token.kind is Kind.NAME and token_at(tokens, index + 1).is_mark("(")
        if is_call and (token.text.lower() in _DIFFERENT_FUNCTIONS or token_at(tokens, index - 1).is_mark(".")):
            return f"{token.text}() may behave differently in the engine"
        if token.is_mark("[") and _is_indexed(tokens, index):
            return "the engine indexes lists from 1"
    return ""


def _is_indexed(tokens: Sequence[Token], index: int) -> bool:
    before = token_at(tokens, index - 1)
    is_value = before.is_mark(")", "]") or (
        before.is_name and not before.is_word("IN", "RETURN", "WITH", "UNWIND", "AND")
    )
    return is_value and token_at(tokens, index + 1).kind is Kind.NUMBER


def _split_tail(tokens: Sequence[Token]) -> tuple[list[Token], tuple[str, ...]]:
    """Split a Cypher query into its body and its last SKIP and LIMIT, which are compared by their text only."""
    depth = 0
    for index in range(len(tokens) - 1, -1, -1):
        token = tokens[index]
        depth += token.is_mark(")", "]", "}") - token.is_mark("(", "[", "{")
        if depth == 0 and token.is_word("RETURN", "BY", "UNION"):
            break
        if depth == 0 and token.is_word("SKIP", "LIMIT", "OFFSET") and not token_at(tokens, index - 1).is_mark("."):
            body, tail = _split_tail(tokens[:index])
            written = ("LIMIT" if token.is_word("LIMIT") else "SKIP", *map(_render_upper, tokens[index + 1 :]))
            return body, tail if written == ("SKIP", "0") else (*tail, *written)
    return list(tokens), ()


def _render_upper(token: Token) -> str:
    return render_token(token).upper()


def _move_limit(tokens: Sequence[Token]) -> Sequence[Token]:
    """Move ORDER BY, SKIP and LIMIT of the last WITH to the end, after a RETURN that neither sorts nor aggregates."""
    depth, ends = 0, list[int]()  # the clauses after the last WITH
    for index, token in enumerate(tokens):
        depth += token.is_mark("(", "[", "{") - token.is_mark(")", "]", "}")
        if depth == 0 and token.is_word("WITH") and not token_at(tokens, index - 1).is_word("STARTS", "ENDS"):
            ends = []
        elif depth == 0 and token.is_word("ORDER", "SKIP", "LIMIT", "OFFSET", "RETURN", *CLAUSES):
            ends.append(index)
    names = [tokens[index].text.upper() for index in ends]
    if (
        len(ends) < 2
        or names[-1] != "RETURN"
        or not {"SKIP", "LIMIT", "OFFSET"} & set(names)
        or names.count("RETURN") > 1
    ):
        return tokens
    moved, last = tokens[ends[0] : ends[-1]], tokens[ends[-1] :]
    renamed = {after.text for before, after in pairwise(last) if before.is_word("AS")}
    is_kept = any(token.is_word("DISTINCT", *_AGGREGATES) or token.is_mark("*") for token in last)
    if is_kept or CLAUSES & set(names) or renamed & {token.text for token in moved}:
        return tokens
    return [*tokens[: ends[0]], *last, *moved]


def _keeps_one(tail: tuple[str, ...]) -> bool:
    return not tail or (len(tail) == 2 and tail[0] == "LIMIT" and tail[1].isdigit() and int(tail[1]) > 0)


def _is_ordered(tokens: Sequence[Token]) -> bool:
    """Return whether the last RETURN has an ORDER BY."""
    last = max((index for index, token in enumerate(tokens) if token.is_word("RETURN")), default=0)
    return any(token.is_word("ORDER") for token in tokens[last:])


def _sort_rows(rows: list[object]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def _shrink_counts(queries: Sequence[Sequence[Token]]) -> list[list[Token]]:
    """Lower the numbers that counts are compared with, which no small graph reaches: `count(b) > 12` becomes `> 2`.

    Both queries change alike: the numbers keep their order, and consecutive ones stay consecutive.
    """
    positions = [(at, index) for at, query in enumerate(queries) for index in _find_counts(query)]
    sizes = sorted({_parse_size(queries[at][index].text) for at, index in positions})
    if not sizes or sizes[-1] < 4:
        return [list(query) for query in queries]
    smaller = {sizes[0]: 2}
    for before, size in pairwise(sizes):
        smaller[size] = smaller[before] + min(2, size - before)
    shrunk = [list(query) for query in queries]
    for at, index in positions:
        shrunk[at][index] = Token(Kind.NUMBER, str(smaller[_parse_size(queries[at][index].text)]))
    return shrunk


def _shrink_limits(queries: Sequence[list[Token]]) -> list[list[Token]]:
    """Lower each LIMIT of a WITH that only the answer has to 2: on a small graph, `LIMIT 300` would have no effect."""
    reference, answer = queries
    known = {token.text for token in reference if token.kind is Kind.NUMBER}
    shrunk = [
        Token(Kind.NUMBER, "2")
        if token.text.isdigit()
        and _parse_size(token.text) > 2
        and token.text not in known
        and at
        and answer[at - 1].is_word("LIMIT")
        else token
        for at, token in enumerate(answer)
    ]
    return [reference, shrunk]


def _parse_size(text: str) -> int:
    """Return the value of an integer in a query; one of more than 18 digits, which Python may not parse, is 10**18."""
    return int(text) if text.isdecimal() and len(text) <= 18 else 10**18


def _find_counts(tokens: Sequence[Token]) -> list[int]:
    """Return the positions of numbers that an alias of `count(...)` is compared with."""
    opened = {close: index for index, close in match_brackets(tokens).items()}
    counts = {
        tokens[index + 2].text
        for index in opened
        if token_at(tokens, opened[index] - 1).is_word("COUNT")
        and token_at(tokens, index + 1).is_word("AS")
        and token_at(tokens, index + 2).is_name
    }
    return [
        index
        for index, token in enumerate(tokens)
        if token.kind is Kind.NUMBER
        and token.text.isdigit()
        and token_at(tokens, index - 1).is_mark("=", "<", ">", "<=", ">=", "<>")
        and token_at(tokens, index - 2).text in counts
        and not token_at(tokens, index - 3).is_mark(".")
    ]


def render_for_engine(tokens: Sequence[Token]) -> str:
    """Translate Cypher to the engine's dialect: quoted names, MATCH in subqueries, TRAIL for variable-length paths."""
    tokens = separate_edges(split_comparisons(tokens))
    variables = find_variables(tokens)
    chains = find_chains(tokens, match_brackets(tokens))
    arrows = [arrow.element for chain in chains for arrow in chain.arrows]
    lengths = {at for one in arrows for at in range(one.start, one.end) if tokens[at].is_mark("*")}
    tests = {chain.start: chain.end - 1 for chain in chains if chain.arrows and is_predicate(tokens, chain.start)}
    patterns = {at for chain in chains for at in range(chain.start, chain.end)}
    labels = {at for at in range(len(tokens)) if at not in patterns and _is_label_test(tokens, at, variables)}
    written: list[str] = []
    for index, token in enumerate(tokens):
        before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
        if index in tests:
            written += ["EXISTS", "{ MATCH", "("]
        elif index in tests.values():
            written += [")", "}"]
        elif index in labels:
            written.append(f"label({_quote(token.text)}) = '{tokens[index + 2].text}'")
        elif index - 1 in labels or index - 2 in labels:
            continue
        elif token.is_word(*map(str.upper, _COMPONENTS)) and _is_component(tokens, index):
            _wrap_component(written, token.text.lower())
        elif token.is_mark(".") and _is_component(tokens, index + 1):
            continue
        elif index in lengths:
            written.append("* TRAIL")
        elif token.is_mark("{") and before.is_word("EXISTS", "COUNT") and following.is_mark("("):
            written.append("{ MATCH")
        elif token.is_name and (is_variable(tokens, index, variables) or _is_schema_name(tokens, index)):
            written.append(_quote(token.text))
        elif token.is_word("DATETIME", "LOCALDATETIME") and following.is_mark("("):
            written.append("timestamp")
        elif token.is_word("TYPE") and following.is_mark("("):
            written.append("label")
        else:
            written.append(render_token(token))
    return _glue(written)


def _is_label_test(tokens: Sequence[Token], index: int, variables: Collection[str]) -> bool:
    """Return whether a variable begins a predicate such as `p:Person`, with one label that needs no escape."""
    colon, label, after = (token_at(tokens, index + offset) for offset in (1, 2, 3))
    is_single = label.is_name and "'" not in label.text and "\\" not in label.text and not after.is_mark(":", "|", "&")
    return is_single and colon.is_mark(":") and is_variable(tokens, index, variables)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _is_component(tokens: Sequence[Token], index: int) -> bool:
    """Return whether a name is a date component, like the year in `a.born.year`."""
    return (
        token_at(tokens, index).text.lower() in _COMPONENTS
        and token_at(tokens, index - 1).is_mark(".")
        and token_at(tokens, index - 2).is_name
        and token_at(tokens, index - 3).is_mark(".")
        and not token_at(tokens, index + 1).is_mark("(")
    )


def _wrap_component(written: list[str], component: str) -> None:
    owner = [written.pop() for _ in range(3)][::-1]
    written.append(f"date_part('{component}', {''.join(owner)})")


def _is_schema_name(tokens: Sequence[Token], index: int) -> bool:
    before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
    if before.is_mark("."):
        return not following.is_mark("(")
    if following.is_mark(":") and before.is_mark("{", ","):
        return True
    return (
        before.is_mark(":", "|") and not tokens[index].is_word("TRUE", "FALSE", "NULL") and not following.is_mark("(")
    )


def _glue(written: Sequence[str]) -> str:
    """Join texts without spaces inside arrows, before the parenthesis of a call or around dots."""
    text = ""
    for at, piece in enumerate(written):
        before = written[at - 1] if at else ""
        is_call = piece == "(" and before.upper() not in _BEFORE_PARENTHESES
        in_arrow = piece in ("-", ">") and before in ("-", "]")
        glued = piece == "." or before in (".", "<", "-") or is_call or in_arrow
        text += ("" if glued or not text else " ") + piece
    return text
