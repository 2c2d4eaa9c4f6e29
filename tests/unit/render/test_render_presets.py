"""The files of accelerate_configs/ and ds_configs/ are the renderings of the presets, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.render.presets import find_stale, main, make_presets, preset_path, render_presets

EXAMPLE = "launcher/train.py --manifest experts/neo4j/manifest.json"


def test_the_committed_files_are_up_to_date(project_root: Path) -> None:
    assert find_stale(project_root) == ()


def test_writing_then_checking_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert main(["--check"]) == 0


def test_check_names_what_is_stale_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main([])
    changed, missing = tmp_path / "accelerate_configs/ddp_2gpu.yaml", tmp_path / "ds_configs/zero2.json"
    changed.write_text("num_processes: 3\n")
    missing.unlink()
    (tmp_path / "ds_configs" / "mine.json").write_text("{}")
    assert main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "accelerate_configs/ddp_2gpu.yaml: stale; run `make configs`",
        "ds_configs/mine.json: belongs to no preset; delete it",
        "ds_configs/zero2.json: stale; run `make configs`",
    ]
    assert changed.read_text() == "num_processes: 3\n"
    assert not missing.exists()


def test_every_size_and_engine_has_a_preset() -> None:
    names = {preset.name for preset in make_presets()}
    assert len(names) == len(make_presets())
    assert {"cpu", "single_gpu", "ddp_2node_8gpu", "fsdp2_2node_8gpu", "zero3_2node_8gpu"} <= names
    assert {f"{stem}_{gpus}gpu" for stem in ("ddp", "fsdp2", "zero1", "zero2", "zero3") for gpus in (2, 4, 8)} <= names


def test_a_header_says_how_to_use_its_file() -> None:
    for preset in make_presets():
        header = [line for line in render_presets()[preset_path(preset)].splitlines() if line.startswith("#")]
        text = "\n".join(header)
        assert f"accelerate launch --config_file {preset_path(preset)} " in text
        assert EXAMPLE in text
        assert "make configs" in text
        assert ("--main_process_ip HOST" in text) == (preset.nodes > 1)


def test_presets_leave_the_batch_to_the_manifest() -> None:
    for path, text in render_presets().items():
        if path.endswith(".yaml"):
            config = yaml.safe_load(text)
            assert not [key for key in config if "accumulation" in key or "clipping" in key]
