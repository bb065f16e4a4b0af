"""The live page: who may look, what they see, and that training does not care."""

import asyncio
import gzip
import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from meshfit.errors import JobError
from meshfit.observe.watch import PageServer, runs_in
from tests.command import Forked
from tests.recorded import folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Answer = tuple[int, dict[str, str], bytes]


async def ask(port: int, text: str) -> Answer:
    """Send ``text`` as it is; what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.replace("\n", "\r\n").encode("latin-1"))
    await writer.drain()
    got = await reader.read()
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]) if first else 0, headers, body


def served(path: Path, talk: Any) -> Any:
    """What ``talk(page, get)`` returns, with a page served from ``path``."""

    async def run() -> Any:
        page = PageServer(path)
        async with await page.start():

            async def get(target: str, method: str = "GET", *, token: bool = True, **headers: str) -> Answer:
                more = {"Host": f"127.0.0.1:{page.port}", **{k.replace("_", "-"): v for k, v in headers.items()}}
                if token:
                    more["Cookie"] = f"meshfit_{page.port}={page.token}"
                lines = "".join(f"{k}: {v}\n" for k, v in more.items())
                return await ask(page.port, f"{method} {target} HTTP/1.1\n{lines}\n")

            return await talk(page, get)

    return asyncio.run(run())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return folder(tmp_path / "runs" / "one", [{}, {"exchange": 0.01}], done=False)


def test_the_link_sets_a_cookie_and_the_cookie_opens_the_page(run: Path) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        status, headers, _ = await get(f"/?token={page.token}", token=False)
        assert status == 303
        assert headers["location"] == "/"
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=Strict" in headers["set-cookie"]
        status, headers, body = await get("/")
        assert status == 200
        assert b"one" in body
        assert "nonce-" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
        status, _, body = await get("/data")
        data = json.loads(gzip.decompress(body))
        assert (data["name"], data["state"], data["live"]) == ("one", "running", True)

    served(run, talk)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "ODD"])
def test_host_and_origin_are_checked_on_every_method(run: Path, method: str) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", f"127.0.0.1:{page.port + 1}", ""):
            assert (await get("/data", method, Host=host))[0] == 421
        for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port}", "http://127.0.0.1"):
            assert (await get("/data", method, Origin=origin))[0] == 403
        assert (await get("/data", method, Sec_Fetch_Site="cross-site"))[0] == 403
        assert (await get("/data", method, token=False))[0] == (403 if method in ("GET", "HEAD") else 405)
        own = (await get("/data", method, Origin=f"http://localhost:{page.port}", Host=f"localhost:{page.port}"))[0]
        assert own == (200 if method in ("GET", "HEAD") else 405)

    served(run, talk)


def test_wrong_tokens_are_refused(run: Path) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        assert (await get("/?token=" + page.token[:-1], token=False))[0] == 403
        assert (await get("/?token=%ff%c3", token=False))[0] == 403
        assert (await get("/", token=False, Cookie=f"meshfit_{page.port}=x"))[0] == 403
        assert (await get("/", token=False, Cookie="meshfit\x7f; ==;;"))[0] == 403

    served(run, talk)


@pytest.mark.parametrize(
    "target",
    [
        "/run/0",
        "/run/../run.json",
        "/run.json",
        "/%2e%2e/run.json",
        "/run/-1",
        "/run/0/data/x",
        "/run/٣",
        "/../../etc/passwd",
    ],
)
def test_no_part_of_a_request_becomes_a_path(run: Path, target: str) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        assert (await get(target.encode().decode("latin-1")))[0] == 404

    served(run, talk)


@pytest.mark.parametrize(
    "text",
    ["nonsense\n\n", "GET / SPDY/3\n\n", "GET http://x/ HTTP/1.1\n\n", "GET / HTTP/1.1\nHost: a\nHost: b\n\n"],
)
def test_what_is_no_request_gets_no_answer(run: Path, text: str) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        assert (await ask(page.port, text))[0] == 0
        assert (await get("/data"))[0] == 200

    served(run, talk)


def test_it_listens_on_loopback_alone(run: Path) -> None:
    async def listening() -> str:
        async with await PageServer(run).start() as server:
            return server.sockets[0].getsockname()[0]

    assert asyncio.run(listening()) == "127.0.0.1"


def test_several_runs_stand_side_by_side(run: Path) -> None:
    folder(run.parent / "two", [{}], plan="shard=2")

    async def talk(page: PageServer, get: Any) -> None:
        data = json.loads(gzip.decompress((await get("/data"))[2]))
        assert [(r["name"], r["state"]) for r in data["runs"]] == [("one", "running"), ("two", "finished")]
        numbers = {r["name"]: r["id"] for r in data["runs"]}
        for name, number in numbers.items():
            data = json.loads(gzip.decompress((await get(f"/run/{number}/data"))[2]))
            assert (data["name"], data["source"]) == (name, f"/run/{number}/data")
        folder(run.parent / "three", [{}])
        page._answers.clear()
        data = json.loads(gzip.decompress((await get("/data"))[2]))
        assert {r["name"]: r["id"] for r in data["runs"]} == {**numbers, "three": 2}  # numbers stay

    served(run.parent, talk)
    assert {path.name for path in runs_in(run.parent)} == {"one", "two", "three"}


def test_many_slow_viewers_hold_nobody_up(run: Path) -> None:
    async def talk(page: PageServer, get: Any) -> None:
        slow = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(200)]
        for i, (_, writer) in enumerate(slow):  # half never finish their question, half never read the answer
            whole = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: meshfit_{page.port}={page.token}\r\n\r\n"
            writer.write(whole.encode()[: 20 if i % 2 else None])
        began = time.perf_counter()
        assert (await get("/data"))[0] == 200
        assert time.perf_counter() - began < 20  # on a busy machine
        for _, writer in slow:
            writer.transport.abort()

    served(run, talk)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no folder"):
        PageServer(tmp_path / "nowhere")


TRAIN = """
import pathlib, time, torch, torch.nn.functional as F, meshfit
X, Y = torch.randn(64, 8), torch.randint(4, (64,))
def step(model, batch):
    time.sleep(0.02)
    return F.cross_entropy(model(batch[0]), batch[1])
