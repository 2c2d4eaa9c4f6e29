"""Infer which field is the prompt, which the answer, and so on, from names and values; refuse if in doubt."""

from __future__ import annotations

from launcher.core.errors import InputError, Problem
from launcher.corpus.conversations import ROLES, find_task_field, make_row_reader
from launcher.corpus.dialects import find_dialect, parse_conversation
from launcher.corpus.rows import BadRow, Rejections, Row, RowFault
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.suggest import find_closest
from launcher.new_expert.field_roles import (
    ANSWER_NAMES,
    CONTEXT_NAMES,
    FIELD_FLAGS,
    LAST_WORD,
    MAJORITY,
    MESSAGES_NAMES,
    PROMPT_NAMES,
    SYSTEM_NAMES,
    FieldFlags,
    Guess,
    Roles,
    describe_fields,
    find_best_named,
    is_majority,
    is_metadata,
    list_reasons,
    list_unused,
    make_guess,
    score_name,
)
from launcher.new_expert.row_profile import FieldProfile, RowProfile, sample_evenly

Pair = tuple[FieldProfile, FieldProfile, str, str]  # prompt and answer, and the reason for each

_BY_FLAG, _BY_NAME = "set by flag", "its name"
_MESSAGES_EXAMPLE = '[{"role": "user", "content": …}, {"role": "assistant", "content": …}]'
_DIALECT_ROWS = 200  # read to find out whether text is already templated
_TASK_ANSWERS = ("output", "chosen", "response")


def infer_roles(profile: RowProfile, flags: FieldFlags | None = None) -> Roles:
    """Return how rows are read. Flags win over names; raises InputError if the layout is not clear."""
    flags = flags or FieldFlags()
    _check_flags(profile, flags)
    if flags.messages is not None:
        return _make_messages_roles(profile, flags.messages, flags)
    if flags.text is not None:
        return _make_text_roles(profile, flags.text, _BY_FLAG)
    if flags.prompt is None and flags.answer is None:
        chat_pair = _find_chat_pair(profile)
        if chat_pair is not None:
            return _make_turn_roles(profile, flags, (*chat_pair, "chat messages without an answer", _BY_NAME))
        roles = _find_messages(profile, flags) or _find_task(profile, flags)
        if roles is not None:
            return roles
    pair = _find_pair(profile, flags)
    if pair is not None:
        return _make_turn_roles(profile, flags, pair)
    templated = _find_templated(profile)
    if templated is not None:
        _check_no_flags(flags, templated, "its text already contains complete conversations")
        return _make_text_roles(profile, templated)
    raise _explain_failure(profile)


def check_usable(profile: RowProfile, roles: Roles) -> None:
    """Raise if most rows cannot be used, according to the reader that training uses."""
    rejections = Rejections()
    for row in profile.rows:
        content = roles.reader.read(row)
        if isinstance(content, BadRow):
            rejections.add(content)
    if rejections.total > MAJORITY * len(profile.rows):
        raise InputError(
            f"{profile.source.path}: {profile.format_share(rejections.total)} cannot be used",
            list_reasons(rejections),
            hint=f"fix or remove these rows, or choose other fields: {FIELD_FLAGS}",
        )


def _check_flags(profile: RowProfile, flags: FieldFlags) -> None:
    problems = []
    for role, name in flags.items():
        if name not in profile.fields:
            suggestion = find_closest(name, tuple(profile.fields))
            what = f"rows have no field {name!r}" + (f"; did you mean {suggestion!r}?" if suggestion else "")
            problems.append(Problem(where=f"--{role}-field", what=what))
    names = [name for _, name in flags.items()]
    if len(set(names)) < len(names):
        problems.append(Problem(where="", what="one field cannot have two roles"))
    alone = next((role for role in ("messages", "text") if getattr(flags, role) is not None), None)
    others = [role for role, _ in flags.items() if role != alone and (alone, role) != ("messages", "system")]
    if alone is not None and others:
        what = f"this field is the complete row: it cannot be combined with --{others[0]}-field"
        problems.append(Problem(where=f"--{alone}-field", what=what))
    if problems:
        fields = ", ".join(profile.fields)
        raise InputError("these fields do not match the rows", tuple(problems), hint=f"rows have: {fields}")


def _check_no_flags(flags: FieldFlags, name: str, reason: str) -> None:
    """Refuse flags that would have no effect."""
    problems = tuple(
        Problem(where=f"--{role}-field {field}", what=f"{name} is the complete row: {reason}")
        for role, field in flags.items()
    )
    if problems:
        raise InputError("these fields do not match the rows", problems, hint=FIELD_FLAGS)


# Rows of one list of messages, or of a list that asks and one that answers.


