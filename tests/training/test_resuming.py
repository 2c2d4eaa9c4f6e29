"""A training that was cut goes on as if nothing had happened: to the bit, on the same data, with the same record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher import metrics
from launcher.checkpoints import Checkpoint, find_newest, read_checkpoint
from launcher.corpus.store import Store
from launcher.errors import InputError, RunFailedError
from launcher.inputs import Request, merge_requests
from launcher.metrics import StepMetrics, load_metrics
from launcher.plan.model import Plan
from launcher.training.loop import train
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best import Best
from launcher.training.observers.facts import Facts
from launcher.training.observers.replay import Replay
from launcher.training.observers.saving import Saving
from launcher.training.position import find_position
from launcher.training.resuming import ResumeOptions, begin
from launcher.training.run import Run
from tests.training.builders import adapt, build, make_uneven_packs, split, trained_weights, vary, write_store

DROPOUT = {"adapter.dropout": 0.3}  # draws random numbers at every step
SAVING = {"schedule.max_steps": 6, "schedule.save_every_steps": 2, "schedule.save_total_limit": None}


class KilledError(Exception):
    pass


class Killer(Observer):
    """Ends the training at a step, as suddenly as an exception can."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: Run, metrics: StepMetrics) -> None:  # noqa: ARG002
        if metrics.step == self._step:
            raise KilledError


def go(plan: Plan, store: Store, root: Path, kill_at: int = 0, **options: Any) -> tuple[Run, int]:
    """The run, and how many steps were done when it began."""
    run = build(plan, store, root)
    chosen = ResumeOptions(**options)
    beginning = begin(run, chosen)
    step = beginning.position.step
    best = Best(plan.schedule)
    if beginning.best is not None:
        best.restore(beginning.best)
    saving = Saving(best)
    replay = Replay(beginning.told.rest, must_agree=chosen.verify_steps > 0)
    try:
        train(run, Observers([Facts(), replay, best, saving, Killer(kill_at)]), beginning.position)
    finally:
        saving.close()
    return run, step


def cut(plan: Plan, store: Store, root: Path, step: int) -> None:
    with pytest.raises(KilledError):
        go(plan, store, root, kill_at=step)


def adapter_bytes(run: Run) -> list[bytes]:
    return [file.read_bytes() for file in sorted(run.paths.adapter.glob("*.safetensors"))]


def told_losses(run: Run) -> list[tuple[int, float]]:
    rows = load_metrics(run.paths.metrics)
    return [(row.step, row.values[metrics.TRAIN_LOSS]) for row in rows if metrics.TRAIN_LOSS in row.values]


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "full"])
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_the_same_to_the_bit(plan: Plan, store: Store, tmp_path: Path, kind: str, optimizer: str) -> None:
    dropout = DROPOUT if kind in ("lora", "dora") else {}
    varied = vary(plan, {**adapt(kind), **SAVING, **dropout, **split(2, 2), "optimizer.name": optimizer})
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 5)
    resumed, began = go(varied, store, tmp_path / "cut")
    assert began == 4
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert told_losses(resumed) == told_losses(whole), "each step once, each loss the same"
    assert (
        load_metrics(resumed.paths.metrics)[-1].values[metrics.TOKENS_SEEN]
        == (load_metrics(whole.paths.metrics)[-1].values[metrics.TOKENS_SEEN])
    )


def test_random_numbers_matter_here(plan: Plan, store: Store, tmp_path: Path) -> None:
    """The test above would not notice lost random states if dropout drew none."""
    varied = vary(plan, {**SAVING, **DROPOUT})
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 5)
    run = build(varied, store, tmp_path / "cut")
    beginning = begin(run, ResumeOptions())
    torch.manual_seed(999)
    train(run, Observers([Facts()]), beginning.position)
    assert told_losses(run)[:4] == told_losses(whole)[:4]
    assert told_losses(run)[4:] != told_losses(whole)[4:]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_killed_at_any_step_and_again(plan: Plan, store: Store, tmp_path: Path, step: int) -> None:
    varied = vary(plan, {**SAVING, "schedule.save_total_limit": 1})
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", step)
    if step < 6:
        cut(varied, store, tmp_path / "cut", 6)
    resumed, _ = go(varied, store, tmp_path / "cut")
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert told_losses(resumed) == told_losses(whole)


