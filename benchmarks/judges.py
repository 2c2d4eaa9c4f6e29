"""Answers per second that each judge grades, on the reference answers of the samples (all correct).

python benchmarks/judges.py                      # all four, 200 rows each
python benchmarks/judges.py sql --rows 2000
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path

from launcher.judges.base import ReferenceRow
from launcher.judges.registry import open_judge
from launcher.manifest import load_manifest

ROOT = Path(__file__).resolve().parent.parent
EXPERTS = ("json", "sql", "neo4j", "typescript")


def load_rows(expert: str, count: int) -> list[ReferenceRow]:
    mapping = load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest.training.dataset.field_mapping
    lines = (ROOT / f"experts/{expert}/sample/train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:count]]
    return [
        ReferenceRow(
            instruction=row[mapping.instruction or "instruction"],
            context=row.get(mapping.input, "") if mapping.input else "",
            reference=row[mapping.answer or "output"],
        )
        for row in rows
    ]


def measure(expert: str, count: int) -> str:
    rows = load_rows(expert, count)
    answers = [row.reference for row in rows]
    with closing(open_judge(load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest)) as judge:
        judge.judge(rows[:1], answers[:1])  # starts worker processes
        began = time.perf_counter()
        verdicts = judge.judge(rows, answers)
        seconds = time.perf_counter() - began
        num_correct = sum(verdict.checks[judge.main_check] is True for verdict in verdicts)
        checkers = ", ".join(dict.fromkeys(check.checker for check in judge.checks))
    return f"{expert:<10}  {count / seconds:8.1f} answers/s  {num_correct} of {count} correct  ({checkers})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", nargs="*", default=EXPERTS)
    parser.add_argument("--rows", type=int, default=200)
    arguments = parser.parse_args()
    for expert in arguments.experts:
        print(measure(expert, arguments.rows), flush=True)


if __name__ == "__main__":
    main()