def _find_chat_pair(profile: RowProfile) -> tuple[FieldProfile, FieldProfile] | None:
    """Find TRL's conversational prompt and completion: messages without an answer, and a field with the answer."""
    prompts = [field for field in profile.fields.values() if is_majority(profile, field.num_asking)]
    prompt = max(prompts, key=lambda field: score_name(field.name, PROMPT_NAMES), default=None)
    if prompt is None:
        return None
    # A text next to complete chats that happen to end with the user is not their answer.
    takes_text = not is_majority(profile, prompt.num_answered)
    answers = [
        field
        for field in profile.fields.values()
        if field not in prompts
        and score_name(field.name, ANSWER_NAMES)
        and is_majority(profile, field.num_answering + (field.num_text if takes_text else 0))
    ]
    answer = max(answers, key=lambda field: score_name(field.name, ANSWER_NAMES), default=None)
    return None if answer is None else (prompt, answer)


def _find_messages(profile: RowProfile, flags: FieldFlags) -> Roles | None:
    fields = sorted(profile.fields.values(), key=lambda field: -score_name(field.name, MESSAGES_NAMES))
    readable = next((field for field in fields if is_majority(profile, field.num_answered)), None)
    if readable is not None:
        return _make_messages_roles(profile, readable.name, flags)
    unreadable = next((field for field in fields if is_majority(profile, field.num_chats)), None)
    if unreadable is not None:
        raise _explain_unreadable(profile, unreadable)
    return None


def _make_messages_roles(profile: RowProfile, name: str, flags: FieldFlags) -> Roles:
    field = profile.fields[name]
    if not field.num_chats:
        raise InputError(
            f"--messages-field {name}: rows hold no chat messages there, but {field.kind}",
            hint=f"messages look like {_MESSAGES_EXAMPLE}",
        )
    if not field.num_answered:
        raise _explain_unreadable(profile, field)
    if flags.context is not None:
        raise InputError(
            f"--context-field {flags.context}: the rows are chats ({name}), which have no separate context",
            hint=f"write the context into the messages, or omit --context-field; if {name} is not what to train on, "
            + FIELD_FLAGS,
        )
    system = flags.system or find_best_named(profile, SYSTEM_NAMES, {name})
    mapping = FieldMapping(messages=name, system=system)
    reason = _BY_FLAG if flags.messages else "chat messages with an answer"
    share = profile.format_share(field.num_answered)
    guesses = [Guess(name="messages", value=name, reason=f"{reason}; in {share}")]
    if system is not None:
        guesses.append(make_guess(profile, "system", system, _BY_FLAG if flags.system else _BY_NAME))
    return Roles(
        kind="messages",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(profile.fields)),
        guesses=(*guesses, *list_unused(profile, {name, system})),
    )


def _explain_unreadable(profile: RowProfile, field: FieldProfile) -> InputError:
    hints = {
        RowFault.UNKNOWN_ROLE: f"known roles: {', '.join(ROLES)}; also human, gpt, bot and model: rename the others",
        RowFault.TOOL_CALLS: "tool calls are not trained: remove such rows, or write the calls as content",
        RowFault.NO_ANSWER: f"put question and answer into one list: {_MESSAGES_EXAMPLE}",
    }
    faults = field.unreadable.faults
    hint = next((hint for fault, hint in hints.items() if fault in faults), f"messages look like {_MESSAGES_EXAMPLE}")
    if any(is_majority(profile, other.num_text) for other in profile.fields.values()):
        hint += f"; if {field.name} is not what to train on, {FIELD_FLAGS}"
    return InputError(
        f"{field.name} holds chat messages, but {profile.format_share(field.unreadable.total)} cannot be used",
        (*list_reasons(field.unreadable), *describe_fields(profile)),
        hint=hint,
    )


def _find_task(profile: RowProfile, flags: FieldFlags) -> Roles | None:
    """Find `input: {"instruction": …, "schema": …}`, which the row reader knows without a mapping."""
    if find_task_field(profile.rows) is None:
        return None
    if not any(name in profile.fields for name in _TASK_ANSWERS):
        raise InputError(
            "input holds instructions, but no field holds their answers",
            describe_fields(profile),
            hint=f"name the field with the answers {' or '.join(_TASK_ANSWERS)}",
        )
    _check_no_flags(flags, "input", "the object contains instruction and context")
    reader = make_row_reader(FieldMapping(), tuple(profile.fields), "input")
    share = profile.format_share(profile.fields["input"].num_objects)
    prompt = Guess(name="prompt", value="input", reason=f"an object with an instruction and its context, in {share}")
    guesses = (prompt, make_guess(profile, "answer", str(reader.answer), _BY_NAME))
    return Roles(kind="task", mapping=FieldMapping(), reader=reader, guesses=guesses)


