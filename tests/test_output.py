"""What ranks print comes to the caller and to the run's folder, all of it, and is not in the way."""

import ctypes
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshfit
from meshfit.errors import RankError
from meshfit.launch import output
from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.output import TOGETHER, Lines, Log

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = Devices("cpu", None)


# Lines of several ranks as those of one


def shown(said: list[tuple[float, int, str]], size: int = 3, role: str = "rank", stream: int = 1) -> list[str]:
    lines, found = Lines(size, role), []
    for at, who, text in said:
        found += lines.due(at)
        lines.add(who, stream, text, at)
    return [text.removesuffix("\n") for _, text in [*found, *lines.due(float("inf"))]]


def test_the_first_ranks_lines_are_as_they_are_and_others_are_named():
    assert shown([(0, 0, "loading"), (0, 2, "no file"), (0, 1, "")]) == ["loading", "[rank 2] no file"]
    assert shown([(0, 0, "keeping")], role="server") == ["[server 0] keeping"]


def test_what_all_say_at_the_same_time_is_shown_once():
    assert shown([(0.0, 0, "a"), (0.1, 2, "a"), (0.2, 1, "a")]) == ["[3 ranks] a"]
    assert shown([(0.0, 1, "a"), (0.1, 2, "a")]) == ["[ranks 1, 2] a"]
    late = TOGETHER * 1.1
    assert shown([(0.0, 0, "a"), (0.1, 1, "a"), (late, 2, "a")]) == ["[ranks 0, 1] a", "[rank 2] a"]


def test_a_line_said_twice_is_shown_twice():
    twice = [(0, who, "a") for who in range(3) for _ in range(2)]
    assert shown(twice) == ["[3 ranks] a"] * 2


def test_lines_stay_in_the_order_of_each_rank():
    said = [(0, 0, "a"), (0, 0, "b"), (0, 1, "b"), (0, 1, "a"), (0, 2, "a"), (0, 2, "b")]
    found = shown(said)
    assert found == ["[ranks 0, 2] a", "[3 ranks] b", "[rank 1] a"]


def test_the_time_at_a_lines_beginning_does_not_make_it_another():
    clock = "2026-01-02 10:11:12,{} INFO reading"
    assert shown([(0, who, clock.format(100 + who)) for who in range(3)]) == ["[3 ranks] " + clock.format(100)]
    torch_says = "[rank{0}]:[W1115 21:55:27.12{0} {0}31 Gloo.cpp:1] slow"
    assert shown([(0, who, torch_says.format(who)) for who in range(3)]) == ["[3 ranks] " + torch_says.format(0)]
    assert len(shown([(0, 0, "took 10:11:12"), (0, 1, "took 10:11:13")])) == 2


def test_a_warning_that_another_rank_gave_is_not_given_again():
    warning, code = "/a/b.py:7: UserWarning: slow", "  slow()"
    said = [(0, 0, warning), (0, 0, code), (5, 1, warning), (5, 1, code), (6, 1, "on"), (9, 0, warning)]
    assert shown(said, stream=2) == [warning, code, "[rank 1] on", warning]


def test_a_flood_does_not_wait_for_others():
    lines = Lines(2)
    for i in range(output.MOST_HELD + 10):
        lines.add(0, 1, f"line {i}", 0.0)
    assert [text for _, text in lines.due(0.0)] == [f"line {i}\n" for i in range(10)]


def test_a_log_keeps_the_newest_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MOST_LOGGED", 10_000)
    log = Log(tmp_path / "logs" / "rank0.log")
    for i in range(5000):
        log.add(b"line %d\n" % i)
    log.close()
    first, *kept = (tmp_path / "logs" / "rank0.log").read_text().splitlines()
    assert first.startswith("[meshfit: about ")
    assert kept == [f"line {i}" for i in range(5000 - len(kept), 5000)]
    assert 4000 < sum(map(len, kept)) + len(kept) <= 10_000
    assert os.listdir(tmp_path / "logs") == ["rank0.log"]


