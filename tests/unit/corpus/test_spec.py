"""Preparation specs: sources of each split, key and folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.corpus.sources import FileSource, HubSource
from tests.unit.corpus.inputs import make_rows, make_spec, prepare_quietly, write_base, write_expert, write_jsonl

EVALUATES: dict[str, Any] = {"evaluation_strategy": "epoch"}


def test_the_default_place_and_the_data_folder(expert: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_spec(expert, base).root == Path("datasets_optimized/neo4j")
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(expert.parent / "fast"))
    assert make_spec(expert, base).root == expert.parent / "fast/datasets_optimized/neo4j"


def test_the_manifest_places_it(expert: Path, base: Path) -> None:
    assert make_spec(expert, base, ["training.config.pretokenized_cache=my/cache"]).root == Path("my/cache")


@pytest.mark.parametrize("place", ["../cache", "/cache", "link/cache"])
def test_the_manifest_cannot_place_it_outside(expert: Path, base: Path, place: str) -> None:
    (expert.parent / "link").symlink_to("/")
    with pytest.raises(InputError, match="is outside the data folder"):
        make_spec(expert, base, [f"training.config.pretokenized_cache={place}"])


def test_validation_is_given_cut_or_none(tmp_path: Path, expert: Path, base: Path) -> None:
    assert make_spec(expert, base).key_parts()["validation"] == "none"
    cut = make_spec(write_expert(tmp_path, **EVALUATES), base)
    assert (cut.validation, cut.cuts_validation, cut.key_parts()["validation"]) == ((), True, "cut")
    write_jsonl(tmp_path / "valid.jsonl", make_rows(5, first=100))
    given = make_spec(write_expert(tmp_path, {"validation_path": "valid.jsonl"}, **EVALUATES), base)
    assert [weighted.source.name for weighted in given.validation] == ["valid.jsonl"]
    assert (given.cuts_validation, given.key_parts()["validation"], given.notes) == (False, "given", ())


def test_missing_validation_file_is_replaced_by_a_cut_and_reported(expert: Path, base: Path) -> None:
    dataset = {"validation_path": "gone.jsonl", "test_path": "lost.jsonl"}
    spec = make_spec(write_expert(expert.parent, dataset, **EVALUATES), base)
    assert spec.cuts_validation
    assert spec.notes == (
        "validation: gone.jsonl does not exist; a part of the training rows is held out instead",
        "test: lost.jsonl does not exist",
    )
    audit = prepare_quietly(spec).store.audit
    assert audit.notes[:2] == spec.notes
    assert set(audit.splits) == {"train", "validation"}


def test_a_hub_dataset_with_split_and_config(expert: Path, base: Path) -> None:
    dataset = {"path": "org/rows::train::small", "format": "huggingface", "revision": "abc"}
    spec = make_spec(write_expert(expert.parent, dataset), base)
    [weighted] = spec.train
    assert weighted.source == HubSource(dataset="org/rows", config="small", split="train", revision="abc")


@pytest.mark.usefixtures("expert")
def test_tasks_have_weights_in_training_only(tmp_path: Path, base: Path) -> None:
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", make_rows(3))
    tasks = {
        "one": {"train": "a.jsonl", "valid": "b.jsonl", "weight": 0.5, "format": "jsonl"},
        "two": {"train": "b.jsonl", "valid": "c.jsonl", "weight": 0.25, "format": "jsonl"},
        "off": {"train": "c.jsonl", "weight": 0.0, "format": "jsonl"},
    }
    dataset = {"type": "multi_task", "path": None, "format": None, "tasks": tasks}
    spec = make_spec(write_expert(tmp_path, dataset), base)
    assert [(weighted.source.name, weighted.weight) for weighted in spec.train] == [
        ("a.jsonl", 1.0),
        ("b.jsonl", 0.5),
    ]
    assert [weighted.weight for weighted in spec.validation] == [1.0, 1.0]


@pytest.mark.usefixtures("expert")
def test_format_of_a_task_is_that_of_its_suffix_or_as_the_manifest_says(tmp_path: Path, base: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    write_jsonl(tmp_path / "b.txt", make_rows(3))
    tasks = {
        "a": {"train": "a.jsonl", "weight": 1.0, "format": "csv"},
        "b": {"train": "b.txt", "weight": 1.0, "format": "jsonl"},
    }
    dataset = {"type": "multi_task", "path": None, "format": None, "tasks": tasks}
    spec = make_spec(write_expert(tmp_path, dataset), base)
    sources = [weighted.source for weighted in spec.train]
    assert [source.format for source in sources if isinstance(source, FileSource)] == ["jsonl", "jsonl"]


@pytest.mark.parametrize(
    ("part", "overrides"),
    [
        ("template", ["base_models.0.prompt_template=llama3"]),
        ("loss_on", ["training.config.loss_on=all"]),
        ("max_seq_length", ["training.config.max_seq_length=256"]),
        ("packing", ["training.config.packing=false"]),
        ("fields", ["training.dataset.field_mapping.input=question"]),
    ],
)
def test_a_change_of_the_rules_is_a_miss_that_names_it(
    expert: Path, base: Path, part: str, overrides: list[str]
) -> None:
    first = prepare_quietly(make_spec(expert, base))
    assert first.reason == "no data prepared yet"
    other = prepare_quietly(make_spec(expert, base, overrides))
    assert not other.was_cached
    assert other.reason == f"changed since the last preparation: {part}"
    assert other.store.folder != first.store.folder


def test_a_change_of_the_data_is_a_miss_that_names_it(expert: Path, base: Path) -> None:
    prepare_quietly(make_spec(expert, base))
    write_jsonl(expert.parent / "train.jsonl", make_rows(41))
    assert prepare_quietly(make_spec(expert, base)).reason == "changed since the last preparation: data (train)"


def test_a_change_of_the_tokenizer_is_a_miss_that_names_it(tmp_path: Path, expert: Path) -> None:
    folder = write_base(tmp_path / "base")
    prepare_quietly(make_spec(expert, folder))
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert prepare_quietly(make_spec(expert, folder)).reason == "changed since the last preparation: tokenizer"


def test_key_does_not_depend_on_the_path_of_the_data(tmp_path: Path, expert: Path, base: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(expert, moved)
    shutil.copy(tmp_path / "train.jsonl", moved)
    one, other = (make_spec(file, base).key_parts() for file in (expert, moved / "manifest.json"))
    assert one == other


def test_key_does_not_depend_on_the_machine(expert: Path, base: Path) -> None:
    overrides: dict[str, Any] = {
        "training.config.batch_size": 2,
        "training.config.seed": 7,
        "training.config.epochs": 9,
    }
    changed = make_spec(expert, base, [f"{key}={value}" for key, value in overrides.items()])
    assert changed.key_parts() == make_spec(expert, base).key_parts()
