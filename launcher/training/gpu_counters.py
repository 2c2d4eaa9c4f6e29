"""What the driver knows of a GPU, read by a thread beside the training: NVML's utilisation, power, temperature."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

_SAMPLE_SECONDS = 0.5  # the driver's own average covers up to a second


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    utilization: float  # 0 to 1
    watts: float
    celsius: float


class GpuCounters:
    """`read` gives the mean since it was last asked, or the last sample where steps are shorter than the sampling."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._samples: list[GpuSample] = []
        self._last: GpuSample | None = None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str | None:
        """Why there is nothing to read; None: it is read."""
        if self._device.type != "cuda":
            return "no GPU"
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = _find_handle(pynvml, self._device)
            self._add(_take_sample(pynvml, handle))
        except ImportError:
            return "nvidia-ml-py is not installed (pip install 'expert-launcher[cuda]')"
        except Exception as error:  # NVML's errors have one class per code; a GPU that is partitioned has no counters
            return f"the driver does not tell: {error}"
        self._thread = threading.Thread(target=self._watch, args=(pynvml, handle), name="gpu-counters", daemon=True)
        self._thread.start()
        return None

    def stop(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join(2 * _SAMPLE_SECONDS)

    def read(self) -> GpuSample | None:
        with self._lock:
            samples, self._samples = self._samples, []
        if samples:
            self._last = GpuSample(
                utilization=sum(sample.utilization for sample in samples) / len(samples),
                watts=sum(sample.watts for sample in samples) / len(samples),
                celsius=max(sample.celsius for sample in samples),
            )
        return self._last

    def _watch(self, nvml: Any, handle: Any) -> None:
        while not self._ends.wait(_SAMPLE_SECONDS):
            try:
                self._add(_take_sample(nvml, handle))
            except Exception:  # the GPU fell off its bus, or the driver is being replaced: the training will tell
                return

    def _add(self, sample: GpuSample) -> None:
        with self._lock:
            self._samples.append(sample)


def _find_handle(nvml: Any, device: torch.device) -> Any:
    """By the GPU's own name: NVML counts all GPUs of the machine, torch those that it may see."""
    properties: Any = torch.cuda.get_device_properties(device)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")


def _take_sample(nvml: Any, handle: Any) -> GpuSample:
    return GpuSample(
        utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )
