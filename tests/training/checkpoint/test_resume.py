"""A resumed training is bit-exact: same data, same weights, same metrics as an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launcher.core import metrics
from launcher.core.errors import InputError, RunFailedError
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.request.request import Request, merge_requests
from launcher.runs.checkpoints import Checkpoint, find_newest, hash_file, read_checkpoint
from launcher.training.checkpoint.progress import compute_progress
from launcher.training.checkpoint.resume import ResumeOptions, resume_run
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best_checkpoint import BestCheckpoint
from launcher.training.observers.checkpointer import Checkpointer
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.observers.replay_check import ReplayCheck
from tests.training.builders import adapt, build, make_uneven_packs, split, trained_weights, vary, write_store

DROPOUT = {"adapter.dropout": 0.3}  # draws random numbers at every step
SAVING = {"schedule.max_steps": 6, "schedule.save_every_steps": 2, "schedule.save_total_limit": None}


class KilledError(Exception):
    pass


class Killer(Observer):
    """Ends the training at a step with an exception."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:  # noqa: ARG002
        if metrics.step == self._step:
            raise KilledError


def go(
    plan: Plan, store: Store, root: Path, kill_at: int = 0, *, is_checked: bool = False, **options: Any
) -> tuple[TrainingRun, int]:
    """Return the run, and how many steps were completed when it started."""
    run = build(plan, store, root, is_checked=is_checked)
    chosen = ResumeOptions(**options)
    resume_point = resume_run(run, chosen)
    step = resume_point.progress.step
    best = BestCheckpoint(plan.schedule)
    if resume_point.best is not None:
        best.restore(resume_point.best)
    saving = Checkpointer(best)
    replay = ReplayCheck(resume_point.metrics.rest, must_agree=chosen.verify_steps > 0)
    try:
        train(run, Observers([MetricsWriter(), replay, best, saving, Killer(kill_at)]), resume_point.progress)
    finally:
        saving.close()
    return run, step


def cut(plan: Plan, store: Store, root: Path, step: int) -> None:
    with pytest.raises(KilledError):
        go(plan, store, root, kill_at=step)


