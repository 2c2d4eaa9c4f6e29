"""Rank 0 gathers messages over a real TCPStore; keys of earlier attempts are not mistaken for new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.training.runtime import rendezvous
from launcher.training.runtime.rendezvous import Message, gather, reply, send

Connect = Callable[[], TCPStore]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that connects one rank to the store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    port = server.port
    yield lambda: TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    del server


def start_send(pool: ThreadPoolExecutor, connect: Connect, rank: int, text: str) -> Future[str | None]:
    return pool.submit(lambda: send(connect(), rank, text, 20))


def exchange(connect: Connect, num_ranks: int, text: str, timeout: float = 20) -> tuple[Message, ...]:
    store = connect()
    messages = gather(store, num_ranks, timeout)
    reply(store, messages, text)
    return messages


def test_every_rank_is_gathered_and_gets_the_reply(connect: Connect) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [start_send(pool, connect, rank, f"I am {rank}") for rank in (3, 1, 2)]
        answers = exchange(connect, 4, "go")
        assert [other.result(120) for other in others] == ["go"] * 3
    assert [(one.rank, one.text) for one in answers] == [(1, "I am 1"), (2, "I am 2"), (3, "I am 3")]


def test_a_second_attempt_in_the_same_store_gets_its_own_reply(connect: Connect) -> None:
    """The agent's store outlives its ranks: a rank that starts before rank 0 finds the call of the last attempt."""
    with ThreadPoolExecutor(2) as pool:
        first = start_send(pool, connect, 1, "old")
        exchange(connect, 2, "go")
        assert first.result(120) == "go"
        second = start_send(pool, connect, 1, "new")
        time.sleep(0.5)
        assert not second.done(), "it must not take the last attempt's reply for its own"
        (heard,) = exchange(connect, 2, "stop")
        assert heard.text == "new"
        assert second.result(120) == "stop"


def test_a_message_of_an_earlier_attempt_is_ignored(connect: Connect) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = start_send(pool, connect, 1, "old")
        exchange(connect, 2, "go")
        other.result(120)
    assert exchange(connect, 2, "go", timeout=0.5) == ()


def test_a_missing_rank_does_not_delay_the_others(connect: Connect) -> None:
    """Rank 1 of 3 is missing: after its timeout, the others are still gathered."""
    with ThreadPoolExecutor(2) as pool:
        others = [start_send(pool, connect, rank, "here") for rank in (2, 3)]
        began = time.monotonic()
        answers = exchange(connect, 4, "stop", timeout=1.0)
        assert time.monotonic() - began < 60
        assert [other.result(120) for other in others] == ["stop"] * 2
    assert [one.rank for one in answers] == [2, 3]


def test_send_times_out_without_rank_0(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0.0)
    began = time.monotonic()
    assert send(connect(), 1, "here", 0.5) is None
    assert time.monotonic() - began < 60


class Clock:
    """A clock that is five seconds ahead in the threads of other ranks."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + (5.0 if threading.current_thread().name.startswith("ahead") else 0.0)


def test_clock_offset_is_measured(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "time", Clock)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        other = start_send(pool, connect, 1, "here")
        (heard,) = exchange(connect, 2, "go")
        other.result(120)
    assert abs(heard.clock_offset - 5.0) <= heard.clock_error + 1e-3


def test_equal_clocks_are_within_the_error(connect: Connect) -> None:

    with ThreadPoolExecutor(1) as pool:
        other = start_send(pool, connect, 1, "here")
        (heard,) = exchange(connect, 2, "go")
        other.result(120)
    assert abs(heard.clock_offset) <= heard.clock_error + 1e-3
    assert heard.clock_error < 5


def test_other_ranks_exit_after_rank_0_had_time_to_print(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(rendezvous.ReportedElsewhereError) as caught:
        rendezvous._parse_plan('{"exit_code": 2}')
    assert (caught.value.exit_code, pauses) == (2, [rendezvous._REPORT_SECONDS])
