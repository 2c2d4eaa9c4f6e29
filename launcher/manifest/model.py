"""The manifest: one expert, its base models, its data and how it is trained. Today's form is schema 2.0."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from launcher.manifest import metadata
from launcher.manifest.base import Strict, TextOr, one_of
from launcher.manifest.config import TrainingConfig
from launcher.manifest.dataset import Dataset

PromptTemplate = Annotated[
    Literal["chatml", "qwen3", "llama3", "alpaca", "tokenizer", "llama2", "vicuna", "custom"],
    one_of("chatml", "qwen3", "llama3", "alpaca", "tokenizer", refused=("llama2", "vicuna", "custom")),
]


class Adapter(Strict):
    """A published adapter of a base model. `training.config` says what is trained; this is what it fell back on."""

    type: Literal["lora", "dora", "ia3", "lokr", "adalora"]
    target_modules: tuple[str, ...] = ()
    """What the published adapter sat on; a note says where training.config differs."""
    feedforward_modules: tuple[str, ...] = ()
    r: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Its rank; a note says where training.config differs."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Its alpha; a note says where training.config differs."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Used where training.config names no dropout."""
    scaling: Literal["default", "standard", "dora", "learned"] | None = None
    use_dora: bool | None = None
    path: str | None = None
    checkpoint_step: metadata.Counter | None = None
    size_bytes: metadata.Counter | None = None
    sha256: str | None = None


class BaseModelEntry(Strict):
    """A base model by hub name or local folder."""

    name: Annotated[str, Field(min_length=1)]
    """Hub name (Qwen/Qwen3-0.6B) or local folder."""
    revision: str | None = None
    """Commit of the hub, so that weights stay the same."""
    trust_remote_code: bool = False
    """Run code that the model's author ships; needs a pinned revision."""
    sha256: str | None = None
    quantization: Literal["none", "int4", "int8", "bf16", "fp16"] = "none"
    """How the frozen base is stored: int4 is NF4 (QLoRA), int8 LLM.int8; the others are not quantised."""
    rope_scaling: TextOr[metadata.RopeScaling] | None = None
    prompt_template: PromptTemplate = "tokenizer"
    """How a row becomes text; tokenizer: the base's own chat template."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that were published for this base."""

    @model_validator(mode="after")
    def _makes_sense(self) -> BaseModelEntry:
        problems = []
        if self.trust_remote_code and not self.revision:
            problems.append("trust_remote_code: runs code of the model's author; pin the reviewed commit with revision")
        if self.prompt_template in ("llama2", "vicuna", "custom"):
            problems.append(
                f"prompt_template: {self.prompt_template} is not supported; "
                "use chatml, qwen3, llama3, alpaca, or tokenizer for the tokenizer's own chat template"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class Training(Strict):
    dataset: Dataset
    """Where the rows come from."""
    config: TrainingConfig
    """What to learn, and, where you care, how to run it."""
    decoding: metadata.Decoding | None = None
    trained_on: str | None = None
    base_model_version: str | None = None
    packaging_checkpoint: str | None = None
    checkpoint: str | None = None
    quality_score: float | None = None
    test_scenarios: metadata.Scenarios | None = None
    alternative_checkpoints: metadata.Checkpoints | None = None


class Manifest(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Of the expert: expert-neo4j is neo4j on the command line. Part of run ids."""
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+")]
    """Of the expert; kept in the run's record and the adapter's card."""
    schema_version: Literal["1.0", "2.0"] = "2.0"
    description: str | None = None
    author: str | None = None
    homepage: str | None = None
    repository: metadata.Repository | None = None
    license: str | None = None
    tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    limitations: tuple[TextOr[metadata.Limitation], ...] = ()
    base_models: Annotated[tuple[BaseModelEntry, ...], Field(min_length=1)]
    """The first is trained; `--base` takes another."""
    soft_prompts: tuple[metadata.SoftPrompt, ...] = ()
    routing: metadata.Routing | None = None
    constraints: metadata.Constraints | None = None
    perf: metadata.Performance | None = None
    runtime: metadata.Runtime | None = None
    training: Training
    """Data, settings and decoding."""
    evaluation: metadata.Evaluation | None = None
    """Who judges answers, and how many."""
    integrity: metadata.Integrity | None = None
    quality_metrics: metadata.QualityMetrics | None = None

    @property
    def base(self) -> BaseModelEntry:
        """The base model that is trained: the first."""
        return self.base_models[0]

    @property
    def expert(self) -> str:
        """The expert's short name: `expert-neo4j` is neo4j."""
        return self.name.removeprefix("expert-")
