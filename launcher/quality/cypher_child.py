"""Started as a script by `cypher_analysis`: says of each query, a JSON string a line, what is wrong with it.

argv: `racer` and the folder of Neo4j's analyser, or `graphglot`. It stands alone: nothing of this package is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_HEAP_BYTES = 1024 * 2**20
# graphglot 0.14 takes `x IN [...] AND y` for `x IN ([...] AND y)` and then complains of a list in AND.
_MISTAKEN = frozenset({"boolean-operand-type"})


def _open_racer(analyser: str) -> Callable[[str], str]:
    from py_mini_racer import MiniRacer

    context: Any = MiniRacer()
    context.set_hard_memory_limit(_MAX_HEAP_BYTES)
    context.eval((Path(__file__).parent / "node" / "cypher_analyser.js").read_text(encoding="utf-8"))
    source = Path(analyser).read_text(encoding="utf-8")
    context.eval(context.call("makeScript", source))
    return lambda query: str(context.call("firstFault", query))


def _open_graphglot() -> Callable[[str], str]:
    from graphglot.dialect.neo4j import Neo4j  # type: ignore[import-untyped]

    dialect = Neo4j()

    def find_fault(query: str) -> str:
        result = dialect.validate(query)
        faults = [str(fault.message) for fault in result.diagnostics or () if fault.feature_id not in _MISTAKEN]
        if result.error or faults:
            return str(result.error or faults[0])
        return "" if result.expressions else "no query in it"

    return find_fault


def main() -> None:
    find_fault = _open_racer(sys.argv[2]) if sys.argv[1] == "racer" else _open_graphglot()
    print('"ready"', flush=True)
    for line in sys.stdin:
        try:
            fault, failed = find_fault(json.loads(line)), False
        except Exception as error:  # what the checker cannot digest is a fault of the query, and never ours to die of
            fault, failed = f"the analyser gave up: {type(error).__name__}", True
        print(json.dumps(fault[:300]), flush=True)
        if failed and sys.argv[1] == "racer":
            break  # what it has left behind is not trusted: the next query finds a new process
    sys.stdout.flush()
    os._exit(0)  # mini-racer's threads would keep the process from ending


if __name__ == "__main__":
    main()
