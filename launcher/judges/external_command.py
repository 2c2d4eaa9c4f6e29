"""Judge that runs a user's command, which reads rows with answers and writes verdicts, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from launcher.core.errors import InputError, RunFailedError, show_value
from launcher.core.processes import make_clean_environment
from launcher.core.worker import WorkerError, WorkerFailure, run_command
from launcher.judges.base import CORRECT_CHECK, Check, ReferenceRow, Verdict

SECONDS_PER_ANSWER, SECONDS_TO_START = 5.0, 60.0
MAX_REASON = 2000  # characters
_EXPECTED = '{"right": true, "reason": ""}'


class CommandJudge:
    """Judge that sends a command one row with its answer per line; each reply is `{"right": true, "reason": ""}`."""

    main_check = CORRECT_CHECK

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self.checks = (Check(name=CORRECT_CHECK, title="right", checker=" ".join(command)),)

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        pairs = zip(rows, answers, strict=True)
        lines = [json.dumps({**asdict(row), "answer": answer}) for row, answer in pairs]
        output = self._run("".join(f"{line}\n" for line in lines), SECONDS_TO_START + SECONDS_PER_ANSWER * len(lines))
        replies = output.removesuffix("\n").split("\n") if output else []  # other separators may be part of a reason
        if len(replies) != len(lines):
            raise RunFailedError(
                f"the judge {self._command[0]} wrote {len(replies)} lines for {len(lines)} answers, not one per answer"
            )
        return [self._parse(number, reply) for number, reply in enumerate(replies, 1)]

    def close(self) -> None:
        """Do nothing: each call starts its own process."""

    def _run(self, text: str, seconds: float) -> str:
        try:
            result = run_command(
                self._command, timeout=seconds, environment=make_clean_environment(), input_text=text, errors="strict"
            )
        except WorkerError as error:
            if error.reason is WorkerFailure.NOT_FOUND:
                raise InputError(
                    f"evaluation.judge_command: {self._command[0]} does not exist",
                    hint="install the program, or give its full path",
                ) from None
            if error.reason is WorkerFailure.NOT_STARTED:
                raise InputError(f"evaluation.judge_command: {self._command[0]} {error}") from None
            raise RunFailedError(f"the judge {self._command[0]} {error}") from None
        except UnicodeDecodeError:
            raise RunFailedError(f"the judge {self._command[0]} wrote text that is not UTF-8") from None
        except ValueError as error:  # a NUL in the command
            raise InputError(f"evaluation.judge_command: {self._command[0]!r} cannot be started: {error}") from None
        if result.returncode != 0:
            tail = result.stderr.strip().splitlines()[-1:] or ["no error message"]
            raise RunFailedError(f"the judge {self._command[0]} failed with exit code {result.returncode}: {tail[0]}")
        return result.stdout

    def _parse(self, number: int, line: str) -> Verdict:
        try:
            reply = json.loads(line, object_pairs_hook=_make_object)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or CORRECT_CHECK not in reply:
            what = f"wrote {show_value(line)!r} in line {number}, not {_EXPECTED}"
        elif not isinstance(reply[CORRECT_CHECK], bool):
            what = f'wrote "right": {show_value(json.dumps(reply[CORRECT_CHECK]))} in line {number}, not true or false'
        elif not isinstance(reply.get("reason"), str | None):
            what = f'wrote "reason": {show_value(json.dumps(reply["reason"]))} in line {number}, not a string'
        else:
            reason = (reply.get("reason") or "")[:MAX_REASON]
            return Verdict(checks={CORRECT_CHECK: reply[CORRECT_CHECK]}, reason=reason)
        raise RunFailedError(f"the judge {self._command[0]} {what}")


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Reject duplicate keys in a judge's line of JSON: a judge that does not escape an answer may repeat `right`."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)
