"""The argv and environment that are started, and their text: bash reads it back as the very same words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render import Rendezvous, format_command, render, render_command

MakePlan = Callable[..., Plan]
HEAD = Rendezvous(host="10.0.0.1", port=29511)
MULTI_RANK = {
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
}
NO_P2P = {"NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"}
ALWAYS = {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"}


def environment_of(plan: Plan, rendezvous: Rendezvous | None = None) -> dict[str, str]:
    return dict(render_command(plan, RunPaths(Path("runs/r")), rendezvous=rendezvous).environment)


def test_one_process_needs_no_agent_flags(make_plan: MakePlan) -> None:
    argv = render_command(make_plan(), RunPaths(Path("runs/r"))).argv
    assert argv == (
        *("accelerate", "launch", "--config_file", "runs/r/accelerate.yaml"),
        *("launcher/train.py", "--plan", "runs/r/plan.json"),
    )


def test_many_ranks_take_a_free_port_and_keep_logs(make_plan: MakePlan) -> None:
    argv = render_command(make_plan(strategy="ddp", gpus=2), RunPaths(Path("runs/r"))).argv
    assert argv[4:10] == ("--main_process_port", "0", "--tee", "3", "--log_dir", "runs/r/logs")


def test_caller_chooses_port_program_script_and_its_arguments(make_plan: MakePlan) -> None:
    argv = render_command(
        make_plan(strategy="zero1", gpus=2),
        RunPaths(Path("runs/r")),
        rendezvous=Rendezvous(host="localhost", port=4242, max_restarts=2),
        script="probe.py",
        script_args=("--resume", "latest"),
        accelerate=("python", "-m", "accelerate.commands.launch"),
    ).argv
    assert argv[:3] == ("python", "-m", "accelerate.commands.launch")
    assert argv[argv.index("--main_process_port") + 1] == "4242"
    assert argv[argv.index("--max_restarts") + 1] == "2"
    assert argv[-5:] == ("probe.py", "--plan", "runs/r/plan.json", "--resume", "latest")
    assert "--main_process_ip" not in argv
    assert "--machine_rank" not in argv


def test_the_environment_holds_only_what_the_plan_needs(make_plan: MakePlan) -> None:
    gpu = ALWAYS | {"PYTORCH_ALLOC_CONF"}
    assert set(environment_of(make_plan())) == gpu
    assert set(environment_of(make_plan(interconnect="pcie-host"))) == gpu
    assert set(environment_of(make_plan(strategy="fsdp2", gpus=8))) == gpu | MULTI_RANK
    assert set(environment_of(make_plan(strategy="ddp", gpus=2, interconnect="pcie-host"))) == gpu | MULTI_RANK | NO_P2P
    assert set(environment_of(make_plan(interconnect=None, gpus=0))) == ALWAYS | {"ACCELERATE_USE_CPU"}
    elastic = Rendezvous(host="a", port=1, backend="c10d")
    assert set(environment_of(make_plan(strategy="ddp", gpus=8, nodes=2), elastic)) == gpu | MULTI_RANK | {
        "PET_RDZV_ID",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    }


def test_nothing_of_the_process_leaks_into_the_environment(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment_of(make_plan())
    for name in ("WANDB_API_KEY", "HF_TOKEN", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "secret")
    assert environment_of(make_plan()) == before


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero2", "zero3"])
def test_cpu_ranks_keep_their_engine(strategy: str, make_plan: MakePlan) -> None:
    environment = environment_of(make_plan(strategy=strategy, interconnect=None, gpus=2))
    assert "ACCELERATE_USE_CPU" not in environment  # it would train DDP instead, in silence
    assert environment["ACCELERATE_TORCH_DEVICE"] == "cpu"
    assert (environment.get("DS_ACCELERATOR") == "cpu") == strategy.startswith("zero")  # else DeepSpeed warns


@pytest.mark.parametrize(
    ("cores", "gpus", "workers", "threads"), [(96, 8, 4, "8"), (16, 1, 4, "12"), (4, 4, 2, "1"), (2, 0, 0, "2")]
)
def test_threads_are_what_the_loader_leaves(
    cores: int, gpus: int, workers: int, threads: str, make_plan: MakePlan
) -> None:
    strategy = "ddp" if gpus > 1 else "single"
    plan = make_plan(strategy=strategy, gpus=gpus, cores=cores, workers=workers)
    assert environment_of(plan)["OMP_NUM_THREADS"] == threads


WRONG_RENDEZVOUS = {
    "no address": (None, 0, "2 nodes need the address where node 0 listens"),
    "port 0": (Rendezvous(host="a", port=0), 0, "several nodes need a fixed port"),
    "rank 2 of 2": (HEAD, 2, "node rank: 2 is not one of 0 to 1"),
    "static restarts": (Rendezvous(host="a", port=1, max_restarts=1), 0, "max_restarts: nodes do not restart together"),
}


@pytest.mark.parametrize("name", sorted(WRONG_RENDEZVOUS))
def test_a_rendezvous_that_cannot_work_is_refused(name: str, make_plan: MakePlan) -> None:
    rendezvous, rank, message = WRONG_RENDEZVOUS[name]
    plan = make_plan(strategy="ddp", gpus=2, nodes=2)
    with pytest.raises(InputError) as error:
        render_command(plan, RunPaths(Path("runs/r")), rendezvous=rendezvous, machine_rank=rank)
    assert message in str(error.value)


def test_c10d_on_one_node_is_refused(make_plan: MakePlan) -> None:
    elastic = Rendezvous(host="a", port=1, backend="c10d")
    with pytest.raises(InputError, match="the c10d backend is for several nodes; use static") as error:
        render_command(make_plan(strategy="ddp", gpus=2), RunPaths(Path("runs/r")), rendezvous=elastic)
    assert "the c10d backend is for several nodes; use static" in str(error.value)


def run_with_stub(text: str, folder: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What a program called accelerate really receives from the text: its words and its environment."""
    (folder / "bin").mkdir()
    stub = folder / "bin" / "accelerate"
    stub.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{folder}/words'\nenv -0 > '{folder}/environment'\n")
    stub.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-c", text], env={"PATH": path} | variables, check=True, capture_output=True, text=True)
    words = (folder / "words").read_text().split("\0")[:-1]
    environment = dict(pair.split("=", 1) for pair in (folder / "environment").read_text().split("\0")[:-1])
    return words, environment


