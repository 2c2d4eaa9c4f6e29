"""Sample GPU utilization, power and temperature with NVML in a background thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

_SAMPLE_SECONDS = 0.5  # the driver averages over up to a second


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """Utilization, power and temperature of a GPU, at one moment or averaged."""

    utilization: float  # 0 to 1
    watts: float
    celsius: float


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
        """Return means and highest temperature since the last read, else the last values; None before the first."""
        with self._lock:
            samples, self._samples = self._samples, []
        if samples:
            self._last = GpuSample(
                utilization=sum(sample.utilization for sample in samples) / len(samples),
                watts=sum(sample.watts for sample in samples) / len(samples),
                celsius=max(sample.celsius for sample in samples),
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
    return GpuSample(
        utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )
