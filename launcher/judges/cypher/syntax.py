"""Syntax check of Cypher by Neo4j's own analyser, in Node.js or mini-racer, or else by graphglot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.installation import format_install
from launcher.core.worker import WorkerError
from launcher.judges import node_tools
from launcher.judges.node_tools import find_node, find_package, make_node_command, make_node_environment
from launcher.judges.worker import LimitedWorker, make_module_worker

ANALYSER = "@neo4j-cypher/language-support"
INSTALL_HINT = f"{format_install('quality')}; better still: {node_tools.INSTALL_HINT}, which needs npm"
_FILE = Path("src") / "syntaxValidation" / "semanticAnalysis.js"
_WORKER = "launcher.judges.cypher.syntax_worker"
_SECONDS = 10.0  # a real query takes 0.1 s, the first one of a process 1 s
_MEMORY_MIB = 3072
_HEAP_MIB = 1024
SYNTAX_BACKENDS = ("node", "racer", "graphglot")


class SyntaxChecker:
    """Checks queries in one worker process and caches the results."""

    def __init__(self, checker: str, worker: LimitedWorker) -> None:
        self.checker = checker
        self._worker = worker
        self._cache: dict[str, str] = {}

    def find_fault(self, query: str) -> str:
        """Return the first syntax error; empty if there is none. A query that crashes the analyser is wrong."""
        if query not in self._cache:
            try:
                reply = json.loads(self._worker.request(json.dumps(query)))
            except (WorkerError, ValueError) as error:
                reply = f"the analyser {error}"
            self._cache[query] = str(reply)
        return self._cache[query]

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def open_syntax_checker(backends: Sequence[str] = SYNTAX_BACKENDS) -> SyntaxChecker:
    """Open the first installed backend; raises InputError if there is none."""
    openers = {"node": _open_node, "racer": _open_racer, "graphglot": _open_graphglot}
    for backend in backends:
        checker = openers[backend]()
        if checker is not None:
            return checker
    raise InputError("no Cypher parser is installed", hint=INSTALL_HINT)


def _open_node() -> SyntaxChecker | None:
    node, package = find_node(), find_package(ANALYSER)
    if node is None or package is None or not (package.folder / _FILE).is_file():
        return None
    scripts = Path(__file__).parent.parent / "node"
    command = make_node_command(
        node, scripts / "cypher_worker.cjs", readable=(scripts, package.folder), heap_mib=_HEAP_MIB
    )
    worker = LimitedWorker(
        [*command, str(package.folder / _FILE)], make_node_environment(), seconds=_SECONDS, memory_mib=_MEMORY_MIB
    )
    return SyntaxChecker(f"{ANALYSER} {package.version}, Node {'.'.join(map(str, node.version))}", worker)


def _open_racer() -> SyntaxChecker | None:
    package = find_package(ANALYSER)
    if package is None or not (package.folder / _FILE).is_file() or find_spec("py_mini_racer") is None:
        return None
    worker = make_module_worker(_WORKER, "racer", str(package.folder / _FILE), seconds=_SECONDS, memory_mib=_MEMORY_MIB)
    return SyntaxChecker(f"{ANALYSER} {package.version}, mini-racer {version('mini-racer')}", worker)


def _open_graphglot() -> SyntaxChecker | None:
    if find_spec("graphglot") is None:
        return None
    worker = make_module_worker(_WORKER, "graphglot", seconds=_SECONDS, memory_mib=_MEMORY_MIB)
    return SyntaxChecker(f"graphglot {version('graphglot')}", worker)
