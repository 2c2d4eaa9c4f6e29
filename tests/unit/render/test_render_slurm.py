"""The sbatch script, read by bash and run against stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render import JobOptions, render_slurm

pytestmark = pytest.mark.process

MakePlan = Callable[..., Plan]
AWKWARD = 'runs/it\'s a $HOME `date` "run"'


@pytest.fixture
def script(make_plan: MakePlan, paths: RunPaths) -> str:
    return render_slurm(make_plan(strategy="fsdp2", gpus=8, nodes=2, cores=96), paths)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("paths", [RunPaths(Path("runs/neo4j-0001")), RunPaths(Path(AWKWARD))])
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_bash_parses_the_script(paths: RunPaths, nodes: int, make_plan: MakePlan) -> None:
    text = render_slurm(make_plan(strategy="zero3", gpus=8, nodes=nodes), paths)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(script: str) -> None:
    answer = subprocess.run(["shellcheck", "-"], input=script, text=True, capture_output=True, check=False)
    assert answer.stdout == ""


def test_directives_ask_for_what_the_plan_needs(script: str) -> None:
    assert directives(script) == [
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--job-name=neo4j",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--open-mode=append",
        "--output=runs/neo4j-0001/logs/slurm-%j.log",
        "--requeue",
        "--signal=USR1@120",
        "--time=0-02:50:00",  # 1.5 h estimated, half as much again, half an hour to start, in steps of ten minutes
    ]


def test_directives_come_before_the_first_command(script: str) -> None:
    """Slurm stops looking for them there."""
    lines = script.splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_site_options_are_rendered(make_plan: MakePlan, paths: RunPaths) -> None:
    options = JobOptions(partition="gpu", account="lab 7", time_limit_seconds=90_000, warning_seconds=300)
    plan = make_plan(strategy="ddp", gpus=8, nodes=2)
    found = directives(render_slurm(plan, paths, options=options))
    assert {"--partition=gpu", "'--account=lab 7'", "--time=1-01:00:00", "--signal=USR1@300"} <= set(found)


def test_without_an_estimate_the_partition_decides_and_a_cpu_plan_asks_for_no_gpu(
    make_plan: MakePlan, paths: RunPaths
) -> None:
    plan = make_plan(strategy="ddp", gpus=2, nodes=2, interconnect=None, total_seconds=None)
    found = directives(render_slurm(plan, paths))
    assert not [word for word in found if word.startswith(("--time", "--gpus"))]


def test_a_job_name_cannot_smuggle_a_directive(make_plan: MakePlan, paths: RunPaths) -> None:
    plan = make_plan(strategy="ddp", gpus=2, nodes=2, expert="a b\n#SBATCH --uid=0")
    assert "--job-name=a-b-SBATCH---uid-0" in directives(render_slurm(plan, paths))


STUBS = {
    "scontrol": """if [ "$2" = hostnames ]; then printf 'n1\\nn2\\n'
elif [ "$2" = node ]; then echo "NodeName=$4 Arch=x NodeAddr=10.9.8.7 NodeHostName=h"
else echo "$@" >> "$FOLDER/requeued"; fi""",
    "getent": 'exit "${GETENT_STATUS:-0}"',
    # srun's own options end where the command begins; it tells each task its node
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "accelerate": """printf '%s\\0' "$@" > "$FOLDER/words"
kill -USR1 $$
echo survived > "$FOLDER/survived"
if [ -n "${OUTCOME:-}" ]; then mkdir -p runs/neo4j-0001; echo "$OUTCOME" > runs/neo4j-0001/outcome.json; fi
exit "${STATUS:-0}\"""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    folder: Path

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "4"}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "FOLDER": str(self.folder)} | slurm | variables
        return subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    @property
    def words(self) -> list[str]:
        return (self.folder / "words").read_text().split("\0")[:-1]

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    return Job(folder=tmp_path)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_agent_of_a_node_gets_its_rank_and_the_head_node(script: str, job: Job) -> None:
    answer = job.run(script)
    assert answer.returncode == 0, answer.stderr
    assert job.words[0] == "launch"
    assert value_of(job.words, "--machine_rank") == "1"
    assert value_of(job.words, "--main_process_ip") == "n1"
    assert value_of(job.words, "--main_process_port") == "23456"
    assert value_of(job.words, "--config_file") == "runs/neo4j-0001/accelerate.yaml"
    assert job.words[-3:] == ["launcher/train.py", "--plan", "runs/neo4j-0001/plan.json"]


def test_a_head_node_without_a_name_is_found_by_its_address(script: str, job: Job) -> None:
    assert job.run(script, GETENT_STATUS="2").returncode == 0
    assert value_of(job.words, "--main_process_ip") == "10.9.8.7"


def test_the_agent_survives_the_warning_signal(script: str, job: Job) -> None:
    job.run(script)
    assert (job.folder / "survived").exists()


def test_an_awkward_run_directory_arrives_unchanged(make_plan: MakePlan, job: Job) -> None:
    text = render_slurm(make_plan(strategy="zero2", gpus=8, nodes=2), RunPaths(Path(AWKWARD)))
    answer = job.run(text)
    assert answer.returncode == 0, answer.stderr
    assert value_of(job.words, "--config_file") == f"{AWKWARD}/accelerate.yaml"


def test_a_failure_is_the_jobs_failure_and_is_not_requeued(script: str, job: Job) -> None:
    assert job.run(script, STATUS="1", OUTCOME='{"exit_code": 4}').returncode == 1
    assert not job.requeued


def test_a_preempted_job_is_requeued(script: str, job: Job) -> None:
    assert job.run(script, STATUS="1", OUTCOME='{"exit_code": 75, "status": "preempted"}').returncode == 1
    assert (job.folder / "requeued").read_text() == "requeue 123456\n"


def test_an_old_outcome_requeues_nothing(script: str, job: Job) -> None:
    (job.folder / "runs" / "neo4j-0001").mkdir(parents=True)
    (job.folder / "runs" / "neo4j-0001" / "outcome.json").write_text('{"exit_code": 75, "status": "preempted"}\n')
    assert job.run(script, STATUS="1").returncode == 1
    assert not job.requeued


def test_unknown_cores_are_not_requested(make_plan: MakePlan, paths: RunPaths) -> None:
    """A node with fewer would refuse the job: the nodes are taken whole instead."""
    counted = make_plan(strategy="ddp", gpus=8, nodes=2, cores=96)
    assumed = counted.model_copy(update={"hardware": counted.hardware.model_copy(update={"is_host_assumed": True})})
    assert "--cpus-per-task=96" in directives(render_slurm(counted, paths))
    assert "--exclusive" not in directives(render_slurm(counted, paths))
    found = directives(render_slurm(assumed, paths))
    assert "--exclusive" in found
    assert not any("cpus-per-task" in word for word in found)
