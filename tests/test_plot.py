"""plot.py: what it reads from real runs and from files that are none, and what it draws of them."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    ROOT,
    clean_env,
    loss_curve,
    read_rows,
    run_args,
    run_on_terminal,
    run_program,
    run_ranks,
    train_main,
    write_text,
)
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import plot
from mingpt.utils.errors import UserError
from plot import COLORS, GREY, Run, draw, names, picture, read, restarts

CODE = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 12 steps: `whole` on one rank, and `moved`, which was on two for the first six."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    half = run_args(folder / "moved", text, trainer__max_steps=6, optimizer__decay_steps=12)
    assert run_ranks(2, train_main, *half, tmp_path=folder) == [0, 0]
    for name in ("moved", "whole"):
        assert run_ranks(1, train_main, *run_args(folder / name, text), tmp_path=folder) == [0]
    return folder


@pytest.fixture
def runs(folder: Path) -> list[Run]:
    return [read(folder / name, name) for name in ("whole", "moved")]


def made(folder: Path, *lines: str) -> Path:
    """A run folder with these lines in metrics.jsonl."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def row(event: str, step: int, **values: float | None) -> str:
    return json.dumps({"event": event, "step": step, "time": 1.5, **values}) + "\n"


def drawn(*argv: str | Path) -> None:
    plot.run([str(word) for word in argv])


# What is read


def test_curves_are_what_the_rows_say(folder: Path, runs: list[Run]) -> None:
    for run in runs:
        for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
            assert run.curves[key] == (list(range(1, 13)), [row[key] for row in read_rows(folder / run.name)])
        evaluations = [4, 8, 12] if run.name == "whole" else [4, 6, 8, 12]  # at its end, too
        assert run.curves["val_loss"] == (
            evaluations,
            [row["val_loss"] for row in read_rows(folder / run.name, "eval")],
        )


def test_a_restart_is_marked_with_the_ranks_before_and_after(runs: list[Run]) -> None:
    whole, moved = runs
    assert whole.restarts == {}
    assert moved.restarts == {6: [2, 1]}


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, 2)], {}),
        ([(0, 2), (0, 2)], {0: []}),
        ([(3, 2)], {3: []}),
        ([(0, 4), (5, 4), (9, 2)], {5: [], 9: [4, 2]}),
        ([(0, 4), (5, 2), (5, 2), (5, 1), (5, 4)], {5: [4, 2, 1, 4]}),
        ([(0, None), (5, 2), (7, None)], {5: [], 7: []}),
        ([], {}),
    ],
)
def test_restarts(starts: list[tuple[int, int | None]], expected: dict[int, list[int]]) -> None:
    assert restarts([json.loads(row("start", step, world_size=size)) for step, size in starts]) == expected


def test_rows_may_stand_in_any_order(folder: Path, runs: list[Run], tmp_path: Path) -> None:
    lines = (folder / "moved/metrics.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    assert read(made(tmp_path / "moved", *lines), "moved") == runs[1]


def test_a_number_that_is_missing_or_not_finite_is_left_out(tmp_path: Path) -> None:
    values = [1.5, None, float("nan"), float("inf"), 2]
    lines = [row("train", step, loss=value) for step, value in enumerate(values)] + [row("train", 9)]
    assert read(made(tmp_path / "run", *lines), "run").curves["loss"] == ([0, 4], [1.5, 2])


def test_what_is_no_row_is_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good = row("start", 0) + row("train", 1, loss=2.5)
    for torn in (good[: len(good) // 2], row("train", 2, loss=2.0)[:-1]):
        run = read(made(tmp_path / f"torn{len(torn)}", good, torn), "run")
        assert run.curves["loss"] == ([1], [2.5])
        assert capsys.readouterr().err == ""
    run = read(made(tmp_path / "run", "null\n", good, "abc\n", row("train", 2, loss=2.0)), "run")
    assert run.curves["loss"] == ([1, 2], [2.5, 2.0])
    assert capsys.readouterr().err == f"{tmp_path}/run/metrics.jsonl: 2 lines left out, for not being rows\n"


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["/runs/a"], ["a"]),
        (["/runs/a", "/runs/b"], ["a", "b"]),
        (["/x/a", "/y/a", "/y/b"], ["x/a", "y/a", "b"]),
        (["/a", "/x/a", "/x/x/a"], ["/a", "/x/a", "x/x/a"]),
        (["/runs/\x1b[1m\udc80"], ["\ufffd[1m\ufffd"]),
    ],
)
def test_names_are_the_shortest_that_tell_runs_apart(folders: list[str], expected: list[str]) -> None:
    assert names([Path(folder) for folder in folders]) == expected


