"""The model of a rung: the plan's base and adapter, run as libraries run them, and what the rung adds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional

from launcher.bench.rungs import Setup
from launcher.choices import AttentionBackend
from launcher.plan.model import Plan, PrecisionPlan
from launcher.training.adapters import add_adapter
from launcher.training.attention import BACKENDS, register
from launcher.training.batches import PackedBatch
from launcher.training.bench.rung_data import AnyBatch, RowBatch
from launcher.training.layers import prepare_layers
from launcher.training.loading import DTYPES, load_base
from launcher.training.loss import make_logits, sum_loss
from launcher.training.model import TrainedModel

IGNORED = -100
Autocast = Callable[[], AbstractContextManager[Any]]


def make_rung_plan(plan: Plan, setup: Setup) -> Plan:
    """The plan, less what the rung has not yet."""
    precision = plan.precision
    if setup.precision != "planned":
        precision = PrecisionPlan(
            compute_dtype="fp32",
            base_dtype="fp32",
            trainable_dtype="fp32",
            use_tf32=setup.precision == "tf32",
            loss_scaling=False,
        )
    has_fixed_shapes = setup.rows == "packed"
    return plan.model_copy(
        update={
            "precision": precision,
            "checkpointing": setup.checkpointing,
            "compile": plan.compile if setup.is_compiled and has_fixed_shapes else None,
            "loss_kernel": setup.loss,
            "optimizer": plan.optimizer.model_copy(update={"name": setup.optimizer}),
        }
    )


class RungModel(nn.Module):
    """A micro-batch in, the summed loss of its trained positions out."""

    def __init__(self, trained: TrainedModel, setup: Setup, autocast: Autocast) -> None:
        super().__init__()
        self.trained = trained
        self._setup, self._autocast = setup, autocast

    def forward(self, batch: AnyBatch) -> Tensor:
        with self._autocast():
            hidden = (
                self.trained.hidden_states(batch) if isinstance(batch, PackedBatch) else self._hidden_of_rows(batch)
            )
            if self._setup.loss == "full_logits":
                return self._full_loss(hidden, batch)
            chosen = hidden.index_select(0, batch.trained_positions)
            return sum_loss(self._setup.loss, chosen, batch.targets, self.trained.head())

    def _hidden_of_rows(self, batch: RowBatch) -> Tensor:
        """By the library's own attention: a mask of rows, or for packed ones a mask of all pairs of tokens."""
        decoder: Any = self.trained.base.get_decoder()
        mask = self._pair_mask(batch) if batch.is_packed else (batch.documents != 0).long()
        hidden: Tensor = decoder(
            input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        return hidden.flatten(0, 1)

    def _pair_mask(self, batch: RowBatch) -> Tensor:
        """[rows, 1, length, length]: SDPA takes true and false; eager attention adds it to the scores."""
        owners, length = batch.documents, batch.documents.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=owners.device).tril()
        visible = ((owners[:, :, None] == owners[:, None, :]) & causal)[:, None]
        if self._setup.attention == "sdpa":
            return visible
        dtype = self.trained.base.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=owners.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    def _full_loss(self, hidden: Tensor, batch: AnyBatch) -> Tensor:
        """What libraries do: logits of every position, padding included, in FP32, and labels that say which count."""
        logits = make_logits(hidden, self.trained.head())
        labels = torch.full((len(hidden),), IGNORED, device=hidden.device, dtype=torch.long)
        labels = labels.index_copy(0, batch.trained_positions, batch.targets)
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def build_rung_model(plan: Plan, setup: Setup, folders: tuple[Path, ...], device: torch.device) -> RungModel:
    """`plan` is the rung's, by make_rung_plan."""
    torch.set_float32_matmul_precision("high" if plan.precision.use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision.use_tf32
    name: AttentionBackend = plan.attention.backend if setup.attention == "planned" else setup.attention
    backend = BACKENDS[name]
    attention = register(name, backend) if setup.attention == "planned" else name  # else the library's own
    set_seed(plan.schedule.seed)
    trained = TrainedModel(add_adapter(load_base(plan, folders, attention, device), plan), backend, setup.loss)
    trained.train()
    trained.to(device)
    _prepare(trained, plan, is_compiled=setup.is_compiled)
    return RungModel(trained, setup, lambda: _autocast(plan, device))


def _prepare(trained: TrainedModel, plan: Plan, *, is_compiled: bool) -> None:
    """Compiling and checkpointing alone: what else the launcher does to a model is part of the last rung."""
    if is_compiled and plan.compile is None:  # lengths vary: one graph for all of them
        for layer in trained.layers:
            forward: Any = torch.compile(layer.forward, dynamic=True)
            layer.forward = forward
    prepare_layers(trained.layers, plan.checkpointing, plan.compile)
    if plan.compile is not None and plan.compile.scope == "model":
        trained.compile_decoder(plan.compile)


def _autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    dtype = plan.precision.compute_dtype
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, dtype=DTYPES[dtype])
