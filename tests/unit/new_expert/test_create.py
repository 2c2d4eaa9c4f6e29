"""A new expert's folder is complete or absent, never overwrites another, and is loaded and planned first."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.analysis.doctor.expert import check_expert, probe_expert
from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.cli.main import main
from launcher.cli.new import _print_plan
from launcher.core.errors import DoesNotFitError, InputError
from launcher.corpus.first_rows import probe_sample
from launcher.corpus.heldout import load_held_out_rows
from launcher.corpus.sources import make_file_source
from launcher.corpus.spec import make_preparation_spec
from launcher.corpus.tokenizer import load_tokenizer
from launcher.manifest import find_manifest, load_manifest
from launcher.new_expert import answer_language, create, row_profile
from launcher.new_expert.infer_roles import FieldFlags
from launcher.new_expert.proposal import Options
from launcher.plan.smoke import choose_smoke_length
from launcher.request.request import Request, plan_request
from tests.conftest import SHARED
from tests.unit.new_expert.inputs import make, make_rows, read_sample, write_rows

pytestmark = pytest.mark.long

REAL = ("json_instructions", "text2cypher", "text2sql_questions")


def list_names(folder: str = ".") -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


def test_manifest_and_sample_are_written_and_valid() -> None:
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
    assert made.cli_name == "sales"
    assert plan_request(Request(expert="sales", gpu="rtx4090")).plan.data.path == "../rows.jsonl"
    assert list_names() == ["rows.jsonl", "sales"]


def test_default_folder_is_in_experts_if_it_exists() -> None:
    Path("experts").mkdir()
    Path("experts/manifest.schema.json").write_text("{}")
    made = make(write_rows(make_rows()))
    assert made.folder == Path("experts/sales")
    assert json.loads(made.manifest)["$schema"] == "../manifest.schema.json"
    assert made.cli_name == "sales"


@pytest.mark.parametrize(
    ("output_dir", "cli_name"),
    [(None, "sales"), ("there/sales", "there/sales"), ("other", "other/manifest.json"), ("a b/c", "'a b/c'")],
)
def test_manifest_names_itself_as_commands_find_it(output_dir: str | None, cli_name: str) -> None:
    made = make(write_rows(make_rows()), output_dir=None if output_dir is None else Path(output_dir))
    comment = json.loads(made.manifest)["_comment"]
    assert f"`launcher validate {cli_name}` checks it" in comment
    assert find_manifest(made.cli_name).resolve() == (made.folder / "manifest.json").resolve()


def test_short_name_of_another_expert_is_not_suggested() -> None:
    make(write_rows(make_rows()))
    Path("experts").mkdir()
    assert make(write_rows(make_rows())).cli_name == "experts/sales"


def test_data_elsewhere_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(make_rows()).resolve()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setattr("launcher.new_expert.manifest_text._MIN_COMMON_PARTS", len(tmp_path.parts))
    assert json.loads(make(data).manifest)["training"]["dataset"]["path"] == str(data)


def test_folder_may_already_contain_the_data() -> None:
    Path("sales").mkdir()
    data = write_rows(make_rows(), "sales/rows.jsonl")
    made = make(data)
    assert json.loads(made.manifest)["training"]["dataset"]["path"] == "rows.jsonl"
    assert data.is_file()


def test_existing_files_are_kept_without_force() -> None:
    data = write_rows(make_rows())
    make(data)
    Path("sales/NOTES.md").write_text("mine")
    Path("sales/sample/more.jsonl").write_text("rows of an older mapping")
    before = Path("sales/manifest.json").read_bytes()
    with pytest.raises(InputError, match="already exists: nothing was changed\nhint: --force replaces"):
        make(data, options=Options(fields=FieldFlags(prompt="notes")))
    assert Path("sales/manifest.json").read_bytes() == before
    make(data, options=Options(fields=FieldFlags(prompt="notes")), force=True)
    assert (
        json.loads(Path("sales/manifest.json").read_text())["training"]["dataset"]["field_mapping"]["instruction"]
        == "notes"
    )
    assert Path("sales/NOTES.md").read_text() == "mine"
    assert list_names("sales/sample") == ["test.jsonl", "train.jsonl", "validation.jsonl"]


@pytest.mark.parametrize("moment", ["plan", "place"])
def test_interruption_leaves_no_files(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(create, {"plan": "plan_request", "place": "_move_into_place"}[moment], fail)
    with pytest.raises(KeyboardInterrupt):
        make(write_rows(make_rows()), output_dir=Path("deep/er/sales"))
    assert list_names() == ["rows.jsonl"]


def test_dry_run_writes_nothing() -> None:
    made = make(write_rows(make_rows()), dry_run=True)
    assert made.files == ()
    assert list_names() == ["rows.jsonl"]


def test_base_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Request) -> None:
        raise DoesNotFitError("too large", hint="buy more")

    monkeypatch.setattr(create, "plan_request", refuse)
    made = make(write_rows(make_rows()))
    assert made.plan is None
    assert made.proposal.notes[-1] == "the run does not fit this machine: too large; buy more"


def write_as(rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "jsonl":
        return write_rows(rows)
    if kind == "json":
        Path("rows.json").write_text(json.dumps(rows))
        return Path("rows.json")
    if kind == "jsonl named json":
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


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl named json", "csv", "parquet"])
def test_every_format_is_read_like_in_training(kind: str) -> None:
    make(write_as(make_rows(), kind))
    plan = plan_request(Request(expert="sales", gpu="rtx4090")).plan
    assert plan.data.num_rows == 40
    assert plan.data.format == {"jsonl named json": "jsonl"}.get(kind)
    assert make_file_source(Path("sales") / str(plan.data.path), plan.data.format).format == {
        "jsonl named json": "jsonl"
    }.get(kind, kind)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_may_hold_chats_as_json_text(kind: str) -> None:
    names = {"question": "user", "answer": "assistant"}
    chats = [[{"role": names[key], "content": row[key]} for key in names] for row in make_rows()]
    new = make(write_as([{"messages": json.dumps(chat)} for chat in chats], kind))
    assert json.loads(new.manifest)["training"]["dataset"]["field_mapping"] == {"messages": "messages"}
    assert plan_request(Request(expert="sales", gpu="rtx4090")).plan.data.num_rows == 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "rows.jsonl has no rows"),
        ("\n \n", "rows.jsonl has no rows"),
        ("hello\n", "line 1: broken JSON"),
        ('{"a": "b"}\nhello\nhello\n', "line 2: broken JSON"),
        ("[1, 2]\n", "line 1: not an object"),
        ("{}\n{}\n", "the rows have no fields"),
        ('{"question": "q", "answer": "a"}\n', "there is only one usable row"),
        ('{"question": "q", "answer": "a"}\n' * 3, "all 3 rows are identical"),
        ('{"question": "q", "answer": "a"}\n{"question": "q", "answer": "b"}\n', "all 2 rows have the same prompt"),
        ('{"body": "one"}\n{"body": "two"}\n', "a single field of text, body"),
    ],
)
def test_wrong_rows_are_refused_and_leave_no_files(content: str, words: str) -> None:
    Path("rows.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        make(Path("rows.jsonl"))
    assert words in str(caught.value)
    assert "hint:" in str(caught.value)
    assert list_names() == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", "question|answer\na|b\n", "cells are separated by '|': the header is 'question|answer'"),
        ("rows.csv", "question,answer\n", "rows.csv has no rows; its only line is the header\nhint: expected a header"),
        ("rows.csv", "", "rows.csv has no rows\nhint: expected a header"),
        ("rows.csv", "question,question\na,b\n", "two columns are called 'question'"),
        ("rows.doc", "x", "unknown format\nhint: --data, --validation and --test name files; --format names"),
        ("rows.jsonl.gz", "x", "unknown format\nhint: it is compressed: gunzip -k rows.jsonl.gz"),
        (
            "rows.jsonl",
            '{"question": "ä"}\n'.encode("utf-16"),
            "hint: save the file as UTF-8: iconv -f UTF-16 -t UTF-8",
        ),
        ("rows.jsonl", '{"question": "ä"}\n'.encode("latin-1"), "iconv -f WINDOWS-1252 -t UTF-8 rows.jsonl"),
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), "hint: the file is compressed"),
        ("rows.jsonl", '{"question": ' + "[" * 150 + "]" * 150 + "}", "hint: flatten the rows"),
        ("rows.json", "[" * 200_000, "nested too deeply"),
        ("rows.json", '{"data": []}', "not a list of rows"),
        ("-", None, "-: not a regular file"),
        ("/dev/null", None, "/dev/null: not a regular file"),
        ("folder/rows.jsonl", None, "no such file"),
    ],
)
def test_unreadable_files_are_refused_with_a_hint(name: str, content: str | bytes | None, words: str) -> None:
    if content is not None:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        make(Path(name))
    assert words in str(caught.value)


def test_non_ascii_text_is_printed_unescaped(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([{"question": f"Wie groß ist {n}?", "antwort": f"größer als {n - 1}"} for n in range(20)])
    assert main(["new", "groesse", "--data", "rows.jsonl", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "answer: antwort (the only other field of text; in 20 of 20 rows)" in output
    assert "| größer als" in output


def test_missing_file_is_refused_with_a_suggestion() -> None:
    write_rows(make_rows())
    with pytest.raises(InputError, match=r"rows\.json: no such file\nhint: did you mean rows\.jsonl"):
        make(Path("rows.json"))
    with pytest.raises(InputError, match=r"more\.jsonl: no such file"):
        make(Path("rows.jsonl"), options=Options(validation=Path("more.jsonl")))


@pytest.mark.parametrize("name", ["", "../x", "a b", "x.json", "-x", "a" * 61])
def test_invalid_names_are_refused(name: str) -> None:
    rule = "it must not end in .json" if name == "x.json" else "it must begin with a letter or a digit"
    with pytest.raises(InputError, match=f"is not a valid name for an expert: {rule}"):
        make(write_rows(make_rows()), name)


def test_few_unreadable_rows_are_noted() -> None:
    data = write_rows(make_rows())
    data.write_text(data.read_text() + "oops\n")
    assert "1 of 41 rows cannot be read: broken JSON: Expecting value (line 41)" in make(data).proposal.notes


def test_unusable_rows_are_noted_with_their_reasons() -> None:
    """Without a GPU, `launcher prepare` would only see the sample, which holds none of them."""
    rows = [*make_rows(), *({"question": f"and {n}?"} for n in range(3)), {"question": "?", "answer": ""}]
    proposal = make(write_rows(rows)).proposal
    assert proposal.hyperparameters.epochs_reason == "40 rows, each seen 5 times"
    assert f"{proposal.num_validation} of 40 rows" in {guess.value for guess in proposal.guesses}
    assert proposal.notes == (
        "4 of 44 rows cannot be used: 3 rows no field answer (line 41, 42, 43); 1 row answer is empty (line 44)",
    )


def test_validation_split_is_that_of_prepare() -> None:
    made = make(write_rows(make_rows(200)))
    config = load_manifest(find_manifest("sales")).manifest.training.config
    assert made.proposal.num_validation is not None
    assert 8 <= made.proposal.num_validation <= 35
    assert config.evaluation_strategy == "epoch"


def test_without_a_validation_split_nothing_is_evaluated() -> None:
    rows = make_rows(4)
    made = make(write_rows(rows))
    if made.proposal.num_validation is None:
        assert load_manifest(find_manifest("sales")).manifest.training.config.evaluation_strategy == "no"
    made = make(write_rows(rows), options=Options(validation=write_rows(make_rows(9), "v.jsonl")), force=True)
    dataset = load_manifest(find_manifest("sales")).manifest.training.dataset
    assert dataset.validation_path == "../v.jsonl"
    assert made.proposal.has_validation


def test_plain_text_is_trained_on_every_token() -> None:
    data = write_rows([{"body": f"Once upon a time, {n}."} for n in range(30)])
    make(data, options=Options(fields=FieldFlags(text="body")))
    manifest = load_manifest(find_manifest("sales")).manifest
    assert manifest.training.config.loss_on == "all"
    assert manifest.evaluation is None


def test_unknown_base_is_refused() -> None:
    with pytest.raises(InputError):
        make(write_rows(make_rows()), options=Options(base="Qwen/Qwen9-1T"))


def test_task_selects_the_judge() -> None:
    rows = [{"question": f"q{n}", "answer": f'{{"n": {n}}}'} for n in range(30)]
    assert make(write_rows(rows)).proposal.language is not None
    make(write_rows(rows), options=Options(task="text"), force=True)
    assert load_manifest(find_manifest("sales")).manifest.evaluation is None
    made = make(write_rows(rows), options=Options(task="sql"), force=True)
    assert "most answers of the rows do not parse as sql" in made.proposal.notes


def test_expert_named_after_a_language_does_not_get_its_judge() -> None:
    make(write_rows(make_rows()), "sql", output_dir=Path("mine"))
    evaluation = load_manifest(Path("mine/manifest.json")).manifest.evaluation
    assert evaluation is not None
    assert evaluation.task_rows == 0


def test_sample_holds_every_field_of_rows_that_fit() -> None:
    long = [{"question": f"q{n}", "context": "word " * 1500, "answer": f"a{n}", "id": n} for n in range(60)]
    made = make(write_rows([*make_rows(60), *long]))
    rows = [row for name in ("train", "validation", "test") for row in read_sample(name)]
    assert len(rows) == 60
    assert all(set(row) == {"question", "notes", "context", "answer", "id"} for row in rows)
    assert "60 of 120 rows are too long for the sample of the smoke profile" in made.proposal.notes
    Path("sales").rename("old")
    made = make(write_rows(long))
    length = choose_smoke_length(
        probe_sample(load_manifest(Path("sales/manifest.json")).manifest.training.dataset, Path("sales")).mean_tokens
    )
    assert made.plan is not None
    assert made.plan.plan.batch.sequence_length == length == 4096
    assert "need 4,096 tokens" in next(d.reason for d in made.plan.plan.decisions if d.name == "global batch")


@pytest.mark.parametrize("name", REAL)
def test_published_datasets_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SHARED / "data" / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip("the published datasets are not next to this checkout")
    monkeypatch.setattr(answer_language, "_PARSED_ROWS", 6)  # a Cypher query takes a quarter of a second
    made = make(file, dry_run=True)
    mapping = made.proposal.roles.mapping.model_dump(exclude_none=True)
    expected = {
        "json_instructions": ({"text": "text"}, "json"),
        "text2cypher": ({"instruction": "question", "input": "schema", "response": "cypher"}, "cypher"),
        "text2sql_questions": ({"instruction": "question", "response": "sql"}, "sql"),
    }
    language = made.proposal.language
    assert (mapping, language.name if language else None) == expected[name]
    assert f"in {made.proposal.num_rows:,} of {made.proposal.num_rows:,} rows" in made.proposal.guesses[0].reason
    assert 0 < made.proposal.mask.num_trained < made.proposal.mask.num_tokens


def test_command_prints_what_was_inferred(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl"]) == 0
    output = capsys.readouterr().out
    for words in ("in 40 of 40 rows", "| It is", "Plan for this machine", "Next:  launcher train sales"):
        assert words in output
    assert main(["validate", "sales"]) == 0


def test_command_prints_the_rows_of_each_split(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([*make_rows(), {"question": "?", "answer": ""}])
    flags = ["--validation", str(write_rows(make_rows(20, first=500), "v.jsonl"))]
    assert main(["new", "sales", "--data", "rows.jsonl", *flags]) == 0
    output = capsys.readouterr().out
    assert "\nrows: training 40, validation 20, test 0 (validation rows are used); rejected 1\n" in output
    assert re.search(r"sample/ has some of your rows, \d+ for train, 20 for validation, \d+ for test:", output)
    assert main(["new", "sales", "--data", "rows.jsonl", "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["split_rows"].values()) == report["rows"] == 40
    assert report["split_rows"]["validation"] > 0
    assert report["rejected_rows"] == 1


def test_printed_time_says_what_it_covers(capsys: pytest.CaptureFixture[str]) -> None:
    _print_plan(plan_request(Request(expert="json", gpu="h100")).plan)
    assert re.search(r"about .* for all steps, without start-up, evaluation and checkpoints\n", capsys.readouterr().out)


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["next"] == "launcher train sales"
    assert output["manifest"] == json.loads(Path("sales/manifest.json").read_text())
    assert {guess["what"]: guess["value"] for guess in output["guesses"]}["prompt"] == "question"
    assert "".join(part["text"] for part in output["mask"]["segments"] if part["is_trained"]).endswith("<|im_end|>")
    assert output["plan"]["profile"] == "smoke"
    assert main(["new", "sales", "--data", "rows.jsonl", "--json"]) == 2
    assert "already exists" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("flag", ["--output-dir", "--validation", "--test", "--base"])
def test_empty_paths_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(make_rows())
    assert main(["new", "sales", "--data", "rows.jsonl", flag, ""]) == 2
    assert f"{flag}: the {'name' if flag == '--base' else 'path'} is empty" in capsys.readouterr().err
    assert list_names() == ["rows.jsonl"]


def test_unwritable_folder_is_refused() -> None:
    Path("file").write_text("")
    with pytest.raises(InputError, match="cannot create a folder there"):
        make(write_rows(make_rows()), output_dir=Path("file/below"))


def test_changed_mapping_finds_its_fields_in_the_sample() -> None:
    rows = [{"subject": f"s{n}", "body": f"b{n}", "answer": f"a{n}"} for n in range(60)]
    make(write_rows(rows), options=Options(fields=FieldFlags(prompt="body", answer="answer")))
    overrides = ("training.dataset.field_mapping.instruction={subject}: {body}",)
    planned = plan_request(Request(expert="sales", overrides=overrides, profile="smoke"))
    assert planned.plan.data.field_mapping.instruction == "{subject}: {body}"
    for wrong in ("boddy", "{subject} {boddy}"):
        with pytest.raises(InputError) as caught:
            plan_request(Request(expert="sales", overrides=(f"training.dataset.field_mapping.instruction={wrong}",)))
        assert "rows have no field 'boddy'; did you mean 'body'?" in str(caught.value)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_own_template_format_and_system_prompt_are_shown_and_prepared_alike() -> None:
    rows = [{"subject": f"s{n}", "body": f"b{n}", "answer": f"a{n}"} for n in range(60)]
    Path("my.jinja").write_text(TEMPLATE)
    fields = FieldFlags(prompt="{subject}\n{body}", answer="answer", system_prompt="Be brief.")
    made = make(write_rows(rows), options=Options(fields=fields, chat_template=Path("my.jinja")))
    shown = "".join(segment.text for segment in made.proposal.mask.segments)
    number = made.proposal.mask.row - 1
    assert shown == f"[system] Be brief.[user] s{number}\nb{number}[assistant] a{number}<|im_end|>"
    assert Path("sales/chat_template.jinja").read_text() == TEMPLATE
    planned = plan_request(Request(expert="sales", profile="smoke"))
    assert planned.plan.data.chat_template == TEMPLATE
    tokenizer = load_tokenizer("launcher/tiny", ())
    spec = make_preparation_spec(planned.plan, planned.loaded.folder, tokenizer)
    held_out = load_held_out_rows(spec, 1, "test").rows[0]
    assert held_out.prompt == f"[system] Be brief.[user] {held_out.instruction}[assistant] "
    assert "template" in spec.key_parts()


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("missing.jinja", None, "no such file"),
        ("../outside.jinja", "x", "is not a file next to the manifest"),
        ("broken.jinja", "{% for m in messages %}", "the chat template cannot be used"),
        ("slow.jinja", "{{ 'a' * 10**10 }}", "the chat template cannot be used"),
    ],
)
def test_template_that_cannot_be_used_is_an_error_of_the_plan(name: str, source: str | None, problem: str) -> None:
    make(write_rows(make_rows(60)))
    if source is not None:
        (Path("sales") / name).write_text(source)
    overrides = (f"base_models.0.chat_template={name}", "base_models.0.prompt_template=tokenizer")
    with pytest.raises(InputError) as caught:
        plan_request(Request(expert="sales", overrides=overrides))
    assert problem in caught.value.title
    assert Path(name).name in caught.value.title


def test_template_with_tokens_that_the_tiny_base_lacks_is_noted() -> None:
    make(write_rows(make_rows(60)))
    Path("sales/own.jinja").write_text(TEMPLATE.replace("{{ eos_token }}", "<|eot_id|>"))
    overrides = ("base_models.0.chat_template=own.jinja", "base_models.0.prompt_template=tokenizer")
    plan = plan_request(Request(expert="sales", overrides=overrides)).plan
    assert plan.data.prompt_template == "chatml"
    assert any("the smoke profile uses the template chatml" in note for note in plan.notes)
    full = plan_request(Request(expert="sales", overrides=overrides, gpu="h100")).plan
    assert full.data.chat_template_file == "own.jinja"


def test_data_near_the_expert_has_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    write_rows(make_rows(60))
    monkeypatch.chdir(tmp_path / "project")
    made = make(tmp_path / "data/rows.jsonl")
    assert json.loads(made.manifest)["training"]["dataset"]["path"] == "../../data/rows.jsonl"


def test_hub_dataset_is_answered_with_the_way_to_use_one() -> None:
    with pytest.raises(InputError) as caught:
        make(Path("databricks/databricks-dolly-15k"))
    assert 'training.dataset.path "databricks/databricks-dolly-15k" and format "huggingface"' in caught.value.hint


def test_weights_in_the_old_format_are_noted_with_the_way_to_convert_them(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY_BASE_FOLDER, "old")
    Path("old/model.safetensors").rename("old/pytorch_model.bin")
    write_rows(make_rows())
    for command in (("new", "sales", "--data", "rows.jsonl", "--base", "old"), ("plan", "sales", "--gpu", "rtx4090")):
        assert main(command) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "are in pytorch_model.bin, and training loads *.safetensors" in printed
        assert "save_pretrained('old') converts them" in printed


def test_missing_shards_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY_BASE_FOLDER, "cut")
    Path("cut/model.safetensors").rename("cut/model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    Path("cut/model.safetensors.index.json").write_text(json.dumps(index))
    write_rows(make_rows())
    for command in (("new", "sales", "--data", "rows.jsonl", "--base", "cut"), ("plan", "sales", "--gpu", "rtx4090")):
        assert main(command) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "the base model 'cut' is incomplete: cut lacks model-2.safetensors of its index" in printed


def test_base_without_a_tokenizer_is_found_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY_BASE_FOLDER, "bare")
    Path("bare/tokenizer.json").unlink()
    what = "has no tokenizer: bare has no tokenizer.json, so no row can be tokenized"
    write_rows(make_rows())
    commands = (
        ("new", "sales", "--data", "rows.jsonl", "--base", "bare"),
        ("validate", "sales"),
        ("plan", "sales"),
        ("plan", "sales", "--gpu", "rtx4090"),
    )
    for command in commands:
        assert main(command) == 0
        assert what in capsys.readouterr().out.replace("\n", " "), command
    planned = plan_request(Request(expert="sales", gpu="rtx4090"))
    findings = list(check_expert(probe_expert(planned, Path("runs"))))
    assert any(what in finding.found and finding.status == "problem" for finding in findings)
    Path("bare/vocab.json").write_text("{}")
    assert main(("validate", "sales")) == 0
    assert "AutoTokenizer.from_pretrained('bare').save_pretrained('bare')" in capsys.readouterr().out


_TOOL_CHAT = {
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": {"id": 1}}}]},
        {"role": "tool", "content": "on its way"},
        {"role": "assistant", "content": "It is on its way."},
    ],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
}
_TOOL_TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>
{{ message.content or "" }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\
{% if message.role == "assistant" %}{{ eos_token }}{% endif %}{{ "\\n" }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def _write_tool_chats() -> Path:
    rows = [json.loads(json.dumps(_TOOL_CHAT).replace("Where", f"{n}: where")) for n in range(40)]
    return write_rows(rows, "chats.jsonl")


def test_chats_with_tools_have_a_sample_and_use_their_tools() -> None:
    Path("template.jinja").write_text(_TOOL_TEMPLATE, encoding="utf-8")
    made = make(_write_tool_chats(), options=Options(chat_template=Path("template.jinja")))
    assert "not used" not in [guess.name for guess in made.proposal.guesses], "the template writes the tools"
    assert not [note for note in made.proposal.notes if "longer than" in note]
    assert all(row["tools"] for row in read_sample("train"))


def test_error_of_chats_with_tools_names_the_flags_that_help() -> None:
    with pytest.raises(InputError, match="no row can be used") as caught:
        make(_write_tool_chats())
    assert caught.value.hint.startswith("--template tokenizer takes the base's own chat template")
    assert "--chat-template FILE" in caught.value.hint


def test_tool_calls_are_not_judged_by_the_template_of_a_preview(capsys: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "track", "arguments": {"id": 1}}}
    with_call = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    plain = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]
        for n in range(20)
    ]
    write_rows([{"messages": with_call}, *({"messages": messages} for messages in plain)])
    command = ["new", "sales", "--data", "rows.jsonl", "--dry-run", "--template"]
    assert main([*command, "tokenizer"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1 row has tools or tool calls: on a machine with the base's tokenizer" in output
    assert "template chatml cannot write" not in output
    assert main([*command, "chatml"]) == 0
    assert "template chatml cannot write" in " ".join(capsys.readouterr().out.split())


def test_steps_of_the_proposal_are_those_of_the_plan() -> None:
    """Both leave out rows for validation, and count a marker of the template as one token."""
    made = make(write_rows(make_rows(400)))
    (reason,) = (guess.reason for guess in made.proposal.guesses if guess.name == "batch")
    steps = plan_request(Request(expert="sales", gpu="rtx4090")).plan.schedule.num_steps
    assert int(reason.removeprefix("about ").split()[0]) == pytest.approx(steps, rel=0.05)


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        ("ticket;category", "--prompt-field ticket --answer-field category"),
        ("topic\tmy mail", "--prompt-field 'my mail' --answer-field topic"),
    ],
)
def test_two_unknown_columns_are_answered_with_flags(header: str, flags: str) -> None:
    mark = ";" if ";" in header else "\t"
    rows = [("billing" if number % 2 else "delivery", f"Where is order {number}?") for number in range(30)]
    cells = [pair if header.startswith("topic") else pair[::-1] for pair in rows]
    Path("rows.csv").write_text("\n".join([header, *map(mark.join, cells)]) + "\n")
    with pytest.raises(InputError, match="cannot infer") as caught:
        make(Path("rows.csv"))
    assert f", such as {flags};" in caught.value.hint


@pytest.mark.parametrize(
    ("num_different", "note"),
    [
        (60, "60 of 120 rows repeat an earlier row exactly, so they are"),
        (119, "1 of 120 rows repeats an earlier row exactly, so it is"),
        (120, ""),
    ],
)
def test_duplicates_are_noted(num_different: int, note: str) -> None:
    rows = [
        f"Where is order {number % num_different}?,It left on day {number % num_different}." for number in range(120)
    ]
    Path("rows.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    notes = " ".join(make(Path("rows.csv")).proposal.notes)
    assert (note in notes) if note else ("repeat" not in notes)


def test_different_answers_to_one_question_are_noted() -> None:
    rows = [f"Where is order {number % 60}?,Day {number % 60 + number // 110}." for number in range(120)]
    Path("rows.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    notes = " ".join(make(Path("rows.csv")).proposal.notes)
    assert "20 of 120 rows have the same prompt as a row with another answer" in notes


def test_column_without_a_name_is_not_offered_for_the_prompt() -> None:
    """As the index that pandas writes."""
    Path("rows.csv").write_text(",question,answer\n" + "".join(f"row {n},What is {n}?,It is {n}.\n" for n in range(30)))
    (unused,) = (guess for guess in make(Path("rows.csv")).proposal.guesses if guess.name == "not used")
    assert (unused.value, unused.reason) == ("(no name)", "no role for these fields")


def test_chats_with_several_answers_are_noted() -> None:
    def make_chat(number: int) -> dict[str, Any]:
        turns = [("user", f"{number}?"), ("assistant", '{"n": 1}'), ("user", "And?"), ("assistant", '{"n": 2}')]
        return {"messages": [{"role": role, "content": text} for role, text in turns[: 4 if number < 30 else 2]]}

    made = make(write_rows([make_chat(number) for number in range(40)]))
    note = "30 of 40 rows have several answers: all are trained, `launcher eval` judges the first of each"
    assert note in made.proposal.notes


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_rows_of_a_large_file_are_counted_by_their_bytes(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Chinese a character has three bytes, or six if it is escaped."""
    monkeypatch.setattr(row_profile, "MAX_ROWS", 100)
    rows = [
        {"question": f"问题{number:03}号的答案是什么?", "answer": f"第{number:03}个答案。"} for number in range(300)
    ]
    file = Path(f"rows.{suffix}")
    if suffix == "json":
        file.write_text(json.dumps(rows))
    elif suffix == "jsonl":
        write_rows(rows)
    else:
        lines = (f"{row['question']},{row['answer']}\n" for row in rows)
        file.write_text("question,answer\n" + "".join(lines), encoding="utf-8")
    assert make(file, dry_run=True).proposal.num_rows == 300


