"""What the tests of the TypeScript judge share: its rows, and whether the compiler is there."""

from __future__ import annotations

import json

import pytest

from launcher.quality.judging import Question
from launcher.quality.typescript_node import find_tools
from tests.conftest import ROOT

needs_compiler = pytest.mark.skipif(find_tools() is None, reason="needs Node and `make quality-tools`")
FILM = """interface Film {
  id: number;
  title: string;
  year: number;
  genre: "jazz" | "rock";
  note?: string;
}"""


def ask_about_films(reference: str) -> Question:
    return Question(instruction=f"Write it.\n\n{FILM}", context="", reference=reference)


def sample(name: str, count: int | None = None) -> list[Question]:
    lines = (ROOT / f"experts/typescript/sample/{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [Question(instruction=row["instruction"], context="", reference=row["output"]) for row in rows]
