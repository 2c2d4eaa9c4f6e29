"""The sandbox of judges: what a hostile process inside it tries, and what it gets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.core.worker import run_command
from launcher.judges import sandbox
from launcher.judges.sandbox import describe_boundary, make_sandboxed_command, probe_boundary
from launcher.judges.sandbox_start import make_filter
from launcher.judges.worker import LimitedWorker, make_module_worker

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="namespaces and seccomp")]

# Each attack is a name and an expression; it succeeded unless it raised OSError. `libc.syscall` raises through `call`.
ATTACKS = r"""
import ctypes, json, os, resource, signal, socket, sys
facts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def call(*a):
    if libc.syscall(*a) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def start(run):
    if (pid := run()) == 0:
        os._exit(0)
def token(path):
    if b"MARKED" in open(path, "rb").read():
        return
    raise OSError("no token")
parent, target, owned = facts["parent"], facts["target"], facts["owned"]
io = 425
attacks = {
    "connect": lambda: socket.create_connection(("127.0.0.1", facts["port"]), timeout=5),
    "connect to IPv6": lambda: socket.create_connection(("::1", facts["port6"]), timeout=5),
    "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", facts["port"])),
    "Unix socket": lambda: socket.socket(socket.AF_UNIX).connect(facts["unix"]),
    "abstract socket": lambda: socket.socket(socket.AF_UNIX).connect(facts["abstract"]),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "signal the parent": lambda: os.kill(parent, 0),
    "signal all": lambda: os.kill(-1, 0),
    "signal the group": lambda: os.kill(0, 0),
    "signal by a descriptor": lambda: signal.pidfd_send_signal(os.pidfd_open(parent), 0),
    "ptrace": lambda: call(101 if os.uname().machine == "x86_64" else 117, 16, parent, 0, 0),
    "limits of the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
    "priority of the parent": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    "cores of the parent": lambda: os.sched_setaffinity(parent, {0}),
    "environment of the parent": lambda: token(f"/proc/{parent}/environ"),
    "own environment": lambda: token("/proc/self/environ"),
    "memory of the parent": lambda: open(f"/proc/{parent}/mem", "rb").read(0) and 0,
    "create a file": lambda: open(target, "wb"),
    "change a file": lambda: open(owned, "r+b"),
    "append": lambda: open(owned, "ab"),
    "truncate": lambda: os.truncate(owned, 0),
    "remove": lambda: os.unlink(owned),
    "rename": lambda: os.rename(owned, target),
    "permissions": lambda: os.chmod(owned, 0o777),
    "times": lambda: os.utime(owned),
    "attributes": lambda: os.setxattr(owned, "user.x", b"1"),
    "folder": lambda: os.mkdir(target),
    "symlink": lambda: os.symlink("/", target),
    "pipe with a name": lambda: os.mkfifo(target),
    "fork": lambda: start(os.fork),
    "session": os.setsid,
    "io_uring": lambda: call(io, 8, bytes(120)),
    "shared memory": lambda: call(29 if os.uname().machine == "x86_64" else 194, 0, 4096, 0o1600),
}
passed = []
for name, attack in attacks.items():
    try:
        attack()
        passed.append(name)
    except OSError:
        pass
for line in open("/proc/self/status"):
    if line.startswith("CapEff:") and int(line.split()[1], 16):
        passed.append("capabilities")
