"""What the person watching sees, and what metrics.jsonl tells programs."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import statistics
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from textwrap import indent

import pytest
import yaml
from helpers import loss_curve, read_rows, run_args, run_ranks, train_main, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt.utils.metrics import Metrics, read_metrics

COLUMNS = 80


def run_captured(*argv: str) -> tuple[int, str]:
    """For `ranks`: exit status, and all that the run says."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        status = train_main(*argv)
    return status, said.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, and a run of 12 steps on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__keep_snapshots=9)
    began = time.time()
    results = run_ranks(2, run_captured, *argv, tmp_path=folder)
    assert [status for status, _ in results] == [0, 0]
    for rank, (_, said) in enumerate(results):
        (folder / f"said-{rank}").write_text(said, newline="")
    (folder / "times.json").write_text(json.dumps([began, time.time()]))
    return folder


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# metrics.jsonl


def test_every_row_has_event_step_and_time(trained: Path) -> None:
    all_rows = lines(trained / "run")
    assert all(list(row)[:3] == ["event", "step", "time"] for row in all_rows)
    began, ended = json.loads((trained / "times.json").read_text())
    assert [began, *(row["time"] for row in all_rows), ended] == sorted(
        [began, *(row["time"] for row in all_rows), ended]
    )
    events = [(row["event"], row["step"]) for row in all_rows]
    expected = [("start", 0)]
    for step in range(1, 13):
        expected.append(("train", step))
        expected += [("eval", step)] if step % 4 == 0 else []
        expected += [("snapshot", step)] if step % 3 == 0 else []
    # A snapshot is told once it is written, which may be some steps later.
    assert sorted(events, key=lambda event: event[1]) == [*expected, ("stop", 12)]


def test_the_fields_of_each_event(trained: Path) -> None:
    base = {"event", "step", "time"}
    for row in read_rows(trained / "run"):
        assert set(row) == base | {
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_second",
            "world_size",
            "restart_count",
        }
        assert (row["world_size"], row["restart_count"]) == (2, 0)
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("loss", "grad_norm", "tokens_per_second"))
    for row in read_rows(trained / "run", "eval"):
        assert set(row) == base | {"val_loss"}
        assert 0 < row["val_loss"] < math.log(13) * 1.1  # nats per character of 13
    saved = read_rows(trained / "run", "snapshot")
    assert [Path(row["path"]) for row in saved] == sorted((trained / "run/snapshots").iterdir())
    assert [row["val_loss"] is None for row in saved] == [True, True, True, False]
    assert read_rows(trained / "run", "stop")[0]["signal"] is None