# The file


def pixels(file: Path, color: str) -> int:
    """How many of the picture's are of this colour."""
    image = imread(file)
    assert image.shape == (800, 900, 4)
    return int((np.abs(image[..., :3] - to_rgb(color)).max(axis=-1) < 0.004).sum())


def test_each_run_has_its_colour_in_the_picture_and_restarts_are_grey(runs: list[Run], tmp_path: Path) -> None:
    file = tmp_path / "both.png"
    draw(runs, file)
    blue, orange, green = list(COLORS)[:3]
    assert pixels(file, "white") > 500_000
    assert pixels(file, blue) > 2000
    assert pixels(file, orange) > 500
    assert pixels(file, green) == 0
    marks = pixels(file, GREY)
    draw([replace(run, restarts={}) for run in runs], file)
    assert marks > pixels(file, GREY) + 50


def test_equal_runs_are_both_seen(runs: list[Run], tmp_path: Path) -> None:
    twins = [runs[0], replace(runs[0], name="twin")]
    draw(twins, tmp_path / "twins.png")
    draw(twins[1:], tmp_path / "one.png")
    blue, orange = list(COLORS)[:2]
    alone = pixels(tmp_path / "one.png", blue)
    assert pixels(tmp_path / "twins.png", blue) > alone / 2
    assert pixels(tmp_path / "twins.png", orange) > alone / 4
    for equal in (twins, [*twins, replace(runs[0], name="third")]):
        canvas = "".join(line for line in picture(equal, 80, 20, color=False).splitlines() if "│" in line)
        for letter in "abc"[: len(equal)]:
            assert canvas.count(letter) > 15


def test_the_change_of_ranks_and_names_are_written_on_it(runs: list[Run], tmp_path: Path) -> None:
    strange = [replace(runs[0], name="_of $x_{2$"), runs[1]]
    draw(strange, tmp_path / "both.svg")
    written = re.findall("<!-- (.*) -->", (tmp_path / "both.svg").read_text())
    assert {"2 → 1 ranks", "_of $x_{2$", "moved", "validation loss", "restart", "learning rate", "tokens/s"} <= {
        *written
    }


def test_without_out_it_goes_into_the_first_run_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    drawn("moved", "whole", "./moved")
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "drawn: moved/plot.png"
    assert said[-4].startswith("aA moved: loss")  # and a second line
    assert said[-2].startswith("bB whole: loss")
    assert pixels(folder / "moved/plot.png", next(iter(COLORS))) > 500
    (folder / "moved/plot.png").unlink()


def test_runs_of_any_length_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one = made(tmp_path / "one", row("train", 7, loss=2.5))
    long = made(tmp_path / "long", *(row("train", step, loss=3 + step / 1e5) for step in range(0, 50_000, 10)))
    evals = made(tmp_path / "evals", row("train", 5, loss=2.0), *(row("eval", step, val_loss=2.0) for step in (5, 9)))
    for argv in ([one], [one, long], [long, one, evals]):
        drawn(*argv, "--out", tmp_path / "out.png")
        assert pixels(tmp_path / "out.png", list(COLORS)[len(argv) - 1]) > 0
        said = capsys.readouterr()
        assert said.err == ""
        assert all(len(line) <= 80 for line in said.out.splitlines())


# The terminal


def test_a_restart_before_the_first_loss_is_marked(tmp_path: Path) -> None:
    run = read(made(tmp_path / "run", *[row("start", 0)] * 2, row("train", 5, loss=3.0), row("train", 9, loss=2.0)), "")
    assert run.restarts == {0: []}
    assert picture([run], 80, 20, color=False).count("┊") > 10


