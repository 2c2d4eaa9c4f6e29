"""A question and its answer in two fields: by their names, else the only two that are left."""

from __future__ import annotations

from launcher.corpus.conversations import make_row_reader
from launcher.manifest.dataset import FieldMapping
from launcher.new_expert.guesses import (
    GivenFields,
    Guess,
    Roles,
    best_named,
    is_mostly,
    say,
    tell_field,
    tell_unused,
)
from launcher.new_expert.names import ANSWERS, CONTEXTS, QUESTIONS, SYSTEMS, is_about_row, rate_name
from launcher.new_expert.seeing import FieldSeen, Seen

Pair = tuple[FieldSeen, FieldSeen, str, str]  # question and answer, with why each is thought to be it

_NAMED_WELL = 50  # a whole name, not a part of one


def find_pair(seen: Seen, given: GivenFields) -> Pair | None:
    taken = {name for role, name in given.items() if role in ("context", "system")}
    free = [field for field in seen.fields.values() if field.name not in taken]
    asks = [field for field in free if can_ask(seen, field) and field.name != given.answer]
    answers = [field for field in free if can_answer(seen, field) and field.name != given.prompt]
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
        return ask, answer, say(given.prompt, "its name"), say(given.answer, "its name")
    return _find_left_over(given, asks, [field for field in answers if _is_written(seen, field, given)])


def _find_left_over(given: GivenFields, asks: list[FieldSeen], answers: list[FieldSeen]) -> Pair | None:
    """No name tells both: what is neither about the row nor a context. Two are left, or it is not guessed."""
    named_ask = [field for field in asks if _rate(field, QUESTIONS, given.prompt)]
    named_answer = [field for field in answers if _rate(field, ANSWERS, given.answer)]
    ask = max(named_ask, key=lambda field: _rate(field, QUESTIONS, given.prompt), default=None)
    answer = max(named_answer, key=lambda field: _rate(field, ANSWERS, given.answer), default=None)
    plain_asks = [field for field in asks if _is_plain(field) and field is not answer]
    plain_answers = [field for field in answers if _is_plain(field) and field is not ask]
    left = "the only other field of text"
    if given.prompt is not None and len(answers) == 1:  # one is given, one is left
        plain_answers = answers
    if given.answer is not None and len(asks) == 1:
        plain_asks = asks
    if ask is not None and answer is None and len(plain_answers) == 1:
        return ask, plain_answers[0], say(given.prompt, "its name"), left
    if answer is not None and ask is None and len(plain_asks) == 1:
        return plain_asks[0], answer, left, say(given.answer, "its name")
    if ask is None and answer is None and len(plain_asks) == 2 and plain_asks == plain_answers:
        first, second = plain_asks
        return first, second, "it comes first of two fields of text", "it comes second of two fields of text"
    return None


def _rate(field: FieldSeen, names: tuple[str, ...], given: str | None) -> int:
    return 1000 if field.name == given else rate_name(field.name, names)


def _is_plain(field: FieldSeen) -> bool:
    is_constant = len(field.distinct) == 1
    is_beside = rate_name(field.name, CONTEXTS + SYSTEMS) > _NAMED_WELL
    return not (is_constant or is_about_row(field.name) or is_beside)


def can_ask(seen: Seen, field: FieldSeen) -> bool:
    return is_mostly(seen, field.num_text)


def can_answer(seen: Seen, field: FieldSeen) -> bool:
    """An object or a list is written as JSON, and makes an answer; so does a number, where its name says so."""
    return is_mostly(seen, field.num_filled - field.num_chats)


def _is_written(seen: Seen, field: FieldSeen, given: GivenFields) -> bool:
    """A number that nobody calls an answer may be anything."""
    return field.name == given.answer or is_mostly(seen, field.num_filled - field.num_chats - field.num_numbers)


def as_turn(seen: Seen, given: GivenFields, pair: Pair) -> Roles:
    ask, answer, ask_why, answer_why = pair
    taken = {ask.name, answer.name}
    context = given.context or best_named(seen, CONTEXTS, {*taken, *([given.system] if given.system else [])})
    system = given.system or best_named(seen, SYSTEMS, {*taken, *([context] if context else [])})
    mapping = FieldMapping(instruction=ask.name, input=context, response=answer.name, system=system)
    guesses = [Guess(what="prompt", value=ask.name, why=tell_field(seen, ask.name, ask_why))]
    if context is not None:
        why = say(given.context, "its name")
        guesses.append(Guess(what="context", value=context, why=tell_field(seen, context, why)))
    if system is not None:
        guesses.append(Guess(what="system", value=system, why=tell_field(seen, system, say(given.system, "its name"))))
    guesses.append(Guess(what="answer", value=answer.name, why=tell_field(seen, answer.name, answer_why)))
    return Roles(
        kind="turn",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=(*guesses, *tell_unused(seen, {*taken, context, system}, "no role is left for them")),
        notes=tuple(_note_turn(seen, ask, answer)),
    )


def _note_turn(seen: Seen, ask: FieldSeen, answer: FieldSeen) -> list[str]:
    notes = []
    if "rejected" in seen.fields and answer.name == "chosen":
        notes.append("the rows hold preferences: only the chosen answers are learnt, by plain fine-tuning")
    if ask.num_chats:
        notes.append(f"the messages of {ask.name} and {answer.name} are joined into one conversation")
    notes += [
        f'{field.name} is a number, true or false in {seen.share(field.num_numbers)}: written as text (3 as "3")'
        for field in (ask, answer)
        if field.num_numbers
    ]
    return notes
