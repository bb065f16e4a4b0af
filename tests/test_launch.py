"""LocalRanks are started, heard and ended: real processes, real signals."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshfit.errors import DataError, JobError, RankError
from meshfit.launch import warm
from meshfit.launch.arena import LARGE, decode, encode
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World, connect, cores, disconnect, from_environment
from tests.distributed import distributed

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = Devices("cpu", None)
PROMPT = 20.0  # seconds, on a busy machine: less than what any rank sleeps here, and than any timeout


def gone(pids: list[int], within: float = 0.0) -> bool:
    deadline = time.monotonic() + within
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def through(message):
    with encode(message) as encoded:
        return decode(encoded.inline, encoded.arena)


def start_script(folder: Path, text: str, *, begin: str = "warm()") -> subprocess.Popen[str]:
    (folder / "train.py").write_text(
        f"import os, threading, time\nfrom meshfit.launch.warm import warm\n{begin}\n"
        "from meshfit.launch.local import LocalRanks\n"
        "from meshfit.launch.devices import Devices\n"
        f"CPU = Devices('cpu', None)\n{text}\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    command = [sys.executable, folder / "train.py"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where tests run behind a shell, it is ignored
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=folder, preexec_fn=heard)


# Talking


def test_messages_and_results_come_from_every_rank():
    def work(world, channel):
        channel.send(("born", world.rank))
        return channel.recv() * world.rank

    heard = []
    with LocalRanks(work, size=3, devices=CPU) as ranks:
        for rank, message in ranks.messages():
            heard.append((rank, message))
            ranks.send(rank, 10 + rank)
        assert ranks.results == [0, 11, 24]
    assert sorted(heard) == [(rank, ("born", rank)) for rank in range(3)]


def test_ranks_are_one_process_group_on_loopback_alone():
    def work(world, channel):
        total = torch.tensor(world.rank)
        dist.all_reduce(total)
        listening = {c.laddr[0] for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
        return world, dist.get_backend(), int(total), torch.get_num_threads(), listening

    with LocalRanks(work, size=4, devices=CPU) as ranks:
        for rank, (world, backend, total, threads, listening) in enumerate(ranks.results):
            assert world == World(rank, 4, torch.device("cpu"))
            assert (backend, total, threads) == ("gloo", 6, max(1, cores() // 4))
            assert listening <= {"127.0.0.1"}


def test_a_world_of_one_has_no_process_group():
    with LocalRanks(lambda world, _: (world.size, dist.is_initialized()), size=1, devices=CPU) as ranks:
        assert ranks.results == [(1, False)]


def test_ranks_see_the_surroundings_of_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_module.py").write_text("def where(world, channel): return __import__('os').environ['COLOUR']")
    from late_module import where  # type: ignore[import-not-found]

    with LocalRanks(where, size=1, devices=CPU) as ranks:
        assert ranks.results == ["green"]
    with LocalRanks(lambda *_: os.getcwd(), size=1, devices=CPU) as ranks:
        assert ranks.results == [str(tmp_path)]


# Starting


def test_a_script_without_guard_runs_once(tmp_path):
    script = start_script(
        tmp_path,
        """
open("runs", "a").write("x")
import torch
class Scale:
    def __init__(self, by): self.by = by
def double(x): return 2 * x
by = Scale(3)
with LocalRanks(lambda world, channel: Scale(double(by.by) + world.rank), size=2, devices=CPU) as ranks:
    print([(type(r) is Scale, r.by) for r in ranks.results])
print("after")
""",
    )
    out, _ = script.communicate(timeout=60)
    assert out.splitlines() == ["[(True, 6), (True, 7)]", "after"]
    assert (tmp_path / "runs").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.py"]  # no folder is left


def test_the_template_is_kept_for_later_runs():
    def work(world, channel):
        return os.getppid(), os.getpid()

    def run():
        with LocalRanks(work, size=2, devices=CPU) as ranks:
            (template, first), (same, second) = ranks.results
        assert template == same
        assert first != second
        return template

    assert run() == run()


def test_two_runs_at_once_meet_as_torchrun_says():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def work(rank):
        def work(world, channel):
            assert from_environment() is None
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            world = from_environment()
            assert world is not None
            connect(world, timeout=30)
            connect(world, timeout=30)  # the group exists already
            total = torch.tensor(world.rank + 1)
            dist.all_reduce(total)
            disconnect()
            return int(total)

        return work

    with LocalRanks(work(0), size=1, devices=CPU) as one, LocalRanks(work(1), size=1, devices=CPU) as two:
        assert one.results + two.results == [3, 3]


def test_a_rank_may_open_as_many_files_as_it_can() -> None:
    """Connections to a rank's port that others leave open cost it one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with LocalRanks(lambda *_: resource.getrlimit(resource.RLIMIT_NOFILE), size=1, devices=CPU) as ranks:
        ((most, _),) = ranks.results
    assert most == hard >= soft


