"""Small datasets and helpers for the tests of new experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.new_expert.create import NewExpert, create_expert
from launcher.new_expert.proposal import Options


def make_rows(count: int = 40, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {n} and {n}?", "notes": f"sums of {n}", "answer": f"It is {2 * n}."}
        for n in range(first, first + count)
    ]


def write_rows(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = Path(name)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make(data: Path, name: str = "sales", **options: Any) -> NewExpert:
    return create_expert(name, data, options.pop("options", Options()), **options)


def read_sample(name: str) -> list[dict[str, Any]]:
    lines = Path(f"sales/sample/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