class FirstRuns:
    """Trains each plan once for all tests that compare with it, and once per step at which they continue it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._whole: dict[str, TrainingRun] = {}
        self._killed: dict[tuple[str, int], Path] = {}

    def train(self, plan: Plan) -> TrainingRun:
        """Return the uninterrupted run, which tests only read."""
        key = plan.model_dump_json()
        if key not in self._whole:
            folder = self._folder / f"whole-{len(self._whole)}"
            self._whole[key], _ = go(plan, self._store, folder, is_checked=True)  # the checks must change nothing
        return self._whole[key]

    def kill(self, plan: Plan, step: int, copy: Path) -> None:
        """Write a copy of the run that was killed at a step."""
        key = plan.model_dump_json(), step
        if key not in self._killed:
            self._killed[key] = self._folder / f"killed-{len(self._killed)}"
            cut(plan, self._store, self._killed[key], step)
        shutil.copytree(self._killed[key], copy, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def first(store: Store, tmp_path_factory: pytest.TempPathFactory) -> FirstRuns:
    return FirstRuns(store, tmp_path_factory.mktemp("first"))


def adapter_bytes(run: TrainingRun) -> list[bytes]:
    return [file.read_bytes() for file in sorted(run.paths.adapter.glob("*.safetensors"))]


def recorded_losses(run: TrainingRun) -> list[tuple[int, float]]:
    rows = load_metrics(run.paths.metrics)
    return [(row.step, row.values[metrics.TRAIN_LOSS]) for row in rows if metrics.TRAIN_LOSS in row.values]


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        *(("adamw_torch_fused", kind) for kind in ("lora", "dora", "ia3", "full")),
        ("adamw_torch", "lora"),
        ("sgd", "full"),
        *(pytest.param("adamw_torch", kind, marks=pytest.mark.slow) for kind in ("dora", "ia3", "full")),
        *(pytest.param("sgd", kind, marks=pytest.mark.slow) for kind in ("lora", "dora", "ia3")),
    ],
)
def test_resume_is_bit_exact(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, kind: str, optimizer: str
) -> None:
    dropout = DROPOUT if kind in ("lora", "dora") else {}
    varied = vary(plan, {**adapt(kind), **SAVING, **dropout, **split(2, 2), "optimizer.name": optimizer})
    whole = first.train(varied)
    first.kill(varied, 5, tmp_path / "cut")
    resumed, began = go(varied, store, tmp_path / "cut")
    assert began == 4
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert recorded_losses(resumed) == recorded_losses(whole), "each step once, each loss the same"
    assert (
        load_metrics(resumed.paths.metrics)[-1].values[metrics.TOKENS_SEEN]
        == (load_metrics(whole.paths.metrics)[-1].values[metrics.TOKENS_SEEN])
    )


@pytest.mark.usefixtures("_without_mkldnn")
@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_with_bf16_weights_is_bit_exact(
    plan: Plan, short_store: Store, tmp_path: Path, *, in_backward: bool
) -> None:
    """Stochastic rounding depends on seed, step and index only; the resumed run updates at the other time."""
    bf16 = dict.fromkeys((f"precision.{name}_dtype" for name in ("base", "trainable", "compute")), "bf16")
    fixed = {**adapt("full"), **SAVING, **bf16, **split(4, 1), "optimizer.max_grad_norm": None, "schedule.max_steps": 4}
    fixed["batch.sequence_length"] = 16
    first, second = (vary(plan, {**fixed, "optimizer.in_backward": value}) for value in (in_backward, not in_backward))
    whole, _ = go(first, short_store, tmp_path / "whole")
    cut(first, short_store, tmp_path / "cut", 3)
    resumed, began = go(second, short_store, tmp_path / "cut")
    assert began == 2
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert recorded_losses(resumed) == recorded_losses(whole)
    saved = AutoModelForCausalLM.from_pretrained(str(resumed.paths.adapter)).state_dict()
    for name, weight in trained_weights(resumed).items():
        assert torch.equal(saved[name.removeprefix("model.")], weight), "exported without another rounding"


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ("embed_tokens", "lm_head")},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
    ],
    ids=lambda options: "".join(map(str, options.values())),
)
def test_resume_with_options_of_lora_is_bit_exact(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, options: dict[str, Any]
) -> None:
    varied = vary(plan, {**adapt("lora", **options), **SAVING, **DROPOUT, **split(2, 2)})
    whole = first.train(varied)
    first.kill(varied, 5, tmp_path / "cut")
    resumed, began = go(varied, store, tmp_path / "cut")
    assert began == 4
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert recorded_losses(resumed) == recorded_losses(whole)


def test_another_decomposition_cannot_be_resumed(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PiSSA on other hardware may leave another rest of the base."""
    varied = vary(plan, {**adapt("lora", init_lora_weights="pissa_niter_4"), **SAVING})
    first.kill(varied, 5, tmp_path)
    monkeypatch.setattr("launcher.training.engine.run.set_seed", lambda seed: torch.manual_seed(seed + 1))
    with pytest.raises(InputError, match="its inputs changed since the last checkpoint") as caught:
        go(varied, store, tmp_path)
    assert "base weights" in str(caught.value)


def test_rng_state_matters(plan: Plan, store: Store, first: FirstRuns, tmp_path: Path) -> None:
    """The test above would not notice a lost RNG state if dropout drew no random numbers."""
    varied = vary(plan, {**SAVING, **DROPOUT})
    whole = first.train(varied)
    first.kill(varied, 5, tmp_path / "cut")
    run = build(varied, store, tmp_path / "cut")
    resume_point = resume_run(run, ResumeOptions())
    torch.manual_seed(999)
    train(run, Observers([MetricsWriter()]), resume_point.progress)
    assert recorded_losses(run)[:4] == recorded_losses(whole)[:4]
    assert recorded_losses(run)[4:] != recorded_losses(whole)[4:]


@pytest.mark.parametrize("step", [1, 2, 5, 6, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 4))])
def test_resume_after_two_kills_is_bit_exact(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, step: int
) -> None:
    varied = vary(plan, {**SAVING, "schedule.save_total_limit": 1})
    whole = first.train(varied)
    first.kill(varied, step, tmp_path / "cut")
    if step < 6:
        cut(varied, store, tmp_path / "cut", 6)
    resumed, _ = go(varied, store, tmp_path / "cut")
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert recorded_losses(resumed) == recorded_losses(whole)