# What travels


@pytest.mark.parametrize("elements", [10, LARGE])
def test_aliases_survive(elements):
    base = torch.arange(float(elements))
    head, tail = base[: elements // 2], base[elements // 2 :].view(torch.int32)
    model = nn.ModuleDict({"a": nn.Linear(elements, 1), "b": nn.Linear(elements, 1)})
    model["a"].weight = model["b"].weight
    array = np.zeros(elements)
    got = through({"base": base, "head": head, "tail": tail, "model": model, "arrays": (array, array)})
    got["base"][0], got["base"][-1] = 7, 0
    assert got["head"][0] == 7
    assert got["tail"][-1] == 0
    assert got["base"].untyped_storage()._cdata == got["tail"].untyped_storage()._cdata
    assert got["model"]["a"].weight is got["model"]["b"].weight
    assert got["arrays"][0] is got["arrays"][1]
    assert base[0] == 0  # the sender's own is another


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 300, dtype=torch.bfloat16),
        torch.randn(300, 300).t(),
        torch.randn(300, 300, dtype=torch.complex64),
        torch.zeros(70_000, dtype=torch.uint16),
        torch.randn(300, 300).to_sparse(),
        nn.Parameter(torch.randn(300, 300), requires_grad=False),
        torch.empty(0),
        torch.tensor(3),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so whenever one is rebuilt
def test_tensors_arrive_as_they_are(tensor):
    got = through(tensor)
    assert type(got) is type(tensor)
    assert got.requires_grad == tensor.requires_grad
    torch.testing.assert_close(got, tensor, rtol=0, atol=0)
    if not tensor.is_sparse:
        assert got.stride() == tensor.stride()


