"""A user's request, and the plan made from it with the manifest, the hardware, the base model and the data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from launcher.base_models.catalogue import TINY_BASE_NAME, get_last_component
from launcher.base_models.missing_files import note_missing_files
from launcher.base_models.shapes import describe_unusable_base, load_shape
from launcher.core.choices import Profile, Strategy
from launcher.core.errors import InputError, ManifestError, Problem
from launcher.core.frozen_model import flatten
from launcher.core.redaction import get_known_secrets, redact_text, redact_tree
from launcher.core.run_files import load_model
from launcher.core.run_paths import get_env_path
from launcher.corpus.chat_template_file import load_chat_template
from launcher.corpus.first_rows import check_first_rows, note_missing_rows, probe_rows, probe_sample
from launcher.hardware.launch_env import LaunchEnv
from launcher.hardware.model import MAX_GPUS_PER_NODE, Hardware, limit_vram, make_hardware
from launcher.hardware.probe import probe_hardware
from launcher.hardware.user_overrides import (
    HardwareOverrides,
    apply_hardware_overrides,
    load_hardware_overrides,
    lookup_named_gpu,
)
from launcher.judges.registry import describe_missing_judge, resolve_judge_name
from launcher.judges.sandbox import describe_boundary
from launcher.manifest import LoadedManifest, Manifest, find_manifest, load_manifest
from launcher.plan import Plan, PlanOptions, make_plan
from launcher.plan.calibration import NO_CALIBRATION
from launcher.plan.context import DEFAULT_GUARDS
from launcher.plan.estimate.dataset_size import SAMPLE_TRAIN, RowEstimate, with_tokens_per_row
from launcher.plan.model import GuardPlan, ProfilePlan
from launcher.runs.calibration_store import load_calibration
from launcher.runs.oom_history import find_failure

MODELS_DIR_VARIABLE = "LAUNCHER_MODELS_DIR"
_PRICE_FIELDS = frozenset({"price_per_gpu_hour", "price_per_node_hour", "currency"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Settings of a run that its user requested by flags; stored as request.json."""

    expert: str
    overrides: Sequence[str] = ()
    base: str | None = None
    max_steps: int | None = None
    profile: Literal["auto", "full", "smoke"] = "auto"
    gpu: str | None = None
    vram_limit_mib: int | None = None  # per GPU: the plan and the run use at most this much
    gpus_per_node: int | None = None
    nodes: int = 1
    cpu_cores_per_node: int | None = None
    ram_gib_per_node: float | None = None
    strategy: Strategy | None = None
    price_per_gpu_hour: float | None = None
    price_per_node_hour: float | None = None
    currency: str = ""  # of the price
    tokens_per_row: int | None = None
    random_weights: bool = False
    save_errors: Literal["stop", "continue"] | None = None
    max_nonfinite_steps: int | None = None
    hang_seconds: int | None = None
    profile_steps: tuple[int, int] | None = None
    cpu_ranks_per_node: int | None = None  # processes per node without a GPU, for rehearsals and tests
    calibrated: bool = True  # use what finished runs on this machine have measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A request, its manifest and its plan."""

    request: Request
    loaded: LoadedManifest
    plan: Plan


def plan_request(request: Request) -> PlannedRun:
    """Plan a run that needs less memory than similar runs that ran out of memory on this machine."""
    loaded = _load(request)
    hardware = limit_vram(_resolve_hardware(request), request.vram_limit_mib)
    options = _make_options(request, hardware, loaded)
    is_smoke = options.profile == "smoke"
    if loaded.manifest.base.chat_template is not None:
        options = _add_chat_template(options, loaded, loaded.manifest.base.chat_template)
    name = TINY_BASE_NAME if is_smoke else loaded.manifest.base.name
    base = load_shape(name, base_folders(loaded.folder))
    check_first_rows(loaded.manifest.training.dataset, loaded.folder)
    rows = _estimate_rows(request, loaded, is_smoke and options.uses_sample)
    plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=options)
    if request.tokens_per_row is None and (refined := _refine_rows(rows, plan, loaded)) != rows:
        rows = refined
        plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=options)
    failure = find_failure(plan)
    if failure is not None and options.calibration.runs:  # not all runs stayed below their estimates
        options = replace(options, calibration=replace(options.calibration, may_lower=False))
        plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=options)
    if failure is not None and plan.memory.total_bytes >= failure.predicted_bytes:
        lower = replace(options, oom_bytes=failure.predicted_bytes, oom_date=failure.when)
        plan = make_plan(loaded.manifest, hardware, base=base, rows=rows, options=lower)
    return PlannedRun(request=request, loaded=loaded, plan=_redact_plan(plan))


