"""Sample outputs of nvidia-smi, and a fake nvidia-smi that prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.analysis.doctor.builders import install_program

MAIN = "index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current"
MORE = (
    "index,pci.bus_id,memory.used,utilization.gpu,temperature.gpu,pcie.link.width.current,pcie.link.width.max,"
    "ecc.errors.uncorrected.volatile.total"
)
SLOWED = "index,clocks_throttle_reasons.hw_thermal_slowdown,clocks_throttle_reasons.hw_power_brake_slowdown"

H200 = "0, GPU-7d1f2f0a-1111-2222-3333-444455556666, NVIDIA H200, 143771, 143156, 9.0, Disabled\n"
H200_MORE = "0, 00000000:4F:00.0, 1, 0, 31, 16, 16, 0\n"
WELL = "0, Not Active, Not Active\n"
HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.133.20             Driver Version: 570.133.20     CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
"""
NO_PROCESS = """\
==============NVSMI LOG==============

Driver Version                            : 570.133.20
CUDA Version                              : 12.8

Attached GPUs                             : 1
GPU 00000000:4F:00.0
    Processes                             : None
"""
ONE = """\
==============NVSMI LOG==============

Attached GPUs                             : 1
GPU 00000000:4F:00.0
    Processes
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : {pid}
            Type                          : C
            Name                          : /usr/bin/python3
            Used GPU Memory               : 40960 MiB
"""
SOMEBODY = (
    ONE
    + """\
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 999999991
            Type                          : G
            Name                          : [Not Found]
            Used GPU Memory               : Not available in WDDM driver model
"""
)
PAIR = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, Disabled
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, Disabled
"""
PAIR_MORE = "0, 00000000:19:00.0, 4, 0, 30, 16, 16, 0\n1, 00000000:3B:00.0, 4, 0, 31, 16, 16, 0\n"
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t{link}\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\t{link}\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
PEERS = (
    " \t\x1b[4mGPU0\tGPU1\x1b[0m\t\n GPU0\tX\t{peer}\t\n GPU1\t{peer}\tX\t\n\n"
    "Legend:\n\n  X    = Self\n  OK   = Status Ok\n"
)


def install_nvidia_smi(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    main: str = H200,
    more: str = H200_MORE,
    slowed: str = WELL,
    processes: str = NO_PROCESS,
    topology: str = "",
    peers: str = "",
    head: str = HEAD,
) -> None:
    """Install a fake nvidia-smi; a query without an output fails as in the real program, with exit code 2."""
    outputs = {
        "": head,
        f"--query-gpu={MAIN} --format=csv,noheader,nounits": main,
        f"--query-gpu={MORE} --format=csv,noheader,nounits": more,
        f"--query-gpu={SLOWED} --format=csv,noheader,nounits": slowed,
        "--query-gpu=driver_version --format=csv,noheader,nounits": "570.133.20\n" * len(main.splitlines()),
        "-q -d PIDS": processes,
        "topo -m": topology,
        "topo -p2p r": peers,
    }
    cases = "\n".join(f"  '{query}') cat <<'END'\n{output}END\n  ;;" for query, output in outputs.items() if output)
    unknown = "  *) echo 'Field \"x\" is not a valid field to query.'; exit 2 ;;"
    install_program(folder / "nvidia", "nvidia-smi", f'case "$*" in\n{cases}\n{unknown}\nesac', monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
