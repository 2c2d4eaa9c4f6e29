"""What the job files have in common: the script of a node, names, the header and the YAML format."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from launcher.core.run_paths import RunPaths
from launcher.core.units import format_cost, format_duration
from launcher.hardware.model import format_hardware
from launcher.plan.model import Plan
from launcher.render.command import Verbatim, format_words, join_lines
from launcher.render.job import JobOptions

VOLUME = "/workspace"  # the image's working directory
PROJECT = "/tmp/launcher"  # where the files of a submission are placed
RUN_FILES = f"{PROJECT}/run"
PORT = 29500
SHM_GIB = 16  # NCCL and the data loader's workers use /dev/shm; containers have 64 MiB
STOP_SECONDS = 300  # between the stop signal and the kill: one step and one checkpoint
ENVIRONMENT = {"HF_HOME": f"{VOLUME}/.cache/huggingface", "LAUNCHER_DATA_DIR": VOLUME}
_MAX_NAME = 40  # pods add a suffix, and a host name has at most 63 characters

_SCRIPT = """set -euo pipefail
export PATH=/opt/venv/bin:$PATH
rank={rank}
run={run}
if [[ ! -e $run ]]; then  # only at the first start; nodes that share the volume copy it once
  mkdir -p "$run.$rank/logs"
  cp -L {files}/*.* "$run.$rank"
  mv -T "$run.$rank" "$run" 2> /dev/null || rm -rf "$run.$rank"
fi
# A resubmitted run may have other hardware. Other training settings under the same name are refused.
cp -L {files}/request.json "$run/.request.$rank"
mv "$run/.request.$rank" "$run/request.json"
cd {project}
exec {command}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Shell expressions for a node's rank and node 0's address on a platform, and the folders of its files."""

    rank: str
    head: str
    port: str = str(PORT)
    project: str = PROJECT
    files: str = RUN_FILES


def render_script(
    plan: Plan, paths: RunPaths, options: JobOptions, platform: Platform, prefix: Sequence[str] = ()
) -> str:
    """Return the script of every node: place the run directory on the volume, and train or resume it."""
    run = f"{VOLUME}/runs/{paths.run_id}"
    has_nodes = plan.hardware.nodes > 1
    flags = ["--resume", Verbatim('"$run"')]
    if has_nodes:
        address = Verbatim(f'"{platform.head}:{platform.port}"')
        flags += ["--node-rank", Verbatim('"$rank"'), "--rendezvous", address]
    command = shlex.join([*prefix, "launcher", "train", options.expert])
    return _SCRIPT.format(
        rank=platform.rank if has_nodes else 0,
        run=shlex.quote(run),
        files=platform.files,
        project=platform.project,
        command=join_lines([command, *format_words([*flags, *options.flags])]).rstrip("\n"),
    )


def find_expert_mount(options: JobOptions) -> dict[str, str]:
    """Return the local folder of an expert by its folder on the nodes; empty if the image contains the expert."""
    if not options.expert_folder:
        return {}
    return {posixpath.normpath(posixpath.join(PROJECT, options.expert_folder)): options.expert_folder}


def make_name(text: str) -> str:
    """Return a run's id as a DNS label: two or more lowercase letters, digits and hyphens, starting with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() and len(name) > 1 else f"run-{name}"
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9].rstrip('-')}-{digest}"


def compute_node_price(plan: Plan) -> float | None:
    """Return the price of a node per hour in dollars; None if it is unknown or in another currency."""
    speed = plan.speed
    if speed.currency not in ("", "USD"):
        return None
    if speed.price_per_node_hour is not None:
        return speed.price_per_node_hour
    return None if speed.price_per_gpu_hour is None else speed.price_per_gpu_hour * plan.hardware.gpus_per_node


def render_yaml(plan: Plan, documents: Sequence[Mapping[str, object]], command: str) -> str:
    """Return the documents as YAML, after a comment with hardware, duration, cost and the command that submits them."""
    speed = plan.speed
    facts = [format_hardware(plan.hardware)]
    if speed.total_seconds is not None:
        facts.append(f"about {format_duration(speed.total_seconds)} of training")
    if speed.cost is not None:
        facts.append(f"{format_cost(speed.cost, speed.currency)} at {speed.format_price()}")
    header = f"# {plan.expert}: {', '.join(facts)}\n# {command}\n"
    return header + yaml.dump_all(
        [_drop_none(document) for document in documents], Dumper=_Dumper, sort_keys=False, width=120
    )


def _drop_none(value: object) -> object:
    """Remove keys whose value is None, so that callers can list all keys; replace UNSET by None, YAML's null."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_none(item) for item in value]
    return None if value is UNSET else value


class _Unset:
    """Stands for `null` in a rendered file: a value that the user supplies when the job is submitted."""


UNSET = _Unset()


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        """Indent lists in mappings, as the documentation of the target platforms does."""
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Verbatim, _represent_text)
