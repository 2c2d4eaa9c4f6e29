"""The process that judges: reads questions and answers from its input, writes what it says to its output. It is started
by `sql_process.py`, limits itself before it reads the first, and is killed without regret."""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import sys
import time
from collections import OrderedDict

from launcher.quality.sql_question import Question
from launcher.quality.sql_reading import NotReadableError
from launcher.quality.sql_ruling import Answer, Ruling, fail, rule, within_reach
from launcher.values import Frozen

MEMORY_BYTES = 768 * 2**20  # of address space: Python, sqlglot and SQLite take about 150 MiB
_SQLITE_BYTES = 128 * 2**20
CPU_SECONDS = 2  # for one answer, which takes a hundredth of that
_OPEN_FILES = 16
_RECURSION = 4_000  # sqlglot takes about 20 calls for a pair of brackets
_KEPT_QUESTIONS = 4
READY, PREPARED, PARSED = "ready", "prepared", "parsed"  # lines that tell how far an answer has come


class Request(Frozen):
    context: str
    reference: str
    answer: str


def main() -> int:
    import apsw
    import sqlglot.dialects.mysql
    import sqlglot.dialects.postgres
    import sqlglot.dialects.sqlite
    import sqlglot.dialects.tsql  # noqa: F401  (no file can be opened later)

    logging.disable()
    gc.freeze()  # what the packages have made stays: looking through it again and again takes a tenth of the time
    gc.set_threshold(20_000)
    sys.setrecursionlimit(_RECURSION)
    apsw.hard_heap_limit(_SQLITE_BYTES)
    _limit_process()
    kept: OrderedDict[tuple[str, str], Question] = OrderedDict()
    _write(READY)
    for line in sys.stdin:
        request = Request.model_validate_json(line)
        _allow_seconds()
        _write(_judge(request, kept).model_dump_json())
    return 0


def _judge(request: Request, kept: OrderedDict[tuple[str, str], Question]) -> Ruling:
    try:
        question = _prepare(request, kept)
    except Exception as error:  # a row of a shape that nobody thought of costs its own verdict, not the evaluation
        return Ruling(reason=f"not judged: the row's tables and reference: {type(error).__name__}: {error}")
    _write(PREPARED)
    _allow_seconds()
    return within_reach(question, _rule(request, question))


def _rule(request: Request, question: Question) -> Ruling:
    try:
        answer = Answer(request.answer, question)
    except NotReadableError as error:
        if not question.reference_is_readable:  # of a dialect that is not SQLite's, then
            return Ruling(reason=f"not judged: neither it nor the reference can be read: {error}")
        return fail(f"it does not parse: {error}")
    except Exception as error:
        return fail(f"it does not parse: {type(error).__name__}: {error}")
    _write(PARSED)
    try:
        return rule(question, answer)
    except Exception as error:
        return fail(f"it cannot be judged: {type(error).__name__}: {error}", parses=True)


def _prepare(request: Request, kept: OrderedDict[tuple[str, str], Question]) -> Question:
    key = (request.context, request.reference)
    if key in kept:
        kept.move_to_end(key)
        return kept[key]
    if len(kept) >= _KEPT_QUESTIONS:
        kept.popitem(last=False)[1].close()
    kept[key] = Question(request.context, request.reference)
    return kept[key]


def _limit_process() -> None:
    """No file grows, none is opened but by leave of the few handles left, no process is started, nothing is dumped."""
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _allow_seconds() -> None:
    """The limit counts from the start of the process, so it moves on with each answer. Beyond it the kernel kills."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time()) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _write(line: str) -> None:
    os.write(sys.stdout.fileno(), (line + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