# Rows of a prompt and an answer in two fields.


def _can_be_prompt(profile: RowProfile, field: FieldProfile) -> bool:
    return is_majority(profile, field.num_text)


def _can_be_answer(profile: RowProfile, field: FieldProfile) -> bool:
    """Text, numbers, and objects or lists, which are written as JSON."""
    return is_majority(profile, field.num_filled - field.num_chats)


def _is_written(profile: RowProfile, field: FieldProfile) -> bool:
    """Whether it is an answer even if its name does not say so, as a number is not."""
    return is_majority(profile, field.num_filled - field.num_chats - field.num_numbers)


def _score(field: FieldProfile, names: tuple[str, ...], flag: str | None) -> int:
    return 1000 if field.name == flag else score_name(field.name, names)


def _find_pair(profile: RowProfile, flags: FieldFlags) -> Pair | None:
    free = [field for field in profile.fields.values() if field.name not in (flags.context, flags.system)]
    prompts = [field for field in free if _can_be_prompt(profile, field) and field.name != flags.answer]
    answers = [field for field in free if _can_be_answer(profile, field) and field.name != flags.prompt]
    if flags.prompt is not None:
        prompts = [profile.fields[flags.prompt]]
    if flags.answer is not None:
        answers = [profile.fields[flags.answer]]
    prompt_scores = {field.name: _score(field, PROMPT_NAMES, flags.prompt) for field in prompts}
    answer_scores = {field.name: _score(field, ANSWER_NAMES, flags.answer) for field in answers}
    pairs = [
        (prompt, answer)
        for prompt in prompts
        for answer in answers
        if prompt is not answer and prompt_scores[prompt.name] and answer_scores[answer.name]
    ]
    prompt_reason = _BY_FLAG if flags.prompt else _BY_NAME
    answer_reason = _BY_FLAG if flags.answer else _BY_NAME
    if pairs:
        prompt, answer = max(pairs, key=lambda pair: prompt_scores[pair[0].name] + answer_scores[pair[1].name])
        return prompt, answer, prompt_reason, answer_reason
    # One role is known: the other field is clear if a single field of text is left.
    left = "the only other field of text"
    best_prompt = max(prompts, key=lambda field: prompt_scores[field.name], default=None)
    best_answer = max(answers, key=lambda field: answer_scores[field.name], default=None)
    if best_prompt is not None and prompt_scores[best_prompt.name]:
        texts = [field for field in answers if field is not best_prompt and _is_written(profile, field)]
        rest = _pick_single(texts, is_given=flags.prompt is not None)
        return None if rest is None else (best_prompt, rest, prompt_reason, left)
    if best_answer is not None and answer_scores[best_answer.name]:
        rest = _pick_single([field for field in prompts if field is not best_answer], is_given=flags.answer is not None)
        return None if rest is None else (rest, best_answer, left, answer_reason)
    return None


def _pick_single(fields: list[FieldProfile], *, is_given: bool) -> FieldProfile | None:
    """Return the only field that can be prompt or answer. Metadata counts if the other role is given by a flag."""
    if not (is_given and len(fields) == 1):
        fields = [field for field in fields if _is_content(field)]
    return fields[0] if len(fields) == 1 else None


def _is_content(field: FieldProfile) -> bool:
    is_constant = len(field.distinct) == 1
    is_context = score_name(field.name, CONTEXT_NAMES + SYSTEM_NAMES) > LAST_WORD
    return not (is_constant or is_metadata(field.name) or is_context)


def _make_turn_roles(profile: RowProfile, flags: FieldFlags, pair: Pair) -> Roles:
    prompt, answer, prompt_reason, answer_reason = pair
    taken: set[str | None] = {prompt.name, answer.name}
    context = flags.context or find_best_named(profile, CONTEXT_NAMES, {*taken, flags.system})
    system = flags.system or find_best_named(profile, SYSTEM_NAMES, {*taken, context})
    mapping = FieldMapping(instruction=prompt.name, input=context, response=answer.name, system=system)
    guesses = [make_guess(profile, "prompt", prompt.name, prompt_reason)]
    if context is not None:
        guesses.append(make_guess(profile, "context", context, _BY_FLAG if flags.context else _BY_NAME))
    if system is not None:
        guesses.append(make_guess(profile, "system", system, _BY_FLAG if flags.system else _BY_NAME))
    guesses.append(make_guess(profile, "answer", answer.name, answer_reason))
    notes = []
    if "rejected" in profile.fields and answer.name == "chosen":
        notes.append("the rows hold preferences: only the chosen answers are trained on (SFT)")
    if prompt.num_chats:
        notes.append(f"the messages of {prompt.name} and {answer.name} are joined into one conversation")
    for field in (prompt, answer):
        if field.num_numbers:
            share = profile.format_share(field.num_numbers)
            notes.append(f'{field.name} is a number or a boolean in {share}: written as text (3 as "3")')
    return Roles(
        kind="turn",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(profile.fields)),
        guesses=(*guesses, *list_unused(profile, {*taken, context, system})),
        notes=tuple(notes),
    )


