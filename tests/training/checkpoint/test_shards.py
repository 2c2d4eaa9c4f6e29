"""Sharded checkpoints of full fine-tuning: as exact as gathered ones, without the whole state in host memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from launcher.core.errors import RunFailedError
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.runs.checkpoints import BestState, Checkpoint, find_newest, read_checkpoint
from launcher.training.checkpoint import shards, snapshot, weights
from launcher.training.checkpoint.progress import compute_progress
from launcher.training.checkpoint.shards import OPTIMIZER, WEIGHTS, ShardWriter, TensorShards
from launcher.training.checkpoint.snapshot import restore
from launcher.training.engine.run import TrainingRun
from tests.training.builders import adapt, build, trained_weights, vary
from tests.training.checkpoint.test_resume import SAVING, cut, go

SHARD_BYTES = 10_000  # a checkpoint of the tests has 30 times as much


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(ShardWriter.__init__, "__defaults__", (SHARD_BYTES,))


@pytest.fixture
def sharded(plan: Plan) -> Plan:
    return vary(plan, {**adapt("full"), **SAVING, "shards_checkpoints": True})


def read_model(run: TrainingRun) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(run.paths.adapter.glob("*.safetensors")):
        found |= load_file(file)
    return found


def newest(run: TrainingRun) -> Checkpoint:
    checkpoint, damaged = find_newest(run.paths)
    assert checkpoint is not None
    assert not damaged
    return checkpoint


def test_a_run_resumed_from_shards_equals_a_gathered_one(sharded: Plan, store: Store, tmp_path: Path) -> None:
    gathered, _ = go(vary(sharded, {"shards_checkpoints": False}), store, tmp_path / "gathered")
    cut(sharded, store, tmp_path / "cut", 5)
    run, first = go(sharded, store, tmp_path / "cut")
    assert first == 4
    assert newest(run).manifest.sharded
    assert not newest(gathered).manifest.sharded
    assert len(list(newest(run).folder.glob("shard-*.safetensors"))) > 10
    expected, actual = read_model(gathered), read_model(run)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("later", [True, False])
def test_either_form_resumes_from_the_other(sharded: Plan, store: Store, tmp_path: Path, later: bool) -> None:
    whole, _ = go(sharded, store, tmp_path / "whole")
    cut(vary(sharded, {"shards_checkpoints": not later}), store, tmp_path / "cut", 5)
    run, first = go(vary(sharded, {"shards_checkpoints": later}), store, tmp_path / "cut")
    assert first == 4
    expected, actual = trained_weights(whole), trained_weights(run)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_the_model_is_exported_in_shards_that_transformers_loads(sharded: Plan, store: Store, tmp_path: Path) -> None:
    run, _ = go(sharded, store, tmp_path / "sharded")
    files = sorted(run.paths.adapter.glob("model-*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(run.paths.adapter)
    live = run.engine.module.model.state_dict()
    assert all(torch.equal(live[name], weight) for name, weight in loaded.state_dict().items())
    whole, _ = go(vary(sharded, {"shards_checkpoints": False}), store, tmp_path / "whole")
    for name in ("config.json", "generation_config.json"):
        assert (run.paths.adapter / name).read_text() == (whole.paths.adapter / name).read_text()


def test_a_model_that_transformers_saves_in_another_form_is_gathered(
    sharded: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the experts of some mixtures, which are stacked in memory and separate in files."""
    run = build(sharded, store, tmp_path)
    model = run.engine.module.model
    real = model.save_pretrained

    def merge(folder: str, state_dict: dict[str, Tensor]) -> None:
        if all(tensor.shape == (1,) for tensor in state_dict.values()):
            first, second, *_ = state_dict
            state_dict = {"merged": torch.cat([state_dict.pop(first), state_dict.pop(second)]), **state_dict}
        real(folder, state_dict=state_dict)

    monkeypatch.setattr(model, "save_pretrained", merge)
    weights.save_weights(run, run.paths.adapter)
    saved, live = load_file(run.paths.adapter / "model.safetensors"), trained_weights(run)
    assert all(torch.equal(saved[name.removeprefix("model.")], live[name]) for name in live)


def test_the_best_checkpoint_is_exported_from_its_shards(sharded: Plan, store: Store, tmp_path: Path) -> None:
    run = build(sharded, store, tmp_path)
    snapshot.write_sharded(run, compute_progress(run, 0), BestState(step=None, value=None, worse_in_a_row=0))
    before = {name: weight.clone() for name, weight in trained_weights(run).items()}
    with torch.no_grad():
        next(iter(run.engine.module.model.parameters())).add_(1.0)
    folder = run.paths.checkpoint(0)
    assert isinstance(read_checkpoint(folder), Checkpoint)
    weights.write_weights(run, weights.read_exact_weights(run, folder, sharded=True), run.paths.adapter)
    saved = read_model(run)
    assert all(torch.equal(saved[name.removeprefix("model.")], before[name]) for name in before)


