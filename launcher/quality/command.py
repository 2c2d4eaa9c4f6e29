"""An expert's own judge: a program that reads a row and an answer, a JSON object a line, and writes what it found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from launcher.errors import InputError, RunFailedError
from launcher.quality.judging import Check, Question, Verdict

_SECONDS_AN_ANSWER, _SECONDS_TO_START = 5.0, 60.0
MAIN = "right"


class CommandJudge:
    """A line in: `{"instruction", "context", "reference", "answer"}`. A line out: `{"right": true, "reason": ""}`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    @property
    def checks(self) -> tuple[Check, ...]:
        return (Check(name=MAIN, title="right", checker=" ".join(self._command)),)

    @property
    def main_check(self) -> str:
        return MAIN

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]:
        lines = [
            json.dumps(
                {
                    "instruction": question.instruction,
                    "context": question.context,
                    "reference": question.reference,
                    "answer": answer,
                }
            )
            for question, answer in zip(questions, answers, strict=True)
        ]
        limit = _SECONDS_TO_START + _SECONDS_AN_ANSWER * len(lines)
        try:
            result = subprocess.run(
                self._command,
                input="".join(f"{line}\n" for line in lines),
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except FileNotFoundError:
            raise InputError(f"evaluation.judge_command: {self._command[0]} is not there") from None
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"the judge {self._command[0]} did not end within {limit:.0f} s") from None
        if result.returncode != 0:
            tail = result.stderr.strip().splitlines()[-1:] or ["no word"]
            raise RunFailedError(f"the judge {self._command[0]} failed ({result.returncode}): {tail[0]}")
        return self._read(result.stdout.splitlines(), len(lines))

    def close(self) -> None:
        pass

    def _read(self, lines: Sequence[str], count: int) -> list[Verdict]:
        if len(lines) != count:
            raise RunFailedError(f"the judge {self._command[0]} wrote {len(lines)} lines for {count} answers")
        try:
            rows = [json.loads(line) for line in lines]
            return [Verdict(checks={MAIN: bool(row["right"])}, reason=str(row.get("reason") or "")) for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError):
            wanted = '{"right": true, "reason": ""}'
            raise RunFailedError(f"the judge {self._command[0]} wrote something else than {wanted} a line") from None
