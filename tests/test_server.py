"""Model servers in step with their workers: they train like one device, whatever the shares."""

import math
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import zoo
from benchmarks.parity import distance
from benchmarks.served import SECRET, Training, Work, join_batchnorms
from meshfit.anatomy.probe_optimizer import state_bytes
from meshfit.errors import PlanError, RankError
from meshfit.events import Events
from meshfit.exchange import server_cost
from meshfit.exchange.protocol import RepeatBatch
from meshfit.exchange.server_cost import Payload
from meshfit.server import server as server_module
from meshfit.server.keeper import Keeper, shortened
from meshfit.server.running_statistics import RunningStatistics
from meshfit.server.settings import ServerSettings
from meshfit.server.snapshot import put_down
from meshfit.server.wire import WireError
from meshfit.server.worker import Worker
from tests.distributed import distributed
from tests.few import few

CASES = {  # (workers, servers, samples): batches of 8; 18 leave a last one of two, and with three workers one has none
    "gpt2": (3, 1, 18),
    "tied-gpt": (2, 2, 18),
    "token-sum": (3, 1, 18),
    "batchnorm-cnn": (3, 1, 18),
    "resnet10": (2, 1, 16),
    "partial": (3, 2, 18),
    "masked-lambda": (2, 1, 18),
    "class-weights": (3, 1, 18),
    "mixtral": (2, 1, 18),
    "two-inputs": (3, 2, 18),
    "lstm": (2, 1, 18),
}
STEPS = 6


def folder() -> str:
    """One that all ranks know."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0]
    return found[0]


def serve(training: Training, *, workers: int, servers: int, **terms: Any) -> tuple[Work | None, Any]:
    """Train in this test's ranks: the first are workers, the others servers. What each came to."""
    rank, at = dist.get_rank(), folder()
    addresses = [f"unix:{at}/{i}" for i in range(servers)]
    model = training.build().train()
    join_batchnorms(model, workers)
    if rank >= workers:
        index = rank - workers
        how = ServerSettings(workers=workers, index=index, batch_size=training.batch_size, **terms)
        server = training.server(how, servers=servers, address=addresses[index])
        server.join(30)
        server.close()
        return None, server
    worker = Worker(model, addresses, SECRET, id=rank, staleness=terms.get("staleness", 0))
    work = Work(training, worker, model)
    for _ in work.steps():
        pass
    worker.remove()
    return work, model


@pytest.mark.parametrize(
    "name", few(CASES, "gpt2", "tied-gpt", "token-sum", "batchnorm-cnn", "partial", "masked-lambda")
)
def test_trains_like_one_device(name: str) -> None:
    workers, servers, samples = CASES[name]
    case = zoo.ZOO[name]
    losses, state = zoo.train_alone(case, samples=samples, batch_size=8, steps=STEPS)

    @distributed(world=workers + servers)
    def train() -> None:
        case = zoo.ZOO[name]
        training = Training(build=case.build, data=case.data(samples), loss=case.loss)
        work, model = serve(training, workers=workers, servers=servers, total=STEPS)
        if work is None:
            return
        torch.testing.assert_close(work.losses, losses, rtol=1e-5, atol=0)
        got = model.state_dict()
        assert got.keys() == state.keys()
        for kind in (model.named_parameters(), model.named_buffers()):
            names = [name for name, _ in kind if name in state]
            assert distance(got, state, names) < 1e-4
        assert not any(p.grad is not None or p._post_accumulate_grad_hooks for p in model.parameters())

    train()


# What else a step is made of

X, Y = torch.randn(18, 8, generator=torch.Generator().manual_seed(1)), torch.arange(18) % 3


