"""The first rows: their fields, and the estimated number of rows before tokenization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import InputError
from launcher.corpus.first_rows import check_first_rows, probe_rows, probe_sample
from launcher.manifest.dataset import Dataset, FieldMapping, Preprocessing, Splits
from launcher.plan.estimate.dataset_size import ASSUMED_MEAN_TOKENS, with_tokens_per_row


def write_rows(file: Path, count: int, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": "x" * (size - 13)}) + "\n" for _ in range(count)))


def test_rows_of_a_local_file_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path / "data/train.jsonl", 25, 360)
    rows = probe_rows(Dataset(path="data/train.jsonl"), tmp_path)
    assert rows.num_rows == 25
    assert rows.mean_tokens == 100
    assert rows.is_measured
    assert rows.basis == "read from train.jsonl: 25 rows of 360 bytes"


def test_csv_header_is_not_a_row(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\n" + "a,b\n" * 25)
    assert probe_rows(Dataset(path="train.csv"), tmp_path).num_rows == 25
    (tmp_path / "train.csv").write_text("question,answer," + "x" * 1000 + "\n" + "a,b,\n" * 50_000)
    assert probe_rows(Dataset(path="train.csv"), tmp_path).num_rows == 50_000


def test_large_file_is_sampled(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 50_000, 100)
    rows = probe_rows(Dataset(path="train.jsonl"), tmp_path)
    assert rows.num_rows == 50_000
    assert "about 50,000 rows" in rows.basis


def test_empty_lines_do_not_distort_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "1"}\n\n' + '{"text": "1"}\n' * 50_000)
    assert probe_rows(Dataset(path="train.jsonl"), tmp_path).num_rows == pytest.approx(50_001, rel=1e-3)
    file.write_text('{"text": "1"}\n' * 2_000)
    rows = probe_rows(Dataset(path="train.jsonl"), tmp_path)
    assert rows.num_rows == 2_000
    assert "about" not in rows.basis, "all of it was read"


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n\n")
    assert probe_rows(Dataset(path="train.jsonl"), tmp_path).num_rows == 0


def test_manifest_row_count_is_used_without_a_file(tmp_path: Path) -> None:
    stated = Dataset(path="neo4j/text2cypher", splits=Splits(train=1000))
    rows = probe_rows(stated, tmp_path)
    assert (rows.num_rows, rows.mean_tokens) == (1000, ASSUMED_MEAN_TOKENS)
    assert not rows.is_measured
    processed = Dataset(path="x/y", splits=Splits(train=0), preprocessing=Preprocessing(processed_examples=7))
    assert probe_rows(processed, tmp_path).num_rows == 7


def test_missing_file_is_named_although_the_manifest_states_its_rows(tmp_path: Path) -> None:
    rows = probe_rows(Dataset(path="moved.parquet", splits=Splits(train=1000)), tmp_path)
    assert rows.basis.startswith("moved.parquet is not on this machine: the manifest states 1,000 rows")


def test_unknown_size_is_reported(tmp_path: Path) -> None:
    rows = probe_rows(Dataset(path="x/y"), tmp_path)
    assert rows.num_rows is None
    assert "unknown" in rows.basis


def test_sample_is_found_next_to_the_manifest(tmp_path: Path) -> None:
    assert probe_sample(Dataset(path="x"), tmp_path).num_rows is None
    write_rows(tmp_path / "sample/train.jsonl", 3, 100)
    assert probe_sample(Dataset(path="x"), tmp_path).num_rows == 3


def test_unreadable_path_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cannot be read: .*too long"):
        probe_rows(Dataset(path="x" * 300 + ".jsonl"), tmp_path)
    write_rows(tmp_path / "train.jsonl", 3, 100)

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(InputError, match=r"train\.jsonl: cannot be read: Permission denied"):
        probe_rows(Dataset(path="train.jsonl"), tmp_path)


def test_tokens_per_row_can_be_configured(tmp_path: Path) -> None:
    given = "; 1,200 tokens per row, as given by --tokens-per-row"
    stated = with_tokens_per_row(probe_rows(Dataset(path="x/y", splits=Splits(train=1000)), tmp_path), 1200)
    assert (stated.num_rows, stated.mean_tokens) == (1000, 1200)
    assert stated.basis == "the manifest states 1,000 rows" + given
    assert probe_rows(Dataset(path="x/y", splits=Splits(train=1000)), tmp_path).is_length_assumed
    assert not stated.is_length_assumed
    write_rows(tmp_path / "train.jsonl", 3, 100)
    read = with_tokens_per_row(probe_rows(Dataset(path="train.jsonl"), tmp_path), 1200)
    assert read.basis == "read from train.jsonl: 3 rows" + given
    assert read.is_measured
    missing = probe_rows(Dataset(path="x/y.csv"), tmp_path)
    assert missing.basis == "x/y.csv is not on this machine: the number of rows is unknown before the data is read"
    unknown = with_tokens_per_row(probe_rows(Dataset(path="x/y"), tmp_path), 1200)
    assert unknown.basis == "the number of rows is unknown before the data is read" + given


MAPPED = Dataset(path="rows.csv", field_mapping=FieldMapping(instruction="body", response="answer"))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("count", [400, 5000])
def test_line_breaks_in_quotes_are_no_rows(tmp_path: Path, newline: str, count: int) -> None:
    row = newline.join(('"a","first line', "second, line", 'third ""line""",x')) + newline
    (tmp_path / "rows.csv").write_text(f"id,body,answer{newline}" + row * count, encoding="utf-8-sig", newline="")
    rows = probe_rows(MAPPED, tmp_path)
    assert rows.num_rows == pytest.approx(count, rel=0.01 if count > 2000 else 0)
    assert rows.basis.startswith(f"read from rows.csv: {'' if count == 400 else 'about '}")


