"""Run all checks of `launcher doctor` and make one report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.analysis.doctor.disk_checks import check_disks, list_folders, probe_disks
from launcher.analysis.doctor.expert import check_expert, probe_expert
from launcher.analysis.doctor.findings import Family, Finding, Report, Reporter, make_report, make_skipped
from launcher.analysis.doctor.gpu_checks import GpuFacts, check_gpus, probe_gpus
from launcher.analysis.doctor.host import check_host, check_judges, probe_host
from launcher.analysis.doctor.loss_checks import check_loss
from launcher.analysis.doctor.memory_checks import check_memory
from launcher.analysis.doctor.packages import check_packages, probe_packages
from launcher.analysis.doctor.run_helpers import report_run, select_warm_steps
from launcher.analysis.doctor.run_status import RunState, check_status, probe_run
from launcher.analysis.doctor.speed_checks import check_speed
from launcher.analysis.doctor.wandb_checks import check_login
from launcher.core import metrics
from launcher.core.errors import DoesNotFitError, InputError, LauncherError, ManifestError
from launcher.core.installation import find_missing_for_training, format_install
from launcher.core.metrics import find_values
from launcher.core.run_paths import RunPaths
from launcher.hardware.user_overrides import load_hardware_overrides
from launcher.manifest.trust import list_code
from launcher.plan import Plan
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import compute_median, list_run_code


def run_doctor(
    request: Request | None,
    run_paths: RunPaths | None,
    runs_dir: Path,
    environment: Mapping[str, str],
    *,
    is_quick: bool,
    say: Callable[[str], None],
) -> Report:
    """Check this machine, the plan of an expert on it (`request`) and a run (`run_paths`).

    A quick check skips the tests of torch and packages, and the write speed of disks. `environment` is that of the
    process that imports torch. Wrong input (unknown expert, unreadable run) raises before any slow check.
    """
    run = probe_run(run_paths) if run_paths is not None else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        gpus = pool.submit(probe_gpus)
        host = pool.submit(probe_host)
        places = pool.submit(lambda: probe_disks(list_folders(runs_dir), measures_speed=not is_quick))
    failure = gpus.exception()
    gpu_facts = gpus.result() if failure is None else GpuFacts(error=f"the probe failed: {failure}")
    planned, refusal = _make_plan(request, gpu_facts)
    plan = planned.plan if planned is not None else run.record.plan if run is not None else None
    findings: list[Finding] = [] if refusal is None else [refusal]
    if run is not None:
        findings += check_run(run)
    if planned is not None:
        expert = planned
        findings += _run_check("expert", "plan", lambda: check_expert(probe_expert(expert, runs_dir)))
        findings += _report_code("expert", list_code(expert.loaded.manifest))
        findings += _check_installed(expert.plan)
    is_wsl = host.exception() is None and host.result().is_wsl
    findings += _run_check("GPU", "GPU", lambda: check_gpus(gpu_facts, is_wsl=is_wsl))
    findings += _run_check("machine", "machine", lambda: check_host(host.result(), len(gpu_facts.readings)))
    findings += _check_hardware_overrides()
    findings += _run_check("machine", "judges", check_judges)
    findings += _run_check("disks", "disks", lambda: check_disks(places.result()))
    findings += _run_check("W&B", "login", lambda: [check_login(os.environ, plan.wandb.mode if plan else None)])
    if is_quick:
        return make_report(findings)
    outcome = run.record.outcome if run is not None and run.is_trained else None
    if outcome is not None and not outcome.is_final:
        why = "this run is training, and a micro-test would slow it down"
        return make_report([*findings, make_skipped("packages", "micro-test", why)])
    say("testing torch, the GPU and installed packages (--quick skips this) ...")
    packages = _run_check("packages", "torch", lambda: check_packages(*probe_packages(environment), gpu_facts, plan))
    return make_report([*findings, *packages])


def _check_installed(plan: Plan) -> Iterator[Finding]:
    if missing := find_missing_for_training(plan.strategy):
        why, found = "training does not start without them", f"not installed: {', '.join(missing)}"
        yield Reporter("packages").problem("training", found, why, format_install("train"))


def _check_hardware_overrides() -> Iterator[Finding]:
    try:
        load_hardware_overrides()
    except InputError as error:
        found = "; ".join((error.title, *map(str, error.problems)))
        yield Reporter("machine").problem("hardware.json", found, "planning for this machine fails", error.hint)


def _run_check(family: Family, subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; if it raises an exception, return one finding that it could not run."""
    try:
        return list(check())
    except Exception as error:
        return [make_skipped(family, subject, f"{type(error).__name__}: {error}")]


def _make_plan(request: Request | None, gpus: GpuFacts) -> tuple[PlannedRun | None, Finding | None]:
    if request is None:
        return None, None
    try:
        return plan_request(request), None
    except DoesNotFitError as error:
        return None, _report_refusal(error, "no plan fits this machine")
    except ManifestError:
        raise
    except InputError as error:
        if not gpus.unusable:
            raise
        return None, _report_refusal(error, "no plan can be made for the GPUs of this machine")


def _report_refusal(error: LauncherError, why: str) -> Finding:
    found = "; ".join((error.title.splitlines()[0], *map(str, error.problems)))
    return Reporter("expert").problem("plan", found, why, error.hint)


def check_run(facts: RunState) -> list[Finding]:
    """Check a run directory; if nothing is wrong, summarize the run in one finding."""
    record = facts.record
    findings = [*check_status(facts), *check_speed(record), *check_memory(record), *check_loss(record)]
    if all(finding.status == "ok" for finding in findings) and record.steps:
        findings.insert(0, report_run.ok("run", f"healthy: {_summarize_run(facts)}"))
    return [*findings, *_report_code("run", list_run_code(record))]


def _report_code(family: Family, code: Iterable[str]) -> Iterator[Finding]:
    for one in code:
        why = "it has your permissions; it is executed only with --trust"
        yield Reporter(family).note("code", one, why, "read it before you pass --trust")


def _summarize_run(facts: RunState) -> str:
    record = facts.record
    losses = find_values(record.steps, metrics.TRAIN_LOSS)
    held_out = find_values(record.evaluations, metrics.EVAL_LOSS)
    seconds = compute_median(select_warm_steps(record), metrics.STEP_SECONDS)
    parts = [
        f"{len(record.steps):,} steps",
        *([f"{seconds:.2g} s each"] if seconds is not None else []),
        *([f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"] if losses else []),
        *([f"validation loss {min(held_out):.3f}"] if held_out else []),
    ]
    return ", ".join(parts)
