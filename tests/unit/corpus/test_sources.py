"""Files of all formats: a bad row is a value with its line, a bad file an error with a hint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from launcher.core.errors import InputError
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import HubSource, make_file_source


def read(file: Path, spec: str | None = None) -> list[Row | BadRow]:
    return list(make_file_source(file, spec).read())


def write(folder: Path, name: str, content: bytes | str) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def good(rows: list[Row | BadRow]) -> list[tuple[int, dict[str, object]]]:
    return [(row.number, dict(row.fields)) for row in rows if isinstance(row, Row)]


def bad(rows: list[Row | BadRow]) -> list[tuple[int, str]]:
    return [(row.number, row.reason) for row in rows if isinstance(row, BadRow)]


@pytest.mark.parametrize("content", ["", "\n", "\n \n\r\n\t\n"])
def test_empty_files_have_no_rows(tmp_path: Path, content: str) -> None:
    assert read(write(tmp_path, "x.jsonl", content)) == []


def test_bad_line_is_reported_with_its_number(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.jsonl", '{"a": 1}\n\n{"a": 2,}\n{"a": 3}\n'))
    assert good(rows) == [(1, {"a": 1}), (4, {"a": 3})]
    [(number, reason)] = bad(rows)
    assert number == 3
    assert reason.startswith("broken JSON: ")


def test_a_file_cut_off_in_its_last_line(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.jsonl", '{"a": 1}\n{"a": "cut o'))
    assert good(rows) == [(1, {"a": 1})]
    assert bad(rows) == [(2, "broken JSON: Unterminated string")]


def test_a_line_of_five_megabytes(tmp_path: Path) -> None:
    text = "x" * 5_000_000
    assert good(read(write(tmp_path, "x.jsonl", json.dumps({"a": text}) + "\n"))) == [(1, {"a": text})]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.jsonl", b'\xef\xbb\xbf{"a": "\xc3\xa4"}\r\n{"a": 2}\r\n'))
    assert good(rows) == [(1, {"a": "ä"}), (2, {"a": 2})]
    assert read(write(tmp_path, "y.jsonl", b"\xef\xbb\xbf\r\n")) == []


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.jsonl", b'{"a": 1}\n{"a": "\xe4\xf6"}\n{"a": 3}\n'))
    assert len(good(rows)) == 2
    assert bad(rows) == [(2, "not UTF-8")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_jsonl_in_utf16_is_refused_and_not_read_in_part(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(InputError, match=r"x\.jsonl: not UTF-8") as caught:
        read(write(tmp_path, "x.jsonl", ('{"a": "b"}\n' * 20).encode(encoding)))
    name = encoding.upper().replace("16-", "16")  # without a byte order mark, iconv has to know the order
    assert caught.value.hint.startswith(f"save the file as UTF-8: iconv -f {name} -t UTF-8 ")


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "42", "null", "true"])
def test_lines_that_are_no_objects(tmp_path: Path, line: str) -> None:
    assert bad(read(write(tmp_path, "x.jsonl", line + "\n"))) == [(1, "not an object")]


def test_a_line_nested_beyond_reason(tmp_path: Path) -> None:
    """Whether Python can read it or not: what is written of it would break the next."""
    for depth in (200, 200_000):
        line = '{"a": ' + "[" * depth + "]" * depth + "}"
        rows = read(write(tmp_path, "x.jsonl", '{"a": 1}\n' + line + "\n"))
        assert good(rows) == [(1, {"a": 1})]
        assert bad(rows) == [(2, "nested too deeply (more than 100 levels)")]


def test_brackets_in_texts_are_no_nesting(tmp_path: Path) -> None:
    text = "[{" * 500
    assert good(read(write(tmp_path, "x.jsonl", json.dumps({"a": text})))) == [(1, {"a": text})]


def test_a_json_list_nested_beyond_reason(tmp_path: Path) -> None:
    deep = "[" * 200 + "]" * 200
    assert bad(read(write(tmp_path, "x.json", f'[{{"a": {deep}}}]'))) == [
        (1, "nested too deeply (more than 100 levels)")
    ]
    with pytest.raises(InputError, match=r"x\.json: nested too deeply"):
        read(write(tmp_path, "x.json", "[" * 200_000))


def test_line_break_in_a_string_is_explained(tmp_path: Path) -> None:
    [(_, reason)] = bad(read(write(tmp_path, "x.jsonl", '{"a": "one\ttab"}\n')))
    assert reason == "broken JSON: Invalid control character (a line break in a string is written \\n)"


def test_a_number_of_too_many_digits_is_a_bad_row(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.jsonl", f'{{"a": {"9" * 5000}}}\n'))
    assert bad(rows) == [(1, "broken JSON: a number with too many digits")]


def test_duplicate_keys_are_counted_on_request(tmp_path: Path) -> None:
    content = '{"a": 1, "a": 2, "b": {"c": 1, "c": 2}}\n{"a": 1}\n{"a": 3, "a": 4}\n'
    repeated: Counter[str] = Counter()
    source = make_file_source(write(tmp_path, "x.jsonl", content), None)
    assert list(source.read(repeated)) == list(source.read())
    assert repeated == {"a": 2, "c": 1}


def test_json_list(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.json", '\ufeff[{"a": 1}, 7, {"a": 3}]'))
    assert good(rows) == [(1, {"a": 1}), (3, {"a": 3})]
    assert bad(rows) == [(2, "not an object")]


@pytest.mark.parametrize(
    ("content", "message"), [('{"a": 1}', "not a list of rows"), ('{"a": 1}\n{"a": 2}', "broken JSON: Extra data")]
)
def test_json_that_is_no_list(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(write(tmp_path, "x.json", content))
    assert ".jsonl" in caught.value.hint


def test_csv_rows_have_the_line_at_which_they_begin(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.csv", 'q,"a\nb"\n"1\n2\n3",x\n\n"4\n5",y,z\n6,y\n'))
    assert [(type(row), row.number) for row in rows] == [(Row, 3), (BadRow, 7), (Row, 9)]


def test_csv_with_quoted_newlines_and_wrong_cells(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.csv", '\ufeffq,a\r\n"two\nlines","say ""hi"""\r\none\r\nx,y,z\r\nlast,row\r\n'))
    assert good(rows) == [(2, {"q": "two\nlines", "a": 'say "hi"'}), (6, {"q": "last", "a": "row"})]
    assert bad(rows) == [
        (4, "a different number of cells than the header; text that contains the separator needs quotes"),
        (5, "a different number of cells than the header; text that contains the separator needs quotes"),
    ]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"q,a\n\xe4,\xf6\n", "save the file as UTF-8: iconv -f WINDOWS-1252 -t UTF-8 "),
        ("q,a\nä,ö\n".encode("utf-16"), "save the file as UTF-8: iconv -f UTF-16 -t UTF-8 "),
        ("q,a\nä,ö\n".encode("utf-16-be").replace(b"\0q", b"\0q\xff"), "save the file as UTF-8: iconv -f UTF-16"),
        (b"q\x01\x02,a\n\xe4,\xf6\n", "it is a binary file"),
    ],
)
def test_csv_that_is_not_utf8(tmp_path: Path, content: bytes, hint: str) -> None:
    with pytest.raises(InputError, match=r"x\.csv: not UTF-8 ") as caught:
        read(write(tmp_path, "x.csv", content))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("name", ["UTF-16LE", "UTF-16BE"])
