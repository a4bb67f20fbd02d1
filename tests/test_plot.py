"""plot.py reads run folders, and draws into a file and on the terminal."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import plot
from mingpt.program import run_program as exit_status_of
from plot import COLORS, MAX_POINTS, Run, draw, find_restarts, read_run, thin_out
from tests.helpers import loss_curve, read_rows, run_args, run_on_terminal, run_ranks, train_main, write_text

ESCAPE_CODE = re.compile(r"\x1b\[[\d;]*m")
BLUE, ORANGE, GREEN, *_ = COLORS
GRAY = "tab:gray"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 12 steps: `whole` on one rank, and `moved` on two ranks for the first six steps."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    half = run_args(folder / "moved", text, trainer__max_steps=6, optimizer__decay_steps=12)
    assert run_ranks(2, train_main, *half, tmp_path=folder) == [0, 0]
    for name in ("moved", "whole"):
        assert run_ranks(1, train_main, *run_args(folder / name, text), tmp_path=folder) == [0]
    return folder


@pytest.fixture
def runs(folder: Path) -> list[Run]:
    return [replace(read_run(folder / name), name=name) for name in ("whole", "moved")]


def write_metrics(folder: Path, *lines: str) -> Path:
    """Makes a run folder with these lines in metrics.jsonl."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def row(event: str, step: int, **values: float | None) -> str:
    return json.dumps({"event": event, "step": step, "time": 1.5, **values}) + "\n"


def run_plot(*argv: str | Path) -> None:
    plot.run([str(arg) for arg in argv])


# Reading


def test_curves_and_restarts_are_read_from_the_rows(folder: Path, runs: list[Run]) -> None:
    for run in runs:
        rows, evals = read_rows(folder / run.name), read_rows(folder / run.name, "eval")
        for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
            assert run.curves[key] == (list(range(1, 13)), [row[key] for row in rows])
        assert run.curves["val_loss"] == ([row["step"] for row in evals], [row["val_loss"] for row in evals])
    assert [run.curves["val_loss"][0] for run in runs] == [[4, 8, 12], [4, 6, 8, 12]]
    assert [run.restarts for run in runs] == [{}, {6: "2 → 1 ranks"}]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, 2)], {}),
        ([(0, 2), (0, 2)], {0: ""}),
        ([(3, 2)], {}),
        ([(0, 4), (5, 4), (9, 2)], {5: "", 9: "4 → 2 ranks"}),
        ([(0, 4), (5, 2), (5, 2)], {5: "4 → 2 ranks"}),
        ([], {}),
    ],
)
def test_find_restarts(starts: list[tuple[int, int]], expected: dict[int, str]) -> None:
    assert find_restarts([json.loads(row("start", step, world_size=size)) for step, size in starts]) == expected


def test_lines_that_are_not_rows_and_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    values = [1.5, None, float("nan"), float("inf"), 2]
    lines = [row("train", step, loss=value) for step, value in enumerate(values)]
    torn = row("train", 10, loss=3)[:-1]
    run = write_metrics(tmp_path / "run", "null\n", *lines, "abc\n", row("train", 9), torn)
    assert read_run(run).curves["loss"] == ([0, 4], [1.5, 2])


# The file


def count_pixels(file: Path, color: str) -> int:
    image = imread(file)
    assert image.shape == (800, 900, 4)
    return int((np.abs(image[..., :3] - to_rgb(color)).max(axis=-1) < 0.004).sum())


def test_each_run_has_its_color_and_restarts_are_gray(runs: list[Run], tmp_path: Path) -> None:
    file = tmp_path / "both.png"
    draw(runs, file)
    assert count_pixels(file, "white") > 500_000
    assert count_pixels(file, BLUE) > 2000
    assert count_pixels(file, ORANGE) > 500
    assert count_pixels(file, GREEN) == 0
    with_restarts = count_pixels(file, GRAY)
    draw([replace(run, restarts={}) for run in runs], file)
    assert with_restarts > count_pixels(file, GRAY) + 50


def test_labels_and_legend_of_the_file(runs: list[Run], tmp_path: Path) -> None:
    draw([replace(runs[0], name="_of $x_{2$"), runs[1]], tmp_path / "both.svg")
    labels = set(re.findall("<!-- (.*) -->", (tmp_path / "both.svg").read_text()))
    assert labels >= {
        "2 → 1 ranks",
        "loss of _of $x_{2$",
        "loss of moved",
        "validation loss",
        "step from which it resumed",
        "learning rate",
        "tokens/s",
    }


