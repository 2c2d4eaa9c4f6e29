"""Infer which field is the prompt, which the answer, and so on, by their usual names; refuse if in doubt."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.core.errors import InputError, Problem
from launcher.corpus.conversations import ROLES, TOOLS_FIELD, RowReader, find_task_field, is_chat, make_row_reader
from launcher.corpus.dialects import parse_conversation
from launcher.corpus.row_text import find_missing_fields, list_columns, list_fields, look_up, parse_row_text
from launcher.corpus.rows import BadRow, Rejections, Row, RowFault
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.parse_json import shorten
from launcher.new_expert.row_profile import FieldProfile, RowProfile, sample_evenly

Kind = Literal["messages", "turn", "task", "templated", "text"]
Chosen = dict[str, tuple[str, str]]  # by role: the field, and why it was chosen

# Usual names of fields, the clearest first.
_NAMES = {
    "prompt": "instruction prompt question user human problem request query utterance message input source text "
    "sentence task",
    "answer": "response output answer completion assistant target solution reply chosen cypher sql json typescript "
    "code query reference gold expected result translation summary label",
    "context": "context schema input passage document background tables table ddl evidence",
    "system": "system system_prompt system_message",
    "messages": "messages conversations conversation chat dialogue dialog turns chosen",
    "metadata": "id uuid key index url name date time lang language database db split category type tag role score "
    "rejected",
}
_KNOWN = {role: names.split() for role, names in _NAMES.items()}
_MANIFEST_KEYS = {"prompt": "instruction", "context": "input", "answer": "response"}  # of field_mapping
_EXACT_NAME, _LAST_WORD = 100, 50  # scores of the first name of a role
_SQUAD_ANSWER = "answers.text.0"  # of SQuAD's layout, which many datasets have: a list of equivalent answers

MAJORITY = 0.5  # share of the rows that a field must have to be the prompt or the answer
_FIELD_FLAGS = "name them with --prompt-field and --answer-field"
_BY_FLAG, _BY_NAME = "set by flag", "its name"
_HINTS = {
    RowFault.UNKNOWN_ROLE: f"known roles: {', '.join(ROLES)}; also human, gpt, bot, model, developer: rename others",
    RowFault.TOOL_CALLS: "tool calls have OpenAI's form: {type, function: {name, arguments}}, in a list tool_calls",
    RowFault.NO_ANSWER: 'put question and answer into one list: [{"role": "user", "content": …}, '
    '{"role": "assistant", "content": …}]',
}
_DIALECT_ROWS = 200  # read to find out whether text is already templated
_SHOWN_REASONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """One proposed setting, with the reason for its value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldFlags:
    """Fields set by flags such as --prompt-field; None if a field is to be inferred."""

    prompt: str | None = None
    answer: str | None = None
    context: str | None = None
    system: str | None = None
    messages: str | None = None
    text: str | None = None
    system_prompt: str | None = None  # the text itself

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield role and field of every flag that was given."""
        for role in ("prompt", "answer", "context", "system", "messages", "text"):
            name = getattr(self, role)
            if name is not None:
                yield role, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """How rows are read: the manifest's field mapping, the reader made from it, and the reasons."""

    kind: Kind
    mapping: FieldMapping
    reader: RowReader
    guesses: tuple[Guess, ...]
    notes: tuple[str, ...] = ()


def infer_roles(profile: RowProfile, flags: FieldFlags | None = None) -> Roles:
    """Return how rows are read, by flags or else by field names; raises InputError if the layout is not clear."""
    flags = flags or FieldFlags()
    _check_flags(profile, flags)
    roles = _choose_layout(profile, flags)
    used = {guess.value for guess in roles.guesses if guess.name != "not used"}
    ignored = tuple(
        Problem(where=f"--{role}-field {name}", what=f"not read, because {roles.guesses[0].value} is the complete row")
        for role, name in flags.items()
        if name not in used
    )
    if ignored:
        hint = f"remove these flags; or, if prompts and answers are separate fields, {_FIELD_FLAGS}"
        raise InputError("these fields do not match the rows", ignored, hint=hint)
    _check_usable(profile, roles)
    return roles


