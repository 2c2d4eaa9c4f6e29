"""The preflight of one rank, by a real store; threads play the other nodes."""

from __future__ import annotations

import json
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

from launcher.core.errors import ExitCode, InputError, LauncherError, TopologyError
from launcher.core.run_paths import RunPaths
from launcher.corpus.spec import PreparationSpec, make_preparation_spec
from launcher.corpus.tokenizer import load_tokenizer
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.plan.model import Plan
from launcher.request.request import Request, base_folders, plan_request
from launcher.runs.record import load_outcome
from launcher.training.cluster.node_info import hash_code
from launcher.training.cluster.preflight import NodeReport, check_nodes
from launcher.training.runtime import rendezvous
from launcher.training.runtime.rendezvous import gather, reply, send
from launcher.training.runtime.run_record import RunRecorder
from tests.conftest import ROOT
from tests.fake_nvml import FakeGpu, install_nvml
from tests.training.builders import vary

Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Site:
    """This node: a run and the port of the store."""

    plan: Plan
    paths: RunPaths
    recorder: RunRecorder
    port: int

    def connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=20))

    def find_data(self) -> PreparationSpec:
        folder = Path(self.plan.data.folder)
        return make_preparation_spec(self.plan, folder, load_tokenizer(self.plan.base.name, base_folders(folder)))

    def check(self, find_data: Callable[[], PreparationSpec] | None = None, patience: float = 20.0) -> PreparationSpec:
        return check_nodes(self.plan, self.paths, self.recorder, find_data or self.find_data, patience)


@pytest.fixture(scope="module")
def smoke_plan() -> Plan:
    return plan_request(Request(expert=str(ROOT / "experts/neo4j/manifest.json"), profile="smoke")).plan


