"""Which devices ranks are started on, where a range of them was asked for: ``devices="2..8"``.

Fewer, when some are gone: there are not as many as before, or a rank has died twice in a row on one of them. More, when
they come back: the ranks then save, end, and others go on. The plan changes in its data and shard degrees alone; the
batch stays the one of the first start, and the order of samples depends on neither.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshfit.checkpoint import manifest
from meshfit.checkpoint.resume import to_resume
from meshfit.errors import JobError, MeshfitError, PlanError
from meshfit.job import Job, plan_of
from meshfit.launch.devices import Devices, find
from meshfit.plan import Plan
from meshfit.plan_devices import on_fewer, settle_range

LOOK = 1.0  # seconds between two looks at what is there
CAME_BACK = "devices that came back"
"""Why ranks were asked to end."""


@dataclass
class Elastic:
    """The devices of one training."""

    plan: Plan
    """On all of them."""
    devices: Devices
    gone: set[int] = field(default_factory=set)
    """On which ranks died twice."""
    _looked: float = 0.0
    _there: int = 0

    def after(self, failures: list[MeshfitError], job: Job) -> Job:
        """The job for the next ranks, after these failures in a row."""
        rank = failures[-1].rank
        assert isinstance(job.devices, Devices)
        if rank is not None and job.devices.indices and [each.rank for each in failures[-2:]] == [rank, rank]:
            gone = self.gone | {job.devices.indices[rank]}
            if (self.devices.present(gone).count or 0) >= self.devices.least:  # else it is tried again, as all are
                self.gone = gone
        return self.fitted(job)

    def fitted(self, job: Job) -> Job:
        """The job on the devices that are there."""
        there = self.devices.present(self.gone)
        count = there.count or 0
        if count < self.devices.least:
            raise PlanError(f"devices={str(self.devices)!r} but {count} are left")
        assert isinstance(job.batch_size, int)
        return replace(job, devices=there, plan=on_fewer(self.plan, count, job.batch_size))

    def grown(self, job: Job) -> bool:
        """Whether more devices could be used now; looked at once a second."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        assert isinstance(job.batch_size, int)
        before, self._there = self._there, self.devices.present().count or 0
        if self._there > before:
            self.gone.clear()  # those that have come may be others
        count = self.devices.present(self.gone).count or 0
        fits = count >= self.devices.least
        return fits and on_fewer(self.plan, count, job.batch_size).devices > plan_of(job).devices


def elastic_of(job: Job, given: bool) -> tuple[Job, Elastic | None]:
    """For a job that asks for a range of devices, with the batch size of its first start; ``given``: its ranks are
    there already, torchrun's."""
    if ".." not in str(job.devices):
        return job, None
    devices = job.devices if isinstance(job.devices, Devices) else find(job.devices)
    if given:
        raise JobError(
            f"devices={str(devices)!r} is for ranks that fit starts", "under torchrun there are as many as it started"
        )
    if isinstance(job.batch_size, str) and job.resume and job.out is not None:
        before = to_resume(job, Path(job.out))
        if before is not None:
            job = replace(job, batch_size=manifest.newest(before).body["batch_size"])
    return replace(job, devices=devices), Elastic(settle_range(job.plan, devices.most), devices)
