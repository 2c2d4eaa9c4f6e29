"""Rules that a Neo4j server enforces and the syntax checker does not, and side effects of a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.judges.cypher.lexer import Kind, Token, match_brackets, token_at, words

AGGREGATES = words(
    "avg collect count max min percentilecont percentiledisc stdev stdevp sum"
)  # lower case: function names are case-insensitive
FUNCTIONS = AGGREGATES | words(
    "all any exists isempty none single allreduce coalesce elementid endnode head id last length nullif properties "
    "randomuuid size startnode timestamp toboolean tobooleanornull tofloat tofloatornull tointeger tointegerornull "
    "type valuetype char_length character_length keys labels nodes range reduce relationships reverse tail "
    "tobooleanlist tofloatlist tointegerlist tostringlist abs ceil floor isnan rand round sign e exp log log10 sqrt "
    "acos asin atan atan2 cos cosh cot coth degrees haversin pi radians sin sinh tan tanh btrim left lower ltrim "
    "normalize replace right rtrim split substring tolower tostring tostringornull toupper trim upper point date "
    "datetime duration localdatetime localtime time linenumber file shortestpath allshortestpaths "
    "vector vector_dimension_count vector_distance vector_norm ceiling ln collect_list"
)
_NAMESPACES = words(
    "date datetime duration localdatetime localtime time point vector graph db apoc gds genai ai algo spatial coll "
    "text math map json"
)  # their functions are too many to list, or belong to plugins
# Words before a parenthesis that are not functions.
_WORDS = words(
    "match optional where and or xor not in is as by with return case when then else end on unwind union distinct "
    "exists count collect call foreach merge create delete detach set remove yield order skip limit offset asc desc "
    "ascending descending starts ends contains null true false shortest paths path groups group any all acyclic trail "
    "walk relationships elements different repeatable insert for require using index scan join use transactions of "
    "rows concurrent in_transactions insert finish next let"
)
_BETWEEN = words("CONTAINS IN AND OR XOR IS")
_CLAUSES = words(
    "MATCH OPTIONAL WITH RETURN UNWIND CALL UNION CREATE MERGE DELETE DETACH SET REMOVE FOREACH LOAD ORDER SKIP LIMIT "
    "OFFSET WHERE"
)


def find_rule_fault(tokens: Sequence[Token]) -> str:
    """Return a message about the first rule of a Neo4j server that a query violates; empty if there is none."""
    return next(_unknown_functions(tokens), "") or next(_misplaced_aggregates(tokens), "")


def _unknown_functions(tokens: Sequence[Token]) -> Iterator[str]:
    for index, token in enumerate(tokens):
        if token.kind is not Kind.NAME or not token_at(tokens, index + 1).is_mark("("):
            continue
        before = token_at(tokens, index - 1)
        if token.is_word(*_BETWEEN) and before.kind is Kind.MARK and not before.is_mark(".", ")", "]", "}"):
            yield f"unknown function {token.text}"  # an operator without a left operand
        if before.is_mark(".", ":", "|", "&", "!"):
            if before.is_mark(".") and not _is_namespaced(tokens, index):
                yield f"unknown function {token.text}"
            continue
        name = token.text.lower()
        if name not in FUNCTIONS and name not in _WORDS and not before.is_word("CALL"):
            yield f"unknown function {token.text}"


def _is_namespaced(tokens: Sequence[Token], index: int) -> bool:
    """Return whether a function has a known namespace, as in `date.truncate(`, or is called by CALL."""
    at = index
    while token_at(tokens, at - 1).is_mark(".") and token_at(tokens, at - 2).is_name:
        at -= 2
    return tokens[at].text.lower() in _NAMESPACES or token_at(tokens, at - 1).is_word("CALL")


def _misplaced_aggregates(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield an error for an aggregate in ORDER BY if none is returned: `RETURN a.name ORDER BY count(*)`."""
    pairs = match_brackets(tokens)
    projected: list[Token] = []
    part = ""
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if token.is_word("RETURN", "WITH") and not token_at(tokens, index - 1).is_word("STARTS", "ENDS"):
            part, projected = "items", []
        elif token.is_word("ORDER") and part == "items" and token_at(tokens, index + 1).is_word("BY"):
            part = "order"
        elif token.is_word(*_CLAUSES) and part and not token_at(tokens, index - 1).is_mark(".", ":"):
            part = ""
        if part == "items":
            projected.append(token)
        counted = (_is_aggregate(projected, at) for at in range(len(projected)))
        if part == "order" and _is_aggregate(tokens, index) and not any(counted):
            yield f"invalid use of aggregating function {token.text}(...) in ORDER BY"
        if token.is_mark("{") and index in pairs:  # a subquery has its own clause order
            index = pairs[index]
        index += 1


def _is_aggregate(tokens: Sequence[Token], index: int) -> bool:
    name = tokens[index]
    return (
        name.kind is Kind.NAME and name.text.lower() in AGGREGATES and token_at(tokens, index + 1).is_mark("(")
    ) and not token_at(tokens, index - 1).is_mark(".")


_ACTS = words(
    "CREATE MERGE DELETE DETACH SET REMOVE FOREACH LOAD DROP ALTER RENAME GRANT DENY REVOKE TERMINATE START STOP "
    "ENABLE DRYRUN REALLOCATE DEALLOCATE USE SHOW INSERT"
)
_NOT_BEFORE_ACT = words("AS RETURN WITH BY WHERE AND OR XOR NOT IN DISTINCT UNWIND CONTAINS WHEN THEN ELSE")
_NOT_AFTER_ACT = (".", ",", ")", "]", "}", "=", "<", ">", "<>", "<=", ">=", "+", ":", "")


def find_acts(tokens: Sequence[Token]) -> frozenset[str]:
    """Return what a query does other than reading: `CREATE`, `LOAD CSV`, `CALL apoc.periodic.iterate`."""
    acts = set()
    for index, token in enumerate(tokens):
        before, following = token_at(tokens, index - 1), token_at(tokens, index + 1)
        if token.is_word("CALL") and following.is_name and not before.is_mark(".", ":"):
            acts.add(f"CALL {_dotted(tokens, index + 1)}")
        elif token.is_word(*_ACTS) and not before.is_word(*_NOT_BEFORE_ACT) and not following.is_mark(*_NOT_AFTER_ACT):
            if before.kind is Kind.MARK and not before.is_mark(")", "]", "}", ";", "{", "", "|"):
                continue
            acts.add("LOAD CSV" if token.is_word("LOAD") else token.text.upper())
    return frozenset(acts)


def _dotted(tokens: Sequence[Token], at: int) -> str:
    name = tokens[at].text
    while token_at(tokens, at + 1).is_mark(".") and token_at(tokens, at + 2).is_name:
        name, at = f"{name}.{tokens[at + 2].text}", at + 2
    return name
