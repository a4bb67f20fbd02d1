"""An object store as the mirror: a real S3 server, moto's, that causes faults."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mingpt.snapshot.folder import SnapshotFolder
from tests.faults.runs import Run, assert_same_run
from tests.helpers import run_args, run_captured, run_ranks, train_run

REASON = "needs pip install -r .ci/requirements.txt"
moto_server = pytest.importorskip("moto.server", reason=REASON)
s3fs = pytest.importorskip("s3fs", reason=REASON)
serving = pytest.importorskip("werkzeug.serving", reason=REASON)

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # botocore does not repeat requests, but s3fs does
}
ERROR = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>caused by a test</Message></Error>"


class FaultyStore:
    """moto's S3 as a WSGI application that answers some requests with the status 403, or cuts their connections."""

    def __init__(self) -> None:
        self.moto = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.choose_fault: Callable[[str], str] = no_fault  # "PUT /bucket/key" -> "403", "cut" or ""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        fault = self.choose_fault(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        if not fault:
            return self.moto(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(ERROR)))])
        return [ERROR]


def no_fault(request: str) -> str:
    return ""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A store that the environment names as S3's endpoint."""
    store = FaultyStore()
    server = serving.make_server("127.0.0.1", 0, store, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
    yield store
    server.shutdown()
    server.server_close()


def test_a_run_with_failing_and_interrupted_uploads_ends_with_the_same_bits(
    store: FaultyStore, text: Path, tmp_path: Path
) -> None:
    """The second upload fails, the run is killed in the third one, and then its local snapshots are lost.

    Until the kill, the run has no last step, since uploads may take long in comparison with steps.
    """
    url = "s3://bucket/a/run"  # trainer.snapshot_path and the name of the run folder
    options = {"trainer__save_every": 20, "trainer__eval_every": 10_000, "optimizer__decay_steps": 100}
    undisturbed = train_run(tmp_path / "undisturbed", text, trainer__max_steps=100, **options)
    run_dir = tmp_path / "run"
    uploads: list[str] = []
    argv = run_args(run_dir, text, trainer__snapshot_path="s3://bucket/a", trainer__max_steps=100, **options)
    with Run(run_dir, [*argv, "--trainer.max_steps", "1000000"]) as run:

        def fail_or_kill(request: str) -> str:
            name = request.rpartition("/")[2]
            if not request.startswith("PUT") or not name.startswith("step_"):
                return ""
            if name not in uploads:
                uploads.append(name)
            if len(uploads) == 3:
                run.wait(lambda: "training continues" in run.log.read_text(), "the warning of the failure")
                run.processes[0].kill()
                return "cut"
            return "403" if len(uploads) == 2 else ""

        store.choose_fault = fail_or_kill
        run.start()
        assert run.finish() == [-9]
    store.choose_fault = no_fault
    first, failed, _ = uploads
    remote = SnapshotFolder(url)
    assert [*remote.files().values()] == [first]
    assert f": {url}/{failed} can't be written: " in run.log.read_text()

    store.choose_fault = lambda request: "403"
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert f"{url} can't be " in err

    store.choose_fault = no_fault
    (run_dir / "snapshots").rename(tmp_path / "lost")
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path, timeout=300)
    assert (status, err) == (0, "")
    assert f"resuming from {url}/{first}" in out
    assert max(remote.files()) == 100
    assert_same_run(undisturbed, run_dir)


def test_neither_a_damaged_snapshot_nor_another_run_replaces_an_object(
    store: FaultyStore, text: Path, tmp_path: Path
) -> None:
    """All local snapshots are cut short, and then lost with their machine."""
    url = "s3://bucket/b/run"
    options = {"trainer__snapshot_path": "s3://bucket/b", "trainer__keep_snapshots": 1, "trainer__eval_every": 4}
    argv = run_args(train_run(tmp_path / "run", text, **options), text, **options)
    before = objects(url)
    local = SnapshotFolder(str(tmp_path / "run/snapshots"))
    assert [*before] == [*local.files().values()]
    for name in before:
        file = tmp_path / "run/snapshots" / name
        file.write_bytes(file.read_bytes()[:-1000])
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0
    assert f"already trained: {url}/step_00000012.pt" in out
    assert all(f"{tmp_path}/run/snapshots/{name} is damaged (" in err for name in before)
    train_run(tmp_path / "other", text, **options)
    (tmp_path / "run").rename(tmp_path / "lost")
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    assert objects(url) == before


def objects(url: str) -> dict[str, bytes]:
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in sorted(fs.ls(url))}
