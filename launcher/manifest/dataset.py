"""`training.dataset`: the location and the format of the rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from launcher.manifest.strict_model import Count, Fraction, Ignored, LocalPath, NonEmptyPath, Open, Strict

DatasetFormat = Literal["jsonl", "json", "csv", "parquet", "huggingface"]


class FieldMapping(Strict):
    """Fields of a row, by role: a name, `a.b` for a field inside an object, or a format: "{subject}: {body}"."""

    text: str | None = None
    """Field with a complete document that is already formatted by a template."""
    messages: str | None = None
    """Field with a chat: a list of role and content, or ShareGPT's from and value."""
    system: str | None = None
    """Field with the system prompt."""
    instruction: str | None = None
    """Field with the question."""
    input: str | None = None
    """Field with additional input to the question, such as a schema or context."""
    response: str | None = None
    """Field with the answer."""
    output: str | None = None
    """Alias of response."""

    @model_validator(mode="after")
    def _check_answer(self) -> FieldMapping:
        if self.response is not None and self.output is not None:
            raise ValueError("output: response and output are aliases; keep one")
        return self

    @property
    def answer(self) -> str | None:
        """Field with the answer, from either of the two keys."""
        return self.response if self.response is not None else self.output


class Task(Strict):
    """One task of a `multi_task` dataset."""

    train: LocalPath
    """File with the training rows."""
    valid: LocalPath | None = None
    """File with the validation rows."""
    test: LocalPath | None = None
    """File with the test rows."""
    weight: Fraction
    """The fraction of rows that is used is weight / largest weight of all tasks."""
    format: str
    """File format of the rows."""


class Preprocessing(Open):
    """Notes on how the author prepared the rows."""

    processed_examples: Count | None = None
    """Number of rows, used in plans if the rows are not available and `splits.train` is absent."""
    total_examples: Count | None = None
    """Used like processed_examples if that is absent."""


class Splits(Open):
    """Row counts stated by the author."""

    train: Count | None = None
    """Number of training rows, used in plans if the rows are not available."""


class Dataset(Strict):
    """Rows of an expert: files or a dataset on the Hugging Face Hub."""

    path: NonEmptyPath | None = None
    """Training rows: a file, relative to the manifest, or a dataset on the Hub (org/name::split::config)."""
    validation_path: LocalPath | None = None
    """Validation rows. Default: a tenth of the training rows, selected by a hash of the prompt."""
    test_path: LocalPath | None = None
    """Test rows for `launcher eval`. Default: the validation rows."""
    type: Literal["single", "huggingface", "multi_task"] = "single"
    """multi_task: several files with weights, listed in tasks."""
    format: DatasetFormat | None = None
    """Default: from the file's suffix. huggingface: path is a dataset on the Hub."""
    revision: str | None = None
    """Commit of a Hub dataset, so that the rows stay the same."""
    streaming: bool = False
    """Stream a Hub dataset instead of downloading all of it."""
    max_rows: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Use only this many rows, the first ones of each training file. Default: all."""
    field_mapping: FieldMapping = FieldMapping()
    """Fields of a row by role: names, or formats such as "{subject}: {body}". Default: common names are tried."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System prompt of rows that have no system message of their own."""
    text_field: str | None = None
    """Alias of field_mapping.text."""
    tasks: dict[str, Task] | None = None
    """multi_task: files and weight of each task, by name."""
    splits: Splits | None = None
    """Row counts stated by the author."""
    preprocessing: Preprocessing | None = None
    """Notes on how the author prepared the rows."""

    # Without effect
    source: Ignored = None
    sources: Ignored = None
    task_distribution: Ignored = None
    format_distribution: Ignored = None
    validation: Ignored = None
    augmentation: Ignored = None
    use_pretokenized: Ignored = None
    max_in_memory_samples: Ignored = None

    @model_validator(mode="after")
    def _check_rows(self) -> Dataset:
        if self.type == "multi_task":
            if not self.tasks:
                raise ValueError("tasks: missing or empty; type multi_task requires at least one")
            if not any(task.weight for task in self.tasks.values()):
                raise ValueError("tasks: every weight is 0, so there would be no rows; at least one must be above 0")
        elif self.path is None:
            raise ValueError("path: missing; set it to a local file or a dataset on the Hugging Face Hub")
        if self.text_field is not None and self.field_mapping.text not in (None, self.text_field):
            raise ValueError("text_field: text_field and field_mapping.text differ; keep one")
        return self

    @property
    def mapping(self) -> FieldMapping:
        """The field mapping, with text_field in it."""
        if self.text_field is None:
            return self.field_mapping
        return self.field_mapping.model_copy(update={"text": self.text_field})

    @property
    def stated_train_rows(self) -> int | None:
        """Number of training rows stated by the author, if any."""
        if self.splits is not None and self.splits.train:
            return self.splits.train
        if self.preprocessing is not None:
            return self.preprocessing.processed_examples or self.preprocessing.total_examples
        return None
