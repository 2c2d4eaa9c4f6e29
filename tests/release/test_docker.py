"""The Dockerfile without a Docker daemon: rules, and its steps in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

FILE = ROOT / "Dockerfile"
KNOWN = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "ARG", "LABEL"}


# A user's own Python may be in a folder that another user cannot read.
PYTHON = "/usr/bin/python3"
CHECK_PYTHON = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"


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


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    pairs = (line.partition("==")[::2] for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_everything_in_the_image_is_pinned_within_its_bounds() -> None:
    """Image, tests and resumed runs have the same packages only if each of them is in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, pins = project["optional-dependencies"], read_pins()
    (named,) = re.findall(r"expert-launcher\[([\w,]+)\]", FILE.read_text())
    found = list(project["dependencies"])
    for extra in (*named.split(","), "data"):  # train includes data
        found += extras[extra]
    for requirement in map(Requirement, found):
        if canonicalize_name(requirement.name) != project["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


class Image:
    """The steps of the Dockerfile in a folder instead of a container."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"HOME": str(folder), "PATH": os.environ["PATH"]}
        self.environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}

    def place(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt|workspace)\b", rf"{self.folder}/\1", text)

    def run(self, *words: str, user: int | None = None) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, user=user
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def take(self, step: Step) -> None:
        """Perform one step. What needs root or gigabytes is only resolved: apt and pip say what they would install."""
        rest = self.place(step.rest)
        if step.word == "ENV":
            for assignment in shlex.split(rest):
                name, _, value = assignment.partition("=")
                self.environment[name] = value.replace("$PATH", self.environment["PATH"])
        elif step.word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                place = Path(target) / source if target.endswith("/") else Path(target)
                place.parent.mkdir(parents=True, exist_ok=True)
                is_folder = (ROOT / source).is_dir()
                (shutil.copytree if is_folder else shutil.copyfile)(ROOT / source, place)
        elif step.word == "RUN":
            for command in rest.split("&&"):
                self.execute(shlex.split(command))

    def execute(self, words: list[str]) -> None:
        if words[:2] == ["apt-get", "install"]:
            if list(Path("/var/lib/apt/lists").glob("*Packages*")):
                self.run("apt-get", "--simulate", *words[1:])
        elif words[:3] == ["python3", "-m", "venv"]:
            self.run(PYTHON, *words[1:])
        elif words[:2] == ["pip", "install"] and "[" in words[-1]:
            self.run(*words[:-1], words[-1].partition("[")[0])  # its extras are pinned, and too large
        elif words[:2] == ["pip", "install"]:
            self.run(*words, "--dry-run", "--no-deps")
        elif words[0] == "useradd":
            (self.folder / "etc").mkdir()
            for name in ("passwd", "group", "login.defs"):
                shutil.copyfile(f"/etc/{name}", self.folder / "etc" / name)
            self.run("useradd", "--prefix", str(self.folder), *words[1:])
        elif words[0] == "mkdir":
            self.run(*words)
        elif words[0] == "chown":
            self.run("chown", "10001", *words[2:])
        else:
            assert words[:2] == ["apt-get", "update"] or words[0] == "rm", f"not tested: {words}"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="creates files of another user: needs root")
def test_steps_build_an_image_that_a_plain_user_can_run() -> None:
    folder = Path(tempfile.mkdtemp(prefix="launcher-image-"))
    try:
        folder.chmod(0o755)
        image = Image(folder)
        if subprocess.run([PYTHON, "-c", CHECK_PYTHON], capture_output=True, check=False).returncode:
            pytest.skip(f"{PYTHON} is not Python 3.11 or newer with venv")
        probe = ["download", "--no-deps", "--dest", str(folder / "probe"), f"shtab=={read_pins()['shtab']}"]
        if subprocess.run([sys.executable, "-m", "pip", *probe], capture_output=True, check=False).returncode:
            pytest.skip("no package index")
        for step in read_steps(FILE.read_text()):
            image.take(step)
        workspace = folder / "workspace"
        image.run("launcher", "--version", user=10001)
        words = ("train", "neo4j", "--gpu", "h100", "--dry-run", "--run-id", "a", "--runs-dir", f"{workspace}/runs")
        assert "Dry run: nothing was started." in image.run("launcher", *words, user=10001)
        assert (workspace / "runs/a/plan.json").stat().st_uid == 10001
        installed = json.loads(image.run("pip", "list", "--format=json"))
        pins = read_pins() | {"expert-launcher": "", "pip": "", "setuptools": ""}
        wrong = [row for row in installed if pins[canonicalize_name(row["name"])] not in ("", row["version"])]
        assert wrong == []
    finally:
        shutil.rmtree(folder)
