"""Fixtures of the corpus tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.inputs import make_rows, write_base, write_expert, write_jsonl

# A busy machine is no failure: time is measured where it matters.
settings.register_profile("corpus", deadline=None, max_examples=40)
settings.load_profile("corpus")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> BaseTokenizer:
    return BaseTokenizer(folder=base)


@pytest.fixture
def expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest with 40 good rows; the data folder is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAUNCHER_DATA_DIR", raising=False)
    write_jsonl(tmp_path / "train.jsonl", make_rows(40))
    return write_expert(tmp_path)