def test_early_stopping_remembers(plan: Plan, tmp_path: Path, store: Store) -> None:
    """Evaluations before the cut count, and a run that was about to stop trains no further step."""
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
    assert [step for step, _ in told_losses(whole)] == [1, 2, 3]
    cut(varied, held_out, tmp_path / "cut", 3)
    resumed, _ = go(varied, held_out, tmp_path / "cut")
    assert told_losses(resumed) == told_losses(whole)
    shutil.rmtree(resumed.paths.adapter)
    ended, began = go(varied, held_out, tmp_path / "cut")
    assert began == 3
    assert told_losses(ended) == told_losses(whole), "it had seen enough"
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
        ("flipped", "is not what was written"),
        ("deleted", "optimizer.safetensors: No such file"),
        ("no manifest", "checkpoint.json: No such file"),
        ("manifest torn", "is not what this version writes"),
        ("half renamed", None),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    plan: Plan, store: Store, tmp_path: Path, how: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = vary(plan, SAVING)
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 5)
    newest = tmp_path / "cut/checkpoints/step-000004"
    assert isinstance(read_checkpoint(newest), Checkpoint)
    damage(newest, how)
    capsys.readouterr()
    resumed, began = go(varied, store, tmp_path / "cut")
    told = capsys.readouterr().err
    assert began == 2
    if said is None:
        assert "passed over" not in told
    else:
        assert f"warning: {newest} is damaged and passed over" in told
        assert said in told
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert not list(resumed.paths.checkpoints.glob(".*")), "what was half-made is gone"
    checkpoint, damaged = find_newest(resumed.paths)
    assert checkpoint is not None
    assert checkpoint.manifest.step == 6
    assert not damaged


def test_nothing_whole_begins_at_the_first_step(plan: Plan, store: Store, tmp_path: Path) -> None:
    varied = vary(plan, SAVING)
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 3)
    damage(tmp_path / "cut/checkpoints/step-000002", "flipped")
    resumed, began = go(varied, store, tmp_path / "cut")
    assert began == 0
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert told_losses(resumed) == told_losses(whole)


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
def test_another_training_is_refused_with_what_differs(
    plan: Plan, store: Store, tmp_path: Path, changes: dict[str, Any], where: str
) -> None:
    varied = vary(plan, SAVING)
    cut(varied, store, tmp_path, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="is not what this run has trained so far") as refused:
        go(vary(varied, changes), store, tmp_path)
    assert where in [problem.where for problem in refused.value.problems]
    assert "--allow-drift" in refused.value.hint
    assert (tmp_path / "metrics.jsonl").read_bytes() == before, "nothing was lost"
    drifted, began = go(vary(varied, changes), store, tmp_path, allow_drift=True)
    assert began == 2
    assert told_losses(drifted)[-1][0] == drifted.num_steps


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
def test_how_it_runs_may_change(plan: Plan, store: Store, tmp_path: Path, changes: dict[str, Any]) -> None:
    varied = vary(plan, {**SAVING, **split(2, 2)})
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 3)
    resumed, began = go(vary(varied, changes), store, tmp_path / "cut")
    assert began == 2
    assert [loss for _, loss in told_losses(resumed)] == pytest.approx([loss for _, loss in told_losses(whole)], 1e-5)


def test_other_data_is_refused(plan: Plan, store: Store, tmp_path: Path) -> None:
    varied = vary(plan, SAVING)
    cut(varied, store, tmp_path / "run", 3)
    run = build(varied, store, tmp_path / "run")
    other = vars(run) | {"data_key": "other"}
    with pytest.raises(InputError) as refused:
        begin(Run(**other), ResumeOptions())
    assert [problem.where for problem in refused.value.problems] == ["data"]


def test_another_order_is_refused(plan: Plan, store: Store, tmp_path: Path) -> None:
    """All settings are the same, but steps would train other packs: a changed way to permute, say."""
    varied = vary(plan, SAVING)
    cut(varied, store, tmp_path / "run", 3)
    run = build(varied, store, tmp_path / "run")
    run.order.seed += 1
    with pytest.raises(InputError) as refused:
        begin(run, ResumeOptions())
    assert [problem.where for problem in refused.value.problems] == ["order"]