def _redact_plan(plan: Plan) -> Plan:
    """Redact secrets in texts of the plan that people read; the values that the training uses stay."""
    known = get_known_secrets()
    texts = {name: getattr(plan.wandb, name) for name in ("project", "entity", "group", "name", "tags", "notes")}
    wandb = {name: redact_tree(value, known=known) for name, value in texts.items()}
    wandb["tags"] = tuple(redact_text(tag, known) for tag in plan.wandb.tags)
    decisions = [
        decision.model_copy(update={name: redact_text(getattr(decision, name), known) for name in ("value", "reason")})
        for decision in plan.decisions
    ]
    return plan.model_copy(
        update={
            "wandb": plan.wandb.model_copy(update=wandb),
            "decisions": tuple(decisions),
            "notes": tuple(redact_text(note, known) for note in plan.notes),
        }
    )


def format_request(request: Request) -> str:
    """Return the text of request.json, with an absolute path of the manifest."""
    path = Path(request.expert)
    resolved = replace(request, expert=str(path.resolve())) if path.is_file() else request
    overrides = tuple(_redact_override(text) for text in resolved.overrides)
    return json.dumps(asdict(replace(resolved, overrides=overrides)), indent=2, sort_keys=True) + "\n"


def _redact_override(text: str) -> str:
    """Redact the value of KEY=VALUE if it is a secret; a run resumed from request.json then lacks it."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{redact_tree(value, key)}"


def load_request(file: Path) -> Request:
    """Load request.json."""
    return load_model(Request, file)


def merge_requests(stored: Request, changes: Request) -> Request:
    """Return a stored request, overridden by the values of `changes` that are not defaults."""
    default = Request(expert=stored.expert)
    changed = {
        field.name: getattr(changes, field.name)
        for field in fields(Request)
        if field.name != "expert" and getattr(changes, field.name) != getattr(default, field.name)
    }
    if changed.keys() & _PRICE_FIELDS:  # another price replaces the stored one, its unit and its currency
        changed |= {name: getattr(changes, name) for name in _PRICE_FIELDS}
    changed["overrides"] = (*stored.overrides, *changes.overrides)  # the last value of a key takes precedence
    return replace(stored, **changed)


def adapt_to_launch(request: Request, launched: LaunchEnv) -> Request:
    """Return the request with the nodes, ranks and strategy of accelerate's launch; CPU ranks if there is no GPU."""
    strategy = None if launched.strategy == "single" else launched.strategy
    if launched.num_ranks == 1 and strategy is None:
        return request
    on_cpu = launched.on_cpu or probe_hardware().gpu is None
    return replace(
        request,
        strategy=strategy,
        nodes=launched.num_nodes,
        gpus_per_node=None if on_cpu else launched.ranks_per_node,
        cpu_ranks_per_node=launched.ranks_per_node if on_cpu else None,
    )


def base_folders(manifest_folder: Path) -> tuple[Path, ...]:
    """Return the folders to search for base models: LAUNCHER_MODELS_DIR, the manifest's, models/, the current one."""
    configured = get_env_path(MODELS_DIR_VARIABLE)
    folders = () if configured is None else (configured,)
    return (*folders, manifest_folder, Path("models"), Path())


def _load(request: Request) -> LoadedManifest:
    overrides = list(request.overrides)
    if request.max_steps is not None:
        overrides.append(f"training.config.max_steps={request.max_steps}")
    loaded = load_manifest(find_manifest(request.expert), overrides)
    _check_no_secret(loaded)
    if request.base is None:
        return loaded
    return replace(loaded, manifest=_with_base(loaded.manifest, request.base))


def _check_no_secret(loaded: LoadedManifest) -> None:
    """Refuse secrets in values that the training uses: they appear in the plan and on the console."""
    used: dict[str, Any] = {
        "name": True,
        "base_models": {0: {"revision", "end_token", "chat_template"}},
        "training": {"dataset": True, "config": {"torch_compile_backend", "pretokenized_cache"}},
    }
    problems = tuple(
        Problem(where=key, what="contains a password or a token")
        for key, value in flatten(loaded.manifest.model_dump(mode="json", include=used)).items()
        if redact_tree(value) != value
    )
    if problems:
        raise ManifestError(
            f"{loaded.path}: manifest contains a secret",
            problems,
            "remove it, and use environment variables such as HF_TOKEN, or ~/.netrc",
        )


