"""Flags that several verbs share, in groups, and the Request that they make."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.core.run_paths import expand_home
from launcher.request import flag_types as types

if TYPE_CHECKING:
    from launcher.request.request import Request

_WANDB_NAMES = ("mode", "project", "entity", "group", "name", "notes", "tags", "artifacts")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add --trust."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="execute code that the manifest or run directory names: judge_command, judge classes, trust_remote_code",
    )


def add_request_arguments(
    parser: argparse.ArgumentParser, default_expert: str | None = None, default_shown: str = ""
) -> None:
    """Add EXPERT and every flag that planning a run uses; its help shows `default_shown` as the default of EXPERT."""
    shown = "an expert by name (neo4j), or the path of a manifest.json"
    default_shown = default_shown or default_expert or ""
    if not default_shown:
        parser.add_argument("expert", type=expand_home, metavar="EXPERT", help=shown)
    else:
        shown += f" (default: {default_shown})"
        parser.add_argument("expert", type=expand_home, metavar="EXPERT", nargs="?", default=default_expert, help=shown)
    add_learning_arguments(parser)
    add_hardware_arguments(parser)
    add_tracker_arguments(parser)
    add_failure_arguments(parser)
    add_profiler_arguments(parser)


def add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for what is trained."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    group.add_argument("--max-steps", type=types.positive_int, metavar="N", help="stop after N optimizer steps")
    group.add_argument(
        "--base",
        type=types.base_model,
        metavar="NAME",
        help="another base model: one of the manifest's, a folder, or a name on the Hugging Face hub",
    )
    group.add_argument(
        "--tokens-per-row", type=types.positive_int, metavar="N", help="mean tokens per row, if you know it"
    )
    group.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32", "fp8"),
        help="fp8: linear layers in FP8: frozen ones, or all in full fine-tuning (RTX 40 and 50 series, H100, H200)",
    )
    group.add_argument(
        "--random-weights",
        action="store_true",
        help="use the base model's architecture with random weights, to measure speed and memory without a download",
    )


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the hardware that is planned for."""
    group = parser.add_argument_group("hardware (default: this machine)")
    group.add_argument("--gpu", metavar="NAME", help="plan for this GPU of the catalogue: rtx4090, h100, ...")
    group.add_argument(
        "--vram-limit",
        type=types.vram_mib,
        metavar="SIZE",
        help="plan for, and use, at most this much memory per GPU, in GiB or with a unit: 24GiB simulates an RTX 4090 "
        "on a larger GPU",
    )
    group.add_argument("--gpus", type=types.positive_int, metavar="N", help="GPUs per node")
    group.add_argument("--nodes", type=types.positive_int, default=1, metavar="N", help="nodes (default 1)")
    group.add_argument("--cores", type=types.positive_int, metavar="N", help="CPU cores per node")
    group.add_argument("--ram", type=types.gib, metavar="GIB", help="CPU memory per node")
    group.add_argument(
        "--strategy", choices=("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"), help="override the plan's strategy"
    )
    group.add_argument(
        "--price",
        type=types.price_per_hour,
        metavar="PRICE",
        help="price per hour of one GPU, or of a node: 0.40, 1.90EUR, 24/node, '$24/node'",
    )
    group.add_argument(
        "--no-calibration",
        action="store_true",
        help="use the estimates only, not what finished runs on this machine have measured",
    )
    # For tests and rehearsals: this many processes per node, without a GPU.
    group.add_argument("--cpu-ranks", type=types.positive_int, help=argparse.SUPPRESS)


def add_tracker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags that are short for `--set training.config.report_to=…` and `--set training.config.wandb.…`."""
    group = parser.add_argument_group("trackers (default: the manifest's settings)")
    group.add_argument(
        "--report-to",
        type=types.tracker_list,
        metavar="wandb,tensorboard,mlflow",
        help="log metrics to these and no others; none logs to no tracker",
    )
    group.add_argument(
        "--wandb",
        choices=("online", "offline", "disabled"),
        dest="wandb_mode",
        help="default: online with an API key; without one, offline if another W&B setting is given, else disabled. "
        "WANDB_MODE overrides every value except disabled",
    )
    group.add_argument("--wandb-project", metavar="NAME", help="default: expert-launcher")
    group.add_argument("--wandb-entity", metavar="NAME", help="a team or a user (default: yours)")
    group.add_argument("--wandb-group", metavar="NAME", help="default: the expert")
    group.add_argument("--wandb-name", metavar="NAME", help="default: the run's id")
    group.add_argument("--wandb-notes", metavar="TEXT", help="notes shown with the run")
    group.add_argument("--wandb-tags", type=types.word_list, metavar="A,B", help="tags to filter by")
    group.add_argument(
        "--wandb-artifacts",
        type=types.artifact_list,
        metavar="adapter,manifest",
        help="upload these when the run is done",
    )


def add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for what happens when something goes wrong."""
    group = parser.add_argument_group("failures")
    group.add_argument(
        "--on-save-error",
        choices=("stop", "continue"),
        dest="save_errors",
        help="what to do if a checkpoint cannot be written (default: stop)",
    )
    group.add_argument(
        "--max-nonfinite-steps",
        type=types.non_negative_int,
        metavar="N",
        help="abort after more than N consecutive steps with NaN/Inf loss or gradients (default 3)",
    )
    group.add_argument(
        "--max-restarts",
        type=types.non_negative_int,
        metavar="N",
        help="restart a crashed training from its last checkpoint up to N times; several nodes need c10d (default 0)",
    )
    group.add_argument(
        "--hang-timeout",
        type=types.positive_int,
        metavar="SECONDS",
        dest="hang_seconds",
        help="abort a training that completes no step for this long (default 600)",
    )


