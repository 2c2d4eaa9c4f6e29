"""Helpers of the TypeScript tests: rows, and whether the compiler is installed."""

from __future__ import annotations

import json

import pytest

from launcher.judges.base import ReferenceRow
from launcher.judges.typescript.node_compiler import find_typescript_tools
from tests.conftest import ROOT

needs_compiler = pytest.mark.skipif(find_typescript_tools() is None, reason="needs Node and `make quality-tools`")
FILM = """interface Film {
  id: number;
  title: string;
  year: number;
  genre: "jazz" | "rock";
  note?: string;
}"""
# Wrong for every reference.
WRONG_ANSWERS = (
    "const g = 1;",
    "function f() { throw new Error('x'); }",
    "while (true) {}",
    "let a: string = 1;",
    "not ( code",
    "",
)


def ask_about_films(reference: str) -> ReferenceRow:
    return ReferenceRow(instruction=f"Write it.\n\n{FILM}", context="", reference=reference)


def sample(name: str, count: int | None = None) -> list[ReferenceRow]:
    lines = (ROOT / f"experts/typescript/sample/{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [ReferenceRow(instruction=row["instruction"], context="", reference=row["output"]) for row in rows]
