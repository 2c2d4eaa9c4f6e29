r"""The tokenizer's own chat template (Jinja), rendered in a sandbox; a second rendering with marks locates messages.

A template returns one text, but only the answers have loss. For a question "Hi" and an answer "Hello":

    rendered     <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    with marks   <|im_start|>user\n⦅0<⦆Hi⦅0>⦆<|im_end|>\n<|im_start|>assistant\n⦅1<⦆Hello⦅1>⦆<|im_end|>\n
    prompt       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n

The marks say where "Hello" is written. The segment with loss begins where the prompt of the turns before it ends, since
a template may write more before the answer, and goes through the first end token after the answer: `Hello<|im_end|>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.core.errors import InputError
from launcher.corpus.chat_turns import TOOL_CALL_FORMS, check_complete, check_reasoning, to_turns, writes_python
from launcher.corpus.control_tokens import ControlTokens, find_control_tokens, get_added_tokens
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.message_marks import MARK, Marker, marks_of
from launcher.corpus.rows import Json
from launcher.corpus.template_sandbox import (
    SPECIAL_NAMES,
    TemplateLimitError,
    TemplateRejectsError,
    check_template,
    compile_template,
    render_template,
)
from launcher.corpus.templates import TOOLS_REASON, Segment
from launcher.corpus.tokenizer import BaseTokenizer

_QUESTION, _ANSWER = "How many?", "Forty-two."
_PROBE = "⦅"  # an answer that begins like no other
_HINT = (
    "set base_models[0].prompt_template to one of chatml, qwen3, llama3, alpaca; or put your own template next to "
    'the manifest and write "chat_template": "template.jinja" in base_models[0]'
)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A rendered conversation, and the position of each message in its text."""

    text: str
    spans: dict[int, tuple[int, int]]
    missing: tuple[int, ...] = ()  # messages of which the template left out a part; -1 for a tool
    is_located: bool = True  # whether the spans are known