def test_arrays_and_long_pickles_arrive_as_they_are():
    frozen = np.arange(LARGE)
    frozen.flags.writeable = False
    sent = [
        frozen,
        np.asfortranarray(np.ones((300, 300))),
        np.array([{}, None]),
        list(range(LARGE)),
        "x" * LARGE,
    ]
    got = through(sent)
    assert [not value.flags.writeable for value in got[:3]] == [True, False, False]
    assert got[1].flags.f_contiguous
    for one, other in zip(got[:3], sent[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert got[3:] == sent[3:]


def test_ranks_share_what_is_large():
    data, copy, size = torch.ones(24, 1024, 1024), torch.ones(24, 1024, 1024), 4  # 96 MiB each

    def work(world, channel):
        assert copy.sum() == data.sum() == data.numel()  # read every page, of both
        dist.barrier()
        rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        private = sum(int(rollup[key].split()[0]) for key in ("Private_Clean", "Private_Dirty"))
        dist.barrier()
        return private / 1024

    with LocalRanks(work, size=size, devices=CPU) as ranks:
        assert max(ranks.results) < 64


def test_what_a_rank_writes_is_its_own():
    data = torch.zeros(LARGE)

    def work(world, channel):
        data[world.rank] = 1
        dist.barrier()
        return int(data.sum()), data

    with LocalRanks(work, size=2, devices=CPU) as ranks:
        (one, first), (other, second) = ranks.results
    assert (one, other, int(data.sum())) == (1, 1, 0)
    assert (first[0], second[0], first[1], second[1]) == (1, 0, 0, 1)


def test_what_cannot_travel_is_named_before_any_process_starts():
    class Reader:
        def __init__(self):
            self.name, self.lock = "reader", threading.Lock()

    reader = Reader()
    with pytest.raises(JobError) as caught, LocalRanks(lambda *_: reader.name, size=2, devices=CPU):
        pass
    headline, where, why, remedy = str(caught.value).split("\n  ")
    assert headline == "the job cannot be sent to another process"
    assert where == "'reader', used by the job,.lock is a _thread.lock"
    assert why == "TypeError: cannot pickle '_thread.lock' object"
    assert remedy == "pass a function that builds it"


def test_a_result_that_cannot_travel_is_an_error_of_the_job():
    with (
        pytest.raises(JobError, match=r"the result.value is a _thread.lock"),
        LocalRanks(lambda *_: threading.Lock(), size=2, devices=CPU) as ranks,
    ):
        _ = ranks.results


# Failing


def fail(how, *, size: int = 3) -> tuple[Exception, float]:
    """Run ranks of which rank 1 does ``how`` and the others wait for it: the error, seconds to the end."""

    def work(world, channel):
        channel.send(os.getpid())
        dist.barrier()
        if world.rank == 1:
            how()
        dist.all_reduce(torch.ones(1))

    pids: list[int] = []
    try:
        with LocalRanks(work, size=size, devices=CPU) as ranks:
            for _, pid in ranks.messages():
                pids.append(pid)
                began = time.monotonic()
    except Exception as error:
        seconds = time.monotonic() - began
        assert len(pids) == size
        assert gone(pids)
        return error, seconds
    pytest.fail("nothing was raised")


def test_a_rank_that_raises_is_named_with_its_own_traceback():
    def how():
        raise ValueError("bad sample 7")

    error, seconds = fail(how)
    assert isinstance(error, RankError)
    assert error.headline == "rank 1 raised ValueError: bad sample 7"
    assert error.trace.splitlines()[0] == "Traceback (most recent call last):"
    assert 'test_launch.py", line' in error.trace.splitlines()[1]
    assert "in work" in error.trace.splitlines()[1]
    assert 'raise ValueError("bad sample 7")' in error.trace
    assert seconds < PROMPT


def test_meshfits_own_errors_arrive_as_themselves():
    def how():
        raise DataError("the file is empty", "data.csv has 0 rows")

    error, _ = fail(how)
    assert type(error) is DataError
    assert error.facts == ("data.csv has 0 rows",)


@pytest.mark.parametrize(
    ("how", "headline"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by signal 9 (SIGKILL)"),
        (lambda: sys.exit(0), "rank 1 left with exit code 0 before its work was done"),
        (lambda: os._exit(3), "rank 1 left with exit code 3 before its work was done"),
    ],
    ids=["killed", "exit", "_exit"],
)
def test_a_rank_that_dies_is_the_cause_not_those_that_lost_it(how, headline):
    error, seconds = fail(how)
    assert isinstance(error, RankError)
    assert error.headline == headline
    assert seconds < PROMPT


def test_a_death_noted_while_looking_at_stacks_is_not_forgotten():
    def work(world, channel):
        channel.send("ready")
        os._exit(channel.recv())

    with LocalRanks(work, size=2, devices=CPU) as ranks:
        messages = ranks.messages()
        assert [next(messages)[1], next(messages)[1]] == ["ready", "ready"]
        ranks.send(0, 3)
        time.sleep(0.3)
        ranks.stacks()
        with pytest.raises(RankError, match="rank 0 left with exit code 3"):
            next(messages)


def test_the_end_of_the_template_is_the_end_of_its_ranks():
    def work(world, channel):
        channel.send([os.getpid(), os.getppid()])
        time.sleep(60)

    with LocalRanks(work, size=1, devices=CPU) as ranks:
        messages = ranks.messages()
        _, pids = next(messages)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="forked from has ended"):
            next(messages)
    assert gone(pids, within=PROMPT)
    assert ranks._folder is not None
    assert not Path(ranks._folder).exists()
    with LocalRanks(lambda *_: "another", size=1, devices=CPU) as ranks:
        assert ranks.results == ["another"]


def test_a_template_that_is_about_to_end_is_not_asked():
    with LocalRanks(lambda *_: os.getppid(), size=1, devices=CPU) as ranks:
        (before,) = ranks.results
    assert warm._hold is not None
    warm._hold.control.shutdown(socket.SHUT_RDWR)  # as the kernel closes it, before the process can be waited for
    with LocalRanks(lambda *_: os.getppid(), size=1, devices=CPU) as ranks:
        assert ranks.results != [before]
    assert gone([before])


def test_the_first_cause_wins_over_lost_connections():
    def how():
        dist.destroy_process_group()  # the others lose their connection, and say so
        time.sleep(0.1)
        raise ValueError("the true cause")

    assert isinstance(error := fail(how)[0], RankError)
    assert error.headline == "rank 1 raised ValueError: the true cause"


def test_a_lost_connection_without_another_cause_is_the_error():
    def how():
        dist.destroy_process_group()
        time.sleep(60)

    assert isinstance(error := fail(how)[0], RankError)
    assert "closed by peer" in error.headline or "reset by peer" in error.headline


# Ending


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_leaving_early_ends_even_stubborn_ranks(leave):
    def work(world, channel):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "100"])
        channel.send([os.getpid(), child.pid])
        time.sleep(100)

    pids: list[int] = []
    try:
        with LocalRanks(work, size=2, devices=CPU) as ranks:
            for _, message in ranks.messages():
                pids += message
                if len(pids) == 4:
                    began = time.monotonic()
                    if leave == "break":
                        break
                    raise LookupError("mine")
    except LookupError:
        assert leave == "raise"
    assert time.monotonic() - began < PROMPT
    assert len(pids) == 4
    assert gone(pids)


