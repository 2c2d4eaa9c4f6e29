"""`training.config`: the hyperparameters, and optional settings of how to run the training.

An absent execution key is None: the plan decides and reports its decision. An absent learning key has the default of
the trainer of the published manifests, so that old files keep their meaning.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from launcher.core.choices import AdapterKind, AttentionBackend, OptimizerName
from launcher.manifest.strict_model import Ignored, NonEmptyPath, Strict

# Upper bounds that no training reaches: they keep typing errors out of the plan's arithmetic.
BatchSize = Annotated[int, Field(ge=1, le=10**6)]
Epochs = Annotated[float, Field(gt=0, le=1e6)]
Steps = Annotated[int, Field(ge=0, le=10**9)]
PositiveSteps = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # NumPy's range
Workers = Annotated[int, Field(ge=0, le=1024)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Cadence = Literal["no", "steps", "epoch"]
SchedulerName = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


class SchedulerOptions(Strict):
    """Options of the learning rate schedule, `lr_scheduler_kwargs`."""

    num_cycles: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """cosine: number of periods; cosine_with_restarts: number of restarts, an integer."""
    power: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """polynomial: exponent; 1 is linear."""
    lr_end: Annotated[float, Field(ge=0, le=1)] | None = None
    """polynomial: final learning rate."""


class Wandb(Strict):
    """Weights & Biases settings of a run. API keys belong in the environment."""

    project: str | None = None
    """W&B project. Default: WANDB_PROJECT, else expert-launcher."""
    entity: str | None = None
    """W&B team or user. Default: WANDB_ENTITY, else the owner of the API key."""
    group: str | None = None
    """Run group. Default: the expert's name."""
    name: str | None = None
    """Run name. Default: the run id."""
    tags: tuple[str, ...] = ()
    """Run tags."""
    notes: str | None = None
    """Run notes."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Default: online with an API key; without one, offline if any key of wandb is set, else disabled. WANDB_MODE \
overrides every value except disabled."""
    artifacts: tuple[Literal["adapter", "manifest"], ...] = ()
    """Artifacts to upload when the run is finished."""


class TrainingConfig(Strict):
    """Hyperparameters and execution settings of a training."""

    # Hyperparameters
    method: Literal["sft"]
    """Training method: sft (supervised fine-tuning)."""
    adapter_type: AdapterKind
    """A LoRA, DoRA or IA³ adapter on a frozen base model; full trains all weights."""
    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Rank r of the LoRA or DoRA matrices; required for both. A higher rank has more capacity and needs more memory."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """The LoRA or DoRA update is scaled by alpha / rank; required for both."""
    use_rslora: bool = False
    """rsLoRA: scale the LoRA or DoRA update by alpha / sqrt(rank) instead of alpha / rank."""
    init_lora_weights: Annotated[str, Field(pattern=r"^pissa(_niter_[1-9][0-9]?)?$")] | None = None
    """Initial LoRA weights: pissa takes the largest singular values of the base's weights, pissa_niter_16 an \
approximation that is much faster. Default: A random, B zero."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1, le=1e3)] | None = None
    """LoRA+: the learning rate of the B matrices is this many times learning_rate. Default: 1."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout on the adapter's input. Default: `dropout` in `base_models.adapters`, else 0.05."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = ()
    """Linear layers of the base model that get an adapter, such as q_proj; "all-linear" selects all linear layers of \
