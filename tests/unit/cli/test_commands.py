"""The commands as a user types them: real processes, exit codes, stdout and stderr."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from launcher import __version__
from launcher.__main__ import run
from launcher.cli.main import main, make_parser
from tests.conftest import ROOT, WriteManifest, expert_manifests, published_manifests, python_path
from tests.forked_python import run_python

pytestmark = pytest.mark.process


def launcher(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "140", "PYTHONPATH": python_path(), **(env or {})}
    return run_python(["-m", "launcher", *arguments], cwd=cwd, env=environment)


def run_ok(*arguments: str, **more: object) -> str:
    result = launcher(*arguments, **more)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_help_lists_every_verb() -> None:
    text = run_ok("--help")
    for verb in ("validate", "plan", "train", "schema"):
        assert f"\n    {verb} " in text
    assert "exit codes:" in text


def test_version_is_printed() -> None:
    assert run_ok("--version") == f"expert-launcher {__version__}\n"


def test_nothing_is_collected_at_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", ["launcher", "--version"])
    assert run() == 0
    assert frozen == [True]


def test_interrupted_import_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("launcher.cli.main.main", interrupt)
    assert run() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("expert", ["json", "neo4j", "sql", "typescript"])
def test_own_experts_are_valid(expert: str) -> None:
    assert run_ok("validate", expert).startswith(f"experts/{expert}/manifest.json: valid (expert {expert}, schema 2.0)")


@pytest.mark.parametrize("file", published_manifests(), ids=lambda file: file.name)
def test_published_manifests_are_valid(file: Path) -> None:
    result = json.loads(run_ok("validate", str(file), "--json"))
    assert result["valid"] is True
    unused = {item["key"]: item["reason"] for item in result["not_used"]}
    raw = json.loads(file.read_text())
    for key in ("use_unsloth", "memory_clear_every", "use_cuda_graphs", "memory_efficient_attention"):
        assert (f"training.config.{key}" in unused) == (key in raw["training"]["config"])
    assert all(unused.values())


def test_invalid_manifest_is_exit_code_2_without_a_traceback(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.bacth_size": 4, "training.config.rank": 0})
    for verb in (("validate",), ("plan", "--gpu", "rtx4090"), ("train", "--dry-run", "--gpu", "rtx4090")):
        result = launcher(verb[0], str(path), *verb[1:])
        assert result.returncode == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith(f"error: {path}: 2 problems\n")
        assert "  training.config.bacth_size: unknown key; did you mean batch_size?\n" in result.stderr
        assert result.stderr.endswith("hint: `launcher schema` prints the JSON Schema of a manifest\n")


def test_plan_that_does_not_fit_is_exit_code_3() -> None:
    result = launcher(
        "plan", "neo4j", "--gpu", "rtx4090", "--base", "Llama-3.1-70B", "--set", "training.config.offload=none"
    )
    assert result.returncode == 3
    assert "does not fit: it needs at least" in result.stderr
    assert "hint: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "noe4j"), "no expert called 'noe4j'; did you mean neo4j?"),
        (("plan", "neo4j", "--gpu", "rtx4900"), "rtx4090"),
        (("plan", "neo4j", "--gpus", "4"), "this machine has no GPU"),
        (("plan", "neo4j", "--gpu", "h100", "--gpus", "0"), "'0' is not an integer of at least 1"),
        (("plan", "neo4j", "--gpu", "h100", "--nodes", "two"), "'two' is not an integer of at least 1"),
        (("plan", "neo4j", "--price", "cheap"), "'cheap' is not a price per hour, such as 0.40 (per GPU), 1.90EUR"),
        (("plan", "neo4j", "--gpu", "h100", "--base", "Qwen3-1.5B"), "Qwen3-1.7B"),
        (("plan", "neo4j", "--set", "training.config.rank"), "not KEY=VALUE"),
        (("plan", "neo4j", "--ram", "nan"), "'nan' is not a positive number of GiB"),
        (("plan", "neo4j", "--ram", "inf"), "'inf' is not a positive number of GiB"),
        (("plan", "neo4j", "--ram", "0"), "'0' is not a positive number of GiB"),
        (("plan", "neo4j", "--ram=-5"), "'-5' is not a positive number of GiB"),
        (("plan", "neo4j", "--ram", "1e30"), "RAM per node in GiB: must be between 1 and 65536"),
        (("plan", "neo4j", "--cores", "99999999"), "CPU cores per node: must be between 1 and 4096"),
        (("plan", "neo4j", "--cores", "9" * 400), "is more than 1,000,000,000"),
        (("plan", "neo4j", "--gpu", "h100", "--price", "9" * 400), "is not a price per hour"),
        (("plan", "neo4j", "--tokens-per-row", "0"), "'0' is not an integer of at least 1"),
        (("plan", ""), "the name of the expert is empty"),
        (("plan", "x" * 5000), "no expert called 'xxx"),
        (("plan", "./" + "x" * 5000), "cannot be read: File name too long"),
        (("plan", "x" * 5000 + ".json"), "cannot be read: File name too long"),
        (
            ("plan", "neo4j", "--gpu", "h100", "--set", f"training.dataset.path={'x' * 300}.jsonl"),
            "cannot be read: File name too long",
        ),
        (("plan", "neo4j", "--set", "base_models.².name=x"), "base_models is a list"),
        (("validate", "/dev/zero"), "/dev/zero is not a file"),
        (("train", "neo4j", "--run-id", "../x"), "a run id has 1 to 100 letters"),
        (("sweep", "neo4j", "--param", "rank=8,16", "--dry-run", "--name", "../x"), "--name '../x': a run id has"),
        (("plan", "neo4j", "--report-to", "none,wandb"), "none excludes other trackers"),
        (("fly",), "launcher: no command 'fly'"),
        (("tran", "neo4j"), "no command 'tran'; did you mean train?"),
        ((), "usage: launcher [-h] [--version] COMMAND ...\n"),
        (("bench",), "ablation  measure every optimization"),
        (("--nope",), "launcher: unrecognized arguments: --nope"),
    ],
)
def test_invalid_arguments_are_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = launcher(*arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_plan_prints_settings_reasons_memory_speed_and_oom_fallbacks() -> None:
    text = run_ok("plan", "neo4j", "--gpu", "rtx4090", "--price", "0.40/h")
    assert text.startswith("neo4j on 1 x GeForce RTX 4090 (24.0 GiB)\n")
    for expected in (
        "decided by",
        "BF16",
        "variable-length FlashAttention",
        "adamw_torch_fused",
        "Predicted VRAM per rank",
    ):
        assert expected in text
    for term in ("weights", "adapter", "gradients", "optimizer", "activations", "context", "total"):
        assert f"\n{term} " in text
    assert "█" in text
    assert re.search(r"\nTime:  about \S+ \S+ for all steps, cost about .*\n .*, evaluation and checkpoints\)", text)
    assert "0.4 per GPU-hour" in text
    assert "OOM fallbacks, in order (global batch unchanged):\n  1. micro-batch" in text


def test_output_has_no_color_without_a_terminal() -> None:
    assert "\x1b[" not in run_ok("plan", "neo4j", "--gpu", "rtx4090", env={"NO_COLOR": ""})


def test_json_is_the_complete_plan_and_nothing_else() -> None:
    plan = json.loads(run_ok("plan", "neo4j", "--gpu", "h100", "--gpus", "8", "--nodes", "2", "--json"))
    assert plan["schema_version"] == 2
    assert plan["batch"]["num_ranks"] == 16
    assert plan["strategy"] == "ddp"


def test_overrides_and_steps_reach_the_plan() -> None:
    arguments = ("--gpu", "rtx4090", "--set", "training.config.learning_rate=1e-5", "--max-steps", "7", "--json")
    plan = json.loads(run_ok("plan", "json", *arguments))
    assert plan["optimizer"]["learning_rate"] == 1e-5
    assert plan["schedule"]["num_steps"] == 7


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        (("--gpu", "rtx4090", "--gpus", "4"), {"accelerate.yaml"}),
        (("--gpu", "rtx4090", "--strategy", "zero2"), {"accelerate.yaml", "deepspeed.json"}),
        (("--gpu", "h100", "--gpus", "8", "--nodes", "2"), {"accelerate.yaml", "slurm.sbatch"}),
        ((), {"accelerate.yaml"}),
    ],
)
def test_dry_run_writes_everything_and_starts_nothing(tmp_path: Path, flags: tuple[str, ...], files: set[str]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    text = run_ok("train", "neo4j", *flags, "--dry-run", "--runs-dir", str(tmp_path), "--run-id", "first", env=env)
    assert "Dry run: nothing was started." in text
    run = tmp_path / "first"
    always = {"manifest.json", "request.json", "hardware.json", "plan.json", "command.txt", "logs"}
    assert {file.name for file in run.iterdir()} == always | files
    plan = json.loads((run / "plan.json").read_text())
    accelerate = yaml.safe_load((run / "accelerate.yaml").read_text())
    assert accelerate["num_processes"] == plan["batch"]["num_ranks"]
    assert str(run / "plan.json") in (run / "command.txt").read_text()


def test_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    flags = ("train", "neo4j", "--gpu", "rtx4090", "--dry-run", "--runs-dir", str(tmp_path), "--run-id", "mine")
    run_ok(*flags)
    before = (tmp_path / "mine/plan.json").stat().st_mtime_ns
    result = launcher(*flags)
    assert result.returncode == 2
    assert "already exists" in result.stderr
    assert (tmp_path / "mine/plan.json").stat().st_mtime_ns == before


def test_dry_run_without_a_valid_plan_leaves_no_files(tmp_path: Path) -> None:
    flags = (
        "--base",
        "Llama-3.1-70B",
        "--set",
        "training.config.offload=none",
        "--dry-run",
        "--runs-dir",
        str(tmp_path / "runs"),
    )
    assert launcher("train", "neo4j", "--gpu", "rtx4090", *flags).returncode == 3
    assert not (tmp_path / "runs").exists()


def test_saved_manifest_is_the_effective_one(tmp_path: Path) -> None:
    run_ok(
        "train",
        "sql",
        "--gpu",
        "rtx4090",
        "--max-steps",
        "5",
        "--dry-run",
        "--runs-dir",
        str(tmp_path),
        "--run-id",
        "a",
    )
    saved = tmp_path / "a/manifest.json"
    assert json.loads(saved.read_text())["training"]["config"]["max_steps"] == 5
    assert run_ok("validate", str(saved)).startswith(f"{saved}: valid")


def test_schema_is_json() -> None:
    assert json.loads(run_ok("schema"))["title"] == "Expert manifest"


def test_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m launcher schema | head -n 1"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "{\n"
    assert result.stderr == ""


def test_experts_are_found_from_anywhere(tmp_path: Path) -> None:
    assert "valid (expert sql" in run_ok("validate", "sql", cwd=tmp_path)


def test_manifest_in_another_folder_is_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/manifest.json").write_bytes(expert_manifests()[0].read_bytes())
    assert "valid (expert json" in run_ok("validate", "mine/manifest.json", cwd=tmp_path)
    assert "valid (expert json" in run_ok("validate", "./mine", cwd=tmp_path)


# Counts function calls and imported packages instead of seconds: the same on a busy machine.
COUNT = """
import cProfile, json, pstats, sys
profile = cProfile.Profile()
profile.enable()
try:
    from launcher.cli.main import main
    main(sys.argv[1:])
