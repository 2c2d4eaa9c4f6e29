"""Templates that render conversations to segments of text with and without loss; an answer's end token has loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from launcher.corpus.control_tokens import ControlTokens
from launcher.corpus.conversations import REASONING_KEYS, Conversation, Message
from launcher.corpus.template_sandbox import TemplateRejectsError

_NO_CONTROLS = ControlTokens()
TOOLS_REASON = "the row has tools or tool calls"


class Segment(NamedTuple):
    """A piece of text, with or without loss; a tuple, because there are millions."""

    text: str
    is_trained: bool


class Template(Protocol):
    """Interface of templates. `text` is part of the key of prepared data."""

    @property
    def name(self) -> str:
        """Name of the template."""
        ...

    @property
    def text(self) -> str:
        """Definition of the template as text, for the key of prepared data."""
        ...

    @property
    def end_token(self) -> str:
        """Token that ends an answer."""
        ...

    @property
    def controls(self) -> ControlTokens:
        """Control tokens, such as <|im_end|>; in the fields of a row they are ordinary text."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer's BOS token is put before the text."""
        ...

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        """Return a rendered conversation as segments of text with and without loss."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTemplate:
    """A template in which every turn has the same opening and closing markers."""

    name: str
    begin: str = ""
    open: str  # {role} is replaced
    close: str
    after: str = ""  # between turns; never trained
    think: str = ""  # empty thinking block of a reasoning model
    controls: ControlTokens = _NO_CONTROLS
    adds_bos: bool = True

    @property
    def text(self) -> str:
        """Definition of the template as text, for the key of prepared data."""
        return "\n".join((self.begin, self.open, self.close, self.after, self.think))

    @property
    def end_token(self) -> str:
        """Token that ends an answer."""
        return self.close

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        """Return a rendered conversation as segments of text with and without loss."""
        _refuse_unsupported(conversation, self.name)
        return tuple(merge_segments(self._pieces(self.controls.escape(conversation))))

    def to_jinja(self) -> str:
        """Return this template as a Jinja chat template, for programs that serve the model."""
        before, _, after = (json.dumps(part) for part in self.open.partition("{role}"))
        think = json.dumps(self.think)
        return (
            f"{{{{ {json.dumps(self.begin)} }}}}{{% for message in messages %}}"
            f"{{{{ {before} + message['role'] + {after} }}}}"
            f"{{% if message['role'] == 'assistant' and '<think>' not in message['content'] %}}{{{{ {think} }}}}"
            f"{{% endif %}}{{{{ message['content'] + {json.dumps(self.close + self.after)} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {before} + 'assistant' + {after} + {think} }}}}{{% endif %}}"
        )

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        yield Segment(self.begin, False)
        for message in conversation.messages:
            yield Segment(self.open.format(role=message.role), False)
            is_answer = message.role == "assistant"
            if is_answer and self.think and "<think>" not in message.content:
                yield Segment(self.think, False)
            yield Segment(join_context(message) + self.close, is_answer and message.is_trained)
            yield Segment(self.after, False)


def _refuse_unsupported(conversation: Conversation, name: str) -> None:
    reason = ""
    if conversation.tools or any(message.tool_calls for message in conversation.messages):
        reason = TOOLS_REASON
    elif any(message.reasoning for message in conversation.messages):
        reason = f"the row has {REASONING_KEYS[0]}"
    if reason:
        raise TemplateRejectsError(
            f"{reason}, which the template {name} cannot write; "
            "use prompt_template tokenizer if the base's own chat template can"
        )


def join_context(message: Message) -> str:
    """Return the content of a message followed by its context."""
    return f"{message.content}\n\n{message.context}" if message.context else message.content


def merge_segments(pieces: Iterator[Segment]) -> Iterator[Segment]:
    """Merge adjacent segments that all have loss or all have none, so that no token is split between them."""
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
    """The Alpaca template, with `### Response:` headings; answers end with the tokenizer's end-of-text token."""

    end_token: str
    name: str = "alpaca"
    controls: ControlTokens = _NO_CONTROLS
    adds_bos: bool = True

    @property
    def text(self) -> str:
        """Definition of the template as text, for the key of prepared data."""
        return f"### Instruction / ### Input / ### Response / {self.end_token}"

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        """Return a rendered conversation as segments of text with and without loss."""
        _refuse_unsupported(conversation, self.name)
        return tuple(merge_segments(self._pieces(self.controls.escape(conversation))))

    def to_jinja(self) -> str:
        """Return this template as a Jinja chat template; a context is part of the user's message there."""
        return (
            "{% for message in messages %}{% if message['role'] == 'assistant' %}"
            f"{{{{ '### Response:\\n' + message['content'] + {json.dumps(self.end_token)} + '\\n\\n' }}}}"
            "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
            "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
        )

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        for message in conversation.messages:
            if message.role == "assistant":
                yield Segment("### Response:\n", False)
                yield Segment(message.content + self.end_token, message.is_trained)
                yield Segment("\n\n", False)
            elif message.role == "system":
                yield Segment(f"{message.content}\n\n", False)
            elif message.role == "tool":
                raise TemplateRejectsError("the row has a message of role tool, which the template alpaca cannot write")
            else:
                context = f"### Input:\n{message.context}\n\n" if message.context else ""
                yield Segment(f"### Instruction:\n{message.content}\n\n{context}", False)
