"""W&B settings of a run: mode, project, login, id and config. wandb is not imported here."""

from __future__ import annotations

import configparser
import netrc
import os
import re
import secrets
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from launcher.core import metrics
from launcher.core.errors import InputError
from launcher.core.redaction import redact_tree
from launcher.core.run_files import load_model_or_none
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.core.worker import call_with_timeout
from launcher.hardware.model import Hardware, format_gpus
from launcher.plan import Plan
from launcher.plan.model import WandbPlan
from launcher.plan.passthrough import DEFAULT_WANDB_PROJECT
from launcher.runs.record import Outcome, WandbTrace, compute_median, get_global_batch

Mode = Literal["online", "offline", "disabled"]
STEP_AXIS, EPOCH_AXIS = "train/step", "train/epoch"
# Logged as medians in the summary: the speed of the last step is not representative.
MEDIANS = (
    metrics.TOKENS_PER_SECOND,
    metrics.DEVICE_TOKENS_PER_SECOND,
    metrics.DEVICE_MFU,
    metrics.STEP_SECONDS,
    metrics.DATA_WAIT_SHARE,
    metrics.GPU_UTILIZATION,
    metrics.JOULES_PER_TOKEN,
)
_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # W&B's own servers, old and new
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_CONNECT_SECONDS = 5.0
_ID_BYTES = 4
_MAX_NAME_LENGTH = 100  # in an id
_FOLDERS = re.compile(r"(?<![\w.:/~*])/(?:[^/\s'\"]+/)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracking:
    """W&B mode of a run, and why."""

    mode: Mode
    reason: str


def decide_tracking(planned: Mode | None, environment: Mapping[str, str], *, is_requested: bool = False) -> Tracking:
    """Return the W&B mode: disabled if planned, else that of the environment, else as planned, else online with a key.

    Without a key: offline if manifest or flags (`is_requested`) or the environment have W&B settings, else disabled.
    """
    if planned == "disabled":
        return Tracking(mode="disabled", reason="as planned")
    mode = environment.get("WANDB_MODE", "").strip().lower()
    if environment.get("WANDB_DISABLED", "").strip().lower() in ("1", "true", "yes"):
        return Tracking(mode="disabled", reason="WANDB_DISABLED is set")
    if mode in ("disabled", "dryrun", "offline", "online", "shared", "run"):
        names: dict[str, Mode] = {"disabled": "disabled", "dryrun": "offline", "offline": "offline"}
        return Tracking(mode=names.get(mode, "online"), reason=f"WANDB_MODE={mode}")
    if planned is not None:
        return Tracking(mode=planned, reason="as planned")
    key = find_key(environment)
    if key is None:
        missing = "no key: neither WANDB_API_KEY nor a login in ~/.netrc"
        if is_requested or any(environment.get(name, "").strip() for name in ("WANDB_PROJECT", "WANDB_ENTITY")):
            return Tracking(mode="offline", reason=missing)
        return Tracking(mode="disabled", reason=f"not requested, and {missing}")
    return Tracking(mode="online", reason=f"key from {key.where}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbProject:
    """Project and entity that a run logs to."""

    project: str
    entity: str | None  # None: the default of the key


def get_project(planned: WandbPlan, environment: Mapping[str, str]) -> WandbProject:
    """Return project and entity; the environment sets what manifest and flags do not."""
    configured = environment.get("WANDB_PROJECT", "").strip()
    project = configured if configured and planned.project == DEFAULT_WANDB_PROJECT else planned.project
    return WandbProject(project=project, entity=planned.entity or environment.get("WANDB_ENTITY", "").strip() or None)


def find_base_url(environment: Mapping[str, str]) -> str | None:
    """Return the URL of a self-hosted server, from the environment or `wandb login --host`; None for W&B's own."""
    if url := environment.get("WANDB_BASE_URL", "").strip():
        return url
    home = Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111  (of this environment)
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config/wandb")
    parser = configparser.ConfigParser()
    try:
        parser.read_string((folder / "settings").read_text(encoding="utf-8"))
        return parser.get("default", "base_url", fallback="").strip() or None
    except (OSError, UnicodeDecodeError, configparser.Error):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """An API key and where it is stored."""

    where: str
    value: str = field(repr=False)


def find_key(environment: Mapping[str, str]) -> Key | None:
    """Return the API key from the environment or ~/.netrc."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if value := environment.get(name, "").strip():
            return Key(where=name, value=value)
    base = urlsplit(find_base_url(environment) or "").hostname
    home = Path(environment.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111  (of this environment)
    configured = environment.get("NETRC")
    for file in [Path(configured)] if configured else [home / ".netrc", home / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            known = netrc.netrc(str(file))
            for host in (base,) if base else _HOSTS:
                login = known.authenticators(host)
                if login and login[2]:
                    return Key(where=str(file), value=login[2])
    return None


def without_local_settings() -> AbstractContextManager[None]:
    """Return a context in which wandb loads its settings from the environment and the user's own files only.

    wandb would also read wandb/settings in the working directory. In a downloaded one, this file could name the server
    that gets the API key.
    """
    return chdir(os.sep)


def check_server(environment: Mapping[str, str]) -> str | None:
    """Return why the W&B server cannot be reached; None if it can, or if there is a proxy.

    wandb itself would retry for 90 seconds.
    """
    if any(environment.get(name) for name in _PROXIES):
        return None
    parts = urlsplit(find_base_url(environment) or f"https://{_HOSTS[0]}")
    host, port = parts.hostname or _HOSTS[0], parts.port or (80 if parts.scheme == "http" else 443)
    try:  # under a timeout of its own, because a DNS lookup has none
        call_with_timeout(lambda: socket.create_connection((host, port), _CONNECT_SECONDS).close(), _CONNECT_SECONDS)
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or str(error) or type(error).__name__}"
    return None


def name_median(metric: str) -> str:
    """Return the summary key of a metric's median."""
    assert metric in MEDIANS
    return f"median/{metric}"


def make_summary(paths: RunPaths, outcome: Outcome) -> dict[str, object]:
    """Return the outcome for W&B's table of runs, with median speeds, because those of the last step vary by chance."""
    rows: list[metrics.StepMetrics] = []
    with suppress(InputError):  # missing or damaged: the outcome is logged all the same
        rows = metrics.load_metrics(paths.metrics)
    last_step = max((row.step for row in rows), default=0)  # a killed run did not record its steps
    summary = {
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "steps_done": max(outcome.steps_done, last_step),
        "num_steps": outcome.num_steps,
        "best_step": outcome.best_step,
        "best_metric": outcome.best_metric,
        "attempts": len(outcome.attempts),
        "oom_fallbacks": len(outcome.oom_fallbacks),
        **outcome.goodput,
    }
    medians = {name_median(name): compute_median(rows, name) for name in MEDIANS}
    summary.update({name: value for name, value in medians.items() if value is not None})
    return {name: value for name, value in summary.items() if value not in (None, "")}


def load_trace(paths: RunPaths) -> WandbTrace | None:
    """Load wandb.json; None if it is missing or unreadable."""
    return load_model_or_none(WandbTrace, paths.wandb)


def write_trace(paths: RunPaths, trace: WandbTrace) -> None:
    """Write wandb.json."""
    write_text_atomically(paths.wandb, trace.model_dump_json(indent=2) + "\n")


def make_id(run_id: str) -> str:
    """Make a unique W&B id: run ids that users choose (`test`) are not unique in a shared project.

    The directory of a run may have been renamed to any name, but W&B refuses some characters and long ids.
    """
    name = re.sub(r"[^\w.-]+", "-", run_id, flags=re.ASCII)[:_MAX_NAME_LENGTH]
    return f"{name}-{secrets.token_hex(_ID_BYTES)}"


def make_config(plan: Plan, manifest: object, outcome: Outcome | None = None) -> dict[str, object]:
    """Return the run's config: flat keys to filter and group by, then the complete manifest and plan."""
    hardware, batch = plan.hardware, plan.batch
    flat = {
        "expert": plan.expert,
        "profile": plan.profile,
        "base": plan.base.name,
        "adapter": plan.adapter.kind,
        "rank": plan.adapter.rank,
        "quantization": plan.quantization_kind,
        "precision": plan.precision.name,
        "attention": plan.attention.backend,
        "loss_kernel": plan.loss_kernel,
        "optimizer": plan.optimizer.name,
        "compile": "off" if plan.compile is None else plan.compile.scope,
        "checkpointing": plan.checkpointing,
        "strategy": plan.strategy,
        "offload": plan.offload,
        "packed": batch.packed,
        "global_batch_size": get_global_batch(plan, outcome),
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
        "data_key": None if outcome is None else outcome.data_key,
        "launcher_version": plan.launcher_version,
        "predicted_tokens_per_sec": plan.speed.tokens_per_second,
    }
    decisions = {decision.name: f"{decision.value}: {decision.reason}" for decision in plan.decisions}
    # The folder may reveal a home directory; the OOM fallbacks are a long list.
    omitted = {"decisions", "notes", "oom_fallbacks", "base", "wandb", "hardware"}
    full_plan = plan.model_dump(mode="json", exclude=omitted)
    full_plan["data"].pop("folder")
    config = {**flat, "manifest": manifest, "plan": full_plan, "decisions": decisions}
    return {name: _hide_folders(redact_tree(value)) for name, value in config.items()}


def _hide_folders(value: object) -> object:
    """Replace the folders of absolute paths, which may contain a user's name."""
    if isinstance(value, dict):
        return {key: _hide_folders(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_hide_folders(below) for below in value]
    return _FOLDERS.sub("…/", value) if isinstance(value, str) else value


def format_machine(hardware: Hardware) -> str:
    """Format hardware for a table column: `2 nodes of 8 x H100 SXM (80.0 GiB)`, or `CPU`."""
    return "CPU" if hardware.gpu is None else format_gpus(hardware, hardware.gpu)
