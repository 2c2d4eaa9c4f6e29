"""Gathers what a plan is made from: the manifest, this machine or one of the catalogue, the base's shape, the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from launcher.bases import TINY_BASE_NAME, last_component
from launcher.calibration import load_calibration
from launcher.choices import Strategy
from launcher.errors import InputError, ManifestError, Problem
from launcher.experience import find_failure
from launcher.hardware import MAX_GPUS_PER_NODE, Hardware, limit_vram, make_hardware
from launcher.manifest import LoadedManifest, Manifest, find_manifest, load_manifest
from launcher.own_hardware import OwnHardware, apply_own_hardware, find_named_gpu, load_own_hardware
from launcher.plan import Plan, PlanOptions, make_plan
from launcher.plan.calibration import NOTHING_LEARNT
from launcher.plan.model import GuardPlan, ProfilePlan
from launcher.plan.situation import DEFAULT_GUARDS
from launcher.probe import probe_hardware
from launcher.redaction import redact_text, redact_tree
from launcher.rows import SAMPLE_TRAIN, RowEstimate, probe_rows, probe_sample, with_tokens_per_row
from launcher.shapes import load_shape
from launcher.started import Started
from launcher.values import flatten

MODELS_DIR_VARIABLE = "LAUNCHER_MODELS_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a user asked for, before anything was looked at."""

    expert: str
    overrides: Sequence[str] = ()
    base: str | None = None
    max_steps: int | None = None
    profile: Literal["auto", "full", "smoke"] = "auto"
    gpu: str | None = None
    vram_limit_mib: int | None = None  # of each GPU: no more is planned with, nor used
    gpus_per_node: int | None = None
    nodes: int = 1
    cpu_cores_per_node: int | None = None
    ram_gib_per_node: float | None = None
    strategy: Strategy | None = None
    price_per_gpu_hour: float | None = None
    tokens_per_row: int | None = None
    random_weights: bool = False
    save_errors: Literal["stop", "continue"] | None = None
    max_bad_steps: int | None = None
    hang_seconds: int | None = None
    profile_steps: tuple[int, int] | None = None
    cpu_ranks_per_node: int | None = None  # as many processes on each node, without a GPU: for rehearsals and tests
    calibrated: bool = True  # by what finished runs of this machine have measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    request: Request
    loaded: LoadedManifest
    plan: Plan


def plan_request(request: Request) -> PlannedRun:
    loaded = _load(request)
    hardware = limit_vram(_find_own_hardware(request), request.vram_limit_mib)
    options = _make_options(request, hardware, loaded)
    is_smoke = options.profile == "smoke"
    name = TINY_BASE_NAME if is_smoke else loaded.manifest.base.name
    base = load_shape(name, base_folders(loaded.folder))
    rows = _find_rows(request, loaded, is_smoke and options.takes_sample)
    plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=options)
    failure = find_failure(plan)
    if failure is not None and options.calibration.runs:  # runs that stayed below their estimates are not all there is
        options = replace(options, calibration=replace(options.calibration, may_lower=False))
        plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=options)
    if failure is not None and plan.memory.total_bytes >= failure.predicted_bytes:
        lower = replace(options, failed_bytes=failure.predicted_bytes, failed_when=failure.when)
        plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=lower)
    return PlannedRun(request=request, loaded=loaded, plan=plan)


def write_request(request: Request) -> str:
    """A manifest's path is made absolute: whoever reads this may stand elsewhere."""
    path = Path(request.expert)
    named = replace(request, expert=str(path.resolve())) if path.is_file() else request
    overrides = tuple(_redact_override(text) for text in named.overrides)
    return json.dumps(asdict(replace(named, overrides=overrides)), indent=2, sort_keys=True) + "\n"


