"""Rule-based checks of the Dockerfile, which need no Docker daemon."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILE = ROOT / "Dockerfile"
KNOWN = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "ARG", "LABEL"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    word: str
    rest: str


def read_steps(text: str) -> list[Step]:
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Step(word=word, rest=rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n"))]


def find_faults(text: str) -> list[str]:
    steps = read_steps(text)
    faults = [f"unknown instruction {step.word}" for step in steps if step.word not in KNOWN]
    for step in steps:
        faults += {"FROM": lint_from, "RUN": lint_run, "COPY": lint_copy}.get(step.word, lint_nothing)(step.rest)
        if step.word in ("ENTRYPOINT", "CMD") and not step.rest.startswith("["):
            faults.append(f"{step.word} is not in JSON form: a shell would swallow signals")
        if step.word == "WORKDIR" and not step.rest.startswith("/"):
            faults.append("WORKDIR is not absolute")
    users = [step.rest for step in steps if step.word == "USER"]
    if not users or users[-1] in ("root", "0"):
        faults.append("runs as root")
    return faults


def lint_nothing(_: str) -> list[str]:
    return []


def lint_from(image: str) -> list[str]:
    return [] if re.search(r":[\w.-]+$", image) and not image.endswith(":latest") else [f"{image} is not pinned"]


def lint_run(command: str) -> list[str]:
    faults = []
    if subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode:
        faults.append(f"not a command of a shell: {command}")
    if "sudo " in command:
        faults.append("sudo")
    if "apt-get install" in command:
        wanted = ("apt-get update", "--yes", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
        faults += [f"apt-get install without {part}" for part in wanted if part not in command]
    for part in re.findall(r"pip install[^&;]*", command):
        faults += [f"pip install without {flag}" for flag in ("--no-cache-dir", "--constraint") if flag not in part]
    return faults


def lint_copy(rest: str) -> list[str]:
    *sources, target = shlex.split(rest)
    faults = [f"COPY of {name}, which is not there" for name in sources if not (ROOT / name).exists()]
    faults += [f"COPY of {name}, which .dockerignore leaves out" for name in sources if name not in sent_names()]
    if len(sources) > 1 and not target.endswith("/"):
        faults.append(f"COPY of several into {target}, which does not end in /")
    return faults


def sent_names() -> set[str]:
    """Return the names in the build context: .dockerignore excludes everything except the names after `!`."""
    lines = [line.strip() for line in (ROOT / ".dockerignore").read_text().split("\n")]
    assert "*" in lines
    return {line[1:] for line in lines if line.startswith("!")}


def test_dockerfile_has_no_errors() -> None:
    assert find_faults(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda", "is not pinned"),
        ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda:latest", "is not pinned"),
        ("USER trainer\n", "", "runs as root"),
        ('ENTRYPOINT ["launcher"]', "ENTRYPOINT launcher", "not in JSON form"),
        (" --no-install-recommends", "", "--no-install-recommends"),
        (" --no-cache-dir", "", "--no-cache-dir"),
        ("COPY launcher ", "COPY lancher ", "which is not there"),
        ("COPY launcher ", "COPY tests ", ".dockerignore leaves out"),
        ("WORKDIR /workspace", "WORKDIR workspace", "not absolute"),
        ("COPY experts", "ADD experts", "unknown instruction ADD"),
        ("mkdir /workspace &&", "mkdir /workspace && (", "not a command of a shell"),
    ],
)
def test_dockerfile_errors_are_found(old: str, new: str, fault: str) -> None:
    text = FILE.read_text()
    assert old in text
    assert any(fault in found for found in find_faults(text.replace(old, new, 1)))


def test_build_context_has_everything() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    needed = {Path(name).parts[0] for name in included} | {project["project"]["readme"], "launcher", "pyproject.toml"}
    assert needed - sent_names() == set()


def test_installed_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"expert-launcher\[([\w,]+)\]", FILE.read_text())
    assert set(named.split(",")) - set(extras) == set()


def test_packages_of_the_first_layer_are_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split("\n")}
    named = " ".join(re.findall(r"constraints\.txt ((?:[a-z]+ ?)+)", FILE.read_text())).split()
    assert named[0] == "torch"
    assert set(named) - pinned == set()


def test_image_starts_with_a_launcher_verb() -> None:
    steps = {step.word: step.rest for step in read_steps(FILE.read_text())}
    assert json.loads(steps["ENTRYPOINT"]) == ["launcher"]
    assert json.loads(steps["CMD"]) == ["doctor"]
