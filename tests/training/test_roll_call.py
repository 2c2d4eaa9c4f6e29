"""The first rank hears all others, by a real store; what an earlier attempt left in it misleads nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.training import roll_call
from launcher.training.roll_call import Answer, answer, hear_all, tell_all

Connect = Callable[[], TCPStore]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Each rank has a connection of its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    port = server.port
    yield lambda: TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    del server


def begin(pool: ThreadPoolExecutor, connect: Connect, rank: int, text: str) -> Future[str | None]:
    return pool.submit(lambda: answer(connect(), rank, text, 20))


def hold_call(connect: Connect, num_ranks: int, verdict: str, patience: float = 20) -> tuple[Answer, ...]:
    store = connect()
    answers = hear_all(store, num_ranks, patience)
    tell_all(store, answers, verdict)
    return answers


def test_all_are_heard_and_told(connect: Connect) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [begin(pool, connect, rank, f"I am {rank}") for rank in (3, 1, 2)]
        answers = hold_call(connect, 4, "go")
        assert [other.result(20) for other in others] == ["go"] * 3
    assert [(one.rank, one.text) for one in answers] == [(1, "I am 1"), (2, "I am 2"), (3, "I am 3")]


def test_another_attempt_in_the_same_store(connect: Connect) -> None:
    """The store is the agent's, and lives on: a rank that is there before the first finds the last attempt's call."""
    with ThreadPoolExecutor(2) as pool:
        first = begin(pool, connect, 1, "old")
        hold_call(connect, 2, "go")
        assert first.result(20) == "go"
        second = begin(pool, connect, 1, "new")
        time.sleep(0.5)
        assert not second.done(), "it must not take the last attempt's verdict for its own"
        (heard,) = hold_call(connect, 2, "stop")
        assert heard.text == "new"
        assert second.result(20) == "stop"


def test_an_answer_of_another_attempt_is_not_heard(connect: Connect) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = begin(pool, connect, 1, "old")
        hold_call(connect, 2, "go")
        other.result(20)
    assert hold_call(connect, 2, "go", patience=0.5) == ()


def test_who_is_silent_costs_the_others_nothing(connect: Connect) -> None:
    """The first of three does not come: when the patience ends for it, the others are still heard."""
    with ThreadPoolExecutor(2) as pool:
        others = [begin(pool, connect, rank, "here") for rank in (2, 3)]
        began = time.monotonic()
        answers = hold_call(connect, 4, "stop", patience=1.0)
        assert time.monotonic() - began < 10
        assert [other.result(20) for other in others] == ["stop"] * 2
    assert [one.rank for one in answers] == [2, 3]


def test_nobody_calls(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_SLACK_SECONDS", 0.0)
    began = time.monotonic()
    assert answer(connect(), 1, "here", 0.5) is None
    assert time.monotonic() - began < 5


class Clock:
    """Five seconds ahead in the threads of other ranks."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + (5.0 if threading.current_thread().name.startswith("ahead") else 0.0)


def test_a_clock_that_is_ahead(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "time", Clock)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        other = begin(pool, connect, 1, "here")
        (heard,) = hold_call(connect, 2, "go")
        other.result(20)
    assert abs(heard.ahead_seconds - 5.0) <= heard.within_seconds + 1e-3


def test_clocks_are_compared(connect: Connect) -> None:
    """The same clock here: what is measured of it must be within the error that is told."""
    with ThreadPoolExecutor(1) as pool:
        other = begin(pool, connect, 1, "here")
        (heard,) = hold_call(connect, 2, "go")
        other.result(20)
    assert abs(heard.ahead_seconds) <= heard.within_seconds + 1e-3
    assert heard.within_seconds < 5