the decoder, without the head. Names not in the base model are refused."""
    target_parameters: tuple[str, ...] = ()
    """Experts of a mixture of experts that get LoRA, by PEFT's names, such as mlp.experts.gate_up_proj and \
mlp.experts.down_proj. Needs dropout 0."""
    modules_to_save: tuple[str, ...] = ()
    """Embeddings and LM head that are trained completely alongside a LoRA or DoRA adapter, such as embed_tokens and \
lm_head. Where they are tied, both share one trained weight."""
    new_tokens: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = ()
    """Tokens that are added to the tokenizer. Their embeddings start as the mean of all others and are trained; the \
other embeddings stay frozen unless modules_to_save or adapter_type full trains them."""
    feedforward_modules: tuple[str, ...] = ()
    """IA³: the target_modules that are scaled at their input."""
    epochs: Epochs | None = None
    """Passes over the training rows; may be a fraction. Either this or max_steps is required."""
    num_epochs: Epochs | None = None
    """Alias of epochs."""
    max_steps: Steps | None = None
    """Number of optimizer steps; takes precedence over epochs. 0 means absent."""
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak learning rate, reached after the warm-up."""
    lr_scheduler: SchedulerName = "linear"
    """Learning rate schedule after the warm-up."""
    lr_scheduler_kwargs: SchedulerOptions = SchedulerOptions()
    """Options of the schedule."""
    warmup_steps: Steps = 0
    """Steps of linear warm-up from 0. The schedule constant has none; constant_with_warmup has."""
    warmup_ratio: Ratio | None = None
    """Warm-up as a fraction of all steps; takes precedence over warmup_steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Weight decay of the optimizer."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """β₁ of AdamW."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """β₂ of AdamW."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """ε of AdamW."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Gradients are clipped to this global norm; 0 disables clipping."""
    batch_size: BatchSize
    """The global batch is batch_size * gradient_accumulation_steps on any hardware; an epoch with fewer sequences is \
one step that trains all of them."""
    gradient_accumulation_steps: BatchSize = 1
    """The other factor of the global batch. The plan splits the global batch into micro-batches."""
    max_seq_length: Annotated[int, Field(ge=8, le=10**7)] = 2048
    """Maximum tokens per sequence. Longer rows are truncated at the end, and counted."""
    packing: bool = False
    """Pack several rows into one sequence, without attention between rows. Neither setting adds padding."""
    group_by_length: bool = False
    """Put rows of similar length into the same batch. No effect with packing."""
    loss_on: Literal["completion", "all"] = "all"
    """completion: loss on answers and their end token only; all: loss on every token, including the prompt."""
    seed: Seed = 42
    """Seed of adapter initialization, data order and dropout."""

    # Execution: if None, the plan decides
    precision: Literal["bf16", "fp16", "fp32", "fp8"] | None = None
    """Arithmetic of matrix products; takes precedence over the keys bf16 and fp16. fp8: the frozen base of LoRA and \
DoRA is stored and multiplied in FP8, everything else in BF16; in full fine-tuning, linear layers are multiplied in \
FP8, except for their weights' gradients."""
    bf16: bool | None = None
    """true: compute in BF16, on GPUs without it in FP16; false: do not use BF16."""
    fp16: bool | None = None
    """true: compute in FP16 with loss scaling."""
    use_tf32: bool | None = None
    """Use TF32 for FP32 matrix multiplications on GPUs that support it."""
    attention: Literal["auto"] | AttentionBackend = "auto"
    """Attention kernel. auto selects the fastest verified one; a named kernel that cannot run is an error."""
    flash_attention_2: bool | None = None
    """false: no FlashAttention, neither from a package nor from PyTorch."""
    use_sdpa: bool | None = None
    """With flash_attention_2 false: use torch.nn.functional.scaled_dot_product_attention."""
    optim: OptimizerName | None = None
    """Optimizer. adamw_bnb_8bit and paged_adamw_8bit need a GPU and bitsandbytes; paged: moments in CPU memory."""
    bf16_stochastic_round: bool | None = None
    """Full fine-tuning: store weights in BF16 only and round updates stochastically. Default: if FP32 weights do not \
fit into one GPU."""
    optimizer_in_bwd: bool | None = None
    """Full fine-tuning: update each weight in the backward pass and free its gradient; without gradient clipping and \
accumulation. Default: if nothing else fits and max_grad_norm is 0."""
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Save memory by recomputing activations in the backward pass: true for every layer, selective for cheap ops."""
    torch_compile: bool | None = None
    """Fuse kernels with torch.compile: faster steps after a slow first one."""
    torch_compile_backend: Annotated[str, Field(min_length=1)] | None = None
    """Backend of torch.compile. Default: inductor."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    """Mode of torch.compile. reduce-overhead requests a CUDA graph of the micro-step; other modes exclude it."""
    dataloader_num_workers: Workers | None = None
    """DataLoader worker processes. Rows are tokenized in advance, so two are enough."""
    dataloader_prefetch_factor: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Batches prefetched per worker."""
    dataloader_pin_memory: bool | None = None
    """Put batches into pinned memory, so that copies to the GPU are asynchronous."""
    dataloader_persistent_workers: bool | None = None
    """Keep workers between epochs."""
    strategy: Literal["auto", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"] = "auto"
    """Parallelism over several GPUs; `--strategy` overrides it. auto: the simplest that fits, unless another is at \
least 20 % faster."""
    offload: Literal["auto", "none", "optimizer", "optimizer_and_parameters"] = "auto"
    """Offload to CPU memory. auto: only if nothing else fits."""
    eval_batch_size: BatchSize | None = None
    """Sequences per evaluation batch. Default: the micro-batch size."""
    pretokenized_cache: NonEmptyPath | None = None
    """Folder of the tokenized data, relative to and inside LAUNCHER_DATA_DIR. Default: datasets_optimized/."""

    # Logging, evaluation and checkpoints
    logging_steps: PositiveSteps = 10
    """Print progress every N steps; metrics.jsonl contains every step."""
    evaluation_strategy: Cadence | None = None
    """When to evaluate validation loss and task metrics. Default: every epoch."""
    eval_steps: PositiveSteps | None = None
    """With evaluation_strategy steps, or without a strategy: evaluate every N steps (default 500)."""
    eval_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """With evaluation_strategy epoch, or without a strategy: evaluate every N epochs; may be a fraction."""
    save_strategy: Cadence | None = None
    """When to save a checkpoint. Default: every epoch, and at least every half hour."""
    save_steps: PositiveSteps | None = None
    """With save_strategy steps, or without a strategy: save every N steps (default 500)."""
    save_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """With save_strategy epoch, or without a strategy: save every N epochs; may be a fraction."""
    save_total_limit: PositiveSteps | None = 3
    """Number of checkpoints to keep, including the best one if it is to be loaded. null: keep all."""
    load_best_model_at_end: bool | None = None
    """Export the checkpoint with the best evaluation. Default: true, unless evaluation is off."""
    metric_for_best_model: str = "eval_loss"
    """eval_loss (or loss), or eval/<check>: the rate at which answers pass a check of the judge, such as eval/equal."""
    greater_is_better: bool | None = None
    """Follows from metric_for_best_model: false for the loss, true for eval/<check>."""
    early_stopping_patience: PositiveSteps | None = None
    """Stop after N evaluations without improvement of metric_for_best_model."""
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Minimum improvement that counts: decrease of the loss, or increase of the rate (0.01: one percentage point)."""
    report_to: tuple[Literal["wandb", "tensorboard", "mlflow"], ...] | None = None
    """Trackers that metrics are logged to, as in transformers; [] is none. Default: W&B by its own settings. MLflow \
needs MLFLOW_TRACKING_URI."""
    wandb: Wandb = Wandb()
    """Weights & Biases settings."""

    # Keys of other trainers, without effect
    use_unsloth: Ignored = None
    memory_efficient_attention: Ignored = None
    memory_clear_every: Ignored = None
    activation_checkpointing: Ignored = None
    gradient_checkpointing_kwargs: Ignored = None
    use_cuda_graphs: Ignored = None
    cuda_graph_warmup_steps: Ignored = None

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainingConfig:
        problems = [
            *_check_adapter(self),
            *_check_scheduler(self),
            *_check_length(self),
            *_check_cadence(self),
        ]
        if self.bf16 and self.fp16:
            problems.append("bf16: bf16 and fp16 are both true; keep one (bf16 if the GPU supports it)")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def num_train_epochs(self) -> float | None:
        """Number of epochs, from either of the two keys."""
        return self.epochs if self.epochs is not None else self.num_epochs

    @property
    def best_check(self) -> str | None:
        """The judge's check that decides which checkpoint is best; None: the validation loss decides."""
        name = self.metric_for_best_model
        return None if name in _LOSS_NAMES else name.removeprefix("eval/")

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps


_LOSS_NAMES = ("eval_loss", "loss", "eval/loss")


def _check_adapter(config: TrainingConfig) -> list[str]:
    kind = config.adapter_type
    problems = []
    for name in ("rank", "alpha"):
        is_absent = getattr(config, name) is None
        if kind in ("lora", "dora") and is_absent:
            problems.append(f"{name}: missing; adapter_type {kind} requires it")
        elif kind in ("ia3", "full") and not is_absent:
            problems.append(f"{name}: not applicable to adapter_type {kind}; remove it")
    if config.init_lora_weights and (kind != "lora" or config.target_parameters):
        other = f"adapter_type {kind}" if kind != "lora" else "target_parameters"
        problems.append(f"init_lora_weights: {config.init_lora_weights} is not supported with {other}; remove it")
    for name in ("use_rslora", "loraplus_lr_ratio", "modules_to_save"):
        if kind not in ("lora", "dora") and getattr(config, name):
            problems.append(f"{name}: not applicable to adapter_type {kind}; remove it")
    for name in ("bf16_stochastic_round", "optimizer_in_bwd"):
        if kind != "full" and getattr(config, name):
            problems.append(f"{name}: applicable to adapter_type full only, not to {kind}; remove it")
    if config.optimizer_in_bwd and config.max_grad_norm:
        reason = "the norm of all gradients is not known while weights are updated"
        problems.append(f"optimizer_in_bwd: excludes gradient clipping ({reason}); set max_grad_norm to 0")
    if config.new_tokens and kind == "ia3":
        problems.append("new_tokens: PEFT's IA³ cannot train embeddings of single tokens; use lora, dora or full")
    if len(set(config.new_tokens)) < len(config.new_tokens) or any(not token.strip() for token in config.new_tokens):
        problems.append("new_tokens: must be different texts that are not blank")
    if config.target_parameters and kind != "lora":
        reason = "PEFT has no DoRA for stacked experts" if kind == "dora" else "only to lora"
        problems.append(f"target_parameters: not applicable to adapter_type {kind} ({reason}); remove it")
    elif config.target_parameters and config.dropout:
        problems.append("dropout: must be 0 with target_parameters: PEFT has no dropout for stacked experts")
    if kind != "full" and not (config.target_modules or config.target_parameters):
        problems.append(f"target_modules: missing or empty; adapter_type {kind} requires at least one")
    if kind == "full" and config.target_modules:
        problems.append("target_modules: not applicable to adapter_type full, which trains all weights; remove it")
    if config.feedforward_modules and kind != "ia3":
        problems.append(f"feedforward_modules: not applicable to adapter_type {kind}, only to ia3; remove it")
    elif isinstance(config.target_modules, tuple):  # PEFT refuses them too, but only after loading the base model
        unknown = [name for name in config.feedforward_modules if name not in config.target_modules]
        if unknown:
            problems.append(f"feedforward_modules: {', '.join(unknown)} must be in target_modules as well")
    return problems


# Options of the schedules in transformers, other than the numbers of steps.
_SCHEDULER_OPTIONS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power", "lr_end"),
}


