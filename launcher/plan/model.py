"""The Plan: every decision about how a manifest runs on some hardware, with its reason. On disk: plan.json."""

from __future__ import annotations

from typing import Literal

from launcher.choices import (
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
from launcher.hardware import Hardware
from launcher.manifest.dataset import FieldMapping, Task
from launcher.memory import MemoryTerm, count_allocated
from launcher.shapes import ModelShape
from launcher.values import Frozen

PLAN_SCHEMA_VERSION: Literal[1] = 1
CALIBRATION_TERM = "calibration"  # of the memory: what runs of this machine have taught, above or below the estimate


class Decision(Frozen):
    """One choice, as a person reads it: what, the value, and why."""

    name: str
    value: str
    reason: str
    decided_by: Literal["manifest", "plan", "command line", "hardware", "user"]  # user: their hardware.json


class PrecisionPlan(Frozen):
    compute_dtype: Dtype
    base_dtype: Dtype
    trainable_dtype: Dtype  # of adapter weights, or of the whole model under full fine-tuning
    use_tf32: bool
    loss_scaling: bool  # FP16 only

    @property
    def mixed_precision(self) -> Literal["bf16", "fp16", "no"]:
        """accelerate's word for it."""
        return "no" if self.compute_dtype == "fp32" else self.compute_dtype


class AdapterPlan(Frozen):
    kind: AdapterKind
    rank: int | None
    alpha: int | None
    dropout: float
    target_modules: tuple[str, ...]
    feedforward_modules: tuple[str, ...]
    trainable_parameters: int

    @property
    def repeated_modules(self) -> tuple[str, ...]:
        """DoRA's dropout acts on what the base does, too: each matrix that it adapts is multiplied by twice."""
        return self.target_modules if self.kind == "dora" and self.dropout > 0 else ()


class QuantizationPlan(Frozen):
    kind: Literal["int8", "int4"]
    storage_dtype: Literal["uint8", "bf16", "fp16", "fp32", "int8"]
    double_quantization: bool


class AttentionPlan(Frozen):
    backend: AttentionBackend
    fallbacks: tuple[AttentionBackend, ...]  # what is tried next where the backend turns out missing


class CompilePlan(Frozen):
    scope: CompileScope
    backend: str
    mode: str | None


class DataPlan(Frozen):
    """What is trained on. Paths are as the manifest writes them; relative ones start at the manifest's folder."""

    folder: str  # the manifest's
    kind: Literal["single", "huggingface", "multi_task"]
    path: str | None
    format: str | None
    revision: str | None
    validation_path: str | None
    test_path: str | None
    tasks: dict[str, Task]
    streaming: bool
    field_mapping: FieldMapping
    prompt_template: str
    cache_dir: str | None
    num_rows: int | None
    mean_tokens: float
    basis: str  # how the two numbers are known


class WandbPlan(Frozen):
    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]
    notes: str | None
    mode: Literal["online", "offline", "disabled"] | None  # None: online with a key, offline without
    artifacts: tuple[Literal["adapter", "manifest"], ...] = ()


class LoaderPlan(Frozen):
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


class BatchPlan(Frozen):
    """global_batch_size = micro_batch_size * gradient_accumulation_steps * num_ranks - empty_slots, in sequences."""

    global_batch_size: int
    sequence_length: int
    num_ranks: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    empty_slots: int
    nearest_even_batches: tuple[int, ...]  # empty where the ranks divide the global batch
    packed: bool
    group_by_length: bool
    eval_batch_size: int

    @property
    def num_slots(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.num_ranks

    @property
    def wasted_fraction(self) -> float:
        return self.empty_slots / self.num_slots


class OptimizerPlan(Frozen):
    name: OptimizerName
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float | None  # None: no clipping


class SchedulePlan(Frozen):
    lr_scheduler: str
    scheduler_kwargs: dict[str, float]
    epochs: float
    max_steps: int | None
    num_steps: int | None  # None: the number of rows is unknown
    warmup_steps: int | None  # None: a ratio of an unknown number of steps
    warmup_ratio: float | None
    save_every_steps: int | None
    save_every_epochs: float | None
    save_total_limit: int | None
    evaluate_every_steps: int | None
    evaluate_every_epochs: float | None
    logging_steps: int
    load_best_model_at_end: bool
    early_stopping_patience: int | None
    early_stopping_threshold: float
    seed: int


class MemoryPlan(Frozen):
    """Predicted peak of one rank, term by term, against what the card can give."""

    terms: tuple[MemoryTerm, ...]
    card_bytes: int
    free_bytes: int
    headroom_bytes: int
    host_bytes: int  # in CPU memory, per rank: offloaded state

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def allocated_bytes(self) -> int:
        return count_allocated(self.terms)

    @property
    def activation_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms if term.name == "activations")

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.headroom_bytes

    @property
    def margin_bytes(self) -> int:
        return self.usable_bytes - self.total_bytes


