"""Fields -> roles: which is asked, which is answered, and why it is thought so. Pure, and in doubt it refuses."""

from __future__ import annotations

from launcher.corpus.conversations import find_task_field, make_row_reader
from launcher.corpus.markers import find_dialect, parse_conversation
from launcher.corpus.rows import BadRow, Rejections, Row
from launcher.errors import InputError, Problem
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.spelling import closest
from launcher.new_expert.chats import as_messages, find_chat, find_chat_pair
from launcher.new_expert.guesses import (
    FLAGS,
    MOSTLY,
    GivenFields,
    Guess,
    Roles,
    describe_all,
    is_mostly,
    list_reasons,
    say,
    tell_field,
)
from launcher.new_expert.names import ANSWERS, QUESTIONS, is_about_row, rate_name
from launcher.new_expert.pairs import as_turn, can_answer, can_ask, find_pair
from launcher.new_expert.seeing import FieldSeen, Seen, spread

_TRIED_ROWS = 200
_TASK_ANSWERS = ("output", "chosen", "response")


def guess_roles(seen: Seen, given: GivenFields | None = None) -> Roles:
    given = given or GivenFields()
    _check_given(seen, given)
    if given.messages is not None:
        return as_messages(seen, given.messages, given)
    if given.text is not None:
        return _as_text(seen, given.text, is_given=True)
    if given.prompt is None and given.answer is None:
        found = _find_whole(seen, given)
        if found is not None:
            return found
    pair = find_pair(seen, given)
    if pair is not None:
        return as_turn(seen, given, pair)
    templated = _find_templated(seen)
    if templated is not None:
        _check_whole(given, templated, "the text holds whole conversations already")
        return _as_text(seen, templated, is_given=False)
    raise _no_roles(seen)


def _find_whole(seen: Seen, given: GivenFields) -> Roles | None:
    """Chats and tasks: told by what the fields hold, not by their names."""
    pair = find_chat_pair(seen)
    if pair is not None:
        return as_turn(seen, given, (*pair, "chat messages that are not answered", "its name"))
    found = find_chat(seen, given)
    if found is None and (found := _find_task(seen)) is not None:
        _check_whole(given, "input", "the object holds all that is asked")
    return found


def _check_whole(given: GivenFields, name: str, why: str) -> None:
    """Flags are never dropped silently."""
    problems = [
        Problem(where=f"--{role}-field {field}", what=f"{name} is the whole row: {why}")
        for role, field in given.items()
    ]
    if problems:
        raise InputError("these fields do not fit the rows", tuple(problems), hint=FLAGS)


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
    whole = next((role for role in ("messages", "text") if getattr(given, role) is not None), None)
    others = [role for role, _ in given.items() if role != whole and (whole, role) != ("messages", "system")]
    if whole is not None and others:
        problems.append(Problem(where=f"--{whole}-field", what=f"it is the whole row: none is left for {others[0]}"))
    if problems:
        raise InputError(
            "these fields do not fit the rows", tuple(problems), hint=f"rows have: {', '.join(seen.fields)}"
        )


def _find_task(seen: Seen) -> Roles | None:
    """`input: {"instruction": …, "schema": …}`: known to the reader, and named by no mapping."""
    if find_task_field(seen.rows) is None:
        return None
    if not any(name in seen.fields for name in _TASK_ANSWERS):
        raise InputError(
            "input holds instructions, but no field holds their answers",
            describe_all(seen),
            hint=f"the field that holds them is called {' or '.join(_TASK_ANSWERS)}",
        )
    reader = make_row_reader(FieldMapping(), tuple(seen.fields), "input")
    why = f"an object with an instruction and what goes with it, in {seen.share(seen.fields['input'].num_objects)}"
    return Roles(
        kind="task",
        mapping=FieldMapping(),
        reader=reader,
        guesses=(
            Guess(what="prompt", value="input", why=why),
            Guess(what="answer", value=str(reader.answer), why=tell_field(seen, str(reader.answer), "its name")),
        ),
    )


