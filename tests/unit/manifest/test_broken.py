"""Invalid manifests are refused with all problems in one message and exit code 2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import ExitCode, ManifestError
from launcher.manifest import find_manifest, list_experts, load_manifest
from tests.conftest import WriteManifest


def load_message(path: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert caught.value.exit_code == ExitCode.WRONG_INPUT
    return str(caught.value)


CONFIG = "training.config."

WRONG_VALUES: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({CONFIG + "rank": 0}, (), "training.config.rank: must be at least 1, not 0"),
    ({CONFIG + "rank": "16"}, (), 'training.config.rank: must be a whole number, not "16"'),
    ({CONFIG + "rank": 1.5}, (), "training.config.rank: must be a whole number, not 1.5"),
    ({CONFIG + "rank": True}, (), "training.config.rank: must be a whole number, not true"),
    ({CONFIG + "learning_rate": -1e-4}, (), "training.config.learning_rate: must be greater than 0, not -0.0001"),
    ({CONFIG + "learning_rate": "1e-4"}, (), 'training.config.learning_rate: must be a number, not "1e-4"'),
    ({CONFIG + "fp16": True}, (), "training.config.bf16: bf16 and fp16 are both true; keep one"),
    ({CONFIG + "packing": "yes"}, (), 'training.config.packing: must be true or false, not "yes"'),
    ({CONFIG + "optim": "adamw_torch_fussed"}, (), "did you mean adamw_torch_fused?"),
    ({CONFIG + "adapter_type": "qlora"}, (), "; QLoRA is lora with base_models.0.quantization int4"),
    ({CONFIG + "adapter_type": "nf4"}, (), "must be 'lora', 'dora', 'ia3' or 'full', not \"nf4\"\n"),
    ({"base_models.0.quantization": "4bit"}, (), 'not "4bit"; did you mean int4?'),
    ({"base_models.0.quantization": "8-bit"}, (), "; write int4, since 8 bits are not supported"),
    ({"base_models.0.quantization": "bfloat16"}, (), "did you mean bf16?"),
    ({CONFIG + "optim": "adam"}, (), "training.config.optim: must be 'adamw_torch', 'adamw_torch_fused'"),
    (
        {CONFIG + "lr_scheduler": "linear", CONFIG + "lr_scheduler_kwargs": {"num_cycles": 2}},
        (),
        "training.config.lr_scheduler_kwargs.num_cycles: not applicable to lr_scheduler linear; remove it",
    ),
    (
        {CONFIG + "lr_scheduler": "cosine_with_restarts", CONFIG + "lr_scheduler_kwargs": {"num_cycles": 0.5}},
        (),
        "training.config.lr_scheduler_kwargs.num_cycles: must be an integer for cosine_with_restarts, not 0.5",
    ),
    (
        {CONFIG + "lr_scheduler": "polynomial", CONFIG + "lr_scheduler_kwargs": {"lr_end": 0.5}},
        (),
        "training.config.lr_scheduler_kwargs.lr_end: must be below the learning_rate",
    ),
    (
        {CONFIG + "save_strategy": "steps", CONFIG + "evaluation_strategy": "steps", CONFIG + "save_epochs": 2},
        (),
        "training.config.save_epochs: not applicable to strategy steps; remove it, or use epoch",
    ),
    (
        {CONFIG + "metric_for_best_model": "eval_accuracy"},
        (),
        "training.config.metric_for_best_model: must be eval_loss or eval/<check>, such as eval/parses, not eval_acc",
    ),
    (
        {CONFIG + "metric_for_best_model": "eval/a b"},
        (),
        "training.config.metric_for_best_model: must be eval_loss or eval/<check>",
    ),
    (
        {
            CONFIG + "metric_for_best_model": "eval/equal",
            CONFIG + "evaluation_strategy": "no",
            CONFIG + "greater_is_better": True,
            CONFIG + "load_best_model_at_end": False,
        },
        (),
        "training.config.metric_for_best_model: eval/equal requires evaluation, but evaluation_strategy is no",
    ),
    ({CONFIG + "greater_is_better": True}, (), "training.config.greater_is_better: a smaller loss is better"),
    (
        {CONFIG + "metric_for_best_model": "eval/equal", CONFIG + "greater_is_better": False},
        (),
        "training.config.greater_is_better: a higher rate is better; remove it, or set it to true",
    ),
    ({CONFIG + "adapter_type": "ia3"}, (), "training.config.rank: not applicable to adapter_type ia3; remove it"),
    ({CONFIG + "adapter_type": "full"}, (), "training.config.target_modules: not applicable to adapter_type full"),
    (
        {CONFIG + "target_modules": []},
        (),
        "target_modules: missing or empty; adapter_type lora requires at least one",
    ),
    (
        {CONFIG + "target_modules": "q_proj"},
        (),
        "training.config.target_modules: must be 'all-linear' or a list, not \"q_proj\"",
    ),
    ({CONFIG + "num_epochs": 5}, (), "training.config.epochs: epochs (2) and num_epochs (5) differ; keep one"),
    ({CONFIG + "gradient_checkpointing": "some"}, (), "must be true or false or 'selective', not \"some\""),
    ({CONFIG + "lr_scheduler_kwargs": {"num_cycels": 3}}, (), "num_cycels: unknown key; did you mean num_cycles?"),
    ({CONFIG + "evaluation_strategy": "no"}, (), "training.config.load_best_model_at_end: requires evaluation"),
    ({}, (CONFIG + "batch_size",), "training.config.batch_size: missing"),
    ({}, (CONFIG + "alpha",), "training.config.alpha: missing; adapter_type lora requires it"),
    ({}, (CONFIG + "epochs",), "training.config.epochs: missing; set epochs or max_steps"),
    (
        {},
        ("training.dataset.path",),
        "training.dataset.path: missing; set it to a local file or a dataset on the Hugging Face",
    ),
    ({}, ("base_models",), "base_models: missing"),
    ({"base_models": []}, (), "base_models: needs at least 1 entry"),
    ({"base_models.0.quantization": "int3"}, (), "base_models[0].quantization: must be 'none', 'int4'"),
    (
        {"base_models.0.trust_remote_code": True},
        (),
        "base_models[0].trust_remote_code: runs code from the model's repository",
    ),
    ({"limitations": [5]}, (), "limitations[0]: must be a string, not 5"),
    ({"limitations": [{"pattern": "joins"}]}, (), "limitations[0].description: missing"),
    ({"training.dataset.field_mapping": {"prompt": "q"}}, (), "prompt: unknown key; did you mean instruction?"),
    ({"training.dataset.field_mapping": {"completion": "a"}}, (), "completion: unknown key; did you mean response?"),
    ({"athor": "me"}, (), "athor: unknown key; did you mean author?"),
    ({CONFIG + "use_unslooth": True}, (), "use_unslooth: unknown key; did you mean use_unsloth?"),
    ({"training.dataset.splits": {"trian": 5}}, (), "splits.trian: unknown key; did you mean train?"),
    ({"training.dataset.type": "multi_task"}, (), "training.dataset.tasks: missing or empty; type multi_task"),
    (
        {
            "training.dataset.type": "multi_task",
            "training.dataset.tasks": {"a": {"train": "a.jsonl", "weight": 0, "format": "jsonl"}},
        },
        (),
        "training.dataset.tasks: every weight is 0",
    ),
    ({"name": "../../etc/passwd"}, (), 'name: "../../etc/passwd" does not match'),
    ({"learning_rate": 1e-4}, (), "learning_rate: unknown key; did you mean training.config.learning_rate?"),
    ({"training.quantization": "int4"}, (), "quantization: unknown key; did you mean base_models.0.quantization?"),
    ({CONFIG + "bacth_size": 4}, (), "training.config.bacth_size: unknown key; did you mean batch_size?"),
    ({"xyzzy": 1}, (), "xyzzy: unknown key\n"),
    ({CONFIG + "learning_rate": 1.5}, (), "training.config.learning_rate: must be at most 1, not 1.5"),
    ({CONFIG + "dropout": 1.0}, (), "training.config.dropout: must be less than 1, not 1.0"),
    ({CONFIG + "batch_size": 10**6 + 1}, (), "training.config.batch_size: must be at most 1,000,000, not 1000001"),
    ({CONFIG + "batch_size": 10**400}, (), "training.config.batch_size: must be at most 1,000,000, not 1000"),
    ({CONFIG + "gradient_accumulation_steps": 10**7}, (), "gradient_accumulation_steps: must be at most 1,000,000"),
    ({CONFIG + "max_steps": 10**10}, (), "training.config.max_steps: must be at most 1,000,000,000"),
    ({CONFIG + "epochs": 1e308}, (), "training.config.epochs: must be at most 1,000,000, not 1e+308"),
    ({CONFIG + "dataloader_num_workers": 100_000}, (), "dataloader_num_workers: must be at most 1,024, not 100000"),
    ({CONFIG + "max_seq_length": 10**8}, (), "training.config.max_seq_length: must be at most 10,000,000"),
    ({"training.dataset.splits": {"train": 10**13}}, (), "splits.train: must be at most 1,000,000,000,000, not"),
    ({CONFIG + "method": "grpo"}, (), "training.config.method: must be 'sft', not \"grpo\""),
    ({CONFIG + "adapter_type": "x"}, (), "adapter_type: must be 'lora', 'dora', 'ia3' or 'full', not \"x\""),
    (
        {"base_models.0.prompt_template": "gemma"},
        (),
        "prompt_template: must be 'chatml', 'qwen3', 'llama3', 'alpaca' or 'tokenizer', not \"gemma\"",
    ),
    ({CONFIG + "feedforward_modules": ["down_proj"]}, (), "feedforward_modules: not applicable to adapter_type lora"),
    (
        {CONFIG + "adapter_type": "ia3", CONFIG + "target_modules": ["k_proj"], CONFIG + "feedforward_modules": ["x"]},
        (CONFIG + "rank", CONFIG + "alpha", CONFIG + "dropout"),
        "training.config.feedforward_modules: x must be in target_modules as well",
    ),
    (
        {CONFIG + "save_strategy": "steps", CONFIG + "evaluation_strategy": "epoch"},
        (),
        "load_best_model_at_end: requires a checkpoint at every evaluation, but save_strategy is steps and "
        "evaluation_strategy is epoch; make them equal",
    ),
    ({"description": "\ud800"}, (), "a string is not valid Unicode"),
]


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("per_device_train_batch_size", "batch_size"),
        ("lr", "learning_rate"),
        ("num_train_epochs", "epochs"),
        ("lora_r", "rank"),
        ("r", "rank"),
        ("lora_alpha", "alpha"),
        ("lora_dropout", "dropout"),
        ("max_length", "max_seq_length"),
        ("model_max_length", "max_seq_length"),
        ("cutoff_len", "max_seq_length"),
        ("lr_scheduler_type", "lr_scheduler"),
        ("eval_strategy", "evaluation_strategy"),
    ],
)
def test_names_of_other_trainers_get_a_suggestion(write_manifest: WriteManifest, foreign: str, ours: str) -> None:
    assert f"training.config.{foreign}: unknown key; did you mean {ours}?" in load_message(
        write_manifest({CONFIG + foreign: 1})
    )
    assert f"{foreign}: unknown key; did you mean training.config.{ours}?" in load_message(write_manifest({foreign: 1}))


def test_absent_save_strategy_follows_evaluation_strategy(write_manifest: WriteManifest) -> None:
    file = write_manifest({CONFIG + "evaluation_strategy": "steps"}, (CONFIG + "save_strategy",))
    assert load_manifest(file).manifest.training.config.load_best_model_at_end


def test_many_unknown_keys_are_reported_quickly(write_manifest: WriteManifest) -> None:
    file = write_manifest({CONFIG + f"unheard_of_{number}": 1 for number in range(20_000)})
    start = time.process_time()
    message = load_message(file)
    assert time.process_time() - start < 4
    assert "and 19,980 more unknown keys" in message
    assert message.count("\n") < 30


def test_open_object_with_many_keys_is_loaded_quickly(write_manifest: WriteManifest) -> None:
    file = write_manifest({"training.dataset.preprocessing": {f"note_number_{n}": 1 for n in range(20_000)}})
    start = time.process_time()
    load_manifest(file)
    assert time.process_time() - start < 8


def test_very_long_key_is_truncated(write_manifest: WriteManifest) -> None:
    start = time.process_time()
    message = load_message(write_manifest({CONFIG + "x" * 1_000_000: 1}))
    assert time.process_time() - start < 10
    assert len(message) < 500


def test_many_duplicate_keys_are_reported_quickly(tmp_path: Path) -> None:
    pairs = ", ".join(f'"k{number}": 1' for number in range(50_000))
    (tmp_path / "manifest.json").write_text(f"{{{pairs}, {pairs}}}")
    start = time.process_time()
    assert "and 49,980 more" in load_message(tmp_path / "manifest.json")
    assert time.process_time() - start < 20


@pytest.mark.parametrize(("changes", "drop", "expected"), WRONG_VALUES, ids=lambda case: str(case)[:40])
def test_wrong_value_is_refused(
    write_manifest: WriteManifest, changes: dict[str, Any], drop: tuple[str, ...], expected: str
) -> None:
    assert expected in load_message(write_manifest(changes, drop))


def test_all_problems_are_reported_at_once(write_manifest: WriteManifest) -> None:
    message = load_message(write_manifest({CONFIG + "rank": 0, CONFIG + "bacth_size": 4, "base_models.0.name": ""}))
    assert "3 problems" in message
    assert "training.config.rank: must be at least 1" in message
    assert "training.config.bacth_size: unknown key; did you mean batch_size?" in message
    assert "base_models[0].name: must not be empty" in message


def test_problems_of_schema_1_have_paths_of_schema_1(write_manifest: WriteManifest) -> None:
    path = write_manifest(
        {"schema_version": "1.0", "base_model": {"nmae": "x"}, "adapters": [{"type": "lora", "r": 0}]}, ("base_models",)
    )
    message = load_message(path)
    assert "base_model.nmae: unknown key; did you mean name?" in message
    assert "adapters[0].r: must be at least 1, not 0" in message
    assert "base_models" not in message


WriteBroken = Callable[[Path], object]

UNREADABLE: list[tuple[str, WriteBroken, str]] = [
    ("empty", lambda p: p.write_text("  \n"), "is empty"),
    ("a list", lambda p: p.write_text("[1]"), "expected a JSON object {...}, but this file contains a list"),
    ("broken", lambda p: p.write_text('{\n  "name": "x",\n  "b" 5\n}'), "line 3, column 7: broken JSON"),
    (
        "no comma",
        lambda p: p.write_text('{\n  "name": "x"\n\n  "b": 5\n}'),
        "a comma is probably missing at the end of line 2",
    ),
    (
        "trailing comma",
        lambda p: p.write_text('{\n  "name": "x",\n  "b": 5,\n}'),
        "remove the comma at the end of line 3",
    ),
    ("trailing comma in a list", lambda p: p.write_text('{\n"b": [5,\n]}'), "remove the comma at the end of line 2"),
    ("comment", lambda p: p.write_text('{\n  // name\n  "name": "x"}'), "JSON has no comments: use a key"),
    ("comment first", lambda p: p.write_text('# a\n{"name": "x"}'), "JSON has no comments: use a key"),
    ("comment after a value", lambda p: p.write_text('{"a": 1, /* b */ "b": 2}'), "JSON has no comments: use a key"),
    ("single quotes", lambda p: p.write_text("{'name': 'x'}"), "JSON needs double quotes"),
    ("cut off", lambda p: p.write_text('{"name": "x"'), "line 1, column 13: broken JSON"),
    (
        "duplicate",
        lambda p: p.write_text('{"a": 1,\n "b": {"c": 1,\n "c": 2}}'),
        "line 3: duplicate key 'c'",
    ),
    (
        "not UTF-8",
        lambda p: p.write_bytes(b'{\n"name": "\xff"}'),
        "line 2: not UTF-8 (byte 0xff at offset 11)",
    ),
    ("NaN", lambda p: p.write_text('{"a": NaN}'), "NaN is not JSON"),
    ("deep", lambda p: p.write_text('{"a": ' + "[" * 600 + "]" * 600 + "}"), "nested too deeply"),
    ("deep objects", lambda p: p.write_text('{"a": ' * 900 + "1" + "}" * 900), "nested too deeply"),
    ("too deep", lambda p: p.write_text("[" * 100_000), "nested too deeply"),
    ("too many digits", lambda p: p.write_text('{"a": 1' + "0" * 5000 + "}"), "a number is out of range"),
    ("100 MB", lambda p: p.write_bytes(b" " * 100_000_000), "has 95 MiB; the limit is 4 MiB"),
]


@pytest.mark.parametrize(("write", "expected"), [case[1:] for case in UNREADABLE], ids=[case[0] for case in UNREADABLE])
def test_unreadable_file_is_refused(tmp_path: Path, write: WriteBroken, expected: str) -> None:
    file = tmp_path / "manifest.json"
    write(file)
    assert expected in load_message(file)


def test_infinite_number_is_refused(tmp_path: Path, write_manifest: WriteManifest) -> None:
    text = write_manifest().read_text().replace('"learning_rate": 0.0002', '"learning_rate": 1e999')
    file = tmp_path / "infinite.json"
    file.write_text(text)
    assert "a number is out of range: 1e999" in load_message(file)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    assert "no such file" in load_message(tmp_path / "manifest.json")


def test_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory without a manifest.json" in load_message(tmp_path)
    (tmp_path / "manifest.json").touch()
    message = load_message(tmp_path)
    assert "is a directory\n" in message
    assert f"hint: pass the file: {tmp_path / 'manifest.json'}" in message


def test_base_model_and_base_models_exclude_each_other(write_manifest: WriteManifest) -> None:
    assert "both `base_model` (schema 1.0) and `base_models`" in load_message(
        write_manifest({"base_model": {"name": "x"}})
    )


def test_byte_order_mark_is_accepted(tmp_path: Path, write_manifest: WriteManifest) -> None:
    file = tmp_path / "bom.json"
    file.write_bytes(b"\xef\xbb\xbf" + write_manifest().read_bytes())
    assert load_manifest(file).manifest.expert == "neo4j"


def test_schema_1_with_base_models_is_refused(write_manifest: WriteManifest) -> None:
    message = load_message(write_manifest({"schema_version": "1.0"}))
    assert "schema_version 1.0, but `base_models` requires schema 2.0" in message


def test_inaccessible_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treating it as absent would select another expert of the same name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experts/neo4j").mkdir(parents=True)
    real = Path.stat

    def forbidden(path: Path, **how: bool) -> os.stat_result:
        if path.name == "manifest.json":
            raise PermissionError(13, "Permission denied")
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", forbidden)
    for name in ("neo4j", "./experts/neo4j"):
        with pytest.raises(ManifestError, match=r"experts/neo4j/manifest\.json: cannot be read: Permission denied"):
            find_manifest(name)


def test_unknown_expert_gets_a_suggestion() -> None:
    with pytest.raises(ManifestError, match=r"no expert called 'noe4j'; did you mean neo4j\?") as caught:
        find_manifest("noe4j")
    assert f"known experts: {', '.join(list_experts())}; " in str(caught.value)


def test_folder_with_the_same_name_does_not_hide_an_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = find_manifest("neo4j").resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neo4j").mkdir()
    assert find_manifest("neo4j").resolve() == known
    (tmp_path / "neo4j" / "manifest.json").write_text("{}")
    assert find_manifest("neo4j") == Path("neo4j/manifest.json")
    (tmp_path / "rows").mkdir()
    with pytest.raises(ManifestError, match="rows"):
        load_manifest(find_manifest("rows"))


def test_experts_of_the_working_directory_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tickets").mkdir()
    (tmp_path / "tickets/manifest.json").write_text("{}")
    assert list_experts()[0] == "tickets"
    with pytest.raises(ManifestError, match="no expert called 'ticket'; did you mean tickets") as caught:
        find_manifest("ticket")
    assert caught.value.hint.startswith(f"known experts: {', '.join(list_experts())}; ")
    assert "where `launcher new` was run" in caught.value.hint