def test_early_stopping_state_is_restored(plan: Plan, tmp_path: Path, store: Store) -> None:
    """Evaluations before the interruption count, and a run that was about to stop trains no further step."""
    del store
    held_out = write_store(tmp_path / "store", make_uneven_packs(), make_uneven_packs()[:2])
    changes = {
        "schedule.max_steps": 8,
        "schedule.evaluate_every_steps": 1,
        "schedule.save_every_steps": 1,
        "schedule.save_total_limit": None,
        "schedule.early_stopping_patience": 2,
        "schedule.load_best_model_at_end": True,
        "optimizer.learning_rate": 0.0,  # nothing gets better
    }
    varied = vary(plan, changes)
    whole, _ = go(varied, held_out, tmp_path / "whole")
    assert [step for step, _ in recorded_losses(whole)] == [1, 2, 3]
    cut(varied, held_out, tmp_path / "cut", 3)
    resumed, _ = go(varied, held_out, tmp_path / "cut")
    assert recorded_losses(resumed) == recorded_losses(whole)
    shutil.rmtree(resumed.paths.adapter)
    ended, began = go(varied, held_out, tmp_path / "cut")
    assert began == 3
    assert recorded_losses(ended) == recorded_losses(whole), "it was about to stop"
    assert adapter_bytes(ended) == adapter_bytes(whole)


def damage(folder: Path, how: str) -> None:
    weights = next(folder.glob("*model.safetensors"))
    content = bytearray(weights.read_bytes())
    if how == "truncated":
        weights.write_bytes(content[:-7])
    elif how == "flipped":
        content[-20] ^= 1
        weights.write_bytes(content)
    elif how == "deleted":
        (folder / "optimizer.safetensors").unlink()
    elif how == "no manifest":
        (folder / "checkpoint.json").unlink()
    elif how == "manifest torn":
        text = (folder / "checkpoint.json").read_text()
        (folder / "checkpoint.json").write_text(text[: len(text) // 2])
    elif how == "half renamed":
        folder.rename(folder.with_name(f".{folder.name}.making"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "bytes, not"),
        ("flipped", "was changed after writing"),
        ("deleted", "optimizer.safetensors: No such file"),
        ("no manifest", "checkpoint.json: No such file"),
        ("manifest torn", "was not written by this version"),
        ("half renamed", None),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_skipped(
    plan: Plan,
    store: Store,
    first: FirstRuns,
    tmp_path: Path,
    how: str,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    varied = vary(plan, SAVING)
    whole = first.train(varied)
    first.kill(varied, 5, tmp_path / "cut")
    newest = tmp_path / "cut/checkpoints/step-000004"
    assert isinstance(read_checkpoint(newest), Checkpoint)
    damage(newest, how)
    capsys.readouterr()
    resumed, began = go(varied, store, tmp_path / "cut")
    console = capsys.readouterr().err
    assert began == 2
    if said is None:
        assert "skipped" not in console
    else:
        assert f"warning: {newest} is damaged and skipped" in console
        assert said in console
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert not list(resumed.paths.checkpoints.glob(".*")), "what was half-made is gone"
    checkpoint, damaged = find_newest(resumed.paths)
    assert checkpoint is not None
    assert checkpoint.manifest.step == 6
    assert not damaged


def keep_first_row(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.dim() == 2)
    tensors[name] = tensors[name][:1].contiguous()


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("adapter_model", keep_first_row, r"has the shape \[1, \d+\], not"),
        ("adapter_model", lambda tensors: tensors.pop(min(tensors)), "is missing"),
        ("optimizer", keep_first_row, r"exp_avg of .* has the shape \[1, \d+\], not"),
        ("optimizer", lambda tensors: tensors.pop(min(tensors)), "lack optimizer states that others have"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, name: str, change: Any, what: str
) -> None:
    """Its hashes are right. Weights of one row would be broadcast, and AdamW's kernels check no sizes."""
    varied = vary(plan, SAVING)
    first.kill(varied, 3, tmp_path / "cut")
    folder = tmp_path / "cut/checkpoints/step-000002"
    file = folder / f"{name}.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"][file.name] = hash_file(file).model_dump()
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(RunFailedError, match=rf"step-000002 does not fit this training: .*{what}"):
        go(varied, store, tmp_path / "cut")


def test_without_an_intact_checkpoint_training_starts_at_step_1(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path
) -> None:
    varied = vary(plan, SAVING)
    whole = first.train(varied)
    first.kill(varied, 3, tmp_path / "cut")
    damage(tmp_path / "cut/checkpoints/step-000002", "flipped")
    resumed, began = go(varied, store, tmp_path / "cut")
    assert began == 0
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert recorded_losses(resumed) == recorded_losses(whole)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"optimizer.learning_rate": 0.5}, "optimizer.learning_rate"),
        ({"batch.global_batch_size": 3}, "batch.global_batch_size"),
        ({"schedule.seed": 99}, "schedule.seed"),
        ({"schedule.max_steps": 9}, "schedule.max_steps"),
        ({"adapter.dropout": 0.1}, "adapter.dropout"),
        ({"loss_on": "all"}, "loss_on"),
    ],
)
def test_changed_settings_are_refused_and_listed(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, changes: dict[str, Any], where: str
) -> None:
    varied = vary(plan, SAVING)
    first.kill(varied, 3, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="its inputs changed since the last checkpoint") as refused:
        go(vary(varied, changes), store, tmp_path)
    assert where in [problem.where for problem in refused.value.problems]
    assert "--allow-changed-inputs" in refused.value.hint
    assert (tmp_path / "metrics.jsonl").read_bytes() == before, "nothing was lost"
    drifted, began = go(vary(varied, changes), store, tmp_path, allow_changed_inputs=True)
    assert began == 2
    assert recorded_losses(drifted)[-1][0] == drifted.num_steps


