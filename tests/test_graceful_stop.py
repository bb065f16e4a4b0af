"""Asked to end, by Ctrl-C, SIGTERM or a file: a training ends after a step, saved, and goes on as if never stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from meshfit.checkpoint.graceful_stop import noticed
from meshfit.errors import JobError
from tests.command import Forked
from tests.few import more
from tests.test_resume import X, Y, fit, weights

heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # where tests run behind a shell, it is ignored

SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume import fit

if __name__ == "__main__":
    def began(step):
        Path({out!r}, "began").touch()
        time.sleep({pause})

    fit(Path({out!r}), steps=3000, plan={plan!r}, checkpoint=100_000, each_step=[began], **{more})
    print("to the end")
"""


def started(
    tmp_path: Path, plan: str, pause: float = 0.02, *, fresh: bool = False, **more: object
) -> tuple[Forked | subprocess.Popen[str], Path]:
    """A training some steps in; ``fresh``: by a Python that Ctrl-C ends as it ends any."""
    out, script = tmp_path / "run", tmp_path / "train.py"
    how = {"plan": plan, "pause": pause, "more": more}
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1]), out=str(out), **how))
    environ = {"OMP_NUM_THREADS": "1"}  # as the tests themselves: sums in the same order
    if fresh:
        command, env = [sys.executable, str(script)], {**os.environ, **environ}
        process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=env, preexec_fn=heard)
    else:
        process = Forked(script, **environ)
    until = time.monotonic() + 120
    while not (out / "began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return process, out


@pytest.mark.parametrize(("plan", "number"), [("data=1", signal.SIGINT), ("data=2", signal.SIGTERM)])
def test_a_signal_saves_and_ends(plan: str, number: signal.Signals, tmp_path: Path) -> None:
    process, out = started(tmp_path, plan, fresh=number == signal.SIGINT)
    process.send_signal(number)
    said, told = process.communicate(timeout=120)
    assert "to the end" not in said
    assert "ends after this step, saved" in told
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number), told
    goes_on(out, plan)


def goes_on(out: Path, plan: str) -> None:
    """Saved once, at the end; resumed, it trains as if never stopped."""
    assert not (out / "stop").exists()
    (saved,) = out.glob("checkpoints/*/manifest.json")
    step = int(saved.parent.name.rpartition("-")[2])
    assert step < 3000
    resumed = fit(out, steps=step + 5, plan=plan, checkpoint=100_000, resume=True)
    assert resumed.history[0].step == step + 1
    never = fit(steps=step + 5, plan=plan)
    for name, tensor in weights(never).items():
        assert torch.equal(weights(resumed)[name], tensor), name


@pytest.mark.parametrize("number", [signal.SIGTERM, more(signal.SIGUSR2)])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(number: signal.Signals, tmp_path: Path) -> None:
    process, out = started(tmp_path, "data=2")
    below = psutil.Process(process.pid).children(recursive=True)
    second = sorted((each for each in below if each.ppid() != process.pid), key=lambda each: each.create_time())[1]
    second.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert f"{number.name} to rank 1: all end after this step, saved" in told
    assert process.returncode == (143 if number == signal.SIGTERM else 75), told
    goes_on(out, "data=2")


def test_a_signal_to_all_processes_of_a_run_saves_it(tmp_path: Path) -> None:
    """As schedulers send it: to the caller, the template, the ranks, and their readers of data."""
    process, out = started(tmp_path, "data=2", workers="1 processes")
    every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(every) == 6
    for each in reversed(every):
        each.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143, told
    goes_on(out, "data=2")


@pytest.mark.parametrize("notice", [more("SIGUSR1"), more("file"), "address"])
def test_a_notice_of_preemption_saves_and_says_run_me_again(notice: str, tmp_path: Path) -> None:
    plan = "data=1" if notice == "SIGUSR1" else "data=2"
    with Metadata() as cloud:
        cloud.answers["/preempted"] = 200, "FALSE"
        where = {"SIGUSR1": {}, "file": {"preemption": str(tmp_path / "gone")}, "address": {"preemption": cloud.url}}
        process, out = started(tmp_path, plan, **where[notice])
        if notice == "SIGUSR1":
            process.send_signal(signal.SIGUSR1)
        elif notice == "file":
            (tmp_path / "gone").touch()
        else:
            cloud.answers["/preempted"] = 200, "TRUE"
        _, told = process.communicate(timeout=120)
    assert process.returncode == 75, told
    assert "ends after this step, saved, within 30 s" in told
    goes_on(out, plan)


def test_what_cannot_be_saved_in_time_ends_all_the_same(tmp_path: Path) -> None:
    process, out = started(tmp_path, "data=1", pause=60, grace="0.2 s")
    process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 75, told
    assert "nothing was saved within 0.2 s" in told
    assert time.monotonic() - began < 50
    assert not list(out.glob("checkpoints/*/manifest.json"))


