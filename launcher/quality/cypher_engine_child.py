"""Started as a script by `cypher_running`: makes a graph in memory, runs queries on it, tells what they return.

Reads a JSON object a line, {"setup": [statements], "queries": [texts]}, and writes a list: for each query its rows, or
a text that says why there are none. It stands alone: nothing of this package is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_MAX_ROWS = 5000
_POOL_BYTES = 64 * 2**20
_MILLISECONDS = 2000


def main() -> None:
    import ladybug

    print('"ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: Any = _run(ladybug, request["setup"], request["queries"])
        except Exception as error:  # the schema is one that the engine cannot hold
            reply = [f"no graph: {error}"[:300]] * len(request["queries"])
        print(json.dumps(reply), flush=True)


def _run(ladybug: Any, setup: list[str], queries: list[str]) -> list[Any]:
    database = ladybug.Database(":memory:", buffer_pool_size=_POOL_BYTES, max_num_threads=1, max_db_size=2**28)
    try:
        connection = ladybug.Connection(database, num_threads=1)
        connection.set_query_timeout(_MILLISECONDS)
        for statement in setup:
            connection.execute(statement)
        return [_ask(connection, query) for query in queries]
    finally:
        database.close()


def _ask(connection: Any, query: str) -> Any:
    try:
        result = connection.execute(query)
        if isinstance(result, list):
            return "several statements"
        rows = []
        while result.has_next():
            rows.append([_plain(value) for value in result.get_next()])
            if len(rows) > _MAX_ROWS:
                return "too many rows"
        return rows
    except Exception as error:
        return str(error)[:300]


def _plain(value: Any) -> Any:
    """JSON, in which equal values are equal: lists sorted, floats cut where engines differ in the last bits."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(f"{value:.9g}") if abs(value) < 2**53 else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple | set):
        return sorted((_plain(one) for one in value), key=lambda one: json.dumps(one))
    return str(value)


if __name__ == "__main__":
    main()
