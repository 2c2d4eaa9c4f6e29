"""The memory grid without torch: its cases, their plans, rows that resume, a child that dies, the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launcher.bench import memory_grid
from launcher.bench.memory_cases import BASES, GRID, TINY, GridCase, select_cases
from launcher.bench.memory_grid import Progress, expect_seconds, find_pending, run_grid
from launcher.bench.memory_plans import plan_case
from launcher.bench.memory_rows import GridRow, append_row, load_rows, load_table, make_table, write_table
from launcher.bench.memory_summary import find_miscounted, is_held_out, make_summaries
from launcher.cli.main import main
from launcher.errors import DoesNotFitError, ExitCode, InputError
from launcher.memory import count_trainable, estimate_memory
from launcher.plan.recipes import estimate_plan, recipe_of
from launcher.shapes import load_shape
from launcher.units import GIB
from tests.conftest import ROOT

LARGE = [case for case in GRID if case.base != TINY]


def make_row(case: GridCase, tmp_path: Path, error: float = 0.0, **changes: Any) -> GridRow:
    """As if it had been measured on an H200, with an error of the prediction."""
    plan = plan_case(case, tmp_path, 6, gpu="h200").plan
    recipe = recipe_of(plan)
    predicted = plan.memory.allocated_bytes
    row = GridRow(
        case=case.name,
        model=case.base,
        recipe={**asdict(recipe), "target_modules": list(recipe.target_modules)},
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


def test_the_grid_covers_what_it_says() -> None:
    assert len(LARGE) >= 60
    assert len({case.name for case in GRID}) == len(GRID)
    assert {case.base for case in LARGE} == set(BASES)
    assert {case.kind for case in LARGE} == {"lora", "dora", "qlora", "qdora", "full"}
    assert {case.sequence_length for case in LARGE} == {512, 1024, 1536, 2048, 4096, 8192}
    assert {case.micro_batch_size for case in LARGE} >= {1, 2, 4, 8, 16}
    ways = {(case.kind, case.checkpointing, case.compiled) for case in LARGE}
    assert len(ways) >= 20, "of 24"
    assert {case.loss_kernel for case in LARGE} == {None, "chunked", "full_logits"}


def test_every_case_has_its_own_recipe_and_a_third_is_held_out(tmp_path: Path) -> None:
    rows = [make_row(case, tmp_path) for case in LARGE]
    recipes = {json.dumps([row.model, row.recipe], sort_keys=True) for row in rows}
    assert len(recipes) == len(rows)
    held_out = [row for row in rows if is_held_out(row)]
    assert 0.2 <= len(held_out) / len(rows) <= 0.45


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_plans_are_what_the_case_says(case: GridCase, tmp_path: Path) -> None:
    plan = plan_case(case, tmp_path, 6, gpu="h200").plan
    recipe = recipe_of(plan)
    assert (recipe.micro_batch_size, recipe.sequence_length) == (case.micro_batch_size, case.sequence_length)
    assert (recipe.checkpointing, recipe.compiled) == (case.checkpointing, case.compiled)
    over_four_bits = {"qlora": ("int4", "lora"), "qdora": ("int4", "dora")}
    assert (plan.quantization_kind, recipe.adapter) == over_four_bits.get(case.kind, ("none", case.kind))
    assert ("gate_proj" in recipe.target_modules) == (case.kind in ("lora", "dora", "qlora"))
    assert recipe.accumulates_gradients == (case.accumulation > 1 or case.graphed)
    assert recipe.optimizer == case.optimizer
    assert recipe.adapter_dropout == case.dropout
    assert case.loss_kernel in (None, plan.loss_kernel)
    assert (plan.strategy, plan.offload, plan.random_weights) == ("single", "none", True)
    assert plan.cuda_graph == case.graphed
    assert plan.memory.terms == estimate_plan(plan).terms
    assert plan.batch.num_slots == plan.batch.global_batch_size


def test_what_does_not_fit_is_refused_with_its_figures(tmp_path: Path) -> None:
    case = GridCase(base="8B", kind="full", micro_batch_size=16, sequence_length=8192)
    with pytest.raises(DoesNotFitError, match=r"GiB"):
        plan_case(case, tmp_path, 6, gpu="rtx4090")
    offloads = GridCase(base="1.7B", kind="full", micro_batch_size=1, sequence_length=512)
    with pytest.raises(DoesNotFitError, match="does not fit on one card"):
        plan_case(offloads, tmp_path, 6, gpu="rtx4090")


def test_selection() -> None:
    assert {case.base for case in select_cases(["4B", "8B"])} == {"4B", "8B"}
    assert all("qlora" in case.name for case in select_cases(list(BASES), "qlora"))
    compiled = select_cases(["0.6B"], "0.6B-*-compiled*")
    assert compiled
    assert all(case.compiled for case in compiled)
    with pytest.raises(InputError, match="no such base"):
        select_cases(["70B"])
    with pytest.raises(InputError, match="is called so"):
        select_cases(["0.6B"], "nonsense")


# ---------------------------------------------------------------------------------------------------------- the process

CASES = select_cases([TINY], "eager")[:4]
NAMES = [case.name for case in CASES]
RunCases = Callable[..., Progress]


@pytest.fixture
def run_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunCases:
    monkeypatch.setattr(memory_grid, "CHILD_MODULE", "tests.unit.bench.memory_child")

    def run(ways: dict[str, str] | None = None, minutes: float = 10.0, *, again: bool = False) -> Progress:
        monkeypatch.setenv("MEMORY_CHILD", ",".join(f"{name}={way}" for name, way in (ways or {}).items()))
        return run_grid(CASES, tmp_path / "rows.jsonl", minutes, lambda _text: None, again=again)

    return run


def test_all_cases_run_in_one_process_and_are_not_run_twice(run_cases: RunCases, tmp_path: Path) -> None:
    progress = run_cases()
    assert (progress.num_measured, progress.num_left, progress.failed) == (len(CASES), 0, ())
    rows = load_rows(tmp_path / "rows.jsonl")
    assert [row.case for row in rows] == NAMES
    assert len({row.versions["pid"] for row in rows}) == 1
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run_cases().num_measured == len(CASES)
    assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("way", "told", "num_processes"), [("die", "signal 9", 2), ("fail", "fail as it was told", 2), ("full", "full", 1)]
)
def test_a_case_that_fails_costs_no_other(
    run_cases: RunCases, tmp_path: Path, way: str, told: str, num_processes: int
) -> None:
    progress = run_cases({NAMES[1]: way})
    assert (progress.num_measured, progress.failed, progress.num_left) == (len(CASES) - 1, (NAMES[1],), 0)
    rows = {row.case: row for row in load_rows(tmp_path / "rows.jsonl")}
    assert told in (rows[NAMES[1]].error or "")
    others = {row.versions["pid"] for name, row in rows.items() if name != NAMES[1]}
    assert len(others) == num_processes
    assert run_cases().failed == (NAMES[1],), "it is not tried again by itself"
    assert run_cases(again=True).failed == ()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(CASES) + 1


def test_a_case_that_hangs_is_ended(run_cases: RunCases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grid, "_limit_seconds", lambda *_: 4.0)
    progress = run_cases({NAMES[0]: "hang"})
    assert progress.failed == (NAMES[0],)
    assert progress.num_measured == len(CASES) - 1
    assert "no answer after 4 s" in (load_rows(tmp_path / "rows.jsonl")[0].error or "")


def test_no_case_is_begun_that_would_not_end_in_time(run_cases: RunCases, tmp_path: Path) -> None:
    progress = run_cases(minutes=0.1)
    assert (progress.num_measured, progress.num_left) == (0, len(CASES))
    assert not (tmp_path / "rows.jsonl").exists()
    assert progress.next_seconds == pytest.approx(8.0)


def test_how_long_a_case_takes_is_known_from_those_like_it(tmp_path: Path) -> None:
    eager, compiled = (select_cases(["0.6B"], pattern)[0] for pattern in ("eager", "compiled"))
    row = make_row(eager, tmp_path, case_seconds=20.0)
    other = select_cases(["0.6B"], "eager")[1]
    assert expect_seconds(other, [row]) == pytest.approx(26.0)
    assert expect_seconds(compiled, [row]) == expect_seconds(compiled, [])
    assert expect_seconds(other, []) < expect_seconds(select_cases(["8B"], "eager")[0], [])


# --------------------------------------------------------------------------------------------------------- rows, table


def test_half_a_line_is_cut_away(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rows.jsonl"
    append_row(file, GridRow(case="a", model=TINY))
    with file.open("a") as out:
        out.write('{"case": "b", "mod')
    assert [row.case for row in load_rows(file)] == ["a"]
    append_row(file, GridRow(case="c", model=TINY, error="full"))
    assert [row.case for row in load_rows(file)] == ["a", "c"]
    assert find_pending([], load_rows(file)) == []
    file.write_text("nonsense\n")
    with pytest.raises(InputError, match="line 1 is no row"):
        load_rows(file)


def test_the_table_goes_to_disk_and_back(tmp_path: Path) -> None:
    cases = [*select_cases(["0.6B"])[:6], *select_cases(["8B"])[:2]]
    rows = [make_row(case, tmp_path, error=0.01 * number) for number, case in enumerate(cases)]
    rows.append(GridRow(case="8B-full", model="8B", left_out="it does not fit"))
    rows.append(GridRow(case="8B-dora", model="8B", error="out of memory"))
    file = tmp_path / "table.json"
    write_table(file, make_table(rows))
    table = load_table(file)
    assert (table.gpu, table.date, table.versions) == ("NVIDIA H200", "2026-11-15", {"torch": "2.13.0"})
    assert {row.case for row in table.records} == {case.name for case in cases}
    assert table.left_out == {"8B-full": "it does not fit"}
    assert table.shapes["8B"] == load_shape("Qwen/Qwen3-8B", ())
    assert find_miscounted(table) == ()
    text = file.read_text()
    write_table(file, table)
    assert file.read_text() == text
    assert all(len(line) < 3000 for line in text.splitlines())


def test_rows_of_two_machines_make_no_table(tmp_path: Path) -> None:
    first, second = (make_row(case, tmp_path) for case in LARGE[:2])
    with pytest.raises(InputError, match="different machines") as caught:
        make_table([first, second.model_copy(update={"gpu": "NVIDIA A100"})])
    assert "NVIDIA A100 and NVIDIA H200" in str(caught.value)
    with pytest.raises(InputError, match="nothing to collect"):
        make_table([GridRow(case="a", model=TINY, error="full")])


def test_the_summary_counts_what_it_says(tmp_path: Path) -> None:
    rows = [make_row(case, tmp_path, error=number / 1000) for number, case in enumerate(LARGE[:40], start=-20)]
    summaries = {(one.part, one.basis): one for one in make_summaries(make_table(rows))}
    everything = summaries["all", "as planned before it ran"]
    assert everything.num_cases == 40
    assert everything.median == pytest.approx(0.01, abs=1e-6)
    assert everything.within_95 == pytest.approx(0.019, abs=1e-6)
    assert (everything.worst_over.case, everything.worst_under.case) == (LARGE[39].name, LARGE[0].name)
    assert everything.worst_under.error == pytest.approx(-0.02, abs=1e-6)
    parts = [summaries[part, "by the estimator of now"].num_cases for part in ("fitted", "held out")]
    assert sum(parts) == 40
    assert parts[1] == sum(is_held_out(row) for row in rows)


def test_a_miscounted_adapter_is_told(tmp_path: Path) -> None:
    row = make_row(LARGE[0], tmp_path)
    (told,) = find_miscounted(make_table([row.model_copy(update={"num_trainable": 7})]))
    assert told.endswith(", 7 trained")
    assert told.startswith(LARGE[0].name)


def test_the_committed_table_is_read_and_its_rows_are_estimated() -> None:
    table = load_table(ROOT / "benchmarks/results/memory_h200.json")
    assert len(table.records) >= 60
    for row in table.records:
        assert estimate_memory(table.shapes[row.model], row.make_recipe()).total_bytes > GIB


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_list_predicts_for_a_gpu_of_the_catalogue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    append_row(tmp_path / "grid.jsonl", make_row(select_cases(["8B"])[0], tmp_path))
    words = ["--list", "--gpu", "rtx4090", "--bases", "8B", "--out", str(tmp_path / "grid.jsonl")]
    assert main(["bench", "memory", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "8B-full-1x2048" in told
    assert "left out:" in told
    assert "measured" in told
    assert "7 cases" in told


def test_collect_and_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, table = tmp_path / "grid.jsonl", tmp_path / "table.json"
    for case in LARGE[:30:3]:  # a full fine-tuning among them, which has no rank
        append_row(rows, make_row(case, tmp_path, error=0.005))
    assert main(["bench", "memory", "--collect", str(rows), "--into", str(table), "--table"]) == 0
    told = capsys.readouterr()
    assert "10 configurations in" in told.err
    assert "10 configurations on NVIDIA H200, 2026-11-15 (torch 2.13.0)" in told.out
    assert "0.50 %" in told.out
    assert main(["bench", "memory", "--table", str(rows)]) == 0
    assert "held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing is named to be done"),
        (["--collect", "rows.jsonl"], "belong together"),
        (["--out", "rows.jsonl", "--gpu", "h200"], "--gpu is for --list"),
        (["--out", "rows.jsonl"], "there is no GPU here"),
        (["--out", "rows.jsonl", "--bases", "70B"], "no such base"),
        (["--collect", "none.jsonl", "--into", "x.json"], "none.jsonl is no file"),
        (["--table", "none.json"], "cannot be read"),
        (["--out", "rows.jsonl", "--minutes", "0"], "is not a number of minutes above 0"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("ways", "minutes", "code"), [("", "9", 0), ("", "0.05", 75), ("die", "9", 4)])
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ways: str,
    minutes: str,
    code: int,
) -> None:
    monkeypatch.setattr(memory_grid, "CHILD_MODULE", "tests.unit.bench.memory_child")
    monkeypatch.setenv("MEMORY_CHILD", f"{NAMES[0]}={ways}" if ways else "")
    words = ["--out", str(tmp_path / "rows.jsonl"), "--bases", "tiny", "--only", "eager", "--minutes", minutes]
    assert main(["bench", "memory", *words]) == code
    said = capsys.readouterr().out
    assert {0: "8 of 8 cases are measured", 75: "8 are to do, the next takes about 8 s", 4: "1 failed"}[code] in said


def test_a_gpu_that_nobody_knows_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a list of cases that are all left out."""
    assert main(["bench", "memory", "--list", "--gpu", "nosuch"]) == ExitCode.WRONG_INPUT
    assert "unknown GPU" in capsys.readouterr().err