def _with_base(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with the named base model first; one that it does not list replaces its first one."""
    is_short = get_last_component(name) == name
    listed = [(get_last_component(entry.name) if is_short else entry.name).lower() for entry in manifest.base_models]
    is_listed = name.lower() in listed
    index = listed.index(name.lower()) if is_listed else 0
    entry = manifest.base_models[index]
    first = entry if is_listed else entry.model_copy(update={"name": name, "revision": None})
    others = manifest.base_models[:index] + manifest.base_models[index + 1 :]
    return manifest.model_copy(update={"base_models": (first, *others)})


def _resolve_hardware(request: Request) -> Hardware:
    """Return the hardware with the user's hardware.json applied; the command line takes precedence."""
    own = load_hardware_overrides()
    flags = ("cpu_cores_per_node", "ram_gib_per_node", "price_per_gpu_hour", "price_per_node_hour")
    keeps = tuple(name for name in flags if getattr(request, name) is not None)
    return apply_hardware_overrides(own, _lookup_hardware(request, own), keeps=keeps)


def _lookup_hardware(request: Request, own: HardwareOverrides) -> Hardware:
    if request.gpu is not None and request.cpu_ranks_per_node is not None:
        raise InputError("--cpu-ranks and --gpu cannot be used together: CPU ranks replace GPUs")
    if request.gpu is not None:
        return make_hardware(
            lookup_named_gpu(own, request.gpu),
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
    make_hardware(  # refuses impossible values with the same message for this machine and the catalogue
        here.gpu,
        gpus_per_node=request.gpus_per_node or min(here.gpus_per_node, MAX_GPUS_PER_NODE),
        nodes=request.nodes,
        cpu_cores_per_node=request.cpu_cores_per_node,
        ram_gib_per_node=request.ram_gib_per_node,
    )
    sizes = {name: getattr(request, name) for name in ("gpus_per_node", "cpu_cores_per_node", "ram_gib_per_node")}
    given = {name: size for name, size in sizes.items() if size is not None}
    return here.model_copy(update={"nodes": request.nodes, **given})


def _check_enough(request: Request, here: Hardware) -> None:
    hint = "--gpu NAME plans for a GPU of the catalogue"
    if request.nodes < 1 or (request.gpus_per_node is not None and request.gpus_per_node < 1):
        raise InputError("--gpus and --nodes must be at least 1")
    if here.gpu is None and (request.nodes > 1 or request.gpus_per_node is not None):
        raise InputError("--gpus and --nodes have no effect: this machine has no GPU", hint=hint)
    if here.gpu is None and request.strategy is not None:
        raise InputError(f"--strategy {request.strategy} has no effect: this machine has no GPU", hint=hint)
    if request.gpus_per_node is not None and request.gpus_per_node > here.gpus_per_node:
        raise InputError(f"--gpus {request.gpus_per_node}: this machine has only {here.gpus_per_node}", hint=hint)


def _make_options(request: Request, hardware: Hardware, loaded: LoadedManifest) -> PlanOptions:
    if request.profile == "auto":
        profile: Literal["full", "smoke"] = "full" if hardware.gpu is not None else "smoke"
        reason = "there is a GPU" if request.gpu is None else "planned for --gpu"
        reason = reason if profile == "full" else "no GPU here: a tiny base on sample data, same code path"
    else:
        profile, reason = request.profile, "requested by --profile"
    if profile == "smoke" and request.base is not None:
        raise InputError(
            f"--base {request.base} has no effect: the smoke profile uses a tiny base ({reason})",
            hint="--profile full uses it on this machine; --gpu NAME plans for a GPU of the catalogue",
        )
    steps = request.profile_steps
    is_priced = request.price_per_gpu_hour is not None or request.price_per_node_hour is not None
    return PlanOptions(
        profile=profile,
        profile_reason=reason,
        strategy=request.strategy,
        price_per_gpu_hour=request.price_per_gpu_hour if is_priced else hardware.price_per_gpu_hour,
        price_per_node_hour=request.price_per_node_hour,
        currency=request.currency if is_priced else hardware.currency,
        random_weights=request.random_weights,
        guards=_make_guards(request),
        profile_steps=None if steps is None else ProfilePlan(first_step=steps[0], last_step=steps[1]),
        calibration=load_calibration(hardware) if request.calibrated else NO_CALIBRATION,
        manifest_folder=_format_folder(loaded.folder),
        overridden_keys=loaded.overridden_keys,
        key_flags={"training.config.max_steps": "--max-steps"} if request.max_steps is not None else {},
        uses_sample=_uses_sample(loaded),
        judge_gaps=_describe_judge_gaps(hardware, loaded),
        input_notes=tuple(_note_inputs(loaded, profile)),
    )


def _add_chat_template(options: PlanOptions, loaded: LoadedManifest, name: str) -> PlanOptions:
    """Add the manifest's chat template, unless the smoke profile's tiny base cannot be trained with it."""
    source = load_chat_template(loaded.folder, name)
    if options.profile != "smoke":
        return replace(options, chat_template=source)
    from launcher.corpus.documents import make_template
    from launcher.corpus.tokenizer import load_tokenizer

    try:
        make_template("tokenizer", load_tokenizer(TINY_BASE_NAME, ()), own=source, file=name)
    except InputError as error:
        note = f"the smoke profile uses the template chatml, because the tiny base cannot be trained with {error.title}"
        return replace(options, input_notes=(*options.input_notes, note))
    return replace(options, chat_template=source)


def check_inputs(loaded: LoadedManifest) -> tuple[str, ...]:
    """Read the first rows, raising InputError if they do not match the manifest; return notes on what is missing."""
    resolve_judge_name(loaded.manifest)  # refuses unknown names
    if loaded.manifest.base.chat_template is not None:
        load_chat_template(loaded.folder, loaded.manifest.base.chat_template)
    notes = check_first_rows(loaded.manifest.training.dataset, loaded.folder, reads_values=True)
    return tuple(dict.fromkeys((*notes, *_note_inputs(loaded, "smoke"))))


def _note_inputs(loaded: LoadedManifest, profile: Profile) -> Iterator[str]:
    """Yield notes that the plan itself cannot make, such as on a missing judge or missing files of the base model."""
    yield from loaded.notes
    yield from note_missing_rows(loaded.manifest.training.dataset, loaded.folder)
    if note := describe_missing_judge(loaded.manifest):
        yield note
    base, folders = loaded.manifest.base.name, base_folders(loaded.folder)
    if profile == "smoke" and (note := describe_unusable_base(base, folders)):
        yield note
    yield from note_missing_files(base, folders)


def _describe_judge_gaps(hardware: Hardware, loaded: LoadedManifest) -> str:
    """Describe what hostile answers could do despite the sandbox; empty for other hardware or no built-in judge."""
    judge = resolve_judge_name(loaded.manifest)
    return describe_boundary() if hardware.source == "probe" and judge is not None and ":" not in judge else ""


def _uses_sample(loaded: LoadedManifest) -> bool:
    """Return whether the smoke profile uses sample/: not if it does not exist and the dataset is a local file."""
    dataset = loaded.manifest.training.dataset
    with suppress(OSError):  # reported when the rows are read
        is_here = dataset.type == "single" and bool(dataset.path) and (loaded.folder / (dataset.path or "")).is_file()
        return (loaded.folder / SAMPLE_TRAIN).is_file() or not is_here
    return True


def _make_guards(request: Request) -> GuardPlan:
    values = {name: getattr(request, name) for name in GuardPlan.model_fields}
    return DEFAULT_GUARDS.model_copy(update={name: value for name, value in values.items() if value is not None})


def _format_folder(folder: Path) -> str:
    """Return a folder's absolute path for the plan; raise InputError if it cannot be stored as UTF-8."""
    name = str(folder.resolve())
    try:
        name.encode()
    except UnicodeEncodeError:
        is_locale = sys.getfilesystemencoding() != "utf-8"
        hint = "set LC_ALL to C.UTF-8: Python decodes file names by the locale" if is_locale else "rename it"
        raise InputError(f"the manifest's folder {name!r} has a name that is not UTF-8", hint=hint) from None
    return name


def _estimate_rows(request: Request, loaded: LoadedManifest, uses_sample: bool) -> RowEstimate:
    rows = (probe_sample if uses_sample else probe_rows)(loaded.manifest.training.dataset, loaded.folder)
    return rows if request.tokens_per_row is None else with_tokens_per_row(rows, request.tokens_per_row)


def _refine_rows(rows: RowEstimate, plan: Plan, loaded: LoadedManifest) -> RowEstimate:
    """Return the estimate refined by counted tokens; unchanged if the packages that prepare data are not installed."""
    try:
        from launcher.corpus.row_count import refine_estimate
    except ModuleNotFoundError:
        return rows
    return refine_estimate(rows, plan, loaded.folder, base_folders(loaded.folder))
