"""What a killed rank costs: python benchmarks/recovery.py [--kills 30 [--torchrun 30]] [--soak 600 [--mean 20]]

One training of two ranks on CPUs; when it has come a random number of steps further, a random rank gets SIGKILL, again
and again. Beside it the same job as a plain torch script (DDP, a checkpoint of its own every as many steps) under
``torchrun --max-restarts`` (with a store of its own for each start, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it
most of its restarts fail on gloo). Printed: how many kills were survived, the seconds from the kill until new ranks
have taken their first step, and whether the end is the one of a run that nobody killed: SHA-256 over weights,
optimizer, schedule, random states and the place in the data.

``--soak``: faults at random times, 20 s apart on average (Poisson), over about so many seconds, of kinds that are
drawn: a rank is killed, or the first one, or one while a checkpoint is written; one is stopped (SIGSTOP), or raises; a
process that reads data is killed, where ``--readers`` asks for some (each start then waits for as many new interpreters
to import torch). The effective training time is what the same steps take without faults, of the time
they took. Exit code 1 if the end is another, or something is left in /dev/shm or the folder of temporary files.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.checkpoint import manifest
from meshfit.launch.heartbeat import step_under_way

EVERY, APART = 20, (15, 60)  # steps from checkpoint to checkpoint; from kill to kill
MEAN = 20.0  # seconds from fault to fault, in a soak
X = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
Y = X[:, :10].argmax(1)

PLAIN = """
import os, sys, time, hashlib
sys.path.insert(0, {root!r})
from benchmarks.recovery import *
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, path = dist.get_rank(), Path({out!r}) / "saved.pt"
torch.manual_seed(0)
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
begin = 0
if path.exists():
    saved = torch.load(path)
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    begin = saved["step"]
for step in range(begin, {steps}):
    chosen = torch.randperm(len(X), generator=torch.Generator().manual_seed(step))[:64][rank::2]
    loss = slow_loss(model(X[chosen]), Y[chosen])
    optimizer.zero_grad(), loss.backward(), optimizer.step(), schedule.step()
    tell(Path({out!r}), step + 1)
    if rank == 0 and (step + 1) % EVERY == 0:
        state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), schedule=schedule.state_dict())
        state["step"] = step + 1
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
if rank == 0:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(value.numpy().tobytes())
    (Path({out!r}) / "digest").write_text(digest.hexdigest() + str(schedule.state_dict()["last_epoch"]))
dist.destroy_process_group()
"""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def slow_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A step of some 20 ms."""
    time.sleep(0.015)
    return F.cross_entropy(outputs, targets)


def tell(folder: Path, step: int) -> None:
    """In a rank, after its first step, and the last step of all in a file."""
    mine = folder / f"first-{os.getpid()}"
    if not mine.exists():
        mine.write_text(str(time.time()))
    (folder / f"step-{os.getpid()}").write_text(str(step))


class Told:
    """The loss of meshfit's ranks, which tells of each step when the next one begins."""

    def __init__(self, folder: Path):
        self.folder, self.before = folder, 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        asked = self.folder / f"raise-{os.getpid()}"
        if asked.exists():
            asked.unlink()
            raise RuntimeError("a fault of the soak")
        now = step_under_way()
        if now > 1 and self.before and now > self.before:
            tell(self.folder, self.before)
        self.before = now
        return slow_loss(outputs, targets)


