"""A question -> the prompt that training would have put before its answer, made by the corpus's own templates."""

from __future__ import annotations

from launcher.corpus.chat_template import TemplateRefusesError
from launcher.corpus.conversations import Conversation, Message
from launcher.corpus.documents import make_template
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.errors import InputError
from launcher.plan.model import Plan
from launcher.training.card import MARKS, PromptFormat

# Templates render whole conversations. What stands before this answer is the prompt, whatever the answer is.
_ANY_ANSWER = "x"


def make_prompt(template: Template, question: str, *, context: str = "", system: str = "") -> str:
    before = (Message("system", system),) if system else ()
    turns = (*before, Message("user", question, context), Message("assistant", _ANY_ANSWER))
    try:
        first, *rest = template.render(Conversation(turns))
    except TemplateRefusesError as error:
        raise InputError(f"the template {template.name} does not render this question: {error}") from None
    if first.is_trained or not rest:
        raise InputError(f"the template {template.name} has no place where an answer begins")
    return first.text


def describe_prompt(plan: Plan, tokenizer: BaseTokenizer) -> PromptFormat:
    """With the names that the rows' fields have; where the manifest does not name them, the question is all."""
    template, mapping = make_template(plan.data.prompt_template, tokenizer), plan.data.field_mapping
    names = [mapping.instruction or "question"]
    if mapping.instruction is not None:
        names += [name for name in (mapping.input, mapping.system) if name is not None]
    mark_of = dict(zip(names, MARKS, strict=False))
    text = make_prompt(
        template,
        mark_of[names[0]],
        context=mark_of.get(mapping.input or "", ""),
        system=mark_of.get(mapping.system or "", ""),
    )
    return PromptFormat(template=template.name, text=text, fields=tuple(names), end_token=template.end_token)
