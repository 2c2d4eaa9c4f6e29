"""`TrainingRun`: everything the training loop works on, built from a plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.core.choices import FSDP_STRATEGIES
from launcher.core.errors import InputError
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths
from launcher.corpus.pack_file import PackFile
from launcher.corpus.store import Store
from launcher.plan.estimate.memory.recipe import count_loss_chunk
from launcher.plan.model import BatchPlan, Plan, SchedulePlan
from launcher.training.data.collate import BatchShape, IntArray, PackedBatch, choose_batch_shape
from launcher.training.data.loader import MicroBatchDataset
from launcher.training.data.sampler import BatchLayout, PackSampler
from launcher.training.engine.chunked_adamw import ChunkedAdamW, OptimizerInBackward
from launcher.training.engine.collectives import broadcast_weights, seed_rank
from launcher.training.engine.cuda_graph import GraphedMicroSteps
from launcher.training.engine.engine import Engine
from launcher.training.engine.optimizer import build_optimizer, build_scheduler
from launcher.training.model.attention import BACKENDS, register_backend
from launcher.training.model.base_model import DTYPES, fingerprint_base, load_base
from launcher.training.model.loss import trains_in_fp32
from launcher.training.model.new_tokens import get_new_token_ids
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.model.peft_adapters import add_adapter
from launcher.training.model.pissa import fingerprint_initial
from launcher.training.runtime.watchdog import Heartbeat

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split of the prepared data, with the numbers of tokens and documents and the cost of each pack."""

    file: PackFile
    num_trained: IntArray
    num_tokens: IntArray
    num_documents: IntArray
    costs: IntArray
    shape: BatchShape


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training that is ready to run: plan, engine, data and progress reporting."""

    plan: Plan
    paths: RunPaths
    engine: Engine
    train: Split
    validation: Split | None
    order: PackSampler
    num_steps: int
    data_key: str
    base_fingerprint: str
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Log a message on rank 0 only."""
        if self.engine.is_main:
            log.log(level, text)

    def warn(self, text: str) -> None:
        """Log a warning on rank 0 only."""
        self.log(text, logging.WARNING)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps per epoch."""
        return self.order.steps_per_epoch

    def is_due(self, step: int, every_steps: int | None, every_epochs: float | None) -> bool:
        """Whether something done every N steps or epochs is due after `step`, which counts from 1.

        Always due after the last step, unless both intervals are None.
        """
        if every_steps is None and every_epochs is None:
            return False
        if step == self.num_steps:
            return True
        if every_steps is not None:
            return step % every_steps == 0
        assert every_epochs is not None
        interval = every_epochs * self.steps_per_epoch  # may be a fraction of a step
        return int(step / interval + 1e-9) > int((step - 1) / interval + 1e-9)

    def count_micro_batches(self, step: int) -> int:
        """Return how many micro-batches step `step` (counted from 0) has; the last step of an epoch may have fewer."""
        return self.batches().count_micro_batches(step)

    def batches(self) -> MicroBatchDataset:
        """Return the dataset of this rank's micro-batches."""
        batch = self.plan.batch
        return MicroBatchDataset(
            file=self.train.file,
            costs=self.train.costs,
            sampler=self.order,
            layout=BatchLayout(
                num_ranks=self.engine.num_ranks,
                micro_batch_size=batch.micro_batch_size,
                num_micro_batches=batch.gradient_accumulation_steps,
            ),
            rank=self.engine.rank,
            shape=self.train.shape,
            num_steps=self.num_steps,
        )


def assemble_run(
    plan: Plan, paths: RunPaths, store: Store, module: PackedCausalLM, accelerator: Accelerator
) -> TrainingRun:
    """Open the data, prepare the model with accelerate, and return the run."""
    train = _open_split(store, "train", plan.batch, plan.batch.micro_batch_size)
    validation = None
    if "validation" in store.splits and len(store.open_split("validation")):
        validation = _open_split(store, "validation", plan.batch, plan.batch.eval_batch_size)
    order = PackSampler(
        num_packs=len(train.file),
        global_batch_size=plan.batch.global_batch_size,
        seed=plan.schedule.seed,
        lengths=train.num_tokens.astype(np.int32) if plan.batch.group_by_length else None,
    )
    num_steps = count_steps(plan.schedule, order.steps_per_epoch)
    return TrainingRun(
        plan=plan,
        paths=paths,
        engine=_build_engine(plan, module, accelerator, num_steps),
        train=train,
        validation=validation,
        order=order,
        num_steps=num_steps,
        data_key=store.manifest.key,
        base_fingerprint=fingerprint_base(plan, module.base) + fingerprint_initial(module.model),
    )


