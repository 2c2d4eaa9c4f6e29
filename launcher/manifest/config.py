"""`training.config`: what to learn, and, where the author cares, how to run it.

An absent execution key (None here) means *decide for me*; the plan says what was decided. An absent learning key has
the value that the trainer of the published manifests used, so that old files mean what they meant.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from launcher.choices import AttentionBackend, OptimizerName
from launcher.manifest.base import Scalar, Strict, one_of

# Bounds that no training reaches: they keep a slip of the keyboard out of the arithmetic of a plan.
BatchSize = Annotated[int, Field(ge=1, le=10**6)]
Epochs = Annotated[float, Field(gt=0, le=1e6)]
Steps = Annotated[int, Field(ge=0, le=10**9)]
PositiveSteps = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy takes
Workers = Annotated[int, Field(ge=0, le=1024)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Cadence = Literal["no", "steps", "epoch"]
SchedulerName = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


class SchedulerOptions(Strict):
    """`lr_scheduler_kwargs`."""

    num_cycles: Annotated[float, Field(gt=0, le=1e6)] | None = None  # cosine (periods), cosine_with_restarts (restarts)
    power: Annotated[float, Field(gt=0, le=1e3)] | None = None  # polynomial
    lr_end: Annotated[float, Field(ge=0, le=1)] | None = None  # polynomial


class Wandb(Strict):
    """Where the metrics go. No keys or passwords: they stay in the environment."""

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    artifacts: tuple[Literal["adapter", "manifest"], ...] = ()  # uploaded when the run is done


class TrainingConfig(Strict):
    # What to learn
    method: Annotated[Literal["sft", "rlhf", "dpo"], one_of("sft", refused=("rlhf", "dpo"))]
    adapter_type: Annotated[
        Literal["lora", "dora", "ia3", "full", "lokr", "adalora"],
        one_of("lora", "dora", "ia3", "full", refused=("lokr", "adalora")),
    ]
    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    alpha: Annotated[int, Field(ge=1, le=10**6)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    target_modules: tuple[str, ...] = ()
    feedforward_modules: tuple[str, ...] = ()
    epochs: Epochs | None = None
    num_epochs: Epochs | None = None
    max_steps: Steps | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    lr_scheduler: SchedulerName = "linear"
    lr_scheduler_kwargs: SchedulerOptions = SchedulerOptions()
    warmup_steps: Steps = 0
    warmup_ratio: Ratio | None = None
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    batch_size: BatchSize
    gradient_accumulation_steps: BatchSize = 1
    max_seq_length: Annotated[int, Field(ge=8, le=10**7)] = 2048
    packing: bool = False
    group_by_length: bool = False
    loss_on: Literal["completion", "all"] = "all"
    seed: Seed = 42

    # How to run it: None means that the plan decides
    bf16: bool | None = None
    fp16: bool | None = None
    use_tf32: bool | None = None
    attention: Literal["auto"] | AttentionBackend = "auto"
    flash_attention_2: bool | None = None
    use_sdpa: bool | None = None
    optim: OptimizerName | None = None
    gradient_checkpointing: bool | Literal["selective"] | None = None
    torch_compile: bool | None = None
    torch_compile_backend: Annotated[str, Field(min_length=1)] | None = None
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    dataloader_num_workers: Workers | None = None
    dataloader_prefetch_factor: Annotated[int, Field(ge=1, le=1024)] | None = None
    dataloader_pin_memory: bool | None = None
    dataloader_persistent_workers: bool | None = None
    strategy: Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    offload: Literal["auto", "none", "optimizer", "optimizer_and_parameters"] = "auto"
    eval_batch_size: BatchSize | None = None
    pretokenized_cache: Annotated[str, Field(min_length=1)] | None = None

    # When to look and to save
    logging_steps: PositiveSteps = 10
    evaluation_strategy: Cadence | None = None
    eval_steps: PositiveSteps | None = None
    eval_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None  # with `epoch`: every so many
    save_strategy: Cadence | None = None
    save_steps: PositiveSteps | None = None
    save_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    save_total_limit: PositiveSteps | None = 3
    load_best_model_at_end: bool | None = None
    metric_for_best_model: str = "eval_loss"
    greater_is_better: bool = False
    early_stopping_patience: PositiveSteps | None = None
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    wandb: Wandb = Wandb()

    # Keys of other trainers: known, and listed by `launcher validate` as not used
    use_unsloth: bool | None = None
    memory_efficient_attention: bool | None = None
    memory_clear_every: Steps | None = None
    activation_checkpointing: str | None = None
    gradient_checkpointing_kwargs: dict[str, Scalar] | None = None
    use_cuda_graphs: bool | None = None
    cuda_graph_warmup_steps: Steps | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> TrainingConfig:
        problems = [
            *_method_problems(self),
            *_adapter_problems(self),
            *_scheduler_problems(self),
            *_length_problems(self),
            *_cadence_problems(self),
        ]
        if self.bf16 and self.fp16:
            problems.append("bf16: bf16 and fp16 are both true; keep one (bf16 where the GPU has it)")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def num_train_epochs(self) -> float | None:
        return self.epochs if self.epochs is not None else self.num_epochs

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps


def _method_problems(config: TrainingConfig) -> list[str]:
    if config.method != "sft":
        return [f"method: {config.method} is not supported, this launcher does supervised fine-tuning; use sft"]
    return []


def _adapter_problems(config: TrainingConfig) -> list[str]:
    kind = config.adapter_type
    if kind in ("lokr", "adalora"):
        return [f"adapter_type: {kind} is not supported; use lora, dora, ia3 or full"]
    problems = []
    if kind in ("lora", "dora"):
        missing = [name for name in ("rank", "alpha") if getattr(config, name) is None]
        problems += [f"{name}: missing, adapter_type {kind} needs it" for name in missing]
        if not config.target_modules:
            problems.append(f"target_modules: missing or empty, adapter_type {kind} needs at least one")
    else:
        given = [name for name in ("rank", "alpha") if getattr(config, name) is not None]
        problems += [f"{name}: no meaning for adapter_type {kind}; remove it" for name in given]
    if kind == "ia3" and not config.target_modules:
        problems.append("target_modules: missing or empty, adapter_type ia3 needs at least one")
    if kind == "full" and config.target_modules:
        problems.append("target_modules: no meaning for adapter_type full, which trains every weight; remove it")
    return problems + _feedforward_problems(config)


def _feedforward_problems(config: TrainingConfig) -> list[str]:
    if config.feedforward_modules and config.adapter_type != "ia3":
        return [f"feedforward_modules: no meaning for adapter_type {config.adapter_type}, only for ia3; remove it"]
    strangers = [name for name in config.feedforward_modules if name not in config.target_modules]
    if strangers and config.target_modules:  # PEFT refuses them too, but only once the base is loaded
        return [f"feedforward_modules: {', '.join(strangers)} must be in target_modules as well"]
    return []


# What each schedule of transformers can be told besides warm-up and length.
_SCHEDULER_OPTIONS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power", "lr_end"),
}


def _scheduler_problems(config: TrainingConfig) -> list[str]:
    name, options = config.lr_scheduler, config.lr_scheduler_kwargs
    given = [option for option in ("num_cycles", "power", "lr_end") if getattr(options, option) is not None]
    known = _SCHEDULER_OPTIONS.get(name, ())
    problems = [
        f"lr_scheduler_kwargs.{option}: no meaning for lr_scheduler {name}; remove it"
        for option in given
        if option not in known
    ]
    cycles = options.num_cycles
    if name == "cosine_with_restarts" and cycles is not None and cycles != int(cycles):
        problems.append(f"lr_scheduler_kwargs.num_cycles: restarts are counted whole, not {cycles:g}")
    if name == "polynomial" and (options.lr_end if options.lr_end is not None else 1e-7) >= config.learning_rate:
        problems.append(f"lr_scheduler_kwargs.lr_end: must be below the learning_rate of {config.learning_rate:g}")
    return problems


def _length_problems(config: TrainingConfig) -> list[str]:
    if config.epochs is not None and config.num_epochs is not None and config.epochs != config.num_epochs:
        return [f"epochs: epochs ({config.epochs:g}) and num_epochs ({config.num_epochs:g}) differ; keep one"]
    if config.num_train_epochs is None and not config.max_steps:
        return ["epochs: missing, say how long to train by epochs or max_steps"]
    return []


def _cadence_problems(config: TrainingConfig) -> list[str]:
    problems = []
    if config.evaluation_strategy == "no" and config.load_best_model_at_end:
        problems.append("load_best_model_at_end: needs an evaluation, but evaluation_strategy is no")
    elif config.load_best_model_at_end and _are_out_of_step(config):
        problems.append(
            f"load_best_model_at_end: the best model must have been saved, but save_strategy is {config.save_strategy} "
            f"and evaluation_strategy is {config.evaluation_strategy}; make them equal"
        )
    for name, cadence in (("save", config.save_strategy), ("eval", config.evaluation_strategy)):
        if getattr(config, f"{name}_epochs") is not None and cadence in ("no", "steps"):
            problems.append(f"{name}_epochs: no meaning where the strategy is {cadence}; remove it, or use epoch")
    if config.metric_for_best_model not in ("eval_loss", "loss"):
        problems.append(f"metric_for_best_model: only eval_loss picks a checkpoint, not {config.metric_for_best_model}")
    if config.evaluation_strategy == "no" and config.early_stopping_patience is not None:
        problems.append("early_stopping_patience: needs an evaluation, but evaluation_strategy is no")
    return problems


def _are_out_of_step(config: TrainingConfig) -> bool:
    """Both said, and differently. One that is left out follows the other."""
    return None not in (config.save_strategy, config.evaluation_strategy) and (
        config.save_strategy != config.evaluation_strategy
    )