class Net(nn.Module):
    """``rare`` is used for some samples alone, ``never`` for none; ``frozen`` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.never, self.last = (nn.Linear(8, n) for n in (8, 8, 8, 3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh() * self.frozen
        return self.last(self.rare(x) if float(x[0, 0]) > 0 else x)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def plain() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


ADAM = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
COSINE = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)


def by_hand(training: Training, steps: int) -> tuple[list[float], list[float], nn.Module, nn.Module]:
    """One device, in plain torch: losses, norms, the model, and the averaged one."""
    model, losses, norms = training.build().train(), [], []
    averaged = training.build()
    optimizer = training.optimizer(list(model.parameters()))
    scheduler = training.scheduler(optimizer) if training.scheduler else None
    for index, _ in zip(zoo.batches(18, training.batch_size), range(steps), strict=False):
        loss = F.cross_entropy(model(X[index]), Y[index])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), training.clip or 1e9)))
        optimizer.step()
        if scheduler:
            scheduler.step()
        for mine, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 1 - (training.ema or 0.5))
        losses.append(loss.item())
    return losses, norms, model, averaged


@pytest.mark.parametrize("servers", [1, 2])
@distributed(world=4)
def test_clips_schedules_and_averages_like_one_device(servers: int) -> None:
    training = Training(
        build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=ADAM, scheduler=COSINE, clip=0.3, ema=0.9
    )
    workers = 4 - servers
    losses, norms, want, averaged = by_hand(training, 10)
    rank, at = dist.get_rank(), folder()
    addresses = [f"unix:{at}/{i}" for i in range(servers)]
    if rank >= workers:
        server = training.server(
            ServerSettings(workers=workers, index=rank - workers, total=10),
            servers=servers,
            address=addresses[rank - workers],
        )
        server.join(30)
        assert set(server.staleness) == {0}
        server.close()
        return
    model = training.build()
    worker = Worker(model, addresses, SECRET, id=rank)
    work = Work(training, worker, model)
    assert list(work.steps()) == work.losses
    torch.testing.assert_close(work.losses, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(work.norms, norms, rtol=1e-4, atol=0)
    assert work.update.learning_rate == pytest.approx(0.5 * 1e-2 * (1 + torch.cos(torch.tensor(torch.pi * 10 / 12))))
    same(model, want)
    assert work.update.average is not None
    work.update.average.swap()
    same(model, averaged)
    work.update.average.swap()
    same(model, want)
    worker.remove()


def same(got: nn.Module, want: nn.Module, off: float = 1e-5) -> None:
    for one, other in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=off, atol=off)


@pytest.mark.parametrize("servers", [1, 2])
@distributed(world=4)
def test_what_no_worker_reached_is_left_alone(servers: int) -> None:
    """With weight decay any gradient, even of zeros, would move it."""
    training = Training(build=net, data=(X, Y), loss=F.cross_entropy, optimizer=ADAM)
    before = net()
    work, model = serve(training, workers=4 - servers, servers=servers, total=4)
    if work is None:
        held = {name for name, p in model.keeper.parameters.items() if model.keeper.optimizer.state.get(p)}
        assert not any(name.startswith(("never", "frozen")) for name in held)
        return
    assert torch.equal(model.never.weight, before.never.weight)
    assert torch.equal(model.frozen, before.frozen)
    assert not torch.equal(model.first.weight, before.first.weight)


@distributed(world=3)
def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    x = X.clone()
    x[3] = float("nan")
    training = Training(build=plain, data=(x, Y), loss=F.cross_entropy, optimizer=ADAM, ema=0.9)
    work, model = serve(training, workers=2, servers=1, total=3)
    if work is None:
        assert model.version == 3
        return
    assert work.taken == [False, True, True]
    assert all(p.isfinite().all() for p in model.parameters())
    clean = Training(build=plain, data=(torch.cat([X[8:], X[:0]]), Y[8:]), loss=F.cross_entropy, optimizer=ADAM)
    same(model, by_hand_from(clean, 2))


def by_hand_from(training: Training, steps: int) -> nn.Module:
    model, (x, y) = training.build(), training.data
    optimizer = training.optimizer(list(model.parameters()))
    for index, _ in zip(zoo.batches(10, 8), range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return model


@distributed(world=3)
def test_one_worker_that_stops_stops_all() -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=ADAM)
    rank, at = dist.get_rank(), folder()
    if rank == 2:
        server = training.server(ServerSettings(workers=2, total=100), servers=1, address=f"unix:{at}/0")
        server.join(30)
        assert server.version == 5
        server.close()
        return
    model = training.build()
    worker = Worker(model, [f"unix:{at}/0"], SECRET, id=rank)
    work = Work(training, worker, model)
    for _ in work.steps(stop=lambda: rank == 1 and len(work.losses) == 5):
        pass
    assert len(work.losses) == 5
    same(model, by_hand(training, 5)[2])
    worker.remove()


@distributed(world=2)
def test_a_push_that_is_sent_twice_is_applied_once() -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=ADAM)
    at = folder()
    if dist.get_rank() == 1:
        server = training.server(ServerSettings(workers=1, total=4), servers=1, address=f"unix:{at}/0")
        server.join(30)
        assert server.version == 4
        server.close()
        return
    model = training.build()
    worker = Worker(model, [f"unix:{at}/0"], SECRET, id=0)
    work, (connection,) = Work(training, worker, model), worker.connections
    told: dict[str, Any] = {}
    plain_send = connection.send

    def send(kind: str, sequence: int, words: dict[str, Any] | None = None) -> None:
        told[kind] = words
        plain_send(kind, sequence, words)

    connection.send = send
    for _ in work.steps():
        for kind, answer in (("push", "reply"), ("step", "weights"), ("push", "reply"), ("step", "weights")):
            plain_send(kind, worker.sequence, told[kind])
            assert connection.recv(5).kind == answer
    same(model, by_hand(training, 4)[2])
    worker.remove()


@pytest.mark.parametrize("compress", ["none", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("servers", [1, 2])
@distributed(world=3)
def test_cost_is_what_moves(servers: int, compress: str) -> None:
    """Payload counted at both ends, against ``cost``; and what each holds."""
    case = zoo.ZOO["batchnorm-cnn"]
    training = Training(build=case.build, data=case.data(16), loss=case.loss)
    workers, rank, at = 3 - servers, dist.get_rank(), folder()
    addresses = [f"unix:{at}/{i}" for i in range(servers)]
    model = training.build()
    if rank >= workers:
        index = rank - workers
        server = training.server(
            ServerSettings(workers=workers, total=5, index=index, compress=compress),
            servers=servers,
            address=addresses[index],
        )
        server.join(30)
        optimizer = server.keeper.optimizer
        state = state_bytes(training.optimizer(model.parameters()))
        cost = server_cost.server(Payload.of(model, servers=servers), state, workers=workers, index=index)
        tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        assert cost.host["optimizer"] == sum(t.nbytes for t in tensors)
        assert cost.host["weights"] == server.keeper.weights.nbytes
        server.close()
        return
    events = Events()
    worker = Worker(model, addresses, SECRET, id=rank, compress=compress)
    work = Work(training, worker, model)
    joined = events.traffic["pull"][1]
    for _ in work.steps():
        pass
    cost = server_cost.worker(Payload.of(model, servers=servers, compress=compress))
    assert events.traffic["push"][1] == 5 * cost.moved["push"]
    assert events.traffic["pull"][1] - joined == 5 * cost.moved["pull"]
    size = sum(p.nbytes for p in model.parameters())
    assert cost.moved["pull"] < size * 1.1 + 500
    assert cost.moved["push"] < size * {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.26}[compress] * 1.1 + 500
    worker.remove()
    events.close()


@pytest.mark.parametrize("compress", ["fp16", "bf16", "int8"])
@distributed(world=3)
def test_compressed_gradients_train_nearly_alike(compress: str) -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    at, rank = folder(), dist.get_rank()
    if rank == 2:
        server = training.server(
            ServerSettings(workers=2, total=60, compress=compress), servers=1, address=f"unix:{at}/0"
        )
        server.join(30)
        server.close()
        return
    model = training.build()
    worker = Worker(model, [f"unix:{at}/0"], SECRET, id=rank, compress=compress)
    work = Work(training, worker, model)
    losses = list(work.steps())
    want = by_hand(training, 60)[0]
    assert (
        max(abs(a - b) for a, b in zip(losses, want, strict=True))
        < {"fp16": 1e-3, "bf16": 1e-2, "int8": 2e-2}[compress]
    )
    worker.remove()


def test_a_batch_that_is_done_again_is_not_in_what_compression_has_lost(tmp_path: Path) -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy)
    server = training.server(ServerSettings(workers=1, compress="fp16"), servers=1, address=f"unix:{tmp_path}/0")
    model = plain()
    worker = Worker(model, [server.address], SECRET, id=0, compress="fp16")
    next(Work(training, worker, model).steps())
    (connection,) = worker.connections
    assert connection._feedback is not None
    before = [lost.clone() for lost in connection._feedback.lost]
    for pushed in (False, True):
        F.cross_entropy(model(X), Y).backward()
        worker._pushed = pushed
        if pushed:
            connection.pack()
        with pytest.raises(RepeatBatch):
            worker._start_over()
        torch.testing.assert_close(connection._feedback.lost, before, rtol=0, atol=1e-6)
    worker.remove()
    server.close()


def test_a_worker_with_another_model_is_refused(tmp_path: Path) -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy)
    server = training.server(ServerSettings(workers=1), servers=1, address=f"unix:{tmp_path}/0")
    with pytest.raises(WireError, match="another model"):
        Worker(nn.Linear(8, 3), [server.address], SECRET, id=0)
    with pytest.raises(WireError, match="another model"):
        Worker(plain(), [server.address], SECRET, id=0, compress="int8")
    server.close()


def test_what_a_worker_asked_for_is_not_replaced_when_another_asks(tmp_path: Path) -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=ADAM)
    terms = ServerSettings(workers=2, staleness=math.inf, folder=tmp_path / "kept")
    server = training.server(terms, servers=1, address=f"unix:{tmp_path}/0")
    reach = lambda id: Worker(plain(), [server.address], SECRET, id=id, staleness=math.inf, timeout=30.0)
    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(reach, range(2)))
    (mine,), (other,) = (worker.kept() for worker in workers)
    assert mine != other
    assert [facts["version"] for _, facts in put_down([mine, other])] == [0, 0]
    with pytest.raises(RankError, match="not to be found"):
        put_down([mine, tmp_path])
    for worker in workers:
        worker.remove()
    server.close()


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_silent_worker_is_waited_for_as_long_as_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gets_on: bool
) -> None:
    """It evaluates, say. The other is told that it waits, so it need not know for how long."""
    monkeypatch.setattr(server_module, "SIGN_SECONDS", 0.1)
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy)
    server = training.server(ServerSettings(workers=2, patience=0.6), servers=1, address=f"unix:{tmp_path}/0")

    def train(id: int) -> Work:
        model = plain()
        work = Work(training, Worker(model, [server.address], SECRET, id=id, timeout=1.0), model)
        until = time.monotonic() + 2.0 * (id == 0)
        while time.monotonic() < until:
            time.sleep(0.1)
            if gets_on:
                work.worker.progress()
        if gets_on or id:
            next(work.steps())
        return work

    with ThreadPoolExecutor(2) as pool:
        works = list(pool.map(train, range(2)))
    assert bool(server.notes) != gets_on
    assert gets_on or "worker 0 was lost at step 0: was not heard from for 0.6 s" in server.notes[0]
    assert server.version == 1
    for work in works:
        work.worker.remove()
    server.close()


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused() -> None:
    class Together(torch.optim.SGD):
        """Steps by the mean over all gradients."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            reached = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            mean = torch.stack([p.grad.mean() for p in reached]).mean()
            for p in reached:
                p.sub_(mean * 0.1)

    model = plain()
    Keeper(model, Together(model.parameters(), lr=0.1))
    with pytest.raises(PlanError, match="stepped apart"):
        Keeper(model, Together(model.parameters(), lr=0.1), servers=2)


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("in the optimizer")


