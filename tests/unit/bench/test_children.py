"""Processes that measure: told by a pipe, read with a limit, and gone when nobody needs them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.bench.children import ChildFailedError, ChildTooLongError, Lineup, ending, started
from launcher.errors import ExitCode
from launcher.processes import is_alive
from launcher.values import Frozen

MODULE = "tests.unit.bench.talking"
PATIENCE_SECONDS = 60.0


class Spec(Frozen):
    number: int


def test_one_line_is_one_answer(tmp_path: Path) -> None:
    with started(MODULE, Spec(number=7), tmp_path, "side-1") as child:
        for word in ("a", "b"):
            child.tell(word)
            assert child.read(PATIENCE_SECONDS) == f'{word} {{"number":7}}'
        pid = child.pid
    assert not is_alive(pid)


def test_an_error_is_told_with_its_own_words_and_exit_code(tmp_path: Path) -> None:
    with started(MODULE, Spec(number=7), tmp_path, "side-1") as child:
        child.tell("fail")
        with pytest.raises(ChildFailedError) as caught:
            child.read(PATIENCE_SECONDS)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert [problem.what for problem in caught.value.problems] == ["error: out of memory: 3 GiB more", "hint: none"]
    assert caught.value.reason == "out of memory: 3 GiB more"


def test_whoever_takes_too_long_is_ended(tmp_path: Path) -> None:
    with started(MODULE, Spec(number=7), tmp_path, "side-1") as child:
        child.tell("sleep")
        began = time.monotonic()
        with pytest.raises(ChildTooLongError, match="no answer after 1 s"):
            child.read(1.0)
        assert time.monotonic() - began < PATIENCE_SECONDS
        assert not is_alive(child.pid)


def test_the_next_one_starts_while_one_measures_and_none_is_left(tmp_path: Path) -> None:
    specs = [(f"rung-{number}", Spec(number=number)) for number in range(3)]
    with Lineup(MODULE, tmp_path, specs, ahead=True) as lineup:
        with ending(lineup.take()) as first:
            assert (tmp_path / "rung-1.log").exists()
            assert not (tmp_path / "rung-2.log").exists()
            first.tell("a")
            assert first.read(PATIENCE_SECONDS) == 'a {"number":0}'
        with ending(lineup.take()) as second:
            second.tell("b")
            assert second.read(PATIENCE_SECONDS) == 'b {"number":1}'
        waiting = lineup._ready
        assert waiting is not None
        assert is_alive(waiting.pid)
    assert not is_alive(waiting.pid)


def test_where_cores_are_few_each_one_starts_alone(tmp_path: Path) -> None:
    with Lineup(MODULE, tmp_path, [("rung-0", Spec(number=0)), ("rung-1", Spec(number=1))], ahead=False) as lineup:
        with ending(lineup.take()):
            assert not (tmp_path / "rung-1.log").exists()
        with ending(lineup.take()) as second:
            second.tell("b")
            assert second.read(PATIENCE_SECONDS) == 'b {"number":1}'
