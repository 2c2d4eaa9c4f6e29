"""The preflight of one rank, by a real store; threads play the other nodes."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.corpus.preparation import Preparation, make_preparation
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import ExitCode, InputError, LauncherError, TopologyError
from launcher.gpus import find_gpu
from launcher.inputs import Request, base_folders, plan_request
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.record import load_outcome
from launcher.training import sharing
from launcher.training.chronicle import Chronicle
from launcher.training.node_facts import hash_code
from launcher.training.preflight import NodeReport, check_nodes
from launcher.training.roll_call import answer, hear_all, tell_all
from tests.conftest import ROOT
from tests.training.builders import vary

Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Site:
    """This node's side: a run, and a place where ranks meet."""

    plan: Plan
    paths: RunPaths
    chronicle: Chronicle
    port: int

    def connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=20))

    def find_data(self) -> Preparation:
        folder = Path(self.plan.data.folder)
        return make_preparation(self.plan, folder, load_tokenizer(self.plan.base.name, base_folders(folder)))

    def check(self, find_data: Callable[[], Preparation] | None = None, patience: float = 20.0) -> Preparation:
        return check_nodes(self.plan, self.paths, self.chronicle, find_data or self.find_data, patience)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Two nodes of two ranks; this process is the first rank until a test says otherwise."""
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(sharing, "_hosted", [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    places |= {"GROUP_WORLD_SIZE": 2, "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    plan = plan_request(Request(expert=str(ROOT / "experts/neo4j/manifest.json"), profile="smoke")).plan
    paths = RunPaths(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    return Site(plan=plan, paths=paths, chronicle=Chronicle(paths, is_main=True), port=port)


def tell_own_facts(site: Site, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first rank of a second node would say here, told to a first rank that a thread plays."""
    told: dict[str, Any] = {}
    server = TCPStore("127.0.0.1", site.port, is_master=True, timeout=timedelta(seconds=20))

    def play_first() -> None:
        store = site.connect()
        answers = hear_all(store, 2, 20)
        told.update(json.loads(answers[0].text))
        tell_all(store, answers, json.dumps({"exit_code": 0, "line": ""}))

    changed = {"RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1"}
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        for name, value in changed.items():
            patch.setenv(name, value)
        first = pool.submit(play_first)
        assert site.check().expert == "neo4j"
        first.result(20)
    del server
    return told


class Others:
    """Ranks 1 to 3: the second of this node, and the two of the other."""

    def __init__(self, site: Site, facts: dict[str, Any]) -> None:
        self._site = site
        self._pool = ThreadPoolExecutor(4)
        self.reports: dict[int, Any] = {
            1: {"node": 0, "host": "alpha"},
            2: {"node": 1, "host": "beta", "facts": {**facts, "node": 1, "host": "beta", "num_ranks": 2}},
            3: {"node": 1, "host": "beta"},
        }

    def play(self) -> dict[int, Future[str | None]]:
        return {rank: self._pool.submit(self._answer, rank, report) for rank, report in self.reports.items()}

    def _answer(self, rank: int, report: dict[str, Any]) -> str | None:
        return answer(self._site.connect(), rank, json.dumps(report), 20)