class Metadata:
    """An address as clouds have it: a real server on this machine."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.needs_token = False
        answers = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, text = answers.answers.get(self.path, (404, ""))
                if answers.needs_token and self.headers["X-aws-ec2-metadata-token"] != "secret":
                    code = 401
                self._send(code, text)

            def do_PUT(self) -> None:
                self._send(200, "secret" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else "")

            def _send(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/preempted"

    def __enter__(self) -> "Metadata":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_notices_as_clouds_give_them() -> None:
    with Metadata() as cloud:
        given = [(404, ""), (200, "FALSE"), (200, "NONE"), (200, '{"DocumentIncarnation": 1, "Events": []}')]
        given += [(200, "TRUE"), (200, '{"action": "terminate"}'), (200, '{"Events": [{"EventType": "Preempt"}]}')]
        found = []
        for cloud.answers["/preempted"] in given:
            found.append(noticed(cloud.url))
        assert found == [False] * 4 + [True] * 3
        cloud.needs_token = True
        assert noticed(cloud.url)
        cloud.answers["/preempted"] = 404, ""
        assert not noticed(cloud.url)
        cloud.answers["/preempted"] = 500, ""
        with pytest.raises(OSError, match="500"):
            noticed(cloud.url)
    with pytest.raises(JobError, match="preemption='ftp://x/y' cannot be looked at"):
        fit(Path("unused"), checkpoint=1, preemption="ftp://x/y")
    with pytest.raises(JobError, match="preemption= needs checkpoint="):
        fit(preemption="/tmp/x")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process, out = started(tmp_path, "data=2")
    process.send_signal(signal.SIGTERM)
    while not (out / "stop").exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    process.communicate()


def test_a_file_ends_it_too(tmp_path: Path) -> None:
    def ask(step: object) -> None:
        (tmp_path / "run" / "stop").touch()
        time.sleep(0.05)

    ended = fit(tmp_path / "run", steps=10_000, plan="data=2", checkpoint=100_000, each_step=[ask])
    last = ended.history[-1].step
    assert last < 10_000
    assert any(f"ended after step {last}, as asked" in note for note in ended.notes)
    assert len(list(tmp_path.glob("run/checkpoints/*/manifest.json"))) == 1


def test_without_checkpoints_signals_are_as_ever(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    fit(steps=2, callbacks=[lambda step: seen.append(signal.getsignal(signal.SIGTERM))])
    assert seen == [before] * 2
    fit(tmp_path / "run", steps=2, checkpoint=1, callbacks=[lambda step: seen.append(signal.getsignal(signal.SIGTERM))])
    assert before not in seen[2:]
    assert signal.getsignal(signal.SIGTERM) == before


STARTING = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume import X, Y, fit

def slow():
    (Path({out!r}).parent / "starting").touch()
    time.sleep(60)
    return X, Y

if __name__ == "__main__":
    fit(Path({out!r}), steps=3, plan={plan!r}, checkpoint=1, data=slow)
    print("to the end")
"""


@pytest.mark.parametrize(
    ("plan", "number", "before"),
    [
        ("data=2", signal.SIGTERM, []),
        more("data=1", signal.SIGINT, [], id="Ctrl-C"),
        ("data=2", signal.SIGTERM, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    ],
    ids=["SIGTERM", None, "torchrun"],
)
def test_a_signal_while_it_starts_ends_it_at_once(
    plan: str, number: signal.Signals, before: list[str], tmp_path: Path
) -> None:
    out, script = tmp_path / "run", tmp_path / "train.py"
    script.write_text(STARTING.format(root=str(Path(__file__).parents[1]), out=str(out), plan=plan))
    command = [sys.executable, *before, str(script)]
    fresh = before or number == signal.SIGINT
    how: dict[str, Any] = {"stdout": -1, "stderr": -1, "text": True, "preexec_fn": heard}
    process = subprocess.Popen(command, **how) if fresh else Forked(script)
    until = time.monotonic() + 120
    while not (tmp_path / "starting").exists() and time.monotonic() < until:
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said, told = process.communicate(timeout=50)
    assert "to the end" not in said
    assert "ends now, it was still starting" in told
    assert "saved;" not in told
    if not before:
        assert process.returncode == (128 + number if number == signal.SIGTERM else -number), told
    assert process.returncode != 0
    assert not (out / "stop").exists()
    assert not list(out.glob("checkpoints/*-step-*"))
    psutil.wait_procs(below, timeout=10)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below)


def test_a_file_made_while_it_starts_ends_it_after_a_step(tmp_path: Path) -> None:
    def slow() -> tuple[torch.Tensor, torch.Tensor]:
        if not (tmp_path / "asked").exists():
            (tmp_path / "run" / "stop").touch()
        (tmp_path / "asked").touch()
        return X, Y

    ended = fit(tmp_path / "run", steps=100_000, plan="data=2", checkpoint=100_000, data=slow)
    assert any("as asked" in note for note in ended.notes)
    assert not (tmp_path / "run" / "stop").exists()


def test_a_file_of_before_ends_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "run", steps=2, checkpoint=1)
    (tmp_path / "run" / "stop").touch()
    ended = fit(tmp_path / "run", steps=60, checkpoint=1000, resume=True, callbacks=[lambda step: time.sleep(0.02)])
    assert ended.history[-1].step == 60