def score_name(name: str, role: str) -> int:
    """Score how well a field's name fits a role; 0 if it does not. A complete name scores higher than a part."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)  # sqlPrompt, sql-prompt and SQL Prompt are all sql, prompt
    words, known = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word], _KNOWN[role]
    joined = "_".join(words)
    if joined in known:
        return _EXACT_NAME - known.index(joined)
    # The last word decides: sql_prompt is a prompt, prompt_id is not.
    return _LAST_WORD - known.index(words[-1]) if words and words[-1] in known else 0


def list_reasons(rejections: Rejections) -> tuple[Problem, ...]:
    """List why rows cannot be used, the most frequent reason first."""
    counted = sorted(rejections.counts.items(), key=lambda item: -item[1])
    return tuple(
        Problem(
            where=f"{count:,} row{'s'[: count != 1]}",
            what=f"{reason} (line {', '.join(map(str, rejections.places[reason][:5]))})",
        )
        for reason, count in counted[:_SHOWN_REASONS]
    )


def _check_flags(profile: RowProfile, flags: FieldFlags) -> None:
    problems = []
    fields = list_fields(profile.rows)
    for role, text in flags.items():
        try:
            missing = [*find_missing_fields(parse_row_text(text, fields), fields)]
        except ValueError as error:
            missing = [f"{text!r}: {error}"]
        problems += [Problem(where=f"--{role}-field", what=what) for what in missing]
    names = [name for _, name in flags.items()]
    if len(set(names)) < len(names):
        problems.append(Problem(where="", what="one field cannot have two roles"))
    if problems:
        raise InputError("these fields do not match the rows", tuple(problems), hint=f"rows have: {', '.join(fields)}")


def _check_usable(profile: RowProfile, roles: Roles) -> None:
    """Raise InputError if the row reader, which training uses too, rejects most rows."""
    rejections = Rejections()
    for row in profile.rows:
        content = roles.reader.read(row)
        if isinstance(content, BadRow):
            rejections.add(content)
    if rejections.total > MAJORITY * len(profile.rows):
        hints = [hint for fault, hint in _HINTS.items() if fault in rejections.faults]
        raise InputError(
            f"{profile.source.path}: {profile.format_share(rejections.total)} cannot be used",
            (*list_reasons(rejections), *_describe_fields(profile)),
            hint="; ".join([*hints, f"fix or remove these rows, or choose other fields: {_FIELD_FLAGS}"]),
        )


def _choose_layout(profile: RowProfile, flags: FieldFlags) -> Roles:
    if flags.text is not None:
        return _make_text_roles(profile, flags.text, _BY_FLAG)
    if flags.messages is not None:
        return _make_roles(profile, flags, "messages", {"messages": (flags.messages, _BY_FLAG)})
    if flags.prompt is None and flags.answer is None:
        messages = _find_messages(profile)
        if messages is not None:
            return _make_roles(profile, flags, "messages", {"messages": (messages, "chat messages")})
        if find_task_field(profile.rows) is not None and {"output", "chosen", "response"} & set(profile.fields):
            return _make_task_roles(profile)
    chosen = _find_pair(profile, flags)
    if chosen is not None:
        return _make_roles(profile, flags, "turn", chosen)
    for field in profile.fields.values():
        if _is_majority(profile, field.num_text) and _is_templated(profile, field.name):
            return _make_text_roles(profile, field.name)
    raise _explain_failure(profile)


def _is_majority(profile: RowProfile, count: int) -> bool:
    return count > 0 and count >= MAJORITY * len(profile.rows)


def _find_best_named(fields: Iterable[FieldProfile], role: str) -> str | None:
    best = max((field.name for field in fields), key=lambda name: score_name(name, role), default=None)
    return best if best is not None and score_name(best, role) else None


def _find_messages(profile: RowProfile) -> str | None:
    """Return the field that holds complete chats, or None; a chat prompt next to an answer field is not complete."""
    fields = profile.fields.values()
    chats = [field for field in fields if _is_majority(profile, field.num_chats + field.num_chat_texts)]
    prompt = _find_best_named(chats, "prompt")
    others = [field for field in fields if field.name != prompt]
    if prompt is not None and _find_best_named(others, "answer") is not None:
        return None
    return max((field.name for field in chats), key=lambda name: score_name(name, "messages"), default=None)


def _find_pair(profile: RowProfile, flags: FieldFlags) -> Chosen | None:
    """Return prompt and answer fields by flag or name; an unknown one must be the only other text field, else None."""
    given_fields = _list_taken(profile, [name for _, name in flags.items()])
    free = [field for field in profile.fields.values() if field.name not in given_fields]

    def list_scores(role: str) -> dict[str, int]:
        if (given := getattr(flags, role)) is not None:
            return {given: 1000}
        counted = (field.num_text + field.num_chats + (field.num_values if role == "answer" else 0) for field in free)
        usable = (field.name for field, count in zip(free, counted, strict=True) if _is_majority(profile, count))
        scores = {name: score_name(name, role) for name in usable}
        if role == "answer" and _SQUAD_ANSWER in list_fields(profile.rows):
            scores[_SQUAD_ANSWER] = _LAST_WORD
        return scores

    prompts, answers = list_scores("prompt"), list_scores("answer")
    pairs = [(p, a) for p in prompts for a in answers if p != a and prompts[p] and answers[a]]
    reasons = {role: _BY_FLAG if getattr(flags, role) else _BY_NAME for role in ("prompt", "answer")}
    if pairs:
        prompt, answer = max(pairs, key=lambda pair: prompts[pair[0]] + answers[pair[1]])
        return {"prompt": (prompt, reasons["prompt"]), "answer": (answer, reasons["answer"])}
    for role, scores, other in (("prompt", prompts, "answer"), ("answer", answers, "prompt")):
        known = max(scores, key=lambda name: scores[name], default=None)
        if known is not None and scores[known]:
            others = [field for field in free if field.name != known]
            texts = [field for field in others if _is_majority(profile, field.num_text)]
            if getattr(flags, role) and other == "answer" and len(others) == 1:  # a number is an answer, too
                texts = [field for field in others if _is_majority(profile, field.num_filled)]
            elif not (getattr(flags, role) and len(texts) == 1):
                roles = ("metadata", "context", "system")
                texts = [field for field in texts if not any(score_name(field.name, each) for each in roles)]
            objects = (field.name for field in free if _is_majority(profile, field.num_values))
            is_inside = other == "answer" and any(score_name(name.removesuffix("s"), other) for name in objects)
            if len(texts) != 1 or is_inside:  # of an object, or a list
                return None
            reason = "the only other field" + " of text" * bool(texts[0].num_text)
            return {role: (known, reasons[role]), other: (texts[0].name, reason)}
    return None


def _make_roles(profile: RowProfile, flags: FieldFlags, kind: Kind, chosen: Chosen) -> Roles:
    """Return how rows with the chosen fields are read; context and system prompt are added by flag or name."""
    for role in ("context", "system"):
        given = getattr(flags, role)
        taken = _list_taken(profile, [flags.context, flags.system, *(name for name, _ in chosen.values())])
        free = [each for each in profile.fields.values() if each.name not in taken and each.num_text + each.num_values]
        name = given or _find_best_named(free, role)
        if name is not None and (role, kind) != ("context", "messages"):  # chats have no separate context
            chosen[role] = name, _BY_FLAG if given else _BY_NAME
    ordered: Chosen = {
        role: chosen[role] for role in ("prompt", "messages", "context", "system", "answer") if role in chosen
    }
    mapping = FieldMapping(**{_MANIFEST_KEYS.get(role, role): name for role, (name, _) in ordered.items()})
    notes = []
    if "rejected" in profile.fields and "chosen" in {name for name, _ in ordered.values()}:
        notes.append("the rows hold preferences: only the chosen answers are trained on (SFT)")
    prompt = profile.fields.get(chosen["prompt"][0]) if kind == "turn" else None
    if prompt is not None and prompt.num_chats:
        names = f"{chosen['prompt'][0]} and {chosen['answer'][0]}"
        notes.append(f"the messages of {names} are joined into one conversation")
    return Roles(
        kind=kind,
        mapping=mapping,
        reader=make_row_reader(mapping, list_fields(profile.rows), system_prompt=flags.system_prompt or ""),
        guesses=_make_guesses(profile, ordered),
        notes=tuple(notes),
    )


def _make_task_roles(profile: RowProfile) -> Roles:
    """Return how rows with `input: {"instruction": …, "schema": …}` are read, which needs no field mapping."""
    reader = make_row_reader(FieldMapping(), tuple(profile.fields), task="input")
    chosen = {"prompt": ("input", "an object with an instruction"), "answer": (str(reader.answer), _BY_NAME)}
    return Roles(kind="task", mapping=FieldMapping(), reader=reader, guesses=_make_guesses(profile, chosen))


def _make_text_roles(profile: RowProfile, name: str, reason: str = "already templated") -> Roles:
    mapping, is_templated = FieldMapping(text=name), _is_templated(profile, name)
    return Roles(
        kind="templated" if is_templated else "text",
        mapping=mapping,
        reader=make_row_reader(mapping, list_fields(profile.rows)),
        guesses=_make_guesses(profile, {"text": (name, reason)}),
        notes=() if is_templated else ("the text has no marked answers: the loss covers every token",),
    )


def _is_templated(profile: RowProfile, name: str) -> bool:
    """Return whether most texts of a field are already templated: they have turn markers and an answer."""

    def has_answer(row: Row) -> bool:
        return parse_conversation(str(row.fields.get(name) or "")) is not None

    sample = sample_evenly(profile.rows, _DIALECT_ROWS)
    return sum(map(has_answer, sample)) >= MAJORITY * len(sample)


def _make_guesses(profile: RowProfile, chosen: Chosen) -> tuple[Guess, ...]:
    guesses = []
    for role, (name, reason) in chosen.items():
        field = profile.fields.get(name)
        if field is None and name in list_fields(profile.rows):
            field = FieldProfile(name=name)
            for row in profile.rows:
                field.add(look_up(row.fields, name))
        if field is None:  # a format
            guesses.append(Guess(name=role, value=name, reason=reason))
            continue
        as_json = f", {field.num_values:,} of them written as JSON" if field.num_values else ""
        share = profile.format_share(field.num_filled)
        guesses.append(Guess(name=role, value=name, reason=f"{reason}; in {share}{as_json}"))
    taken = _list_taken(profile, [name for name, _ in chosen.values()])
    if "messages" in chosen:
        taken.add(TOOLS_FIELD)
    unused = [name for name in profile.fields if name not in taken]
    if unused:
        reason = "no role for these fields"
        texts = [name for name in unused if name and profile.fields[name].num_text and not score_name(name, "metadata")]
        if texts and chosen.get("prompt", ("",))[0] in profile.fields:
            reason += f"; {_describe_format((chosen['prompt'][0], texts[0]))}"
        guesses.append(Guess(name="not used", value=", ".join(name or "(no name)" for name in unused), reason=reason))
    return tuple(guesses)


def _describe_format(fields: Sequence[str]) -> str:
    return f'several fields make one prompt: --prompt-field "{{{fields[0]}}}\\n{{{fields[1]}}}"'


def _list_taken(profile: RowProfile, texts: Iterable[str | None]) -> set[str]:
    """Return the fields that field names or formats use; for a field inside an object, also the object."""
    names = {name for text in texts if text for name in list_columns(parse_row_text(text, profile.fields))}
    return names | {name.partition(".")[0] for name in names if name not in profile.fields}


def _describe_fields(profile: RowProfile) -> tuple[Problem, ...]:
    """Describe what every field holds, with an example, as part of an error."""
    problems = []
    for field in profile.fields.values():
        values = (row.fields.get(field.name) for row in profile.rows)
        example = next((value for value in values if value not in (None, "")), "")
        shown = shorten(str(example).replace("\n", " "))
        count = field.num_filled + field.num_others
        what = f"{field.kind} in {profile.format_share(count)}, such as {shown!r}" if count else "empty in all rows"
        problems.append(Problem(where=field.name, what=what))
    return tuple(problems)


def _find_nested_chat(profile: RowProfile) -> str | None:
    """Return the name of a list of messages inside an object of the first row; None if there is none."""
    objects = [
        (name, value) for row in profile.rows[:1] for name, value in row.fields.items() if isinstance(value, dict)
    ]
    names = (f"{name}.{key}" for name, value in objects for key, part in value.items() if is_chat(part))
    return next(names, None)


def _explain_failure(profile: RowProfile) -> InputError:
    problems = (*_describe_fields(profile), *(Problem(where="note", what=note) for note in profile.notes))
    texts = [field.name for field in profile.fields.values() if _is_majority(profile, field.num_text)]
    nested = ", ".join([name for name in list_fields(profile.rows) if "." in name][:_SHOWN_REASONS])
    inside = f"; name fields inside objects and lists with dots: {nested}" if nested else ""
    chat = _find_nested_chat(profile)
    if chat is not None:
        return InputError(
            f"the rows have messages inside another field, {chat}",
            problems,
            hint=f"add --messages-field {shlex.quote(chat)}",
        )
    if not texts:
        return InputError(
            "most rows have no field of text", problems, hint=f"they need prompts and answers: {_FIELD_FLAGS}{inside}"
        )
    if len(texts) == 1:
        return InputError(
            f"the rows have a single field of text, {texts[0]}, without marked answers",
            problems,
            hint="supervised fine-tuning needs a prompt and an answer: --prompt-field and --answer-field name them"
            f"{inside}; --text-field {shlex.quote(texts[0])} trains on every token of it instead",
        )
    inputs = [name for name in texts if not score_name(name, "metadata")]
    joined = f"; {_describe_format(inputs)}" if len(inputs) + bool(nested) > 2 else ""
    hint = f"{_FIELD_FLAGS}{_propose_flags(profile, texts)}{joined}{inside}"
    hint += "; or is the header line missing?" if profile.source.format == "csv" else ""
    return InputError("cannot infer which field is the prompt and which the answer", problems, hint=hint)


def _propose_flags(profile: RowProfile, texts: Sequence[str]) -> str:
    """Suggest flags for two text fields: the one with fewer distinct values, or the second, is the answer."""
    if len(texts) != 2 or "rejected" in texts:  # both fields hold complete answers
        return ""
    first, second = (len({str(row.fields.get(name)) for row in profile.rows}) for name in texts)
    prompt, answer = map(shlex.quote, texts if second <= first else reversed(texts))
    return f", such as --prompt-field {prompt} --answer-field {answer}"
