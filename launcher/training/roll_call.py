"""The first rank hears every other one before there is a process group, by the rendezvous store alone.

It calls; each rank answers under a word of its own, and waits for the verdict under that word. A store may outlive the
ranks that used it, and every node counts attempts for itself: what an earlier attempt left behind has other words, so
nobody takes it for an answer. Nothing is pickled: the ranks may be of different versions.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_PREFIX = "launcher/roll_call"
_CALL = f"{_PREFIX}/call"
# Asked, not waited for: torch writes three lines to the console for every wait that ends without an answer.
_LOOK_EVERY_SECONDS = 0.1
_CLOCK_SECONDS = 10.0  # for somebody who is there, and looks for the question that often
_HEARD_SECONDS = 5.0
_SLACK_SECONDS = 15.0  # the first rank's patience ends first: it can say who was missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    rank: int
    word: str
    text: str
    ahead_seconds: float = 0.0  # of the first rank's clock
    within_seconds: float = 0.0  # the error of that: half of the way there and back


def hear_all(store: Store, num_ranks: int, patience_seconds: float) -> tuple[Answer, ...]:
    """The first rank's part. Of those that say nothing in time there is no answer."""
    call = uuid.uuid4().hex
    store.set(_CALL, call)
    deadline = time.monotonic() + patience_seconds
    heard = (_hear(store, call, rank, deadline) for rank in range(1, num_ranks))
    return tuple(answer for answer in heard if answer is not None)


def tell_all(store: Store, answers: Sequence[Answer], verdict: str) -> None:
    """And waits a little until they have heard it: the store may end with us."""
    for one in answers:
        store.set(_verdict_key(one.word), verdict)
    deadline = time.monotonic() + _HEARD_SECONDS
    for one in answers:
        _await(store, _heard_key(one.word), deadline)


def answer(store: Store, rank: int, text: str, patience_seconds: float) -> str | None:
    """Every other rank's part: the verdict, or None where none came in time."""
    word = uuid.uuid4().hex
    answered = None
    patience = patience_seconds + _SLACK_SECONDS
    deadline = time.monotonic() + patience
    while not store.check([_asked_key(word)]):
        if time.monotonic() > deadline:
            return None
        call = _read(store, _CALL)
        if call is not None and call != answered:  # it may be an earlier attempt's, then another one will come
            store.set(_answer_key(call, rank), json.dumps({"word": word, "text": text}))
            answered = call
            deadline = time.monotonic() + patience
        time.sleep(_LOOK_EVERY_SECONDS)
    store.set(_clock_key(word), repr(time.time()))
    verdict = _await(store, _verdict_key(word), time.monotonic() + patience)
    store.set(_heard_key(word), "")
    return verdict


def _hear(store: Store, call: str, rank: int, deadline: float) -> Answer | None:
    said = _await(store, _answer_key(call, rank), deadline)
    if said is None:
        return None
    told = json.loads(said)
    word, text = str(told["word"]), str(told["text"])
    asked_at = time.time()
    store.set(_asked_key(word), "")
    clock = _await(store, _clock_key(word), time.monotonic() + _CLOCK_SECONDS)
    if clock is None:
        return None
    heard_at = time.time()
    half = (heard_at - asked_at) / 2
    return Answer(rank=rank, word=word, text=text, ahead_seconds=float(clock) - asked_at - half, within_seconds=half)


def _await(store: Store, key: str, deadline: float) -> str | None:
    """Looked for once more when the time is over: others may have used it up."""
    while (found := _read(store, key)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_SECONDS)
    return found


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _answer_key(call: str, rank: int) -> str:
    return f"{_PREFIX}/{call}/{rank}"


def _asked_key(word: str) -> str:
    return f"{_PREFIX}/{word}/asked"


def _clock_key(word: str) -> str:
    return f"{_PREFIX}/{word}/clock"


def _heard_key(word: str) -> str:
    return f"{_PREFIX}/{word}/heard"


def _verdict_key(word: str) -> str:
    return f"{_PREFIX}/{word}/verdict"