@pytest.mark.parametrize(
    "changes",
    [
        split(1, 4),
        {"schedule.save_every_steps": 3},
        {"schedule.evaluate_every_steps": 2},
        {"schedule.logging_steps": 7},
        {"checkpointing": "full"},
        {"loss_kernel": "full_logits"},
        {"optimizer.name": "adamw_torch"},
    ],
)
def test_settings_that_do_not_affect_learning_may_change(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, changes: dict[str, Any]
) -> None:
    varied = vary(plan, {**SAVING, **split(2, 2)})
    whole = first.train(varied)
    first.kill(varied, 3, tmp_path / "cut")
    resumed, began = go(vary(varied, changes), store, tmp_path / "cut")
    assert began == 2
    assert [loss for _, loss in recorded_losses(resumed)] == pytest.approx(
        [loss for _, loss in recorded_losses(whole)], 1e-5
    )


def test_changed_data_is_refused(plan: Plan, store: Store, first: FirstRuns, tmp_path: Path) -> None:
    varied = vary(plan, SAVING)
    first.kill(varied, 3, tmp_path / "run")
    run = build(varied, store, tmp_path / "run")
    other = vars(run) | {"data_key": "other"}
    with pytest.raises(InputError) as refused:
        resume_run(TrainingRun(**other), ResumeOptions())
    assert [problem.where for problem in refused.value.problems] == ["data"]


def test_changed_sample_order_is_refused(plan: Plan, store: Store, first: FirstRuns, tmp_path: Path) -> None:
    """All settings are equal, but steps would train other packs, for example after a change of the permutation."""
    varied = vary(plan, SAVING)
    first.kill(varied, 3, tmp_path / "run")
    run = build(varied, store, tmp_path / "run")
    run.order.seed += 1
    with pytest.raises(InputError) as refused:
        resume_run(run, ResumeOptions())
    assert [problem.where for problem in refused.value.problems] == ["order"]
    assert "would have trained other rows" in str(refused.value)


def test_verify_trains_recorded_steps_again(
    plan: Plan, store: Store, first: FirstRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = vary(plan, SAVING)
    whole = first.train(varied)
    first.kill(varied, 5, tmp_path / "cut")
    capsys.readouterr()
    resumed, began = go(varied, store, tmp_path / "cut", verify_steps=3)
    assert began == 2, "step 4 is saved, but only one step was recorded after it"
    assert "steps 3 to 5 match the recorded steps: same packed sequences, same losses" in capsys.readouterr().err
    assert adapter_bytes(resumed) == adapter_bytes(whole)


def test_verify_detects_a_different_loss(plan: Plan, store: Store, first: FirstRuns, tmp_path: Path) -> None:
    varied = vary(plan, SAVING)
    first.kill(varied, 5, tmp_path)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["values"][metrics.TRAIN_LOSS] *= 1.01
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunFailedError, match="replayed steps differ from the recorded ones: the loss of step 5 was"):
        go(varied, store, tmp_path, verify_steps=1)