except SystemExit:
    pass
profile.disable()
names = {name.split(".")[0] for name in sys.modules}
others = sorted(name for name in names - set(sys.stdlib_module_names) if not name.startswith(("_", "launcher")))
print(json.dumps({"calls": pstats.Stats(profile).total_calls, "others": others}))
"""


@pytest.mark.parametrize(
    ("others", "million_calls", "arguments"),
    [
        ([], 0.15, ("--help",)),
        (None, 2.5, ("plan", "neo4j", "--gpu", "rtx4090")),
        (None, 2.7, ("train", "sql", "--gpu", "h100", "--dry-run")),
    ],
)
def test_commands_start_quickly(
    tmp_path: Path, others: list[str] | None, million_calls: float, arguments: tuple[str, ...]
) -> None:
    more = ("--runs-dir", str(tmp_path)) if "train" in arguments else ()
    command = [sys.executable, "-c", COUNT, *arguments, *more]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    counts = json.loads(result.stdout.splitlines()[-1])
    assert not {"torch", "transformers", "accelerate", "deepspeed"} & set(counts["others"])
    if others is not None:
        assert set(counts["others"]) <= set(others)
    assert counts["calls"] <= 1e6 * million_calls, counts


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_unicode_digits_are_refused(name: str) -> None:
    assert "neo4j on" in run_ok("plan", "neo4j", "--gpu", "h100", env={name: "²"})


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_stdout_that_is_not_utf8_is_tolerated(encoding: str) -> None:
    text = run_ok("plan", "neo4j", "--gpu", "rtx4090", env={"PYTHONIOENCODING": encoding})
    assert "total " in text
    assert "###" in text


OUTPUTS = [("plan", "neo4j", "--gpu", "h100"), ("schema",), ("--help",), ("plan", "neo4j", "--gpu", "h100", "--json")]
# Short and long texts of rich and argparse; JSON is printed like the schema.
SOME_OUTPUTS = [*OUTPUTS[:3], pytest.param(OUTPUTS[3], marks=pytest.mark.slow)]


@pytest.mark.parametrize("arguments", SOME_OUTPUTS, ids=" ".join)
@pytest.mark.parametrize("target", [">/dev/full", ">&-"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unwritable_output_is_exit_code_2(arguments: tuple[str, ...], target: str, unbuffered: str) -> None:
    command = f"{sys.executable} -m launcher {' '.join(arguments)} {target}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: the output cannot be written: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", SOME_OUTPUTS, ids=" ".join)
def test_closed_reader_is_not_an_error(arguments: tuple[str, ...]) -> None:
    """The pipe is closed before the first byte: rich would exit with code 1."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "launcher", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_failure_is_json_with_json_flag(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.rank": 0})
    for verb, verdict in ((("validate",), {"valid": False}), (("plan", "--gpu", "h100"), {})):
        result = launcher(verb[0], str(path), *verb[1:], "--json")
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: {path}: 1 problem\n")
        assert json.loads(result.stdout) == {
            **verdict,
            "error": f"{path}: 1 problem",
            "problems": [{"where": "training.config.rank", "what": "must be at least 1, not 0"}],
            "hint": "`launcher schema` prints the JSON Schema of a manifest",
        }
    impossible = launcher("plan", "neo4j", "--gpu", "rtx4090", "--base", "Qwen3-1.5B", "--json")
    assert "Qwen3-1.5B" in json.loads(impossible.stdout)["error"]


