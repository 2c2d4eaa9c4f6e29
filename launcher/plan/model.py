"""The Plan: every decision about how a manifest is trained on given hardware, with its reason. On disk: plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from launcher import __version__
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import (
    SHARDED_STRATEGIES,
    AdapterKind,
    AttentionBackend,
    Checkpointing,
    CompileScope,
    Dtype,
    LossKernel,
    Offload,
    OptimizerName,
    Profile,
    Quantization,
    Strategy,
)
from launcher.core.errors import InputError, show_value
from launcher.core.frozen_model import Frozen
from launcher.core.metrics import EVAL_LOSS
from launcher.core.run_files import DAMAGED, parse_model, read_text
from launcher.core.units import format_price
from launcher.hardware.model import Hardware
from launcher.manifest.dataset import FieldMapping, Task
from launcher.plan.estimate.memory import MemoryTerm, count_allocated

PLAN_FORMAT: Literal[2] = 2  # increase it when a field of the plan is renamed, removed or changes its meaning
CALIBRATION_TERM = "calibration"  # memory term: correction of the estimate by runs measured on this machine


class Decision(Frozen):
    """One setting of the plan as users see it: its name, its value and the reason for it."""

    name: str
    value: str
    reason: str
    decided_by: Literal["manifest", "plan", "command line", "hardware", "user"]  # user: hardware.json


class PrecisionPlan(Frozen):
    """Data types of the computation and of the weights."""

    compute_dtype: Dtype
    base_dtype: Dtype
    trainable_dtype: Dtype  # of the adapter, or of all weights in full fine-tuning; BF16: with stochastic rounding
    use_tf32: bool
    loss_scaling: bool  # FP16 only
    fp8_base: bool = False  # the frozen base is stored and multiplied in FP8
    fp8_layers: bool = False  # trained linear layers are multiplied in FP8, except for the weights' gradients

    @property
    def uses_fp8(self) -> bool:
        """Whether matmuls of the decoder layers run in FP8."""
        return self.fp8_base or self.fp8_layers

    @property
    def name(self) -> str:
        """Return the value of the manifest's key `precision` that requests this: fp8, or the compute dtype."""
        return "fp8" if self.uses_fp8 else self.compute_dtype

    @property
    def mixed_precision(self) -> Literal["bf16", "fp16", "no"]:
        """Return the value of accelerate's `mixed_precision`."""
        return "no" if self.compute_dtype == "fp32" else self.compute_dtype


class AdapterPlan(Frozen):
    """The trained adapter, or all weights in full fine-tuning."""

    kind: AdapterKind
    rank: int | None
    alpha: int | None
    use_rslora: bool = False  # scale by alpha / sqrt(rank)
    init_lora_weights: str | None = None  # pissa, or pissa_niter_N; None: A random, B zero
    dropout: float
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()  # stacked experts
    modules_to_save: tuple[str, ...] = ()  # embeddings and head that are trained completely
    feedforward_modules: tuple[str, ...]
    trainable_parameters: int


class QuantizationPlan(Frozen):
    """How the frozen base model is quantized."""

    kind: Literal["int4"]
    storage_dtype: Literal["uint8", "bf16", "fp16", "fp32"]
    double_quantization: bool

    def stored_for(self, strategy: Strategy, compute_dtype: Dtype) -> QuantizationPlan:
        """Return this plan with the storage dtype for a strategy: the compute dtype for sharded weights, else uint8."""
        return self.model_copy(update={"storage_dtype": compute_dtype if strategy in SHARDED_STRATEGIES else "uint8"})


class AttentionPlan(Frozen):
    """The attention backend and its fallbacks."""

    backend: AttentionBackend
    fallbacks: tuple[AttentionBackend, ...]  # tried in order if the backend cannot run


class CompilePlan(Frozen):
    """Arguments of torch.compile, and whether layers or the model are compiled."""

    scope: CompileScope
    backend: str
    mode: str | None


