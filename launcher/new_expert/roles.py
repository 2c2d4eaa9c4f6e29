"""Fields -> roles: which is asked, which is answered, and why it is thought so. Pure, and in doubt it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.corpus.conversations import RowReader, find_task_field, make_row_reader
from launcher.corpus.markers import find_dialect, parse_conversation
from launcher.corpus.rows import BadRow, Row
from launcher.errors import InputError, Problem
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.spelling import closest
from launcher.new_expert.names import (
    ANSWERS,
    CHATS,
    CONTEXTS,
    QUESTIONS,
    SYSTEMS,
    is_about_row,
    rate_name,
)
from launcher.new_expert.seeing import FieldSeen, Seen, spread

Kind = Literal["messages", "turn", "task", "templated", "text"]

_MOSTLY = 0.5  # of the rows: a field that fewer have plays no main role
_TRIED_ROWS = 200
_SHOWN_CHARACTERS = 60
_FLAGS = "--prompt-field and --answer-field say which is which"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """One thing that was decided for the user: what, the value, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFields:
    """Roles that the user named. None: to be guessed."""

    prompt: str | None = None
    answer: str | None = None
    context: str | None = None
    system: str | None = None
    messages: str | None = None
    text: str | None = None

    def items(self) -> Iterator[tuple[str, str]]:
        for role in ("prompt", "answer", "context", "system", "messages", "text"):
            name = getattr(self, role)
            if name is not None:
                yield role, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    kind: Kind
    mapping: FieldMapping
    reader: RowReader
    guesses: tuple[Guess, ...]
    notes: tuple[str, ...] = ()


def guess_roles(seen: Seen, given: GivenFields | None = None) -> Roles:
    given = given or GivenFields()
    _check_given(seen, given)
    if given.messages is not None:
        return _as_messages(seen, given.messages, is_given=True)
    if given.text is not None:
        return _as_text(seen, given.text, is_given=True)
    if given.prompt is None and given.answer is None:
        found = _find_chat(seen) or _find_task(seen)
        if found is not None:
            return found
    pair = _find_pair(seen, given)
    if pair is not None:
        return _as_turn(seen, given, *pair)
    templated = _find_templated(seen)
    if templated is not None:
        return _as_text(seen, templated, is_given=False)
    raise _no_roles(seen)


def _check_given(seen: Seen, given: GivenFields) -> None:
    problems = []
    for role, name in given.items():
        if name not in seen.fields:
            meant = closest(name, tuple(seen.fields))
            what = f"rows have no field {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
            problems.append(Problem(where=f"--{role}-field", what=what))
    names = [name for _, name in given.items()]
    if len(set(names)) < len(names):
        problems.append(Problem(where="", what="one field cannot play two roles"))
    whole = [role for role in ("messages", "text") if getattr(given, role) is not None]
    if whole and len(names) > 1:
        problems.append(Problem(where=f"--{whole[0]}-field", what="it is the whole row: no other role is left"))
    if problems:
        raise InputError(
            "these fields do not fit the rows", tuple(problems), hint=f"rows have: {', '.join(seen.fields)}"
        )


def _find_chat(seen: Seen) -> Roles | None:
    chats = [field for field in seen.fields.values() if _is_mostly(seen, field.num_chats)]
    best = max(chats, key=lambda field: rate_name(field.name, CHATS), default=None)
    halves = [
        field.name
        for field in seen.fields.values()
        if field not in chats and _is_mostly(seen, field.num_lists) and "user" in _first_roles(seen, field.name)
    ]
    if halves and (best is None or "user" not in _first_roles(seen, best.name)):
        raise InputError(
            f"{halves[0]} holds chat messages, but none of the assistant",
            tuple(Problem(where=name, what=_describe(seen, seen.fields[name])) for name in seen.fields),
            hint="put question and answer into one list: "
            '"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]',
        )
    return None if best is None else _as_messages(seen, best.name, is_given=False)


