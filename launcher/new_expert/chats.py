"""Rows that are chats: one list of messages, or a list that asks and one that answers."""

from __future__ import annotations

from launcher.corpus.conversations import ROLES, make_row_reader
from launcher.errors import InputError
from launcher.manifest.dataset import FieldMapping
from launcher.new_expert.guesses import (
    FLAGS,
    GivenFields,
    Guess,
    Roles,
    best_named,
    describe_all,
    is_mostly,
    list_reasons,
    say,
    tell_field,
    tell_unused,
)
from launcher.new_expert.names import ANSWERS, CHATS, QUESTIONS, SYSTEMS, rate_name
from launcher.new_expert.seeing import FieldSeen, Seen

_SHAPE = '[{"role": "user", "content": …}, {"role": "assistant", "content": …}]'


def find_chat_pair(seen: Seen) -> tuple[FieldSeen, FieldSeen] | None:
    """A list of messages that ends before the assistant speaks, and a field with what it says: TRL's prompt and
    completion."""
    asks = [field for field in seen.fields.values() if is_mostly(seen, field.num_asking)]
    ask = max(asks, key=lambda field: rate_name(field.name, QUESTIONS), default=None)
    if ask is None:
        return None
    # Beside whole chats that happen to end with the user, a text is no answer to them.
    takes_text = not is_mostly(seen, ask.num_answered)
    answers = [
        field
        for field in seen.fields.values()
        if field not in asks
        and rate_name(field.name, ANSWERS)
        and is_mostly(seen, field.num_answering + (field.num_text if takes_text else 0))
    ]
    answer = max(answers, key=lambda field: rate_name(field.name, ANSWERS), default=None)
    return None if answer is None else (ask, answer)


def find_chat(seen: Seen, given: GivenFields) -> Roles | None:
    chats = [field for field in seen.fields.values() if is_mostly(seen, field.num_answered)]
    if chats:
        best = max(chats, key=lambda field: rate_name(field.name, CHATS))
        return as_messages(seen, best.name, given)
    unread = [field for field in seen.fields.values() if is_mostly(seen, field.num_chats)]
    if not unread:
        return None
    raise _unreadable(seen, max(unread, key=lambda field: rate_name(field.name, CHATS)))


def as_messages(seen: Seen, name: str, given: GivenFields) -> Roles:
    field = seen.fields[name]
    if not field.num_chats:
        raise InputError(
            f"--messages-field {name}: no row holds chat messages there, but {field.kind}",
            hint=f"messages look like {_SHAPE}",
        )
    if not field.num_answered:
        raise _unreadable(seen, field)
    if given.context is not None:
        raise InputError(
            f"--context-field {given.context}: the rows are chats ({name}), in which the user says all that is asked",
            hint=f"write it into the messages, or leave --context-field out; {FLAGS} where {name} is not the row",
        )
    system = given.system or best_named(seen, SYSTEMS, {name})
    mapping = FieldMapping(messages=name, system=system)
    why = f"{say(given.messages, 'chat messages with an answer')}; in {seen.share(field.num_answered)}"
    guesses = [Guess(what="messages", value=name, why=why)]
    if system is not None:
        guesses.append(Guess(what="system", value=system, why=tell_field(seen, system, say(given.system, "its name"))))
    return Roles(
        kind="messages",
        mapping=mapping,
        reader=make_row_reader(mapping, tuple(seen.fields)),
        guesses=(*guesses, *tell_unused(seen, {name, system}, "the messages are the row")),
    )


def _unreadable(seen: Seen, field: FieldSeen) -> InputError:
    """With the reasons of the reader that training uses."""
    reasons = field.unread
    hint = f"messages look like {_SHAPE}"
    if any("unknown role" in reason for reason in reasons.counts):
        hint = f"the roles are {', '.join(ROLES)}; also human, gpt, bot and model: rename the others"
    elif any("tool calls" in reason for reason in reasons.counts):
        hint = "calls of tools are not learnt: leave such rows out, or write the calls as content"
    elif any("no answer of the assistant" in reason for reason in reasons.counts):
        hint = f"put question and answer into one list: {_SHAPE}"
    if any(is_mostly(seen, other.num_text) for other in seen.fields.values()):
        hint += f"; where {field.name} is not the row, {FLAGS}"
    return InputError(
        f"{field.name} holds chat messages, but {seen.share(reasons.total)} cannot be used",
        (*list_reasons(reasons), *describe_all(seen)),
        hint=hint,
    )
