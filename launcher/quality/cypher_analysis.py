"""Whether a text is Cypher. Neo4j's own analyser says so, in Node or without it; without it, graphglot."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import InputError
from launcher.quality.line_worker import LineWorker, WorkerGoneError
from launcher.quality.node_tools import find_node, find_package, make_command, make_environment

ANALYSER = "@neo4j-cypher/language-support"
INSTALL_HINT = "pip install 'expert-launcher[quality]'; better still: make quality-tools, which needs npm"
_FILE = Path("src") / "syntaxValidation" / "semanticAnalysis.js"
_SECONDS = 10.0  # a query of a person takes a tenth; the first one of a process, one
_MEMORY_MIB = 3072
_HEAP_MIB = 1024
RUNGS = ("node", "racer", "graphglot")


class Analyser:
    """Holds one child process, and remembers what it said."""

    def __init__(self, checker: str, worker: LineWorker) -> None:
        self.checker = checker
        self._worker = worker
        self._known: dict[str, str] = {}

    def find_fault(self, query: str) -> str:
        """Empty: none. A query that takes the analyser too long, or kills it, is at fault."""
        if query not in self._known:
            try:
                reply = json.loads(self._worker.ask(json.dumps(query)))
            except (WorkerGoneError, ValueError) as error:
                reply = f"the analyser {error}"
            self._known[query] = str(reply)
        return self._known[query]

    def close(self) -> None:
        self._worker.close()


def open_analyser(rungs: Sequence[str] = RUNGS) -> Analyser:
    """The first that is installed. Raises where none is."""
    for rung in rungs:
        found = {"node": _open_node, "racer": _open_racer, "graphglot": _open_graphglot}[rung]()
        if found is not None:
            return found
    raise InputError("nothing is installed that reads Cypher", hint=INSTALL_HINT)


def _open_node() -> Analyser | None:
    node, package = find_node(), find_package(ANALYSER)
    if node is None or package is None or not (package.folder / _FILE).is_file():
        return None
    ours = Path(__file__).parent / "node"
    command = make_command(node, ours / "cypher_worker.cjs", readable=(ours, package.folder), heap_mib=_HEAP_MIB)
    worker = LineWorker(
        [*command, str(package.folder / _FILE)], make_environment(), seconds=_SECONDS, memory_mib=_MEMORY_MIB
    )
    return Analyser(f"{ANALYSER} {package.version}, Node {'.'.join(map(str, node.version))}", worker)


def _open_racer() -> Analyser | None:
    package = find_package(ANALYSER)
    if package is None or not (package.folder / _FILE).is_file() or find_spec("py_mini_racer") is None:
        return None
    worker = start_child("cypher_child.py", "racer", str(package.folder / _FILE), memory_mib=_MEMORY_MIB)
    return Analyser(f"{ANALYSER} {package.version}, mini-racer {version_of('mini-racer')}", worker)


def _open_graphglot() -> Analyser | None:
    if find_spec("graphglot") is None:
        return None
    worker = start_child("cypher_child.py", "graphglot", memory_mib=_MEMORY_MIB)
    return Analyser(f"graphglot {version_of('graphglot')}", worker)


def start_child(script: str, *arguments: str, memory_mib: int, seconds: float = _SECONDS) -> LineWorker:
    """A script of this folder, in a Python that sees no setting of the user and no variable that may hold a secret."""
    command = [sys.executable, "-I", str(Path(__file__).parent / script), *arguments]
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH"}}
    return LineWorker(command, kept, seconds=seconds, memory_mib=memory_mib)


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"
