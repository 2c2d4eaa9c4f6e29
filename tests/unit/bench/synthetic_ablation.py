"""An ablation with made-up speeds, built without starting a process."""

from __future__ import annotations

from launcher.bench.ablation import StageRecord
from launcher.bench.ablation_report import Ablation, list_notes
from launcher.bench.ablation_stages import BASELINE, LoopConfig, Mode
from launcher.bench.worker import Timing


def make_record(key: str, mode: Mode, speed: int, config: LoopConfig | None = BASELINE, note: str = "") -> StageRecord:
    """One step of three takes twice as long; the median does not show it."""
    timing = Timing(
        seconds=(1.0, 2.0, 1.0), tokens=(speed, speed, speed), mfu=0.25, peak_gib=3.21, utilization=0.9, note=note
    )
    title = "baseline, again" if (key, mode) == ("baseline", "alone") else f"stage {key}"
    return StageRecord(key=key, title=title, mode=mode, status="measured", config=config, timing=timing)


def make_synthetic_ablation(*more_notes: str, last_baseline: int = 100) -> Ablation:
    tf32 = {"key": "tf32", "title": "FP32 -> TF32", "status": "unavailable", "reason": "no <GPU> & more"}
    records = (
        make_record("baseline", "cumulative", 100),
        make_record("packing", "cumulative", 250),
        StageRecord.model_validate({**tf32, "mode": "cumulative"}),
        StageRecord(key="loss", title="stage loss", mode="cumulative", status="out of memory", reason="3 GiB more"),
        make_record("launcher", "cumulative", 400, config=None),
        make_record("packing", "alone", 80, note="micro-batch 4: 8 did not fit"),
        StageRecord.model_validate({**tf32, "mode": "alone"}),
        make_record("loss", "alone", 130),
        make_record("baseline", "alone", last_baseline),
    )
    return Ablation(
        expert="neo4j",
        base="launcher/tiny",
        hardware="2 CPU cores",
        on_gpu=False,
        sequences_per_step=8,
        sequence_length=512,
        warmup_steps=1,
        timed_steps=3,
        records=records,
        notes=(*more_notes, *list_notes(records)),
    )
