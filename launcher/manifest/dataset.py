"""`training.dataset`: where the rows come from and how their fields are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from launcher.manifest.base import CommonNames, Open, Scalar, Strict
from launcher.manifest.metadata import Counter, Fraction

DatasetFormat = Literal["jsonl", "json", "csv", "parquet", "huggingface"]


class FieldMapping(Strict):
    """Role of a field in training -> its name in the rows. `text` is a whole, already templated document."""

    text: str | None = None
    """The field with a whole document, already templated."""
    messages: str | None = None
    """The field with a chat: a list of roles and contents; ShareGPT's from/value too."""
    system: str | None = None
    """The field with the system prompt."""
    instruction: str | None = None
    """The field with the question."""
    input: str | None = None
    """The field with what goes with the question: a schema, a context."""
    response: str | None = None
    """The field with the answer."""
    output: str | None = None
    """Another name for response."""

    @model_validator(mode="after")
    def _one_name_for_the_answer(self) -> FieldMapping:
        if self.response is not None and self.output is not None:
            raise ValueError("output: response and output are two names for one role; keep one")
        return self

    @property
    def answer(self) -> str | None:
        return self.response if self.response is not None else self.output


class Task(Strict):
    """One task of a `multi_task` dataset."""

    train: str
    """File of its training rows."""
    valid: str | None = None
    """File of its validation rows."""
    test: str | None = None
    """File of its test rows."""
    weight: Fraction
    """Of a task with half the largest weight, half of the rows are used."""
    format: str
    """What its rows look like."""


class DatasetValidation(Strict):
    validate_json: bool | None = None
    validate_schema: bool | None = None
    deduplicate: bool | None = None
    min_length: Counter | None = None
    max_length: Annotated[int, Field(ge=1, le=10**12)] | None = None


class Augmentation(Strict):
    schema_injection_prob: Fraction | None = None
    table_aliases: bool | None = None
    comment_stripping: bool | None = None
    case_normalization: Literal["preserve", "upper", "lower"] | None = None


class SourceNote(Open):
    """Where rows once came from: a note of the author, not something to load."""

    name: str | None = None
    original_examples: Counter | None = None
    processed_examples: Counter | None = None
    duplicates_removed: Counter | None = None
    invalid_removed: Counter | None = None


class Preprocessing(Open):
    """What the author did to the rows before publishing them."""

    total_examples: Counter | None = None
    total_raw_examples: Counter | None = None
    processed_examples: Counter | None = None
    duplicates_removed: Counter | None = None
    corrections_balanced: Counter | None = None
    invalid_cypher_removed: Counter | None = None
    invalid_sql_removed: Counter | None = None
    validation: str | None = None
    format: str | None = None
    deduplication: str | None = None
    size_filter: str | None = None
    rebalanced: bool | None = None
    generic_ratio: float | None = None
    target_total: Counter | None = None
    schema_extraction: str | None = None
    dialect_normalization: str | None = None
    portuguese_filtered: Scalar = None


class Splits(Open):
    """How many rows the author says there are."""

    train: Counter | None = None
    """Plans reckon with it as long as the rows are not at hand."""
    validation: Counter | None = None
    """Not used: the rows are counted."""
    test: Counter | None = None
    """Not used: the rows are counted."""
    total: Counter | None = None
    """Not used: the rows are counted."""


TaskCounts = Annotated[
    dict[str, Scalar],
    CommonNames(("generation", "correction", "generation_percentage", "correction_percentage")),
]
FormatCounts = Annotated[
    dict[str, Scalar],
    CommonNames(
        (
            "generic",
            "data_extraction",
            "cloudevents",
            "json_schema",
            "openapi_property",
            "openapi_schema",
            "openapi_response",
            "openapi_request",
        )
    ),
]


class Dataset(Strict):
    path: Annotated[str, Field(min_length=1)] | None = None
    """Training rows: a file, from the manifest's folder, or a dataset of the hub (org/name::split::config)."""
    validation_path: str | None = None
    """Held-out rows; absent: a tenth of the training rows, chosen by a hash of the prompt."""
    test_path: str | None = None
    """Rows that `launcher eval` asks; absent: the validation rows."""
    type: Literal["single", "huggingface", "multi_task"] = "single"
    """multi_task: several files with weights, under tasks."""
    format: DatasetFormat | None = None
    """Absent: by the file's suffix. huggingface: path is a dataset of the hub."""
    revision: str | None = None
    """Commit of a hub dataset, so that rows stay the same."""
    streaming: bool = False
    """Never hold a hub dataset on disk whole."""
    field_mapping: FieldMapping = FieldMapping()
    """Which field of a row plays which role; absent: the usual names are tried."""
    text_field: str | None = None
    """Another name for field_mapping.text."""
    tasks: dict[str, Task] | None = None
    """Of multi_task: name -> files and weight."""
    splits: Splits | None = None
    """How many rows the author says there are."""
    preprocessing: Preprocessing | None = None
    source: str | None = None
    sources: tuple[SourceNote, ...] = ()
    task_distribution: TaskCounts | None = None
    format_distribution: FormatCounts | None = None
    validation: DatasetValidation | None = None
    augmentation: Augmentation | None = None
    use_pretokenized: bool | None = None
    max_in_memory_samples: Counter | None = None

    @model_validator(mode="after")
    def _names_its_rows(self) -> Dataset:
        if self.type == "multi_task":
            if not self.tasks:
                raise ValueError("tasks: missing or empty, type multi_task needs at least one")
        elif self.path is None:
            raise ValueError("path: missing, name a local file or a dataset of the Hugging Face hub")
        if self.text_field is not None and self.field_mapping.text not in (None, self.text_field):
            raise ValueError("text_field: text_field and field_mapping.text name different fields; keep one")
        return self

    @property
    def stated_train_rows(self) -> int | None:
        """How many training rows the author says there are, if they say."""
        if self.splits is not None and self.splits.train:
            return self.splits.train
        if self.preprocessing is not None:
            return self.preprocessing.processed_examples or self.preprocessing.total_examples
        return None
