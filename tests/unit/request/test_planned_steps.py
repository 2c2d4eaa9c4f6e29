"""The plan has the steps that the training will have: system prompt, template and validation split are counted."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.launch.prepare_data import prepare_planned
from launcher.plan.estimate.dataset_size import estimate_prepared_bytes
from launcher.request.request import PlannedRun, Request, plan_request

pytestmark = pytest.mark.long

SYSTEM_PROMPT = "You route support tickets of a shop. Answer with one JSON object and nothing else. " * 3
WORDS = ["order", "refund", "parcel", "invoice", "late", "broken", "password", "login", "please", "since", "monday"]
LORA = {"method": "sft", "adapter_type": "lora", "rank": 8, "alpha": 16, "target_modules": ["q_proj"]}


@pytest.fixture(autouse=True)
def _data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path / "data"))


def write_expert(folder: Path, num_rows: int, **config: Any) -> Path:
    shutil.copytree(TINY_BASE_FOLDER, folder / "base")
    draw = random.Random(0)
    rows = [
        {"question": f"{number} {' '.join(draw.choices(WORDS, k=draw.randint(3, 40)))}", "answer": draw.choice(WORDS)}
        for number in range(num_rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = {
        "name": "expert-tickets",
        "version": "0.1.0",
        "base_models": [{"name": "base", "prompt_template": "chatml"}],
        "training": {
            "dataset": {
                "path": "rows.jsonl",
                "field_mapping": {"instruction": "question", "response": "answer"},
                "system_prompt": SYSTEM_PROMPT,
            },
            "config": {**LORA, "epochs": 2, "learning_rate": 1e-4, "batch_size": 4, "max_seq_length": 512, **config},
        },
    }
    file = folder / "manifest.json"
    file.write_text(json.dumps(manifest))
    return file


def count_trained_steps(planned: PlannedRun) -> int:
    """Return the steps of a training: two epochs of whole batches of the prepared sequences."""
    store = prepare_planned(planned, lambda _: None, lambda _: None).store
    return 2 * -(-store.audit.splits["train"].num_packs // 4)


@pytest.mark.parametrize(
    "config", [{"packing": True}, {"packing": False}, {"packing": True, "evaluation_strategy": "no"}]
)
def test_steps_are_exact_where_all_rows_are_read(tmp_path: Path, config: dict[str, Any]) -> None:
    file = write_expert(tmp_path, 300, **config)
    planned = plan_request(Request(expert=str(file), gpu="rtx4090"))
    assert planned.plan.schedule.num_steps == count_trained_steps(planned)
    assert "tokens with the template" in planned.plan.data.basis


def test_mfu_counts_trained_positions_only(tmp_path: Path) -> None:
    """Only these pass through the head; before the rows are prepared, their share is that of the first rows."""
    file = write_expert(tmp_path, 300, packing=True, loss_on="completion")
    request = Request(expert=str(file), gpu="rtx4090")
    planned = plan_request(request)
    everything = plan_request(replace(request, overrides=("training.config.loss_on=all",)))
    prepare_planned(planned, lambda _: None, lambda _: None)
    first_rows, all_trained, prepared = (one.plan.speed.mfu for one in (planned, everything, plan_request(request)))
    assert first_rows is not None
    assert all_trained is not None
    assert first_rows < 0.9 * all_trained
    assert prepared == pytest.approx(first_rows, rel=0.01)


def test_truncated_and_unusable_rows_are_counted(tmp_path: Path) -> None:
    file = write_expert(tmp_path, 60, packing=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"question": "q", "answer": ""}\n' * 5)
    basis = plan_request(Request(expert=str(file), gpu="rtx4090")).plan.data.basis
    assert "; 5 of them cannot be used" in basis
    assert "truncated" not in basis
    (tmp_path / "base/tokenizer.json").unlink()
    short = Request(expert=str(file), gpu="rtx4090", overrides=("training.config.max_seq_length=16",))
    basis = plan_request(short).plan.data.basis
    assert "of about 16 tokens with the template; about 5 of them cannot be used; about 5" in basis
    assert "of them are truncated to max_seq_length" in basis


def test_steps_of_many_rows_are_close(tmp_path: Path) -> None:
    planned = plan_request(Request(expert=str(write_expert(tmp_path, 3000, packing=True)), gpu="rtx4090"))
    assert planned.plan.schedule.num_steps == pytest.approx(count_trained_steps(planned), rel=0.05)


def test_template_and_system_prompt_are_counted_without_the_tokenizer(tmp_path: Path) -> None:
    """By characters: the real tokenizer of this base makes nearly twice as many tokens of such words."""
    file = write_expert(tmp_path, 300, packing=True)
    exact = plan_request(Request(expert=str(file), gpu="rtx4090")).plan
    (tmp_path / "base/tokenizer.json").unlink()
    system_tokens = len(SYSTEM_PROMPT) / 3.6
    rows = plan_request(Request(expert=str(file), gpu="rtx4090")).plan
    assert system_tokens + 15 < rows.data.mean_tokens < exact.data.mean_tokens
    assert "about" in rows.data.basis


def test_prepared_data_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_expert(tmp_path, 3000, packing=True)
    request = Request(expert=str(file), gpu="rtx4090")
    steps = count_trained_steps(plan_request(request))
    monkeypatch.setattr("launcher.corpus.row_count._count_first_rows", lambda *_: pytest.fail("rows were read"))
    plan = plan_request(request).plan
    assert plan.schedule.num_steps == steps
    assert plan.data.basis.startswith("prepared data: 2,")
    monkeypatch.undo()
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path / "data"))
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"question": "one more", "answer": "yes"}\n')
    assert plan_request(request).plan.data.basis.startswith("read from rows.jsonl: about ")


@pytest.mark.parametrize("max_rows", [30, 900])
def test_max_rows_uses_the_first_rows(tmp_path: Path, max_rows: int) -> None:
    expert = write_expert(tmp_path, 2000)
    planned = plan_request(
        Request(expert=str(expert), profile="full", overrides=(f"training.dataset.max_rows={max_rows}",))
    )
    store = prepare_planned(planned, lambda _: None, lambda _: None).store
    counts = {name: split.num_rows for name, split in store.audit.splits.items()}
    assert sum(counts.values()) == max_rows
    rows = [row for split in store.splits for pack in store.open_split(split) for row in pack.rows.tolist()]
    assert sorted(rows) == list(range(1, max_rows + 1))
    assert planned.plan.data.num_rows == max_rows
    assert f"the first {max_rows} rows (max_rows)" in planned.plan.data.basis
    assert planned.plan.schedule.num_steps == pytest.approx(count_trained_steps(planned), rel=0.03)


def test_max_rows_beyond_the_file_changes_nothing(tmp_path: Path) -> None:
    expert = write_expert(tmp_path, 50)
    planned = plan_request(Request(expert=str(expert), profile="full", overrides=("training.dataset.max_rows=51",)))
    assert planned.plan.data.num_rows == 50
    assert "50 rows" in planned.plan.data.basis


def test_disk_space_of_the_plan_is_that_of_the_prepared_data(tmp_path: Path) -> None:
    planned = plan_request(Request(expert=str(write_expert(tmp_path, 3000)), gpu="rtx4090"))
    assert planned.plan.data.num_rows is not None
    predicted = estimate_prepared_bytes(planned.plan.data.num_rows, planned.plan.data.mean_tokens)
    store = prepare_planned(planned, lambda _: None, lambda _: None).store
    written = sum(file.stat().st_size for file in store.folder.glob("*.arrow"))
    assert predicted == pytest.approx(written, rel=0.1)
