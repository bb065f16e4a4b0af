"""A thread in each rank that writes its events and, once a second, samples the use of the machine.

Of this process and its children: CPU in percent of one core, resident memory. Of a GPU: memory allocated and reserved
by torch; use, power and memory by the driver, where NVML is installed. The first rank of a machine also samples the
machine: each core, memory, disk and network.
"""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from meshfit.events import Events

SECONDS = 1.0


class Sampler:
    """Runs from ``start`` to ``stop``. Its failures do not reach the training."""

    def __init__(self, events: Events, device: torch.device, *, first: bool, seconds: float = SECONDS):
        self.events, self.seconds = events, seconds
        self._of: list[_Process | _Machine | _Gpu] = [_Process()]
        self._of += [_Machine()] if first else []
        self._of += [_Gpu(device)] if device.type == "cuda" else []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="meshfit-observe", daemon=True)

    def start(self) -> None:
        self.events.own_flushes = False
        self._thread.start()

    def stop(self) -> None:
        """After a last sample, so that short runs have one, too."""
        self._done.set()
        self._thread.join(timeout=5.0)
        self.events.own_flushes = True

    def _work(self) -> None:
        done, sampled = False, 0.0
        while not done:
            done = self._done.wait(self.seconds)
            now = time.perf_counter()
            if not done or now - sampled > self.seconds / 4:
                sampled = now
                with suppress(Exception):
                    self.events.sample(self.look())
            with suppress(OSError, ValueError):
                self.events.flush()

    def look(self) -> dict[str, Any]:
        return {name: value for each in self._of for name, value in each.look().items()}


class _Rates:
    """Counters as rates a second since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = time.perf_counter()

    def __call__(self, counts: dict[str, float]) -> dict[str, float]:
        now = time.perf_counter()
        passed, self._at = max(now - self._at, 1e-6), now
        rates = {n: round((c - self._last[n]) / passed, 3) for n, c in counts.items() if n in self._last}
        self._last = counts
        return rates


class _Process:
    def __init__(self) -> None:
        self.process, self._rate = psutil.Process(), _Rates()
        self.look()

    def look(self) -> dict[str, Any]:
        times = self.process.cpu_times()
        spent, rss = times.user + times.system, self.process.memory_info().rss
        workers = 0
        for pid in _children(self.process.pid):
            with suppress(psutil.Error):
                worker = psutil.Process(pid)
                spent += sum(worker.cpu_times()[:2])
                rss += worker.memory_info().rss
                workers += 1
        used = self._rate({"cpu": 100 * spent})
        return {**{name: max(0.0, round(rate, 1)) for name, rate in used.items()}, "rss": rss, "workers": workers}


def _children(pid: int) -> list[int]:
    """Processes that this one started, from /proc: psutil would look at every process, for milliseconds."""
    with suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class _Machine:
    def __init__(self) -> None:
        self._rate = _Rates()
        psutil.cpu_percent(percpu=True)
        self.look()

    def look(self) -> dict[str, Any]:
        counts: dict[str, float] = {}
        with suppress(Exception):  # a container may show no disks
            disk = psutil.disk_io_counters()
            if disk is not None:
                counts |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
        with suppress(Exception):
            net = psutil.net_io_counters()
            counts |= {"net_sent": net.bytes_sent, "net_received": net.bytes_recv}
        memory = psutil.virtual_memory()
        return {
            "cores": psutil.cpu_percent(percpu=True),
            "memory": memory.total - memory.available,
            "memory_total": memory.total,
            **self._rate(counts),
        }


class _Gpu:
    def __init__(self, device: torch.device):
        self.device, self._nvml, self._handle = device, None, None
        self.total = torch.cuda.get_device_properties(device).total_memory
        with suppress(Exception):
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self._nvml = pynvml

    def look(self) -> dict[str, Any]:
        stats = torch.cuda.memory_stats(self.device)
        found: dict[str, Any] = {
            "gpu_allocated": stats.get("allocated_bytes.all.current", 0),
            "gpu_reserved": stats.get("reserved_bytes.all.current", 0),
            "gpu_peak": stats.get("allocated_bytes.all.peak", 0),
            "gpu_total": self.total,
        }
        found["gpu_memory"] = found["gpu_reserved"]
        if self._nvml is not None:
            found["gpu_memory"] = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used
            found["gpu_use"] = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            with suppress(Exception):
                found["gpu_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        return found