def _check_scheduler(config: TrainingConfig) -> list[str]:
    name, options = config.lr_scheduler, config.lr_scheduler_kwargs
    problems = [
        f"lr_scheduler_kwargs.{option}: not applicable to lr_scheduler {name}; remove it"
        for option in SchedulerOptions.model_fields
        if getattr(options, option) is not None and option not in _SCHEDULER_OPTIONS.get(name, ())
    ]
    cycles = options.num_cycles
    if name == "cosine_with_restarts" and cycles is not None and cycles != int(cycles):
        problems.append(f"lr_scheduler_kwargs.num_cycles: must be an integer for {name}, not {cycles:g}")
    if name == "polynomial" and (options.lr_end if options.lr_end is not None else 1e-7) >= config.learning_rate:
        problems.append(f"lr_scheduler_kwargs.lr_end: must be below the learning_rate of {config.learning_rate:g}")
    return problems


def _check_length(config: TrainingConfig) -> list[str]:
    if config.epochs is not None and config.num_epochs is not None and config.epochs != config.num_epochs:
        return [f"epochs: epochs ({config.epochs:g}) and num_epochs ({config.num_epochs:g}) differ; keep one"]
    if config.num_train_epochs is None and not config.max_steps:
        return ["epochs: missing; set epochs or max_steps"]
    return []


def _check_cadence(config: TrainingConfig) -> list[str]:
    problems = []
    strategies = {config.save_strategy, config.evaluation_strategy} - {None}  # an absent one follows the other
    if config.load_best_model_at_end and config.evaluation_strategy == "no":
        problems.append("load_best_model_at_end: requires evaluation, but evaluation_strategy is no")
    elif config.load_best_model_at_end and len(strategies) > 1:
        problems.append(
            f"load_best_model_at_end: requires a checkpoint at every evaluation, but save_strategy is "
            f"{config.save_strategy} and evaluation_strategy is {config.evaluation_strategy}; make them equal"
        )
    for name, cadence in (("save", config.save_strategy), ("eval", config.evaluation_strategy)):
        if getattr(config, f"{name}_epochs") is not None and cadence in ("no", "steps"):
            problems.append(f"{name}_epochs: not applicable to strategy {cadence}; remove it, or use epoch")
    metric = config.metric_for_best_model
    is_loss = metric in _LOSS_NAMES
    if not is_loss and not re.fullmatch(r"eval/[^\s/]+", metric):
        problems.append(f"metric_for_best_model: must be eval_loss or eval/<check>, such as eval/parses, not {metric}")
    elif not is_loss and config.evaluation_strategy == "no":
        problems.append(f"metric_for_best_model: {metric} requires evaluation, but evaluation_strategy is no")
    if config.greater_is_better is not None and config.greater_is_better == is_loss:
        what = "a smaller loss" if is_loss else "a higher rate"
        problems.append(f"greater_is_better: {what} is better; remove it, or set it to {str(not is_loss).lower()}")
    if config.evaluation_strategy == "no" and config.early_stopping_patience is not None:
        problems.append("early_stopping_patience: requires evaluation, but evaluation_strategy is no")
    return problems
