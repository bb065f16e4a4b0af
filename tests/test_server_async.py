"""Model servers whose workers step apart, come late, leave and die. Real processes, really killed."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fleet import Fleet, as_tensors, longest_pause, merged
from benchmarks.served import SECRET, Training, Work
from meshfit.server.asynchronous import Clocks, Tickets
from meshfit.server.client import Client
from meshfit.server.server import Server
from meshfit.server.settings import ServerSettings, gone_mark
from meshfit.server.snapshot import common, newest, write
from meshfit.server.wire import Message
from meshfit.server.worker import Worker
from tests.few import every_other, more

SAMPLES, BATCH = 96, 12


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 10, generator=generator)
    return x, (x @ torch.randn(10, 3, generator=generator)).argmax(1)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))


def training() -> Training:
    return Training(build=net, data=points(), loss=F.cross_entropy, batch_size=BATCH, optimizer=momentum)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def scheduled() -> Training:
    return Training(
        build=net,
        data=points(),
        loss=F.cross_entropy,
        batch_size=BATCH,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )


def alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same on one device."""
    model, (x, y), losses = net(), points(), []
    optimizer = momentum(list(model.parameters()))
    for step in range(steps):
        at = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
        loss = F.cross_entropy(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def same(got: dict[str, np.ndarray], want: dict[str, torch.Tensor], off: float = 1e-5) -> None:
    for name, tensor in as_tensors(got).items():
        torch.testing.assert_close(tensor, want[name], rtol=off, atol=off)


# Together


@pytest.mark.parametrize(("servers", "tcp"), every_other([1, 2], [False, True]))
def test_synchronous_over_processes(tmp_path: Path, servers: int, tcp: bool) -> None:
    losses, state = alone(16)
    with Fleet(training, tmp_path, servers=servers, tcp=tcp, workers=3, total=16) as fleet:
        for id in range(3):
            fleet.work(id)
        for id in range(3):
            end = fleet.workers[id].end()
            np.testing.assert_allclose(end["losses"], losses, rtol=1e-5)
            same(end["weights"], state)


@pytest.mark.parametrize(("lost", "servers"), every_other(["average", "redo"], [1, 2]))
def test_a_worker_killed_in_step(tmp_path: Path, lost: str, servers: int) -> None:
    """Those left go on; when the batch is shared anew, as if nothing had been."""
    losses, state = alone(40)
    with Fleet(training, tmp_path, servers=servers, workers=3, total=40, lost=lost) as fleet:
        fleet.work(0)
        fleet.work(1)
        victim = fleet.work(2, nap=0.05)
        fleet.until(lambda: len(fleet.steps(2)) > 5)
        killed = time.monotonic()
        victim.kill()
        ends = [fleet.workers[id].end() for id in (0, 1)]
        after = [when for _, _, when in fleet.steps(0) if when > killed]
        assert after[0] - killed < 1.0
        assert "worker 2 was lost" in fleet.servers[0].end()["said"][0]
    assert all(end["tickets"] == list(range(40)) for end in ends)
    if lost == "redo":
        np.testing.assert_allclose(ends[0]["losses"], losses, rtol=1e-4)
        same(ends[0]["weights"], state, 1e-4)
    else:
        assert ends[0]["again"] == 0
        assert abs(ends[0]["losses"][-1] - losses[-1]) < 0.1


def test_a_worker_that_comes_late_shares_the_next_batch(tmp_path: Path) -> None:
    losses, state = alone(40)
    with Fleet(training, tmp_path, workers=2, total=40) as fleet:
        fleet.work(0, nap=0.03)
        fleet.work(1)
        fleet.until(lambda: len(fleet.steps(0)) > 3)
        fleet.work(5)
        ends = [fleet.workers[id].end() for id in (0, 1, 5)]
    assert 0 < len(ends[2]["losses"]) < 40
    for end in ends:
        np.testing.assert_allclose(end["losses"], losses[end["tickets"][0] :], rtol=1e-5)
        same(end["weights"], state)


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_worker_that_leaves_is_not_missed(tmp_path: Path, staleness: int) -> None:
    with Fleet(training, tmp_path, workers=2, total=30, staleness=staleness, batch_size=BATCH) as fleet:
        fleet.work(0)
        fleet.work(1, steps=5)
        assert len(fleet.workers[1].end()["losses"]) == 5
        fleet.workers[0].end()
        server = fleet.servers[0].end()
    assert server["version"] == 30
    assert server["said"] == []


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_worker_that_died_before_it_came_is_not_waited_for(tmp_path: Path, staleness: int) -> None:
    terms = {"staleness": staleness, "batch_size": BATCH, "meeting": tmp_path}
    with Fleet(training, tmp_path, workers=2, total=10, **terms) as fleet:
        fleet.work(0)
        time.sleep(0.5)
        assert not fleet.steps(0)
        gone_mark(tmp_path, 1).touch()
        assert sorted(fleet.workers[0].end()["tickets"]) == list(range(10))


def test_a_hung_worker_is_given_up(tmp_path: Path) -> None:
    with Fleet(training, tmp_path, workers=2, total=30, patience=0.5) as fleet:
        fleet.work(0)
        hung = fleet.work(1, nap=0.02)
        fleet.until(lambda: len(fleet.steps(1)) > 3)
        os.kill(hung.process.pid, signal.SIGSTOP)
        assert fleet.workers[0].end()["tickets"] == list(range(30))
        assert "not heard from for 0.5 s" in fleet.servers[0].end()["said"][0]
        os.kill(hung.process.pid, signal.SIGCONT)


@pytest.mark.parametrize(("staleness", "tcp"), every_other([4, 0], [False, True]))
def test_a_broken_connection_changes_nothing(tmp_path: Path, staleness: int, tcp: bool) -> None:
    """25 times, after a question was sent and before its answer came: each push is applied once."""
    terms = {"workers": 2, "staleness": staleness, "batch_size": BATCH, "lost": "redo"}
    losses, state = alone(160)
    with Fleet(training, tmp_path, tcp=tcp, total=160, **terms) as fleet:
        fleet.work(0, drops=25)
        fleet.work(1)
        ends = [fleet.workers[id].end() for id in range(2)]
        server = fleet.servers[0].end()
    assert ends[0]["broken"] == 25 or (staleness == 0 and ends[0]["broken"] > 5)  # fewer where the other one did more
    assert server["version"] == 160
    if staleness == 0:
        for end in ends:  # the other one does a batch alone, if need be
            np.testing.assert_allclose(end["losses"], [losses[i] for i in end["tickets"]], rtol=1e-3, atol=1e-6)
            same(end["weights"], state, 1e-4)
    else:
        assert sorted(ends[0]["tickets"] + ends[1]["tickets"]) == list(range(160))
        assert sum(server["staleness"].values()) == 160


def slow_to_answer() -> Training:
    """The server begins with what it is asked only when the worker's connection has broken and it has come back."""
    answer, seen = Server._answer, set()

    def late(self: Server, client: Client, message: Message) -> bool:
        if client.id == 0 and (message.kind, message.sequence) not in seen:
            seen.add((message.kind, message.sequence))
            time.sleep(0.02)
        return answer(self, client, message)

    Server._answer = late
    return training()


def test_a_worker_that_comes_back_finds_its_old_connection_done_with(tmp_path: Path) -> None:
    """What is still under way there is carried out first: not beside the new one, behind the worker's back."""
    terms = {"workers": 2, "staleness": 4, "batch_size": BATCH, "lost": "redo"}
    with Fleet(slow_to_answer, tmp_path, total=40, **terms) as fleet:
        fleet.work(0, drops=8)
        fleet.work(1, nap=0.03)
        ends = [fleet.workers[id].end() for id in range(2)]
        server = fleet.servers[0].end()
    assert ends[0]["broken"] == 8
    assert sorted(ends[0]["tickets"] + ends[1]["tickets"]) == list(range(40))
    assert server["version"] == 40


# Apart


@pytest.mark.parametrize("bound", [1, 3])
def test_no_worker_is_further_ahead_than_the_bound(tmp_path: Path, bound: int) -> None:
    with Fleet(training, tmp_path, workers=2, total=60, staleness=bound, batch_size=BATCH) as fleet:
        fleet.work(0)
        fleet.work(1, nap=0.02)
        ends = [fleet.workers[id].end() for id in range(2)]
        steps = list(merged(fleet))
        server = fleet.servers[0].end()
    done = {0: 0, 1: 0}
    for id, *_ in steps[:50]:  # towards the end there may be no batch left for one of them
        done[id] += 1
        if min(done.values()) > 0:
            assert max(done.values()) - min(done.values()) <= bound + 1  # one that is done may not have been told of
    assert sorted(ends[0]["tickets"] + ends[1]["tickets"]) == list(range(60))
    late = sorted(ends[0]["late"] + ends[1]["late"])
    assert max(late) <= 2 * bound
    assert server["staleness"] == {k: late.count(k) for k in set(late)}


def test_unbounded_workers_take_what_they_can(tmp_path: Path) -> None:
    with Fleet(training, tmp_path, workers=2, total=100, staleness=float("inf"), batch_size=BATCH) as fleet:
        fleet.work(0, nap=0.002)
        fleet.work(1, nap=0.03)
        ends = [fleet.workers[id].end() for id in range(2)]
    assert sorted(ends[0]["tickets"] + ends[1]["tickets"]) == list(range(100))
    assert len(ends[0]["tickets"]) > 2 * len(ends[1]["tickets"])
    assert max(ends[1]["late"]) >= 2
    assert min(ends[0]["losses"][-5:]) < 0.5 * ends[0]["losses"][0]
    same(ends[0]["weights"], as_tensors(ends[1]["weights"]), 0)  # the last weights, both


@pytest.mark.parametrize("servers", [more(1), 2])
def test_a_worker_killed_among_those_that_step_apart(tmp_path: Path, servers: int) -> None:
    """Nobody pauses, and what it had under way is done by others."""
    terms = {"workers": 3, "staleness": 4, "batch_size": BATCH}
    with Fleet(training, tmp_path, servers=servers, total=200, **terms) as fleet:
        for id in range(3):
            fleet.work(id, nap=0.01)
        fleet.until(lambda: len(fleet.steps(2)) > 5)
        killed = time.monotonic()
        fleet.workers[2].kill()
        ends = [fleet.workers[id].end() for id in (0, 1)]
        for id in (0, 1):
            times = [when for _, _, when in fleet.steps(id)]
            assert longest_pause(times, killed, times[-1]) < 1.0
        server = fleet.servers[0].end()
        done = {ticket for _, ticket, *_ in merged(fleet)}
    assert server["version"] == 200
    assert len(set(range(200)) - done) <= 1  # one may have been applied that the dead could not tell of
    assert len(ends) == 2


def test_schedules_count_samples(tmp_path: Path) -> None:
    """Twelve samples a step of the schedule, however many gradients they come in."""
    with Fleet(scheduled, tmp_path, workers=2, total=32, staleness=2, batch_size=BATCH) as fleet:
        for id in range(2):
            fleet.work(id, batch_size=BATCH // 2)
        for id in range(2):
            fleet.workers[id].end()
        server = fleet.servers[0].end()
    assert server["samples"] == 32 * BATCH // 2
    assert server["lr"] == pytest.approx(0.9**16)


# A server that dies


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_server_killed_goes_on_from_its_snapshot(tmp_path: Path, staleness: int) -> None:
    losses, state = alone(60)
    terms = {"workers": 2, "staleness": staleness, "batch_size": BATCH, "every": 10, "folder": tmp_path / "kept"}
    with Fleet(training, tmp_path, total=60, **terms) as fleet:
        fleet.work(0, nap=0.01)
        fleet.work(1, nap=0.01)
        fleet.until(lambda: max(ticket for _, ticket, *_ in [*merged(fleet), (0, 0)]) >= 25)
        fleet.servers[0].kill()
        fleet.serve(0)
        ends = [fleet.workers[id].end() for id in range(2)]
        server = fleet.servers[0].end()
    assert server["version"] == 60
    assert "goes on from its snapshot of step 20" in server["said"][0]
    lost = [int(word.split(": ")[1].split()[0]) for word in server["said"] if "were lost" in word]
    assert lost
    assert max(lost) <= 10
    if staleness == 0:
        seen = dict(zip(ends[0]["tickets"], ends[0]["losses"], strict=True))  # the last time that each was done
        np.testing.assert_allclose([seen[i] for i in range(60)], losses, rtol=1e-3, atol=1e-6)
        same(ends[0]["weights"], state, 1e-4)
    else:
        assert {t for end in ends for t in end["tickets"]} == set(range(60))


def test_two_servers_go_on_from_the_same_snapshot(tmp_path: Path) -> None:
    """One is killed; both are started again."""
    losses, state = alone(60)
    with Fleet(training, tmp_path, servers=2, workers=2, total=60, every=10, folder=tmp_path / "kept") as fleet:
        fleet.work(0, nap=0.01)
        fleet.work(1, nap=0.01)
        fleet.until(lambda: max([0, *(ticket for _, ticket, *_ in merged(fleet))]) >= 25)
        fleet.servers[1].kill()
        time.sleep(0.1)
        fleet.servers[0].kill()
        upto = common(fleet.folders)
        assert upto == 20
        for index in range(2):
            fleet.serve(index, upto)
        ends = [fleet.workers[id].end() for id in range(2)]
        assert all(server.end()["version"] == 60 for server in fleet.servers.values())
    seen = dict(zip(ends[0]["tickets"], ends[0]["losses"], strict=True))
    np.testing.assert_allclose([seen[i] for i in range(60)], losses, rtol=1e-3, atol=1e-6)
    same(ends[1]["weights"], state, 1e-4)


def test_no_batch_begins_before_a_worker_has_reached_all_servers(tmp_path: Path) -> None:
    """Both servers are started again, and one worker is long in reaching the second: its share is not left out."""
    losses, state = alone(12)
    addresses = [f"unix:{tmp_path}/{index}" for index in range(2)]

    def serve(upto: int | None = None) -> list[Server]:
        terms = [
            ServerSettings(workers=2, total=12, every=4, folder=tmp_path / f"kept{index}", index=index, upto=upto)
            for index in range(2)
        ]
        return [training().server(each, servers=2, address=addresses[each.index]) for each in terms]

    servers, works = serve(), []

    def train(id: int) -> None:
        model = net().train()
        worker = Worker(model, addresses, SECRET, id=id)
        works.append(work := Work(training(), worker, model))
        first, second = worker.connections
        for _ in work.steps():
            if len(work.losses) == 6:
                both.wait()  # the servers are started again
                both.wait()
                first.close()  # so that it is the first that is reached first
                if id == 1:
                    reach = second.connect
                    second.connect = lambda patience, reach=reach: time.sleep(0.5) or reach(patience)  # type: ignore[method-assign]
        same({name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}, state)
        worker.remove()

    both = threading.Barrier(3, timeout=30)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(train, id) for id in range(2)]
        both.wait()
        for server in servers:
            server.close()
        servers = serve(common([tmp_path / f"kept{index}" for index in range(2)]))
        both.wait()
        for end in ends:
            end.result()
    assert all("averaged" not in note for server in servers for note in server.notes)
    for work in works:
        assert work.worker.again == 1
        np.testing.assert_allclose(work.losses, [*losses[:6], *losses[4:]], rtol=1e-5)
    for server in servers:
        server.close()


def test_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, {"weights": torch.full((100,), float(step))}, {"version": step})
    kept = [f"step-{step:012d}.{kind}" for step in (20, 30) for kind in ("json", "safetensors")]
    assert sorted(at.name for at in tmp_path.iterdir()) == kept
    body = tmp_path / f"step-{30:012d}.safetensors"
    damaged = bytearray(body.read_bytes())
    damaged[-5] ^= 1
    body.write_bytes(damaged)
    found = newest(tmp_path)
    assert found is not None
    assert found[1]["version"] == 20
    assert float(found[0]["weights"][0]) == 20.0
    assert newest(tmp_path, upto=15) is None