@pytest.fixture
def others(site: Site, monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(site, tell_own_facts(site, monkeypatch)["facts"])


def judge(site: Site, others: Others, **more: Any) -> tuple[Preparation | LauncherError, list[dict[str, Any]]]:
    """What the first rank makes of it, and what the others are told."""
    told = others.play()
    result: Preparation | LauncherError
    try:
        result = site.check(**more)
    except LauncherError as error:
        result = error
    return result, [json.loads(future.result(20) or "{}") for future in told.values()]


def test_nodes_that_are_alike_go_on(site: Site, others: Others, capsys: pytest.CaptureFixture[str]) -> None:
    result, told = judge(site, others)
    assert isinstance(result, Preparation), result
    assert told == [{"exit_code": 0, "line": ""}] * 3
    said = capsys.readouterr().err
    assert "nodes: 2 alike" in said
    assert "beta" in said
    outcome = load_outcome(site.paths.outcome)
    assert outcome is not None
    assert "2 alike" in outcome.observed["nodes"]
    facts = json.loads(site.paths.node_facts.read_text())
    assert [node["node"] for node in facts] == [0, 1]
    assert facts[0]["data_key"] == facts[1]["data_key"]


def test_what_is_observed_later_does_not_push_it_out(site: Site, others: Others) -> None:
    judge(site, others)
    site.chronicle.note(observed={"device": "cpu"})
    outcome = load_outcome(site.paths.outcome)
    assert outcome is not None
    assert list(outcome.observed) == ["nodes", "device"]


def test_unlike_nodes_end_with_the_same_code(site: Site, others: Others) -> None:
    facts = others.reports[2]["facts"]
    facts |= {"commit": "f" * 40, "versions": {**facts["versions"], "torch": "1.0"}}
    result, told = judge(site, others)
    assert isinstance(result, TopologyError)
    assert result.exit_code == ExitCode.WRONG_TOPOLOGY
    assert [problem.where for problem in result.problems][-1] == "torch"
    assert "1.0 on node 1 (beta)" in str(result)
    assert {one["exit_code"] for one in told} == {5}
    assert "the nodes cannot train together (commit, torch)" in told[0]["line"]
    assert "\n" not in told[0]["line"]
    assert site.paths.node_facts.exists()


def test_a_node_that_is_not_there_is_named(site: Site, others: Others) -> None:
    """A rank of this node, and one of the other's: who is missing is told by node, with the rank."""
    del others.reports[1], others.reports[3]
    others.reports[2]["facts"]["manifest_sha256"] = "0" * 64
    result, told = judge(site, others, patience=1.0)
    assert isinstance(result, TopologyError)
    assert result.exit_code == ExitCode.RUN_FAILED
    said = [str(problem) for problem in result.problems]
    assert said[:2] == [
        "node 0: nothing was heard of it within 1 s (rank 1)",
        "node 1: nothing was heard of it within 1 s (rank 3)",
    ]
    assert said[2].startswith("manifest: "), "what differs among the others is told as well"
    assert told[0]["exit_code"] == ExitCode.RUN_FAILED


def test_a_node_that_cannot_is_told_by_its_own_words(site: Site, others: Others) -> None:
    failure = {"node": 1, "host": "beta", "exit_code": 2, "error": "rows.jsonl: there is no such file\nhint: copy it"}
    others.reports |= {2: failure, 3: failure}
    result, told = judge(site, others)
    assert isinstance(result, TopologyError)
    assert [str(problem) for problem in result.problems] == [
        "node 1 (beta): rows.jsonl: there is no such file",
        "node 1 (beta): hint: copy it",
    ]
    assert (result.exit_code, {one["exit_code"] for one in told}) == (2, {2})


def refuse() -> Preparation:
    raise InputError("there is no tokenizer", hint="copy it")


def test_what_all_nodes_lack_is_told_once_and_plainly(site: Site, others: Others) -> None:
    error = str(InputError("there is no tokenizer", hint="copy it"))
    others.reports = {rank: {"node": rank // 2, "host": "a", "exit_code": 2, "error": error} for rank in (1, 2, 3)}
    result, told = judge(site, others, find_data=refuse)
    assert isinstance(result, InputError)
    assert str(result) == error
    assert {one["exit_code"] for one in told} == {2}


def test_what_this_node_lacks_ends_the_others(site: Site, others: Others) -> None:
    result, told = judge(site, others, find_data=refuse)
    assert isinstance(result, TopologyError)
    assert "there is no tokenizer" in str(result)
    assert (result.exit_code, {one["exit_code"] for one in told}) == (2, {2})


def test_our_own_bug_keeps_its_traceback(site: Site, others: Others) -> None:
    def break_down() -> Preparation:
        raise ZeroDivisionError("in here")

    told = others.play()
    with pytest.raises(ZeroDivisionError, match="in here"):
        site.check(find_data=break_down)
    assert [json.loads(future.result(20) or "{}")["exit_code"] for future in told.values()] == [1, 1, 1]


def test_another_version_that_tells_something_else(site: Site, others: Others) -> None:
    others.reports[2]["facts"] = {"versions": {"launcher": "9.0"}, "commit": "f00", "new": 1}
    result, _ = judge(site, others)
    assert isinstance(result, TopologyError)
    assert "node 1 (beta): it tells what this version does not know: its launcher is 9.0, commit f00" in str(result)
    assert result.exit_code == ExitCode.WRONG_TOPOLOGY


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_the_others_obey_and_say_one_line_a_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, lines: int
) -> None:
    server = TCPStore("127.0.0.1", site.port, is_master=True, timeout=timedelta(seconds=20))

    def play_first() -> None:
        store = site.connect()
        tell_all(store, hear_all(store, 2, 20), json.dumps({"exit_code": 5, "line": "look there"}))

    thread = threading.Thread(target=play_first)
    thread.start()
    for name, value in {"RANK": "1", "LOCAL_RANK": local_rank, "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError) as caught:
        site.check()
    thread.join(20)
    assert (caught.value.exit_code, str(caught.value)) == (ExitCode.WRONG_TOPOLOGY, "")
    assert capsys.readouterr().err.count(f"node 1 ({socket.gethostname()}): look there") == lines
    del server


@pytest.mark.parametrize("places", [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}])
def test_one_node_meets_nobody(site: Site, monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> None:
    """Nor do copies that nobody told apart: whoever starts them refuses them."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody listens there
    assert site.check(patience=0.1).expert == "neo4j"
    assert not site.paths.node_facts.exists()


def test_facts_of_a_node(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told = NodeReport.model_validate(tell_own_facts(site, monkeypatch))
    facts = told.facts
    assert facts is not None
    assert (facts.node, facts.num_ranks, facts.host) == (1, 1, socket.gethostname())
    assert facts.device.endswith("CPU")
    assert facts.data_needed_bytes > 0, "nothing is prepared in this folder"
    assert {"torch", "python", "launcher"} <= facts.versions.keys()
    assert min(facts.run_free_bytes, facts.data_free_bytes, facts.ram_bytes) > 0


def test_the_gpu_is_the_one_that_is_there(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By nvidia-smi of this node, whatever the plan is for."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *driver_version*) echo 570.86;; '
        "*) echo '0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, Disabled';; esac\n"
    )
    program.chmod(0o755)
    planned = replace(site, plan=vary(site.plan, {"hardware.gpu": find_gpu("a100").model_dump()}))
    facts = NodeReport.model_validate(tell_own_facts(planned, monkeypatch)).facts
    assert facts is not None
    assert (facts.device, facts.driver) == (find_gpu("h100").title, "570.86")
    assert capsys.readouterr().err == ""


def test_any_changed_file_changes_the_code(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    files = [tmp_path / "one.py", tmp_path / "deep/two.py"]
    for file in files:
        file.write_text("x = 1\n")
    before = hash_code(tmp_path)
    assert hash_code(tmp_path) == before
    files[1].write_text("x = 2\n")
    changed = hash_code(tmp_path)
    files[1].write_text("x = 1\n")
    files[1].rename(tmp_path / "two.py")
    assert len({before, changed, hash_code(tmp_path)}) == 3
