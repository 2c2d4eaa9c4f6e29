"""Code that manifests and run directories name: it runs only if the operator trusts them.

A manifest may name a program or a class that judges answers, or a base model with its own Python code. Manifests and
run directories are passed on and downloaded, so they are data until the operator says otherwise: by --trust, by
LAUNCHER_TRUST=1, or by the path of the manifest, the run or a folder around it in the file `trust` of the config
folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_paths import get_home
from launcher.manifest.model import Evaluation, Manifest

TRUST_VARIABLE = "LAUNCHER_TRUST"
_GRANTED = "1"


def list_code(manifest: Manifest) -> tuple[str, ...]:
    """Return descriptions of the code that a training or an evaluation with this manifest executes."""
    return (*list_judge_code(manifest), *list_remote_code(manifest.base.trust_remote_code, manifest.base.name))


def list_judge_code(manifest: Manifest) -> tuple[str, ...]:
    """Return a description of the judge's code that a manifest names; empty for a built-in judge."""
    evaluation = manifest.evaluation or Evaluation()
    if evaluation.judge_command:
        return (f"evaluation.judge_command: {shlex.join(evaluation.judge_command)}",)
    return (f"evaluation.judge: {evaluation.judge}",) if ":" in (evaluation.judge or "") else ()


def list_remote_code(is_requested: bool, base: str) -> tuple[str, ...]:
    """Return a description of a base model's Python code if the manifest asks to run it; empty otherwise."""
    return (f"trust_remote_code: the Python files of the base model {base}",) if is_requested else ()


def grant_trust() -> None:
    """Trust the manifest or run directory of this command, also in the processes that it starts."""
    os.environ[TRUST_VARIABLE] = _GRANTED


def is_trust_granted() -> bool:
    """Return whether the operator trusts the manifest or run directory of this command."""
    return os.environ.get(TRUST_VARIABLE) == _GRANTED


def get_trust_file() -> Path:
    """Return the path of the operator's list of trusted manifests, run directories and folders."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or get_home() / ".config") / "expert-launcher" / "trust"


def check_trust(
    code: Sequence[str], *sources: Path, what: str = "names code that is executed only with --trust"
) -> None:
    """Raise InputError if there is code and none of its sources is trusted; otherwise grant trust to this command."""
    if not code or is_trust_granted():
        return
    if any(map(_is_listed, sources)):
        grant_trust()
        return
    names = " or ".join(map(str, sources)) or "a manifest or run directory"
    line = f"; the line {sources[0].absolute()} in {get_trust_file()} allows it permanently" if sources else ""
    raise InputError(
        f"{names} {what}: {'; '.join(code)}",
        hint=f"check it first; --trust allows it for one command{line}",
    )


def allow_remote_code(is_requested: bool, base: str) -> bool:
    """Return whether the Python files of a base model are executed; raises InputError if that is not trusted."""
    check_trust(list_remote_code(is_requested, base))
    return is_requested


def _is_listed(source: Path) -> bool:
    try:
        lines = get_trust_file().read_text(encoding="utf-8").splitlines()
        resolved = source.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    for line in map(str.strip, lines):
        with suppress(OSError, RuntimeError, ValueError):
            if line.startswith("/") and resolved.is_relative_to(Path(line).resolve()):
                return True
    return False