@dataclass(frozen=True, kw_only=True)
class TokenizerTemplate:
    """The chat template of a base model. It is untrusted code and runs in Jinja's immutable sandbox."""

    tokenizer: BaseTokenizer
    source: str
    tool_source: str | None = None  # of conversations with tools, if the base has another template for them
    requested_end: str | None = None  # the manifest's end_token
    name: str = "tokenizer"
    file: str = ""  # of the template, if it is not the tokenizer's
    adds_bos: bool = False  # chat templates write it themselves, as transformers expects

    @property
    def origin(self) -> str:
        """File or folder that the template comes from, for error messages."""
        return self.file or str(self.tokenizer.folder)

    @property
    def text(self) -> str:
        """The template source, which is part of the key of prepared data."""
        return self.source + (self.tool_source or "")

    @cached_property
    def end_token(self) -> str:
        """The token that ends an answer; raises InputError if there is none.

        It is the manifest's `end_token` if set. Otherwise it is the tokenizer's eos_token if the template writes it
        after every answer, else the first added token that the template writes after an answer.
        """
        after, between = self._surroundings
        tokens, usual = self._added_tokens(after), self.tokenizer.end_of_text
        is_usual = usual in tokens and usual in self._added_tokens(between) and usual not in self.turn_starts
        end = usual if is_usual else next(iter(tokens), None)
        if self.requested_end is not None:
            end = self.requested_end if self.requested_end in after else None
        if end is None:
            wanted = "no end token" if self.requested_end is None else f"no {self.requested_end!r}"
            raise InputError(
                f"{self.origin}: the chat template writes {wanted} after an answer, so answers would never end",
                hint=_HINT,
            )
        return end

    @property
    def turn_starts(self) -> list[str]:
        """The added tokens that the template writes at the start of a turn, such as <|im_start|>."""
        after, between = map(self._added_tokens, self._surroundings)
        following = between[1:]  # the first one ends the answer
        first = next((token for token in following if token not in after), following[-1] if following else None)
        return [*self._added_tokens(self._generation_prompt), *([] if first is None else [first])]

    @cached_property
    def controls(self) -> ControlTokens:
        """The template's control tokens, such as <|im_end|>; in a row's fields they are ordinary text."""
        try:
            written = "".join(self._surroundings)
        except InputError:  # a template that renders nothing: its rows are rejected
            written = ""
        return find_control_tokens(self.tokenizer.backend, written)

    @cached_property
    def _surroundings(self) -> tuple[str, str]:
        """What the template writes after the last answer, and between an answer and the next question."""
        question, answer = Message("user", _QUESTION), Message("assistant", _ANSWER)
        try:
            one = self._run(to_turns((question, answer)), prompt=False)
            try:
                two = self._run(to_turns((question, answer, question)), prompt=True)
            except TemplateRejectsError:
                two = one
        except TemplateRejectsError as error:
            raise InputError(
                f"{self.origin}: the chat template cannot render a question and its answer: {error}",
                hint=_HINT,
            ) from None
        if _ANSWER not in one:
            raise InputError(f"{self.origin}: the chat template leaves out the answer", hint=_HINT)
        between = two.partition(_ANSWER)[2].partition(_QUESTION)[0]
        return one.rpartition(_ANSWER)[2], between

    @cached_property
    def _generation_prompt(self) -> str:
        turns = to_turns((Message("user", _QUESTION),))
        try:
            with_prompt, without = self._run(turns, prompt=True), self._run(turns, prompt=False)
        except TemplateRejectsError:
            return ""
        return with_prompt[self._count_shared(with_prompt, without) :]  # some write eos_token if there is no prompt

    def render_served_prompt(self, question: str) -> str:
        """Return the prompt that servers render for a question; that of training rows may differ, as in DeepSeek R1."""
        return self._run(to_turns((Message("user", self.controls.escape_text(question)),)), prompt=True)

    def find_other_prompt(self) -> str | None:
        """Return a server's prompt from where it differs from that of training rows; None if they are equal."""
        try:
            served = self.render_served_prompt(_QUESTION)
            first, *_ = self.render(Conversation((Message("user", _QUESTION), Message("assistant", _ANSWER))))
        except TemplateRejectsError:
            return None
        return None if first.text == served else served[self._count_shared(served, first.text) :]

    def _added_tokens(self, text: str) -> list[str]:
        """Return the added tokens in a text, in order."""
        added = get_added_tokens(self.tokenizer.backend)
        ids = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        return [added[token].content for token in ids if token in added]

    @cached_property
    def _template(self) -> Any:
        return self._compile(self.source)

    @cached_property
    def _tool_template(self) -> Any:
        return self._template if self.tool_source is None else self._compile(self.tool_source)

    def _compile(self, source: str) -> Any:
        problem = check_template(source)
        if problem:
            raise InputError(f"{self.origin}: the chat template cannot be used: {problem}", hint=_HINT)
        try:
            return compile_template(source)
        except Exception as error:  # untrusted code may raise anything
            raise InputError(f"{self.origin}: invalid chat template: {error}", hint=_HINT) from None

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        """Return a rendered conversation as segments of text with and without loss."""
        return tuple(piece for piece in self._pieces(self.controls.escape(conversation)) if piece.text)

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        """Yield the segments of a conversation; an answer has loss from the end of its prompt through its end token.

        Without that token after it, the answer's text has loss, and a tool call also what closes it.
        """
        turns, rendered = self._render_best(conversation)
        full, position = rendered.text, 0
        check_reasoning(conversation.messages, full)
        for index, message in enumerate(conversation.messages):
            if message.role != "assistant" or not message.is_trained:
                continue
            start = None if index in rendered.missing else self._find_start(index, turns, conversation.tools, rendered)
            if start is None:
                continue  # counted in the audit
            start = max(start, position)
            _, last = rendered.spans.get(index, (0, 0))
            others = [begin for number, (begin, _) in rendered.spans.items() if number != index]
            if any(start < begin < last for begin in others):  # the result of a tool is inside the answer
                continue
            written = max(start, last)
            following = min((begin for begin in others if begin >= written), default=len(full))
            if (end := full.find(self.end_token, written, following)) >= 0:
                end += len(self.end_token)
            elif message.tool_calls:
                alone = self._try(turns[: index + 1], tools=conversation.tools) or ""
                end = self._find_other_end(full, start, written, following, alone)
            else:  # no server stops at another token, such as <|end|> before the next question in gpt-oss
                end = written
            yield Segment(full[position:start], False)
            yield Segment(full[start:end], True)
            position = end
        yield Segment(full[position:], False)

    def _find_start(
        self, index: int, turns: list[dict[str, Any]], tools: Sequence[Json], rendered: _Rendered
    ) -> int | None:
        """Return the position at which an answer starts, or None if it cannot be found.

        It is the end of the prompt, rendered with thinking disabled or, if that prompt does not fit, with thinking as
        the template sets it by default, as for answers with thoughts or tool calls. If neither prompt fits, it is the
        first position at which the text changes with the answer.
        """
        full, (written, _) = rendered.text, rendered.spans.get(index, (None, 0))
        for thinks in (False, True) if "enable_thinking" in self.text else (False,):
            prompt = self._try(turns[:index], prompt=True, tools=tools, thinks=thinks)
            if prompt is None or not full.startswith(prompt):
                continue
            length = len(prompt)
            if written is None:
                return length
            ignores_prompt = not self._generation_prompt and self.controls.pattern.search(full, length, written)
            has_header = full.startswith(tuple(self.turn_starts), length)  # after a tool's result, unlike in a prompt
            if length <= written and not ignores_prompt and not has_header:
                return length
        return None if written is None else self._find_difference(index, turns, tools, rendered, written)

    def _find_difference(
        self,
        index: int,
        turns: list[dict[str, Any]],
        tools: Sequence[Json],
        rendered: _Rendered,
        written: int,
    ) -> int:
        """Return the first position at which the text changes with the answer `index`; `written` if it is unknown."""
        full = rendered.text
        other = self._try([*turns[:index], {"role": "assistant", "content": _PROBE}, *turns[index + 1 :]], tools=tools)
        if other is None:
            return written
        length = self._count_shared(full, other)
        before = max((end for number, (_, end) in rendered.spans.items() if number < index), default=0)
        return length if before <= length <= written else written

    def _try(self, turns: list[dict[str, Any]], **options: Any) -> str | None:
        try:
            return self._run(turns, **{"prompt": False, **options})
        except TemplateRejectsError:
            return None

    def _find_other_end(self, full: str, start: int, written: int, following: int, alone: str) -> int:
        """Return where an answer ends that is not closed by the end token, such as a tool call.

        It is closed by the counterpart of its first token, as in <|tool_call> ... <tool_call|>. Without one, it is
        closed by the last token that is also written if the conversation ends with this answer (`alone`), else by the
        next token. If no token closes it, `written` is returned.
        """
        tokens = list(self.controls.pattern.finditer(full, written, following))
        opened = self.controls.pattern.search(full, start, written)
        name = "" if opened is None else _get_letters(opened[0])
        partners = [token for token in tokens if opened and token[0] != opened[0] and _get_letters(token[0]) == name]
        length = self._count_shared(full, alone)
        own = [token for token in tokens if token.end() <= length and token[0] not in self.turn_starts]
        closing = next(iter([*partners, *own[-1:], *tokens]), None)
        return written if closing is None or closing[0] in self.turn_starts else closing.end()

    def _count_shared(self, one: str, other: str) -> int:
        """Return the length of the common prefix of two texts, which never ends inside a control token."""
        pairs = enumerate(zip(one, other, strict=False))
        length = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
        tokens = self.controls.pattern.finditer(one)
        return next((token.start() for token in tokens if token.start() < length < token.end()), length)

    def _render_best(self, conversation: Conversation) -> tuple[list[dict[str, Any]], _Rendered]:
        """Render a conversation, with tool calls in the first form of which the template leaves nothing out."""
        messages = conversation.messages
        if not conversation.tools and not any(m.tool_calls or m.role == "tool" for m in messages):
            rendered = self._render_marked(conversation, {})
            check_complete(messages, rendered.missing)
            return to_turns(messages), rendered
        problem = ""
        for form in TOOL_CALL_FORMS:
            try:
                rendered = self._render_marked(conversation, form)
            except TemplateRejectsError as error:
                problem = problem or f"{error} ({TOOLS_REASON})"
                continue
            is_complete = rendered.is_located and not rendered.missing and len(rendered.spans) == len(messages)
            if is_complete and not writes_python(messages, rendered.text):
                return to_turns(messages, **form), rendered
            problem = "the chat template leaves out tools, tool calls or their results"
        raise TemplateRejectsError(problem)

    def _render_marked(self, conversation: Conversation, form: dict[str, Any]) -> _Rendered:
        """Render a conversation with and without marks, which show where the text of each message is."""
        try:
            full = self._run(to_turns(conversation.messages, **form), prompt=False, tools=conversation.tools)
        except TemplateRejectsError as error:
            raise self._explain(error, conversation) from None
        marker = Marker()
        tools = [marker.mark_tool(tool) for tool in conversation.tools]
        turns = to_turns(conversation.messages, marker=marker, **form)
        try:
            marked = self._run(turns, prompt=False, tools=tools)
        except TemplateRejectsError:
            return _Rendered(full, {}, is_located=False)
        spans: dict[int, tuple[int, int]] = {}
        parts, found, position, length = [], set(), 0, 0
        for mark in MARK.finditer(marked):
            parts.append(marked[position : mark.start()])
            length += mark.start() - position
            position, number = mark.end(), int(mark[1])
            if number < len(marker.owners) and mark[0] not in found:  # templates may repeat the name of a tool
                found.add(mark[0])
                owner = marker.owners[number]
                spans[owner] = (spans.get(owner, (length, 0))[0], length)
        if "".join(parts) + marked[position:] != full:  # the template reads the text, and writes another one with marks
            return _Rendered(full, {}, is_located=False)
        spans.pop(-1, None)
        marks = enumerate(marker.owners)
        return _Rendered(full, spans, tuple(owner for number, owner in marks if not marks_of(number) <= found))

    def _explain(self, error: TemplateRejectsError, conversation: Conversation) -> TemplateRejectsError:
        """Return an error that says so if the template accepts no system message, otherwise the given error."""
        others = tuple(message for message in conversation.messages if message.role != "system")
        if len(others) == len(conversation.messages):
            return error
        try:
            self._run(to_turns(others), prompt=False, tools=conversation.tools)
        except TemplateRejectsError:
            return error
        return TemplateRejectsError(f"{error} (it accepts no system message; move its text into the user message)")

    def _run(
        self, turns: list[dict[str, Any]], *, prompt: bool, tools: Sequence[Json] = (), thinks: bool = False
    ) -> str:
        tokens = {
            name: self.tokenizer.special_token(name) or "" for name in SPECIAL_NAMES
        } | self.tokenizer.extra_tokens
        template = self._tool_template if tools else self._template
        try:
            return render_template(template, turns, prompt=prompt, tokens=tokens, tools=tools, thinks=thinks)
        except TemplateLimitError as error:
            raise InputError(f"{self.origin}: the chat template {error}", hint=_HINT) from None
        except Exception as error:  # untrusted code may raise anything
            raise TemplateRejectsError(f"the chat template rejects the messages: {str(error)[:80]}") from None


