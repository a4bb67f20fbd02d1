import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

import plot
from mingpt.program import run_program as exit_status_of
from plot import Run, draw, read_run
from tests.helpers import read_rows, run_args, run_on, run_program, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 12 steps: `whole`, and `moved`, which resumed from step 6."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    half = run_args(folder / "moved", text, trainer__max_steps=6, optimizer__decay_steps=12)
    run_on("cpu", 1, [half, run_args(folder / "moved", text), run_args(folder / "whole", text)], folder)
    return folder


@pytest.fixture
def runs(folder: Path) -> list[Run]:
    return [replace(read_run(folder / name), name=name) for name in ("whole", "moved")]


def row(event: str, step: int, **values: float | None) -> str:
    return json.dumps({"event": event, "step": step, "time": 1.5, **values}) + "\n"


def test_curves_and_restarts_are_read_from_the_rows(folder: Path, runs: list[Run]) -> None:
    for run in runs:
        rows, evals = read_rows(folder / run.name), read_rows(folder / run.name, "eval")
        for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
            assert run.curves[key] == (list(range(1, 13)), [row[key] for row in rows])
        assert run.curves["val_loss"] == ([row["step"] for row in evals], [row["val_loss"] for row in evals])
    assert [run.restarts for run in runs] == [[], [6]]


def test_values_that_are_null_or_missing_are_left_out(tmp_path: Path) -> None:
    rows = [row("train", step, loss=value) for step, value in enumerate((1.5, None, 2, math.nan))]
    (tmp_path / "metrics.jsonl").write_text("".join([*rows, row("train", 9)]))
    assert read_run(tmp_path).curves["loss"] == ([0, 2], [1.5, 2])


def test_each_run_has_its_color_and_restarts_are_gray(runs: list[Run], tmp_path: Path) -> None:
    file = tmp_path / "both.svg"
    draw([replace(runs[0], name="_of $x_{2$"), runs[1]], file)
    svg = file.read_text()
    labels = set(re.findall("<!-- (.*) -->", svg))
    assert labels >= {"loss of _of $x_{2$", "loss of moved", "validation loss", "step from which it resumed"}
    assert [to_hex(color) in svg for color in ("C0", "C1", "C2")] == [True, True, False]
    draw([replace(run, restarts=[]) for run in runs], file)
    assert "resumed" not in file.read_text()
    gray = to_hex("tab:gray")
    assert svg.count(gray) == file.read_text().count(gray) + 5  # a line in each panel and in the legend


@pytest.mark.parametrize("backend", ["module://nowhere", "nonsense"])
def test_neither_a_name_that_the_font_lacks_nor_a_notebooks_missing_backend_hinders_a_plot(
    backend: str, folder: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "\u4e2d\u6587\udcff", tmp_path / "plot.png"
    run.symlink_to(folder / "whole")
    done = run_program("plot.py", str(run), "--out", str(out), MPLBACKEND=backend)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "runs/default/metrics.jsonl can't be read: No such file"),
        ("nowhere", "nowhere/metrics.jsonl can't be read: No such file .*; name the trainer.run_dir of a run"),
        ("run no_loss", "no_loss/metrics.jsonl does not contain a training loss yet; trainer.log_every"),
        ("run --out run.bmp", "--out: run.bmp can't be written: .*[bB]mp.* is not supported .*png"),
        ("run --out nowhere/run.png", "--out: nowhere/run.png can't be written: .*No such file"),
    ],
)
def test_each_mistake_is_one_message(
    argv: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name, rows in (("run", row("train", 1, loss=2.5)), ("no_loss", row("start", 0) + row("eval", 1, val_loss=2.5))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    assert exit_status_of(plot.run, argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: .*{message}", err)
    assert len(err.splitlines()) == 1
