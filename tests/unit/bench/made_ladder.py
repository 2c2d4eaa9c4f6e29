"""A ladder with made-up speeds: no process is started for it."""

from __future__ import annotations

from launcher.bench.ladder import RungRecord
from launcher.bench.ladder_report import Ladder
from launcher.bench.rungs import BEFORE, Setup, Stack
from launcher.bench.values import Timing


def make_record(key: str, stack: Stack, speed: int, setup: Setup | None = BEFORE, note: str = "") -> RungRecord:
    timing = Timing(
        seconds=(1.0, 2.0, 1.0), tokens=(speed, speed, speed), mfu=0.25, peak_gib=3.21, utilization=0.9, note=note
    )
    title = "before, again" if (key, stack) == ("before", "alone") else f"the rung {key}"
    return RungRecord(key=key, title=title, stack=stack, status="measured", setup=setup, timing=timing)


def make_made_ladder(*more_notes: str, again: int = 100) -> Ladder:
    from launcher.bench.ladder_report import find_notes

    records = (
        make_record("before", "cumulative", 100),
        make_record("packing", "cumulative", 250),
        RungRecord(key="tf32", title="FP32 -> TF32", stack="cumulative", status="not here", reason="no <GPU> & more"),
        RungRecord(key="loss", title="the rung loss", stack="cumulative", status="out of memory", reason="3 GiB more"),
        make_record("launcher", "cumulative", 400, setup=None),
        make_record("packing", "alone", 80, note="micro-batch 4: 8 did not fit"),
        RungRecord(key="tf32", title="FP32 -> TF32", stack="alone", status="not here", reason="no <GPU> & more"),
        make_record("loss", "alone", 130),
        make_record("before", "alone", again),
    )
    return Ladder(
        expert="neo4j",
        base="launcher/tiny",
        hardware="2 CPU cores",
        on_gpu=False,
        sequences_per_step=8,
        sequence_length=512,
        warm_steps=1,
        timed_steps=3,
        records=records,
        notes=(*more_notes, *find_notes(records)),
    )