def test_control_characters_never_reach_the_terminal(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.\x1b[31mred": 1, "training.config.optim": "\x9b31m\u202e\x7f"})
    result = launcher("validate", str(path))
    assert "training.config.\\x1b[31mred: unknown key" in result.stderr
    assert "\\x9b31m\\u202e\\x7f" in result.stderr
    assert result.stderr.replace("\n", "").isprintable()


def test_pipe_is_refused_as_a_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    result = launcher("validate", str(tmp_path / "manifest.json"))
    assert result.returncode == 2
    assert "is not a file" in result.stderr


def test_dry_runs_within_the_same_second_get_different_ids(tmp_path: Path) -> None:
    for _ in range(2):
        run_ok("train", "neo4j", "--gpu", "rtx4090", "--dry-run", "--runs-dir", str(tmp_path), "--json")
    assert len(list(tmp_path.iterdir())) == 2


def test_tokens_per_row_reach_the_plan() -> None:
    flags = ("plan", "sql", "--gpu", "rtx4090", "--json")
    plan = json.loads(run_ok(*flags, "--tokens-per-row", "123"))
    assert plan["data"]["mean_tokens"] == 123
    assert json.loads(run_ok(*flags))["data"]["mean_tokens"] != 123


@pytest.mark.parametrize(
    ("flags", "disk"),
    [
        ((), "Disk:  about 60 MiB of prepared data; checkpoints of up to 0.1 GiB"),
        (
            ("--tokens-per-row", "9000", "--set", "training.config.max_seq_length=300"),
            "Disk:  about 52 MiB of prepared data; checkpoints of up to 0.1 GiB",
        ),
        (("--set", "training.dataset.max_rows=100"), "Disk:  under 1 MiB of prepared data; checkpoints of up to "),
    ],
)
def test_plan_shows_disk_space(flags: tuple[str, ...], disk: str) -> None:
    result = launcher("plan", "neo4j", "--gpu", "rtx4090", *flags)
    assert disk in result.stdout
    assert ", the last 3 are kept\n" in result.stdout


def test_offloading_plan_shows_cpu_memory() -> None:
    flags = ("--gpu", "rtx4090", "--set", "training.config.offload=optimizer", "--strategy", "zero2")
    assert "\nCPU memory per rank: " in run_ok("plan", "neo4j", *flags)
    assert "CPU memory per rank" not in run_ok("plan", "neo4j", "--gpu", "rtx4090")


def test_closed_reader_does_not_change_the_exit_code() -> None:
    """Holds for stdout and stderr, and for a command that fails."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "launcher", "plan", "nosuch", "--json"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert result.returncode == 2


@pytest.mark.parametrize("price", ["-1", "x1", "1/m", "1,9", "$1EUR", "24/rack", "1 dollar", "1e3", "/node"])
def test_invalid_price_is_refused(price: str) -> None:
    assert "is not a price per hour" in launcher("plan", "neo4j", "--gpu", "h100", f"--price={price}").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "neo4j", "--gpu", "h100", "--base", ""), "the name of the base model is empty"),
        (("plan", "neo4j", "--gpu", "h100", "--max-restarts", "-1"), "'-1' is not an integer of at least 0"),
        (("data", "--prune", "--json"), "--json cannot prompt"),
        (("plan", "neo4j", "--gpus"), "expected one argument"),
    ],
)
def test_usage_error_is_one_line_with_a_hint(words: tuple[str, ...], message: str) -> None:
    result = launcher(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "hint: " in result.stderr
    assert result.stderr.count("\n") == 2


def test_file_system_errors_are_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("launcher.cli.schema.run", refuse)
    assert main(["schema"]) == 2
    assert capsys.readouterr().err == "error: /some/file: Permission denied\n"


def test_validate_counts_missing_files(write_manifest: WriteManifest, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"training.dataset.path": "nowhere.jsonl", "training.dataset.format": "jsonl"}
    path = write_manifest(files)
    assert main(["validate", str(path)]) == 0
    first, note, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: valid, but 1 data file missing (expert ")
    assert (
        note == f"note: training.dataset.path: {path.parent}/nowhere.jsonl does not exist, so its rows were not checked"
    )
    assert main(["validate", str(path), "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["missing_files"]
    assert missing == {"training.dataset.path": f"{path.parent}/nowhere.jsonl"}


@pytest.mark.parametrize("flags", [("--gpu", "h100"), ("--profile", "full")])
def test_plan_says_that_rows_are_missing(
    write_manifest: WriteManifest, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    path = write_manifest({"training.dataset.path": "moved.jsonl", "training.dataset.format": "jsonl"})
    assert main(["plan", str(path), *flags]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "note: training.dataset.path: " in output
    assert "moved.jsonl does not exist, so its rows were not checked" in output


def test_smoke_profile_without_rows_is_refused(write_manifest: WriteManifest, tmp_path: Path) -> None:
    path = write_manifest({"training.dataset.path": "nowhere.jsonl"})
    result = launcher("prepare", str(path), "--profile", "smoke", env={"LAUNCHER_DATA_DIR": str(tmp_path / "data")})
    assert result.returncode == 2
    assert "the smoke profile trains on the sample in the manifest's folder" in result.stderr
    assert "use --profile full for the manifest's dataset" in result.stderr


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--lr", "1e-4"], "--set training.config.learning_rate=1e-4"),
        (["--lr=1e-4"], "--set training.config.learning_rate=1e-4"),
        (["--model", "x"], "write --base NAME"),
        (["--full"], "write --set training.config.adapter_type=full"),
        (["--gpu_count=2"], "write --gpus N"),
        (["--batch-size", "4", "--epochs=2"], "--set training.config.batch_size=4 --set training.config.epochs=2"),
        (["--rank"], "--set training.config.rank=VALUE"),
        (["--adapter", "full"], "--set training.config.adapter_type=full"),
        (["--validation-path", "v.csv"], "--set training.dataset.validation_path=v.csv"),
        (["--blub"], "launcher plan --help lists its arguments"),
        (
            ["--lora-rank", "8", "--sequence_len=1024"],
            "training.config.rank=8 --set training.config.max_seq_length=1024",
        ),
        (["--bf16"], "write --set training.config.bf16=true"),
        (["--load_in_4bit"], "write --set base_models.0.quantization=int4"),
        (["--dataset", "rows.csv"], "write --set training.dataset.path=FILE"),
        (["--deepspeed", "z3.json"], "write --strategy NAME"),
        (["--finetuning_type", "full"], "write --set training.config.adapter_type=full"),
        (["--gpuu", "h100", "--lr=2"], "write --set training.config.learning_rate=2; did you mean --gpu?"),
    ],
)
def test_guessed_flags_are_answered_with_set(flags: list[str], hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "json", *flags]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: launcher plan: unrecognized arguments: --")
    assert error.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "json", "--resume_from_checkpoint", "a"], "write --resume RUN"),
        (["train", "json", "--output_dir", "a"], "write --runs-dir DIR"),
        (["train", "json", "lr=1e-4"], "write --set training.config.learning_rate=1e-4"),
        (["init", "a", "--data", "rows.csv"], "write launcher new EXPERT --data FILE"),
        (["fine_tune", "json", "--gpu", "h100"], "write launcher train EXPERT"),
        (["evaluate", "json"], "write launcher eval EXPERT --run RUN"),
        (["json", "train", "--max-steps", "3"], "write launcher train json --max-steps 3"),
        (["my folder", "plan"], "write launcher plan 'my folder'"),
        (["trian", "json"], "launcher --help lists its commands"),
        (["json", "--gpu", "h100"], "launcher --help lists its commands"),
    ],
)
def test_words_of_other_programs_are_answered_with_a_command(
    words: list[str], hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err
    assert error.endswith(f"hint: {hint}\n")
    assert ("no command" in error) == (words[0] not in {"train"})


@pytest.mark.parametrize("flag", ["--data", "--validation", "--test"])
def test_second_file_of_rows_is_refused(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "a", "--data", "a.csv", flag, "b.csv", flag, "c.csv"]) == 2
    assert f"argument {flag}: given twice; rows are read from one file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["ask", "r1", "--runs-dir", "my runs", "how many?"], {"run": "r1", "question": "how many?"}),
        (["ask", "--json", "r1", "--", "--how many?"], {"run": "r1", "question": "--how many?"}),
        (["compare", "a", "--runs-dir", "d", "b", "--format", "md", "c"], {"runs": ["a", "b", "c"], "format": "md"}),
        (["eval", "--json", "neo4j", "--rows", "4"], {"expert": "neo4j", "rows": 4}),
        (["train", "--set", "a=1", "neo4j", "--set", "b=2"], {"expert": "neo4j", "overrides": ["a=1", "b=2"]}),
    ],
)
def test_flags_may_stand_between_arguments(words: list[str], values: dict[str, object]) -> None:
    arguments, unknown = make_parser(words).parse_known_args(words)
    assert unknown == []
    assert {name: getattr(arguments, name) for name in values} == values


@pytest.mark.parametrize("words", [["report", "a", "--json", "b"], ["compare", "a", "--bogus", "b"]])
def test_arguments_too_many_are_unknown(words: list[str]) -> None:
    assert make_parser(words).parse_known_args(words)[1] == words[-1 if words[0] == "report" else 2 :]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "x", "--csv", "f"], "launcher new: unrecognized arguments: --csv\nhint: write --data FILE"),
        (["new", "x", "--dta=f"], "launcher new: unrecognized arguments: --dta=f\nhint: did you mean --data?"),
        (
            ["new", "x", "--forc"],
            "launcher new: the following arguments are required: --data\nhint: launcher new --help",
        ),
        (["--vrsion"], "launcher: unrecognized arguments: --vrsion\nhint: did you mean --version?"),
    ],
)
def test_unknown_flag_is_reported_before_a_missing_one(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capfd.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "json", "--slurm", "--no-submit"], "write --on slurm --dry-run"),
        (["train", "json", "--allow-drift"], "write --allow-changed-inputs"),
        (["train", "json", "--max-bad-steps", "3"], "write --max-nonfinite-steps"),
        (["eval", "json", "--max-drop=2%"], "write --max-regression"),
        (["new", "a", "--data", "rows.csv", "--into", "b"], "write --output-dir"),
        (["bench", "ladder", "json"], "write launcher bench ablation"),
        (["bench", "memory"], "write python -m benchmarks.memory_grid, in a checkout"),
    ],
)
def test_names_of_the_first_version_are_answered_with_the_new_ones(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"\nhint: {hint}\n")


def test_compare_says_why_no_run_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/plan.json").write_text('{"launcher_version": "0.1.0", "schema_version": 1}')
    assert main(["compare", "--all", "--runs-dir", str(tmp_path)]) == 2
    assert f"{tmp_path}/old/plan.json was written by launcher 0.1.0" in capsys.readouterr().err
    (tmp_path / "old/plan.json").write_text('{"launcher_version": "0.1\\nhint: run this", "schema_version": 1}')
    assert main(["report", "old", "--runs-dir", str(tmp_path)]) == 2
    assert "\nhint: run this" not in capsys.readouterr().err


def test_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["report", "a"]) == 2
    assert capsys.readouterr().err == "error: the working directory was deleted: change to another one\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "json", "--param", "rank=4,8", "--dry-run", "--json"], "--dry-run and --json cannot be used togeth"),
        (
            ["bench", "json", "--vary", "batch_size=1,2", "--out", "/dev/null"],
            "--out /dev/null: /dev/null is not a folder",
        ),
        (["bench", "ablation", "json", "--out", "/dev/null/logs"], "--out /dev/null/logs: /dev/null is not a folder"),
        (["doctor", "--free", "--json"], "--free and --json cannot be used together"),
        (["doctor", "--yes"], "--yes requires --free"),
        (["doctor", "--free", "json"], "--free runs no checks: omit the expert"),
        (["doctor", "--profile", "full"], "--profile requires an expert"),
        (["doctor", "--set", "training.config.rank=4"], "--set requires an expert"),
        (["export", "a", "--format", "gguf", "--check-rows=-1"], "argument --check-rows: '-1' is not an integer of at"),
    ],
)
def test_flags_without_a_meaning_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