def _redact_override(text: str) -> str:
    """KEY=VALUE, where a value may be a secret: then it is not kept, and a run taken up again has none."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{redact_tree(value, key)}"


def load_request(file: Path) -> Request:
    try:
        return TypeAdapter(Request).validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError:  # pydantic's and Unicode's are of this kind
        raise InputError(f"{file}: not a request of this version", hint="use the launcher that wrote it") from None


def merge_requests(stored: Request, given: Request) -> Request:
    """What was asked for then, and on top of it what is asked for now."""
    nothing = Request(expert=stored.expert)
    changes = {
        field.name: getattr(given, field.name)
        for field in fields(Request)
        if field.name != "expert" and getattr(given, field.name) != getattr(nothing, field.name)
    }
    changes["overrides"] = (*stored.overrides, *given.overrides)  # the later of two for the same key wins
    return replace(stored, **changes)


def for_started(request: Request, started: Started) -> Request:
    """The same training, on what accelerate started. Where there is no GPU, as many CPU ranks."""
    strategy = None if started.strategy == "single" else started.strategy
    if started.num_ranks == 1 and strategy is None:
        return request
    on_cpu = started.on_cpu or probe_hardware().gpu is None
    return replace(
        request,
        strategy=strategy,
        nodes=started.num_nodes,
        gpus_per_node=None if on_cpu else started.ranks_per_node,
        cpu_ranks_per_node=started.ranks_per_node if on_cpu else None,
    )


def base_folders(manifest_folder: Path) -> tuple[Path, ...]:
    """Where base models are looked for, besides the path that the manifest names."""
    configured = os.environ.get(MODELS_DIR_VARIABLE)
    folders = [Path(configured)] if configured else []
    return (*folders, manifest_folder, Path("models"), Path())


def _load(request: Request) -> LoadedManifest:
    overrides = list(request.overrides)
    if request.max_steps is not None:
        overrides.append(f"training.config.max_steps={request.max_steps}")
    loaded = load_manifest(find_manifest(request.expert), overrides)
    _check_no_secret(loaded)
    if request.base is None:
        return loaded
    manifest = _with_base(loaded.manifest, request.base)
    return replace(loaded, manifest=manifest)


def _check_no_secret(loaded: LoadedManifest) -> None:
    """Where data lies stands in the plan and on the console: a password in it would stand there, too."""
    tree = loaded.manifest.training.dataset.model_dump(mode="json")
    problems = tuple(
        Problem(where=f"training.dataset.{key}", what="it holds a password or a token")
        for key, value in flatten(tree).items()
        if isinstance(value, str) and redact_text(value) != value
    )
    if problems:
        raise ManifestError(
            f"{loaded.path}: secrets do not belong into a manifest",
            problems,
            "give them by the environment, as HF_TOKEN or a ~/.netrc, and leave them out here",
        )


def _with_base(manifest: Manifest, name: str) -> Manifest:
    """One of the manifest's base models, picked by name; or any other, put in place of the first."""
    wanted = last_component(name).lower()
    picked = [entry for entry in manifest.base_models if last_component(entry.name).lower() == wanted]
    first = picked[0] if picked else manifest.base.model_copy(update={"name": name, "revision": None})
    others = (
        tuple(entry for entry in manifest.base_models if entry is not first) if picked else manifest.base_models[1:]
    )
    return manifest.model_copy(update={"base_models": (first, *others)})


def _find_own_hardware(request: Request) -> Hardware:
    """With what the user's hardware.json says; what the command line says wins over it."""
    own = load_own_hardware()
    flags = ("cpu_cores_per_node", "ram_gib_per_node", "price_per_gpu_hour")
    keeps = tuple(name for name in flags if getattr(request, name) is not None)
    return apply_own_hardware(own, _find_hardware(request, own), keeps=keeps)


