"""The folder of a new expert: whole or not there, never over another, loaded and planned before it is told."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.corpus.build import is_cut_for_validation
from launcher.corpus.sources import make_file_source
from launcher.errors import DoesNotFitError, InputError
from launcher.inputs import Request, plan_request
from launcher.manifest import find_manifest, load_manifest
from launcher.new_expert import making
from launcher.new_expert.guesses import GivenFields
from launcher.new_expert.proposal import Wishes
from launcher.plan.smoke import find_smoke_length
from launcher.rows import probe_sample
from tests.conftest import SHARED
from tests.unit.new_expert.inputs import make, make_rows, read_sample, write_rows

REAL = ("json_instructions", "text2cypher", "text2sql_questions")


def list_names(folder: str = ".") -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def test_a_manifest_and_a_sample_are_written_and_valid() -> None:
    made = make(write_rows(make_rows()))
    assert [str(file) for file in made.files] == [
        "sales/manifest.json",
        "sales/sample/train.jsonl",
        "sales/sample/validation.jsonl",
        "sales/sample/test.jsonl",
    ]
    manifest = load_manifest(find_manifest("sales")).manifest
    assert manifest.expert == "sales"
    assert manifest.training.dataset.field_mapping.instruction == "question"
    assert manifest.training.config.target_modules
    assert made.called == "sales"
    assert plan_request(Request(expert="sales", gpu="rtx4090")).plan.data.path == "../rows.jsonl"
    assert list_names() == ["rows.jsonl", "sales"]


def test_it_goes_among_the_experts_where_there_are_some() -> None:
    Path("experts").mkdir()
    Path("experts/manifest.schema.json").write_text("{}")
    made = make(write_rows(make_rows()))
    assert made.folder == Path("experts/sales")
    assert json.loads(made.manifest)["$schema"] == "../manifest.schema.json"
    assert made.called == "sales"


@pytest.mark.parametrize(
    ("into", "called"),
    [(None, "sales"), ("there/sales", "there/sales"), ("other", "other/manifest.json"), ("a b/c", "'a b/c'")],
)
def test_the_manifest_names_itself_as_verbs_find_it(into: str | None, called: str) -> None:
    made = make(write_rows(make_rows()), into=None if into is None else Path(into))
    comment = json.loads(made.manifest)["_comment"]
    assert f"`launcher validate {called}` checks it" in comment
    assert find_manifest(made.called).resolve() == (made.folder / "manifest.json").resolve()


def test_a_name_that_leads_to_another_expert_is_not_told() -> None:
    make(write_rows(make_rows()))
    Path("experts").mkdir()
    assert make(write_rows(make_rows())).called == "experts/sales"


def test_data_elsewhere_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(make_rows()).resolve()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert json.loads(make(data).manifest)["training"]["dataset"]["path"] == str(data)


def test_a_folder_with_the_data_in_it_is_a_good_place() -> None:
    Path("sales").mkdir()
    data = write_rows(make_rows(), "sales/rows.jsonl")
    made = make(data)
    assert json.loads(made.manifest)["training"]["dataset"]["path"] == "rows.jsonl"
    assert data.is_file()


def test_what_is_there_stays_unless_forced() -> None:
    data = write_rows(make_rows())
    make(data)
    Path("sales/NOTES.md").write_text("mine")
    Path("sales/sample/more.jsonl").write_text("of an older mapping")
    before = Path("sales/manifest.json").read_bytes()
    with pytest.raises(InputError, match="is there already: nothing was changed\nhint: --force replaces"):
        make(data, wishes=Wishes(fields=GivenFields(prompt="notes")))
    assert Path("sales/manifest.json").read_bytes() == before
    make(data, wishes=Wishes(fields=GivenFields(prompt="notes")), force=True)
    assert (
        json.loads(Path("sales/manifest.json").read_text())["training"]["dataset"]["field_mapping"]["instruction"]
        == "notes"
    )
    assert Path("sales/NOTES.md").read_text() == "mine"
    assert list_names("sales/sample") == ["test.jsonl", "train.jsonl", "validation.jsonl"]


@pytest.mark.parametrize("moment", ["plan", "place"])
def test_nothing_is_half_written(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(making, {"plan": "plan_request", "place": "_put_in_place"}[moment], fail)
    with pytest.raises(KeyboardInterrupt):
        make(write_rows(make_rows()), into=Path("deep/er/sales"))
    assert list_names() == ["rows.jsonl"]


def test_a_dry_run_writes_nothing() -> None:
    made = make(write_rows(make_rows()), dry_run=True)
    assert made.files == ()
    assert list_names() == ["rows.jsonl"]


def test_a_base_that_fits_nowhere_is_still_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Request) -> None:
        raise DoesNotFitError("too large", hint="buy more")

    monkeypatch.setattr(making, "plan_request", refuse)
    made = make(write_rows(make_rows()))
    assert made.plan is None
    assert made.proposal.notes[-1] == "it does not fit this machine: too large; buy more"


def write_as(rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "jsonl":
        return write_rows(rows)
    if kind == "json":
        Path("rows.json").write_text(json.dumps(rows))
        return Path("rows.json")
    if kind == "lines called json":
        return write_rows(rows, "rows.json")
    if kind == "csv":
        with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return Path("rows.csv")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    return Path("rows.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "json", "lines called json", "csv", "parquet"])
def test_every_format_that_training_reads(kind: str) -> None:
    make(write_as(make_rows(), kind))
    plan = plan_request(Request(expert="sales", gpu="rtx4090")).plan
    assert plan.data.num_rows == 40
    assert plan.data.format == {"lines called json": "jsonl"}.get(kind)  # else the name tells it
    assert make_file_source(Path("sales") / str(plan.data.path), plan.data.format).format == {
        "lines called json": "jsonl"
    }.get(kind, kind)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "rows.jsonl is empty: there are no rows in it"),
        ("\n \n", "rows.jsonl is empty: there are no rows in it"),
        ("hello\n", "line 1: broken JSON"),
        ('{"a": "b"}\nhello\nhello\n', "line 2: broken JSON"),
        ("[1, 2]\n", "line 1: not an object"),
        ("{}\n{}\n", "the rows have no fields"),
        ('{"question": "q", "answer": "a"}\n', "there is only one row"),
        ('{"question": "q", "answer": "a"}\n' * 3, "all 3 rows are alike"),
        ('{"question": "q", "answer": "a"}\n{"question": "q", "answer": "b"}\n', "all 2 rows ask the same"),
        ('{"body": "one"}\n{"body": "two"}\n', "one field of text only, body"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(content: str, words: str) -> None:
    Path("rows.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        make(Path("rows.jsonl"))
    assert words in str(caught.value)
    assert "hint:" in str(caught.value)
    assert list_names() == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", "question;answer\na;b\n", "its cells are separated by ';'"),
        (
            "rows.tsv",
            "question\tanswer\na\tb\n",
            "unknown format\nhint: its cells are separated by tabs",
        ),
        ("rows.csv", "question;answer\na, b;c\nd;e, f, g\n", "separated by ';', not by commas: the header is"),
        ("rows.csv", "question\tanswer\na, b\tc\n", "its cells are separated by '\\t'"),
        ("rows.csv", "question,answer\n", "rows.csv is empty: there are no rows in it\nhint: a header is what is"),
        ("rows.csv", "question,question\na,b\n", "two columns are called 'question'"),
        ("rows.doc", "x", "unknown format\nhint: --data, --validation and --test name files, --format what they are"),
        ("rows.jsonl.gz", "x", "unknown format\nhint: it is compressed: gunzip -k rows.jsonl.gz"),
        (
            "rows.jsonl",
            '{"question": "ä"}\n'.encode("utf-16"),
            "hint: save the file as UTF-8: iconv -f UTF-16 -t UTF-8",
        ),
        ("rows.jsonl", '{"question": "ä"}\n'.encode("latin-1"), "iconv -f ISO-8859-1 -t UTF-8 rows.jsonl"),
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), "hint: it is compressed: gunzip -c rows.jsonl"),
        ("rows.jsonl", '{"question": ' + "[" * 150 + "]" * 150 + "}", "hint: rows hold texts, and little else"),
        ("rows.json", "[" * 200_000, "nested too deeply"),
        ("rows.json", '{"data": []}', "holds no list of rows"),
        ("-", None, "-: not a regular file"),
        ("/dev/null", None, "/dev/null: not a regular file"),
        ("folder/rows.jsonl", None, "no such file"),
    ],
)
def test_files_of_another_form_are_told(name: str, content: str | bytes | None, words: str) -> None:
    if content is not None:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        make(Path(name))
    assert words in str(caught.value)


def test_foreign_letters_stay_on_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([{"frage": f"Wie groß ist {n}?", "antwort": f"größer als {n - 1}"} for n in range(20)])
    assert main(["new", "groesse", "--data", "rows.jsonl", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert '      "_fields_comment": "prompt: frage (it comes first of two fields of text' in told
    assert "| größer als" in told


def test_a_file_that_is_not_there_is_told_with_one_that_is() -> None:
    write_rows(make_rows())
    with pytest.raises(InputError, match=r"rows\.json: no such file\nhint: did you mean rows\.jsonl"):
        make(Path("rows.json"))
    with pytest.raises(InputError, match=r"more\.jsonl: no such file"):
        make(Path("rows.jsonl"), wishes=Wishes(validation=Path("more.jsonl")))


@pytest.mark.parametrize("name", ["", "../x", "a b", "x.json", "-x", "a" * 61])
def test_odd_names_are_refused(name: str) -> None:
    why = "it may not end in .json" if name == "x.json" else "it begins with a letter or a digit"
    with pytest.raises(InputError, match=f"is no name for an expert: {why}"):
        make(write_rows(make_rows()), name)


def test_a_few_bad_rows_are_a_note() -> None:
    data = write_rows(make_rows())
    data.write_text(data.read_text() + "oops\n")
    assert "1 rows cannot be read: broken JSON: Expecting value (line 41)" in make(data).proposal.notes


def test_rows_that_cannot_be_used_are_told_with_the_reasons() -> None:
    """Here and now: without a GPU, preparing sees only the sample, which holds none of them."""
    rows = [*make_rows(), *({"question": f"and {n}?"} for n in range(3)), {"question": "?", "answer": ""}]
    notes = make(write_rows(rows)).proposal.notes
    assert notes == (
        "4 of 44 rows cannot be used: 3 rows no field answer (line 41, 42, 43); 1 rows answer is empty (line 44)",
    )


def test_held_out_is_what_preparing_would_hold_out() -> None:
    made = make(write_rows(make_rows(200)))
    config = load_manifest(find_manifest("sales")).manifest.training.config
    assert made.proposal.num_held_out is not None
    assert 8 <= made.proposal.num_held_out <= 35
    assert config.evaluation_strategy == "epoch"
    assert is_cut_for_validation(0)


def test_where_nothing_can_be_held_out_nothing_is_evaluated() -> None:
    rows = make_rows(4)
    made = make(write_rows(rows))
    if made.proposal.num_held_out is None:
        assert load_manifest(find_manifest("sales")).manifest.training.config.evaluation_strategy == "no"
    made = make(write_rows(rows), wishes=Wishes(validation=write_rows(make_rows(9), "v.jsonl")), force=True)
    dataset = load_manifest(find_manifest("sales")).manifest.training.dataset
    assert dataset.validation_path == "../v.jsonl"
    assert made.proposal.holds_out


def test_plain_text_is_trained_whole() -> None:
    data = write_rows([{"body": f"Once upon a time, {n}."} for n in range(30)])
    make(data, wishes=Wishes(fields=GivenFields(text="body")))
    manifest = load_manifest(find_manifest("sales")).manifest
    assert manifest.training.config.loss_on == "all"
    assert manifest.evaluation is None


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(InputError):
        make(write_rows(make_rows()), wishes=Wishes(base="Qwen/Qwen9-1T"))


def test_the_task_decides_who_judges() -> None:
    rows = [{"question": f"q{n}", "answer": f'{{"n": {n}}}'} for n in range(30)]
    assert make(write_rows(rows)).proposal.language is not None
    make(write_rows(rows), wishes=Wishes(task="text"), force=True)
    assert load_manifest(find_manifest("sales")).manifest.evaluation is None
    made = make(write_rows(rows), wishes=Wishes(task="sql"), force=True)
    assert "most answers of the rows do not parse as sql" in made.proposal.notes


def test_a_name_of_a_language_does_not_bring_its_judge() -> None:
    make(write_rows(make_rows()), "sql", into=Path("mine"))
    evaluation = load_manifest(Path("mine/manifest.json")).manifest.evaluation
    assert evaluation is not None
    assert evaluation.task_rows == 0


def test_the_sample_holds_rows_that_fit() -> None:
    """Those of a mapping only, and as long as the smoke profile takes them."""
    long = [{"question": f"q{n}", "context": "word " * 1500, "answer": f"a{n}", "id": n} for n in range(60)]
    made = make(write_rows([*make_rows(60), *long]))
    rows = [row for name in ("train", "validation", "test") for row in read_sample(name)]
    assert len(rows) == 60
    assert all(set(row) == {"question", "context", "answer"} for row in rows)
    assert "60 of 120 rows are too long for the sample of the smoke profile" in made.proposal.notes
    Path("sales").rename("old")
    made = make(write_rows(long))
    length = find_smoke_length(probe_sample(Path("sales")).mean_tokens)
    assert made.plan is not None
    assert made.plan.plan.batch.sequence_length == length == 4096
    assert "need 4,096 tokens" in next(d.reason for d in made.plan.plan.decisions if d.name == "global batch")


@pytest.mark.parametrize("name", REAL)
def test_real_rows(name: str) -> None:
    file = SHARED / "data" / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip("the real rows do not lie beside this checkout")
    made = make(file, dry_run=True)
    mapping = made.proposal.roles.mapping.model_dump(exclude_none=True)
    expected = {
        "json_instructions": ({"text": "text"}, "json"),
        "text2cypher": ({"instruction": "question", "input": "schema", "response": "cypher"}, "cypher"),
        "text2sql_questions": ({"instruction": "question", "response": "sql"}, "sql"),
    }
    language = made.proposal.language
    assert (mapping, language.name if language else None) == expected[name]
    assert f"in {made.proposal.num_rows:,} of {made.proposal.num_rows:,} rows" in made.proposal.guesses[0].why
    assert 0 < made.proposal.mask.num_trained < made.proposal.mask.num_tokens


def test_the_verb_tells_people_what_was_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl"]) == 0
    told = capsys.readouterr().out
    for words in ("in 40 of 40 rows", "| It is", "The plan for this machine", "Next:  launcher train sales"):
        assert words in told
    assert main(["validate", "sales"]) == 0


def test_the_verb_tells_scripts_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["next"] == "launcher train sales"
    assert told["manifest"] == json.loads(Path("sales/manifest.json").read_text())
    assert {guess["what"]: guess["value"] for guess in told["guesses"]}["prompt"] == "question"
    assert "".join(part["text"] for part in told["mask"]["segments"] if part["is_trained"]).endswith("<|im_end|>")
    assert told["plan"]["profile"] == "smoke"
    assert main(["new", "sales", "--data", "rows.jsonl", "--json"]) == 2
    assert "is there already" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("flag", ["--into", "--validation", "--test", "--base"])
def test_an_empty_word_is_no_place(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl", flag, ""]) == 2
    assert f"{flag}: an empty name is no" in capsys.readouterr().err
    assert list_names() == ["rows.jsonl"]


def test_a_place_that_takes_nothing_is_told() -> None:
    Path("file").write_text("")
    with pytest.raises(InputError, match="no folder can be made there"):
        make(write_rows(make_rows()), into=Path("file/below"))