def build_model(plan: Plan, folders: tuple[Path, ...], device: torch.device) -> PackedCausalLM:
    """Load the base and add the adapter, not yet compiled. The adapter's initial weights depend only on the seed."""
    backend = BACKENDS[plan.attention.backend]
    base = load_base(plan, folders, register_backend(plan.attention.backend, backend), device)
    set_seed(plan.schedule.seed)
    module = PackedCausalLM(add_adapter(base, plan, get_new_token_ids(plan, folders)), backend, plan.loss_kernel)
    module.train()
    return module


def count_steps(schedule: SchedulePlan, steps_per_epoch: int) -> int:
    """Return the number of steps of the training: `max_steps` if it is set, else that of all epochs, at least 1."""
    if schedule.max_steps is not None:
        return schedule.max_steps
    return max(1, ceil(steps_per_epoch * schedule.epochs - 1e-9))


def _build_engine(plan: Plan, module: PackedCausalLM, accelerator: Accelerator, num_steps: int) -> Engine:
    if plan.strategy in ("single", "ddp"):
        module.to(accelerator.device)
    module.prepare(plan)
    optimizer = build_optimizer(plan.optimizer, module, plan.precision.trainable_dtype, plan.schedule.seed)
    lr_scheduler = build_scheduler(plan.schedule, optimizer, num_steps)
    defer_gradient_sync = plan.defer_gradient_sync and plan.strategy == "ddp"
    if defer_gradient_sync:  # what accelerate does for DDP, without its backward hooks
        model, prepared = accelerator.prepare_model(module, evaluation_mode=True), accelerator.prepare(optimizer)
        broadcast_weights([parameter for parameter in module.parameters() if parameter.requires_grad])
    else:
        model, prepared = accelerator.prepare(module, optimizer)
    if plan.strategy == "zero3":
        module.register_head_weight()
    # Building consumes random numbers, differently per strategy; training must not depend on that.
    set_seed(plan.schedule.seed)
    seed_rank(plan.schedule.seed, accelerator.process_index)
    return Engine(
        accelerator=accelerator,
        module=module,
        model=model,
        optimizer=prepared,
        lr_scheduler=lr_scheduler,
        max_grad_norm=plan.optimizer.max_grad_norm,
        num_micro_batches=plan.batch.gradient_accumulation_steps,
        always_sync_gradients=plan.strategy in FSDP_STRATEGIES and plan.adapter.kind == "full",
        graphs=_build_graphs(plan, module, model, accelerator),
        defer_gradient_sync=defer_gradient_sync,
        in_backward=_build_in_backward(plan, optimizer),
        uses_loss_scaling=plan.precision.loss_scaling,
    )


def _build_in_backward(plan: Plan, optimizer: Optimizer) -> OptimizerInBackward | None:
    if not plan.optimizer.in_backward:
        return None
    if plan.strategy != "single" or plan.batch.gradient_accumulation_steps > 1 or plan.optimizer.max_grad_norm:
        raise InputError(
            "optimizer.in_backward needs strategy single, gradient_accumulation_steps 1 and no max_grad_norm"
        )
    assert isinstance(optimizer, ChunkedAdamW)
    return OptimizerInBackward(optimizer)


def _build_graphs(
    plan: Plan, module: PackedCausalLM, model: nn.Module, accelerator: Accelerator
) -> GraphedMicroSteps | None:
    if not plan.cuda_graph or plan.optimizer.in_backward or plan.strategy not in ("single", "ddp"):
        return None

    def micro_step(batch: PackedBatch, num_trained: Tensor) -> Tensor:
        loss: Tensor = model(batch) / num_trained
        accelerator.backward(loss)
        return loss.detach()

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_large = trains_in_fp32(module.head(), DTYPES[plan.precision.compute_dtype])
    return GraphedMicroSteps(micro_step, trained, count_loss_chunk(plan.base.vocab_size, is_large=is_large))


def _open_split(store: Store, name: str, batch: BatchPlan, micro_batch_size: int) -> Split:
    file = store.open_split(name)
    if len(file) == 0:
        raise InputError(f"{store.folder}: the {name} split is empty")
    num_documents = file.count("document_lengths")
    return Split(
        file=file,
        num_trained=file.column("num_trained"),
        num_tokens=file.count("input_ids"),
        num_documents=num_documents,
        costs=file.column("sum_squares"),
        shape=choose_batch_shape(num_documents, micro_batch_size, batch.sequence_length, is_packed=batch.packed),
    )
