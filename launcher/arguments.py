"""The arguments that verbs share, and how they become a Request."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.inputs import Request

_MAX_NUMBER = 10**9  # of anything that is counted here
_MAX_PRICE = 1e6
_PRICE = re.compile(r"^[^\d.]?(\d+(?:\.\d+)?|\.\d+)(?:/h)?$")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("expert", metavar="EXPERT", help="an expert by name (neo4j), or the path of a manifest.json")
    add_learning_arguments(parser)
    add_hardware_arguments(parser)


def add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("what is trained")
    learning.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    learning.add_argument("--max-steps", type=positive, metavar="N", help="stop after N optimizer steps")
    learning.add_argument(
        "--base", metavar="NAME", help="another base model: one of the manifest's, a folder, a hub name"
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
    hardware.add_argument("--gpus", type=positive, metavar="N", help="GPUs in each node")
    hardware.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes (default 1)")
    hardware.add_argument("--cores", type=positive, metavar="N", help="CPU cores in each node")
    hardware.add_argument("--ram", type=_gib, metavar="GIB", help="CPU memory of each node")
    hardware.add_argument(
        "--strategy", choices=("ddp", "fsdp2", "zero1", "zero2", "zero3"), help="override the plan's strategy"
    )
    hardware.add_argument("--price", type=_price, metavar="PRICE/h", help="of one GPU for one hour: 0.40/h")


def make_request(arguments: argparse.Namespace) -> Request:
    return replace(
        make_learning_request(arguments, arguments.expert),
        gpu=arguments.gpu,
        gpus_per_node=arguments.gpus,
        nodes=arguments.nodes,
        cpu_cores_per_node=arguments.cores,
        ram_gib_per_node=arguments.ram,
        strategy=arguments.strategy,
        price_per_gpu_hour=arguments.price,
    )


def make_learning_request(arguments: argparse.Namespace, expert: str) -> Request:
    """What is trained, wherever it runs."""
    from launcher.inputs import Request

    return Request(
        expert=expert,
        overrides=tuple(arguments.overrides),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
        tokens_per_row=arguments.tokens_per_row,
        random_weights=arguments.random_weights,
    )


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
