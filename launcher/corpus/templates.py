"""Conversation -> segments of text, trained or not. The end of an answer is trained: a model must learn to stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from launcher.corpus.conversations import Conversation, Message


class Segment(NamedTuple):
    """A tuple, because millions are made."""

    text: str
    is_trained: bool


class Template(Protocol):
    """What all templates can do. `text` enters the store's key: another text is another data set."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def end_token(self) -> str: ...

    def render(self, conversation: Conversation) -> tuple[Segment, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTemplate:
    """A template in which every turn is opened, filled and closed alike."""

    name: str
    begin: str = ""
    open: str  # {role} is filled in
    close: str
    after: str = ""  # between turns; never trained
    think: str = ""  # what a model that thinks is given instead of thoughts

    @property
    def text(self) -> str:
        return "\n".join((self.begin, self.open, self.close, self.after, self.think))

    @property
    def end_token(self) -> str:
        return self.close

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        return tuple(merge_segments(self._pieces(conversation)))

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        yield Segment(self.begin, False)
        for message in conversation.messages:
            yield Segment(self.open.format(role=message.role), False)
            is_answer = message.role == "assistant"
            if is_answer and self.think and "<think>" not in message.content:
                yield Segment(self.think, False)
            yield Segment(join_context(message) + self.close, is_answer)
            yield Segment(self.after, False)


def join_context(message: Message) -> str:
    return f"{message.content}\n\n{message.context}" if message.context else message.content


def merge_segments(pieces: Iterator[Segment]) -> Iterator[Segment]:
    """Neighbours of one kind become one: fewer pieces to tokenise, and no token is cut where nothing changes."""
    last: Segment | None = None
    for piece in pieces:
        if not piece.text:
            continue
        if last is not None and last.is_trained == piece.is_trained:
            last = Segment(last.text + piece.text, piece.is_trained)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


CHATML = TurnTemplate(name="chatml", open="<|im_start|>{role}\n", close="<|im_end|>", after="\n")
QWEN3 = TurnTemplate(
    name="qwen3", open="<|im_start|>{role}\n", close="<|im_end|>", after="\n", think="<think>\n\n</think>\n\n"
)
LLAMA3 = TurnTemplate(
    name="llama3",
    begin="<|begin_of_text|>",
    open="<|start_header_id|>{role}<|end_header_id|>\n\n",
    close="<|eot_id|>",
)


@dataclass(frozen=True, slots=True)
class AlpacaTemplate:
    """Headlines instead of markers; the end is the tokenizer's own end-of-text token."""

    end_token: str
    name: str = "alpaca"

    @property
    def text(self) -> str:
        return f"### Instruction / ### Input / ### Response / {self.end_token}"

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        return tuple(merge_segments(self._pieces(conversation)))

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        for message in conversation.messages:
            if message.role == "assistant":
                yield Segment("### Response:\n", False)
                yield Segment(message.content + self.end_token, True)
                yield Segment("\n\n", False)
            elif message.role == "system":
                yield Segment(f"{message.content}\n\n", False)
            else:
                context = f"### Input:\n{message.context}\n\n" if message.context else ""
                yield Segment(f"### Instruction:\n{message.content}\n\n{context}", False)