def test_rows_of_json_lists_and_parquet_files_are_counted(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"row {number}"} for number in range(3000)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.parquet"):
        assert probe_rows(Dataset(path=name), tmp_path).basis.startswith(f"read from {name}: 3,000 rows of 2")


def test_fields_that_are_not_used_do_not_count_as_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("body,answer,log\n" + f"a,b,{'x' * 5000}\n" * 10)
    assert probe_rows(MAPPED, tmp_path).mean_tokens < 20


@pytest.mark.parametrize("key", ["path", "validation_path", "test_path"])
def test_missing_field_is_an_error_with_the_file_and_a_suggestion(tmp_path: Path, key: str) -> None:
    for name in ("path", "validation_path", "test_path"):
        header = "subject,boddy,answer" if name == key else "subject,body,answer"
        (tmp_path / f"{name}.csv").write_text(f"{header}\na,b,c\n")
    files: dict[str, Any] = {name: f"{name}.csv" for name in ("path", "validation_path", "test_path")}
    dataset = Dataset(**files, field_mapping=MAPPED.field_mapping)
    with pytest.raises(InputError) as caught:
        check_first_rows(dataset, tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / key}.csv: the field mapping does not match" in message
    assert "training.dataset.field_mapping.instruction: rows have no field 'body'; did you mean 'boddy'?" in message
    assert "rows have: subject, boddy, answer" in message


def test_what_is_not_here_is_noted(tmp_path: Path) -> None:
    (missing,) = check_first_rows(Dataset(path="rows.csv"), tmp_path)
    assert missing.startswith("training.dataset.path: ")
    assert "does not exist" in missing
    (hub,) = check_first_rows(Dataset(path="org/name", format="huggingface"), tmp_path)
    assert "a dataset on the Hub" in hub


def test_sample_without_a_field_points_to_the_command_that_writes_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "sample/train.jsonl", 3, 100)
    with pytest.raises(InputError) as caught:
        probe_sample(MAPPED, tmp_path)
    assert str(tmp_path / "sample/train.jsonl") in caught.value.title
    assert "launcher new EXPERT --data FILE --force" in caught.value.hint


def test_rows_with_another_number_of_cells_are_noted(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("body,answer\na,b\na\nc,d,e\nf,g\n")
    (note,) = check_first_rows(MAPPED, tmp_path)
    assert note.startswith("training.dataset.path: 2 of the first 4 rows cannot be read; line 3: a different number")


def test_rows_that_cannot_be_used_are_noted_or_refused(tmp_path: Path) -> None:
    def check(rows: list[Any]) -> tuple[str, ...]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        return check_first_rows(Dataset(path="rows.jsonl"), tmp_path, reads_values=True)

    good = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    bad = [{"role": "User", "content": "u"}, {"role": "assistant", "content": "a"}]
    assert check([good, good]) == ()
    (note,) = check([good, bad, good])
    unknown = "a message has an unknown role: 'User'"
    assert note == f"training.dataset.path: 1 of the first 3 rows cannot be used; line 2: {unknown}"
    with pytest.raises(InputError, match="no row can be used") as caught:
        check([bad, bad])
    assert f"line 1: {unknown}" in str(caught.value)
    (note,) = check([bad] * 200 + [good])
    assert "200 of the first 200 rows cannot be used" in note


@pytest.mark.parametrize("key", ["validation_path", "test_path"])
def test_split_that_is_the_file_of_the_training_rows_is_noted(tmp_path: Path, key: str) -> None:
    (tmp_path / "rows.csv").write_text("body,answer\na,b\n")
    dataset = MAPPED.model_copy(update={key: f"../{tmp_path.name}/rows.csv"})
    (note,) = check_first_rows(dataset, tmp_path)
    assert note.startswith(f"training.dataset.{key} is the same file as training.dataset.path")


@pytest.mark.parametrize("path", ["\0x", "."])
def test_path_that_cannot_exist_is_a_note(path: str, tmp_path: Path) -> None:
    dataset = Dataset.model_validate({"path": path, "test_path": path, "format": "jsonl"})
    notes = check_first_rows(dataset, tmp_path)
    assert notes
    assert all("does not exist" in note for note in notes)
