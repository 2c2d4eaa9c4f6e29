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

    num_cycles: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of cosine: periods. Of cosine_with_restarts: restarts, counted whole."""
    power: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """Of polynomial: 1 is a straight line."""
    lr_end: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of polynomial: the rate at the end."""


class Wandb(Strict):
    """Where the metrics go. No keys or passwords: they stay in the environment."""

    project: str | None = None
    """Project of the runs; absent: WANDB_PROJECT, else expert-launcher."""
    entity: str | None = None
    """Team or user; absent: WANDB_ENTITY, else that of your key."""
    group: str | None = None
    """Runs that belong together; absent: the expert."""
    name: str | None = None
    """Of the run; absent: its id."""
    tags: tuple[str, ...] = ()
    """To filter by."""
    notes: str | None = None
    """Shown beside the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Absent: online with a key, offline without. WANDB_MODE wins, except over disabled."""
    artifacts: tuple[Literal["adapter", "manifest"], ...] = ()
    """Uploaded when the run is done."""


class TrainingConfig(Strict):
    # What to learn
    method: Annotated[Literal["sft", "rlhf", "dpo"], one_of("sft", refused=("rlhf", "dpo"))]
    """Only sft: supervised fine-tuning."""
    adapter_type: Annotated[
        Literal["lora", "dora", "ia3", "full", "lokr", "adalora"],
        one_of("lora", "dora", "ia3", "full", refused=("lokr", "adalora")),
    ]
    """What is trained: a LoRA, DoRA or IA³ adapter on a frozen base, or with full every weight."""
    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Size of LoRA's and DoRA's matrices, which need it. A larger one can learn more and takes more memory."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """LoRA and DoRA need it: what the adapter says counts alpha / rank times."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of the adapter's inputs. Absent: what `base_models.adapters` says, else 0.05, as the published trainer."""
    target_modules: tuple[str, ...] = ()
    """The base's matrices that get an adapter, such as q_proj. Names the base does not have are refused."""
    feedforward_modules: tuple[str, ...] = ()
    """Of IA³: which of target_modules are scaled at their input."""
    epochs: Epochs | None = None
    """Passes over the training rows; may be a fraction. This or max_steps is needed."""
    num_epochs: Epochs | None = None
    """Another name for epochs."""
    max_steps: Steps | None = None
    """Optimizer steps; wins over epochs. 0 is absent."""
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """The highest rate, behind the warm-up."""
    lr_scheduler: SchedulerName = "linear"
    """How the rate falls behind the warm-up."""
    lr_scheduler_kwargs: SchedulerOptions = SchedulerOptions()
    """Options of the schedule."""
    warmup_steps: Steps = 0
    """Steps in which the rate rises from 0."""
    warmup_ratio: Ratio | None = None
    """The same as a share of all steps; wins over warmup_steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """AdamW's."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """AdamW's."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Gradients are clipped to this norm, over all weights and ranks; 0: never."""
    batch_size: BatchSize
    """With gradient_accumulation_steps the global batch: their product is kept on any hardware."""
    gradient_accumulation_steps: BatchSize = 1
    """The other factor of the global batch. How it is split is the plan's affair."""
    max_seq_length: Annotated[int, Field(ge=8, le=10**7)] = 2048
    """Tokens of a sequence. Longer rows are cut at their end, and counted."""
    packing: bool = False
    """Several rows fill one sequence, kept apart. Off: a row a sequence, which costs no padding either."""
    group_by_length: bool = False
    """Rows of similar length come together. Without meaning where rows are packed."""
    loss_on: Literal["completion", "all"] = "all"
    """completion: answers and their end token are trained; all: everything, the question too."""
    seed: Seed = 42
    """Of weights, order and dropout: the same seed trains the same."""

    # How to run it: None means that the plan decides
    bf16: bool | None = None
    """true: compute in BF16, an error where the GPU has none; false: not in BF16."""
    fp16: bool | None = None
    """true: compute in FP16 with loss scaling."""
    use_tf32: bool | None = None
    """FP32 products in TF32 on GPUs that have it."""
    attention: Literal["auto"] | AttentionBackend = "auto"
    """The kernel. A named one that cannot run here is an error; auto takes the fastest that is proven."""
    flash_attention_2: bool | None = None
    """false: no FlashAttention, neither a package's nor torch's own."""
    use_sdpa: bool | None = None
    """With flash_attention_2 false: torch's scaled_dot_product_attention."""
    optim: OptimizerName | None = None
    """The optimizer. adamw_bnb_8bit needs a GPU and bitsandbytes."""
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Recompute in the backward pass: true every layer, selective what is cheap. Saves memory."""
    torch_compile: bool | None = None
    """Fuse kernels by torch.compile: faster steps behind a slow first one."""
    torch_compile_backend: Annotated[str, Field(min_length=1)] | None = None
    """Of torch.compile; absent: inductor."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    """Of torch.compile. reduce-overhead asks for a CUDA graph of the micro-step, any other mode is against it."""
    dataloader_num_workers: Workers | None = None
    """Processes that read packs; rows are prepared before, so two suffice."""
    dataloader_prefetch_factor: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Batches that a worker has ready."""
    dataloader_pin_memory: bool | None = None
    """Batches in pinned memory, so that copies run beside the GPU."""
    dataloader_persistent_workers: bool | None = None
    """Keep workers between epochs."""
    strategy: Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    """How several GPUs share the work; `--strategy` wins. auto: the simplest that fits, if no other is 20 % faster."""
    offload: Literal["auto", "none", "optimizer", "optimizer_and_parameters"] = "auto"
    """What lies in CPU memory. auto: nothing, unless nothing else fits."""
    eval_batch_size: BatchSize | None = None
    """Sequences at a time in an evaluation; absent: a micro-batch."""
    pretokenized_cache: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the prepared data, below LAUNCHER_DATA_DIR; absent: datasets_optimized/."""

    # When to look and to save
    logging_steps: PositiveSteps = 10
    """A line on the console every so many steps; metrics.jsonl has every step."""
    evaluation_strategy: Cadence | None = None
    """When the held-out loss is measured and answers are judged; absent: every epoch."""
    eval_steps: PositiveSteps | None = None
    """With steps: every so many (absent: 500)."""
    eval_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """With epoch: every so many; may be a fraction."""
    save_strategy: Cadence | None = None
    """When a checkpoint is saved; absent: every epoch, and at least every half hour."""
    save_steps: PositiveSteps | None = None
    """With steps: every so many (absent: 500)."""
    save_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """With epoch: every so many; may be a fraction."""
    save_total_limit: PositiveSteps | None = 3
    """How many checkpoints are kept; the best is among them where it is to be loaded. null: all."""
    load_best_model_at_end: bool | None = None
    """The adapter is that of the best evaluation; absent: yes, unless nothing is evaluated."""
    metric_for_best_model: str = "eval_loss"
    """Only eval_loss (or loss)."""
    greater_is_better: bool = False
    """Only false: of losses the smaller one is better."""
    early_stopping_patience: PositiveSteps | None = None
    """Stop after so many evaluations without a better one."""
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    """By how much an evaluation must be better to count."""
    wandb: Wandb = Wandb()
    """Where Weights & Biases is told of the run."""

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
    if config.greater_is_better:
        problems.append("greater_is_better: the smaller loss is the better one; remove it, or say false")
    if config.evaluation_strategy == "no" and config.early_stopping_patience is not None:
        problems.append("early_stopping_patience: needs an evaluation, but evaluation_strategy is no")
    return problems


def _are_out_of_step(config: TrainingConfig) -> bool:
    """Both said, and differently. One that is left out follows the other."""
    return None not in (config.save_strategy, config.evaluation_strategy) and (
        config.save_strategy != config.evaluation_strategy
    )
