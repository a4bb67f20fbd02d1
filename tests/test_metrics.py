"""What the person watching sees, and what metrics.jsonl tells programs."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import statistics
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from conftest import COLUMNS, arguments, on_terminal, ranks, train, write_text
from test_training import curve, rows

from metrics import Metrics, duration, rows_of, summary
from model import GPT, GPTConfig


def told(*argv: str) -> tuple[int, str]:
    """For `ranks`: exit status, and all that the run says."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        status = train(*argv)
    return status, said.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, and a run of 12 steps on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    argv = arguments(folder / "run", write_text(folder / "text.txt"), trainer__keep_snapshots=9)
    began = time.time()
    results = ranks(2, told, *argv, tmp_path=folder)
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
    for row in rows(trained / "run"):
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
    for row in rows(trained / "run", "eval"):
        assert set(row) == base | {"val_loss"}
        assert 0 < row["val_loss"] < math.log(13) * 1.1  # nats per character of 13
    saved = rows(trained / "run", "snapshot")
    assert [Path(row["path"]) for row in saved] == sorted((trained / "run/snapshots").iterdir())
    assert [row["val_loss"] is None for row in saved] == [True, True, True, False]
    assert rows(trained / "run", "stop")[0]["signal"] is None


def test_rows_are_strict_json(trained: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in (trained / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_speed_is_that_of_all_ranks_together(trained: Path, tmp_path: Path) -> None:
    argv = arguments(tmp_path / "run", trained / "text.txt", trainer__eval_every=99, trainer__save_every=99)
    assert ranks(2, train, *argv, tmp_path=tmp_path) == [0, 0]
    found = rows(tmp_path / "run")
    tokens = [row["tokens_per_second"] * (row["time"] - before["time"]) for before, row in itertools.pairwise(found)]
    assert statistics.median(tokens) == pytest.approx(7 * 16, rel=0.3)


def test_a_row_tells_its_own_step_and_the_last_is_always_there(trained: Path, tmp_path: Path) -> None:
    argv = arguments(tmp_path / "run", trained / "text.txt", trainer__log_every=5)
    assert ranks(2, train, *argv, tmp_path=tmp_path) == [0, 0]
    assert [step for step, _ in curve(tmp_path / "run")] == [5, 10, 12]
    every = dict(curve(trained / "run"))
    assert list(every) == list(range(1, 13))
    assert curve(tmp_path / "run") == [(step, every[step]) for step in (5, 10, 12)]


@pytest.mark.parametrize(
    "torn", ['{"event": "train", "step": 4, "ti', "\0\0\0", '{"event": "train", "step": 5, "time": 1.5}']
)
def test_after_a_restart_each_step_is_told_once(torn: str, trained: Path, tmp_path: Path) -> None:
    text = trained / "text.txt"
    run = tmp_path / "run"
    argv = arguments(run, text, trainer__keep_snapshots=9, trainer__max_steps=8, optimizer__decay_steps=12)
    assert ranks(1, train, *argv, tmp_path=tmp_path) == [0]
    before = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in before if json.loads(line)["step"] <= 6]
    (run / "snapshots/step_00000008.pt").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write(torn)

    assert ranks(1, train, *argv, tmp_path=tmp_path) == [0]
    after = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert after[: len(kept)] == kept
    new = [json.loads(line) for line in after[len(kept) :]]
    assert (new[0]["event"], new[0]["step"]) == ("start", 6)
    assert [row["step"] for row in lines(run) if row["event"] == "train"] == list(range(1, 9))
    assert [row["step"] for row in lines(run) if row["event"] == "eval"] == [4, 8]
    assert sorted(os.listdir(run)) == ["cache", "config.yaml", "metrics.jsonl", "snapshots"]
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 8


# The screen


def test_a_log_file_gets_plain_lines_from_one_rank(trained: Path) -> None:
    said, silence = ((trained / f"said-{rank}").read_bytes().decode() for rank in (0, 1))
    assert silence == ""
    assert not re.findall(r"[^\x20-\x7e\n]", said)  # no carriage return, no escape code
    assert said.endswith("\n")
    for step, loss in curve(trained / "run"):
        shown = rf"^step +{step}/12  loss {loss:.4f}  .* tokens/s  \d+:\d\d left$"
        assert len(re.findall(shown, said, re.MULTILINE)) == 1
    for row in rows(trained / "run", "eval"):
        shown = rf"^step {row['step']}: validation loss {row['val_loss']:.4f} nats per character \(\d+\.\d s\)$"
        assert len(re.findall(shown, said, re.MULTILINE)) == 1


def test_a_terminal_gets_a_bar_that_fits(trained: Path, tmp_path: Path) -> None:
    status, raw = on_terminal("main.py", *arguments(tmp_path / "run", trained / "text.txt"))
    assert status == 0, raw
    losses = dict(curve(tmp_path / "run"))
    bars = [part.rstrip() for part in re.split(r"[\r\n]+", raw) if "%|" in part]
    assert all(len(bar) <= COLUMNS for bar in bars), bars
    told = [bar for bar in bars if "loss=" in bar]
    assert {f"loss={loss:.3f}" for loss in losses.values()} <= set(re.findall(r"loss=[\d.]+", " ".join(told)))
    for bar in told:
        assert re.search(r"tok/s=[\d,]+\b", bar), bar
        assert re.search(r"\b\d+/12\b", bar), bar
    assert "val=" in told[-1]

    seen = screen(raw)
    evaluations = [line for line in seen if "validation loss" in line and not line.startswith("done")]
    assert len(evaluations) == 3, seen
    for line in evaluations:
        assert re.fullmatch(r"step \d+: validation loss \d\.\d{4} nats per character \(\d+\.\d s\)", line)
    [bar] = [line for line in seen if "%|" in line]  # one bar, at its end; none was left behind
    assert bar.startswith("100%|")
    assert f"loss={losses[12]:.3f}" in bar
    assert seen.index(bar) > seen.index(evaluations[-1])
    assert not [line for line in seen if line.startswith("step ") and "/12" in line]  # the bar says it


def screen(raw: str) -> list[str]:
    """The lines that a terminal with an endless page would show in the end."""
    page: list[list[str]] = [[" "] * COLUMNS]
    row = column = 0
    for sign in re.findall(r"\x1b\[\d*[A-Z]|.", raw, re.DOTALL):
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
        elif sign.startswith("\x1b"):
            assert sign == "\x1b[A"
            row -= 1
        else:
            if column == COLUMNS:
                row, column = row + 1, 0
            page += [[" "] * COLUMNS for _ in range(row + 1 - len(page))]
            page[row][column] = sign
            column += 1
        page += [[" "] * COLUMNS for _ in range(row + 1 - len(page))]
    return ["".join(signs).rstrip() for signs in page]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (0.4, "0:00"),
        (9, "0:09"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (3661, "1:01:01"),
        (360_000, "100:00:00"),
    ],
)
def test_a_duration_is_shown_like_on_a_clock(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize("bias", [True, False])
def test_the_summary_adds_up_to_the_models_parameters(bias: bool) -> None:
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, bias=bias, vocab_size=70, block_size=24)
    model = GPT(config)
    title, *layers, total = (line.split() for line in summary(model).splitlines())
    assert title == ["layer", "parameters", "bytes"]
    counts = {name: (int(count.replace(",", "")), int(size.replace(",", ""))) for name, count, size in layers}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert total == ["total", f"{parameters:,}", f"{4 * parameters:,}"]
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [parameters, 4 * parameters]
    assert counts["transformer.wte"] == (70 * 32, 4 * 70 * 32)
    assert counts["transformer.h.*.attn.c_attn"][0] == 3 * (3 * 32 * 32 + 3 * 32 * bias)


def test_rows_of_a_file_are_told_from_what_else_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = [{"event": "start", "step": 0, "time": 1.5}, {"event": "train", "step": 1, "loss": 0.1 + 0.2}]
    bad = ["null", "[]", "4", "abc", "", '{"step": 1}', '{"event": "train", "step": "1"}', "\0\0", '{"event": "tr']
    file.write_text("\n".join([json.dumps(good[0]), *bad, json.dumps(good[1]), '{"event": "train", "step": 2}']))
    assert rows_of(file) == (good, len(bad))
    Metrics(file, step=1, last_step=2).close()  # goes on after them
    assert file.read_text() == "".join(json.dumps(row) + "\n" for row in good)