def test_of_many_points_ends_and_extremes_are_kept() -> None:
    steps = list(range(100_000))
    values = [math.sin(step / 1e4) for step in steps]
    values[1234] = -9.0
    values[50_000] = 9.0
    found = dict(zip(*thin_out(steps, values), strict=True))
    assert list(found) == sorted(found)
    assert len(found) <= MAX_POINTS + 2
    assert all(found[step] == values[step] for step in (0, 1234, 50_000, 99_999))
    assert thin_out([1, 2, 3], [0.5, 1.0, 1.5]) == ([1, 2, 3], [0.5, 1.0, 1.5])


def test_runs_of_any_length_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one = write_metrics(tmp_path / "one", row("train", 7, loss=2.5))
    restarted = write_metrics(tmp_path / "restarted", row("start", 0), row("start", 0), row("train", 9, loss=2.0))
    long = write_metrics(tmp_path / "long", *(row("train", i, loss=3 + i / 1e5) for i in range(0, 50_000, 10)))
    evals = [row("eval", step, val_loss=2.0) for step in (5, 9)]
    short = write_metrics(tmp_path / "short", row("train", 5, loss=2.0), *evals)
    for argv in ([one], [one, long], [long, one, short], [restarted]):
        run_plot(*argv, "--out", tmp_path / "out.png")
        assert count_pixels(tmp_path / "out.png", list(COLORS)[len(argv) - 1]) > 0
        out, err = capsys.readouterr()
        assert err == ""
        assert max(len(line) for line in out.splitlines() if "│" in line) == 80
    assert out.count("┊") > 5


# The terminal


@pytest.mark.parametrize(("columns", "no_color"), [(80, ""), (200, "1")])
def test_the_plot_fits_the_terminal(columns: int, no_color: str, folder: Path, tmp_path: Path) -> None:
    argv = ["plot.py", folder / "whole", folder / "moved", "--out", tmp_path / "both.png"]
    status, raw = run_on_terminal(*argv, columns=columns, NO_COLOR=no_color)
    assert status == 0, raw
    lines = ESCAPE_CODE.sub("", raw).splitlines()
    assert "\x1b" not in "".join(lines)
    assert max(len(line) for line in lines if "│" in line) == columns
    assert sum("2 → 1 ranks" in line for line in lines) == 1
    assert sum(line.count("┊") for line in lines) > 5
    assert lines[-1] == f"drawn: {tmp_path}/both.png"
    canvas = set("".join(re.findall("[│┤](.*)│", "\n".join(lines))))
    for name, marker in zip(("whole", "moved"), "AB" if no_color else "●●", strict=True):
        summary = f"{marker} {folder}/{name}: loss {loss_curve(folder / name)[-1][1]:.4f} at step 12, "
        assert sum(line.startswith(summary) for line in lines) == 1
    if no_color:
        assert "\x1b" not in raw
        assert {*"abB"} <= canvas  # the first run's dots are under the second's
    else:
        assert "●" in canvas
        for code in list(COLORS.values())[:2]:
            assert re.search(rf"\x1b\[38;5;{code}m[\u2801-\u28ff]", raw)  # braille
            assert re.search(rf"\x1b\[38;5;{code}m[^\n]*●", raw)


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nowhere", "there is no nowhere/metrics.jsonl; name the trainer.run_dir of a run that has begun"),
        ("run/metrics.jsonl", "there is no run/metrics.jsonl/metrics.jsonl; name the trainer.run_dir"),
        ("run no_loss", "no_loss/metrics.jsonl does not have a train row with a loss yet; trainer.log_every"),
        ("empty", "empty/metrics.jsonl does not have a train row with a loss yet; trainer.log_every"),
        ("unreadable", "unreadable/metrics.jsonl can't be read: Input/output error"),
        ("run --out run.bmp", "--out: run.bmp can't be written: .*[bB]mp.* is not supported .*png"),
        ("run --out nowhere/run.png", "--out: nowhere/run.png can't be written: .*No such file"),
        ("a b c d e f g", "7 runs can't be told apart; draw 6 at most"),
    ],
)
def test_each_mistake_is_one_message(
    argv: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_metrics(tmp_path / "empty")
    write_metrics(tmp_path / "run", row("train", 1, loss=2.5))
    write_metrics(tmp_path / "no_loss", row("start", 0), row("train", 1), row("eval", 1, val_loss=2.5))
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable/metrics.jsonl").symlink_to("/proc/self/mem")  # not even root can read its start
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", *argv.split()])
    assert exit_status_of(plot.run, sys.argv[1:]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: .*{message}", err)
    assert len(err.splitlines()) == 1
