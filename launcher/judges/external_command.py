"""Judge that runs a user's command, which reads rows with answers and writes verdicts, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Sequence

from launcher.core.errors import InputError, RunFailedError
from launcher.core.worker import WorkerError, WorkerFailure, run_command
from launcher.judges.base import Check, ReferenceRow, Verdict

_SECONDS_PER_ANSWER, _SECONDS_TO_START = 5.0, 60.0
CORRECT_CHECK = "right"


class CommandJudge:
    """Sends `{"instruction", "context", "reference", "answer"}` per line; expects `{"right": true, "reason": ""}`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in order of strictness."""
        return (Check(name=CORRECT_CHECK, title="right", checker=" ".join(self._command)),)

    @property
    def main_check(self) -> str:
        """Name of the check that an expert is measured by."""
        return CORRECT_CHECK

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        lines = [
            json.dumps(
                {
                    "instruction": row.instruction,
                    "context": row.context,
                    "reference": row.reference,
                    "answer": answer,
                }
            )
            for row, answer in zip(rows, answers, strict=True)
        ]
        limit = _SECONDS_TO_START + _SECONDS_PER_ANSWER * len(lines)
        try:
            result = run_command(self._command, timeout=limit, input_text="".join(f"{line}\n" for line in lines))
        except WorkerError as error:
            if error.reason is WorkerFailure.NOT_FOUND:
                raise InputError(f"evaluation.judge_command: {self._command[0]} does not exist") from None
            raise RunFailedError(f"the judge {self._command[0]} {error}") from None
        if result.returncode != 0:
            tail = result.stderr.strip().splitlines()[-1:] or ["no error message"]
            raise RunFailedError(f"the judge {self._command[0]} failed ({result.returncode}): {tail[0]}")
        return self._read(result.stdout.splitlines(), len(lines))

    def close(self) -> None:
        """Nothing to end: each call starts its own process."""

    def _read(self, lines: Sequence[str], count: int) -> list[Verdict]:
        if len(lines) != count:
            raise RunFailedError(f"the judge {self._command[0]} wrote {len(lines)} lines for {count} answers")
        try:
            replies = [json.loads(line) for line in lines]
            return [
                Verdict(checks={CORRECT_CHECK: bool(reply["right"])}, reason=str(reply.get("reason") or ""))
                for reply in replies
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            expected = '{"right": true, "reason": ""}'
            raise RunFailedError(f"the judge {self._command[0]} must write {expected} per line") from None
