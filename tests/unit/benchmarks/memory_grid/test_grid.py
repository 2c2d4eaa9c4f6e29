"""The memory grid without torch: cases, plans, resuming, workers that die, the table, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.memory_grid import grid as memory_grid
from benchmarks.memory_grid.__main__ import main
from benchmarks.memory_grid.cases import BASES, GRID, TINY, GridCase, select_cases
from benchmarks.memory_grid.grid import Progress, estimate_seconds, list_pending, run_grid
from benchmarks.memory_grid.plans import plan_case
from benchmarks.memory_grid.rows import GridRow, append_row, load_rows, load_table, make_table, write_table
from benchmarks.memory_grid.summary import is_held_out, list_miscounted, make_summaries
from launcher.base_models.shapes import load_shape
from launcher.core.errors import DoesNotFitError, ExitCode, InputError
from launcher.core.units import GIB
from launcher.plan import Plan
from launcher.plan.estimate.memory import estimate_memory
from launcher.plan.estimate.memory.recipe import count_trainable
from launcher.plan.estimator_inputs import estimate_plan_memory, recipe_from_plan
from tests.conftest import ROOT

pytestmark = pytest.mark.process

LARGE = [case for case in GRID if case.base != TINY]


@cache
def plan_on_h200(case: GridCase) -> Plan:
    with TemporaryDirectory() as folder:
        return plan_case(case, Path(folder), 6, gpu="h200").plan


def make_row(case: GridCase, error: float = 0.0, **changes: Any) -> GridRow:
    """A row as measured on an H200, with a given error of the estimate."""
    plan = plan_on_h200(case)
    recipe = recipe_from_plan(plan)
    predicted = plan.memory.allocated_bytes
    row = GridRow(
        case=case.name,
        model=case.base,
        recipe=json.loads(json.dumps(asdict(recipe))),
        num_trainable=count_trainable(plan.base, recipe.adapter, recipe.rank, recipe.target_modules),
        predicted_bytes=predicted,
        peak_allocated_bytes=round(predicted / (1 + error)),
        static_bytes=1,
        context_bytes=1,
        tokens_per_second=100.0,
        case_seconds=7.0,
        gpu="NVIDIA H200",
        versions={"torch": "2.13.0"},
        date="2026-11-15",
    )
    return row.model_copy(update=changes)


# ------------------------------------------------------------------------------------------------------------ the cases


def test_grid_covers_all_dimensions() -> None:
    assert len(LARGE) >= 60
    assert len({case.name for case in GRID}) == len(GRID)
    assert {case.base for case in LARGE} == set(BASES)
    assert {case.kind for case in LARGE} == {"lora", "dora", "qlora", "qdora", "full"}
    assert {case.sequence_length for case in LARGE} == {512, 1024, 1536, 2048, 4096, 8192}
    assert {case.micro_batch_size for case in LARGE} >= {1, 2, 4, 8, 16}
    combinations = {(case.kind, case.checkpointing, case.compiled) for case in LARGE}
    assert len(combinations) >= 20, "of 24"
    assert {case.loss_kernel for case in LARGE} == {None, "chunked", "full_logits"}


def test_recipes_are_distinct_and_a_third_is_held_out() -> None:
    rows = [make_row(case) for case in LARGE]
    recipes = {json.dumps([row.model, row.recipe], sort_keys=True) for row in rows}
    assert len(recipes) == len(rows)
    held_out = [row for row in rows if is_held_out(row)]
    assert 0.2 <= len(held_out) / len(rows) <= 0.45


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_plan_matches_the_case(case: GridCase) -> None:
    plan = plan_on_h200(case)
    recipe = recipe_from_plan(plan)
    assert (recipe.micro_batch_size, recipe.sequence_length) == (case.micro_batch_size, case.sequence_length)
    assert (recipe.checkpointing, recipe.compiled) == (case.checkpointing, case.compiled)
    quantized = {"qlora": ("int4", "lora"), "qdora": ("int4", "dora")}
    assert (plan.quantization_kind, recipe.adapter) == quantized.get(case.kind, ("none", case.kind))
    assert ("gate_proj" in recipe.target_modules) == (case.kind in ("lora", "dora", "qlora"))
    assert recipe.accumulates_gradients == (case.accumulation > 1 or case.graphed)
    assert recipe.optimizer == case.optimizer
    assert recipe.adapter_dropout == case.dropout
    assert case.loss_kernel in (None, plan.loss_kernel)
    assert (plan.strategy, plan.offload, plan.random_weights) == ("single", "none", True)
    assert plan.cuda_graph == case.graphed
    assert plan.memory.terms == estimate_plan_memory(plan).terms
    assert plan.batch.num_slots == plan.batch.global_batch_size


def test_case_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    case = GridCase(base="8B", kind="full", micro_batch_size=16, sequence_length=8192)
    with pytest.raises(DoesNotFitError, match=r"GiB"):
        plan_case(case, tmp_path, 6, gpu="rtx4090")
    offloads = GridCase(base="1.7B", kind="full", micro_batch_size=1, sequence_length=512)
    with pytest.raises(DoesNotFitError, match="does not fit on one GPU"):
        plan_case(offloads, tmp_path, 6, gpu="rtx4090")


def test_select_cases_filters_by_base_and_pattern() -> None:
    assert {case.base for case in select_cases(["4B", "8B"])} == {"4B", "8B"}
    assert all("qlora" in case.name for case in select_cases(list(BASES), "qlora"))
    compiled = select_cases(["0.6B"], "0.6B-*-compiled*")
    assert compiled
    assert all(case.compiled for case in compiled)
    with pytest.raises(InputError, match="no such base"):
        select_cases(["70B"])
    with pytest.raises(InputError, match="no matching case"):
        select_cases(["0.6B"], "nonsense")


# ---------------------------------------------------------------------------------------------------------- the process

CASES = select_cases([TINY], "eager")[:4]
NAMES = [case.name for case in CASES]
RunCases = Callable[..., Progress]


def set_actions(monkeypatch: pytest.MonkeyPatch, cases: Sequence[GridCase], actions: Mapping[str, str]) -> None:
    """Start the fake worker instead of the real one, with actions by case name."""
    monkeypatch.setattr(memory_grid, "WORKER_MODULE", "tests.unit.benchmarks.memory_grid.fake_worker")
    named = {case.model_dump_json(): (case.name, actions.get(case.name, "")) for case in cases}
    monkeypatch.setenv("FAKE_WORKER", json.dumps(named))


@pytest.fixture
def run_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunCases:
    def run(actions: dict[str, str] | None = None, minutes: float = 10.0, *, again: bool = False) -> Progress:
        set_actions(monkeypatch, CASES, actions or {})
        return run_grid(CASES, tmp_path / "rows.jsonl", minutes, lambda _text: None, again=again)

    return run


def test_all_cases_run_once_in_one_process(run_cases: RunCases, tmp_path: Path) -> None:
    progress = run_cases()
    assert (progress.num_measured, progress.num_left, progress.failed) == (len(CASES), 0, ())
    rows = load_rows(tmp_path / "rows.jsonl")
    assert [row.case for row in rows] == NAMES
    assert len({row.versions["pid"] for row in rows}) == 1
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run_cases().num_measured == len(CASES)
    assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("action", "message", "num_processes"),
    [("die", "was killed by", 2), ("fail", "fail on request", 2), ("full", "full", 1)],
)
def test_failed_case_does_not_affect_others(
    run_cases: RunCases, tmp_path: Path, action: str, message: str, num_processes: int
) -> None:
    progress = run_cases({NAMES[1]: action})
    assert (progress.num_measured, progress.failed, progress.num_left) == (len(CASES) - 1, (NAMES[1],), 0)
    rows = {row.case: row for row in load_rows(tmp_path / "rows.jsonl")}
    assert message in (rows[NAMES[1]].error or "")
    others = {row.versions["pid"] for name, row in rows.items() if name != NAMES[1]}
    assert len(others) == num_processes
    assert run_cases().failed == (NAMES[1],), "not retried without --again"
    assert run_cases(again=True).failed == ()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(CASES) + 1


def test_hanging_case_times_out(run_cases: RunCases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grid, "_limit_seconds", lambda *_: 2.0)
    progress = run_cases({NAMES[0]: "hang"})
    assert progress.failed == (NAMES[0],)
    assert progress.num_measured == len(CASES) - 1
    assert "timed out after 2 s" in (load_rows(tmp_path / "rows.jsonl")[0].error or "")


def test_no_case_is_started_that_would_not_finish_in_time(run_cases: RunCases, tmp_path: Path) -> None:
    progress = run_cases(minutes=0.1)
    assert (progress.num_measured, progress.num_left) == (0, len(CASES))
    assert not (tmp_path / "rows.jsonl").exists()
    assert progress.next_seconds == pytest.approx(8.0)


def test_duration_is_estimated_from_similar_cases() -> None:
    eager, compiled = (select_cases(["0.6B"], pattern)[0] for pattern in ("eager", "compiled"))
    row = make_row(eager, case_seconds=20.0)
    other = select_cases(["0.6B"], "eager")[1]
    assert estimate_seconds(other, [row]) == pytest.approx(26.0)
    assert estimate_seconds(compiled, [row]) == estimate_seconds(compiled, [])
    assert estimate_seconds(other, []) < estimate_seconds(select_cases(["8B"], "eager")[0], [])


# --------------------------------------------------------------------------------------------------------- rows, table


def test_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rows.jsonl"
    append_row(file, GridRow(case="a", model=TINY))
    with file.open("a") as out:
        out.write('{"case": "b", "mod')
    assert [row.case for row in load_rows(file)] == ["a"]
    append_row(file, GridRow(case="c", model=TINY, error="full"))
    assert [row.case for row in load_rows(file)] == ["a", "c"]
    assert list_pending([], load_rows(file)) == []
    file.write_text("nonsense\n")
    with pytest.raises(InputError, match="line 1 is not a row"):
        load_rows(file)


def test_table_round_trips_through_a_file(tmp_path: Path) -> None:
    cases = [*select_cases(["0.6B"])[:6], *select_cases(["8B"])[:2]]
    rows = [make_row(case, error=0.01 * number) for number, case in enumerate(cases)]
    rows.append(GridRow(case="8B-full", model="8B", left_out="it does not fit"))
    rows.append(GridRow(case="8B-dora", model="8B", error="out of memory"))
    file = tmp_path / "table.json"
    write_table(file, make_table(rows))
    table = load_table(file)
    assert (table.gpu, table.date, table.versions) == ("NVIDIA H200", "2026-11-15", {"torch": "2.13.0"})
    assert {row.case for row in table.records} == {case.name for case in cases}
    assert table.left_out == {"8B-full": "it does not fit"}
    assert table.shapes["8B"] == load_shape("Qwen/Qwen3-8B", ())
    assert list_miscounted(table) == ()
    text = file.read_text()
    write_table(file, table)
    assert file.read_text() == text
    assert all(len(line) < 3000 for line in text.splitlines())


def test_rows_from_two_machines_are_refused() -> None:
    first, second = (make_row(case) for case in LARGE[:2])
    with pytest.raises(InputError, match="different machines") as caught:
        make_table([first, second.model_copy(update={"gpu": "NVIDIA A100"})])
    assert "NVIDIA A100 and NVIDIA H200" in str(caught.value)
    with pytest.raises(InputError, match="nothing to collect"):
        make_table([GridRow(case="a", model=TINY, error="full")])


def test_summary_counts_cases_and_errors() -> None:
    rows = [make_row(case, error=number / 1000) for number, case in enumerate(LARGE[:40], start=-20)]
    summaries = {(summary.part, summary.basis): summary for summary in make_summaries(make_table(rows))}
    everything = summaries["all", "planned"]
    assert everything.num_cases == 40
    assert everything.median == pytest.approx(0.01, abs=1e-6)
    assert everything.within_95 == pytest.approx(0.019, abs=1e-6)
    assert (everything.worst_over.case, everything.worst_under.case) == (LARGE[39].name, LARGE[0].name)
    assert everything.worst_under.error == pytest.approx(-0.02, abs=1e-6)
    parts = [summaries[part, "current estimator"].num_cases for part in ("fitted", "held out")]
    assert sum(parts) == 40
    assert parts[1] == sum(is_held_out(row) for row in rows)


def test_wrong_number_of_trainable_parameters_is_listed() -> None:
    row = make_row(LARGE[0])
    (line,) = list_miscounted(make_table([row.model_copy(update={"num_trainable": 7})]))
    assert line.endswith(", 7 trained")
    assert line.startswith(LARGE[0].name)


def test_published_table_loads_and_its_rows_can_be_estimated() -> None:
    table = load_table(ROOT / "benchmarks/results/memory_h200.json")
    assert len(table.records) >= 60
    for row in table.records:
        assert estimate_memory(table.shapes[row.model], row.make_recipe()).total_bytes > GIB


# ----------------------------------------------------------------------------------------------------- the command line


def test_list_estimates_for_a_gpu_of_the_catalogue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    append_row(tmp_path / "grid.jsonl", make_row(select_cases(["8B"])[0]))
    words = ["--list", "--gpu", "rtx4090", "--bases", "8B", "--out", str(tmp_path / "grid.jsonl")]
    assert main(words) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "8B-full-1x2048" in output
    assert "skipped:" in output
    assert "measured" in output
    assert "11 cases" in output


def test_collect_combines_rows_and_table_summarizes_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, table = tmp_path / "grid.jsonl", tmp_path / "table.json"
    for case in LARGE[1:31:3]:  # a full fine-tuning among them, which has no rank
        append_row(rows, make_row(case, error=0.005))
    assert main(["--collect", str(rows), "--output", str(table), "--table"]) == 0
    output = capsys.readouterr()
    assert "10 configurations in" in output.err
    assert "10 configurations on NVIDIA H200, 2026-11-15 (torch 2.13.0)" in output.out
    assert "0.50 %" in output.out
    assert main(["--table", str(rows)]) == 0
    assert "held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no action given"),
        (["--collect", "rows.jsonl"], "requires --output"),
        (["--out", "rows.jsonl", "--gpu", "h200"], "--gpu requires --list"),
        (["--out", "rows.jsonl"], "no GPU on this machine"),
        (["--out", "rows.jsonl", "--bases", "70B"], "no such base"),
        (["--collect", "none.jsonl", "--output", "x.json"], "none.jsonl: no such file"),
        (["--table", "none.json"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("action", "minutes", "code"), [("", "9", 0), ("", "0.05", 75), ("die", "9", 4)])
def test_exit_code_follows_the_progress(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    action: str,
    minutes: str,
    code: int,
) -> None:
    set_actions(monkeypatch, select_cases([TINY], "eager"), {NAMES[0]: action})
    words = ["--out", str(tmp_path / "rows.jsonl"), "--bases", "tiny", "--only", "eager", "--minutes", minutes]
    assert main(words) == code
    output = capsys.readouterr().out
    assert {0: "9 of 9 cases measured", 75: "9 left, the next takes about 8 s", 4: "1 failed"}[code] in output


def test_unknown_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--gpu", "nosuch"]) == ExitCode.WRONG_INPUT
    assert "unknown GPU" in capsys.readouterr().err
