"""An object store as the mirror: a real S3 server, moto's, behind a proxy that causes faults."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mingpt.snapshot.folder import SnapshotFolder
from tests.faults.runs import Run, assert_same_run, train_undisturbed
from tests.helpers import run_args, run_captured, run_ranks

REASON = "needs pip install -r .ci/requirements.txt"
moto_server = pytest.importorskip("moto.server", reason=REASON)
s3fs = pytest.importorskip("s3fs", reason=REASON)

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # botocore does not repeat requests, but s3fs does
}
ERROR = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>caused by a test</Message></Error>"


class FaultyProxy(ThreadingHTTPServer):
    """Forwards requests to a server, or answers with the status 403, or cuts the connection."""

    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = server_port
        self.choose_fault: Callable[[str], str] = no_fault  # "PUT /bucket/key" -> "403", "cut" or ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that close a connection are part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.choose_fault(f"{self.command} {self.path}")
        if fault == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault:
            self.respond(int(fault), {"Content-Type": "application/xml", "Content-Length": str(len(ERROR))}, ERROR)
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            response = upstream.getresponse()
            content = response.read()
            upstream.close()
            headers = {name.title(): value for name, value in response.getheaders()}
            headers.pop("Transfer-Encoding", None)
            headers.setdefault("Content-Length", str(len(content)))
            self.respond(response.status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    def respond(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


def no_fault(request: str) -> str:
    return ""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy that the environment names as S3's endpoint."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = FaultyProxy(server.get_host_and_port()[1])
    endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    server.stop()


def test_a_run_with_failing_and_interrupted_uploads_ends_with_the_same_bits(
    proxy: FaultyProxy, text: Path, tmp_path: Path
) -> None:
    """The second upload fails, the run is killed in the third one, and then its local snapshots are lost.

    Until the kill, the run has no last step, since uploads may take long in comparison with steps.
    """
    url = "s3://bucket/a/run"  # trainer.snapshot_path and the name of the run folder
    options = {"trainer__save_every": 20, "trainer__eval_every": 10_000, "optimizer__decay_steps": 100}
    undisturbed = train_undisturbed(tmp_path / "undisturbed", text, trainer__max_steps=100, **options)
    run_dir = tmp_path / "run"
    uploads: list[str] = []
    argv = run_args(run_dir, text, trainer__snapshot_path="s3://bucket/a", trainer__max_steps=100, **options)
    with Run(run_dir, [*argv, "--trainer.max_steps", "1000000"]) as run:

        def fail_or_kill(request: str) -> str:
            method, name = request.split(maxsplit=1)[0], request.rpartition("/")[2].partition("?")[0]
            if method != "PUT" or not name.startswith("step_"):
                return ""
            if name not in uploads:
                uploads.append(name)
            if len(uploads) == 3:
                run.wait(lambda: "training continues" in run.log.read_text(), "the warning of the failure")
                run.processes[0].kill()
                return "cut"
            return "403" if len(uploads) == 2 else ""

        proxy.choose_fault = fail_or_kill
        run.start()
        assert run.finish() == [-9]
    proxy.choose_fault = no_fault
    first, failed, _ = uploads
    remote = SnapshotFolder(url)
    assert [*remote.files().values()] == [first]
    assert f": {url}/{failed} can't be written: " in run.log.read_text()

    (run_dir / "snapshots").rename(tmp_path / "lost")
    before = (run_dir / "metrics.jsonl").read_bytes()
    proxy.choose_fault = lambda request: "403"
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert f"{url} can't be " in err
    assert (run_dir / "metrics.jsonl").read_bytes() == before

    proxy.choose_fault = no_fault
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path, timeout=300)
    assert (status, err) == (0, "")
    assert f"resuming from {url}/{first}" in out
    assert max(remote.files()) == 100
    assert_same_run(undisturbed, run_dir)


def test_a_damaged_snapshot_does_not_replace_an_object_and_another_run_has_its_own(
    proxy: FaultyProxy, text: Path, tmp_path: Path
) -> None:
    """The newest local snapshot and the best one are cut short, and then are both lost with their machine."""
    url = "s3://bucket/b/run"
    options = {"trainer__snapshot_path": "s3://bucket/b", "trainer__keep_snapshots": 1, "trainer__eval_every": 4}
    argv, other = (run_args(tmp_path / name, text, **options) for name in ("run", "other"))
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    before = objects(url)
    local = SnapshotFolder(str(tmp_path / "run/snapshots"))
    assert before.keys() == {*local.files().values()}
    for name in local.files().values():
        file = tmp_path / "run/snapshots" / name
        file.write_bytes(file.read_bytes()[:-1000])
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0
    assert f"already trained: {url}/step_00000012.pt" in out
    assert err.count(") and skipped") == len(local.files())
    assert ") and not uploaded" in err
    [(status, _, err)] = run_ranks(1, run_captured, *other, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    assert objects("s3://bucket/b/other").keys() == before.keys()
    (tmp_path / "run").rename(tmp_path / "lost")
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    assert objects(url) == before


def objects(url: str) -> dict[str, bytes]:
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.ls(url)}
