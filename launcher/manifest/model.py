"""The manifest of an expert: base models, data, training and evaluation. The types describe schema 2.0."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from launcher.manifest.config import TrainingConfig
from launcher.manifest.dataset import Dataset
from launcher.manifest.strict_model import Count, Fraction, Ignored, NonEmptyPath, Strict

MAX_TASK_ROWS = 2000  # rows of the validation split to read, so that training need not wait for millions

PromptTemplate = Literal["chatml", "qwen3", "llama3", "alpaca", "tokenizer"]


class Adapter(Strict):
    """A published adapter of a base model. `training.config` describes the adapter that is trained."""

    target_modules: tuple[str, ...] = ()
    """Modules of the published adapter; the plan notes differences from training.config."""
    r: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Rank of the published adapter; the plan notes a difference from training.config."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Alpha of the published adapter; the plan notes a difference from training.config."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Used if training.config has no dropout."""

    # Without effect
    type: Ignored = None
    feedforward_modules: Ignored = None
    scaling: Ignored = None
    use_dora: Ignored = None
    path: Ignored = None
    checkpoint_step: Ignored = None
    size_bytes: Ignored = None
    sha256: Ignored = None


class BaseModelEntry(Strict):
    """A base model: Hub name or local folder, and how it is loaded."""

    name: NonEmptyPath
    """Hub name (Qwen/Qwen3-0.6B) or local folder."""
    revision: str | None = None
    """Commit on the Hub, so that the weights stay the same."""
    trust_remote_code: bool = False
    """Run code from the model's repository or folder; requires a revision, and --trust on the command line."""
    quantization: Literal["none", "int4", "int8", "bf16", "fp16"] = "none"
    """Storage of the frozen base model: int4 is NF4 (QLoRA), which replaces int8; the others do not quantize."""
    prompt_template: PromptTemplate = "tokenizer"
    """Template that formats a row; tokenizer: the chat template of the tokenizer."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """File with your own Jinja chat template, in the manifest's folder, instead of the tokenizer's."""
    end_token: Annotated[str, Field(min_length=1)] | None = None
    """Token that ends answers, if the files of the base model disagree about it."""
    adapters: tuple[Adapter, ...] = ()
    """Published adapters of this base model."""

    # Without effect
    sha256: Ignored = None
    rope_scaling: Ignored = None

    @model_validator(mode="after")
    def _check_entry(self) -> BaseModelEntry:
        problems = []
        if self.trust_remote_code and not self.revision:
            problems.append(
                "trust_remote_code: runs code from the model's repository; set revision to a commit you trust"
            )
        if self.chat_template is not None and self.prompt_template != "tokenizer":
            problems.append(f"chat_template: requires prompt_template tokenizer, not {self.prompt_template}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class Decoding(Strict):
    """Settings of text generation in `launcher ask`, `launcher eval` and evaluations during training."""

    grammar_type: str | None = None
    """Selects the judge if evaluation.judge is absent. Grammars are not applied."""
    stop_sequences: tuple[str, ...] = ()
    """Strings that end an answer."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature. 0: greedy; the other sampling settings have no effect."""
    top_p: Fraction | None = None
    """Nucleus sampling. Implies temperature 1 if temperature is absent."""
    top_k: Count | None = None
    """Top-k sampling. Implies temperature 1 if temperature is absent."""
    min_p: Fraction | None = None
    """Min-p sampling. Implies temperature 1 if temperature is absent."""

    # Without effect
    use_grammar: Ignored = None
    grammar_file: Ignored = None
    validation: Ignored = None
    validation_cmd: Ignored = None


class Training(Strict):
    """Data, hyperparameters and text generation of an expert."""

    dataset: Dataset
    """Location and format of the rows."""
    config: TrainingConfig
    """Hyperparameters and, optionally, execution settings."""
    decoding: Decoding | None = None
    """Text generation in `launcher ask`, `launcher eval` and evaluations during training."""

    # Without effect
    trained_on: Ignored = None
    base_model_version: Ignored = None
    packaging_checkpoint: Ignored = None
    checkpoint: Ignored = None
    quality_score: Ignored = None
    test_scenarios: Ignored = None
    alternative_checkpoints: Ignored = None


class Evaluation(Strict):
    """How answers are judged, and how many."""

    judge: str | None = None
    """json, sql, cypher, typescript, exact_match, or module:Class with --trust. Default: by grammar_type or name."""
    judge_command: tuple[str, ...] = ()
    """External program that judges answers, instead of a built-in judge. Needs --trust."""
    task_rows: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Validation rows to answer at each evaluation during training; 0: none. Default: up to 64."""
    task_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Maximum fraction of the training time spent on answering."""

    # Without effect
    test_cases: Ignored = None
    suite: Ignored = None
    metrics: Ignored = None


class Limitation(Strict):
    """A known limitation of the expert, shown in the model card."""

    pattern: str
    """What fails."""
    description: str
    """Why or how it fails."""
    example: str | None = None
    """An input that fails."""
    workaround: str | None = None
    """What to do instead."""


def _is_text_or_object(value: object) -> str:
    return "object" if isinstance(value, dict | BaseModel) else "text"


# With a discriminator, only the form that is used reports problems.
_TextOrLimitation = Annotated[
    Annotated[str, Tag("text")] | Annotated[Limitation, Tag("object")], Discriminator(_is_text_or_object)
]


class Manifest(Strict):
    """The manifest of an expert."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the expert; expert-neo4j is neo4j on the command line. Part of run ids."""
    version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+([-+.]?[0-9A-Za-z][0-9A-Za-z.+-]*)?$")]
    """Version of the expert, stored in the run's record and the model card."""
    schema_version: Literal["1.0", "2.0"] = "2.0"
    """Form of this file."""
    description: str | None = None
    """Shown in the model card."""
    license: str | None = None
    """Shown in the model card."""
    tags: tuple[str, ...] = ()
    """Shown in the model card."""
    limitations: tuple[_TextOrLimitation, ...] = ()
    """Shown in the model card."""
    base_models: Annotated[tuple[BaseModelEntry, ...], Field(min_length=1)]
    """Base models; the first is trained, `--base` selects another."""
    training: Training
    """Data, hyperparameters and text generation."""
    evaluation: Evaluation | None = None
    """How answers are judged, and how many."""

    # Without effect
    author: Ignored = None
    homepage: Ignored = None
    repository: Ignored = None
    capabilities: Ignored = None
    soft_prompts: Ignored = None
    routing: Ignored = None
    constraints: Ignored = None
    perf: Ignored = None
    runtime: Ignored = None
    integrity: Ignored = None
    quality_metrics: Ignored = None

    @model_validator(mode="after")
    def _check_name(self) -> Manifest:
        if not self.expert[:1].isalnum():  # a path component: expert-.. would be the folder above
            raise ValueError(f"name: {self.name!r} must have a letter or digit after expert-")
        return self

    @property
    def base(self) -> BaseModelEntry:
        """The base model that is trained: the first."""
        return self.base_models[0]

    @property
    def expert(self) -> str:
        """The expert's short name: neo4j for `expert-neo4j`."""
        return self.name.removeprefix("expert-")
