"""A fake pynvml: the GPUs of a machine that a test describes. None: the driver does not report the value."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MIB = 1024**2


@dataclass
class FakeGpu:
    """A healthy, idle H200 unless a test says otherwise."""

    name: str = "NVIDIA H200"
    total_mib: int | None = 143771
    free_mib: int = 143156
    used_mib: int = 1
    capability: tuple[int, int] | None = (9, 0)
    uuid: str = "GPU-7d1f2f0a-1111-2222-3333-444455556666"
    mig: bool | None = False
    utilization: int | None = 0
    temperature: int | None = 31
    milliwatts: int | None = 75_000
    lanes: int | None = 16
    most_lanes: int | None = 16
    errors: int | None = 0
    slowdowns: int | None = 0
    processes: dict[int, int | None] = field(default_factory=dict)  # bytes by pid
    graphics: dict[int, int | None] = field(default_factory=dict)


@dataclass
class FakeNvml:
    """The module pynvml for tests; handles are indices."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    driver: str = "570.133.20"
    cuda: int | None = 12080
    failure: str = ""  # of nvmlInit
    hangs: bool = False
    ancestor: int | None = 50
    has_nvlink: bool = True
    peer_status: int | None = 0
    has_memory_v2: bool = True

    class NVMLError(Exception):
        """As pynvml raises it."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    NVML_P2P_STATUS_OK = 0

    def _report(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:  # noqa: N802
        if self.hangs:
            time.sleep(60)
        if self.failure:
            raise self.NVMLError(self.failure)

    def __getattr__(self, name: str) -> Any:
        """Return a constant, or the function of a query."""
        simple = {
            "nvmlMemory_v2": 2,
            "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
            "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlSystemGetDriverVersion": lambda: self.driver,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: self._report(self.cuda),
            "nvmlSystemGetProcessName": lambda _pid: self._report(None),
            "nvmlDeviceGetUUID": lambda at: self.gpus[at].uuid,
            "nvmlDeviceGetName": lambda at: self.gpus[at].name,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetMigMode": lambda at: [self._report(self.gpus[at].mig), False],
            "nvmlDeviceGetCudaComputeCapability": lambda at: self._report(self.gpus[at].capability),
            "nvmlDeviceGetUtilizationRates": lambda at: SimpleNamespace(gpu=self._report(self.gpus[at].utilization)),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda at: self._report(self.gpus[at].slowdowns),
            "nvmlDeviceGetTemperature": lambda at, _sensor: self._report(self.gpus[at].temperature),
            "nvmlDeviceGetPowerUsage": lambda at: self._report(self.gpus[at].milliwatts),
            "nvmlDeviceGetCurrPcieLinkWidth": lambda at: self._report(self.gpus[at].lanes),
            "nvmlDeviceGetMaxPcieLinkWidth": lambda at: self._report(self.gpus[at].most_lanes),
            "nvmlDeviceGetTotalEccErrors": lambda at, _kind, _counter: self._report(self.gpus[at].errors),
            "nvmlDeviceGetComputeRunningProcesses": self._processes,
            "nvmlDeviceGetGraphicsRunningProcesses": self._graphics,
            "nvmlDeviceGetTopologyCommonAncestor": lambda _one, _other: self._report(self.ancestor),
            "nvmlDeviceGetP2PStatus": self._p2p,
        }
        if name not in simple:
            raise AttributeError(name)
        return simple[name]

    def _memory(self, at: int, version: int | None = None) -> SimpleNamespace:
        gpu = self.gpus[at]
        self._report(None if version and not self.has_memory_v2 else gpu.total_mib)
        return SimpleNamespace(total=(gpu.total_mib or 0) * MIB, free=gpu.free_mib * MIB, used=gpu.used_mib * MIB)

    def _processes(self, at: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.gpus[at].processes.items()]

    def _graphics(self, at: int) -> list[SimpleNamespace]:
        processes = self._report(self.gpus[at].graphics or None)  # not supported without a desktop
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]

    def _p2p(self, _one: int, _other: int, index: int) -> int:
        if index == 2:  # NVLink
            return 0 if self.has_nvlink else 1
        return int(self._report(self.peer_status))


def install_nvml(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, **machine: Any) -> FakeNvml:
    """Replace pynvml in this process; without GPUs, by a machine with one H200."""
    fake = FakeNvml(gpus=list(gpus) or [FakeGpu()], **machine)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def write_nvml(folder: Path, fake: FakeNvml) -> str:
    """Write a module pynvml for child processes; return the value of their PYTHONPATH."""
    from tests.conftest import python_path

    folder.mkdir(exist_ok=True)
    lines = ("import sys", "from tests.fake_nvml import *", f"sys.modules[__name__] = {fake!r}")
    (folder / "pynvml.py").write_text("\n".join(lines))
    return f"{folder}{os.pathsep}{python_path()}"
