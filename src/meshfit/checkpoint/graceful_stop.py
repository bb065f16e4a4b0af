"""Ctrl-C, SIGTERM and notices of preemption while checkpoints are kept: the training ends after a step, saved, not in
the middle of one.

The first word leaves a file in the run's folder, which says where it came from, and which all ranks look for about
twice a second, at the same step; the second signal ends it at once. So does the first one while ranks start: there is
nothing to save yet. Whoever cannot send a signal can make the file: ``touch runs/a/stop``.

    SIGINT, SIGTERM            a person's: exit codes 130 and 143. To this process, or SIGTERM to any rank
    SIGUSR1, SIGUSR2           of a scheduler, before it takes the machine away: exit code 75, "run me again"
    a file, or an address      of a machine that is about to be taken away: 75 as well

Clouds answer at an address of each machine. A notice of preemption is an answer of 200 that holds something else than
"FALSE", "NONE", or a list "Events" without any entry:

    AWS      http://169.254.169.254/latest/meta-data/spot/instance-action      404 until then
    Google   http://metadata.google.internal/computeMetadata/v1/instance/preempted      FALSE until then
    Azure    http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01     {"Events": []} until then
"""

import json
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from meshfit.checkpoint.cadence import Cadence, Due
from meshfit.checkpoint.ranks import Ranks
from meshfit.errors import JobError, MeshfitError