def _first_roles(seen: Seen, name: str) -> set[object]:
    """Who speaks in the first list of messages: user and assistant, whatever they are called."""
    lists = (value for row in seen.rows if isinstance(value := row.fields.get(name), list) and value)
    turns = next(lists, [])
    spoken = [turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, dict)]
    return {"user" if role == "human" else role for role in spoken if isinstance(role, str)}


def _find_task(seen: Seen) -> Roles | None:
    """`input: {"instruction": …, "schema": …}`: known to the reader, and named by no mapping."""
    if find_task_field(seen.rows) is None:
        return None
    reader = make_row_reader(FieldMapping(), tuple(seen.fields), "input")
    if reader.task is None:
        return None
    why = f"an object with an instruction and what goes with it, in {seen.share(seen.fields['input'].num_objects)}"
    return Roles(
        kind="task",
        mapping=FieldMapping(),
        reader=reader,
        guesses=(
            Guess(what="prompt", value="input", why=why),
            Guess(what="answer", value=str(reader.answer), why=_tell_field(seen, str(reader.answer), "its name")),
        ),
    )


def _find_pair(seen: Seen, given: GivenFields) -> tuple[FieldSeen, FieldSeen, str, str] | None:
    """Question and answer with why each is thought to be it: by name, else the only two that are left."""
    taken = {name for role, name in given.items() if role in ("context", "system")}
    free = [field for field in seen.fields.values() if field.name not in taken]
    asks = [field for field in free if _can_ask(seen, field)]
    answers = [field for field in free if _can_answer(seen, field)]
    if given.prompt is not None:
        asks = [seen.fields[given.prompt]]
    if given.answer is not None:
        answers = [seen.fields[given.answer]]
    rated = [
        (_rate(ask, QUESTIONS, given.prompt) + _rate(answer, ANSWERS, given.answer), -number, ask, answer)
        for number, (ask, answer) in enumerate((a, b) for a in asks for b in answers)
        if ask is not answer and _rate(ask, QUESTIONS, given.prompt) and _rate(answer, ANSWERS, given.answer)
    ]
    if rated:
        _, _, ask, answer = max(rated, key=lambda entry: entry[:2])
        return ask, answer, _say(given.prompt, "its name"), _say(given.answer, "its name")
    return _find_left_over(given, asks, answers)


def _find_left_over(
    given: GivenFields, asks: list[FieldSeen], answers: list[FieldSeen]
) -> tuple[FieldSeen, FieldSeen, str, str] | None:
    """No name tells both: what is neither about the row nor a context. Two are left, or it is not guessed."""
    named_ask = [field for field in asks if _rate(field, QUESTIONS, given.prompt)]
    named_answer = [field for field in answers if _rate(field, ANSWERS, given.answer)]
    ask = max(named_ask, key=lambda field: _rate(field, QUESTIONS, given.prompt), default=None)
    answer = max(named_answer, key=lambda field: _rate(field, ANSWERS, given.answer), default=None)
    plain_asks = [field for field in asks if _is_plain(field) and field is not answer]
    plain_answers = [field for field in answers if _is_plain(field) and field is not ask]
    left = "the only other field of text"
    if ask is not None and answer is None and len(plain_answers) == 1:
        return ask, plain_answers[0], _say(given.prompt, "its name"), left
    if answer is not None and ask is None and len(plain_asks) == 1:
        return plain_asks[0], answer, left, _say(given.answer, "its name")
    if ask is None and answer is None and len(plain_asks) == 2 and plain_asks == plain_answers:
        first, second = plain_asks
        return first, second, "it comes first of two fields of text", "it comes second of two fields of text"
    return None


def _rate(field: FieldSeen, names: tuple[str, ...], given: str | None) -> int:
    return 1000 if field.name == given else rate_name(field.name, names)


def _say(given: str | None, otherwise: str) -> str:
    return otherwise if given is None else "as given"


