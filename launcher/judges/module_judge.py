"""Judge of a user's class `package.module:Class`, in a child process without the secrets of the environment."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.core.errors import InputError, RunFailedError, first_line
from launcher.core.processes import make_clean_environment
from launcher.core.worker import Worker, WorkerError
from launcher.judges.base import Check, ReferenceRow, Verdict
from launcher.judges.external_command import MAX_REASON, SECONDS_PER_ANSWER, SECONDS_TO_START

_RESERVED = "loss"  # in metrics: eval/loss
_CHECK_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,59}", re.ASCII)
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class ModuleJudge:
    """Judge that runs a user's class in a child process and checks what the class returns."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_requests = 0
        environment = make_clean_environment()
        search_path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), environment.get("PYTHONPATH"))))
        command = [sys.executable, "-P", "-m", __name__, path]
        self._worker = Worker(command, environment=environment | {"PYTHONPATH": search_path}, stderr=None)
        try:
            hello = self._receive(SECONDS_TO_START)
            if "error" in hello:
                raise InputError(f"evaluation.judge: {path} {hello['error']}")
            self.checks = tuple(Check(**check) for check in hello["checks"])
            self.main_check = str(hello["main_check"])
        except BaseException:
            self.close()
            raise

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        limit = SECONDS_TO_START + SECONDS_PER_ANSWER * len(answers)
        self._num_requests += 1
        request = {"number": self._num_requests, "rows": [asdict(row) for row in rows], "answers": list(answers)}
        try:
            self._worker.write_line(json.dumps(request), limit)
        except WorkerError as error:
            raise RunFailedError(f"the judge {self._path} {error}") from None
        reply = self._receive(limit)
        if "error" in reply:
            raise RunFailedError(f"the judge {self._path} {reply['error']}")
        return [Verdict(checks=verdict["checks"], reason=verdict["reason"]) for verdict in reply["verdicts"]]

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Return the reply to the last request, never one to an earlier request."""
        try:
            reply: dict[str, Any] = json.loads(self._worker.read_line(seconds))
            if reply["number"] == self._num_requests:
                return reply
        except WorkerError as error:
            raise RunFailedError(f"the judge {self._path} {error}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise RunFailedError(f"the judge {self._path} replied more than once, or wrote other text into its replies")


class _WrongJudgeError(Exception):
    """A user's judge class breaks the interface. The message is a predicate: callers put the class's name first."""


def serve(path: str) -> None:
    """Load a user's judge class and judge one batch per line of stdin; what the class prints goes to stderr."""
    replies, number = os.fdopen(os.dup(1), "w", encoding="utf-8"), 0
    os.dup2(2, 1)
    sys.path.append(str(Path.cwd()))  # last, so that files there do not shadow packages

    def reply(content: Mapping[str, object]) -> None:
        replies.write(json.dumps({"number": number, **content}) + "\n")
        replies.flush()

    try:
        judge = load_class(path)()
        checks = _describe_checks(judge)
    except _WrongJudgeError as error:
        return reply({"error": str(error)})
    except (ImportError, AttributeError, SyntaxError) as error:
        return reply({"error": f"cannot be loaded: {first_line(error)}"})
    except Exception as error:
        return reply({"error": f"cannot be instantiated: {type(error).__name__}: {first_line(error)}"})
    reply({"checks": checks, "main_check": judge.main_check})
    names = [check["name"] for check in checks]
    for line in sys.stdin:
        request = json.loads(line)
        number = request["number"]
        rows = [ReferenceRow(**row) for row in request["rows"]]
        try:
            reply({"verdicts": check_verdicts(judge.judge(rows, request["answers"]), names, len(rows))})
        except _WrongJudgeError as error:
            reply({"error": str(error)})
        except Exception as error:
            reply({"error": f"failed: {type(error).__name__}: {first_line(error)}"})
    return None


def load_class(path: str) -> Any:
    """Import package.module:Class."""
    import importlib

    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _describe_checks(judge: Any) -> list[dict[str, Any]]:
    for name in ("checks", "main_check", "judge", "close"):
        if not hasattr(judge, name):
            raise _WrongJudgeError(f"is not a judge: it has no {name}")
    if not isinstance(judge.checks, list | tuple) or not judge.checks:
        raise _WrongJudgeError(f"is not a judge: checks must be a tuple of Check, not {repr(judge.checks)[:60]}")
    checks = []
    for check in judge.checks:
        values = {name: getattr(check, name, None) for name in ("name", "title", "checker")}
        if not all(isinstance(value, str) for value in values.values()):
            raise _WrongJudgeError(f"is not a judge: {repr(check)[:60]} is not a Check of three strings")
        checks.append(values)
    names = [str(check["name"]) for check in checks]
    if len({*names}) < len(names) or not all(map(_CHECK_NAME.fullmatch, names)):
        rule = "must be unique and consist of letters, digits, dots, dashes and underscores"
        raise _WrongJudgeError(f"is not a judge: names of checks {rule}, not {repr(names)[:60]}")
    if judge.main_check not in names:
        main = repr(judge.main_check)[:60]
        raise _WrongJudgeError(f"is not a judge: its main_check {main} is not one of {', '.join(names)}")
    if _RESERVED in names:
        raise _WrongJudgeError(f"has a check named {_RESERVED}, which is reserved for the validation loss")
    return checks


def check_verdicts(verdicts: object, names: Sequence[str], count: int) -> list[dict[str, object]]:
    """Return verdicts as JSON; raises _WrongJudgeError if they are not one Verdict per answer with booleans or None."""
    if not isinstance(verdicts, list | tuple) or len(verdicts) != count:
        found = f"{len(verdicts)} verdicts" if isinstance(verdicts, list | tuple) else repr(verdicts)[:60]
        raise _WrongJudgeError(f"returned {found} for {count} answers")
    return [_check_verdict(verdict, names, number) for number, verdict in enumerate(verdicts, 1)]


def _check_verdict(verdict: object, names: Sequence[str], number: int) -> dict[str, object]:
    checks, reason = getattr(verdict, "checks", None), getattr(verdict, "reason", None)
    if not isinstance(checks, Mapping) or not isinstance(reason, str):
        raise _WrongJudgeError(f"returned {repr(verdict)[:60]} for answer {number}, not a Verdict")
    if set(checks) != set(names):
        raise _WrongJudgeError(
            f"returned the checks {sorted(map(str, checks))} for answer {number}, not {sorted(names)}"
        )
    for name in names:
        if not (checks[name] is None or isinstance(checks[name], bool)):
            what = f"{name} = {repr(checks[name])[:60]}"
            raise _WrongJudgeError(f"returned {what} for answer {number}, not True, False or None")
    return {"checks": {name: checks[name] for name in names}, "reason": reason[:MAX_REASON]}


if __name__ == "__main__":
    serve(sys.argv[1])
