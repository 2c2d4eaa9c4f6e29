"""The ablation as a table, Markdown, an HTML page and a plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.bench import ablation_report
from launcher.bench.ablation_report import (
    INSTALL_HINT,
    Ablation,
    list_missing,
    render_markdown,
    render_png,
    table_rows,
)
from launcher.cli.bench_ablation import _write
from tests.conftest import ROOT
from tests.unit.bench.synthetic_ablation import make_synthetic_ablation


def test_rows_compare_median_speeds_with_the_baseline() -> None:
    rows = {row[0]: row[1:] for row in table_rows(make_synthetic_ablation())}
    assert rows["stage baseline"][:4] == ("100", "1.00", "", "")
    assert rows["stage packing"] == ("250", "2.50", "80.0", "0.80", "25.0 %", "3.21 GiB", "90 %")
    assert rows["stage loss"] == ("out of memory", "-", "130", "1.30", "-", "-", "-")
    assert rows["stage launcher"][:2] == ("400", "4.00")
    assert "FP32 -> TF32" not in rows


def test_missing_stages_are_listed_with_their_reason() -> None:
    assert list_missing(make_synthetic_ablation()) == [
        "unavailable: FP32 -> TF32: no <GPU> & more",
        "stage loss (cumulative): out of memory: 3 GiB more",
    ]


def test_drift_of_the_machine_is_noted() -> None:
    assert make_synthetic_ablation(last_baseline=98).notes == ("stage packing (alone): micro-batch 4: 8 did not fit",)
    assert "the speed of the machine changed" in make_synthetic_ablation(last_baseline=90).notes[0]


def test_markdown_has_table_missing_stages_and_notes() -> None:
    text = render_markdown(make_synthetic_ablation("busy"))
    assert "| stage packing | 250 | 2.50 | 80.0 | 0.80 | 25.0 % | 3.21 GiB | 90 % |" in text
    assert "- unavailable: FP32 -\\> TF32: no &lt;GPU\\> & more" in text
    assert "- note: busy" in text


def test_plot_is_a_png() -> None:
    pytest.importorskip("matplotlib", reason="pip install 'expert-launcher[plot]'")
    assert render_png(make_synthetic_ablation()).startswith(b"\x89PNG")


def test_without_matplotlib_all_but_the_plot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation_report, "can_plot", lambda: False)
    names = _write(make_synthetic_ablation(), tmp_path)
    assert sorted(names) == sorted(file.name for file in tmp_path.iterdir())
    assert sorted(names) == ["ablation.json", "ablation.md"]
    assert capsys.readouterr().err == f"{INSTALL_HINT}\n"


def test_published_result_loads() -> None:
    ablation = Ablation.model_validate_json((ROOT / "benchmarks/results/ablation_h200.json").read_text())
    assert ablation.records[0].key == "baseline"
