"""Locate the turns of already templated text by the markers of the template that rendered it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.templates import Segment, Template, merge_segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """A format of templated text; the regular expression `turn` has the groups role, content and close."""

    name: str
    turn: re.Pattern[str]
    templates: frozenset[str]  # our templates that render this dialect


_HEADLINES = "Instruction|Input|Schema|Context|Response"  # other headlines are part of an answer, which may be Markdown

_DIALECTS = (
    Dialect(
        name="chatml",
        turn=re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<content>.*?)(?P<close><\|im_end\|>|\Z)", re.DOTALL),
        templates=frozenset({"chatml", "qwen3"}),
    ),
    Dialect(
        name="llama3",
        turn=re.compile(
            r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<content>.*?)(?P<close><\|eot_id\|>|\Z)",
            re.DOTALL,
        ),
        templates=frozenset({"llama3"}),
    ),
    Dialect(  # used by the published json, sql and neo4j experts under the name chatml
        name="<|role|> ... <|end|>",
        turn=re.compile(
            r"<\|(?P<role>system|user|assistant)\|>\n(?P<content>.*?)(?P<close>\n?<\|end\|>|\Z)", re.DOTALL
        ),
        templates=frozenset(),
    ),
    Dialect(
        name="alpaca",
        turn=re.compile(
            rf"### (?P<role>{_HEADLINES}):\n(?P<content>.*?)(?P<close>(?=\n\n### (?:{_HEADLINES}):\n)|\Z)",
            re.DOTALL,
        ),
        templates=frozenset({"alpaca"}),
    ),
)
_ALPACA_ROLES = {"Instruction": "user", "Response": "assistant"}
_CONTEXTS = ("Input", "Schema", "Context")
_USUAL_PREAMBLE = "Below is "  # "an instruction that describes a task": in every row of Alpaca, and no instruction
_FIRST_TOKENS = re.compile(r"\A\s*(?:<[^<>\s]{1,40}>\s*)+")  # such as <s> or <|begin_of_text|>


def find_dialect(text: str) -> Dialect | None:
    """Return the dialect whose turns a text contains; None if it is not templated."""
    return next((dialect for dialect in _DIALECTS if dialect.turn.search(text)), None)


def find_system(text: str) -> str:
    """Return the system message with which a templated text begins; empty if there is none."""
    dialect = find_dialect(text)
    turn = None if dialect is None else dialect.turn.search(text)
    if dialect is None or turn is None:
        return ""
    return turn["content"].strip() if turn["role"] == "system" else _find_preamble(text, dialect)


def cut_segments(text: str, dialect: Dialect, template: Template) -> tuple[Segment, ...] | None:
    """Return the segments of a templated text, or None without an answer; text of another dialect is rendered again."""
    if template.name not in dialect.templates:
        conversation = parse_conversation(text)
        return None if conversation is None else template.render(conversation)
    pieces = tuple(merge_segments(_pieces(text, dialect, template)))
    return pieces if any(piece.is_trained for piece in pieces) else None


def _pieces(text: str, dialect: Dialect, template: Template) -> Iterator[Segment]:
    """Split the text at its answers. The end token is appended to an unclosed answer, so that it is learned."""
    position = 0
    for turn in dialect.turn.finditer(text):
        if turn["role"] not in ("assistant", "Response"):
            continue
        yield Segment(text[position : turn.start("content")], False)
        body = text[turn.start("content") : turn.end("close")]
        closed = body.rstrip()
        if closed.endswith(template.end_token):
            position = turn.start("content") + len(closed)
            yield Segment(closed, True)
        else:
            position = turn.end("close")
            yield Segment(body + template.end_token, True)
    yield Segment(text[position:], False)


def parse_conversation(text: str) -> Conversation | None:
    """Parse a templated text into messages; None if it is not templated or has no answer."""
    dialect = find_dialect(text)
    if dialect is None:
        return None
    preamble = _find_preamble(text, dialect)
    messages = [Message("system", preamble)] if preamble else []
    contexts: list[str] = []  # of the next question
    for turn in dialect.turn.finditer(text):
        role, content = _ALPACA_ROLES.get(turn["role"], turn["role"]), turn["content"].strip()
        if not content:
            continue
        if role in _CONTEXTS and messages and messages[-1].role == "user":
            messages[-1] = replace(messages[-1], context=_join(messages[-1].context, content))
        elif role in _CONTEXTS:
            contexts.append(content)
        elif role == "user":
            messages.append(Message(role, content, _join(*contexts)))
            contexts = []
        else:
            if contexts and role == "assistant":  # a question without the headline Instruction
                messages.append(Message("user", _join(*contexts)))
                contexts = []
            messages.append(Message(role, content))
    return Conversation(tuple(messages)) if any(message.role == "assistant" for message in messages) else None


def _join(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def _find_preamble(text: str, dialect: Dialect) -> str:
    """Return the system message of Alpaca text, which is before the first heading; empty if there is none."""
    turn = dialect.turn.search(text)
    if turn is None or dialect.name != "alpaca":
        return ""
    preamble = _FIRST_TOKENS.sub("", text[: turn.start()]).strip()
    return "" if preamble.startswith(_USUAL_PREAMBLE) else preamble