WAITING = """
import subprocess
from meshfit.launch import warm
template = warm._hold.process.pid

def work(world, channel):
    assert os.getppid() == template
    channel.send([template, os.getpid(), subprocess.Popen(["sleep", "100"]).pid])
    time.sleep(100)

try:
    with LocalRanks(work, size=2, devices=CPU) as ranks:
        for rank, pids in ranks.messages():
            print(*pids, flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def waiting(script: subprocess.Popen[str]) -> list[int]:
    """The processes of a script once all of them are there: the template, each rank, each rank's child."""
    assert script.stdout
    pids = [int(pid) for _ in range(2) for pid in script.stdout.readline().split()]
    assert len(set(pids)) == 5
    return pids


# The kernel's signal for a dead parent is tied to the *thread* that started the template.
IN_A_THREAD = "thread = threading.Thread(target=warm); thread.start(); thread.join()"


@pytest.mark.parametrize("begin", ["warm()", IN_A_THREAD], ids=["main thread", "thread that ended"])
def test_nothing_outlives_a_killed_caller(tmp_path, begin):
    caller = start_script(tmp_path, WAITING, begin=begin)
    pids = waiting(caller)
    caller.kill()
    caller.communicate()
    assert gone(pids, within=PROMPT)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # nor does any folder


def test_ctrl_c_ends_ranks_and_goes_on(tmp_path):
    caller = start_script(tmp_path, WAITING)
    pids = waiting(caller)
    began = time.monotonic()
    caller.send_signal(signal.SIGINT)
    assert caller.communicate(timeout=2 * PROMPT)[0] == "interrupted\n"
    assert time.monotonic() - began < PROMPT
    assert caller.returncode == 0
    assert gone(pids)


# Hanging


def test_stacks_say_where_each_rank_stands(capfd):
    def stuck(world, channel):
        channel.send("ready")
        channel.recv()

    with LocalRanks(stuck, size=2, devices=CPU) as ranks:
        messages = ranks.messages()
        assert next(messages)
        assert next(messages)
        with pytest.raises(TimeoutError):
            next(ranks.messages(timeout=0.5))
        ranks.stacks()
        err = capfd.readouterr().err
        for rank in range(2):
            ranks.send(rank, "go on")
        assert ranks.results == [None, None]
    _, first, second = err.split("\nrank ")
    assert first.startswith("0:\n")
    assert second.startswith("1:\n")
    assert "in stuck" in first
    assert "in stuck" in second


# The decorator of distributed tests


@pytest.mark.parametrize("add", [0, 5])
@distributed(world=4)
def test_distributed_bodies_run_in_every_rank(add, tmp_path):
    total = torch.tensor(dist.get_rank() + add)
    dist.all_reduce(total)
    assert total == 6 + 4 * add
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4


@distributed(world=2)
def body_that_fails(expected):
    assert dist.get_rank() != expected


def body_that_hangs():
    if dist.get_rank() == 1:
        time.sleep(100)  # here it stands


def test_a_failing_rank_of_a_distributed_test_is_named():
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 raised AssertionError") as caught:
        body_that_fails(expected=1)
    assert "assert dist.get_rank() != expected" in str(caught.value)


def test_a_distributed_test_that_hangs_is_cut(capfd):
    for seconds in (1, 8, 30):  # a busy machine takes a second to start ranks
        with pytest.raises(pytest.fail.Exception, match=f"cut after {seconds} s"):
            distributed(world=2, timeout=seconds)(body_that_hangs)()
        told = capfd.readouterr().err.split("rank 1:")[1]
        if "in body_that_hangs" in told:
            return
    pytest.fail(told)


def test_a_module_that_trains_when_it_is_imported_is_not_trained_again_by_ranks_that_import_it(tmp_path, monkeypatch):
    """Each of which would start ranks that import it, and so on."""
    (tmp_path / "trains_at_import.py").write_text(
        "import meshfit, torch\n"
        "def loss(outputs, targets): return (outputs - targets).square().mean()\n"
        "optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)\n"
        "x = torch.ones(4, 2)\n"
        "how = {'loss': loss, 'optimizer': optimizer, 'steps': 1, 'plan': 'data=2', 'devices': 'cpu'}\n"
        "meshfit.fit(torch.nn.Linear(2, 2), (x, x), **how)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError, match=r"ranks import trains_at_import\.py for functions"):
        import trains_at_import  # noqa: F401  # type: ignore[import-not-found]
