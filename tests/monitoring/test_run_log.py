"""What runs record: metrics.jsonl and TensorBoard's events, across restarts and on full disks, and traces."""

import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import time
from contextlib import redirect_stderr
from pathlib import Path
from textwrap import indent

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt.config.schema import Config, TrainerConfig
from mingpt.monitoring.logging import configure_logging
from mingpt.monitoring.run_log import MetricsFile, RunLog, StepTimer, iter_metrics
from tests.helpers import ROOT, loss_curve, read_rows, run_ranks, train_run, wait_until, write_text

VALUES = {"loss": 1.5, "learning_rate": 0.1, "grad_norm": 1.0, "tokens_per_second": 1.0}


def open_log(folder: Path) -> RunLog:
    log = RunLog()
    log.open(Config(trainer=TrainerConfig(run_dir=str(folder))), step=0, last_step=9)
    return log


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and the run folder of 12 steps on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    train_run(folder / "run", text, 2, trainer__keep_snapshots=9, trainer__sample_every=6)
    return folder


def test_rows_of_a_run_are_complete_and_documented(trained: Path) -> None:
    content = (trained / "run/metrics.jsonl").read_text()
    assert not re.search("NaN|Infinity", content)  # strict JSON has neither
    rows = list(map(json.loads, content.splitlines()))
    assert all(list(row)[:3] == ["event", "step", "time"] for row in rows)
    times = [(trained / "text.txt").stat().st_mtime, *(row["time"] for row in rows), time.time()]
    assert times == sorted(times)
    periods = {"train": 1, "eval": 4, "sample": 6, "snapshot": 3}
    expected = [(event, step) for step in range(1, 13) for event, every in periods.items() if step % every == 0]
    # A snapshot's row comes once it is written, which may be some steps later.
    events = sorted(((row["event"], row["step"]) for row in rows), key=lambda event: event[1])
    assert events == [("start", 0), *expected, ("stop", 12)]

    documented = set(re.findall(r'["`](\w+)["`]', (ROOT / "docs/monitoring.md").read_text()))
    assert {name for row in rows for name in row} <= documented
    for row in read_rows(trained / "run"):
        assert (row["world_size"], row["restart_count"]) == (2, 0)
        assert all(row[name] > 0 for name in ("loss", "grad_norm", "tokens_per_second"))
    assert all(0 < row["val_loss"] < math.log(13) * 1.1 for row in read_rows(trained / "run", "eval"))  # 13 characters
    saves = read_rows(trained / "run", "snapshot")
    assert [Path(row["path"]) for row in saves] == sorted((trained / "run/snapshots").glob("step_*"))
    assert [row["val_loss"] is None for row in saves] == [True, True, True, False]
    assert read_rows(trained / "run", "stop")[0]["signal"] is None


def test_a_row_has_the_loss_of_its_step_and_the_throughput_since_the_row_before(trained: Path, tmp_path: Path) -> None:
    """Throughput counts the tokens of all ranks, without pauses. The last step has a row."""
    options = {"trainer__log_every": 5, "trainer__eval_every": 99, "trainer__save_every": 99}
    train_run(tmp_path / "run", trained / "text.txt", 2, **options)
    losses = dict(loss_curve(trained / "run"))
    assert list(losses) == list(range(1, 13))
    assert loss_curve(tmp_path / "run") == [(step, losses[step]) for step in (1, 5, 10, 12)]

    rows = read_rows(tmp_path / "run")
    # 7 sequences of 16 characters in a step
    seconds = sum((b["step"] - a["step"]) * 7 * 16 / b["tokens_per_second"] for a, b in itertools.pairwise(rows))
    assert 0.1 < seconds / (rows[-1]["time"] - rows[0]["time"]) < 1.1

    timer = StepTimer(samples=10)
    with timer.pause():
        time.sleep(0.2)
    time.sleep(0.1)
    rate = timer.tokens_per_second(40, tokens_per_sample=5)
    assert 30 * 5 / (timer.elapsed - 0.2) <= rate <= 30 * 5 / 0.1