def add_profiler_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags of the PyTorch profiler."""
    group = parser.add_argument_group("profiler")
    group.add_argument(
        "--profile-steps",
        type=types.step_range,
        metavar="A:B",
        help="profile steps A to B: a trace, a summary and a memory snapshot in runs/<id>/profile/",
    )


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for resuming a run."""
    group = parser.add_argument_group("resume")
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        type=expand_home,
        metavar="RUN",
        help="resume a run from its newest intact checkpoint (default: this expert's last unfinished run)",
    )
    group.add_argument(
        "--allow-changed-inputs",
        action="store_true",
        help="resume even if manifest, data or base model changed",
    )
    group.add_argument(
        "--verify",
        type=types.positive_int,
        nargs="?",
        const=3,
        default=0,
        metavar="K",
        help="train the last K recorded steps again and compare packs and losses with the record (default 3)",
    )


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags to start one node of a multi-node run."""
    group = parser.add_argument_group("multi-node (start it on every node)")
    group.add_argument("--node-rank", type=types.non_negative_int, metavar="R", help="rank of this node, from 0")
    group.add_argument("--rendezvous", type=types.address, metavar="HOST:PORT", help="where node 0 listens")
    group.add_argument(
        "--rdzv-backend", choices=("static", "c10d"), help="c10d: nodes can restart (default static: they cannot)"
    )
    group.add_argument(
        "--join-timeout",
        type=types.positive_int,
        metavar="SECONDS",
        help="how long nodes wait for each other (default 300)",
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags to run as a job of Slurm or another launch target."""
    from launcher.render.job import TARGETS, WORKLOADS

    group = parser.add_argument_group("launch target (default: this machine)")
    group.add_argument("--on", choices=TARGETS, help="write the job file and submit it; --dry-run only writes it")
    group.add_argument(
        "--time-limit",
        type=types.time_limit,
        metavar="HH:MM:SS",
        help="time limit of the job, also D-HH:MM:SS (default: derived from the plan's estimate)",
    )
    group.add_argument("--partition", type=types.slurm_name, metavar="NAME", help="Slurm (default: the cluster's)")
    group.add_argument("--account", type=types.slurm_name, metavar="NAME", help="Slurm (default: yours)")
    group.add_argument("--image", type=types.image, metavar="NAME:TAG", help="container image; not for Slurm")
    group.add_argument(
        "--volume",
        type=types.volume,
        metavar="NAME",
        help="where runs, prepared data and downloads are kept: a persistent volume, a bucket (SkyPilot: s3://...) "
        "or a path on the nodes (dstack); not for Slurm",
    )
    group.add_argument(
        "--secrets",
        type=types.variable_names,
        metavar="NAMES",
        help="names of variables in the platform's secret store: HF_TOKEN,WANDB_API_KEY; not for Slurm",
    )
    group.add_argument("--on-demand", action="store_true", help="SkyPilot and dstack: no spot instances")
    group.add_argument("--workload", choices=WORKLOADS, help="Kubernetes job (default: trainjob of Kubeflow Trainer)")


def make_request(arguments: argparse.Namespace) -> Request:
    """Return the Request of parsed flags: what is trained, and on which hardware."""
    price: types.Price | None = arguments.price
    return replace(
        make_learning_request(arguments, arguments.expert),
        gpu=arguments.gpu,
        vram_limit_mib=arguments.vram_limit,
        gpus_per_node=arguments.gpus,
        nodes=arguments.nodes,
        cpu_cores_per_node=arguments.cores,
        ram_gib_per_node=arguments.ram,
        strategy=arguments.strategy,
        price_per_gpu_hour=None if price is None or price.is_node else price.amount,
        price_per_node_hour=None if price is None or not price.is_node else price.amount,
        currency="" if price is None else price.currency,
        cpu_ranks_per_node=arguments.cpu_ranks,
        calibrated=not arguments.no_calibration,
    )


def make_learning_request(arguments: argparse.Namespace, expert: str) -> Request:
    """Return the Request of parsed flags without those for the hardware."""
    from launcher.request.request import Request

    return Request(
        expert=expert,
        overrides=(*arguments.overrides, *_make_precision_override(arguments), *_make_tracker_overrides(arguments)),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
        tokens_per_row=arguments.tokens_per_row,
        random_weights=arguments.random_weights,
        save_errors=arguments.save_errors,
        max_nonfinite_steps=arguments.max_nonfinite_steps,
        hang_seconds=arguments.hang_seconds,
        profile_steps=arguments.profile_steps,
    )


def _make_precision_override(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.precision is None else [f'training.config.precision="{arguments.precision}"']


def _make_tracker_overrides(arguments: argparse.Namespace) -> list[str]:
    values = {name: getattr(arguments, f"wandb_{name}") for name in _WANDB_NAMES}
    trackers = [] if arguments.report_to is None else [f"training.config.report_to={json.dumps(arguments.report_to)}"]
    settings = [f"wandb.{name}={json.dumps(value)}" for name, value in values.items() if value is not None]
    return [*trackers, *(f"training.config.{one}" for one in settings)]