class TaskPlan(Frozen):
    """Answers that are judged while an expert trains: before its first step, and at each evaluation."""

    judge: str
    num_rows: int  # at most
    is_fixed: bool  # as many at each evaluation, whatever they take
    share: float  # of the training's time, that they may take otherwise


class GuardPlan(Frozen):
    """What is done when something goes wrong on the way."""

    save_errors: Literal["stop", "continue"]  # where a checkpoint cannot be written
    max_bad_steps: int  # in a row, whose loss or gradients are no numbers: passed over, then the run ends
    hang_seconds: int  # without a step, before the run is ended


class ProfilePlan(Frozen):
    """Steps that are traced, both included."""

    first_step: int
    last_step: int

    @classmethod
    def of(cls, steps: tuple[int, int]) -> ProfilePlan:
        return cls(first_step=steps[0], last_step=steps[1])


class ScalePoint(Frozen):
    """The same training on so many GPUs, as it would be planned there. Seconds are those of one step."""

    num_ranks: int
    nodes: int
    strategy: Strategy
    offload: Offload
    checkpointing: Checkpointing
    micro_batch_size: int
    gradient_accumulation_steps: int
    link: str | None  # None: nothing to reach
    link_gb_per_second: float | None  # that is counted on
    moved_bytes: float  # by each rank, in one direction
    num_messages: int
    seconds_per_step: float
    compute_seconds: float
    communication_seconds: float  # that the link is busy
    hidden_seconds: float  # of those, gained by computing meanwhile
    exposed_seconds: float  # of those, waited for
    tokens_per_second: float
    efficiency: float  # tokens a second of one GPU, against one of the reference's


class ScalingPlan(Frozen):
    """On paper: what each further GPU brings."""

    points: tuple[ScalePoint, ...]
    reference_ranks: int  # the smallest number on which the training fits without offloading
    verdict: str
    assumptions: tuple[str, ...]


class SpeedPlan(Frozen):
    tokens_per_second: float | None  # over all ranks; None: the GPU's peak is unknown
    seconds_per_step: float | None
    total_seconds: float | None
    mfu: float | None
    communication_fraction: float  # of a step that waits for the network
    price_per_gpu_hour: float | None
    cost: float | None
    confidence: str
    estimated_tokens_per_second: float | None = None  # before this machine's own runs were asked
    scaling: ScalingPlan | None = None  # None: one GPU, or nobody can estimate it


class Rung(Frozen):
    """One step down the OOM ladder. The global batch stays."""

    action: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    checkpointing: Checkpointing
    strategy: Strategy
    offload: Offload
    predicted_bytes: int


class Plan(Frozen):
    schema_version: Literal[1] = PLAN_SCHEMA_VERSION
    launcher_version: str
    expert: str
    profile: Profile
    manifest_sha256: str
    hardware: Hardware
    base: ModelShape
    base_revision: str | None
    trust_remote_code: bool
    random_weights: bool  # the base's shape without its weights: to measure speed and memory
    adapter: AdapterPlan
    precision: PrecisionPlan
    quantization: QuantizationPlan | None
    attention: AttentionPlan
    loss_kernel: LossKernel
    loss_on: Literal["completion", "all"]
    compile: CompilePlan | None
    cuda_graph: bool  # a micro-step is launched as one
    adds_up_behind: bool = False  # replicas' gradients, when a step's are complete, not while they are computed
    checkpointing: Checkpointing
    strategy: Strategy
    offload: Offload
    batch: BatchPlan
    data: DataPlan
    loader: LoaderPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    wandb: WandbPlan
    guards: GuardPlan
    tasks: TaskPlan | None = None  # None: no answers are judged on the way
    profiled: ProfilePlan | None = None  # None: nothing is traced
    memory: MemoryPlan
    speed: SpeedPlan
    ladder: tuple[Rung, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]

    @property
    def quantization_kind(self) -> Quantization:
        return "none" if self.quantization is None else self.quantization.kind
