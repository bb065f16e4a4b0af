"""The page of a run, or of several, while they train: served to this machine alone, from the runs' folders.

It only reads what ranks have written: viewers, however many and slow, do not affect the training.

Access needs the token, from the printed link, then from a cookie. Every request, of any method, must name this machine
as its host, and this page as its origin if it names one: so a page of another site can neither read it nor act on it,
even through a DNS name that points to this machine. Requests name a run by its number; no part of a request becomes a
path.
"""

import asyncio
import gzip
import hmac
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshfit.errors import JobError
from meshfit.observe.page_data import page_data, summary_data
from meshfit.observe.reading import Reader
from meshfit.observe.report import fill

EVERY = 2.0  # seconds between the requests of a page
HEAD_BYTES, HEAD_SECONDS, SEND_SECONDS = 16_384, 5.0, 20.0
VIEWERS = 512
DEEP = 3  # folders below the one that was named


def runs_in(path: Path) -> list[Path]:
    """The run at ``path``, or those below it, the latest first."""
    if (path / "run.json").is_file():
        return [path]
    found: list[Path] = []
    for depth in range(1, DEEP + 1):
        found += [file.parent for file in path.glob("*/" * depth + "run.json")]
    return sorted(found, key=lambda folder: -folder.stat().st_mtime)


@dataclass(slots=True)
class _Cached:
    """One answer for all requests within a second."""

    make: Callable[[], dict[str, Any]]
    at: float = -1e9
    data: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fresh(self) -> "_Cached":
        async with self.lock:
            if time.monotonic() - self.at > EVERY / 2:
                self.data = await asyncio.to_thread(self.make)
                self.body = gzip.compress(json.dumps(self.data, separators=(",", ":")).encode(), 3)
                self.at = time.monotonic()
        return self


class PageServer:
    """Answers requests about the runs at ``path``."""

    def __init__(self, path: Path):
        self.path, self.token = path, secrets.token_urlsafe(24)
        self.port = 0
        self.single = (path / "run.json").is_file()
        if not path.is_dir():
            raise JobError(f"there is no folder {path}", "watch takes a run's folder, or one that holds several")
        self._readers: dict[Path, Reader] = {}
        self._folders: list[Path] = []
        self._answers: dict[str, _Cached] = {}
        self._viewers = 0
        self._find_runs()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def _find_runs(self) -> None:
        """New runs get new numbers; known ones keep theirs."""
        known = set(self._folders)
        self._folders += [folder for folder in reversed(runs_in(self.path)) if folder not in known]

    def _read(self, folder: Path) -> Any:
        if folder not in self._readers:
            self._readers[folder] = Reader(folder)
        return self._readers[folder].read()

    def _run(self, number: int) -> dict[str, Any]:
        source = "/data" if self.single else f"/run/{number}/data"
        data = page_data(self._read(self._folders[number]))
        return {**data, "live": True, "every": EVERY, "source": source}

    def _runs(self) -> dict[str, Any]:
        self._find_runs()
        cards = []
        for number, folder in enumerate(self._folders):
            with suppress(Exception):  # removed, or not complete yet
                cards.append({"id": number, **summary_data(self._read(folder))})
        cards.sort(key=lambda card: (card["state"] != "running", -card["id"]))
        name = self.path.resolve().name
        return {"mode": "runs", "name": name, "runs": cards, "live": True, "every": EVERY, "source": "/data"}

    def _route(self, path: str) -> tuple[_Cached, bool] | None:
        """The answer for ``path``, and whether as a page."""
        parts = path.strip("/").split("/") if path != "/" else []
        is_page = parts[-1:] != ["data"]
        parts = parts if is_page else parts[:-1]
        if not parts:
            make = (lambda: self._run(0)) if self.single else self._runs
            return self._answers.setdefault("", _Cached(make)), is_page
        if len(parts) != 2 or parts[0] != "run" or not parts[1].isascii() or not parts[1].isdigit():
            return None
        number = int(parts[1])
        if self.single or number >= len(self._folders):
            return None
        return self._answers.setdefault(str(number), _Cached(lambda: self._run(number))), is_page

    async def answer(self, method: str, target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for one request."""
        hosts = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        if headers.get("host", "").lower() not in hosts:
            return 421, {}, b"this page is served to this machine only"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in hosts}:
            return 403, {}, b"asked from another page"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, {}, b"asked from another site"
        if method not in ("GET", "HEAD"):
            return 405, {"Allow": "GET, HEAD"}, b"this page is read-only"
        url = urlsplit(target)
        cookie = f"meshfit_{self.port}"
        given = parse_qs(url.query).get("token", [""])[0]
        if given:
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return 403, {}, b"that is not the token"
            kept = f"{cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return 303, {"Location": "/", "Set-Cookie": kept}, b""
        if not hmac.compare_digest(_cookie(headers.get("cookie", ""), cookie).encode(), self.token.encode()):
            return 403, {}, b"the link that meshfit watch printed has a token: use that one"
        route = self._route(url.path)
        if route is None:
            return 404, {}, b"there is no such page"
        cached, is_page = route
        found = await cached.fresh()
        if not is_page:
            kind = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            return 200, kind, found.body
        nonce = secrets.token_urlsafe(16)
        allowed = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:"
        policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        body = fill(found.data, title=f"{found.data['name']} · meshfit", nonce=nonce).encode()
        return 200, {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}, body

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._viewers += 1
        try:
            if self._viewers > VIEWERS:
                return
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            method, target, headers = _parse(head)
            try:
                status, more, body = await self.answer(method, target, headers)
            except Exception as error:
                status, more, body = 500, {}, type(error).__name__.encode()
            async with asyncio.timeout(SEND_SECONDS):
                writer.write(_response(status, more, body, head_only=method == "HEAD"))
                await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # too slow, disconnected, or not HTTP
        finally:
            self._viewers -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() > 0 else writer.close()

    async def start(self, port: int = 0) -> asyncio.Server:
        """Listen on loopback; ``port`` 0 takes a free one."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=HEAD_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        return server


def _response(status: int, headers: dict[str, str], body: bytes, *, head_only: bool) -> bytes:
    known = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "X-Frame-Options": "DENY",
        "Connection": "close",
        **headers,
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in known.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (b"" if head_only else body)


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        raise ValueError(first)
    headers: dict[str, str] = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        if name.lower() in headers and name.lower() in ("host", "origin"):
            raise ValueError(f"{name} twice")
        headers[name.lower()] = value.strip()
    return method, target, headers


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