def _get_letters(name: str) -> str:
    return "".join(filter(str.isalpha, name))


def make_tokenizer_template(
    tokenizer: BaseTokenizer, end_token: str | None = None, own: str | None = None, file: str = ""
) -> TokenizerTemplate:
    """Return the manifest's own chat template if `own` is its source, otherwise the tokenizer's.

    Raises InputError if the tokenizer has no chat template, or if neither the tokenizer nor the manifest names an end
    token.
    """
    source = tokenizer.chat_template if own is None else own
    if source is None or (tokenizer.end_of_text is None and end_token is None):
        missing = "chat template" if source is None else "eos_token"
        raise InputError(f"{tokenizer.folder}: the tokenizer has no {missing}", hint=_HINT)
    if own is None:
        tool_source = tokenizer.tool_template
        return TokenizerTemplate(tokenizer=tokenizer, source=source, tool_source=tool_source, requested_end=end_token)
    return TokenizerTemplate(tokenizer=tokenizer, source=source, requested_end=end_token, name="own", file=file)


def check_own_template(source: str, file: str) -> None:
    """Raise InputError if a chat template cannot be compiled, or exceeds the limits on time and memory."""
    problem = check_template(source)
    if not problem:
        try:
            compile_template(source)
        except Exception as error:  # untrusted code may raise anything
            line = getattr(error, "lineno", None)
            problem = f"{error}" + (f" (line {line})" if line else "")
    if problem:
        raise InputError(f"{file}: the chat template cannot be used: {problem}", hint="it must be a Jinja template")