NAME = "stop"
LOOK = Cadence(seconds=0.5)
AGAIN = 75  # EX_TEMPFAIL: the exit code of a run that is to be started again
OF_A_PERSON = ("SIGINT", "SIGTERM")
OF_A_SCHEDULER = tuple(name for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
EVERY = 2.0  # seconds between two looks
PATIENCE = 2.0  # seconds that an address may take to answer
MOST = 1 << 16  # bytes of an answer
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Without which Google's and Azure's do not answer; others do not mind them."""
TOKEN = "X-aws-ec2-metadata-token"


class GracefulStop:
    """How a signal or a notice is answered."""

    def __init__(self, folder: Path, grace: float):
        self.folder, self.grace = folder, grace
        self.begun = False
        """Whether there are steps to end after; until then a signal ends it at once."""
        self.came: list[str] = []
        """What asked for the end."""
        self._deadline: threading.Timer | None = None
        self._in_main = threading.current_thread() is threading.main_thread()

    def asked(self, *, but: str) -> bool:
        """Whether it is to end, at anybody's word ``but`` that, which is then withdrawn."""
        if (word := word_of(self.folder)) == but:
            (self.folder / NAME).unlink(missing_ok=True)
        return bool(self.came) or word not in (None, but)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A signal."""
        name = signal.Signals(number).name
        if self.came:
            self._act(self.came[0] if name not in OF_A_PERSON or self._deadline is not None else name)
        if not self.begun:
            _say("ends now, it was still starting: nothing was saved")
            self._act(name)
        self.take(name)

    def take(self, reason: str) -> None:
        """End after this step: a signal, or a notice, asks for it."""
        self.came.append(reason)
        leave(self.folder, reason)
        if reason in OF_A_PERSON:
            _say("ends after this step, saved; once more ends at once")
            return
        _say(f"{reason}: ends after this step, saved, within {self.grace:g} s")
        if self._in_main:
            self._deadline = threading.Timer(self.grace, self._late)
            self._deadline.daemon = True
            self._deadline.start()

    def _late(self) -> None:
        _say(f"nothing was saved within {self.grace:g} s; ends now, and the newest checkpoint stands")
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def end(self, ended: str = "") -> None:
        """Act on what was asked for, if anything; ``ended``: by the word of a rank."""
        if self._deadline is not None:
            self._deadline.cancel()
        reasons = [*self.came, *([ended] if ended else [])]
        if reasons:
            self._act(reasons[0])

    def _act(self, reason: str) -> None:
        if reason == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM if reason == "SIGTERM" else AGAIN)

    def gave_up(self, error: MeshfitError) -> None:
        """It failed. After a notice it is to be run again all the same, from the newest checkpoint."""
        if self.came and self.came[0] not in OF_A_PERSON:
            _say(str(error))
            raise SystemExit(AGAIN) from error


@contextmanager
def graceful_stop(
    folder: Path | None, *, first: bool = True, notice: str | None = None, grace: float = 30.0
) -> Iterator[GracefulStop]:
    """While a training runs in ``folder``; afterwards, if a signal came, it is acted on. None: signals act at once.
    The ``first`` process of a training takes away a file of before, and looks for a ``notice`` of preemption."""
    graceful = GracefulStop(folder or Path(), grace)
    if folder is None:
        yield graceful
        return
    if first:
        (folder / NAME).unlink(missing_ok=True)
    with _heard(graceful), watched(notice if first else None, graceful.take):
        try:
            yield graceful
        except MeshfitError as error:
            graceful.gave_up(error)
            raise
    graceful.end()


@contextmanager
def _heard(graceful: GracefulStop) -> Iterator[None]:
    """Signals go to ``graceful``; those of schedulers only where nobody else listens to them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [
        *OF_A_PERSON,
        *(name for name in OF_A_SCHEDULER if signal.getsignal(signal.Signals[name]) == signal.SIG_DFL),
    ]
    before = {signal.Signals[name]: signal.signal(signal.Signals[name], graceful.hear) for name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heard_in_rank(folder: Path, rank: int) -> None:
    """From now on SIGTERM or SIGUSR2 to this rank asks all of them to end, saved; a second one ends this process.
    SIGUSR1 prints its stack."""

    def hear(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        leave(folder, name)
        _say(f"{name} to rank {rank}: all end after this step, saved")

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, hear)


def leave(folder: Path, reason: str) -> None:
    """Make the file, whole at once."""
    made = folder / f"{NAME}.{os.getpid()}.new"
    with suppress(OSError):
        made.write_text(reason)
        made.replace(folder / NAME)


def word_of(folder: Path) -> str | None:
    """What the file says; None: there is none."""
    try:
        return (folder / NAME).read_text(errors="replace")[:200].strip()
    except OSError:
        return None


def _say(text: str) -> None:
    print(f"\nmeshfit: {text}", file=sys.stderr, flush=True)


class Asked:
    """Whether the training is to end; all ``ranks`` ask after every step."""

    def __init__(self, folder: Path, ranks: Ranks):
        self.folder, self.ranks, self.due = folder, ranks, Due(LOOK, ranks)

    def now(self, step: int) -> str | None:
        """None: no. Else at whose word, the same on all ranks; "" where that is not known."""
        if not self.due.now(step):
            return None
        self.due.saved(0.0)
        found = [word for word in self.ranks.gather(word_of(self.folder)) if word is not None]
        return max(found, key=bool) if found else None

    def answered(self) -> None:
        """It has ended."""
        if self.ranks.rank == 0:
            (self.folder / NAME).unlink(missing_ok=True)


# Notices of preemption


def check_notice(notice: str | Path) -> None:
    """Refuse what is neither an address nor a path."""
    if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", str(notice))) and found[1].lower() not in ("http", "https"):
        raise JobError(
            f"preemption={str(notice)!r} cannot be looked at", "write a path, or an address: http:// or https://"
        )


def noticed(notice: str, headers: Mapping[str, str] = HEADERS) -> bool:
    """Whether the notice is there. ``OSError``: it could not be looked at."""
    if not re.match(r"https?://", notice, re.IGNORECASE):
        return Path(notice).exists()
    try:
        return _says_so(_asked(notice, headers))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        if error.code != 401 or TOKEN in headers:
            raise
        base = urlsplit(notice)  # AWS, where a token is asked for
        lasts = {f"{TOKEN}-ttl-seconds": "300"}
        token = _asked(f"{base.scheme}://{base.netloc}/latest/api/token", lasts, method="PUT").strip()
        return noticed(notice, {**headers, TOKEN: token})


def _asked(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a machine's own address is behind no proxy
    request = urllib.request.Request(url, headers=dict(headers), method=method)
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