def test_csv_in_utf16_without_a_byte_order_mark_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"x\.csv: not UTF-8") as caught:
        read(write(tmp_path, "x.csv", "question,answer\nHow?,So.\n".encode(name)))
    assert caught.value.hint.startswith(f"save the file as UTF-8: iconv -f {name} -t UTF-8 ")


def test_the_hint_for_utf32_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not UTF-8") as caught:
        read(write(tmp_path, "x.jsonl", '{"question": "How?"}\n'.encode("utf-32")))
    assert "iconv -f UTF-32 " in caught.value.hint


def test_blanks_after_the_separators_of_a_csv_file_are_not_part_of_the_cells(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "x.csv", 'q, a\n"x, y", "z"\n1, two words\n'))
    assert good(rows) == [(2, {"q": "x, y", "a": "z"}), (3, {"q": "1", "a": "two words"})]
    assert good(read(write(tmp_path, "y.csv", "q,a\nx, y\n"))) == [(2, {"q": "x", "a": " y"})]


def test_csv_that_is_not_utf8_in_one_line_names_it(tmp_path: Path) -> None:
    content = b"q,a\n" + b"x,y\n" * 5000 + b"caf\xe9,y\n" + b"x,y\n" * 5000
    with pytest.raises(InputError, match=r"x\.csv: not UTF-8 in line 5002 "):
        read(write(tmp_path, "x.csv", content))


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two columns are called 'q'"):
        read(write(tmp_path, "x.csv", "q,q,a\n1,2,3\n"))
    assert good(read(write(tmp_path, "y.csv", "q,a,,\n1,2,,\n"))) == [(2, {"q": "1", "a": "2", "": ""})]
    table = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["q", "q"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match="two columns are called 'q'"):
        read(tmp_path / "x.parquet")


