"""Checks of an expert on this machine, on given facts and on real files of rows and weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.doctor.expert import ExpertFacts, RowFacts, check_expert, probe_expert
from launcher.analysis.doctor.findings import Finding
from launcher.core.units import GIB
from launcher.corpus.audit import Audit, SplitAudit
from launcher.corpus.store import AUDIT_FILE, STORE_FILE, StoreManifest
from launcher.plan import Plan
from launcher.request.request import Request, plan_request
from tests.conftest import Tree, WriteManifest
from tests.unit.analysis.doctor.builders import list_issues, only, plan_for

ROWS = RowFacts(file="train.jsonl", num_rows=35_000, is_counted=True, stated=35_946)


def facts(plan: Plan | None = None, **changes: object) -> ExpertFacts:
    healthy = ExpertFacts(
        plan=plan or plan_for("rtx4090"),
        rows=ROWS,
        weights="here",
        weights_at="models/Qwen3-0.6B",
        weights_free_bytes=500 * GIB,
        runs_free_bytes=500 * GIB,
        shm_free_bytes=64 * GIB,
        is_offline=False,
    )
    return replace(healthy, **changes)  # type: ignore[arg-type]


def judge(plan: Plan | None = None, **changes: object) -> list[Finding]:
    return list(check_expert(facts(plan, **changes)))


def test_trainable_expert_has_no_issues() -> None:
    findings = judge()
    assert list_issues(findings) == []
    found = {finding.subject: finding.found for finding in findings}
    assert found["workers"] == "2 loader workers, 8 cores"
    assert found["time"].startswith("about ")
    assert "tokens/s (within about 40 %; not measured: this GPU" in found["time"]


def test_more_workers_than_cores_is_a_problem() -> None:
    plan = plan_for("rtx4090", overrides=("training.config.dataloader_num_workers=16",))
    finding = only(judge(plan))
    assert (finding.subject, finding.status) == ("workers", "problem")
    assert finding.found == "16 loader workers, 8 cores: 17 processes compete for them"
    assert finding.next_step == "--set training.config.dataloader_num_workers=7, or more cores"


@pytest.mark.parametrize(
    ("rows", "status", "found"),
    [
        (replace(ROWS, num_rows=12_000), "problem", "12,000 in train.jsonl, the manifest states 35,946"),
        (replace(ROWS, num_rows=90_000), "note", "90,000 in train.jsonl"),
        (replace(ROWS, num_rows=0), "problem", "0 in train.jsonl"),
        (replace(ROWS, num_rows=28_000, is_counted=False), None, ""),
        (replace(ROWS, stated=None, num_rows=3), None, ""),
        (RowFacts(file=None, num_rows=None, is_counted=False, stated=35_946), None, ""),
    ],
)
def test_row_count_is_compared_with_the_manifest(rows: RowFacts, status: str | None, found: str) -> None:
    findings = list_issues(judge(rows=rows))
    assert [(one.subject, one.status) for one in findings] == ([("rows", status)] if status else [])
    assert not findings or found in findings[0].found


def test_missing_weights_are_reported() -> None:
    assert list_issues(judge(weights="to download")) == []
    offline = only(judge(weights="to download", is_offline=True))
    assert (offline.subject, offline.status) == ("base", "problem")
    assert "1.1 GiB to download, and HF_HUB_OFFLINE forbids it" in offline.found
    full = only(judge(weights="to download", weights_free_bytes=GIB // 2))
    assert "export HF_HOME=DIR" in full.next_step
    assert "no weights (*.safetensors)" in only(judge(weights="no weights")).found


def test_batches_larger_than_shared_memory_are_a_problem() -> None:
    finding = only(judge(shm_free_bytes=1 << 18))
    assert (finding.subject, finding.status) == ("shared memory", "problem")
    assert finding.found.startswith("10 prefetched batches, ")
    assert list_issues(judge(shm_free_bytes=0, plan=plan_for(None))) == [], (
        "without workers no batch uses shared memory"
    )
    assert list_issues(judge(shm_free_bytes=None)) == []


def test_missing_space_for_checkpoints_is_a_problem() -> None:
    finding = only(judge(runs_free_bytes=1 << 20))
    assert (finding.subject, finding.status) == ("checkpoints", "problem")
    assert "--set training.config.save_total_limit=1" in finding.next_step
    assert list_issues(judge(runs_free_bytes=None)) == [], "a disk that does not respond is reported by another finding"


def test_missing_host_memory_for_saving_is_reported() -> None:
    poor = plan_for("rtx4090").hardware.model_copy(update={"ram_gib_per_node": 0.1})
    plan = plan_for("rtx4090").model_copy(update={"hardware": poor})
    finding = only(judge(plan))
    assert (finding.subject, finding.status) == ("CPU memory", "problem")
    assert "saving copies weights and optimizer states to CPU memory" in finding.matters
    close = plan.model_copy(update={"hardware": poor.model_copy(update={"ram_gib_per_node": 0.2})})
    assert only(judge(close)).status == "note"


def test_memory_of_other_processes_is_a_note() -> None:
    plan = plan_for("rtx4090")
    less = plan.memory.model_copy(update={"free_bytes": plan.memory.device_bytes - 6 * GIB})
    finding = only(judge(plan.model_copy(update={"memory": less})))
    assert (finding.subject, finding.status) == ("GPU memory", "note")
    assert "other processes use 6.0 GiB" in finding.matters


def test_little_spare_memory_names_the_first_oom_fallback() -> None:
    plan = plan_for("rtx4090")
    used = plan.memory.free_bytes - plan.memory.headroom_bytes
    tight = plan.memory.model_copy(update={"terms": (plan.memory.terms[0].model_copy(update={"num_bytes": used}),)})
    found = {one.subject: one.found for one in judge(plan.model_copy(update={"memory": tight}))}
    assert f"OOM fallback: {plan.oom_fallbacks[0].action}, " in found["GPU memory"]
    roomy = plan.memory.model_copy(update={"terms": plan.memory.terms[:1]})
    found = {one.subject: one.found for one in judge(plan.model_copy(update={"memory": roomy}))}
    assert "if it is too little" not in found["GPU memory"]


def test_hub_rows_are_counted_from_the_prepared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the expert's sample is in the same directory and is ignored: it is another dataset."""
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path))
    planned = plan_request(Request(expert="neo4j", gpu="rtx4090", profile="full"))
    assert probe_expert(planned, tmp_path, {}).rows.file is None
    root = tmp_path / "datasets_optimized/neo4j"
    sources = {"aa": "hub:neo4j/text2cypher-2025v1:train:f00*1", "bb": "sha256:b1a0*1"}
    for name, source in sources.items():
        write_store(root / name, source, num_rows=1234 if name == "aa" else 99)
    (root / "rubbish").mkdir()
    rows = probe_expert(planned, tmp_path, {}).rows
    assert rows == RowFacts(file=str(root / "aa"), num_rows=1234, is_counted=True, stated=35_946)


