"""Whether two queries return the same: run by an embedded graph database on generated graphs.

The engine is not Neo4j. Where it lacks a feature, or may count differently, nobody could tell: None, never a guess.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

from launcher.quality.cypher_analysis import start_child, version_of
from launcher.quality.cypher_graphs import find_literals, make_tables, render_setup
from launcher.quality.cypher_normal import find_variables, is_variable
from launcher.quality.cypher_patterns import find_chains
from launcher.quality.cypher_rules import find_acts
from launcher.quality.cypher_schema import GraphSchema
from launcher.quality.cypher_tokens import Kind, Token, match_brackets, render_token, strip_end, token_at, words
from launcher.quality.line_worker import WorkerGoneError

_NUM_GRAPHS = 10
_SECONDS = 15.0
_MEMORY_MIB = 2048
# Same name, another meaning; or today's date, which no generated row was made around.
_NOT_THE_SAME = words(
    "labels id elementid nodes relationships keys properties split substring rand randomuuid timestamp duration left "
    "right point reduce percentilecont percentiledisc round"
)  # fmt: skip
_COMPONENTS = words("year month day hour minute second quarter week")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """None: nobody could tell, and why."""

    same: bool | None
    reason: str


class Engine:
    """Holds one child process."""

    def __init__(self) -> None:
        self.checker = f"ladybug {version_of('ladybug')}"
        self._worker = start_child("cypher_engine_child.py", memory_mib=_MEMORY_MIB, seconds=_SECONDS)

    def compare(self, schema: GraphSchema, reference: Sequence[Token], answer: Sequence[Token]) -> Outcome:
        reference, answer = strip_end(reference), strip_end(answer)
        for query in (reference, answer):
            if reason := _find_obstacle(query):
                return Outcome(same=None, reason=reason)
        return _Comparison(self, schema, reference, answer).decide()

    def run(self, setup: list[str], queries: list[str]) -> list[list[object] | str]:
        try:
            reply: list[list[object] | str] = json.loads(
                self._worker.ask(json.dumps({"setup": setup, "queries": queries}))
            )
        except (WorkerGoneError, ValueError) as error:
            return [f"the engine {error}"] * len(queries)
        return reply

    def close(self) -> None:
        self._worker.close()


def open_engine() -> Engine | None:
    return Engine() if find_spec("ladybug") is not None else None


@dataclass(frozen=True, slots=True)
class _Comparison:
    engine: Engine
    schema: GraphSchema
    reference: list[Token]
    answer: list[Token]

    def decide(self) -> Outcome:
        """The same on every graph on which the reference itself does not depend on how rows were put in."""
        bodies, tails = zip(*(_split_tail(query) for query in (self.reference, self.answer)), strict=True)
        same_tails = tails[0] == tails[1]
        is_ordered = _is_ordered(self.reference)
        texts = [render_for_engine(query) for query in _shrink_counts(bodies)]
        tables = make_tables(self.schema, (self.reference, self.answer))
        literals = find_literals((self.reference, self.answer))
        seed = zlib.crc32(repr((texts[0], sorted(self.schema.nodes))).encode(errors="replace"))
        told = False
        for number in range(_NUM_GRAPHS):
            graph = partial(render_setup, tables, literals, number=number, seed=seed)
            expected, given = self.engine.run(graph(turned=False), texts)
            if isinstance(expected, str) or isinstance(given, str):
                who, why = ("reference", expected) if isinstance(expected, str) else ("answer", given)
                return Outcome(same=None, reason=f"the engine does not run the {who}: {why}")
            if not same_tails and not (len(expected) <= 1 and all(map(_keeps_one, tails))):
                return Outcome(same=False, reason="returns another part of the rows than the reference")
            if _fits(expected, given, is_ordered):
                told = told or bool(expected)
                continue
            # The reference may leave open what comes out: then it does so on the same graph, put in the other way.
            (turned,) = self.engine.run(graph(turned=True), texts[:1])
            if isinstance(turned, str) or _bag(turned) != _bag(expected):
                continue
            if not _fits(expected, given, is_ordered and expected == turned):
                return self._differ()
            told = told or bool(expected)
        return (
            Outcome(same=True, reason="") if told else Outcome(same=None, reason="no graph tells them apart or alike")
        )

    def _differ(self) -> Outcome:
        if any(map(_may_reuse, (self.reference, self.answer))):
            return Outcome(same=None, reason="the engine lets two relationships of a pattern be one")
        return Outcome(same=False, reason="returns something else than the reference")


def _fits(expected: list[object], given: list[object], is_ordered: bool) -> bool:
    return expected == given if is_ordered else _bag(expected) == _bag(given)


def _find_obstacle(tokens: Sequence[Token]) -> str:
    """What keeps a query from the engine: it only ever sees queries that read."""
    if acts := find_acts(tokens):
        return f"{', '.join(sorted(acts))} is not run"
    for index, token in enumerate(tokens):
        if token.kind is Kind.PARAMETER or token.is_mark(";", "$"):
            return f"{token.text} is not run"
        if token.is_word("CALL", "LOAD", "COPY", "ATTACH", "INSTALL", "EXPORT", "IMPORT", "USE", "PROFILE", "EXPLAIN"):
            return f"{token.text.upper()} is not run"
        is_call = token.kind is Kind.NAME and token_at(tokens, index + 1).is_mark("(")
        if is_call and (token.text.lower() in _NOT_THE_SAME or token_at(tokens, index - 1).is_mark(".")):
            return f"{token.text}() may mean something else to the engine"
        if token.is_mark("[") and _is_indexed(tokens, index):
            return "the engine counts elements of a list from 1"
    return ""


def _is_indexed(tokens: Sequence[Token], index: int) -> bool:
    before = token_at(tokens, index - 1)
    is_value = before.is_mark(")", "]") or (
        before.is_name and not before.is_word("IN", "RETURN", "WITH", "UNWIND", "AND")
    )
    return is_value and token_at(tokens, index + 1).kind is Kind.NUMBER


def _split_tail(tokens: Sequence[Token]) -> tuple[list[Token], tuple[str, ...]]:
    """A last SKIP and LIMIT, which cut off anything where values are tied: compared as they are written."""
    depth = 0
    for index in range(len(tokens) - 1, -1, -1):
        token = tokens[index]
        depth += token.is_mark(")", "]", "}") - token.is_mark("(", "[", "{")
        if depth == 0 and token.is_word("RETURN", "BY", "UNION"):
            break
        if depth == 0 and token.is_word("SKIP", "LIMIT", "OFFSET") and not token_at(tokens, index - 1).is_mark("."):
            body, tail = _split_tail(tokens[:index])
            written = tuple(render_token(one).upper() for one in tokens[index:])
            return body, (*tail, *written)
    return list(tokens), ()


def _keeps_one(tail: tuple[str, ...]) -> bool:
    return not tail or (len(tail) == 2 and tail[0] == "LIMIT" and tail[1].isdigit() and int(tail[1]) > 0)


def _is_ordered(tokens: Sequence[Token]) -> bool:
    """Its last RETURN has an ORDER BY."""
    last = max((index for index, token in enumerate(tokens) if token.is_word("RETURN")), default=0)
    return any(token.is_word("ORDER") for token in tokens[last:])


def _bag(rows: list[object]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def _may_reuse(tokens: Sequence[Token]) -> bool:
    """Two relationships of one type in one MATCH: Neo4j never takes the same one twice, the engine does."""
    seen: set[str] = set()
    previous = 0
    for chain in find_chains(tokens, match_brackets(tokens)):
        if any(token.is_word("MATCH", "EXISTS", "COUNT", "NOT") for token in tokens[previous : chain.start]):
            seen = set()
        previous = chain.end
        for arrow in chain.arrows:
            names = set(arrow.element.names) or {"*"}
            if seen & names or "*" in seen or (seen and "*" in names):
                return True
            seen |= names
    return False


def _shrink_counts(queries: Sequence[Sequence[Token]]) -> list[list[Token]]:
    """`WITH a, count(b) AS total WHERE total > 12`: no small graph has so many. In both queries 12 becomes 2; what is
    next to it stays next to it, and what is larger larger."""
    places = [(at, index) for at, query in enumerate(queries) for index in _find_counts(query)]
    sizes = sorted({int(queries[at][index].text) for at, index in places})
    if not sizes or sizes[-1] < 4:
        return [list(query) for query in queries]
    smaller = {sizes[0]: 2}
    for before, size in pairwise(sizes):
        smaller[size] = smaller[before] + min(2, size - before)
    shrunk = [list(query) for query in queries]
    for at, index in places:
        shrunk[at][index] = Token(Kind.NUMBER, str(smaller[int(queries[at][index].text)]))
    return shrunk


def _find_counts(tokens: Sequence[Token]) -> list[int]:
    """Numbers that an alias of `count(...)` is compared with."""
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
    """The same query in the engine's dialect: names quoted, MATCH in subqueries, no relationship twice in a path."""
    variables = find_variables(tokens)
    chains = find_chains(tokens, match_brackets(tokens))
    arrows = [arrow.element for chain in chains for arrow in chain.arrows]
    lengths = {at for one in arrows for at in range(one.start, one.end) if tokens[at].is_mark("*")}
    tests = {chain.start: chain.end - 1 for chain in chains if chain.arrows and _is_test(tokens, chain.start)}
    written: list[str] = []
    for index, token in enumerate(tokens):
        before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
        if index in tests:
            written += ["EXISTS", "{ MATCH", "("]
        elif index in tests.values():
            written += [")", "}"]
        elif token.is_word(*map(str.upper, _COMPONENTS)) and _is_component(tokens, index):
            _wrap_component(written, token.text.lower())
        elif token.is_mark(".") and _is_component(tokens, index + 1):
            continue
        elif index in lengths:
            written.append("* TRAIL")
        elif token.is_mark("{") and before.is_word("EXISTS", "COUNT") and following.is_mark("("):
            written.append("{ MATCH")
        elif token.is_name and (is_variable(tokens, index, variables) or _is_schema_name(tokens, index)):
            written.append("`" + token.text.replace("`", "``") + "`")
        elif token.is_word("DATETIME", "LOCALDATETIME") and following.is_mark("("):
            written.append("timestamp")
        elif token.is_word("TYPE") and following.is_mark("("):
            written.append("label")
        else:
            written.append(render_token(token))
    return _glue(written)


def _is_test(tokens: Sequence[Token], index: int) -> bool:
    """A pattern that stands for whether it is there: `WHERE (a)-[:R]->(b)`."""
    return token_at(tokens, index - 1).is_word("WHERE", "AND", "OR", "XOR", "NOT")


def _is_component(tokens: Sequence[Token], index: int) -> bool:
    """The year in `a.born.year`."""
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
    """No space inside an arrow, before a call's bracket or around a dot."""
    text = ""
    for at, piece in enumerate(written):
        before = written[at - 1] if at else ""
        is_call = piece == "(" and before not in ("-", ">", ",", "(", "MATCH", "{ MATCH")
        in_arrow = piece in ("-", ">") and before in ("-", "]")
        glued = piece == "." or before in (".", "<", "-") or is_call or in_arrow
        text += ("" if glued or not text else " ") + piece
    return text
