"""Job files as a user writes them, and what a platform does with one: copies files, sets variables, runs the script."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.cli.main import main
from launcher.core.run_paths import RunPaths
from tests.conftest import ROOT, python_path

IMAGE = "registry.example.com/team/expert-launcher:1.0"
# Each target and form of it, with the flags that select it.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "skypilot": ("--on", "skypilot", "--volume", "s3://experts"),
    "dstack": ("--on", "dstack", "--volume", "experts"),
    "trainjob": ("--on", "kubernetes", "--volume", "experts"),
    "jobset": ("--on", "kubernetes", "--volume", "experts", "--workload", "jobset"),
    "job": ("--on", "kubernetes", "--volume", "experts", "--workload", "job"),
}


def write_job(folder: Path, target: str, *flags: str, run_id: str = "first") -> Path:
    """Write a run directory with `launcher train --on … --dry-run` and return its job file."""
    words = ["train", "neo4j", "--dry-run", "--runs-dir", str(folder), "--run-id", run_id, "--image", IMAGE]
    assert main([*words, *TARGETS[target], *flags]) == 0
    paths = RunPaths(folder / run_id)
    (file,) = (path for path in (paths.skypilot, paths.dstack, paths.kubernetes) if path.exists())
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a platform gives to a node."""

    script: str
    files: Mapping[str, str | Path]  # by path on the node: text, or a local file or folder
    variables: tuple[Mapping[str, str], ...]  # of node 0, node 1
    head: str  # name of node 0, which does not resolve here


def read_node(target: str, file: Path) -> Node:
    documents = list(yaml.safe_load_all(file.read_text()))
    if target == "skypilot":
        (task,) = documents
        mounts = {remote: Path(local) for remote, local in task["file_mounts"].items() if isinstance(local, str)}
        variables = [
            {**task["envs"], "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n"}
            for rank in ("0", "1")
        ]
        return Node(script=task["run"], files=mounts, variables=tuple(variables), head="")
    if target == "dstack":
        (task,) = documents
        pairs = [mapping.rsplit(":", 1) for mapping in task["files"]]
        ours = {"DSTACK_MASTER_NODE_IP": "127.0.0.1", "DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "0"}
        return Node(
            script=task["commands"][0],
            files={remote: file.parent / local for local, remote in pairs},
            variables=tuple({**task["env"], **ours, "DSTACK_NODE_RANK": rank} for rank in ("0", "1")),
            head="",
        )
    return _read_kubernetes(target, documents)


def _read_kubernetes(target: str, documents: list[dict[str, Any]]) -> Node:
    by_kind = {document["kind"]: document for document in documents}
    if target == "job":
        job, head = by_kind["Job"]["spec"], "first-0.first"
    else:
        jobs = by_kind["JobSet"] if target == "jobset" else by_kind["TrainingRuntime"]["spec"]["template"]
        job, head = jobs["spec"]["replicatedJobs"][0]["template"]["spec"], "first-node-0-0.first"
    (container,) = job["template"]["spec"]["containers"]
    variables: dict[str, str] = {item["name"]: item["value"] for item in container["env"]}
    # As Kubeflow Trainer sets them. torchrun would read all of them; those that contradict our flags must not matter.
    torch = {"PET_NNODES": "7", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": head, "PET_MASTER_PORT": "29500"}
    ranks = [
        {**torch, "PET_NODE_RANK": rank} if target == "trainjob" else {"JOB_COMPLETION_INDEX": rank}
        for rank in ("0", "1")
    ]
    assert container["command"] == ["bash", "-c"]
    return Node(
        script=container["args"][0],
        files={f"/etc/launcher/{name}": text for name, text in by_kind["ConfigMap"]["data"].items()},
        variables=tuple(variables | rank for rank in ranks),
        head=head,
    )


@dataclass(kw_only=True)
class Loopback:
    """Two nodes of a platform on this machine: a folder for the volume, one for each node's files."""

    folder: Path
    target: str
    file: Path
    port: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Place the files as the platform does, and `launcher` on the PATH as the image does."""
        self.node = read_node(self.target, self.file)
        self.paths = RunPaths(self.folder / "volume/runs/first")
        (self.folder / "volume").mkdir(parents=True)
        for remote, content in self.node.files.items():
            path = Path(self.locate(remote))
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content)
            else:
                shutil.copytree(ROOT / content, path)
        (self.folder / "bin").mkdir()
        self.install(f'exec {sys.executable} -m launcher "$@"')

    def install(self, body: str) -> None:
        """Put a `launcher` on the PATH."""
        program = self.folder / "bin/launcher"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def locate(self, text: str) -> str:
        """Replace the nodes' paths and addresses by those of this machine."""
        places = {"/workspace": "volume", "/tmp/launcher": "project", "/etc/launcher": "files"}
        for remote, local in places.items():
            text = text.replace(remote, str(self.folder / local))
        text = text.replace("29500", str(self.port))
        return text.replace(self.node.head, "127.0.0.1") if self.node.head else text

    def start(self) -> list[subprocess.Popen[str]]:
        self.started = []
        for variables in self.node.variables:
            path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
            ours = {name: self.locate(value) for name, value in variables.items()}
            environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path(), "NO_COLOR": "1", **ours}
            process = subprocess.Popen(
                ["bash", "-c", self.locate(self.node.script)],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.started.append(process)
        return self.started

    def wait(self, seconds: float = 600) -> tuple[list[int], str]:
        """Wait for both nodes and return their exit codes and messages."""
        errors = [process.communicate(timeout=seconds)[1] for process in self.started]
        return [process.returncode for process in self.started], "\n".join(errors)

    def stop(self) -> None:
        """Send the signal that all platforms send before they take a node away."""
        for process in self.started:
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        for _ in range(2):
            for process in self.started:
                if process.poll() is None:
                    process.terminate()
            time.sleep(0.5)
        for process in self.started:
            if process.poll() is None:
                process.wait(timeout=60)
