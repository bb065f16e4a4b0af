"""Notices that this machine is about to be taken away: a file that appears, or an address that says so.

Clouds answer at an address of each machine. A notice is an answer of 200 that holds something else than "FALSE",
"NONE", or a list "Events" without any entry:

    AWS      http://169.254.169.254/latest/meta-data/spot/instance-action      404 until then
    Google   http://metadata.google.internal/computeMetadata/v1/instance/preempted      FALSE until then
    Azure    http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01     {"Events": []} until then
"""

import json
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from meshfit.errors import JobError

EVERY = 2.0  # seconds between two looks
PATIENCE = 2.0  # seconds that an address may take to answer
MOST = 1 << 16  # bytes of an answer
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Without which Google's and Azure's do not answer; others do not mind them."""
TOKEN = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}


def check(notice: str | Path) -> None:
    """Refuse what is neither an address nor a path."""
    if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", str(notice))) and found[1].lower() not in ("http", "https"):
        raise JobError(
            f"preemption={str(notice)!r} cannot be looked at", "write a path, or an address: http:// or https://"
        )


def noticed(notice: str) -> bool:
    """Whether the notice is there. ``OSError``: it could not be looked at."""
    if not re.match(r"https?://", notice, re.IGNORECASE):
        return Path(notice).exists()
    try:
        return _says_so(_asked(notice, HEADERS))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        if error.code == 401:  # AWS, where a token is asked for
            base = urlsplit(notice)
            token = _asked(f"{base.scheme}://{base.netloc}/latest/api/token", TOKEN, method="PUT").strip()
            try:
                return _says_so(_asked(notice, HEADERS | {"X-aws-ec2-metadata-token": token}))
            except urllib.error.HTTPError as again:
                if again.code == 404:
                    return False
                raise
        raise


def _asked(url: str, headers: dict[str, str], method: str = "GET") -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a machine's own address is behind no proxy
    request = urllib.request.Request(url, headers=headers, method=method)
    with direct.open(request, timeout=PATIENCE) as answer:
        return answer.read(MOST).decode(errors="replace")


def _says_so(text: str) -> bool:
    if text.strip().upper() in ("", "FALSE", "NONE"):
        return False
    try:
        told = json.loads(text)
    except ValueError:
        return True
    return not (isinstance(told, dict) and told.get("Events") == [])


@contextmanager
def watched(notice: str | None, take: Callable[[str], None]) -> Iterator[None]:
    """Look for a notice, in a thread; ``take`` is told of it, once."""
    if notice is None:
        yield
        return
    over = threading.Event()

    def look() -> None:
        told = False
        while not over.is_set():
            try:
                if noticed(notice):
                    take(f"a notice of preemption at {notice}")
                    return
            except (OSError, ValueError) as error:
                if not told:
                    print(f"meshfit: preemption={notice!r} does not answer: {error}", file=sys.stderr, flush=True)
                told = True
            over.wait(EVERY)

    thread = threading.Thread(target=look, name="meshfit preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * PATIENCE)
