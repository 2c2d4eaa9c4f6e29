"""What Weights & Biases is told of a run, and how: mode, id, settings to filter by. Nothing here imports wandb."""

from __future__ import annotations

import configparser
import netrc
import os
import re
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from launcher import metrics
from launcher.hardware import Hardware, format_hardware
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan import Plan
from launcher.plan.carried import DEFAULT_WANDB_PROJECT
from launcher.plan.model import WandbPlan
from launcher.record import WandbTrace
from launcher.redaction import find_known_secrets, redact_tree

Mode = Literal["online", "offline", "disabled"]
STEP_AXIS, EPOCH_AXIS = "train/step", "train/epoch"
# In a run's summary: a last step's speed says little.
MEDIANS = (
    metrics.TOKENS_PER_SECOND,
    metrics.DEVICE_TOKENS_PER_SECOND,
    metrics.DEVICE_MFU,
    metrics.STEP_SECONDS,
    metrics.DATA_WAIT_SHARE,
    metrics.GPU_UTILIZATION,
    metrics.JOULES_PER_TOKEN,
)
_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # wandb's own, old and new
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_KNOCK_SECONDS = 5.0
_ID_BYTES = 4
_FOLDERS = re.compile(r"(?<![\w.:/~*])/(?:[^/\s'\"]+/)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracking:
    """How a run is tracked, and why so."""

    mode: Mode
    reason: str


def decide_tracking(planned: Mode | None, environment: Mapping[str, str]) -> Tracking:
    """Disabled wins, whoever says it. Else the environment's word first, as everywhere in W&B; then the plan's; else
    online with a key, offline without."""
    if planned == "disabled":
        return Tracking(mode="disabled", reason="as planned")
    told = environment.get("WANDB_MODE", "").strip().lower()
    if environment.get("WANDB_DISABLED", "").strip().lower() in ("1", "true", "yes"):
        return Tracking(mode="disabled", reason="WANDB_DISABLED is set")
    if told in ("disabled", "dryrun", "offline", "online", "shared", "run"):
        names: dict[str, Mode] = {"disabled": "disabled", "dryrun": "offline", "offline": "offline"}
        return Tracking(mode=names.get(told, "online"), reason=f"WANDB_MODE={told}")
    if planned is not None:
        return Tracking(mode=planned, reason="as planned")
    login = find_login(environment)
    if login is None:
        return Tracking(mode="offline", reason="no key: neither WANDB_API_KEY nor a login in ~/.netrc")
    return Tracking(mode="online", reason=f"key from {login}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    project: str
    entity: str | None  # None: the key's own


def find_place(planned: WandbPlan, environment: Mapping[str, str]) -> Place:
    """Where the manifest and the flags say nothing, the environment does."""
    told = environment.get("WANDB_PROJECT", "").strip()
    project = told if told and planned.project == DEFAULT_WANDB_PROJECT else planned.project
    return Place(project=project, entity=planned.entity or environment.get("WANDB_ENTITY", "").strip() or None)


def find_base_url(environment: Mapping[str, str]) -> str | None:
    """Of a server of one's own: by the environment, or as `wandb login --host` has noted it; None: W&B's."""
    if told := environment.get("WANDB_BASE_URL", "").strip():
        return told
    home = Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111  (of this environment)
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config/wandb")
    parser = configparser.ConfigParser()
    try:
        parser.read_string((folder / "settings").read_text(encoding="utf-8"))
        return parser.get("default", "base_url", fallback="").strip() or None
    except (OSError, UnicodeDecodeError, configparser.Error):
        return None


def find_login(environment: Mapping[str, str]) -> str | None:
    """Where a key is; never the key itself."""
    key = find_key(environment)
    return None if key is None else key.where


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    where: str
    value: str = field(repr=False)


def find_key(environment: Mapping[str, str]) -> Key | None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if value := environment.get(name, "").strip():
            return Key(where=name, value=value)
    base = urlsplit(find_base_url(environment) or "").hostname
    home = Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111  (of this environment)
    named = environment.get("NETRC")
    for file in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            known = netrc.netrc(str(file))
            for host in (base,) if base else _HOSTS:
                found = known.authenticators(host)
                if found and found[2]:
                    return Key(where=str(file), value=found[2])
    return None


def find_trouble(environment: Mapping[str, str]) -> str | None:
    """Why nobody listens where the server should be; None: somebody does, or a proxy stands between.

    wandb itself would try for a minute and a half.
    """
    if any(environment.get(name) for name in _PROXIES):
        return None
    parts = urlsplit(find_base_url(environment) or f"https://{_HOSTS[0]}")
    host, port = parts.hostname or _HOSTS[0], parts.port or (80 if parts.scheme == "http" else 443)
    trouble: list[str] = []

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout=_KNOCK_SECONDS).close()
            trouble.append("")
        except OSError as error:
            trouble.append(error.strerror or str(error) or type(error).__name__)

    thread = threading.Thread(target=knock, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(_KNOCK_SECONDS)
    why = trouble[0] if trouble else f"no answer within {_KNOCK_SECONDS:.0f} s"
    return f"{host} cannot be reached: {why}" if why else None


def name_median(metric: str) -> str:
    """The key under which a run's summary has it."""
    assert metric in MEDIANS
    return f"median/{metric}"


def load_trace(paths: RunPaths) -> WandbTrace | None:
    try:
        return WandbTrace.model_validate_json(paths.wandb.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None


def write_trace(paths: RunPaths, trace: WandbTrace) -> None:
    write_text_atomically(paths.wandb, trace.model_dump_json(indent=2) + "\n")


def make_id(run_id: str) -> str:
    """Run ids that people choose (`test`) are not unique in a project that many write to."""
    return f"{run_id}-{secrets.token_hex(_ID_BYTES)}"


def make_config(plan: Plan, manifest: object, *, data_key: str | None) -> dict[str, object]:
    """What runs are filtered and grouped by comes first, flat; behind it the manifest and the plan, whole."""
    hardware, batch = plan.hardware, plan.batch
    flat = {
        "expert": plan.expert,
        "profile": plan.profile,
        "base": plan.base.name,
        "adapter": plan.adapter.kind,
        "rank": plan.adapter.rank,
        "quantization": plan.quantization_kind,
        "precision": plan.precision.compute_dtype,
        "attention": plan.attention.backend,
        "loss_kernel": plan.loss_kernel,
        "optimizer": plan.optimizer.name,
        "compile": "off" if plan.compile is None else plan.compile.scope,
        "checkpointing": plan.checkpointing,
        "strategy": plan.strategy,
        "offload": plan.offload,
        "packed": batch.packed,
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "sequence_length": batch.sequence_length,
        "learning_rate": plan.optimizer.learning_rate,
        "seed": plan.schedule.seed,
        "num_workers": plan.loader.num_workers,
        "hardware": format_machine(hardware),
        "gpu": "none" if hardware.gpu is None else hardware.gpu.key,
        "gpus_per_node": hardware.gpus_per_node,
        "nodes": hardware.nodes,
        "num_ranks": hardware.num_ranks,
        "random_weights": plan.random_weights,
        "data_key": data_key,
        "launcher_version": plan.launcher_version,
        "predicted_tokens_per_sec": plan.speed.tokens_per_second,
    }
    decisions = {decision.name: f"{decision.value}: {decision.reason}" for decision in plan.decisions}
    # The folder is where somebody's home may be told; the ladder and the terms of the memory are long lists.
    whole = plan.model_dump(mode="json", exclude={"decisions", "notes", "ladder", "base", "wandb", "hardware"})
    whole["data"].pop("folder")
    whole["speed"].pop("scaling")
    told = {**flat, "manifest": manifest, "plan": whole, "decisions": decisions}
    known = find_known_secrets(os.environ)
    return {name: _hide_places(redact_tree(value, known=known)) for name, value in told.items()}


def _hide_places(value: object) -> object:
    """Of absolute paths only the last name: the folders above are somebody's, and may have their name."""
    if isinstance(value, dict):
        return {key: _hide_places(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_hide_places(below) for below in value]
    return _FOLDERS.sub("…/", value) if isinstance(value, str) else value


def format_machine(hardware: Hardware) -> str:
    """Short enough for a column: `2 nodes of 8 x H100 SXM (80.0 GiB)`; all CPUs are one."""
    return "CPU" if hardware.gpu is None else format_hardware(hardware).partition(", ")[0]
