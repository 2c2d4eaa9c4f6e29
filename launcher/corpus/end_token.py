"""The end token of answers: which ones the base model's files name, and whether the template agrees with them."""

from __future__ import annotations

import re

from launcher.core.errors import InputError, Problem
from launcher.corpus.chat_template import TokenizerTemplate
from launcher.corpus.templates import Template
from launcher.corpus.tokenizer import BaseTokenizer

_CONFIGS = ("config.json", "generation_config.json")  # servers read the last one that names any
_TOKENIZER = "tokenizer_config.json"
_DECIDE = "choose the end token with base_models[0].end_token, for example --set 'base_models[0].end_token={}'"
# Names of tokens that begin a turn, also where the base has no chat template, or one without a usual header.
_TURN_START = re.compile(
    r"im_start|start_of_turn|start_header_id|\[INST\]|<\|(user|assistant|system)\|>", re.IGNORECASE
)


def find_published_ends(tokenizer: BaseTokenizer) -> dict[str, list[int]]:
    """Return the eos_token_id values of config.json and generation_config.json; a file without any is left out."""
    ends = {}
    for file in _CONFIGS:
        config = tokenizer.load_json(file)
        text = config.get("text_config")
        ids = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        tokens = [token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int)]
        if tokens:
            ends[file] = tokens
    return ends


def collect_end_ids(tokenizer: BaseTokenizer, end_token: str) -> list[int]:
    """Return the token ids at which generation stops: those of the template, the tokenizer and the base's configs."""
    names = (end_token, tokenizer.end_of_text)
    ids = [tokenizer.backend.token_to_id(name) for name in names if name is not None]
    published = (token for tokens in find_published_ends(tokenizer).values() for token in tokens)
    size = tokenizer.backend.get_vocab_size()
    return list(dict.fromkeys([token for token in ids if token is not None] + [t for t in published if 0 <= t < size]))


def check_end_token(template: Template, tokenizer: BaseTokenizer, requested: str | None) -> None:
    """Raise InputError if answers would end with several tokens, a turn's first token, or where no server stops."""
    end = template.end_token
    if requested is not None and requested != end:
        raise InputError(
            f"base_models[0].end_token is {requested!r}, but the template {template.name} ends answers with {end!r}",
            hint="remove end_token, or use prompt_template alpaca, which ends answers with your end_token",
        )
    if tokenizer.backend.encode(end, add_special_tokens=False).ids != [tokenizer.backend.token_to_id(end)]:
        raise InputError(
            f"the template {template.name} ends answers with {end!r}, not a token of this tokenizer",
            hint="set base_models[0].prompt_template to tokenizer to use the base model's own chat template",
        )
    if requested is not None:
        return
    if end in _find_turn_starts(tokenizer, template):
        raise InputError(
            f"{tokenizer.folder}: answers would end with {end!r}, which begins a turn, so no server would stop there",
            _list_ends(tokenizer),
            hint=f"is eos_token of tokenizer_config.json right? {_DECIDE.format(_suggest(tokenizer))}",
        )
    published = {token for tokens in find_published_ends(tokenizer).values() for token in tokens}
    if published and end == tokenizer.end_of_text and tokenizer.backend.token_to_id(end) not in published:
        raise InputError(
            f"{tokenizer.folder}: the files of the base model disagree about the end token; answers would be trained "
            f"to end with {end!r}, where no server stops",
            _list_ends(tokenizer),
            hint=_DECIDE.format(_suggest(tokenizer)),
        )


def note_disagreement(template: Template, tokenizer: BaseTokenizer) -> tuple[str, ...]:
    """Return a note if the base model's files and the template disagree about the end token, otherwise nothing."""
    end = template.end_token
    names = _name_ends(tokenizer)
    known = {name for file in _CONFIGS for name in names.get(file, ())} or {tokenizer.end_of_text or end}
    served = next((names[file] for file in (*reversed(_CONFIGS), _TOKENIZER) if file in names), [end])
    if end in served and (tokenizer.end_of_text or end) in known:
        return ()
    said = "; ".join(f"{file}: {', '.join(tokens)}" for file, tokens in names.items())
    return (
        f"the base model's files and the template disagree about the end token ({said}). Answers are trained to end "
        f"with {end}, the end token of the template {template.name}; generation and exports stop at any of these "
        "tokens. base_models[0].end_token chooses another one",
    )


def note_other_prompt(template: Template) -> tuple[str, ...]:
    """Return a note if a server's prompt ends differently from the prompt of training rows, otherwise nothing."""
    other = template.find_other_prompt() if isinstance(template, TokenizerTemplate) else None
    if not other:
        return ()
    return (
        f"servers that use the chat template end the prompt with {other!r}, which it does not write before the answers "
        "of rows. Training, `ask` and `eval` use the prompt of the rows; your own template (base_models[0]."
        "chat_template) can write the same prompt in both cases",
    )


def _find_turn_starts(tokenizer: BaseTokenizer, template: Template) -> list[str]:
    named = [template.end_token] if _TURN_START.search(template.end_token) else []
    source = template.source if isinstance(template, TokenizerTemplate) else tokenizer.chat_template
    if source is None:
        return named
    own = template if isinstance(template, TokenizerTemplate) else TokenizerTemplate(tokenizer=tokenizer, source=source)
    try:
        return named + own.turn_starts
    except InputError:  # a chat template that cannot be used says nothing about another one
        return named


def _list_ends(tokenizer: BaseTokenizer) -> tuple[Problem, ...]:
    said = _name_ends(tokenizer)
    said.setdefault(_TOKENIZER, ["none"])
    return tuple(Problem(where=name, what=f"ends texts with {', '.join(names)}") for name, names in said.items())


def _suggest(tokenizer: BaseTokenizer) -> str:
    """Return the end token to suggest in a hint: the one in the base model's configs, or a placeholder."""
    names = _name_ends(tokenizer)
    return next((names[file][0] for file in _CONFIGS if file in names), "TOKEN")


def _name_ends(tokenizer: BaseTokenizer) -> dict[str, list[str]]:
    """Return the end tokens that each file of the base model names, as text."""
    name_of = tokenizer.backend.id_to_token
    names = {
        file: [name_of(token) or f"id {token}, not in the tokenizer" for token in tokens]
        for file, tokens in find_published_ends(tokenizer).items()
    }
    if tokenizer.end_of_text is not None:
        names[_TOKENIZER] = [tokenizer.end_of_text]
    return names