@pytest.mark.parametrize("again", [0.5, float("nan")])
def test_steps_that_differ_are_not_said_to_match(again: float, caplog: pytest.LogCaptureFixture) -> None:
    recorded = StepMetrics(step=3, epoch=0.1, values={metrics.TRAIN_LOSS: 0.7})
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(device=torch.device("cpu")),
        plan=SimpleNamespace(precision=SimpleNamespace(compute_dtype="fp32")),
    )
    now = StepMetrics(step=3, epoch=0.1, values={metrics.TRAIN_LOSS: again})
    ReplayCheck([recorded], must_agree=False).on_step(run, now)
    (message,) = caplog.messages
    assert f"the loss of step 3 was 0.700000, and is {again:.6f} now" in message


def test_verify_without_recorded_steps_is_refused(plan: Plan, store: Store, tmp_path: Path) -> None:
    varied = vary(plan, {**SAVING, "schedule.save_total_limit": 1})
    go(varied, store, tmp_path)
    with pytest.raises(InputError, match="nothing to verify"):
        go(varied, store, tmp_path, verify_steps=2)


def test_a_checkpoint_contains_only_trained_weights(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Its size is three times the trained weights: the weights and two optimizer states."""
    varied = vary(plan, SAVING)
    run, _ = go(varied, store, tmp_path)
    trained = sum(weight.numel() * 4 for weight in trained_weights(run).values())
    stored = sum(file.stat().st_size for file in run.paths.checkpoint(6).glob("*.safetensors"))
    assert stored < 3 * trained + 60_000, "headers, random states, and no base"
    assert {file.suffix for file in run.paths.checkpoint(6).iterdir()} == {".safetensors", ".json"}, "no pickle"
    result = {file.name for file in run.paths.adapter.iterdir()}
    assert result == {"adapter_config.json", "adapter_model.safetensors"}, "without PEFT's empty model card"


def test_the_hash_chain_depends_on_the_order(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, SAVING), store, tmp_path)
    chains = [compute_progress(run, step).chain for step in range(5)]
    assert len(set(chains)) == 5
    progress = compute_progress(run, 2)
    progress.advance(run.order.packs_for_step(2), 1)
    assert progress.chain == chains[3]
    swapped = compute_progress(run, 2)
    swapped.advance(tuple(reversed(run.order.packs_for_step(2))), 1)
    assert swapped.chain != chains[3]


def test_a_damaged_checkpoint_is_deleted_before_an_intact_one(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Resumed after step 2, because 4 is damaged: the new checkpoint stays, and the damaged one is deleted."""
    varied = vary(plan, {**SAVING, "schedule.save_every_steps": 1, "schedule.save_total_limit": 2})
    cut(varied, store, tmp_path, 5)
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-000003", "step-000004"]
    damage(tmp_path / "checkpoints/step-000004", "flipped")
    shutil.move(tmp_path / "checkpoints/step-000004", tmp_path / "checkpoints/step-000006")
    cut(varied, store, tmp_path, 5)
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-000003", "step-000004"]
    assert isinstance(read_checkpoint(tmp_path / "checkpoints/step-000004"), Checkpoint)


def test_the_best_checkpoint_is_verified_before_it_is_used(
    plan: Plan, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = vary(plan, {**SAVING, "schedule.load_best_model_at_end": True})
    run = build(varied, store, tmp_path)
    best = BestCheckpoint(varied.schedule)
    saving = Checkpointer(best)
    train(run, Observers([MetricsWriter(), best, saving]), resume_run(run, ResumeOptions()).progress)
    best.step = 2
    damage(run.paths.checkpoint(2), "flipped")
    saving.on_end(run, 6)
    assert "was changed after writing; saving the last weights instead of the best" in capsys.readouterr().err
    last = run.paths.checkpoint(6) / "adapter_model.safetensors"
    assert (run.paths.adapter / "adapter_model.safetensors").read_bytes() == last.read_bytes()


def test_a_skipped_step_is_skipped_again(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(plan, store, tmp_path)
    row = StepMetrics(step=1, epoch=0.1, values={metrics.TRAIN_LOSS: float("nan")}, packs=(1,))
    ReplayCheck([row], must_agree=True).on_step(run, row)


def test_what_is_asked_for_on_the_way_is_added() -> None:
    stored = Request(expert="neo4j", overrides=("a=1", "b=2"), max_steps=5, gpus_per_node=2)
    merged = merge_requests(stored, Request(expert="neo4j", overrides=("b=3",), gpus_per_node=4))
    assert merged == Request(expert="neo4j", overrides=("a=1", "b=2", "b=3"), max_steps=5, gpus_per_node=4)
