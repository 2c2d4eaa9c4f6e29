"""The sbatch script: one agent per node, a signal before the time limit, and a requeue after it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.command import TRAIN_SCRIPT, Rendezvous, Verbatim, format_words, join_lines, render_command
from launcher.render.job import JobOptions, decide_time_limit

HEAD_NODE = r"""# Node names need not resolve; the controller knows an address.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
head_address=$head_node
if ! getent hosts "$head_node" > /dev/null; then
  head_address=$(scontrol show node -o "$head_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
fi
port=$((20000 + SLURM_JOB_ID % 10000))  # one per job, so that two jobs can share a node
"""
# The agent must ignore the warning signal: it would die and orphan its workers, which handle the signal themselves.
AGENT = """'trap "" USR1; exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"'"""
# Since 22.05 srun no longer inherits the number of cores from the job. On an exclusive node it is all of them: a site
# that binds tasks to cores would otherwise give the agent one.
SRUN = 'srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"'
# accelerate exits with 1 for every failure, so the script reads outcome.json, but only one written by this attempt: an
# old one would requeue a broken job forever.
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


def render_slurm(
    plan: Plan,
    paths: RunPaths,
    *,
    options: JobOptions | None = None,
    script: str = TRAIN_SCRIPT,
    script_args: Sequence[str] = (),
) -> str:
    """Return the sbatch script of a plan."""
    options = options or JobOptions()
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


def make_directives(plan: Plan, paths: RunPaths, options: JobOptions) -> str:
    """Return the #SBATCH lines."""
    seconds = decide_time_limit(plan, options)
    values: dict[str, object] = {
        "account": options.account,
        "cpus-per-task": None if plan.hardware.is_host_assumed else plan.hardware.cpu_cores_per_node,
        "gpus-per-node": None if plan.hardware.gpu is None else plan.hardware.gpus_per_node,
        "job-name": re.sub(r"[^A-Za-z0-9._-]+", "-", plan.expert),
        "nodes": plan.hardware.nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",  # a requeued job appends to its log
        "output": f"{paths.logs}/slurm-%j.log",
        "partition": options.partition,
        "signal": f"USR1@{options.warning_seconds}",
        "time": None if seconds is None else format_time_limit(seconds),
    }
    # The number of cores is unknown: request exclusive nodes instead of a number that they may not have.
    whole = ["--exclusive"] if plan.hardware.is_host_assumed else []
    words = ["--requeue", *whole, *(f"--{name}={value}" for name, value in values.items() if value is not None)]
    return "".join(f"#SBATCH {shlex.quote(word)}\n" for word in sorted(words))


def format_time_limit(seconds: int) -> str:
    """Format seconds as Slurm's days-hours:minutes:seconds."""
    minutes = math.ceil(seconds / 60)
    days, minutes_of_day = divmod(minutes, 24 * 60)
    return f"{days}-{minutes_of_day // 60:02}:{minutes_of_day % 60:02}:00"


def make_step(argv: Sequence[str], paths: RunPaths) -> str:
    """Return the srun step, with a requeue if the training was preempted."""
    srun = join_lines([SRUN, f"bash -c {AGENT} agent", *format_words(argv)]).rstrip("\n")
    return STEP.format(outcome=shlex.quote(str(paths.outcome)), srun=srun, preempted=int(ExitCode.PREEMPTED))