@pytest.mark.process
@pytest.mark.parametrize(
    "paths", [RunPaths(Path("runs/neo4j-0001")), RunPaths(Path('runs/it\'s a $HOME `date` "run"'))]
)
def test_command_text_starts_the_very_same_command(plan: Plan, paths: RunPaths, tmp_path: Path) -> None:
    nodes = plan.hardware.nodes
    rendezvous = HEAD if nodes > 1 else None
    command = render_command(plan, paths, rendezvous=rendezvous, machine_rank=nodes - 1)
    text = render(plan, paths, rendezvous=rendezvous, machine_rank=nodes - 1)["command.txt"]
    words, environment = run_with_stub(text, tmp_path)
    assert tuple(words) == command.argv[1:]
    assert command.environment.items() <= environment.items()


@pytest.mark.process
def test_command_of_several_nodes_asks_for_the_address(make_plan: MakePlan, paths: RunPaths, tmp_path: Path) -> None:
    text = render(make_plan(strategy="fsdp2", gpus=8, nodes=2), paths)["command.txt"]
    silent = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert silent.returncode != 0
    assert "set it to the address of node 0" in silent.stderr
    words, _ = run_with_stub(text, tmp_path, HEAD_ADDRESS="10.1.2.3", NODE_RANK="1")
    assert words[words.index("--main_process_ip") + 1] == "10.1.2.3"
    assert words[words.index("--machine_rank") + 1] == "1"


@pytest.mark.process
@given(
    words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), max_size=5)
)
@settings(max_examples=60, deadline=None)
def test_any_words_survive_the_shell(words: list[str]) -> None:
    text = format_command(["printf", "%s\\0", *words, "end"], {"ANY": words[0] if words else ""})
    answer = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert answer.stdout.decode().split("\0") == [*words, "end", ""]