def test_data_may_be_a_link_to_a_file_without_a_suffix() -> None:
    """As in the cache of the Hugging Face Hub."""
    Path("blobs").mkdir()
    write_rows(make_rows()).rename("blobs/0a1b2c")
    Path("train.jsonl").symlink_to("blobs/0a1b2c")
    make(Path("train.jsonl"), options=Options(validation=Path("train.jsonl")))
    dataset = load_manifest(find_manifest("sales")).manifest.training.dataset
    assert (dataset.path, dataset.validation_path) == ("../train.jsonl", "../train.jsonl")


@pytest.mark.parametrize("flag", ["data", "validation"])
def test_force_does_not_delete_the_files_that_it_is_given(flag: str) -> None:
    make(write_rows(make_rows()))
    sample = Path("sales/sample/train.jsonl")
    before = sample.read_bytes()
    data, options = (sample, Options()) if flag == "data" else (Path("rows.jsonl"), Options(validation=sample))
    with pytest.raises(InputError, match="which --force replaces: nothing was changed"):
        make(data, options=options, force=True)
    assert sample.read_bytes() == before
    make(data, options=options, force=True, with_sample=False)
    assert sample.read_bytes() == before


def test_rows_that_no_template_here_can_write_are_refused_with_the_reason() -> None:
    call = {"type": "function", "function": {"name": "track", "arguments": {"id": 1}}}
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(InputError, match="no row can be used") as caught:
        make(write_rows([{"messages": chat}] * 20), options=Options(template="tokenizer"))
    assert "the row has tools or tool calls" in str(caught.value)
    assert "on a machine with its tokenizer" in caught.value.hint
    assert "--chat-template FILE takes a Jinja template that writes tools" in caught.value.hint
