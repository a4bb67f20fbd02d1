import json
import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

import plot
from mingpt.program import run_program as exit_status_of
from plot import PANELS, curve, draw, read_rows
from tests.helpers import run_args, run_on, run_program, write_text
from tests.inside import assert_one_message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contains `moved`, a run of 12 steps that resumed from step 6."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    half = run_args(folder / "moved", text, trainer__max_steps=6, optimizer__decay_steps=12)
    run_on("cpu", 1, [half, run_args(folder / "moved", text)], folder)
    return folder


def row(event: str, step: int, **values: float | None) -> str:
    return json.dumps({"event": event, "step": step, "time": 1.5, **values}) + "\n"


def test_values_that_are_null_or_missing_are_left_out(tmp_path: Path) -> None:
    rows = [row("train", step, loss=value) for step, value in enumerate((1.5, None, 2))]
    (tmp_path / "metrics.jsonl").write_text("".join([*rows, row("train", 9), row("eval", 9, loss=3)]))
    assert curve(read_rows(tmp_path), "train", "loss") == ([0, 2], [1.5, 2])


def test_each_run_has_its_color_name_and_restarts(folder: Path, tmp_path: Path) -> None:
    rows = read_rows(folder / "moved")
    runs = {"moved": rows, "undisturbed": [row for row in rows if row["event"] != "start"]}
    draw(runs, tmp_path / "both.svg")
    svg = (tmp_path / "both.svg").read_text()
    labels = {f"{kind} of {name}" for kind in ("loss", "validation loss") for name in runs}
    assert set(re.findall("<!-- (.*) -->", svg)) >= {*PANELS.values(), *labels}
    moved, undisturbed, unused = (svg.count(to_hex(color)) for color in ("C0", "C1", "C2"))
    assert moved == undisturbed + len(PANELS)  # a dotted line in each panel
    assert unused == 0


def test_the_backend_of_a_notebook_may_be_missing(folder: Path, tmp_path: Path) -> None:
    """A notebook sets it for child processes too, where it may not be installed."""
    out = tmp_path / "plot.png"
    done = run_program("plot.py", str(folder / "moved"), "--out", str(out), MPLBACKEND="module://nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "runs/default/metrics.jsonl can't be read: No such file"),
        ("nowhere", "nowhere/metrics.jsonl can't be read: No such file .*; name the trainer.run_dir of a run"),
        ("run --out run.bmp", "--out: run.bmp can't be written: .*[bB]mp.* is not supported .*png"),
        ("run --out nowhere/run.png", "--out: nowhere/run.png can't be written: .*No such file"),
    ],
)
def test_each_mistake_is_one_message(
    argv: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(row("train", 1, loss=2.5))
    monkeypatch.chdir(tmp_path)
    assert exit_status_of(plot.run, argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_message(err)
    assert re.match(f"error: .*{message}", err)