def write_store(folder: Path, source: str, num_rows: int) -> None:
    folder.mkdir(parents=True)
    counts = {name: 0 for name, kind in SplitAudit.model_fields.items() if kind.annotation in (int, float)}
    lists: dict[str, object] = {"rejected": {}, "rejected_places": {}, "histogram": ()}
    split = SplitAudit.model_validate({**counts, **lists, "num_rows": num_rows})
    audit = Audit(template="chatml", loss_on="all", is_packed=True, splits={"train": split}, sample=(), notes=())
    (folder / AUDIT_FILE).write_text(audit.model_dump_json())
    manifest = StoreManifest(expert="neo4j", key=folder.name * 32, parts={"data (train)": source}, files={})
    (folder / STORE_FILE).write_text(manifest.model_dump_json())


def test_rows_and_weights_are_found_on_disk(tmp_path: Path, write_manifest: WriteManifest) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": "q", "cypher": "c"}) + "\n" for _ in range(50))
    )
    dataset = {"path": "rows.jsonl", "format": "jsonl", "splits": {"train": 500}}
    changes = {f"training.dataset.{key}": value for key, value in dataset.items()}
    manifest = write_manifest(
        {**changes, "training.dataset.field_mapping": {"instruction": "question", "response": "cypher"}}
    )
    planned = plan_request(Request(expert=str(manifest), gpu="rtx4090", profile="full"))
    found = probe_expert(planned, tmp_path / "runs", {"HF_HUB_OFFLINE": "1"})
    assert found.rows == RowFacts(file=str(tmp_path / "rows.jsonl"), num_rows=50, is_counted=True, stated=500)
    assert (found.weights, found.is_offline) == ("to download", True)
    subjects = {one.subject for one in list_issues(check_expert(found))}
    assert subjects == {"rows", "base"}
    folder = tmp_path / planned.plan.base.name.rpartition("/")[2]
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert probe_expert(planned, tmp_path, {}).weights == "no weights"
    (folder / "model.safetensors").touch()
    assert probe_expert(planned, tmp_path, {}).weights == "here"
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows.parquet")
    assert probe_expert(planned, tmp_path, {}).rows.file is None


def test_smoke_run_without_sample_or_rows_is_a_problem(tmp_path: Path, neo4j_tree: Tree) -> None:
    neo4j_tree = copy.deepcopy(neo4j_tree)
    neo4j_tree["training"]["dataset"] = {"path": "rows.jsonl"}
    (tmp_path / "manifest.json").write_text(json.dumps(neo4j_tree))
    planned = plan_request(Request(expert=str(tmp_path / "manifest.json"), profile="smoke"))
    findings = {one.subject: one for one in check_expert(probe_expert(planned, tmp_path / "runs"))}
    assert findings["rows"].status == "problem"
    assert "sample/train.jsonl" in findings["rows"].found
    assert findings["base"].found == "launcher/tiny in the package"