class Killer(threading.Thread):
    """Does harm to ranks below process ``above`` until ``over``: kills by steps; with ``mean``, faults of all KINDS by
    seconds on average."""

    def __init__(self, above: int, depth: int, folder: Path, chance: random.Random, kills: int, mean: float = 0.0):
        super().__init__(daemon=True)
        self.above, self.depth, self.folder, self.chance = above, depth, folder, chance
        self.kills, self.mean = kills, mean
        self.seconds: dict[str, list[float]] = {}
        """By kind: from each fault to the first step of a new rank."""
        self.kinds, self.made = list(KINDS), 0
        self.over = threading.Event()

    def ranks(self) -> list[psutil.Process]:
        found = [psutil.Process(self.above)]
        try:
            for _ in range(self.depth):
                found = [child for each in found for child in each.children()]
            return [each for each in found if (self.folder / f"first-{each.pid}").exists()]
        except psutil.Error:
            return []

    def furthest(self) -> int:
        return max((int(path.read_text() or 0) for path in self.folder.glob("step-*")), default=0)

    def run(self) -> None:
        while self.made < self.kills and not self.over.is_set():
            target, due = self.furthest() + self.chance.randint(*APART), time.time()
            due += self.chance.expovariate(1 / self.mean) if self.mean else 0.0
            while not self.over.wait(0.01) and (time.time() < due if self.mean else self.furthest() < target):
                pass
            ranks = self.ranks()
            if self.over.is_set() or not ranks:
                continue
            known = {path.name for path in self.folder.glob("first-*")}
            kind = self.chance.choice(self.kinds) if self.mean else "kill"
            try:
                at = KINDS[kind](self, ranks)
            except (psutil.Error, IndexError):  # it ended before
                continue
            self.made += 1
            self.seconds.setdefault(kind, [])
            while not self.over.wait(0.01):
                new = [path for path in self.folder.glob("first-*") if path.name not in known]
                told = [float(path.read_text() or "inf") for path in new]
                if told and min(told) < float("inf"):
                    self.seconds[kind].append(min(told) - at)
                    break

    def kill(self, ranks: list[psutil.Process]) -> float:
        self.chance.choice(ranks).kill()
        return time.time()

    def kill_first(self, ranks: list[psutil.Process]) -> float:
        min(ranks, key=lambda rank: rank.pid).kill()
        return time.time()

    def kill_while_saving(self, ranks: list[psutil.Process]) -> float:
        """Where a folder of a checkpoint has no manifest yet."""
        saved = self.folder.parent / "soaked" / "checkpoints"
        while not self.over.wait(0.0005):
            if any(path.is_dir() and not (path / manifest.NAME).exists() for path in saved.glob("*")):
                break
        return self.kill(ranks)

    def stop(self, ranks: list[psutil.Process]) -> float:
        self.chance.choice(ranks).suspend()
        return time.time()

    def ask_to_raise(self, ranks: list[psutil.Process]) -> float:
        (self.folder / f"raise-{self.chance.choice(ranks).pid}").touch()
        return time.time()

    def kill_a_reader(self, ranks: list[psutil.Process]) -> float:
        self.chance.choice([reader for rank in ranks for reader in rank.children()]).kill()
        return time.time()


KINDS = {
    "kill": Killer.kill,
    "kill of rank 0": Killer.kill_first,
    "kill in a save": Killer.kill_while_saving,
    "stop": Killer.stop,
    "raise": Killer.ask_to_raise,
    "kill of a reader": Killer.kill_a_reader,
}


def with_meshfit(out: Path, steps: int, killer: Killer | None, **asked: Any) -> tuple[str, float, list[str]]:
    """Digest of the end, seconds of training, notes."""
    told = killer.folder if killer is not None else out.parent / "unheard"
    told.mkdir(parents=True, exist_ok=True)
    if killer is not None:
        killer.start()
    how: dict[str, Any] = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3), "loss": Told(told)}
    how |= {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9), "devices": "cpu"}
    how |= {"batch_size": 64, "steps": steps, "checkpoint": EVERY, "progress": False, "plan": "data=2", "out": out}
    how |= asked
    result = meshfit.fit(network, (X, Y), **how)
    if killer is not None:
        killer.over.set()
        killer.join()
    return digest_of(out), result.seconds, [note for note in result.notes if note.startswith("restarted")]


def digest_of(run: Path) -> str:
    """Of all that the last checkpoint holds, whichever rank wrote it."""
    found = manifest.newest(run / "checkpoints")
    left_out = ("files", "tensors", "time", "block", "format")  # how it lies on disk
    about = {key: value for key, value in found.body.items() if key not in left_out}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, stored in sorted(found.tensors.items()):
        (part,) = stored.parts  # under data=2 each is whole
        with (run / "checkpoints" / found.name / part.file).open("rb") as file:
            file.seek(part.offset)
            digest.update(name.encode() + file.read(stored.nbytes))
    return digest.hexdigest()