meshfit.fit(lambda: torch.nn.Linear(8, 4), (X, Y), step=step, optimizer=torch.optim.SGD, batch_size=16, steps=10_000,
            plan="data=2", devices="cpu", out="run",
            callbacks=lambda step: "stop" if pathlib.Path("enough").exists() else None)
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_follows_a_run_and_training_outlives_it(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    (tmp_path / "train.py").write_text(TRAIN)
    with ExitStack() as stack:
        training = Forked("train.py", folder=tmp_path)
        stack.callback(training.kill)
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        code = "from meshfit.cli import main; main()"
        command = [sys.executable, "-c", code, "watch", str(tmp_path / "run")]
        watching = _started(stack, command, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        url = watching.stdout.readline().strip()
        running = stack.enter_context(playwright.sync_playwright())
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab, said = browser.new_page(), []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(url)
        assert "token" not in tab.url
        assert tab.locator(".state").inner_text() == "under way"
        before, until = tab.locator(".tile .note").first.inner_text(), time.monotonic() + 30
        while tab.locator(".tile .note").first.inner_text() == before and time.monotonic() < until:
            tab.wait_for_timeout(200)
        assert tab.locator(".tile .note").first.inner_text() != before
        assert said == []
        browser.close()
        watching.kill()
        watching.wait()
        lines = lambda: len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        seen, until = lines(), time.monotonic() + 60
        while lines() == seen and time.monotonic() < until:
            time.sleep(0.1)
        assert lines() > seen
        (tmp_path / "enough").touch()
        assert training.wait(timeout=60) == 0


def _started(stack: ExitStack, command: list[str], **options: Any) -> subprocess.Popen:
    """A process that does not outlive the test."""
    process = subprocess.Popen(command, **options)

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return process
