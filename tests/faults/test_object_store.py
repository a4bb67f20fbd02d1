"""Snapshots in an object store: a real S3 server, moto's, behind a proxy that causes faults."""

import gc
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mingpt.errors import UserError
from mingpt.snapshot.folder import SnapshotFolder
from tests.faults.runs import Run, assert_same_run, train_undisturbed
from tests.helpers import read_rows, run_args, run_captured, run_ranks, small_snapshot

REASON = "needs pip install -r .ci/requirements.txt"
moto_server = pytest.importorskip("moto.server", reason=REASON)
s3fs = pytest.importorskip("s3fs", reason=REASON)

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # botocore does not retry; s3fs and the program do
}
ERROR = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>caused by a test</Message></Error>"
UPLOADS = ("PUT", "POST")
PART_SIZE = 5 << 20  # S3's minimum for a part of an upload
BUCKETS = count(1)


class FaultyProxy(ThreadingHTTPServer):
    """Forwards requests to a server, except for faults: `503`, `slow`, `silent`, `cut request`, `cut response`."""

    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = server_port
        self.choose_fault: Callable[[str], str] = no_fault  # "PUT /bucket/key" -> fault
        self.uploads = 0  # number of upload requests so far
        self.faults: list[str] = []  # so far
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on, and cuts those that are open."""
        self.choose_fault = lambda request: "cut request"
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that close a connection are part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def forward(self) -> None:
        fault = self.server.choose_fault(f"{self.command} {self.path}")
        self.server.uploads += self.command in UPLOADS
        self.server.faults += [fault] if fault else []
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size // 2 if fault == "cut request" else size)
        time.sleep({"silent": 30, "slow": 1}.get(fault, 0))
        if fault in ("cut request", "silent"):
            self.cut()
        elif fault == "503":
            self.respond(503, {"Content-Type": "application/xml", "Content-Length": str(len(ERROR))}, ERROR)
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            response = upstream.getresponse()
            content = response.read()
            upstream.close()
            headers = {name.title(): value for name, value in response.getheaders()} | {"Transfer-Encoding": ""}
            headers.setdefault("Content-Length", str(len(content)))
            if fault == "cut response":
                content = content[: len(content) // 2]
            if fault != "cut response" or content:
                self.respond(response.status, headers, content)
            if fault == "cut response":
                self.cut()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    def respond(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None: ...


def no_fault(request: str) -> str:
    return ""


def fault_sequence(*faults: str) -> Callable[[str], str]:
    """One fault for each of the next upload requests."""
    remaining = list(faults)
    return lambda request: remaining.pop(0) if remaining and request.startswith(UPLOADS) else ""


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(server_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy that the environment names as S3's endpoint; parts are as small as S3 allows, and retries are fast."""
    proxy = FaultyProxy(server_port)
    endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART_SIZE})
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
    yield proxy
    proxy.stop()


@pytest.fixture
def url(proxy: FaultyProxy) -> str:
    """A folder in an empty bucket."""
    bucket = f"bucket-{next(BUCKETS)}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/a/run"


def small(step: int, tensors: int = 1, size: int = 12) -> dict[str, Any]:
    return small_snapshot(step, {f"{i}": torch.full((size,), float(step)) for i in range(tensors)})


def large(step: int) -> dict[str, Any]:
    """A snapshot that is uploaded in three parts."""
    return small(step, tensors=6, size=PART_SIZE // 10)


def uncached_storage(url: str) -> SnapshotFolder:
    """The folder as another process sees it."""
    s3fs.S3FileSystem.clear_instance_cache()
    return SnapshotFolder(url, keep=1)


def assert_newest_is(step: int, url: str) -> None:
    newest = uncached_storage(url).load_newest()
    assert newest is not None
    assert newest["step"] == step
    assert all((weight == step).all() for weight in newest["model"].values())


def unfinished_uploads(url: str) -> list[dict]:
    bucket = url.split("/")[2]
    return fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])


FAULTS = {
    "503": ["503"] * 3,
    "mixed": ["503", "cut request", "503", "cut response", "slow"],
    "many cut requests": ["cut request"] * 12,  # more than s3fs retries by itself
    "many cut responses": ["cut response"] * 12,
}


