"""The live line and bars, on terminals."""

import re
from pathlib import Path
from typing import Any

import pytest

from mingpt.monitoring.live_line import format_duration
from tests.helpers import (
    NO_DROPOUT,
    ROOT,
    TORCHRUN,
    loss_curve,
    read_rows,
    run_args,
    run_on_terminal,
    run_ranks,
    train_main,
)


def screen(raw: str, columns: int) -> list[str]:
    """The lines that a terminal of endless height shows after this output."""
    page: list[list[str]] = [[" "] * columns]
    row = column = 0
    for token in re.findall(r"\x1b\[[A-Z]|.", raw, re.DOTALL):
        if token == "\r":
            column = 0
        elif token in ("\n", "\x1b[A"):
            row += 1 if token == "\n" else -1
        else:
            assert token.isprintable()
            if column == columns:
                row, column = row + 1, 0
            page += [[" "] * columns for _ in range(row + 1 - len(page))]
            page[row][column] = token
            column += 1
        page += [[" "] * columns for _ in range(row + 1 - len(page))]
    return ["".join(line).rstrip() for line in page]


def test_the_live_line_fits_the_terminal_and_stays_below_log_lines(text: Path, tmp_path: Path) -> None:
    status, raw = run_on_terminal("main.py", *run_args(tmp_path / "run", text), columns=80)
    assert status == 0, raw
    losses, evaluations = dict(loss_curve(tmp_path / "run")), read_rows(tmp_path / "run", "eval")
    updates = [part.rstrip() for part in re.split(r"[\r\n]+", raw) if re.match(r"\d+/12 ", part)]
    assert all(len(update) <= 80 for update in updates)
    assert {f"loss {loss:.3f}" for loss in losses.values()} <= set(re.findall(r"\bloss [\d.]+", " ".join(updates)))
    assert {f"val {row['val_loss']:.3f}" for row in evaluations} == set(re.findall(r"val [\d.]+", " ".join(updates)))
    status_fields = r"12/12 \S+ loss \d\.\d{3} 0:00 left val \d\.\d{3} [\d.]+k? tok/s saved 0:\d\d ago"
    assert re.fullmatch(status_fields, updates[-1]), updates[-1]
    assert len(updates[-1]) > 77  # the bar takes the width that is left

    lines = screen(raw, 80)
    evals = [line for line in lines if re.match(r"step \d+: validation", line)]
    assert len(evals) == 3, lines
    for line in evals:
        assert re.fullmatch(r"step \d+: validation loss \d\.\d{4} nats per character \(\d+\.\d s\)", line)
    [last] = [line for line in lines if re.match(r"\d+/12 ", line)]  # log lines leave no copies of the live line
    assert lines.index(last) > lines.index(evals[-1])
    assert not [line for line in lines if line.startswith("step ") and "/12" in line]  # the live line has these


def test_a_narrow_terminal_shows_the_loss_and_the_time_left_whole() -> None:
    code = """
from mingpt.monitoring.live_line import LiveLine
line = LiveLine(0, 1600, is_shown=True)
line.fields.update(loss="loss 1.234", val="val 1.500", speed="35k tok/s")
line.saved_at = line.started
line.advance(1599, None)
line.close()"""
    shown = {}
    for columns in (20, 40, 80):
        status, raw = run_on_terminal("-c", code, columns=columns)
        assert status == 0, raw
        shown[columns] = " ".join(re.split(r"[\r\n]+", raw.strip())[-1].split()[2:])
    assert shown == {
        20: "",
        40: "loss 1.234 0:00 left",
        80: "loss 1.234 0:00 left val 1.500 35k tok/s saved 0:00 ago",
    }


@pytest.mark.slow
def test_the_live_line_has_the_loss_of_each_step_on_one_process_and_of_first_and_logged_ones_on_two(
    text: Path, tmp_path: Path
) -> None:
    """The mean over the whole batch."""
    size: dict[str, Any] = {"trainer__max_steps": 7, **NO_DROPOUT}
    assert run_ranks(2, train_main, *run_args(tmp_path / "all", text, **size), tmp_path=tmp_path) == [0, 0]
    losses = dict(loss_curve(tmp_path / "all"))
    for name, launcher, shown_steps in (
        ("one", (), {step: step for step in range(1, 8)}),
        ("two", (*TORCHRUN, "--nproc_per_node=2"), {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 5, 7: 7}),
    ):
        command = [*launcher, str(ROOT / "main.py"), *run_args(tmp_path / name, text, trainer__log_every=5, **size)]
        status, raw = run_on_terminal(*command, columns=100, TQDM_MININTERVAL="0", TQDM_MINITERS="1")
        assert status == 0, raw
        updates = [part for part in re.split(r"[\r\n]+", raw) if re.match("[1-7]/7 ", part)]
        shown = [re.sub(r"/7 .* loss (\d\.\d{3}) .*", r" \1", update).split() for update in updates]
        assert {int(step) for step, _ in shown} == set(shown_steps), raw
        for step, loss in shown:
            assert float(loss) == pytest.approx(losses[shown_steps[int(step)]], abs=6e-4), (name, step)
        assert [step for step, _ in loss_curve(tmp_path / name)] == [1, 5, 7]


def test_durations_are_rounded_to_seconds() -> None:
    expected = {0.4: "0:00", 9: "0:09", 59.4: "0:59", 59.6: "1:00", 61: "1:01", 3599.4: "59:59", 3599.6: "1:00:00"}
    expected |= {3661: "1:01:01", 360_000: "100:00:00"}
    assert {seconds: format_duration(seconds) for seconds in expected} == expected