def test_csv_with_a_long_cell(tmp_path: Path) -> None:
    assert good(read(write(tmp_path, "x.csv", "q,a\n" + "x" * 300_000 + ",y\n")))[0][1]["a"] == "y"


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"q": ["one", None], "a": [{"x": 1}, {"x": 2}]}), tmp_path / "x.parquet")
    assert good(read(tmp_path / "x.parquet")) == [(1, {"q": "one", "a": {"x": 1}}), (2, {"q": None, "a": {"x": 2}})]


def test_arguments_of_tool_calls_in_parquet_have_their_own_keys_only(tmp_path: Path) -> None:
    def call(arguments: dict[str, str]) -> list[dict[str, object]]:
        function = {"name": "find", "arguments": arguments}
        return [{"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}]

    rows = [
        {"messages": call({"city": "Rome"}), "answer": {"a": 1}},
        {"messages": call({"id": "7"}), "answer": {"b": 2}},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    first, second = (fields for _, fields in good(read(tmp_path / "x.parquet")))
    for fields, arguments in ((first, {"city": "Rome"}), (second, {"id": "7"})):
        assert fields["messages"][0]["tool_calls"][0]["function"]["arguments"] == arguments  # type: ignore[index]
    assert first["answer"] == {"a": 1, "b": None}, "an answer may contain null"


def test_parquet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.parquet: broken Parquet: "):
        read(write(tmp_path, "x.parquet", "q,a\n1,2\n"))


def test_the_manifest_may_say_the_format(tmp_path: Path) -> None:
    assert good(read(write(tmp_path, "rows.txt", '{"a": 1}\n'), "jsonl")) == [(1, {"a": 1})]
    assert good(read(write(tmp_path, "rows.NDJSON", '{"a": 1}\n'))) == [(1, {"a": 1})]


@pytest.mark.parametrize(("rows", "line"), [('"never closed,b\n"c",d\n', 2), ('"a",b\n"never closed,\nd\n', 3)])
def test_a_quote_that_is_not_closed_is_an_error(tmp_path: Path, rows: str, line: int) -> None:
    """Without it, two rows would silently become one."""
    with pytest.raises(InputError, match=f"rows.csv, line {line}: broken CSV") as caught:
        read(write(tmp_path, "rows.csv", f"question,answer\n{rows}"))
    assert "check the quotes" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("rows.csv", "question,answer"),
        ("rows.csv", "question;answer"),
        ("rows.csv", '"question";"answer"'),
        ("rows.csv", "\ufeffquestion;answer"),
        ("rows.csv", "question\tanswer"),
        ("rows.tsv", "question\tanswer"),
        ("rows.CSV", "question;answer"),
    ],
)
def test_separator_of_a_csv_file_is_that_of_its_header(tmp_path: Path, name: str, header: str) -> None:
    mark = next(mark for mark in ",;\t" if mark in header)
    (row,) = read(write(tmp_path, name, f'{header}\n"a, b; c\td\ne"{mark}f\n'))
    assert isinstance(row, Row)
    assert row.fields == {"question": "a, b; c\td\ne", "answer": "f"}


@pytest.mark.parametrize(
    ("name", "header"), [("rows.csv", "question, in short;answer"), ("rows.tsv", "question, in short\tanswer")]
)
def test_comma_in_a_column_name_is_not_the_separator(tmp_path: Path, name: str, header: str) -> None:
    mark = ";" if ";" in header else "\t"
    rows = read(write(tmp_path, name, f"{header}\nWhat, who{mark}Ada, Bob\nHow many{mark}1,5\nWhere{mark}here\n"))
    assert good(rows) == [
        (2, {"question, in short": "What, who", "answer": "Ada, Bob"}),
        (3, {"question, in short": "How many", "answer": "1,5"}),
        (4, {"question, in short": "Where", "answer": "here"}),
    ]


@pytest.mark.parametrize("first", ["\r\n", "sep=;\r\n", "\ufeffsep=;\r\n\r\n"])
def test_header_may_follow_empty_lines_and_the_separator_line_of_spreadsheets(tmp_path: Path, first: str) -> None:
    rows = read(write(tmp_path, "rows.csv", f"{first}question;answer\r\nWhat, who;Ada\r\n"))
    assert [dict(row.fields) for row in rows if isinstance(row, Row)] == [{"question": "What, who", "answer": "Ada"}]


def test_unknown_suffix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown format") as caught:
        read(write(tmp_path, "rows.txt", "x"))
    assert caught.value.hint == "set training.dataset.format to one of csv, json, jsonl, parquet"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("x.jsonl.gz", "gunzip -k"), ("x.xlsx", "save it as CSV")],
)
def test_unsupported_suffix_has_a_conversion_hint(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(InputError, match="unknown format") as caught:
        read(write(tmp_path, name, "x"))
    assert hint in caught.value.hint


@pytest.mark.parametrize(("path", "words"), [("/dev/null", "not a regular file"), ("a" * 300, "cannot be read")])
def test_special_file_is_refused(path: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(Path(path))


def test_a_missing_file_gets_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "{}")
    with pytest.raises(InputError, match="no such file") as caught:
        read(tmp_path / "tarin.jsonl")
    assert caught.value.hint == f"did you mean {tmp_path / 'train.jsonl'}?"


def test_a_link_to_a_missing_file_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="no such file") as caught:
        read(tmp_path / "train.jsonl")
    assert "did you mean" not in caught.value.hint