class DataPlan(Frozen):
    """The training data. Paths are as in the manifest; relative ones start at the manifest's folder."""

    folder: str  # the folder of the manifest
    kind: Literal["single", "huggingface", "multi_task"]
    path: str | None
    format: str | None
    revision: str | None
    validation_path: str | None
    test_path: str | None
    tasks: dict[str, Task]
    streaming: bool
    max_rows: int | None = None  # of each training file
    field_mapping: FieldMapping
    system_prompt: str | None = None  # of rows without a system message
    prompt_template: str
    chat_template: str | None = None  # source of an own template; None: the tokenizer's
    chat_template_file: str | None = None  # its file in the manifest's folder
    end_token: str | None = None  # None: the template's
    new_tokens: tuple[str, ...] = ()  # added to the base's tokenizer
    cache_dir: str | None
    num_rows: int | None
    mean_tokens: float
    basis: str  # where num_rows and mean_tokens come from, as text
    is_length_assumed: bool = False  # the number of rows is known, but mean_tokens is an assumption


class WandbPlan(Frozen):
    """Settings of the Weights & Biases run."""

    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]
    notes: str | None
    mode: Literal["online", "offline", "disabled"] | None  # None: online with an API key
    is_requested: bool = False  # without an API key: offline if it is, else disabled
    artifacts: tuple[Literal["adapter", "manifest"], ...] = ()


class LoaderPlan(Frozen):
    """Arguments of the DataLoader."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


class BatchPlan(Frozen):
    """The global batch and its split over ranks and micro-steps, in sequences.

    global_batch_size = micro_batch_size * gradient_accumulation_steps * num_ranks - empty_slots
    """

    global_batch_size: int
    sequence_length: int
    num_ranks: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    empty_slots: int
    nearest_even_batches: tuple[int, ...]  # global batches that num_ranks divides; empty if it divides this one
    packed: bool
    group_by_length: bool
    eval_batch_size: int

    @property
    def num_slots(self) -> int:
        """Return the number of sequences that one step could hold."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.num_ranks

    @property
    def wasted_fraction(self) -> float:
        """Return the fraction of `num_slots` that holds no sequence, because the global batch does not fill it."""
        return self.empty_slots / self.num_slots


class OptimizerPlan(Frozen):
    """The optimizer, its hyperparameters and gradient clipping."""

    name: OptimizerName
    learning_rate: float
    loraplus_lr_ratio: float | None = None  # learning rate of LoRA's B, relative to that of A
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float | None  # None: no clipping
    in_backward: bool = False  # each weight is updated in the backward pass, and its gradient freed


class SchedulePlan(Frozen):
    """Length of the run, learning-rate schedule, and when to save, evaluate and log."""

    lr_scheduler: str
    scheduler_kwargs: dict[str, float]
    epochs: float
    max_steps: int | None
    num_steps: int | None  # None: the number of rows is unknown
    warmup_steps: int | None  # None: warmup_ratio of an unknown number of steps
    warmup_ratio: float | None
    save_every_steps: int | None
    save_every_epochs: float | None
    save_total_limit: int | None
    evaluate_every_steps: int | None
    evaluate_every_epochs: float | None
    logging_steps: int
    load_best_model_at_end: bool
    metric_for_best_model: str = EVAL_LOSS  # or eval/<check>: a rate, of which a higher one is better
    early_stopping_patience: int | None
    early_stopping_threshold: float
    seed: int