print(json.dumps(passed))
"""


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[dict[str, object]]:
    owned = tmp_path / "owned"
    owned.write_text("mine")
    abstract = f"\0judge-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as plain,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        named.bind(str(tmp_path / "socket"))
        named.listen()
        unnamed.bind(abstract)
        unnamed.listen()
        yield {
            "port": plain.getsockname()[1],
            "port6": six.getsockname()[1],
            "unix": str(tmp_path / "socket"),
            "abstract": abstract,
            "parent": os.getpid(),
            "target": str(tmp_path / "target"),
            "owned": str(owned),
        }
    assert owned.read_text() == "mine"


def attack(command: Sequence[str], facts: dict[str, object]) -> set[str]:
    child = [sys.executable, "-I", "-c", ATTACKS, json.dumps(facts)]
    result = subprocess.run([*command, *child], capture_output=True, text=True, env={}, check=True, timeout=60)
    return set(json.loads(result.stdout))


def test_without_the_boundary_the_attacks_succeed(facts: dict[str, object]) -> None:
    """Otherwise the tests below would prove nothing."""
    with subprocess.Popen(["sleep", "60"]) as victim:
        passed = attack([], {**facts, "parent": victim.pid, "owned": f"{facts['owned']}-none"})
        victim.kill()
    assert {"connect", "Unix socket", "signal the parent", "priority of the parent", "create a file", "fork"} <= passed


def test_a_process_inside_the_sandbox_gets_nothing(facts: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "MARKED")
    assert attack(make_sandboxed_command([]), facts) == set()


def test_seccomp_and_landlock_hold_where_namespaces_are_forbidden(facts: dict[str, object]) -> None:
    """As in most containers."""
    left = attack(sandbox._make_command([], 0, namespaces=False), facts)
    assert left <= {"capabilities"}
    nested = make_sandboxed_command(sandbox._make_command([], 0, namespaces=True))
    assert attack(nested, facts) == set()


@pytest.mark.skipif(os.getuid() != 0 or not Path("/usr/bin/python3").exists(), reason="changes the user")
def test_the_boundary_holds_for_an_ordinary_user() -> None:
    code = "import sys; from launcher.judges.sandbox import probe_boundary; print(probe_boundary().gaps)"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-B", "-c", code]
    environment = {"PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
    if result.returncode != 0:
        pytest.skip("the system's Python cannot run the launcher")
    assert result.stdout == "()\n"


def test_the_probe_finds_a_whole_boundary_here_and_names_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_boundary() == ""
    gaps = (sandbox._TITLES["network"], sandbox._TITLES["processes"])
    open_boundary = sandbox.Boundary(gaps=gaps, namespaces=False)
    monkeypatch.setattr(sandbox, "probe_boundary", lambda: open_boundary)
    assert describe_boundary() == (
        "this platform does not confine judges: a hostile answer could open network connections and "
        "read the environment of other processes"
    )


def test_a_platform_without_a_boundary_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start script that only executes the command, like on a system without any of the mechanisms."""
    script = tmp_path / "start.py"
    script.write_text("import os, sys\nos.execv(sys.argv[3], sys.argv[3:])")
    monkeypatch.setattr(sandbox, "_SCRIPT", script)
    probe_boundary.cache_clear()
    assert len(probe_boundary().gaps) == 4
    probe_boundary.cache_clear()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_a_valid_program_on_both_machines(machine: str) -> None:
    program = make_filter(machine, 1234)
    assert program is not None
    assert 0 < len(program) // 8 < 4096
    assert make_filter("riscv64", 1) is None


def read_limits(worker: LimitedWorker) -> dict[str, str]:
    process = worker._get_ready()
    pid = process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    limits = Path(f"/proc/{pid}/limits").read_text()
    environment = Path(f"/proc/{pid}/environ").read_text()
    network = str(Path(f"/proc/{pid}/ns/net").readlink())
    process.close()
    return {"status": status, "limits": limits, "environment": environment, "network": network}


@pytest.mark.parametrize("kind", ["python", "script"])
def test_workers_start_inside_the_sandbox(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "MARKED")
    if kind == "python":
        worker = make_module_worker("launcher.judges.typescript.syntax", seconds=5, memory_mib=512)
    else:
        worker = make_module_worker("launcher.judges.cypher.engine_worker", seconds=10, memory_mib=2048)
    found = read_limits(worker)
    assert "Seccomp:\t2" in found["status"]
    assert "NoNewPrivs:\t1" in found["status"]
    assert "MARKED" not in found["environment"]
    assert "Max file size             0" in found["limits"]
    assert "Max core file size        0" in found["limits"]
    assert found["network"] != str(Path("/proc/self/ns/net").readlink()) or not probe_boundary().namespaces


def test_a_process_inside_the_sandbox_can_abort_and_use_threads() -> None:
    code = (
        "import threading; t = threading.Thread(target=print, args=('x',)); t.start(); t.join(); import os; os.abort()"
    )
    result = run_command(make_sandboxed_command([sys.executable, "-I", "-c", code]), timeout=20)
    assert result.returncode == -signal.SIGABRT
