"""A Slurm cluster of two virtual nodes on this machine: slurmctld, two slurmd, munge. Needs root and the packages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.harness import get_free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "munged")
_MUNGE_SOCKET = Path("/run/munge/munge.socket.2")


def find_missing() -> str | None:
    """Return why the cluster cannot be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (`make test-slurm` installs them)"
    return None if os.geteuid() == 0 else "slurmctld and slurmd are started by root here"


@dataclass
class Cluster:
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        _start_munge(self.folder)
        self.folder.joinpath("slurm.conf").write_text(_make_conf(self.folder))
        commands = (("slurmctld", "-D"), ("slurmd", "-D", "-N", "n1"), ("slurmd", "-D", "-N", "n2"))
        for number, command in enumerate(commands):
            with (self.folder / f"daemon-{number}.log").open("wb") as log:
                daemon = subprocess.Popen(
                    [*command, "-f", self.environment["SLURM_CONF"]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.environment},
                )
            self.processes.append(daemon)
        self.wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], 60)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Return the output of a Slurm command, or an empty string if it fails."""
        result = subprocess.run(
            command,
            env={**os.environ, **self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    def show_job(self, job: str) -> dict[str, str]:
        words = self.ask("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, happened: Callable[[], bool], seconds: float, logs: Sequence[Path] = ()) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise AssertionError(f"did not happen within {seconds:.0f} s\n{self.read_logs(logs)}")
            time.sleep(0.2)

    def read_logs(self, logs: Sequence[Path] = ()) -> str:
        """Return the last output of the daemons and of the given logs."""
        there = [log for log in (*sorted(self.folder.glob("daemon-*.log")), *logs) if log.exists()]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2500:]}" for log in there)


def _start_munge(folder: Path) -> None:
    if _MUNGE_SOCKET.exists() and subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    for place in ("/run/munge", "/var/log/munge"):
        Path(place).mkdir(parents=True, exist_ok=True)
        shutil.chown(place, "munge", "munge")
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        shutil.chown(key, "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True, cwd=folder, timeout=30)


def _make_conf(folder: Path) -> str:
    ports = [get_free_port() for _ in range(3)]
    host = socket.gethostname()
    state = folder / "state"
    state.mkdir(exist_ok=True)
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=4 RealMemory=1000"
        for number in (1, 2)
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1
SlurmdParameters=config_overrides
StateSaveLocation={state}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ReturnToService=2
JobRequeue=1
KillWait=30
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