class MemoryPlan(Frozen):
    """Predicted peak memory of one rank, term by term, and the memory of the device."""

    terms: tuple[MemoryTerm, ...]
    device_bytes: int  # of one GPU; without GPUs, of the machine
    free_bytes: int
    headroom_bytes: int
    host_bytes: int  # offloaded state in CPU memory, per rank
    saving_bytes: int = 0  # CPU memory of a node while a checkpoint is saved

    @property
    def total_bytes(self) -> int:
        """Return the predicted peak memory of one rank."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def allocated_bytes(self) -> int:
        """Return the part of the peak that torch's allocator counts."""
        return count_allocated(self.terms)

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of the saved activations."""
        return sum(term.num_bytes for term in self.terms if term.name == "activations")

    @property
    def usable_bytes(self) -> int:
        """Return the free bytes minus the headroom."""
        return self.free_bytes - self.headroom_bytes

    @property
    def margin_bytes(self) -> int:
        """Return the usable bytes that the prediction leaves unused."""
        return self.usable_bytes - self.total_bytes


class TaskEvalPlan(Frozen):
    """Task evaluation while training: generated answers are judged before step 1 and at every evaluation."""

    judge: str
    num_rows: int  # per evaluation; an upper bound unless is_fixed
    is_fixed: bool  # use num_rows whatever they take
    time_share: float  # otherwise: fraction of the training time that task evaluation may take
    min_rows: int = 0  # a check decides which checkpoint is best: fewer judged rows are an error


class GuardPlan(Frozen):
    """How the run reacts to errors while training."""

    save_errors: Literal["stop", "continue"]  # if a checkpoint cannot be written
    max_nonfinite_steps: int  # abort after more consecutive steps with NaN/Inf loss or gradients
    hang_seconds: int  # abort after this long without a step


class ProfilePlan(Frozen):
    """The range of steps traced by the profiler, both ends included."""

    first_step: int
    last_step: int


class SpeedPlan(Frozen):
    """Estimated throughput, duration and cost."""

    tokens_per_second: float | None = None  # over all ranks; None: the GPU's peak is unknown
    seconds_per_step: float | None = None
    total_seconds: float | None = None
    mfu: float | None = None
    communication_fraction: float = 0.0  # of a step spent waiting for links or CPU memory
    price_per_gpu_hour: float | None = None
    cost: float | None = None
    confidence: str
    error: float | None = None  # relative error of tokens_per_second; None: unknown
    estimated_tokens_per_second: float | None = None  # before correction by measured runs of this machine
    fewer_gpus_note: str = ""  # set if fewer GPUs would finish a step sooner
    price_per_node_hour: float | None = None  # if the price was given per node
    currency: str = ""  # of price and cost

    def format_price(self) -> str:
        """Return the price as it was given; empty without a price."""
        if self.price_per_node_hour is not None:
            return format_price(self.price_per_node_hour, self.currency, "node")
        return "" if self.price_per_gpu_hour is None else format_price(self.price_per_gpu_hour, self.currency, "GPU")


class OomFallback(Frozen):
    """Settings to retry with after CUDA out of memory. The global batch is unchanged."""

    action: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    checkpointing: Checkpointing
    strategy: Strategy
    offload: Offload
    predicted_bytes: int


class Plan(Frozen):
    """Everything that a run needs to know, decided before it starts."""

    schema_version: Literal[2] = PLAN_FORMAT
    launcher_version: str
    expert: str
    profile: Profile
    manifest_sha256: str
    hardware: Hardware
    base: ModelShape
    base_revision: str | None
    trust_remote_code: bool
    random_weights: bool  # no pretrained weights: to measure speed and memory
    adapter: AdapterPlan
    precision: PrecisionPlan
    quantization: QuantizationPlan | None
    attention: AttentionPlan
    loss_kernel: LossKernel
    loss_on: Literal["completion", "all"]
    compile: CompilePlan | None
    cuda_graph: bool  # replay each micro-step as a CUDA graph
    defer_gradient_sync: bool = False  # DDP: one all-reduce after the backward passes of a step, without hooks
    checkpointing: Checkpointing
    strategy: Strategy
    offload: Offload
    batch: BatchPlan
    data: DataPlan
    loader: LoaderPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    shards_checkpoints: bool = False  # no host holds all weights and optimizer states while they are saved
    wandb: WandbPlan
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = ()  # besides W&B
    guards: GuardPlan
    task_eval: TaskEvalPlan | None = None  # None: no task evaluation while training
    profile_steps: ProfilePlan | None = None  # None: no profiler trace
    memory: MemoryPlan
    speed: SpeedPlan
    oom_fallbacks: tuple[OomFallback, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]

    @property
    def quantization_kind(self) -> Quantization:
        """Return the quantization of the base; "none" if it is not quantized."""
        return "none" if self.quantization is None else self.quantization.kind


def load_plan(file: Path) -> Plan:
    """Return the plan stored in `file`; raise InputError if it is unreadable or of another format."""
    text = read_text(file)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{file} is not a plan: it is not valid JSON", hint=DAMAGED) from None
    if not isinstance(tree, dict) or "launcher_version" not in tree:
        raise InputError(f"{file} is not a plan: it does not name the launcher version that wrote it", hint=DAMAGED)
    if tree.get("schema_version") != PLAN_FORMAT:
        version, plan_format = (show_value(tree.get(name)) for name in ("launcher_version", "schema_version"))
        raise InputError(
            f"{file} was written by launcher {version} (plan format {plan_format}), "
            f"which this version cannot read (launcher {__version__}, plan format {PLAN_FORMAT})",
            hint="use the launcher version that wrote it, or start a new run; its adapter still works: "
            "`launcher eval EXPERT --adapter DIR` and PEFT load it",
        )
    return parse_model(Plan, text, file)
