"""A request as the command that makes it: the inverse of launcher/arguments.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from launcher.inputs import Request


def format_command(request: Request) -> str:
    return shlex.join(["launcher", "train", request.expert, *_find_flags(request)])


def _find_flags(request: Request) -> Iterator[str]:
    """Only what was given: the rest is decided anew, and alike where the machine is."""
    for override in request.overrides:
        yield from ("--set", override)
    values: dict[str, object | None] = {
        "--base": request.base,
        "--max-steps": request.max_steps,
        "--tokens-per-row": request.tokens_per_row,
        "--profile": None if request.profile == "auto" else request.profile,
        "--gpu": request.gpu,
        "--vram-limit": None if request.vram_limit_mib is None else f"{request.vram_limit_mib}MiB",
        "--gpus": request.gpus_per_node,
        "--nodes": None if request.nodes == 1 else request.nodes,
        "--cores": request.cpu_cores_per_node,
        "--ram": request.ram_gib_per_node,
        "--strategy": request.strategy,
        "--price": request.price_per_gpu_hour,
        "--cpu-ranks": request.cpu_ranks_per_node,
        "--on-save-error": request.save_errors,
        "--max-bad-steps": request.max_bad_steps,
        "--hang-timeout": request.hang_seconds,
        "--profile-steps": None if request.profile_steps is None else ":".join(map(str, request.profile_steps)),
    }
    for flag, value in values.items():
        if value is not None:
            yield from (flag, str(value))
    if request.random_weights:
        yield "--random-weights"
    if not request.calibrated:
        yield "--no-calibration"