def test_verifying_trains_recorded_steps_again(
    plan: Plan, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = vary(plan, SAVING)
    whole, _ = go(varied, store, tmp_path / "whole")
    cut(varied, store, tmp_path / "cut", 5)
    capsys.readouterr()
    resumed, began = go(varied, store, tmp_path / "cut", verify_steps=3)
    assert began == 2, "step 4 is saved, but only one recorded step lies behind it"
    assert "steps 3 to 5 came as they were recorded: same packs, same losses" in capsys.readouterr().err
    assert adapter_bytes(resumed) == adapter_bytes(whole)


def test_verifying_notices_another_loss(plan: Plan, store: Store, tmp_path: Path) -> None:
    varied = vary(plan, SAVING)
    cut(varied, store, tmp_path, 5)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["values"][metrics.TRAIN_LOSS] *= 1.01
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunFailedError, match="does not repeat itself: the loss of step 5 was"):
        go(varied, store, tmp_path, verify_steps=1)


def test_nothing_to_verify(plan: Plan, store: Store, tmp_path: Path) -> None:
    varied = vary(plan, {**SAVING, "schedule.save_total_limit": 1})
    go(varied, store, tmp_path)
    with pytest.raises(InputError, match="nothing to verify"):
        go(varied, store, tmp_path, verify_steps=2)


def test_a_checkpoint_holds_nothing_frozen(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Its size is that of what is trained: weights once, states twice."""
    varied = vary(plan, SAVING)
    run, _ = go(varied, store, tmp_path)
    trained = sum(weight.numel() * 4 for weight in trained_weights(run).values())
    stored = sum(file.stat().st_size for file in run.paths.checkpoint(6).glob("*.safetensors"))
    assert stored < 3 * trained + 60_000, "headers, random states, and no base"
    assert {file.suffix for file in run.paths.checkpoint(6).iterdir()} == {".safetensors", ".json"}, "no pickle"


def test_the_chain_tells_orders_apart(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, SAVING), store, tmp_path)
    chains = [find_position(run, step).chain for step in range(5)]
    assert len(set(chains)) == 5
    position = find_position(run, 2)
    position.advance(run.order.packs_of(2), 1)
    assert position.chain == chains[3]
    swapped = find_position(run, 2)
    swapped.advance(tuple(reversed(run.order.packs_of(2))), 1)
    assert swapped.chain != chains[3]


def test_a_damaged_one_never_pushes_out_a_good_one(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Taken up behind step 2, because 4 is damaged: what is saved then stays, and the damaged one goes."""
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


def test_the_best_is_looked_at_before_it_is_taken(
    plan: Plan, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = vary(plan, {**SAVING, "schedule.load_best_model_at_end": True})
    run = build(varied, store, tmp_path)
    best = Best(varied.schedule)
    saving = Saving(best)
    train(run, Observers([Facts(), best, saving]), begin(run, ResumeOptions()).position)
    best.step = 2
    damage(run.paths.checkpoint(2), "flipped")
    saving.on_end(run, 6)
    assert "is not what was written; the last weights are saved instead of the best" in capsys.readouterr().err
    last = run.paths.checkpoint(6) / "adapter_model.safetensors"
    assert (run.paths.adapter / "adapter_model.safetensors").read_bytes() == last.read_bytes()


def test_a_step_that_was_passed_over_repeats_itself(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(plan, store, tmp_path)
    row = StepMetrics(step=1, epoch=0.1, values={metrics.TRAIN_LOSS: float("nan")}, packs=(1,))
    Replay([row], must_agree=True).on_step(run, row)


def test_what_is_asked_for_on_the_way_is_added() -> None:
    stored = Request(expert="neo4j", overrides=("a=1", "b=2"), max_steps=5, gpus_per_node=2)
    merged = merge_requests(stored, Request(expert="neo4j", overrides=("b=3",), gpus_per_node=4))
    assert merged == Request(expert="neo4j", overrides=("a=1", "b=2", "b=3"), max_steps=5, gpus_per_node=4)