def with_torchrun(folder: Path, steps: int, chance: random.Random, kills: int) -> tuple[str, list[float], int]:
    """Digest of the end ("" where there is none), seconds of each kill survived, and kills."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(PLAIN.format(root=str(Path(__file__).parents[1]), out=str(folder), steps=steps))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=100",
    ]
    log = (folder / "log").open("w")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.Popen([*command, str(script)], stdout=log, stderr=log, env=environ)
    killer = Killer(run.pid, 1, folder, chance, kills)
    killer.start()
    try:
        run.wait(timeout=120 + 30 * kills)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(run.pid).children(recursive=True):
            child.kill()
        run.kill()
        run.wait()
    killer.over.set()
    killer.join()
    digest = folder / "digest"
    return digest.read_text() if digest.exists() else "", killer.seconds.get("kill", []), killer.made


def report(name: str, seconds: list[float], kills: int, same: str) -> None:
    found = sorted(seconds)
    median = f"{statistics.median(found):6.2f} s" if found else "     -  "
    worst = f"{found[-1]:6.2f} s" if found else "     -  "
    print(f"{name:12}{len(found):5} of {kills:<5}{median:>12}{worst:>12}   {same}", flush=True)


def steps_for(kills: int) -> int:
    return kills * (sum(APART) // 2 + EVERY) + 100


def recovery(kills: int, torchrun: int, seed: int, folder: Path) -> None:
    steps = steps_for(kills)
    print(f"{kills} kills (seed {seed}), {steps} steps of two ranks, a checkpoint every {EVERY} steps")
    print(f"{'':12}{'survived':>14}{'median':>12}{'worst':>12}   the end", flush=True)
    killer = Killer(os.getpid(), 2, folder / "told", random.Random(seed), kills)
    got, _, _ = with_meshfit(folder / "killed", steps, killer)
    want, _, _ = with_meshfit(folder / "never", steps, None)
    same = "as if nobody had killed it, to the bit" if got == want else "DIFFERENT"
    report("meshfit", killer.seconds.get("kill", []), killer.made, same)
    steps = steps_for(torchrun)
    got, seconds, made = with_torchrun(folder / "torchrun", steps, random.Random(seed), torchrun)
    want, _, _ = with_torchrun(folder / "unkilled", steps, random.Random(seed), 0)
    told = "as if nobody had killed it, to the bit" if got == want else "the run ended" if not got else "DIFFERENT"
    report("torchrun", seconds, made, told)


def soak(seconds: float, mean: float, readers: int, seed: int, folder: Path) -> int:
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")
    (folder / "temporary").mkdir()
    shared = set(os.listdir("/dev/shm"))
    how = {"hang_timeout": 5.0, "workers": f"{readers} processes" if readers else 0}
    short, long = (with_meshfit(folder / f"trial{steps}", steps, None, **how)[1] for steps in (200, 500))
    before = set(os.listdir(folder / "temporary"))  # what the warm template has
    steps = max(100, int(0.85 * seconds / (long - short) * 300))
    killer = Killer(os.getpid(), 2, folder / "told", random.Random(seed), 10**6, mean)
    killer.kinds = [kind for kind in KINDS if readers or kind != "kill of a reader"]
    got, took, notes = with_meshfit(folder / "soaked", steps, killer, **how)
    left = [*(set(os.listdir(folder / "temporary")) - before), *(set(os.listdir("/dev/shm")) - shared)]
    want, clean, _ = with_meshfit(folder / "never", steps, None, **how)
    same = "as if there had been none, to the bit" if got == want else "DIFFERENT"
    print(f"soak of {took:.0f} s (seed {seed}), {steps} steps, {killer.made} faults, {len(notes)} restarts: {same}")
    print(f"effective training time {clean / took:.0%}: {clean:.0f} s without faults, {took:.0f} s with")
    print(f"left behind: {', '.join(left) or 'nothing'}")
    print("from a fault to the first step of new ranks:")
    for kind, each in sorted(killer.seconds.items()):
        median = f"median {statistics.median(each):.2f} s, worst {max(each):.2f} s" if each else "none in time"
        print(f"  {kind:18}{len(each):3}   {median}")
    return int(got != want or bool(left))


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--torchrun", type=int, help="kills of torchrun's; as many, if not given")
    asked.add_argument("--soak", type=float, help="seconds")
    asked.add_argument("--mean", type=float, default=MEAN, help="seconds from fault to fault")
    asked.add_argument("--readers", type=int, default=0, help="processes that read data, of each rank")
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    try:
        if given.soak:
            return soak(given.soak, given.mean, given.readers, given.seed, folder)
        recovery(given.kills, given.torchrun or given.kills, given.seed, folder)
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
