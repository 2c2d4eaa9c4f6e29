"""Model of an ablation stage: the plan's base and adapter in transformers, with the optimizations of the stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional

from launcher.bench.ablation_stages import LoopConfig
from launcher.bench.workers.ablation_data import AnyBatch, RowBatch
from launcher.core.choices import AttentionBackend
from launcher.plan.model import Plan, PrecisionPlan
from launcher.training.data.collate import PackedBatch
from launcher.training.model.attention import BACKENDS, register_backend
from launcher.training.model.base_model import DTYPES, load_base
from launcher.training.model.compile_checkpoint import prepare_layers
from launcher.training.model.loss import compute_logits, compute_summed_loss
from launcher.training.model.new_tokens import get_new_token_ids
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.model.peft_adapters import add_adapter

IGNORE_INDEX = -100
Autocast = Callable[[], AbstractContextManager[Any]]


def derive_stage_plan(plan: Plan, config: LoopConfig) -> Plan:
    """Return the plan with only those of its optimizations that the ablation stage enables."""
    precision = plan.precision
    if config.precision != "planned":
        precision = PrecisionPlan(
            compute_dtype="fp32",
            base_dtype="fp32",
            trainable_dtype="fp32",
            use_tf32=config.precision == "tf32",
            loss_scaling=False,
        )
    has_fixed_shapes = config.rows == "packed"
    return plan.model_copy(
        update={
            "precision": precision,
            "checkpointing": config.checkpointing,
            "compile": plan.compile if config.is_compiled and has_fixed_shapes else None,
            "loss_kernel": config.loss,
            "optimizer": plan.optimizer.model_copy(update={"name": config.optimizer}),
        }
    )


class StageModel(nn.Module):
    """Module that returns the loss of a micro-batch, summed over the tokens that count in the loss."""

    def __init__(self, trained: PackedCausalLM, config: LoopConfig, autocast: Autocast) -> None:
        """Wrap the model with its adapter."""
        super().__init__()
        self.trained = trained
        self._config, self._autocast = config, autocast

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return the summed loss."""
        with self._autocast():
            hidden = self.trained.hidden_states(batch) if isinstance(batch, PackedBatch) else self._forward_rows(batch)
            if self._config.loss == "full_logits":
                return self._full_loss(hidden, batch)
            chosen = hidden.index_select(0, batch.trained_positions)
            return compute_summed_loss(self._config.loss, chosen, batch.targets, self.trained.head())

    def _forward_rows(self, batch: RowBatch) -> Tensor:
        """Run the decoder with transformers' own attention and a padding mask, block-diagonal for packed rows."""
        decoder: Any = self.trained.base.get_decoder()
        mask = self._document_mask(batch) if batch.is_packed else (batch.documents != 0).long()
        hidden: Tensor = decoder(
            input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        return hidden.flatten(0, 1)

    def _document_mask(self, batch: RowBatch) -> Tensor:
        """Return a block-diagonal causal mask [rows, 1, length, length]: boolean for SDPA, additive for eager."""
        owners, length = batch.documents, batch.documents.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=owners.device).tril()
        visible = ((owners[:, :, None] == owners[:, None, :]) & causal)[:, None]
        if self._config.attention == "sdpa":
            return visible
        dtype = self.trained.base.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=owners.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    def _full_loss(self, hidden: Tensor, batch: AnyBatch) -> Tensor:
        """Return the summed loss from FP32 logits of every position, with padding, as plain training loops do."""
        logits = compute_logits(hidden, self.trained.head())
        labels = torch.full((len(hidden),), IGNORE_INDEX, device=hidden.device, dtype=torch.long)
        labels = labels.index_copy(0, batch.trained_positions, batch.targets)
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def build_stage_model(plan: Plan, config: LoopConfig, folders: tuple[Path, ...], device: torch.device) -> StageModel:
    """Load the model of an ablation stage; `plan` must be the result of derive_stage_plan."""
    torch.set_float32_matmul_precision("high" if plan.precision.use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision.use_tf32
    name: AttentionBackend = plan.attention.backend if config.attention == "planned" else config.attention
    backend = BACKENDS[name]
    attention = register_backend(name, backend) if config.attention == "planned" else name  # else that of transformers
    set_seed(plan.schedule.seed)
    base = load_base(plan, folders, attention, device)
    trained = PackedCausalLM(add_adapter(base, plan, get_new_token_ids(plan, folders)), backend, config.loss)
    trained.train()
    trained.to(device)
    _prepare(trained, plan, is_compiled=config.is_compiled)
    return StageModel(trained, config, lambda: _autocast(plan, device))


def _prepare(trained: PackedCausalLM, plan: Plan, *, is_compiled: bool) -> None:
    """Apply torch.compile and checkpointing only; the launcher's other changes belong to the last stage."""
    if is_compiled and plan.compile is None:  # lengths vary: compile with dynamic shapes
        for layer in trained.layers:
            forward: Any = torch.compile(layer.forward, dynamic=True)
            layer.forward = forward
    prepare_layers(trained.layers, plan.checkpointing, plan.compile)
    if plan.compile is not None and plan.compile.scope == "model":
        trained.compile_decoder(plan.compile)


def _autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    dtype = plan.precision.compute_dtype
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, dtype=DTYPES[dtype])
