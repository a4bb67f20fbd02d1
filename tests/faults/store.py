"""An S3 server, moto's, behind a proxy that can be told to fail."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>made by a test</Message></Error>"
UPLOAD = ("PUT", "POST")


def healthy(request: str) -> str:
    """No fault."""
    return ""


def in_turn(*faults: str) -> Callable[[str], str]:
    """A rule: one fault for each of the next uploads."""
    left = list(faults)
    return lambda request: left.pop(0) if left and request.startswith(UPLOAD) else ""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for faults: `503`, `slow`, `silent`, `cut request`, `cut answer`.

    Args:
        server: port of what is behind
        port: its own; 0: a free one
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, server: int, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.server_to_ask = server
        self.rule: Callable[[str], str] = healthy  # "PUT /bucket/key" -> the fault that it meets
        self.uploads = 0  # requests of uploads so far
        self.met: list[str] = []  # faults so far
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on, and says no more on those that are open."""
        self.rule = lambda request: "cut request"
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_any(self) -> None:
        fault = self.server.rule(f"{self.command} {self.path}")
        self.server.uploads += self.command in UPLOAD
        self.server.met += [fault] if fault else []
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size // 2 if fault == "cut request" else size)
        if fault == "cut request":
            return self.cut()
        if fault == "silent":
            time.sleep(30)
            return self.cut()
        if fault == "slow":
            time.sleep(1)
        if fault == "503":
            return self.answer(503, {"Content-Type": "application/xml"}, ANSWER)
        behind = http.client.HTTPConnection("127.0.0.1", self.server.server_to_ask, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers.items()))
        answer = behind.getresponse()
        content, headers = answer.read(), dict(answer.getheaders())
        behind.close()
        if fault == "cut answer" and not content:  # what was asked is done, and who asked does not know
            return self.cut()
        self.answer(answer.status, headers, content, cut=fault == "cut answer")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        size = headers.get("Content-Length") if self.command == "HEAD" else None
        hop = ("content-length", "transfer-encoding", "connection")
        for name, value in headers.items():
            if name.lower() not in hop:
                self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.cut()

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@contextmanager
def s3_server() -> Iterator[int]:
    """Starts moto's server; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()
