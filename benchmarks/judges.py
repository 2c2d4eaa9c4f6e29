"""How many answers each judge takes a second, on the samples' own references: every one of them is right.

python benchmarks/judges.py                      # all four, 200 rows each
python benchmarks/judges.py sql --rows 2000
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path

from launcher.manifest import load_manifest
from launcher.quality.judges import open_judge
from launcher.quality.judging import Question

ROOT = Path(__file__).resolve().parent.parent
EXPERTS = ("json", "sql", "neo4j", "typescript")


def load_questions(expert: str, count: int) -> list[Question]:
    mapping = load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest.training.dataset.field_mapping
    lines = (ROOT / f"experts/{expert}/sample/train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:count]]
    return [
        Question(
            instruction=row[mapping.instruction or "instruction"],
            context=row.get(mapping.input, "") if mapping.input else "",
            reference=row[mapping.answer or "output"],
        )
        for row in rows
    ]


def measure(expert: str, count: int) -> str:
    questions = load_questions(expert, count)
    answers = [question.reference for question in questions]
    with closing(open_judge(load_manifest(ROOT / f"experts/{expert}/manifest.json").manifest)) as judge:
        judge.judge(questions[:1], answers[:1])  # whatever has to start has started
        began = time.perf_counter()
        verdicts = judge.judge(questions, answers)
        seconds = time.perf_counter() - began
        right = sum(verdict.checks[judge.main_check] is True for verdict in verdicts)
        who = ", ".join(dict.fromkeys(check.checker for check in judge.checks))
    return f"{expert:<10}  {count / seconds:8.1f} answers/s  {right} of {count} right  ({who})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", nargs="*", default=EXPERTS)
    parser.add_argument("--rows", type=int, default=200)
    arguments = parser.parse_args()
    for expert in arguments.experts:
        print(measure(expert, arguments.rows), flush=True)


if __name__ == "__main__":
    main()
