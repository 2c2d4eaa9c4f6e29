"""Arguments and environment of `accelerate launch`, and the rendezvous of its processes; also as text for a shell.

The environment holds only what this plan needs on top of the user's own; nothing is read from the process, so no secret
can end up in a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.core.errors import InputError, Problem
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.spec import LaunchSpec, make_launch_spec

ACCELERATE_LAUNCH = ("accelerate", "launch")
TRAIN_SCRIPT = "launcher/train.py"
TEE_BOTH_STREAMS = "3"  # torch's code for stdout and stderr, to the console and to a file per rank


class Verbatim(str):
    """A word of a command that is already shell text, such as "$port" with its quotes; written unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Address of node 0 and the join timeout. On a single node only `port` and `max_restarts` are used."""

    host: str
    port: int | Verbatim
    backend: Literal["static", "c10d"] = "static"
    max_restarts: int = 0
    join_timeout_seconds: int = 300  # torch waits 900 (static) or 600 (c10d)
    is_host: bool | None = None  # c10d on one machine: whether this agent is the host

    def format_conf(self) -> str:
        """Return the value of --rdzv_conf. The key of the timeout differs by backend; torch ignores the wrong one."""
        word = "timeout" if self.backend == "static" else "join_timeout"
        conf = f"{word}={self.join_timeout_seconds}"
        return conf if self.is_host is None else f"{conf},is_host={int(self.is_host)}"


# A single node: accelerate chooses a free port if it is 0.
ANY_FREE_PORT = Rendezvous(host="localhost", port=0)


def check_rendezvous(spec: LaunchSpec, rendezvous: Rendezvous, machine_rank: int | Verbatim | None) -> None:
    """Raise InputError if the rendezvous or the node rank is invalid for this number of nodes."""
    many_nodes = spec.num_nodes > 1
    rules = (
        (many_nodes and rendezvous.port == 0, "rendezvous", "several nodes need a fixed port, not 0"),
        (
            many_nodes and rendezvous.backend == "static" and rendezvous.max_restarts > 0,
            "max_restarts",
            "nodes do not restart together under a static rendezvous; use c10d",
        ),
        (
            not many_nodes and rendezvous.backend == "c10d",
            "rendezvous",
            "the c10d backend is for several nodes; use static on a single one",
        ),
        (
            isinstance(machine_rank, int) and not 0 <= machine_rank < spec.num_nodes,
            "node rank",
            f"{machine_rank} is not one of 0 to {spec.num_nodes - 1}",
        ),
    )
    problems = tuple(Problem(where=where, what=what) for broken, where, what in rules if broken)
    if problems:
        raise InputError("invalid rendezvous", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line and the environment variables it needs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def render_command(
    plan: Plan,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    machine_rank: int | Verbatim | None = 0,
    script: str = TRAIN_SCRIPT,
    script_args: Sequence[str] = (),
    accelerate: Sequence[str] = ACCELERATE_LAUNCH,
) -> Command:
    """Return the launch command of a node. Several nodes need a rendezvous; a machine_rank of None omits the flag."""
    spec = make_launch_spec(plan)
    if rendezvous is None and spec.num_nodes > 1:
        problem = Problem(where="rendezvous", what=f"{spec.num_nodes} nodes need the address where node 0 listens")
        raise InputError("the nodes have no rendezvous", (problem,), "give --rendezvous HOST:PORT")
    rendezvous = rendezvous or ANY_FREE_PORT
    check_rendezvous(spec, rendezvous, machine_rank)
    argv = (
        *accelerate,
        *("--config_file", str(paths.accelerate)),
        *make_agent_flags(spec, paths, rendezvous, machine_rank),
        *(script, "--plan", str(paths.plan), *script_args),
    )
    return Command(argv=argv, environment=make_environment(plan, spec, paths, rendezvous))


def make_agent_flags(
    spec: LaunchSpec, paths: RunPaths, rendezvous: Rendezvous, machine_rank: int | Verbatim | None
) -> tuple[str, ...]:
    """Return the flags of torch's elastic agent, which accelerate's config file cannot set; none for one process."""
    if not spec.has_agent:
        return ()
    flags = ["--main_process_port", as_word(rendezvous.port), "--tee", TEE_BOTH_STREAMS, "--log_dir", str(paths.logs)]
    if rendezvous.max_restarts:
        flags += ["--max_restarts", str(rendezvous.max_restarts)]
    if spec.num_nodes > 1:
        flags += ["--main_process_ip", rendezvous.host]
        flags += [] if machine_rank is None else ["--machine_rank", as_word(machine_rank)]
        flags += ["--rdzv_backend", rendezvous.backend, "--rdzv_conf", rendezvous.format_conf()]
    return tuple(flags)


def as_word(number: int | Verbatim) -> str:
    """Return a number or shell expression as a command-line word."""
    return number if isinstance(number, Verbatim) else str(number)


def make_environment(plan: Plan, spec: LaunchSpec, paths: RunPaths, rendezvous: Rendezvous) -> dict[str, str]:
    """Return the environment variables of a node's processes."""
    # A rank's share of the cores, minus its data-loader workers.
    num_threads = max(1, plan.hardware.cpu_cores_per_node // spec.ranks_per_node - plan.loader.num_workers)
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",  # data is tokenized before training; forked loader workers would only warn
    }
    if spec.on_cpu and spec.strategy in ("single", "ddp"):
        environment |= {"ACCELERATE_USE_CPU": "1"}
    elif spec.on_cpu:
        # ACCELERATE_USE_CPU would silently turn FSDP and DeepSpeed into DDP. These two keep the engine, on CPU ranks.
        environment |= {"ACCELERATE_BYPASS_DEVICE_MAP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
        if spec.uses_deepspeed:
            environment["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed warns that it found no GPU
    else:
        # torch 2.9 and later read this name; the older PYTORCH_CUDA_ALLOC_CONF is read too, and warned about.
        environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if not spec.on_cpu and spec.num_processes > 1:
        # NCCL's flight recorder writes each rank's last collectives into the run's logs.
        environment |= {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{paths.logs}/nccl_trace_rank_",
            # 3: exit without aborting NCCL. The elastic agent sets 1, which destroys what the flight recorder reads.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
        if plan.hardware.gpu is not None and not plan.hardware.gpu.has_p2p:
            environment |= {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}
    if rendezvous.backend == "c10d":
        # Without the first, a restarted rank 0 waits forever for the store that died with it.
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_RDZV_ID": paths.run_id}
    return dict(sorted(environment.items()))


def format_command(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Format the command for a shell, over several lines."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return join_lines([*assignments, *format_words(argv)])


def format_words(argv: Sequence[str]) -> list[str]:
    """Return a command, quoted for a shell, as lines that keep a flag and its value together."""
    lines: list[list[str]] = []
    for word in argv:
        has_room = bool(lines) and len(lines[-1]) < 2 and not word.startswith("--")
        if has_room:
            lines[-1].append(word)
        else:
            lines.append([word])
    return [" ".join(quote(word) for word in line) for line in lines]


def quote(word: str) -> str:
    """Quote a word for a shell, except shell expressions."""
    return word if isinstance(word, Verbatim) else shlex.quote(word)


def join_lines(lines: Sequence[str]) -> str:
    """Join lines with shell line continuations."""
    return " \\\n  ".join(lines) + "\n"
