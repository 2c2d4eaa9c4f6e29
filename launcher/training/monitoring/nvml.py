"""Sample utilization, power, temperature and memory of a GPU with NVML in a background thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from launcher.hardware.probe import read_memory

_SAMPLE_SECONDS = 0.5  # the driver averages over up to a second


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """Counters of a GPU, at one moment or over several samples."""

    utilization: float  # 0 to 1
    watts: float
    celsius: float
    used_bytes: int | None = None  # by all processes


class NvmlSampler:
    """Samples the counters of one GPU in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._samples: list[GpuSample] = []
        self._last: GpuSample | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str | None:
        """Start sampling; return None, or the reason why there are no counters."""
        if self._device.type != "cuda":
            return "no GPU"
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = _get_handle(pynvml, self._device)
            self._add(_take_sample(pynvml, handle))
        except Exception as error:  # NVML has one class per error code; MIG partitions have no counters
            return f"NVML error: {error}"
        self._thread = threading.Thread(
            target=self._sample_loop, args=(pynvml, handle), name="gpu-counters", daemon=True
        )
        self._thread.start()
        return None

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * _SAMPLE_SECONDS)

    def read(self) -> GpuSample | None:
        """Return means, highest temperature and memory since the last read, else the last values; None at first."""
        with self._lock:
            samples, self._samples = self._samples, []
        if samples:
            used = [sample.used_bytes for sample in samples if sample.used_bytes is not None]
            self._last = GpuSample(
                utilization=sum(sample.utilization for sample in samples) / len(samples),
                watts=sum(sample.watts for sample in samples) / len(samples),
                celsius=max(sample.celsius for sample in samples),
                used_bytes=max(used, default=None),
            )
        return self._last

    def _sample_loop(self, nvml: Any, handle: Any) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            try:
                self._add(_take_sample(nvml, handle))
            except Exception:  # the GPU or driver is gone: the training itself will fail
                return

    def _add(self, sample: GpuSample) -> None:
        with self._lock:
            self._samples.append(sample)


def _get_handle(nvml: Any, device: torch.device) -> Any:
    """Return the GPU's handle by UUID: NVML indexes all GPUs of the machine, torch only the visible ones."""
    properties: Any = torch.cuda.get_device_properties(device)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")


def _take_sample(nvml: Any, handle: Any) -> GpuSample:
    memory = read_memory(nvml, handle)
    return GpuSample(
        utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        used_bytes=None if memory is None else memory.used,
    )
