"""Render prompts with the templates that training used."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import make_planned_template
from launcher.corpus.template_sandbox import TemplateRejectsError
from launcher.corpus.templates import Template
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.plan.model import Plan

# Templates render complete conversations. The text before this answer is the prompt.
_PLACEHOLDER_ANSWER = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """A prompt with a placeholder for each field of a row."""

    template: str
    text: str
    fields: tuple[str, ...]  # text.replace(PLACEHOLDERS[i], value of fields[i])
    end_token: str
    adds_bos: bool  # the tokenizer puts its BOS token before the text


# Private-use characters, which no template contains.
PLACEHOLDERS = ("\ue000", "\ue001", "\ue002")


def render_prompt(template: Template, question: str, *, context: str = "", system: str = "") -> str:
    """Return the prompt for a question, for TextEncoder: everything that training put before the answer."""
    system_turn = (Message("system", system),) if system else ()
    turns = (*system_turn, Message("user", question, context), Message("assistant", _PLACEHOLDER_ANSWER))
    try:
        first, *rest = template.render(Conversation(turns))
    except TemplateRejectsError as error:
        raise InputError(f"the template {template.name} cannot render this question: {error}") from None
    if first.is_trained or not rest:
        raise InputError(f"the template {template.name} does not mark where an answer begins")
    return first.text


def derive_prompt_format(plan: Plan, tokenizer: BaseTokenizer) -> PromptFormat:
    """Return the prompt format with the rows' field names; only a question if the manifest does not name fields."""
    template, mapping = make_planned_template(plan.data, tokenizer), plan.data.field_mapping
    names = [mapping.instruction or "question"]
    if mapping.instruction is not None:
        names += [name for name in (mapping.input, mapping.system) if name is not None]
    placeholders = dict(zip(names, PLACEHOLDERS, strict=False))
    text = render_prompt(
        template,
        placeholders[names[0]],
        context=placeholders.get(mapping.input or "", ""),
        system=placeholders.get(mapping.system or "", ""),
    )
    return PromptFormat(
        template=template.name,
        text=text,
        fields=tuple(names),
        end_token=template.end_token,
        adds_bos=TextEncoder(tokenizer, template).adds_bos(text),
    )