@pytest.mark.parametrize(
    ("name", "snapshot"),
    [*((name, small) for name in FAULTS), ("mixed", large)],
)
def test_a_snapshot_is_whole_after_temporary_faults_at_any_request_of_its_upload(
    name: str, snapshot: Callable[[int], dict[str, Any]], proxy: FaultyProxy, url: str
) -> None:
    proxy.uploads = 0
    uncached_storage(url).write(snapshot(1))
    requests = proxy.uploads
    assert requests == (1 if snapshot is small else 5)  # start, three parts, end
    for before in range(requests):
        proxy.faults.clear()
        proxy.choose_fault = fault_sequence(*[""] * before, *FAULTS[name])
        uncached_storage(url).write(snapshot(before + 2))
        assert proxy.faults == FAULTS[name]
        assert uncached_storage(url).steps() == [before + 2]
        assert_newest_is(before + 2, url)
    if "cut response" not in FAULTS[name]:  # else the client does not know the ids of uploads that it started
        assert unfinished_uploads(url) == []


@pytest.mark.parametrize("fault", ["503", "cut request", "cut response"])
def test_a_snapshot_is_read_in_spite_of_temporary_faults(fault: str, proxy: FaultyProxy, url: str) -> None:
    SnapshotFolder(url, keep=1).write(small(3))
    for target in ("list-type", "step_00000003.pt"):
        remaining = [fault] * 2
        proxy.choose_fault = lambda request, target=target, remaining=remaining: (
            remaining.pop() if remaining and target in request else ""
        )
        assert_newest_is(3, url)
        assert remaining == []


@pytest.mark.parametrize("fault", ["503", "silent"])
def test_a_permanent_fault_is_reported_and_existing_snapshots_stay(
    fault: str, proxy: FaultyProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.1}})
    storage = uncached_storage(url)
    storage.write(small(1))
    proxy.choose_fault = lambda request: fault
    with pytest.raises(UserError, match=r"trainer\.snapshot_path: s3://.*/step_00000002\.pt can't be written"):
        storage.write(small(2))
    with pytest.raises(UserError, match=r"trainer\.snapshot_path: s3://.* can't be read"):
        uncached_storage(url).load_newest()
    proxy.choose_fault = no_fault
    assert_newest_is(1, url)
    storage.write(small(3))
    assert uncached_storage(url).steps() == [3]
    assert_newest_is(3, url)


@pytest.mark.parametrize("requests_before", range(5))
def test_an_upload_that_fails_at_any_request_is_not_completed(
    requests_before: int, proxy: FaultyProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = uncached_storage(url)
    storage.write(small(1))
    proxy.choose_fault = fault_sequence(*[""] * requests_before, "503")
    with pytest.raises(UserError, match="can't be written"):
        storage.write(large(2))
    proxy.choose_fault = no_fault
    gc.collect()  # closes open files
    assert uncached_storage(url).steps() == [1]
    assert_newest_is(1, url)
    assert proxy.faults == ["503"]
    assert unfinished_uploads(url) == []
    storage.write(large(3))
    assert_newest_is(3, url)


def test_a_run_with_failing_and_interrupted_uploads_ends_with_the_same_bits(
    proxy: FaultyProxy, url: str, text: Path, tmp_path: Path
) -> None:
    """The save of step 6 fails, the save of step 9 is killed, and the run can't resume until the store is readable."""
    undisturbed = train_undisturbed(tmp_path / "undisturbed", text)
    run_dir = tmp_path / "run"
    with Run(run_dir, run_args(run_dir, text, trainer__snapshot_path=url)) as run:

        def fail_or_kill(request: str) -> str:
            if "step_00000009" in request and request.startswith(UPLOADS):
                run.processes[0].kill()
                return "cut request"
            return "503" if "step_00000006" in request else ""

        proxy.choose_fault = fail_or_kill
        run.start()
        assert run.finish() == [-9]
    reason = f"step 6: trainer.snapshot_path: {url}/step_00000006.pt can't be written: "
    assert f"warning: {reason}" in run.log.read_text()
    [failed] = [row["step"] for row in run.rows("snapshot") if "error" in row]
    assert failed == 6
    before = (run_dir / "metrics.jsonl").read_bytes()
    for target in ("list-type", "step_00000003.pt"):
        proxy.choose_fault = lambda request, target=target: "503" if target in request else ""
        [(status, _, err)] = run_ranks(1, run_captured, *run.argv, tmp_path=tmp_path)
        assert status == 2
        assert err.startswith(f"error: trainer.snapshot_path: {url}")
        assert (run_dir / "metrics.jsonl").read_bytes() == before

    proxy.choose_fault = no_fault
    assert uncached_storage(url).steps() == [3]
    [(status, out, err)] = run_ranks(1, run_captured, *run.argv, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    assert f"resuming from {url}/step_00000003.pt" in out
    assert [row["step"] for row in read_rows(run_dir, "start")] == [0, 3]
    assert not list((run_dir / "snapshots").glob("*.pt"))  # frequent ones
    fsspec.filesystem("s3").get_file(f"{url}/step_00000012.pt", str(run_dir / "snapshots/step_00000012.pt"))
    assert_same_run(undisturbed, run_dir)
