"""The comparison with other tools gives them the same training, and summarizes its rows correctly."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.peers.peer_training import check_unsloth_packing, make_lora_settings, make_settings
from benchmarks.peers.quality import Comparison, make_batches, print_table
from launcher.request.request import Request, plan_request

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")


@pytest.mark.parametrize(
    ("rows_per_step", "longest", "max_tokens", "split", "steps"),
    [
        (48.2, 300, 16384, (48, 1), 90),
        (48.2, 2048, 16384, (7, 7), 89),
        (11.41, 3371, 16384, (4, 3), 86),  # 12 rows per step would be five percent more training
        (5.0, 2048, 1024, (1, 5), 90),  # a row that is longer than the limit
        (0.4, 100, 1024, (1, 1), 36),
    ],
)
def test_as_many_rows_are_trained_as_by_us(
    rows_per_step: float, longest: int, max_tokens: int, split: tuple[int, int], steps: int
) -> None:
    overrides = ("training.config.learning_rate=3e-4", "training.config.seed=7", "training.config.warmup_ratio=0.1")
    plan = plan_request(Request(expert="neo4j", gpu="h200", overrides=overrides, profile="full")).plan
    settings = make_settings(plan, num_steps=90, rows_per_step=rows_per_step, longest=longest, max_tokens=max_tokens)
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == split
    assert [settings[name] for name in ("learning_rate", "seed", "max_steps")] == [3e-4, 7, steps]
    assert settings["warmup_steps"] == math.ceil(0.1 * steps)
    assert settings["bf16"] is True
    assert make_lora_settings(plan)["r"] == plan.adapter.rank


@pytest.mark.parametrize(
    ("backend", "varlen", "is_slow"), [("sdpa", None, True), ("xformers", None, False), ("sdpa", 1, False)]
)
def test_unsloth_is_not_measured_without_attention_for_packed_documents(
    monkeypatch: pytest.MonkeyPatch, backend: str, varlen: int | None, is_slow: bool
) -> None:
    dispatch = SimpleNamespace(select_attention_backend=lambda **_: backend, _TORCH_VARLEN_ATTN=varlen)
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "unsloth.utils", SimpleNamespace(attention_dispatch=dispatch))
    if is_slow:
        with pytest.raises(RuntimeError, match="neither flash-attn nor xformers"):
            check_unsloth_packing()
    else:
        check_unsloth_packing()


def test_batches_hold_every_document_and_few_tokens() -> None:
    documents = [{"input_ids": [0] * length} for length in (5000, 10, 2000, 2000, 2000, 1)]
    assert [[len(row["input_ids"]) for row in batch] for batch in make_batches(documents)] == [
        [1, 10],
        [2000, 2000],
        [2000],
        [5000],
    ]


def test_table_pools_answers_of_seeds_and_shows_costs_only_of_runs_without_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"base": "B", "epochs": 3, "expert": "sql", "main_check": "result", "peak_gib": 2.0}
    rows = [
        {**shared, "tool": "launcher", "held_out_loss": 0.1, "checks": {"result": [80, 100]}, "ran_alone": True}
        | {"seconds": 30.0, "train_seconds": 20.0, "kilojoules": 4.0, "predicted_gib": 2.1},
        {**shared, "tool": "launcher", "held_out_loss": 0.3, "checks": {"result": [60, 100]}, "ran_alone": False}
        | {"seconds": 900.0, "train_seconds": 800.0, "predicted_gib": 2.1},
        {**shared, "tool": "trl", "held_out_loss": 0.2, "checks": {"result": [0, 0]}, "ran_alone": False},
        {**shared, "tool": "trl", "held_out_loss": 0.4, "checks": {"result": [1, 4]}, "epochs": 1},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    print_table(argparse.Namespace(rows=path))
    shorter, ours, trl = capsys.readouterr().out.splitlines()[2:]
    assert ours == (
        "| B | sql | 3 | launcher | 0.2000 ± 0.1414 | result, 2 x 100 | 70.0% (63.3% to 75.9%) | 30 s | 20 s | 4.0 kJ "
        "| 2.00 (2.10) GiB |"
    )
    assert shorter.startswith("| B | sql | 1 | trl | 0.4000 | result, 1 x 4 | 25.0%")
    assert trl == "| B | sql | 3 | trl | 0.2000 | result, 1 x 0 | 0.0% (0.0% to 100.0%) |  |  |  | 2.00 GiB |"


def test_what_has_a_row_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql" / "sql").mkdir(parents=True)
    manifest = {"training": {"config": {"epochs": 3}}}
    (tmp_path / "sql" / "sql" / "manifest.json").write_text(json.dumps(manifest))
    shared = {"base": "B", "expert": "sql"}
    rows = [
        {**shared, "tool": "base", "seed": None, "epochs": None},
        {**shared, "tool": "launcher", "seed": 0, "epochs": 3},
        {**shared, "tool": "trl", "seed": 1, "epochs": 1},
        *({**shared, "tool": tool, "seed": 1, "epochs": 3} for tool in ("launcher", "trl")),
    ]
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = argparse.Namespace(
        base=Path("B"),
        work=tmp_path,
        out=out,
        tools=["launcher", "trl"],
        seeds=[0, 1, 2],
        jobs=1,
        peer_jobs=1,
        judge_jobs=1,
        one_at_a_time=True,
    )
    comparison, done = Comparison(arguments), []
    for name in ("_train_and_judge", "_judge"):
        monkeypatch.setattr(comparison, name, lambda _expert, tool, seed, name=name: done.append((name, tool, seed)))
    for seed in arguments.seeds:
        comparison.compare("sql", seed)
    assert sorted(done) == [
        ("_train_and_judge", "launcher", 2),
        ("_train_and_judge", "trl", 0),
        ("_train_and_judge", "trl", 2),
    ]
