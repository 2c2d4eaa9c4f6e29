"""Convert messages to the dicts that chat templates take, and check that the rendered text contains all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from launcher.corpus.conversations import REASONING_KEYS, Message
from launcher.corpus.message_marks import Marker
from launcher.corpus.template_sandbox import TemplateRejectsError, to_json
from launcher.corpus.templates import join_context

TOOL_CALL_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"text_arguments": True},
    {"empty_is_null": True},
    {"text_arguments": True, "empty_is_null": True},
)
_THOUGHTS = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)


def to_turns(
    messages: Sequence[Message],
    *,
    marker: Marker | None = None,
    text_arguments: bool = False,
    empty_is_null: bool = False,
) -> list[dict[str, Any]]:
    """Return messages as dicts for a chat template; with `text_arguments`, arguments of tool calls are JSON text."""
    turns = []
    for index, message in enumerate(messages):
        content = join_context(message)
        calls: Any = list(message.tool_calls)
        if marker is not None:
            content = marker.mark(content, index)
            calls = [{**call, "function": marker.mark_json(call["function"], index)} for call in calls]
        if text_arguments:
            calls = [
                {**call, "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])}}
                for call in calls
            ]
        turn: dict[str, Any] = {"role": message.role, "content": content, **message.keys}
        if calls:
            turn |= {"tool_calls": calls, "content": None if empty_is_null and not content else content}
        turns.append(turn)
    return turns


def writes_python(messages: Sequence[Message], full: str) -> bool:
    """Return whether a template wrote the arguments of a tool call as the repr of a Python dict instead of JSON."""
    calls: list[Any] = [call for message in messages for call in message.tool_calls]
    every = [call["function"]["arguments"] for call in calls]
    return any(str(arguments) != to_json(arguments) and str(arguments) in full for arguments in every)


def check_reasoning(messages: Sequence[Message], full: str) -> None:
    """Raise TemplateRejectsError if a template drops the reasoning of the last answer; it may drop earlier ones."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if last is None:
        return
    if last.reasoning.strip() not in full:
        raise TemplateRejectsError(
            f"the chat template leaves out {' or '.join(REASONING_KEYS)}; put it into the content"
        )
    thoughts = _THOUGHTS.match(last.content)
    if thoughts is not None and thoughts[1].strip() not in full:
        raise TemplateRejectsError(
            "the chat template leaves out the text before </think> in the last answer; use another template, or rows "
            "without it"
        )


def check_complete(messages: Sequence[Message], missing: Sequence[int]) -> None:
    """Raise TemplateRejectsError if a template left out a question or a system message."""
    role = next((messages[index].role for index in missing if messages[index].role != "assistant"), None)
    if role is None:
        return
    advice = "; move its text into the user message" if role == "system" else ""
    raise TemplateRejectsError(f"the chat template leaves out a message of role {role}{advice}")
