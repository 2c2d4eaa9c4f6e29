"""Worker of the execution match: creates a graph in memory and runs queries on it.

Reads one JSON object per line, {"setup": [statements], "queries": [texts]}, and writes a list with the rows of each
query, or an error text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_MAX_ROWS = 5000
_POOL_BYTES = 64 * 2**20
_MILLISECONDS = 2000


def serve() -> None:
    """Answer one request per line of stdin."""
    import ladybug

    print('"ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: Any = _run(ladybug, request["setup"], request["queries"])
        except Exception as error:  # the engine does not support the schema
            reply = [f"no graph: {error}"[:300]] * len(request["queries"])
        print(json.dumps(reply), flush=True)


def _run(ladybug: Any, setup: list[str], queries: list[str]) -> list[Any]:
    database = ladybug.Database(":memory:", buffer_pool_size=_POOL_BYTES, max_num_threads=1, max_db_size=2**28)
    try:
        connection = ladybug.Connection(database, num_threads=1)
        connection.set_query_timeout(_MILLISECONDS)
        for statement in setup:
            connection.execute(statement)
        return [_run_query(connection, query) for query in queries]
    finally:
        database.close()


def _run_query(connection: Any, query: str) -> Any:
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
    """Convert a value to a canonical JSON value for comparison: lists sorted, floats rounded."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(f"{value:.9g}") if abs(value) < 2**53 else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple | set):
        return sorted((_plain(item) for item in value), key=json.dumps)
    return str(value)
