"""docs/gpus.md says what the planner decides."""

from __future__ import annotations

import pytest

from launcher import gpu_guide


def test_the_committed_guide_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", "")  # the guide sets one of its own
    assert gpu_guide.main(["--check"]) == 0


def test_an_old_guide_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_guide, "FILE", gpu_guide.ROOT / "README.md")
    monkeypatch.setattr(gpu_guide, "render_guide", lambda: "new")
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path))
    assert gpu_guide.main(["--check"]) == 1
    assert "python -m launcher.gpu_guide" in capsys.readouterr().err
