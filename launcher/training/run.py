"""Everything that the loop works on, put together from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from launcher.corpus.packs import PackFile
from launcher.corpus.store import Store
from launcher.errors import InputError, say
from launcher.paths import RunPaths
from launcher.plan.model import BatchPlan, Plan, SchedulePlan
from launcher.training.adapters import add_adapter
from launcher.training.attention import BACKENDS, Backend, register
from launcher.training.batches import Numbers, PackedBatch, Shape, make_shape
from launcher.training.dealing import Hands, StepOrder
from launcher.training.engine import Engine
from launcher.training.exchange import share_weights
from launcher.training.feeding import TrainingBatches
from launcher.training.graphs import GraphedMicroSteps
from launcher.training.loading import fingerprint_base, load_base
from launcher.training.model import TrainedModel
from launcher.training.optim import build_optimizer, build_schedule
from launcher.training.watchdog import Pulse


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split of the store, with what must be known of each of its packs."""

    file: PackFile
    num_trained: Numbers
    num_tokens: Numbers
    num_documents: Numbers
    costs: Numbers
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Run:
    plan: Plan
    paths: RunPaths
    engine: Engine
    train: Split
    validation: Split | None
    order: StepOrder
    num_steps: int
    data_key: str
    base_fingerprint: str
    pulse: Pulse = field(default_factory=Pulse)

    def say(self, text: str) -> None:
        """Once, however many ranks there are."""
        if self.engine.is_main:
            say(text)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def count_micro_batches(self, step: int) -> int:
        return self.batches().count_micro_batches(step)

    def batches(self) -> TrainingBatches:
        batch = self.plan.batch
        return TrainingBatches(
            file=self.train.file,
            costs=self.train.costs,
            order=self.order,
            hands=Hands(
                num_ranks=self.engine.num_ranks,
                micro_batch_size=batch.micro_batch_size,
                num_micro_batches=batch.gradient_accumulation_steps,
            ),
            rank=self.engine.rank,
            shape=self.train.shape,
            num_steps=self.num_steps,
        )


def build_run(plan: Plan, paths: RunPaths, store: Store, module: TrainedModel, accelerator: Accelerator) -> Run:
    train = _open_split(store, "train", plan.batch, plan.batch.micro_batch_size)
    validation = None
    if "validation" in store.splits and len(store.open_split("validation")):
        validation = _open_split(store, "validation", plan.batch, plan.batch.eval_batch_size)
    order = StepOrder(
        num_packs=len(train.file),
        global_batch_size=plan.batch.global_batch_size,
        seed=plan.schedule.seed,
        lengths=train.num_tokens.astype(np.int32) if plan.batch.group_by_length else None,
    )
    num_steps = count_steps(plan.schedule, order.steps_per_epoch)
    return Run(
        plan=plan,
        paths=paths,
        engine=_make_engine(plan, module, accelerator, num_steps),
        train=train,
        validation=validation,
        order=order,
        num_steps=num_steps,
        data_key=store.manifest.key,
        base_fingerprint=fingerprint_base(plan, module.base),
    )


def build_module(
    plan: Plan, folders: tuple[Path, ...], device: torch.device, backend: Backend | None = None
) -> TrainedModel:
    """Base and adapter, not yet compiled. The adapter's first weights depend on the seed alone."""
    chosen = backend or BACKENDS[plan.attention.backend]
    base = load_base(plan, folders, register(plan.attention.backend, chosen), device)
    set_seed(plan.schedule.seed)
    module = TrainedModel(add_adapter(base, plan), chosen, plan.loss_kernel)
    module.train()
    return module


def count_steps(schedule: SchedulePlan, steps_per_epoch: int) -> int:
    """Of the real number of packs; the plan had to estimate it."""
    if schedule.max_steps is not None:
        return schedule.max_steps
    return max(1, ceil(steps_per_epoch * schedule.epochs - 1e-9))


def _make_engine(plan: Plan, module: TrainedModel, accelerator: Accelerator, num_steps: int) -> Engine:
    if plan.strategy in ("single", "ddp"):
        module.to(accelerator.device)
    module.prepare(plan)
    optimizer = build_optimizer(plan.optimizer, module)
    schedule = build_schedule(plan.schedule, optimizer, num_steps)
    adds_up_behind = plan.adds_up_behind and plan.strategy == "ddp"
    if adds_up_behind:  # all that accelerate does but for DDP's hooks
        model, prepared = accelerator.prepare_model(module, evaluation_mode=True), accelerator.prepare(optimizer)
        share_weights([parameter for parameter in module.parameters() if parameter.requires_grad])
    else:
        model, prepared = accelerator.prepare(module, optimizer)
    if plan.strategy == "zero3":
        module.keep_head_at_hand()
    set_seed(plan.schedule.seed)  # what building drew depends on the engine; what training draws shall not
    return Engine(
        accelerator=accelerator,
        module=module,
        model=model,
        optimizer=prepared,
        schedule=schedule,
        max_grad_norm=plan.optimizer.max_grad_norm,
        num_micro_batches=plan.batch.gradient_accumulation_steps,
        reduces_always=plan.strategy == "fsdp2" and plan.adapter.kind == "full",
        graphs=_make_graphs(plan, module, model, accelerator),
        adds_up_behind=adds_up_behind,
        scales_loss=plan.precision.loss_scaling,
    )


def _make_graphs(
    plan: Plan, module: TrainedModel, model: nn.Module, accelerator: Accelerator
) -> GraphedMicroSteps | None:
    if not plan.cuda_graph or plan.strategy not in ("single", "ddp"):
        return None

    def micro_step(batch: PackedBatch, num_trained: Tensor) -> Tensor:
        loss: Tensor = model(batch) / num_trained
        accelerator.backward(loss)
        return loss.detach()

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return GraphedMicroSteps(micro_step, trained, plan.base.vocab_size)


def _open_split(store: Store, name: str, batch: BatchPlan, micro_batch_size: int) -> Split:
    file = store.open_split(name)
    if len(file) == 0:
        raise InputError(f"{store.folder}: the {name} split has no sequence")
    num_documents = file.count("document_lengths")
    return Split(
        file=file,
        num_trained=file.column("num_trained"),
        num_tokens=file.count("input_ids"),
        num_documents=num_documents,
        costs=file.column("sum_squares"),
        shape=make_shape(num_documents, micro_batch_size, batch.sequence_length, is_packed=batch.packed),
    )
