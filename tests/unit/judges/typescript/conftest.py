"""One judge for all tests of a test process: its compiler takes long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.judges.typescript.judge import TypescriptJudge
from launcher.judges.typescript.node_compiler import TypescriptNode


@pytest.fixture(scope="session")
def judge() -> Iterator[TypescriptJudge]:
    with TypescriptJudge(seconds=20.0) as made:
        yield made


@pytest.fixture(scope="session")
def compiler(judge: TypescriptJudge) -> TypescriptNode:
    assert judge._node is not None
    return judge._node