def test_a_missing_file_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file") as caught:
        read(tmp_path / "nowhere/train.jsonl")
    assert caught.value.hint == "training.dataset.path is relative to the manifest's folder"


def test_directory_error_lists_its_files(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", "{}")
    write(tmp_path, "a.csv", "x")
    write(tmp_path, "notes.txt", "x")
    with pytest.raises(InputError, match=r"is a directory; choose a file in it: a\.csv, b\.jsonl$"):
        read(tmp_path)


def test_deleted_file_is_an_error(tmp_path: Path) -> None:
    source = make_file_source(write(tmp_path, "x.jsonl", "{}"), None)
    source.path.unlink()
    with pytest.raises(InputError, match=r"x\.jsonl: cannot be read: No such file"):
        list(source.read())


def test_a_local_dataset_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder, "train.jsonl", '{"q": "one", "a": "1"}\n{"q": "two", "a": "2"}\n')
    source = HubSource(dataset=str(folder), config=None, split="train", revision=None)
    assert good(list(source.read())) == [(1, {"q": "one", "a": "1"}), (2, {"q": "two", "a": "2"})]


def test_a_streamed_dataset_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder, "train.jsonl", '{"q": "one", "a": "1"}\n{"q": "two", "a": "2"}\n')
    source = HubSource(dataset=str(folder), config=None, split="train", revision=None, streaming=True)
    assert type(source.load()).__name__ == "IterableDataset"
    assert good(list(source.read())) == [(1, {"q": "one", "a": "1"}), (2, {"q": "two", "a": "2"})]


@pytest.mark.process
def test_a_streamed_dataset_is_known_by_its_commit_and_needs_the_hub_for_it() -> None:
    script = (
        "from launcher.corpus.sources import HubSource\n"
        "from launcher.core.errors import InputError\n"
        "try:\n"
        "    HubSource(dataset='org/rows', config=None, split='train', revision=None, streaming=True).fingerprint\n"
        "except InputError as error:\n"
        "    print(error.title)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "org/rows: this dataset is neither in the cache nor available from the hub\n"


def test_parquet_timestamps_beyond_python_are_an_error(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"q": ["one"], "a": pa.array([2**60], pa.timestamp("ms"))}), tmp_path / "m.parquet")
    with pytest.raises(InputError, match="a value after row 0 has no equivalent in Python") as caught:
        read(tmp_path / "m.parquet")
    assert "convert the column" in caught.value.hint


def test_several_files_are_joined_by_the_suggested_command(tmp_path: Path) -> None:
    folder = tmp_path / "my rows"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(f'{{"question": "{name}"}}\n')
    for path in (folder, folder / "*.jsonl"):
        with pytest.raises(InputError) as caught:
            make_file_source(path, None)
        command = caught.value.hint.rpartition("join all of these: ")[2]
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert (tmp_path / "rows.jsonl").read_text() == '{"question": "a.jsonl"}\n{"question": "b.jsonl"}\n'