def _find_templated(seen: Seen) -> str | None:
    """A text in which the turns are marked already."""
    for field in seen.fields.values():
        rows = [row for row in spread(seen.rows, _TRIED_ROWS) if isinstance(row.fields.get(field.name), str)]
        if is_mostly(seen, field.num_text) and rows and _count_marked(rows, field.name) >= MOSTLY * len(rows):
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
    is_templated = marked >= MOSTLY * len(seen.rows)
    dialects = {_name_dialect(str(row.fields.get(name) or "")) for row in spread(seen.rows, _TRIED_ROWS)} - {None}
    what = f"already templated ({', '.join(sorted(map(str, dialects)))})" if is_templated else "plain text"
    why = f"{say(name if is_given else None, what)}; in {seen.share(marked if is_templated else field.num_text)}"
    return Roles(
        kind="templated" if is_templated else "text",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=(Guess(what="text", value=name, why=why),),
        notes=() if is_templated else ("the text has no marked answers: every word of it is trained",),
    )


def _no_roles(seen: Seen) -> InputError:
    """Why not, for each kind of rows that nobody can tell the roles of, and the way out."""
    problems = describe_all(seen)
    texts = [field for field in seen.fields.values() if can_ask(seen, field)]
    if not any(field.num_filled for field in seen.fields.values()):
        return InputError("the rows are empty in all of their fields", problems, hint="they need questions and answers")
    if seen.odd_names:
        names = ", ".join(map(ascii, seen.odd_names))
        problem = Problem(where=names, what="a name with half a character in it (a lone surrogate): it plays no role")
        return InputError("not all fields have a name that can be written", (*problems, problem), hint="rename them")
    rare = _find_rare(seen)
    if rare is not None:
        missing = len(seen.rows) - rare.num_filled
        return InputError(
            f"{rare.name} is missing in {seen.share(missing)}",
            problems,
            hint=f"leave out rows without {rare.name}, or name other fields: {FLAGS}",
        )
    if not texts:
        objects = [field for field in seen.fields.values() if is_mostly(seen, field.num_objects)]
        if objects:
            inside = ", ".join(objects[0].object_keys[:5])
            hint = f"fields inside of objects cannot be named: write {inside or 'them'} as fields of the row itself"
            return InputError("the rows have no field of text: what is asked lies in objects", problems, hint)
        return InputError("the rows have no field of text", problems, hint=FLAGS)
    if len(texts) == 1 and not any(_may_answer(field) for field in seen.fields.values() if field is not texts[0]):
        name = texts[0].name
        return InputError(
            f"the rows have one field of text only, {name}, and no marked answer in it",
            problems,
            hint="an expert learns to answer: a second field has to hold the answer; "
            f"--text-field {name} trains on every word of it instead",
        )
    return InputError("the fields do not tell which is the question and which the answer", problems, hint=FLAGS)


def _may_answer(field: FieldSeen) -> bool:
    return field.num_filled + field.num_others > 0 and not is_about_row(field.name)


def _find_rare(seen: Seen) -> FieldSeen | None:
    """A field that is called an answer or a question, where nothing else could be it, and that few rows have."""
    for names, can_play in ((ANSWERS, can_answer), (QUESTIONS, can_ask)):
        named = [field for field in seen.fields.values() if field.num_filled and rate_name(field.name, names)]
        if named and not any(can_play(seen, field) for field in named):
            best = max(named, key=lambda field: rate_name(field.name, names))
            if not is_mostly(seen, best.num_filled):
                return best
    return None


def check_usable(seen: Seen, roles: Roles) -> None:
    """By the reader that training uses. More than half unusable is a mistake, as it is in preparing."""
    rejections = Rejections()
    for row in seen.rows:
        content = roles.reader.read(row)
        if isinstance(content, BadRow):
            rejections.add(content)
    if rejections.total > MOSTLY * len(seen.rows):
        raise InputError(
            f"{seen.source.path}: {seen.share(rejections.total)} cannot be used",
            list_reasons(rejections),
            hint=f"mend these rows or leave them out, or name other fields: {FLAGS}",
        )