def test_nothing_is_gathered_and_few_bytes_are_held(
    sharded: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("gathered")

    written: list[int] = []
    real = save_file

    def measure(tensors: dict[str, Tensor], *arguments: Any, **more: Any) -> None:
        written.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        real(tensors, *arguments, **more)

    for name in ("gather_weights", "gather_optimizer"):
        monkeypatch.setattr(snapshot, name, refuse)
    monkeypatch.setattr(weights, "gather_weights", refuse)
    monkeypatch.setattr(shards, "save_file", measure)
    run, _ = go(sharded, store, tmp_path)
    largest = max(weight.numel() * weight.element_size() for weight in trained_weights(run).values())
    files = [file.stat().st_size for file in newest(run).folder.glob("shard-*.safetensors")]
    limit = SHARD_BYTES + largest
    assert sum(files) > 10 * limit, "or this shows nothing"
    assert max(files) < limit + 4096  # the header
    assert written
    assert max(written) <= limit


def test_a_damaged_shard_is_found_and_the_previous_checkpoint_used(sharded: Plan, store: Store, tmp_path: Path) -> None:
    run, _ = go(sharded, store, tmp_path)
    folder = newest(run).folder
    file = sorted(folder.glob("shard-*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    checkpoint, damaged = find_newest(run.paths)
    assert checkpoint is not None
    assert (checkpoint.manifest.step, len(damaged)) == (4, 1)
    assert f"{file.name} was changed after writing" in damaged[0].reason
    file.unlink()
    assert len(find_newest(run.paths)[1]) == 1


def test_a_missing_shard_does_not_leave_random_weights(sharded: Plan, store: Store, tmp_path: Path) -> None:
    """A manifest that does not list a shard, as an edited one: the reader must notice the gap."""
    run, _ = go(sharded, store, tmp_path)
    checkpoint = newest(run)
    file = sorted(checkpoint.folder.glob("shard-*.safetensors"))[0]
    file.unlink()
    manifest = json.loads((checkpoint.folder / "checkpoint.json").read_text())
    del manifest["files"][file.name]
    (checkpoint.folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(RunFailedError, match="does not fit this training"):
        restore(run, newest(run))


def test_shards_that_do_not_cover_a_tensor_are_refused(tmp_path: Path) -> None:
    def write(name: str, value: Tensor, offset: int) -> None:
        info = json.dumps({"weights/a": {"saved_offsets": [offset]}})
        save_file({"weights/a": value}, tmp_path / name, metadata={"DCP_SHARDING_INFO": info, "format": "pt"})

    write("shard-00001-model-00001-of-00001.safetensors", torch.arange(4.0), 0)
    write("shard-00002-model-00001-of-00001.safetensors", torch.arange(4.0, 7.0), 4)
    source = TensorShards(tmp_path, WEIGHTS)
    (entry,) = source.entries()
    assert source.read(entry).tolist() == [0, 1, 2, 3, 4, 5, 6]
    write("shard-00002-model-00001-of-00001.safetensors", torch.arange(4.0, 7.0), 5)
    with pytest.raises(ValueError, match="are incomplete"):
        TensorShards(tmp_path, WEIGHTS).entries()
    assert TensorShards(tmp_path, OPTIMIZER).entries() == ()


@pytest.mark.parametrize("guard", ["stop", "continue"])
def test_a_full_disk_ends_the_run_or_not_and_keeps_the_last_checkpoint(
    sharded: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    real = shards._save_own

    def fill(engine: Any, folder: Path) -> None:
        real(engine, folder)
        if folder.name == ".step-000004.making":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_save_own", fill)
    plan = vary(sharded, {"guards.save_errors": guard})
    if guard == "stop":
        with pytest.raises(RunFailedError, match=r"step-000004 cannot be written: .*No space left"):
            go(plan, store, tmp_path)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002"]
        return
    run, _ = go(plan, store, tmp_path)
    assert sorted(path.name for path in run.paths.checkpoints.iterdir()) == ["step-000002", "step-000006"]


def test_old_checkpoints_are_deleted(sharded: Plan, store: Store, tmp_path: Path) -> None:
    run, _ = go(vary(sharded, {"schedule.save_total_limit": 1}), store, tmp_path)
    assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step-000006"]


def test_ranks_without_a_common_folder_are_refused_at_the_start(
    sharded: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(sharded, store, tmp_path)
    monkeypatch.setattr(shards, "run_together", lambda _, work: [work(), False])
    with pytest.raises(RunFailedError, match="rank 1 does not see") as refused:
        shards.check_shared(run.engine, run.paths.checkpoints)
    assert "--runs-dir" in refused.value.hint
    assert list(run.paths.checkpoints.iterdir()) == []
