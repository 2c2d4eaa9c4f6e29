"""The ladder, climbed: a process a rung, each with a time limit; what was measured is kept, and not measured again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

import launcher
from launcher.bench.children import Child, ChildFailedError, ChildTooLongError, Lineup, ending
from launcher.bench.rungs import Climb, Setup, Stack
from launcher.bench.values import Said, Timing
from launcher.errors import ExitCode
from launcher.plan.model import Plan
from launcher.values import Frozen
from launcher.versions import find_package_versions

_MODULE = "launcher.training.bench.rung"
RECORD_FILE = "rungs.jsonl"
_CORES_FOR_TWO = 8
_CODE = ("training", "corpus", "memory", "bench")  # what a step runs, and what says how it is measured

# Of a specification: what changes from one look at the machine to the next, and changes no step.
_OF_PLAN: dict[str, bool | set[str]] = dict.fromkeys(("decisions", "notes", "memory", "speed", "ladder"), True)
_PASSING = {"plan": {**_OF_PLAN, "hardware": {"free_vram_mib", "ram_gib_per_node"}}}

Status = Literal["measured", "not here", "out of memory", "too long", "failed"]


class RungSpec(Frozen):
    """For the process that measures."""

    plan: Plan
    store: str
    setup: Setup | None
    warm_steps: int
    timed_steps: int
    seconds: float  # so long it may train; at least one warm step and two timed ones


class RungRecord(Frozen):
    """A line of the file that a ladder leaves behind."""

    key: str
    title: str
    stack: Stack
    status: Status
    reason: str = ""
    setup: Setup | None = None
    timing: Timing | None = None
    fingerprint: str = ""


class LadderEffort(Frozen):
    warm_steps: int
    timed_steps: int
    seconds: float
    limit_seconds: float


def climb_ladder(
    plan: Plan,
    store: Path,
    climbs: Sequence[Climb],
    effort: LadderEffort,
    folder: Path,
    tell: Callable[[str], None],
) -> tuple[RungRecord, ...]:
    """In order. A rung that fails is a record too: the others are worth measuring all the same."""
    file = folder / RECORD_FILE
    known, software = _read_known(file), _find_software()
    specs = {climb: _make_spec(plan, store, climb.setup, effort) for climb in climbs}
    fingerprints = {climb: _fingerprint(specs[climb], climb, software) for climb in climbs}
    wanted = {fingerprints[climb]: climb for climb in reversed(climbs) if not climb.missing}
    due = [climb for climb in climbs if wanted.get(fingerprints[climb]) is climb and fingerprints[climb] not in known]
    lineup = Lineup(
        _MODULE, folder / "logs", [(f"{climb.stack}-{climb.key}", specs[climb]) for climb in due], ahead=_has_room(plan)
    )
    records: list[RungRecord] = []
    with lineup:
        for place, climb in enumerate(climbs, 1):
            if climb.missing:
                records.append(_describe(climb, "not here", climb.missing))
                continue
            fingerprint, where = fingerprints[climb], f"{place} of {len(climbs)}, {climb.stack}: {climb.title}"
            found = known.get(fingerprint)
            if found is not None:
                tell(f"{where}: {format_outcome(found)} (kept)")
                records.append(found.model_copy(update={"key": climb.key, "title": climb.title, "stack": climb.stack}))
                continue
            record = _measure(climb, lineup.take(), effort, fingerprint)
            _append(file, record)
            tell(f"{where}: {format_outcome(record)}")
            known[fingerprint] = record
            records.append(record)
    return tuple(records)


def _has_room(plan: Plan) -> bool:
    """For a process that starts beside one that is measured: that one's work is on the GPU, and cores are left."""
    return plan.hardware.gpu is not None and plan.hardware.cpu_cores_per_node >= _CORES_FOR_TWO


def _append(file: Path, record: RungRecord) -> None:
    """A line that was cut short must not swallow this one."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    gap = "\n" if text and not text.endswith("\n") else ""
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{gap}{record.model_dump_json()}\n")


def _make_spec(plan: Plan, store: Path, setup: Setup | None, effort: LadderEffort) -> RungSpec:
    return RungSpec(
        plan=plan,
        store=str(store.resolve()),
        setup=setup,
        warm_steps=effort.warm_steps,
        timed_steps=effort.timed_steps,
        seconds=effort.seconds,
    )


def _fingerprint(spec: RungSpec, climb: Climb, software: str) -> str:
    """Of all that a time depends on: plan, rung, code, libraries. `before, again` is asked for a second time."""
    again = climb.key == "before" and climb.stack == "alone"
    return hashlib.sha256(f"{spec.model_dump_json(exclude=_PASSING)}\n{software}\n{again}".encode()).hexdigest()[:24]


def _find_software() -> str:
    """A ladder that is taken up again with other code, or other libraries, begins anew."""
    digest = hashlib.sha256("".join(f"{name} {found}\n" for name, found in find_package_versions().items()).encode())
    package = Path(launcher.__file__).parent
    for folder in _CODE:
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_known(file: Path) -> dict[str, RungRecord]:
    """Lines that cannot be read are those of another version, or one that was being written: measured again."""
    known: dict[str, RungRecord] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            record = RungRecord.model_validate_json(line)
        except ValidationError:
            continue
        if record.status in ("measured", "out of memory"):  # the others may go better this time
            known[record.fingerprint] = record
    return known


def _measure(climb: Climb, child: Child, effort: LadderEffort, fingerprint: str) -> RungRecord:
    status: Status
    try:
        with ending(child):
            child.tell("go")
            timing = Said.model_validate_json(child.read(effort.limit_seconds)).timing
    except ChildTooLongError:
        return _describe(climb, "too long", f"not done after {effort.limit_seconds:.0f} s", fingerprint)
    except ChildFailedError as error:
        status = "out of memory" if error.exit_code == ExitCode.DOES_NOT_FIT else "failed"
        return _describe(climb, status, error.reason, fingerprint)
    return _describe(climb, "measured", "", fingerprint).model_copy(update={"timing": timing})


def _describe(climb: Climb, status: Status, reason: str, fingerprint: str = "") -> RungRecord:
    return RungRecord(
        key=climb.key,
        title=climb.title,
        stack=climb.stack,
        status=status,
        reason=reason,
        setup=None if climb.missing else climb.setup,
        fingerprint=fingerprint,
    )


def format_outcome(record: RungRecord) -> str:
    if record.timing is not None:
        return f"{record.timing.tokens_per_second:,.0f} tokens/s"
    return f"{record.status}: {record.reason}"