# The same as plain values


def test_tickets_are_each_done_once() -> None:
    resumed = Tickets.after(4, (6, 7), 9)
    assert [resumed.take(worker) for worker in range(3)] == [4, 5, 8]
    tickets = Tickets(4)
    assert [tickets.take(0), tickets.take(1), tickets.take(0)] == [0, 1, 0]
    tickets.done(0)
    tickets.give_back(1)
    again = Tickets.of(tickets.facts())
    assert tickets.take(1) == 1
    killed = Tickets.of(tickets.facts())  # while a worker had one
    tickets.give_back(1)
    for each in (tickets, again, killed):
        assert [each.take(2), each.take(0), each.take(5), each.take(6)] == [1, 2, 3, None]
        assert not each.finished
        for worker in (2, 0, 5):
            each.done(worker)
        assert each.finished


def test_clocks_hold_back_who_is_ahead() -> None:
    clocks = Clocks(2)
    for worker in (0, 1):
        clocks.join(worker)
    clocks.advance(0)
    assert clocks.may_go(0)
    clocks.advance(0)
    assert not clocks.may_go(0)
    clocks.join(7)  # late: beside the slowest
    clocks.advance(1)
    assert not clocks.may_go(0)
    clocks.leave(7)
    assert clocks.may_go(0)
    assert Clocks(float("inf"), {0: 99, 1: 0}).may_go(0)