def test_settled_is_all_that_was_written_though_nobody_has_read_it_yet(capsys):
    written = output.Output(2)
    with written.ends(0) as mine, written.ends(1) as others:
        os.write(mine[0], b"one\n")
        os.write(others[1], "zw\u00f6lf\nhalf".encode())
        written.settle()
        assert capsys.readouterr() == ("one\n", "[rank 1] zw\u00f6lf\n")
        assert written.last(1) == ["zw\u00f6lf"]
    written.close()
    assert capsys.readouterr().err == "[rank 1] half\n"


# From ranks


def test_python_c_and_processes_are_heard_through_the_callers_own_streams(capsys, tmp_path):
    def work(world, _):
        if world.rank == 1:
            print("from Python")
            ctypes.CDLL(None).printf(b"from C\n")
            print("to stderr", file=sys.stderr)
            subprocess.run(["sh", "-c", "echo from a process; echo its error >&2"], check=True)
            ctypes.CDLL(None).printf(b"not ended")

    with LocalRanks(work, size=2, devices=CPU, log=tmp_path) as ranks:
        assert ranks.results == [None, None]
    out, err = capsys.readouterr()
    printed = ["from Python", "from C", "from a process", "not ended"]
    assert out.splitlines() == [f"[rank 1] {line}" for line in printed]
    assert err.splitlines() == ["[rank 1] to stderr", "[rank 1] its error"]
    assert sorted((tmp_path / "logs" / "rank1.log").read_text().splitlines()) == sorted(
        [*printed, "to stderr", "its error"]
    )
    assert not (tmp_path / "logs" / "rank0.log").exists()


def test_nothing_is_lost_and_nobody_waits_for_a_busy_caller(capsys):
    def work(world, channel):
        for i in range(20_000):
            print(f"{i:06d} {'x' * 60}")
        channel.send("done")

    with LocalRanks(work, size=2, devices=CPU) as ranks:
        assert ranks._channels[0].poll(20)  # this process does not look at any rank meanwhile
        assert ranks.results == [None, None]
    found = capsys.readouterr().out.splitlines()
    for prefix in ("", "[rank 1] "):
        mine = [line for line in found if line.startswith((prefix + "0", "[2 ranks] 0"))]
        assert [int(line.split()[-2]) for line in mine] == list(range(20_000))


def test_the_last_lines_of_a_rank_that_is_killed_are_in_the_error(capsys):
    def work(world, channel):
        if world.rank == 1:
            for i in range(9):
                print("at", i, flush=True)
            os.write(2, b"in the middle of")
            os.kill(os.getpid(), signal.SIGKILL)
        channel.recv()

    with pytest.raises(RankError) as caught, LocalRanks(work, size=2, devices=CPU) as ranks:
        ranks.results  # noqa: B018
    assert caught.value.headline == "rank 1 was killed by signal 9 (SIGKILL)"
    assert caught.value.facts[-5:] == ("  at 5", "  at 6", "  at 7", "  at 8", "  in the middle of")
    assert "[rank 1] in the middle of" in capsys.readouterr().err


def test_an_error_says_its_rank_and_what_it_printed_last(capsys):
    def work(world, channel):
        if world.rank == 1:
            print("opening part 3")
            raise ValueError("no such part")
        channel.recv()

    with pytest.raises(RankError) as caught, LocalRanks(work, size=2, devices=CPU) as ranks:
        ranks.results  # noqa: B018
    assert str(caught.value).splitlines()[:3] == [
        "rank 1 raised ValueError: no such part",
        "  the last it printed:",
        "    opening part 3",
    ]