@pytest.mark.parametrize(("columns", "no_color"), [(80, ""), (200, "1")])
def test_the_terminal_gets_a_picture_that_fits(columns: int, no_color: str, folder: Path, tmp_path: Path) -> None:
    argv = ["plot.py", folder / "whole", folder / "moved", "--out", tmp_path / "both.png"]
    status, raw = run_on_terminal(*argv, columns=columns, NO_COLOR=no_color)
    assert status == 0, raw
    seen = CODE.sub("", raw).splitlines()
    assert "\x1b" not in "".join(seen)
    assert max(map(len, seen)) == columns
    assert len(seen) < 24
    assert sum("2 → 1 ranks" in line for line in seen) == 1
    assert sum(line.count("┊") for line in seen) > 5
    assert seen[-1] == f"drawn: {tmp_path}/both.png"
    signs = set("".join(re.findall("[│┤](.*)│", "\n".join(seen))))
    lines, dots = ("ab", "AB") if no_color else ("━━", "●●")
    for name, line, dot in zip(("whole", "moved"), lines, dots, strict=True):
        assert any(
            told.startswith(f"{line}{dot} {name}: loss {loss_curve(folder / name)[-1][1]:.4f} at step 12")
            for told in seen
        )
    if no_color:
        assert "\x1b" not in raw
        assert {*"abB"} <= signs  # the dots of the first are under those of the second
    else:
        assert "●" in signs
        for code in list(COLORS.values())[:2]:
            assert re.search(rf"\x1b\[38;5;{code}m[\u2801-\u28ff]", raw)  # braille
            assert re.search(rf"\x1b\[38;5;{code}m[^\n]*●", raw)


def test_a_pipe_gets_80_columns_without_codes(folder: Path, tmp_path: Path) -> None:
    done = run_program("plot.py", str(folder / "whole"), "--out", str(tmp_path / "whole.png"), NO_COLOR="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) == 80
    assert {*"aA"} <= set("".join(re.findall("[│┤](.*)│", done.stdout)))


def test_a_reader_that_has_seen_enough_ends_it(folder: Path, tmp_path: Path) -> None:
    """As `| head -1` does; so wide that it can't all be in the pipe by then."""
    command = [sys.executable, ROOT / "plot.py", folder / "whole", "--out", tmp_path / "whole.png"]
    env = clean_env(COLUMNS="5000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert b"validation loss" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_ctrl_c_ends_it_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    """So wide that the terminal can't have taken it all by then."""
    argv = ["plot.py", folder / "whole", "--out", tmp_path / "whole.png"]
    interrupted = []

    def interrupt(process: subprocess.Popen, master: int, raw: bytes) -> None:
        if not interrupted:
            interrupted.append(process.send_signal(signal.SIGINT))

    status, raw = run_on_terminal(*argv, columns=5000, watch=interrupt)
    assert status == 130
    assert "Traceback" not in raw
    assert "drawn:" not in raw


# Mistakes


def test_a_run_must_be_named() -> None:
    done = run_program("plot.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "RUN" in done.stderr.splitlines()[-1]


def test_a_mistake_is_one_message(tmp_path: Path) -> None:
    done = run_program("plot.py", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: there is no metrics.jsonl in {tmp_path}, so it is no run folder; main.py writes one into "
        "trainer.run_dir when training begins\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nowhere", "no metrics.jsonl in HERE/nowhere, .* main.py writes one"),
        ("run/snapshots", "no metrics.jsonl in HERE/run/snapshots, .* did you mean HERE/run[?]$"),
        ("run/metrics.jsonl", "no metrics.jsonl in HERE/run/metrics.jsonl, .* did you mean HERE/run[?]$"),
        (".", "no metrics.jsonl in HERE, .* did you mean HERE/empty HERE/run HERE/silent[?]$"),
        ("run silent", "HERE/silent/metrics.jsonl has no train row with a loss; .* trainer.log_every"),
        ("empty", "HERE/empty/metrics.jsonl has no train row with a loss; .* trainer.log_every"),
        ("run --out run.bmp", "--out: run.bmp must end with one of .*[.]png"),
        ("run --out run", "--out: run must end with one of .*[.]png"),
        ("run --out nowhere/run.png", "--out: nowhere/run.png can't be written: .*No such file"),
        (" ".join(f"x/{i}" for i in range(10)), "10 runs can't be told apart; draw 9 at most"),
    ],
)
def test_mistakes_are_named(
    argv: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made(tmp_path / "empty")
    made(tmp_path / "run", row("train", 1, loss=2.5))
    made(tmp_path / "silent", row("start", 0), row("train", 1), row("eval", 1, val_loss=2.5))
    (tmp_path / "run/snapshots").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message.replace("HERE", str(tmp_path))):
        drawn(*argv.split())
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")  # which root can't read from its start either
    with pytest.raises(UserError, match=r"metrics[.]jsonl can't be read: Input/output error"):
        drawn(tmp_path)