@pytest.fixture
def site(smoke_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return two nodes of two ranks; this process is rank 0 unless a test changes that."""
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(rendezvous, "_hosted", [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    places |= {"GROUP_WORLD_SIZE": 2, "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    paths = RunPaths(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    return Site(plan=smoke_plan, paths=paths, recorder=RunRecorder(paths, is_main=True), port=port)


def send_own_report(site: Site, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the report of a second node's first rank, sent to a rank 0 that a thread plays."""
    report: dict[str, Any] = {}
    server = TCPStore("127.0.0.1", site.port, is_master=True, timeout=timedelta(seconds=20))

    def play_first() -> None:
        store = site.connect()
        messages = gather(store, 2, 20)
        report.update(json.loads(messages[0].text))
        reply(store, messages, json.dumps({"exit_code": 0, "line": ""}))

    changed = {"RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1"}
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        for name, value in changed.items():
            patch.setenv(name, value)
        first = pool.submit(play_first)
        assert site.check().expert == "neo4j"
        first.result(120)
    del server
    return report


class Others:
    """Ranks 1 to 3: the second rank of this node, and both ranks of the other."""

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
        return send(self._site.connect(), rank, json.dumps(report), 20)


@pytest.fixture
def others(site: Site, monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(site, send_own_report(site, monkeypatch)["facts"])


def judge(site: Site, others: Others, **more: Any) -> tuple[PreparationSpec | LauncherError, list[dict[str, Any]]]:
    """Return the result of rank 0, and the verdicts that the other ranks receive."""
    futures = others.play()
    result: PreparationSpec | LauncherError
    try:
        result = site.check(**more)
    except LauncherError as error:
        result = error
    return result, [json.loads(future.result(120) or "{}") for future in futures.values()]


def test_equal_nodes_train(site: Site, others: Others, capsys: pytest.CaptureFixture[str]) -> None:
    result, verdicts = judge(site, others)
    assert isinstance(result, PreparationSpec), result
    assert verdicts == [{"exit_code": 0, "line": ""}] * 3
    said = capsys.readouterr().err
    assert "nodes: 2 equal" in said
    assert "beta" in said
    outcome = load_outcome(site.paths.outcome)
    assert outcome is not None
    assert "2 equal" in outcome.observed["nodes"]
    facts = json.loads(site.paths.node_facts.read_text())
    assert [node["node"] for node in facts] == [0, 1]
    assert facts[0]["data_key"] == facts[1]["data_key"]


def test_later_observations_are_added(site: Site, others: Others) -> None:
    judge(site, others)
    site.recorder.update(observed={"device": "cpu"})
    outcome = load_outcome(site.paths.outcome)
    assert outcome is not None
    assert list(outcome.observed) == ["nodes", "device"]


def test_different_nodes_end_with_the_same_exit_code(site: Site, others: Others) -> None:
    facts = others.reports[2]["facts"]
    facts |= {"commit": "f" * 40, "versions": {**facts["versions"], "torch": "1.0"}}
    result, verdicts = judge(site, others)
    assert isinstance(result, TopologyError)
    assert result.exit_code == ExitCode.WRONG_TOPOLOGY
    assert [problem.where for problem in result.problems][-1] == "torch"
    assert "1.0 on node 1 (beta)" in str(result)
    assert {one["exit_code"] for one in verdicts} == {5}
    assert "the nodes cannot train together (commit, torch)" in verdicts[0]["line"]
    assert "\n" not in verdicts[0]["line"]
    assert site.paths.node_facts.exists()


def test_missing_ranks_are_named(site: Site, others: Others) -> None:
    """One rank of this node and one of the other are missing."""
    del others.reports[1], others.reports[3]
    others.reports[2]["facts"]["manifest_sha256"] = "0" * 64
    result, verdicts = judge(site, others, patience=1.0)
    assert isinstance(result, TopologyError)
    assert result.exit_code == ExitCode.RUN_FAILED
    said = [str(problem) for problem in result.problems]
    assert said[:2] == [
        "node 0: no report within 1 s (rank 1)",
        "node 1: no report within 1 s (rank 3)",
    ]
    assert said[2].startswith("manifest: "), "differences between the others are listed as well"
    assert verdicts[0]["exit_code"] == ExitCode.RUN_FAILED


def test_the_error_of_a_failed_node_is_shown(site: Site, others: Others) -> None:
    failure = {"node": 1, "host": "beta", "exit_code": 2, "error": "rows.jsonl: there is no such file\nhint: copy it"}
    others.reports |= {2: failure, 3: failure}
    result, verdicts = judge(site, others)
    assert isinstance(result, TopologyError)
    assert [str(problem) for problem in result.problems] == [
        "node 1 (beta): rows.jsonl: there is no such file",
        "node 1 (beta): hint: copy it",
    ]
    assert (result.exit_code, {one["exit_code"] for one in verdicts}) == (2, {2})


def refuse() -> PreparationSpec:
    raise InputError("there is no tokenizer", hint="copy it")


def test_an_error_of_all_nodes_is_shown_once(site: Site, others: Others) -> None:
    error = str(InputError("there is no tokenizer", hint="copy it"))
    others.reports = {rank: {"node": rank // 2, "host": "a", "exit_code": 2, "error": error} for rank in (1, 2, 3)}
    result, verdicts = judge(site, others, find_data=refuse)
    assert isinstance(result, InputError)
    assert str(result) == error
    assert {one["exit_code"] for one in verdicts} == {2}


def test_an_error_of_node_0_ends_the_others(site: Site, others: Others) -> None:
    result, verdicts = judge(site, others, find_data=refuse)
    assert isinstance(result, TopologyError)
    assert "there is no tokenizer" in str(result)
    assert (result.exit_code, {one["exit_code"] for one in verdicts}) == (2, {2})


def test_a_bug_keeps_its_traceback(site: Site, others: Others) -> None:
    def break_down() -> PreparationSpec:
        raise ZeroDivisionError("in here")

    futures = others.play()
    with pytest.raises(ZeroDivisionError, match="in here"):
        site.check(find_data=break_down)
    assert [json.loads(future.result(120) or "{}")["exit_code"] for future in futures.values()] == [1, 1, 1]


def test_a_report_of_another_version_is_refused(site: Site, others: Others) -> None:
    others.reports[2]["facts"] = {"versions": {"launcher": "9.0"}, "commit": "f00", "new": 1}
    result, _ = judge(site, others)
    assert isinstance(result, TopologyError)
    assert "node 1 (beta): its report cannot be parsed by this version: its launcher is 9.0, commit f00" in str(result)
    assert result.exit_code == ExitCode.WRONG_TOPOLOGY


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_other_ranks_follow_the_verdict_and_print_one_line_per_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, lines: int
) -> None:
    server = TCPStore("127.0.0.1", site.port, is_master=True, timeout=timedelta(seconds=20))

    def play_first() -> None:
        store = site.connect()
        reply(store, gather(store, 2, 20), json.dumps({"exit_code": 5, "line": "look there"}))

    thread = threading.Thread(target=play_first)
    thread.start()
    for name, value in {"RANK": "1", "LOCAL_RANK": local_rank, "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError) as caught:
        site.check()
    thread.join(120)
    assert (caught.value.exit_code, str(caught.value)) == (ExitCode.WRONG_TOPOLOGY, "")
    assert capsys.readouterr().err.count(f"node 1 ({socket.gethostname()}): look there") == lines
    del server


@pytest.mark.parametrize("places", [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}])
def test_a_single_node_is_not_checked(site: Site, monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> None:
    """Nor are processes without a rank, which build_accelerator refuses."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")  # no server there
    assert site.check(patience=0.1).expert == "neo4j"
    assert not site.paths.node_facts.exists()


def test_node_facts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    report = NodeReport.model_validate(send_own_report(site, monkeypatch))
    facts = report.facts
    assert facts is not None
    assert (facts.node, facts.num_ranks, facts.host) == (1, 1, socket.gethostname())
    assert facts.device.endswith("CPU")
    assert facts.data_needed_bytes > 0, "nothing is prepared in this folder"
    assert {"torch", "python", "launcher"} <= facts.versions.keys()
    assert min(facts.run_free_bytes, facts.data_free_bytes, facts.ram_bytes) > 0


def test_the_gpu_is_read_from_nvml(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU of this node counts, not that of the plan."""
    install_nvml(monkeypatch, FakeGpu("NVIDIA H100 80GB HBM3", 81559, 81000), driver="570.86")
    planned = replace(site, plan=vary(site.plan, {"hardware.gpu": lookup_gpu("a100").model_dump()}))
    facts = NodeReport.model_validate(send_own_report(planned, monkeypatch)).facts
    assert facts is not None
    assert (facts.device, facts.driver) == (lookup_gpu("h100").title, "570.86")
    assert capsys.readouterr().err == ""


def test_any_changed_file_changes_the_code_hash(tmp_path: Path) -> None:
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