def test_a_resumed_run_has_each_row_once_in_file_and_tensorboard(trained: Path, tmp_path: Path) -> None:
    """Two ranks end at step 12 in a torn row, and one rank resumes from step 6."""
    run = shutil.copytree(trained / "run", tmp_path / "run")
    for step in (9, 12):
        (run / f"snapshots/step_{step:08d}.pt").unlink()
    kept = [row for row in iter_metrics(run / "metrics.jsonl") if row["step"] <= 6]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 4, "ti')
    train_run(run, trained / "text.txt", trainer__sample_every=6, trainer__max_steps=13)

    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    assert rows[: len(kept)] == kept
    assert (rows[len(kept)]["event"], rows[len(kept)]["step"]) == ("start", 6)
    assert [step for step, _ in loss_curve(run)] == list(range(1, 14))
    assert [row["step"] for row in read_rows(run, "eval")] == [4, 8, 12, 13]
    names = sorted(name.partition(".out.")[0] for name in os.listdir(run))
    assert names == [".lock", "config.yaml", "data", "events", "events", "metrics.jsonl", "snapshots"]
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 13

    events = EventAccumulator(str(run)).Reload()
    for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "restart_count", "val_loss"):
        rows = read_rows(run, "eval" if name == "val_loss" else "train")
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert [event.value for event in events.Scalars("world_size")] == [2] * 6 + [1] * 7
    samples = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("sample/text_summary")}
    expected = {row["step"]: indent(row["text"], "    ") for row in read_rows(run, "sample")}
    assert list(expected) == [6, 12, 13]
    assert samples | expected == samples  # TensorBoard hides scalars of removed steps, but not their texts


@pytest.mark.parametrize("torn", ['{"event": "tr', "\0\0\0"])
def test_torn_rows_are_removed_on_resume(torn: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = ['{"event": "start", "step": 0, "time": 1.5}', json.dumps({"event": "train", "step": 1, "loss": 0.1 + 0.2})]
    file.write_text("\n".join([rows[0], torn, rows[1], torn]))
    assert list(iter_metrics(file)) == list(map(json.loads, rows))
    MetricsFile(tmp_path, step=1).close()
    assert file.read_text() == "".join(f"{line}\n" for line in rows)


def test_the_norm_of_gradients_that_overflow_is_null(tmp_path: Path) -> None:
    """As in a step of fp16. Rows of earlier versions have Infinity, which is not JSON."""
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 0, "grad_norm": Infinity}\n')
    log = open_log(tmp_path)
    log.write("train", 1, **VALUES | {"grad_norm": math.inf})
    log.close()
    assert [row["grad_norm"] for row in read_rows(tmp_path)] == [None, None]
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()


def test_after_a_full_disk_only_the_rows_that_did_not_fit_are_lost(tmp_path: Path) -> None:
    """TensorBoard's events end there."""
    [err] = run_ranks(1, _log_with_a_limit, tmp_path, tmp_path=tmp_path)
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [row["step"] for row in rows] == [1, 4]
    for step in (2, 3):
        assert err.count(f"step {step}: metrics can't be written to metrics.jsonl") == 1
    assert "step 4: metrics can't be written to metrics.jsonl" not in err
    assert "metrics can't be written to TensorBoard" in err
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")][:1] == [1]


def _log_with_a_limit(folder: Path) -> str:
    """Rows of steps 2 and 3 do not fit into a file: 10 bytes of the first one are written. Returns stderr."""
    configure_logging()
    log = open_log(folder)
    log.write("train", 1, **VALUES)
    wait_until(lambda: next(folder.glob("events.*")).stat().st_size > 200, "the events of step 1")
    size = (folder / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
    with redirect_stderr(io.StringIO()) as err:
        for step in (2, 3):
            log.write("train", step, **VALUES)
            time.sleep(0.2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.write("train", 4, **VALUES)
        log.close()
    return err.getvalue()


def test_the_requested_steps_are_in_the_trace(text: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", text, trainer__max_steps=14, trainer__profile_steps=2)
    names = {str(event.get("name")) for event in json.loads((run / "trace-0.json").read_text())["traceEvents"]}
    # The profiler counts from 0.
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#11", "ProfilerStep#12"}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