# Rows of one text.


def _find_templated(profile: RowProfile) -> str | None:
    """Find a field of text in which the turns are already marked."""
    sample = sample_evenly(profile.rows, _DIALECT_ROWS)
    for field in profile.fields.values():
        rows = [row for row in sample if isinstance(row.fields.get(field.name), str)]
        if is_majority(profile, field.num_text) and rows:
            num_templated = sum(_find_dialect_name(row, field.name) is not None for row in rows)
            if num_templated >= MAJORITY * len(rows):
                return field.name
    return None


def _find_dialect_name(row: Row, name: str) -> str | None:
    """Name the dialect of the turn markers, if there is an answer between them."""
    text = str(row.fields.get(name) or "")
    dialect = find_dialect(text)
    return dialect.name if dialect is not None and parse_conversation(text, dialect) is not None else None


def _make_text_roles(profile: RowProfile, name: str, reason: str = "") -> Roles:
    field = profile.fields[name]
    if not field.num_text:
        raise InputError(f"--text-field {name}: rows hold no text there, but {field.kind}")
    mapping = FieldMapping(text=name)
    dialects = [dialect for row in profile.rows if (dialect := _find_dialect_name(row, name)) is not None]
    is_templated = len(dialects) >= MAJORITY * len(profile.rows)
    reason = reason or (f"already templated ({', '.join(sorted(set(dialects)))})" if is_templated else "plain text")
    share = profile.format_share(len(dialects) if is_templated else field.num_text)
    return Roles(
        kind="templated" if is_templated else "text",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(profile.fields)),
        guesses=(Guess(name="text", value=name, reason=f"{reason}; in {share}"),),
        notes=() if is_templated else ("the text has no marked answers: the loss covers every token",),
    )


# Rows whose layout is not clear.


def _explain_failure(profile: RowProfile) -> InputError:
    problems = (*describe_fields(profile), *(Problem(where="note", what=note) for note in profile.notes))
    fields = list(profile.fields.values())
    if not any(field.num_filled for field in fields):
        return InputError("the rows are empty in all fields", problems, hint="they need prompts and answers")
    if profile.unencodable_names:
        names = ", ".join(map(ascii, profile.unencodable_names))
        problem = Problem(where=names, what="the name contains a lone surrogate, and cannot be used")
        return InputError("some field names cannot be written as UTF-8", (*problems, problem), hint="rename them")
    rare = _find_rare(profile)
    if rare is not None:
        share = profile.format_share(len(profile.rows) - rare.num_filled)
        hint = f"remove rows without {rare.name}, or choose other fields: {FIELD_FLAGS}"
        return InputError(f"{rare.name} is missing in {share}", problems, hint=hint)
    texts = [field for field in fields if _can_be_prompt(profile, field)]
    objects = [field for field in fields if is_majority(profile, field.num_objects)]
    if not texts and objects:
        keys = ", ".join(objects[0].object_keys[:5]) or "their keys"
        hint = f"fields inside objects cannot be selected: write {keys} as fields of the row itself"
        return InputError("the rows have no field of text, only objects", problems, hint)
    if not texts:
        return InputError("the rows have no field of text", problems, hint=FIELD_FLAGS)
    if len(texts) == 1 and all(
        is_metadata(field.name) or not field.num_filled + field.num_others for field in fields if field is not texts[0]
    ):
        name = texts[0].name
        return InputError(
            f"the rows have a single field of text, {name}, without marked answers",
            problems,
            hint="supervised fine-tuning needs a second field with the answer; "
            f"--text-field {name} trains on every token of it instead",
        )
    return InputError("cannot infer which field is the prompt and which the answer", problems, hint=FIELD_FLAGS)


def _find_rare(profile: RowProfile) -> FieldProfile | None:
    """Find a field that is named like an answer or a prompt, and that too few rows have."""
    for names, can_be in ((ANSWER_NAMES, _can_be_answer), (PROMPT_NAMES, _can_be_prompt)):
        named = [field for field in profile.fields.values() if field.num_filled and score_name(field.name, names)]
        if named and not any(can_be(profile, field) for field in named):
            best = max(named, key=lambda field: score_name(field.name, names))
            if not is_majority(profile, best.num_filled):
                return best
    return None
