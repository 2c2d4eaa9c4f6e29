"""The arguments that verbs share, and how they become a Request."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.inputs import Request

_MAX_PROFILED = 50
_MAX_NUMBER = 10**9  # of anything that is counted here
_MAX_PRICE = 1e6
_MAX_PORT = 65535
_TIME_LIMIT = re.compile(r"^(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)$")
# What sbatch takes for a partition or an account, and nothing that could end a line of its script.
_SLURM_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.,@+-]*$")
_PRICE = re.compile(r"^[$€£¥]?(\d+(?:\.\d+)?|\.\d+)(?:/h)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    host: str
    port: int


def add_request_arguments(parser: argparse.ArgumentParser, default_expert: str | None = None) -> None:
    told = "an expert by name (neo4j), or the path of a manifest.json"
    if default_expert is None:
        parser.add_argument("expert", metavar="EXPERT", help=told)
    else:
        shown = f"{told} (default: {default_expert})"
        parser.add_argument("expert", metavar="EXPERT", nargs="?", default=default_expert, help=shown)
    add_learning_arguments(parser)
    add_hardware_arguments(parser)
    add_wandb_arguments(parser)
    add_guard_arguments(parser)
    add_profile_arguments(parser)


def add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("what is trained")
    learning.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    learning.add_argument("--max-steps", type=positive, metavar="N", help="stop after N optimizer steps")
    learning.add_argument(
        "--base", type=_named, metavar="NAME", help="another base model: one of the manifest's, a folder, a hub name"
    )
    learning.add_argument(
        "--tokens-per-row", type=positive, metavar="N", help="mean tokens of a row, where you know them"
    )
    learning.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    learning.add_argument(
        "--random-weights",
        action="store_true",
        help="the base's shape without its weights: measures speed and memory before anything is downloaded",
    )


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    hardware = parser.add_argument_group("where it runs (default: this machine)")
    hardware.add_argument("--gpu", metavar="NAME", help="plan for this GPU of the catalogue: rtx4090, h100, ...")
    hardware.add_argument(
        "--vram-limit",
        type=_mib,
        metavar="SIZE",
        help="plan for, and use, no more of each GPU: 24GiB rehearses an RTX 4090 on a larger card",
    )
    hardware.add_argument("--gpus", type=positive, metavar="N", help="GPUs in each node")
    hardware.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes (default 1)")
    hardware.add_argument("--cores", type=positive, metavar="N", help="CPU cores in each node")
    hardware.add_argument("--ram", type=_gib, metavar="GIB", help="CPU memory of each node")
    hardware.add_argument(
        "--strategy", choices=("ddp", "fsdp2", "zero1", "zero2", "zero3"), help="override the plan's strategy"
    )
    hardware.add_argument("--price", type=_price, metavar="PRICE/h", help="of one GPU for one hour: 0.40/h")
    hardware.add_argument(
        "--no-calibration",
        action="store_true",
        help="plan by the estimates alone, not by what finished runs of this machine have measured",
    )
    # For tests and rehearsals: as many processes on each node, without a GPU.
    hardware.add_argument("--cpu-ranks", type=positive, help=argparse.SUPPRESS)


def add_wandb_arguments(parser: argparse.ArgumentParser) -> None:
    """Short for `--set training.config.wandb.…`."""
    wandb = parser.add_argument_group("Weights & Biases (default: as the manifest says)")
    wandb.add_argument(
        "--wandb",
        choices=("online", "offline", "disabled"),
        dest="wandb_mode",
        help="default: online with a key, offline without; WANDB_MODE wins",
    )
    wandb.add_argument("--wandb-project", metavar="NAME", help="default: expert-launcher")
    wandb.add_argument("--wandb-entity", metavar="NAME", help="a team or a user (default: yours)")
    wandb.add_argument("--wandb-group", metavar="NAME", help="default: the expert")
    wandb.add_argument("--wandb-name", metavar="NAME", help="default: the run's id")
    wandb.add_argument("--wandb-notes", metavar="TEXT", help="shown beside the run")
    wandb.add_argument("--wandb-tags", type=_words, metavar="A,B", help="to filter by")
    wandb.add_argument(
        "--wandb-artifacts", type=_artifacts, metavar="adapter,manifest", help="upload these when the run is done"
    )


def add_guard_arguments(parser: argparse.ArgumentParser) -> None:
    guards = parser.add_argument_group("when something goes wrong")
    guards.add_argument(
        "--on-save-error",
        choices=("stop", "continue"),
        dest="save_errors",
        help="where a checkpoint cannot be written (default: stop)",
    )
    guards.add_argument(
        "--max-bad-steps",
        type=_count,
        metavar="N",
        help="steps in a row that may be passed over because their loss or gradients are no numbers (default 3)",
    )
    guards.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="start a training that died again, from its last checkpoint; many nodes need c10d for it (default 0)",
    )
    guards.add_argument(
        "--hang-timeout",
        type=positive,
        metavar="SECONDS",
        dest="hang_seconds",
        help="end a training that makes no step for so long (default 600)",
    )


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    looking = parser.add_argument_group("looking closer")
    looking.add_argument(
        "--profile-steps",
        type=_steps,
        metavar="A:B",
        help="trace the steps from A to B: runs/<id>/profile/ has what cost most, a trace, and what memory held",
    )


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    resume = parser.add_argument_group("going on with a run")
    resume.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a run from its newest whole checkpoint (default: this expert's last run that is not done)",
    )
    resume.add_argument(
        "--allow-drift", action="store_true", help="although manifest, data or base are not what they were"
    )
    resume.add_argument(
        "--verify",
        type=positive,
        nargs="?",
        const=3,
        default=0,
        metavar="K",
        help="train the last K recorded steps again, and compare packs and losses with the record (default 3)",
    )


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    many = parser.add_argument_group("many nodes (start it on each of them)")
    many.add_argument("--node-rank", type=_count, metavar="R", help="which node this is, from 0")
    many.add_argument("--rendezvous", type=_address, metavar="HOST:PORT", help="where node 0 listens")
    many.add_argument(
        "--rdzv-backend", choices=("static", "c10d"), help="c10d: nodes may restart (default static: they may not)"
    )
    many.add_argument(
        "--join-timeout", type=positive, metavar="SECONDS", help="how long nodes wait for each other (default 300)"
    )


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("--slurm", action="store_true", help="write slurm.sbatch and submit it")
    slurm.add_argument("--partition", type=_slurm_name, metavar="NAME", help="default: the cluster's")
    slurm.add_argument("--account", type=_slurm_name, metavar="NAME", help="default: yours")
    slurm.add_argument(
        "--time-limit", type=_time_limit, metavar="HH:MM:SS", help="default: from the plan's estimate; D-HH:MM:SS too"
    )
    slurm.add_argument("--no-submit", action="store_true", help="only write the files, to be submitted elsewhere")


def make_request(arguments: argparse.Namespace) -> Request:
    return replace(
        make_learning_request(arguments, arguments.expert),
        gpu=arguments.gpu,
        vram_limit_mib=arguments.vram_limit,
        gpus_per_node=arguments.gpus,
        nodes=arguments.nodes,
        cpu_cores_per_node=arguments.cores,
        ram_gib_per_node=arguments.ram,
        strategy=arguments.strategy,
        price_per_gpu_hour=arguments.price,
        cpu_ranks_per_node=arguments.cpu_ranks,
        calibrated=not arguments.no_calibration,
    )


def make_learning_request(arguments: argparse.Namespace, expert: str) -> Request:
    """What is trained, wherever it runs."""
    from launcher.inputs import Request

    return Request(
        expert=expert,
        overrides=(*arguments.overrides, *_wandb_overrides(arguments)),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
        tokens_per_row=arguments.tokens_per_row,
        random_weights=arguments.random_weights,
        save_errors=arguments.save_errors,
        max_bad_steps=arguments.max_bad_steps,
        hang_seconds=arguments.hang_seconds,
        profile_steps=arguments.profile_steps,
    )


def _wandb_overrides(arguments: argparse.Namespace) -> list[str]:
    names = ("mode", "project", "entity", "group", "name", "notes", "tags", "artifacts")
    given = {name: getattr(arguments, f"wandb_{name}") for name in names}
    return [f"training.config.wandb.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number above 0")
    if number > _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is more than {_MAX_NUMBER:,}")
    return number


def _steps(text: str) -> tuple[int, int]:
    """A:B, both of them included."""
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not A:B, such as 10:15")
    steps = positive(first), positive(last)
    if steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: step {steps[0]} comes after step {steps[1]}")
    if steps[1] - steps[0] >= _MAX_PROFILED:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: a trace of more than {_MAX_PROFILED} steps cannot be opened")
    return steps


def _mib(text: str) -> int:
    """24GiB, 24GB, 24G, 24576MiB or plain 24, which are GiB."""
    from launcher.units import GIB, MIB

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|g|mib|m|gb|mb)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a size, such as 24GiB")
    sizes = {"gib": GIB, "g": GIB, "mib": MIB, "m": MIB, "gb": 1e9, "mb": 1e6}
    mib = int(float(match[1]) * sizes[match[2] or "gib"] / MIB)
    if not 1 <= mib <= _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no size of a GPU's memory")
    return mib


def _named(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name is no base model")
    return text


def _count(text: str) -> int:
    if text.strip() == "0":
        return 0
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace("above 0", "from 0 on")) from None


def _address(text: str) -> Address:
    """HOST:PORT; an IPv6 address stands in brackets."""
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", " ")
    if not colon or not host or not port.isdecimal() or not host.isprintable() or re.search(r"[\s'\"$`\\/]", host):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not HOST:PORT, such as node0:29500 or [fd00::1]:29500")
    if not 1 <= int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: a port is one of 1 to {_MAX_PORT}")
    return Address(host=host, port=int(port))


def _time_limit(text: str) -> int:
    match = _TIME_LIMIT.match(text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a time limit, such as 12:00:00 or 2-00:00:00")
    return total


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a list of words with commas between them")
    return words


def _artifacts(text: str) -> list[str]:
    words = _words(text)
    for word in words:
        if word not in ("adapter", "manifest"):
            raise argparse.ArgumentTypeError(f"{_shown(word)} is neither adapter nor manifest")
    return words


def _slurm_name(text: str) -> str:
    if not _SLURM_NAME.match(text):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a name that Slurm takes")
    return text


def _gib(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a number of GiB above 0")
    return number


def _price(text: str) -> float:
    match = _PRICE.match(text.strip())
    if match is None or float(match.group(1)) > _MAX_PRICE:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a price an hour, such as 0.40/h")
    return float(match.group(1))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