def _is_plain(field: FieldSeen) -> bool:
    is_constant = len(field.distinct) == 1
    return not (is_constant or is_about_row(field.name) or rate_name(field.name, CONTEXTS + SYSTEMS) > 50)


def _is_mostly(seen: Seen, count: int) -> bool:
    return count > 0 and count >= _MOSTLY * len(seen.rows)


def _can_ask(seen: Seen, field: FieldSeen) -> bool:
    return _is_mostly(seen, field.num_text)


def _can_answer(seen: Seen, field: FieldSeen) -> bool:
    """An object or a list is written as JSON, and makes an answer."""
    return _is_mostly(seen, field.num_text + field.num_objects + field.num_lists - field.num_chats)


def _as_turn(seen: Seen, given: GivenFields, ask: FieldSeen, answer: FieldSeen, ask_why: str, answer_why: str) -> Roles:
    taken = {ask.name, answer.name}
    context = given.context or _best(seen, CONTEXTS, taken)
    system = given.system or _best(seen, SYSTEMS, {*taken, *([context] if context else [])})
    mapping = FieldMapping(instruction=ask.name, input=context, response=answer.name, system=system)
    guesses = [Guess(what="prompt", value=ask.name, why=_tell_field(seen, ask.name, ask_why))]
    if context is not None:
        why = _say(given.context, "its name")
        guesses.append(Guess(what="context", value=context, why=_tell_field(seen, context, why)))
    if system is not None:
        guesses.append(
            Guess(what="system", value=system, why=_tell_field(seen, system, _say(given.system, "its name")))
        )
    guesses.append(Guess(what="answer", value=answer.name, why=_tell_field(seen, answer.name, answer_why)))
    unused = [name for name in seen.fields if name not in {*taken, context, system}]
    if unused:
        guesses.append(Guess(what="not used", value=", ".join(unused), why="no role is left for them"))
    notes = []
    if "rejected" in seen.fields and answer.name == "chosen":
        notes.append("the rows hold preferences: only the chosen answers are learnt, by plain fine-tuning")
    return Roles(
        kind="turn",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=tuple(guesses),
        notes=tuple(notes),
    )


def _best(seen: Seen, names: tuple[str, ...], taken: set[str]) -> str | None:
    """Of the usual names, the one that fits best; a context may be empty in most rows."""
    rated = {
        field.name: rate_name(field.name, names)
        for field in seen.fields.values()
        if field.name not in taken and field.num_text + field.num_objects + field.num_lists
    }
    best = max(rated, key=lambda name: rated[name], default=None)
    return best if best is not None and rated[best] else None


def _tell_field(seen: Seen, name: str, why: str) -> str:
    field = seen.fields[name]
    written = field.num_objects + field.num_lists
    as_json = f", {written:,} of them written as JSON" if written else ""
    return f"{why}; in {seen.share(field.num_text + written)}{as_json}"


def _as_messages(seen: Seen, name: str, *, is_given: bool) -> Roles:
    field = seen.fields[name]
    if not field.num_chats:
        raise InputError(
            f"--messages-field {name}: no row holds chat messages there, but {field.kind}",
            hint='messages look like [{"role": "user", "content": …}, {"role": "assistant", "content": …}]',
        )
    mapping = FieldMapping(messages=name)
    why = f"{_say(name if is_given else None, 'chat messages with an answer')}; in {seen.share(field.num_chats)}"
    unused = [other for other in seen.fields if other != name]
    return Roles(
        kind="messages",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=(
            Guess(what="messages", value=name, why=why),
            *([Guess(what="not used", value=", ".join(unused), why="the messages are the row")] if unused else []),
        ),
    )


def _find_templated(seen: Seen) -> str | None:
    """A text in which the turns are marked already."""
    for field in seen.fields.values():
        rows = [row for row in spread(seen.rows, _TRIED_ROWS) if isinstance(row.fields.get(field.name), str)]
        if _is_mostly(seen, field.num_text) and rows and _count_marked(rows, field.name) >= _MOSTLY * len(rows):
            return field.name
    return None