def test_what_an_optimizer_raises_ends_server_and_workers(tmp_path: Path) -> None:
    training = Training(build=plain, data=(X, Y), loss=F.cross_entropy, optimizer=lambda p: Raises(p, lr=0.1))
    server = training.server(ServerSettings(workers=1), servers=1, address=f"unix:{tmp_path}/0")
    model = plain()
    work = Work(training, Worker(model, [server.address], SECRET, id=0), model)
    with pytest.raises(RankError, match="ZeroDivisionError: in the optimizer"):
        next(work.steps())
    with pytest.raises(ZeroDivisionError):
        server.join(5)
    work.worker.remove()
    server.close()


def test_a_late_gradient_may_count_less() -> None:
    assert shortened(0.9, 0) == pytest.approx(0.9)
    assert shortened(0.9, 5) == pytest.approx(0.8)
    assert shortened(0.9, 50) == 0.0
    for late, moved in (("none", 1.0), ("damp", 0.25)):
        model = nn.Linear(1, 1, bias=False)
        keeper = Keeper(model, torch.optim.SGD(model.parameters(), lr=1.0), late=late)
        before = model.weight.item()
        keeper.load([torch.ones(1)])
        keeper.step({"weight"}, loss=0.0, correction=1.0, norm=1.0, staleness=3)
        assert before - model.weight.item() == pytest.approx(moved)
        assert keeper.update.learning_rate == 1.0


def test_statistics_of_workers_become_those_of_all() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 4, dtype=torch.float64) * 3 + 1
    whole, parts = nn.BatchNorm1d(4).double(), [nn.BatchNorm1d(4).double() for _ in range(2)]
    running = RunningStatistics.of(whole)
    for _ in range(3):
        told = []
        for part, some in zip(parts, (x[:20], x[20:]), strict=True):
            old = running.buffer.clone()
            for name, buffer in part.named_buffers():
                buffer.copy_(running.views[name])
            part(some)
            new = torch.zeros_like(old)
            for name, view in running.parcel.views(new).items():
                view.copy_(part.get_buffer(name))
            told.append((float(len(some)), new, old))
        running.merge(told)
        whole(x)
    assert int(running.views["num_batches_tracked"]) == 3
    torch.testing.assert_close(running.views["running_mean"], whole.running_mean)
    torch.testing.assert_close(running.views["running_var"], whole.running_var, rtol=0.05, atol=0)
