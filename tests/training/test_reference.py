"""The complete stack against a minimal training loop: plain PyTorch and transformers, one row at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from launcher.core import metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.run import TrainingRun
from tests.training.builders import adapt, build, moved_difference, train_recorded, trained_weights, vary

NUM_STEPS = 5
# Other kernels (logits whole, attention with a mask), other order of sums: units in the last place of fp32 (6e-8).
# Seen: 2e-7 for both.
TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-4  # relative to the weight update; Adam amplifies rounding of tiny gradients. Measured: 4e-6


def rows_of(run: TrainingRun, step: int) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels) of each document; untrained labels are -100, as in transformers."""
    rows = []
    for index in run.order.packs_for_step(step):
        pack = run.train.file[index]
        ids, flags = torch.tensor(pack.input_ids).long(), torch.tensor(pack.trained).bool()
        labels = ids.masked_fill(~flags, -100)
        lengths = pack.document_lengths.tolist()
        rows += list(zip(ids.split(lengths), labels.split(lengths), strict=True))
    return rows


def train_plainly(run: TrainingRun, model: Any) -> tuple[list[float], list[float], list[float]]:
    """The reference loop."""
    norms_of_layers = [p for name, p in model.named_parameters() if "norm" in name]
    matrices = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms_of_layers, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.999), eps=1e-8)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=NUM_STEPS)
    losses, norms, rates = [], [], []
    for step in range(NUM_STEPS):
        rows = rows_of(run, step)
        logits = [model(input_ids=ids[None]).logits[0, :-1] for ids, _ in rows]
        labels = torch.cat([labels[1:] for _, labels in rows])
        loss = functional.cross_entropy(torch.cat(logits), labels, ignore_index=-100)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, norms, rates


@pytest.mark.parametrize("kernel", ["chunked", "full_logits"])
def test_full_fine_tuning_is_plain_pytorch(base: Path, plan: Plan, store: Store, tmp_path: Path, kernel: str) -> None:
    changes = {**adapt("full"), "schedule.max_steps": NUM_STEPS, "loss_kernel": kernel}
    run = build(vary(plan, changes), store, tmp_path, is_checked=True)
    begin = trained_weights(run)
    recorder = train_recorded(run)
    model = AutoModelForCausalLM.from_pretrained(str(base), attn_implementation="eager", dtype=torch.float32)
    losses, norms, rates = train_plainly(run, model)
    assert recorder.losses == pytest.approx(losses, rel=TOLERANCE)
    assert recorder.values(metrics.GRAD_NORM) == pytest.approx(norms, rel=TOLERANCE)
    assert max(norms) > 1.0, "clipping must have something to do"
    assert recorder.values(metrics.LEARNING_RATE) == pytest.approx(rates, rel=1e-12)
    theirs = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    assert moved_difference(trained_weights(run), theirs, begin) < WEIGHT_TOLERANCE


def test_grad_norm_is_reported_without_clipping(plan: Plan, store: Store, tmp_path: Path) -> None:
    changes = {**adapt("full"), "schedule.max_steps": 1, "optimizer.max_grad_norm": None, "optimizer.name": "sgd"}
    run = build(vary(plan, {**changes, "schedule.warmup_ratio": 0.0}), store, tmp_path, is_checked=True)
    begin = trained_weights(run)
    recorder = train_recorded(run)
    moved = torch.cat([(w - begin[name]).flatten() for name, w in trained_weights(run).items()])
    decay = 5e-3 * torch.cat([w.flatten() * (0.0 if "norm" in name else 0.01) for name, w in begin.items()])
    norm = float((moved + decay).norm()) / 5e-3  # SGD applies the gradient directly
    assert recorder.values(metrics.GRAD_NORM)[0] == pytest.approx(norm, rel=1e-3)
    assert norm > 1.0, "clipping would have cut it"