def _find_hardware(request: Request, own: OwnHardware) -> Hardware:
    if request.gpu is not None and request.cpu_ranks_per_node is not None:
        raise InputError("CPU ranks take the place of GPUs: --cpu-ranks and --gpu exclude each other")
    if request.gpu is not None:
        return make_hardware(
            find_named_gpu(own, request.gpu),
            gpus_per_node=request.gpus_per_node if request.gpus_per_node is not None else 1,
            nodes=request.nodes,
            cpu_cores_per_node=request.cpu_cores_per_node,
            ram_gib_per_node=request.ram_gib_per_node,
        )
    here = probe_hardware()
    if request.cpu_ranks_per_node is not None:
        ranks = {
            "gpu": None,
            "free_vram_mib": None,
            "gpus_per_node": request.cpu_ranks_per_node,
            "nodes": request.nodes,
            "cpu_cores_per_node": request.cpu_cores_per_node or here.cpu_cores_per_node,
        }
        return here.model_copy(update=ranks)
    _check_enough(request, here)
    make_hardware(  # refuses what no machine has, in the same words for this machine and for the catalogue's
        here.gpu,
        gpus_per_node=request.gpus_per_node or min(here.gpus_per_node, MAX_GPUS_PER_NODE),
        nodes=request.nodes,
        cpu_cores_per_node=request.cpu_cores_per_node,
        ram_gib_per_node=request.ram_gib_per_node,
    )
    update = {
        "gpus_per_node": request.gpus_per_node if request.gpus_per_node is not None else here.gpus_per_node,
        "nodes": request.nodes,
        "cpu_cores_per_node": here.cpu_cores_per_node
        if request.cpu_cores_per_node is None
        else request.cpu_cores_per_node,
        "ram_gib_per_node": here.ram_gib_per_node if request.ram_gib_per_node is None else request.ram_gib_per_node,
    }
    return here.model_copy(update=update)


def _check_enough(request: Request, here: Hardware) -> None:
    way_out = "--gpu NAME plans for a GPU of the catalogue"
    if request.nodes < 1 or (request.gpus_per_node is not None and request.gpus_per_node < 1):
        raise InputError("--gpus and --nodes count from 1")
    if here.gpu is None and (request.nodes > 1 or request.gpus_per_node is not None):
        raise InputError("this machine has no GPU, so --gpus and --nodes say nothing about it", hint=way_out)
    if request.gpus_per_node is not None and request.gpus_per_node > here.gpus_per_node:
        raise InputError(f"--gpus {request.gpus_per_node}: this machine has {here.gpus_per_node}", hint=way_out)


def _make_options(request: Request, hardware: Hardware, loaded: LoadedManifest) -> PlanOptions:
    if request.profile == "auto":
        profile: Literal["full", "smoke"] = "full" if hardware.gpu is not None else "smoke"
        reason = "there is a GPU" if profile == "full" else "no GPU here: a tiny base on sample data, same code path"
    else:
        profile, reason = request.profile, "asked for by --profile"
    return PlanOptions(
        profile=profile,
        profile_reason=reason,
        strategy=request.strategy,
        price_per_gpu_hour=hardware.price_per_gpu_hour
        if request.price_per_gpu_hour is None
        else request.price_per_gpu_hour,
        random_weights=request.random_weights,
        guards=_make_guards(request),
        profiled=None if request.profile_steps is None else ProfilePlan.of(request.profile_steps),
        calibration=load_calibration(hardware) if request.calibrated else NOTHING_LEARNT,
        manifest_folder=_name_folder(loaded.folder),
        given_keys=loaded.given_keys,
        takes_sample=_takes_sample(loaded),
    )


def _takes_sample(loaded: LoadedManifest) -> bool:
    """Rows of a manifest's own that lie on this disk stand in for a sample that nobody made."""
    dataset = loaded.manifest.training.dataset
    with suppress(OSError):  # told where the rows are read
        is_here = dataset.type == "single" and bool(dataset.path) and (loaded.folder / (dataset.path or "")).is_file()
        return (loaded.folder / SAMPLE_TRAIN).is_file() or not is_here
    return True


def _make_guards(request: Request) -> GuardPlan:
    given = {name: getattr(request, name) for name in GuardPlan.model_fields}
    return DEFAULT_GUARDS.model_copy(update={name: value for name, value in given.items() if value is not None})


def _name_folder(folder: Path) -> str:
    """In full: the plan is read in another place than it was made in. It crosses the disk as UTF-8."""
    name = str(folder.resolve())
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"the manifest's folder {name!r} has a name that is not UTF-8", hint="rename it") from None
    return name


def _find_rows(request: Request, loaded: LoadedManifest, takes_sample: bool) -> RowEstimate:
    dataset = loaded.manifest.training.dataset
    rows = probe_sample(loaded.folder) if takes_sample else probe_rows(dataset, loaded.folder)
    return rows if request.tokens_per_row is None else with_tokens_per_row(rows, request.tokens_per_row)
