"""Plan -> an sbatch script: one agent per node, a warning before the time limit, and a place in the queue after it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ExitCode
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.command import TRAIN_SCRIPT, format_words, join_lines, render_command
from launcher.render.rendezvous import Rendezvous, Verbatim

TIME_MARGIN = 1.5  # estimates err by tens of percent, and a job that is cut off costs a turn in the queue
START_UP_SECONDS = 30 * 60  # downloads, compilation, evaluation, checkpoints: not in the estimate
TIME_STEP_SECONDS = 10 * 60

HEAD_NODE = r"""# Node names need not resolve; the controller knows an address.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
head_address=$head_node
if ! getent hosts "$head_node" > /dev/null; then
  head_address=$(scontrol show node -o "$head_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
fi
port=$((20000 + SLURM_JOB_ID % 10000))  # one per job, so that two jobs can share a node
"""
# The agent must ignore the warning signal: it would die and leave its workers training. The workers hear it themselves.
AGENT = """'trap "" USR1; exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"'"""
# Since 22.05 srun no longer takes the number of cores from the job. On a node taken whole it is all of them: a site
# that binds tasks to cores would otherwise give the agent one.
SRUN = 'srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"'
# accelerate turns every exit code into 1, so the script asks outcome.json; and only one that this attempt has written,
# since an old one would requeue a broken job for ever.
STEP = r"""outcome={outcome}
before=$(cat "$outcome" 2> /dev/null || true)
status=0
# shellcheck disable=SC2016  # each node's own bash fills in its rank
{srun} || status=$?
after=$(cat "$outcome" 2> /dev/null || true)
preempted='"exit_code": *{preempted}[^0-9]'
if [[ $after != "$before" && $after =~ $preempted ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What a site decides, not a plan."""

    partition: str | None = None
    account: str | None = None
    time_limit_seconds: int | None = None  # None: from the plan's estimate
    warning_seconds: int = 120  # before the limit; Slurm may send it up to a minute early


def render_slurm(
    plan: Plan,
    paths: RunPaths,
    *,
    options: SlurmOptions | None = None,
    script: str = TRAIN_SCRIPT,
    script_args: Sequence[str] = (),
) -> str:
    options = options or SlurmOptions()
    head = Rendezvous(host=Verbatim('"$head_address"'), port=Verbatim('"$port"'))
    command = render_command(
        plan, paths, rendezvous=head, machine_rank=None, script=script, script_args=script_args, accelerate=()
    )
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(command.environment.items()))
    parts = (
        "#!/usr/bin/env bash\n" + make_directives(plan, paths, options),
        "set -euo pipefail\n",
        exports,
        HEAD_NODE,
        make_step(command.argv, paths),
    )
    return "\n".join(parts)


def make_directives(plan: Plan, paths: RunPaths, options: SlurmOptions) -> str:
    seconds = options.time_limit_seconds or estimate_time_limit(plan)
    values: dict[str, object] = {
        "account": options.account,
        "cpus-per-task": None if plan.hardware.is_host_assumed else plan.hardware.cpu_cores_per_node,
        "gpus-per-node": None if plan.hardware.gpu is None else plan.hardware.gpus_per_node,
        "job-name": re.sub(r"[^A-Za-z0-9._-]+", "-", plan.expert),
        "nodes": plan.hardware.nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",  # a requeued job writes on, it does not start its log again
        "output": f"{paths.logs}/slurm-%j.log",
        "partition": options.partition,
        "signal": f"USR1@{options.warning_seconds}",
        "time": None if seconds is None else format_time_limit(seconds),
    }
    # Nobody said how many cores the nodes have: take the nodes whole instead of asking for a number they may not have.
    whole = ["--exclusive"] if plan.hardware.is_host_assumed else []
    words = ["--requeue", *whole, *(f"--{name}={value}" for name, value in values.items() if value is not None)]
    return "".join(f"#SBATCH {shlex.quote(word)}\n" for word in sorted(words))


def estimate_time_limit(plan: Plan) -> int | None:
    """None where the plan has no estimate: then the partition's own limit holds."""
    if plan.speed.total_seconds is None:
        return None
    seconds = plan.speed.total_seconds * TIME_MARGIN + START_UP_SECONDS
    return math.ceil(seconds / TIME_STEP_SECONDS) * TIME_STEP_SECONDS


def format_time_limit(seconds: int) -> str:
    minutes = math.ceil(seconds / 60)
    days, minutes_of_day = divmod(minutes, 24 * 60)
    return f"{days}-{minutes_of_day // 60:02}:{minutes_of_day % 60:02}:00"


def make_step(argv: Sequence[str], paths: RunPaths) -> str:
    """srun, and a place in the queue when training says that it was preempted."""
    srun = join_lines([SRUN, f"bash -c {AGENT} agent", *format_words(argv)]).rstrip("\n")
    return STEP.format(outcome=shlex.quote(str(paths.outcome)), srun=srun, preempted=int(ExitCode.PREEMPTED))
