"""Text of every file that a launch needs, rendered from a plan; reads and writes no files and imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.accelerate import render_accelerate
from launcher.render.command import TRAIN_SCRIPT, Command, Rendezvous, Verbatim, format_command, render_command
from launcher.render.deepspeed import render_deepspeed
from launcher.render.job import JobOptions
from launcher.render.slurm import render_slurm
from launcher.render.spec import make_launch_spec

__all__ = [
    "TRAIN_SCRIPT",
    "Command",
    "JobOptions",
    "Rendezvous",
    "format_command",
    "render",
    "render_accelerate",
    "render_command",
    "render_deepspeed",
    "render_slurm",
]

# Several nodes without a known address: the user sets it, and bash complains if it is missing.
ASK_FOR_HEAD = Rendezvous(host=Verbatim('"${HEAD_ADDRESS:?set it to the address of node 0}"'), port=29500)
ASK_FOR_RANK = Verbatim('"${NODE_RANK:?set it to 0 on node 0, 1 on node 1, ...}"')


def render(
    plan: Plan,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    machine_rank: int | None = None,
    script: str = TRAIN_SCRIPT,
    script_args: Sequence[str] = (),
) -> dict[str, str]:
    """Return the files of the run directory by name. Paths in them are relative to the project root (see RunPaths)."""
    spec = make_launch_spec(plan)
    texts = {paths.accelerate.name: render_accelerate(spec, deepspeed_config_file=str(paths.deepspeed))}
    if spec.uses_deepspeed:
        texts[paths.deepspeed.name] = render_deepspeed(spec)
    if spec.num_nodes > 1:
        rendezvous = rendezvous or ASK_FOR_HEAD
        texts[paths.slurm.name] = render_slurm(plan, paths, script=script, script_args=script_args)
    rank = ASK_FOR_RANK if machine_rank is None and spec.num_nodes > 1 else machine_rank or 0
    command = render_command(
        plan, paths, rendezvous=rendezvous, machine_rank=rank, script=script, script_args=script_args
    )
    note = "# In the project root, on every node:\n" if spec.num_nodes > 1 else "# In the project root:\n"
    texts[paths.command.name] = note + format_command(command.argv, command.environment)
    return dict(sorted(texts.items()))