def test_rows_are_strict_json(trained: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in (trained / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_speed_is_that_of_all_ranks_together(trained: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", trained / "text.txt", trainer__eval_every=99, trainer__save_every=99)
    assert run_ranks(2, train_main, *argv, tmp_path=tmp_path) == [0, 0]
    found = read_rows(tmp_path / "run")
    tokens = [row["tokens_per_second"] * (row["time"] - before["time"]) for before, row in itertools.pairwise(found)]
    assert statistics.median(tokens) == pytest.approx(7 * 16, rel=0.3)


def test_a_row_tells_its_own_step_and_the_last_is_always_there(trained: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", trained / "text.txt", trainer__log_every=5)
    assert run_ranks(2, train_main, *argv, tmp_path=tmp_path) == [0, 0]
    assert [step for step, _ in loss_curve(tmp_path / "run")] == [5, 10, 12]
    every = dict(loss_curve(trained / "run"))
    assert list(every) == list(range(1, 13))
    assert loss_curve(tmp_path / "run") == [(step, every[step]) for step in (5, 10, 12)]


@pytest.mark.parametrize(
    "torn", ['{"event": "train", "step": 4, "ti', "\0\0\0", '{"event": "train", "step": 5, "time": 1.5}']
)
def test_after_a_restart_each_step_is_told_once(torn: str, trained: Path, tmp_path: Path) -> None:
    text = trained / "text.txt"
    run = tmp_path / "run"
    argv = run_args(run, text, trainer__keep_snapshots=9, trainer__max_steps=8, optimizer__decay_steps=12)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    before = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in before if json.loads(line)["step"] <= 6]
    (run / "snapshots/step_00000008.pt").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write(torn)

    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    after = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert after[: len(kept)] == kept
    new = [json.loads(line) for line in after[len(kept) :]]
    assert (new[0]["event"], new[0]["step"]) == ("start", 6)
    assert [row["step"] for row in lines(run) if row["event"] == "train"] == list(range(1, 9))
    assert [row["step"] for row in lines(run) if row["event"] == "eval"] == [4, 8]
    assert sorted({name.partition(".out.")[0] for name in os.listdir(run)}) == [
        "cache",
        "config.yaml",
        "events",
        "metrics.jsonl",
        "snapshots",
    ]
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 8


def test_rows_of_a_file_are_told_from_what_else_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = [{"event": "start", "step": 0, "time": 1.5}, {"event": "train", "step": 1, "loss": 0.1 + 0.2}]
    bad = ["null", "[]", "4", "abc", "", '{"step": 1}', '{"event": "train", "step": "1"}', "\0\0", '{"event": "tr']
    file.write_text("\n".join([json.dumps(good[0]), *bad, json.dumps(good[1]), '{"event": "train", "step": 2}']))
    assert read_metrics(file) == (good, len(bad))
    Metrics(tmp_path, step=1, last_step=2).close()  # goes on after them
    assert file.read_text() == "".join(json.dumps(row) + "\n" for row in good)


# TensorBoard


def test_tensorboard_shows_one_curve_across_restarts(text: Path, tmp_path: Path) -> None:
    """Killed at step 8, gone on from step 6 on another number of ranks: what came after step 6 is shown once."""
    argv = run_args(tmp_path / "run", text, trainer__sample_every=6)
    assert run_ranks(2, train_main, *argv, "--trainer.max_steps", "8", tmp_path=tmp_path) == [0, 0]
    (tmp_path / "run/snapshots/step_00000008.pt").unlink()
    first = list((tmp_path / "run").glob("events.*"))
    time.sleep(1.1)  # names of events tell seconds, and sort by them
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    assert len(list((tmp_path / "run").glob("events.*"))) == len(first) + 1 == 2

    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "world_size"):
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in read_rows(tmp_path / "run")]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    expected = [(row["step"], pytest.approx(row["val_loss"])) for row in read_rows(tmp_path / "run", "eval")]
    assert [(event.step, event.value) for event in events.Scalars("val_loss")] == expected
    assert [event.value for event in events.Scalars("world_size")] == [2] * 6 + [1] * 6
    written = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("sample/text_summary")}
    for row in read_rows(tmp_path / "run", "sample"):
        assert written[row["step"]] == indent(row["text"], "    ")


def test_rows_are_with_tensorboard_while_the_run_goes_on(tmp_path: Path) -> None:
    """They are in the file within moments, before it is closed: a kill loses none that could be seen."""
    metrics = Metrics(tmp_path, 0, 9)
    for step in (1, 2, 3):
        metrics.row("train", step, loss=1.5)
        deadline, seen = time.monotonic() + 5, []
        while seen != list(range(1, step + 1)):
            assert time.monotonic() < deadline, seen
            events = EventAccumulator(str(tmp_path)).Reload()
            seen = [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []
    metrics.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_metrics_that_cannot_be_written_do_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    metrics = Metrics(tmp_path, 0, 9)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, metrics.descriptor)
    os.close(full)
    metrics.train(3, loss=1.5, learning_rate=0.1, grad_norm=1.0, tokens_per_second=1.0)
    metrics.close()
    said = capsys.readouterr()
    assert "step 3" in said.out
    assert said.err.startswith("error: step 3: trainer.run_dir: metrics can't be written: ")
    assert "training goes on" in said.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_tensorboard_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    metrics = Metrics(tmp_path, 0, 9)
    [file] = tmp_path.glob("events*")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "full").replace(file)  # at once: its thread may be writing
    for step in (1, 2, 3):
        metrics.row("train", step, loss=1.5)
        time.sleep(0.1)
    metrics.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]
    assert "metrics can't be written: " in capsys.readouterr().err
