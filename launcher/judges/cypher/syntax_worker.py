"""Worker of the syntax check: reads one query per line (a JSON string) and writes its first error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_HEAP_BYTES = 1024 * 2**20
# graphglot 0.14 parses `x IN [...] AND y` as `x IN ([...] AND y)` and then rejects a list in AND.
_FALSE_ALARMS = frozenset({"boolean-operand-type"})


def _open_racer(analyser: str) -> Callable[[str], str]:
    from py_mini_racer import MiniRacer

    context: Any = MiniRacer()
    context.set_hard_memory_limit(_MAX_HEAP_BYTES)
    context.eval((Path(__file__).parent.parent / "node" / "cypher_analyser.js").read_text(encoding="utf-8"))
    source = Path(analyser).read_text(encoding="utf-8")
    context.eval(context.call("makeScript", source))
    return lambda query: str(context.call("firstFault", query))


def _open_graphglot() -> Callable[[str], str]:
    from graphglot.dialect.neo4j import Neo4j  # type: ignore[import-untyped]

    dialect = Neo4j()

    def find_fault(query: str) -> str:
        result = dialect.validate(query)
        faults = [str(fault.message) for fault in result.diagnostics or () if fault.feature_id not in _FALSE_ALARMS]
        if result.error or faults:
            return str(result.error or faults[0])
        return "" if result.expressions else "contains no query"

    return find_fault


def serve(backend: str, analyser: str = "") -> None:
    """Check one query per line of stdin with `graphglot`, or with `racer`, which needs the path of Neo4j's analyser."""
    find_fault = _open_racer(analyser) if backend == "racer" else _open_graphglot()
    print('"ready"', flush=True)
    for line in sys.stdin:
        try:
            fault, failed = find_fault(json.loads(line)), False
        except Exception as error:  # a crash of the checker is the query's fault
            fault, failed = f"the analyser gave up: {type(error).__name__}", True
        print(json.dumps(fault[:300]), flush=True)
        if failed and backend == "racer":
            break  # its state is not trusted: the next query gets a new process
    sys.stdout.flush()
    os._exit(0)  # mini-racer's threads would block the exit
