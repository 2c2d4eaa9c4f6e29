"""`launcher doctor` as a whole: looks at everything side by side, has it judged, and makes one report of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher import metrics
from launcher.doctor.card_health import judge_cards
from launcher.doctor.cards import CardFacts, probe_cards
from launcher.doctor.course import RunFacts, judge_course, probe_run
from launcher.doctor.expert import judge_expert, probe_expert
from launcher.doctor.findings import Family, Finding, Report, could_not_look, make_report
from launcher.doctor.folders import judge_places, list_places, probe_places
from launcher.doctor.host import judge_host, probe_host
from launcher.doctor.learning import judge_learning
from launcher.doctor.login import judge_login, probe_own_login
from launcher.doctor.pace import judge_pace
from launcher.doctor.packages import judge_packages, probe_packages_deeply
from launcher.doctor.pressure import judge_pressure
from launcher.doctor.series import judged_steps, median_of
from launcher.doctor.words import tell
from launcher.errors import DoesNotFitError, InputError, LauncherError, ManifestError
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.metrics import find_values
from launcher.own_hardware import load_own_hardware
from launcher.paths import RunPaths
from launcher.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What is to be looked at."""

    request: Request | None  # an expert, as it would be trained here
    run: RunPaths | None
    runs_dir: Path
    is_quick: bool  # without the micro-test, which imports torch
    environment: Mapping[str, str]  # of the process with torch


def examine(examination: Examination, say: Callable[[str], None]) -> Report:
    """Wrong input (no such expert, a broken plan) is raised before anything slow is done."""
    run = probe_run(examination.run) if examination.run is not None else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        cards = pool.submit(probe_cards)
        host = pool.submit(probe_host)
        places = pool.submit(lambda: probe_places(list_places(examination.runs_dir)))
        login = pool.submit(probe_own_login)
    failure = cards.exception()
    seen_cards = cards.result() if failure is None else CardFacts(trouble=f"nvidia-smi could not be asked: {failure}")
    planned, refusal = _plan(examination.request, seen_cards)
    plan = planned.plan if planned is not None else run.record.plan if run is not None else None
    findings: list[Finding] = [] if refusal is None else [refusal]
    if run is not None:
        findings += judge_run(run)
    if planned is not None:
        wanted = planned
        findings += _judged("expert", "plan", lambda: judge_expert(probe_expert(wanted, examination.runs_dir)))
    is_wsl = host.exception() is None and host.result().is_wsl
    findings += _judged("GPU", "GPU", lambda: judge_cards(seen_cards, is_wsl=is_wsl))
    findings += _judged("machine", "machine", lambda: judge_host(host.result(), len(seen_cards.readings)))
    findings += _judge_own_hardware()
    findings += _judged("disks", "disks", lambda: judge_places(places.result()))
    findings += _judged("W&B", "login", lambda: [judge_login(login.result(), plan.wandb.mode if plan else None)])
    findings += _examine_packages(examination, run, seen_cards, plan, say)
    return make_report(findings)


def _judge_own_hardware() -> Iterator[Finding]:
    try:
        load_own_hardware()
    except InputError as error:
        found = "; ".join((error.title, *map(str, error.problems)))
        why = "every plan on this machine is refused"
        yield Finding(
            family="machine",
            subject="hardware.json",
            status="problem",
            found=found,
            matters=why,
            next_step=error.hint,
        )


def _judged(family: Family, subject: str, judge: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A look that fails in a way nobody has thought of is told, and does not hide the others."""
    try:
        return list(judge())
    except Exception as error:
        return [could_not_look(family, subject, f"{type(error).__name__}: {error}")]


def _plan(request: Request | None, cards: CardFacts) -> tuple[PlannedRun | None, Finding | None]:
    if request is None:
        return None, None
    try:
        return plan_request(request), None
    except DoesNotFitError as error:
        return None, _refuse(error, "no plan fits this machine")
    except ManifestError:
        raise
    except InputError as error:
        if not cards.unusable:
            raise
        return None, _refuse(error, "the GPUs of this machine cannot be planned for")


def _refuse(error: LauncherError, why: str) -> Finding:
    found = "; ".join((error.title.splitlines()[0], *map(str, error.problems)))
    return Finding(family="expert", subject="plan", status="problem", found=found, matters=why, next_step=error.hint)


def judge_run(facts: RunFacts) -> list[Finding]:
    """All that a run directory tells; where nothing is wrong, a line that says so in figures."""
    record = facts.record
    findings = [*judge_course(facts), *judge_pace(record), *judge_pressure(record), *judge_learning(record)]
    if all(finding.status == "ok" for finding in findings) and record.steps:
        findings.insert(0, tell("run", "ok", f"healthy: {_praise(facts)}"))
    return findings


def _praise(facts: RunFacts) -> str:
    record = facts.record
    losses = find_values(record.steps, metrics.TRAIN_LOSS)
    held_out = find_values(record.evaluations, metrics.EVAL_LOSS)
    seconds = median_of(judged_steps(record), metrics.STEP_SECONDS)
    parts = [
        f"{len(record.steps):,} steps",
        *([f"{seconds:.2g} s each"] if seconds is not None else []),
        *([f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"] if losses else []),
        *([f"held-out loss {min(held_out):.3f}"] if held_out else []),
    ]
    return ", ".join(parts)


def _examine_packages(
    examination: Examination, run: RunFacts | None, cards: CardFacts, plan: Plan | None, say: Callable[[str], None]
) -> list[Finding]:
    if examination.is_quick:
        return []
    if run is not None and run.is_trained and run.record.outcome is not None and not run.record.outcome.is_final:
        why = "this run trains, and a micro-test beside it would slow it down"
        return [could_not_look("packages", "micro-test", why)]
    say("trying out torch, the GPU and the packages around them (--quick leaves this out) ...")
    return _judged(
        "packages", "torch", lambda: judge_packages(probe_packages_deeply(examination.environment), cards, plan)
    )
