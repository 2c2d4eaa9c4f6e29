"""Fixtures of the Cypher judge's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from launcher.judges.cypher.judge import CypherJudge

JudgeOf = Callable[[str], CypherJudge]


@pytest.fixture(scope="session")
def judge_of() -> Iterator[JudgeOf]:
    """A function that returns the judge of a syntax backend, opened once: its process takes seconds to start."""
    opened: dict[str, CypherJudge] = {}

    def get(backend: str) -> CypherJudge:
        if backend not in opened:
            opened[backend] = CypherJudge((backend,))
        return opened[backend]

    yield get
    for judge in opened.values():
        judge.close()