def test_a_line_that_is_slow_to_end_is_seen_on_the_way(capsys):
    def work(world, channel):
        print("ten", end="", flush=True)
        channel.recv()
        print(", twenty")

    with LocalRanks(work, size=1, devices=CPU) as ranks:
        deadline, seen = time.monotonic() + 10, ""
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
            seen += capsys.readouterr().out
        ranks.send(0, "go on")
        assert ranks.results == [None]
    assert (seen, capsys.readouterr().out) == ("ten", ", twenty\n")


def test_a_caller_whose_output_nobody_reads_goes_on(monkeypatch):
    class Closed:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with LocalRanks(lambda world, _: print("into nothing") or 1, size=2, devices=CPU) as ranks:
        assert ranks.results == [1, 1]


def test_a_child_of_the_caller_that_ends_takes_nothing_along(capsys):
    def work(world, channel):
        channel.recv()
        print("still heard")

    with LocalRanks(work, size=1, devices=CPU) as ranks:
        child = os.fork()
        if not child:
            ranks._output.close()  # as Python does when it ends
            os._exit(0)
        os.waitpid(child, 0)
        ranks.send(0, "go on")
        deadline, seen = time.monotonic() + 10, ""
        while not seen and time.monotonic() < deadline:  # by the thread, before anything is closed
            time.sleep(0.05)
            seen += capsys.readouterr().out
        assert ranks.results == [None]
    assert seen == "still heard\n"


def test_ranks_log_and_warn_as_the_caller_does(capsys, monkeypatch):
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger("quiet"), "level", logging.ERROR)

    def work(world, _):
        logging.getLogger("parts").info("reading")
        logging.getLogger("quiet").info("not this")
        warnings.warn("not this either", UserWarning, stacklevel=1)
        warnings.warn("but this", FutureWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UserWarning)
        with LocalRanks(work, size=1, devices=CPU) as ranks:
            assert ranks.results == [None]
    err = capsys.readouterr().err
    assert err.startswith("INFO parts: reading\n")
    assert "not this" not in err
    assert "FutureWarning: but this" in err


# In a training


class Talks(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "told"):
            self.told = True
            print("first batch")
            warnings.warn("this is slow", stacklevel=1)
            if dist.is_initialized() and dist.get_rank() == 1:
                print("only here")
        return super().forward(x)


SCRIPT = """
import meshfit, torch
from tests.test_output import Talks
meshfit.fit(Talks(4, 2), (torch.randn(64, 4), torch.randint(2, (64,))), loss=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8, epochs=2, plan="data=2", devices="cpu",
            out="run", progress=True)
print("after")
"""


def test_a_training_keeps_what_its_ranks_print(tmp_path, capsys):
    data = torch.randn(64, 4), torch.randint(2, (64,))
    result = meshfit.fit(
        Talks(4, 2),
        data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=8,
        epochs=1,
        plan="server=1 data=2",
        devices="cpu",
        out=tmp_path / "run",
        progress=False,
    )
    assert result.folder is not None
    logs = {path.name: path.read_text() for path in (result.folder / "logs").iterdir()}
    assert {"rank0.log", "rank1.log"} <= logs.keys()
    assert all(logs[name].startswith("first batch\n") for name in ("rank0.log", "rank1.log"))
    err = capsys.readouterr().err
    assert err.count("UserWarning: this is slow") == 1


def test_lines_stand_above_the_progress_bar(tmp_path):
    """On a terminal: each line whole, the bar after it, and the caller's own output as ever."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "120"}
    script = subprocess.Popen(
        [sys.executable, "train.py"], stdout=theirs, stderr=theirs, cwd=tmp_path, env=environ, close_fds=True
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # how a terminal ends
        pass
    assert script.wait(30) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r", "\n").splitlines()
    said_first = {line for line in lines if "first batch" in line}
    assert said_first in ({"[2 ranks] first batch"}, {"first batch", "[rank 1] first batch"})  # on a busy machine
    assert "[rank 1] only here" in lines
    assert sum("UserWarning: this is slow" in line for line in lines) == 1
    assert "after" in lines
    assert any("16/16" in line for line in lines)