def _count_marked(rows: tuple[Row, ...] | list[Row], name: str) -> int:
    return sum(_name_dialect(str(row.fields.get(name) or "")) is not None for row in rows)


def _name_dialect(text: str) -> str | None:
    """Of the markers, where there is an answer between them."""
    dialect = find_dialect(text)
    return dialect.name if dialect is not None and parse_conversation(text, dialect) is not None else None


def _as_text(seen: Seen, name: str, *, is_given: bool) -> Roles:
    field = seen.fields[name]
    if not field.num_text:
        raise InputError(f"--text-field {name}: no row holds text there, but {field.kind}")
    mapping = FieldMapping(text=name)
    marked = _count_marked(seen.rows, name)
    is_templated = marked >= _MOSTLY * len(seen.rows)
    dialects = {_name_dialect(str(row.fields.get(name) or "")) for row in spread(seen.rows, _TRIED_ROWS)} - {None}
    what = f"already templated ({', '.join(sorted(map(str, dialects)))})" if is_templated else "plain text"
    why = f"{_say(name if is_given else None, what)}; in {seen.share(marked if is_templated else field.num_text)}"
    return Roles(
        kind="templated" if is_templated else "text",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=(Guess(what="text", value=name, why=why),),
        notes=() if is_templated else ("the text has no marked answers: every word of it is trained",),
    )


def _no_roles(seen: Seen) -> InputError:
    """Why not, for each kind of rows that nobody can tell the roles of, and the way out."""
    problems = tuple(Problem(where=field.name, what=_describe(seen, field)) for field in seen.fields.values())
    texts = [field for field in seen.fields.values() if _can_ask(seen, field)]
    if not texts:
        objects = [field for field in seen.fields.values() if _is_mostly(seen, field.num_objects)]
        if objects:
            inside = ", ".join(objects[0].object_keys[:5])
            hint = f"fields inside of objects cannot be named: write {inside or 'them'} as fields of the row itself"
            return InputError("the rows have no field of text: what is asked lies in objects", problems, hint)
        hint = 'question and answer must be text: a number that is an answer is written as one ("3", not 3)'
        return InputError("the rows have no field of text", problems, hint)
    if len(texts) == 1 and not [f for f in seen.fields.values() if f is not texts[0] and _can_answer(seen, f)]:
        name = texts[0].name
        return InputError(
            f"the rows have one field of text only, {name}, and no marked answer in it",
            problems,
            hint="an expert learns to answer: a second field has to hold the answer (a number is no text: write "
            f'"3", not 3); --text-field {name} trains on every word of it instead',
        )
    return InputError("the fields do not tell which is the question and which the answer", problems, hint=_FLAGS)


def _describe(seen: Seen, field: FieldSeen) -> str:
    if not field.num_filled:
        return "empty in all rows"
    example = next((row.fields[field.name] for row in seen.rows if row.fields.get(field.name) is not None), "")
    shown = str(example).replace("\n", " ")
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{field.kind} in {seen.share(field.num_filled)}, such as {shown!r}"


def check_usable(seen: Seen, roles: Roles) -> None:
    """By the reader that training uses. More than half unusable is a mistake, as it is in preparing."""
    reasons: dict[str, list[int]] = {}
    for row in seen.rows:
        content = roles.reader.read(row)
        if isinstance(content, BadRow):
            reasons.setdefault(content.reason, []).append(content.number)
    bad = sum(map(len, reasons.values()))
    if bad > _MOSTLY * len(seen.rows):
        problems = tuple(
            Problem(where=f"{len(lines):,} rows", what=f"{reason} (line {', '.join(map(str, lines[:5]))})")
            for reason, lines in sorted(reasons.items(), key=lambda item: -len(item[1]))[:5]
        )
        raise InputError(f"{bad:,} of {len(seen.rows):,} rows cannot be used", problems, hint=_FLAGS)
