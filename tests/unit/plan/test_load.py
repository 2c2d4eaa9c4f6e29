"""Loading plan.json: round trip, and one clear sentence for files that this version cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import __version__
from launcher.core.errors import ExitCode, InputError
from launcher.plan import load_plan
from launcher.plan.model import PLAN_FORMAT
from tests.unit.plan.conftest import plan_for


def test_a_written_plan_loads_unchanged(tmp_path: Path) -> None:
    plan = plan_for(gpu="rtx4090")
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json())
    assert load_plan(file) == plan


def test_a_plan_of_an_older_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    tree = plan_for(gpu="rtx4090").model_dump(mode="json")
    tree |= {"schema_version": 1, "launcher_version": "0.0.9", "fallbacks": tree.pop("oom_fallbacks")}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(InputError) as caught:
        load_plan(file)
    assert caught.value.exit_code == ExitCode.WRONG_INPUT
    assert caught.value.title == (
        f"{file} was written by launcher 0.0.9 (plan format 1), "
        f"which this version cannot read (launcher {__version__}, plan format {PLAN_FORMAT})"
    )
    assert "\n" not in caught.value.title
    assert "--adapter DIR" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "does not name the launcher version"),
        (b"{}", "does not name the launcher version"),
        (b'{"launcher_version": "0.1.0", "schema_version": 2}', "not a valid plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_plan(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_plan(tmp_path / "plan.json")
