"""The live line and bars, on terminals."""

import re
from pathlib import Path

import pytest

from tests.helpers import run_args, run_on_terminal


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


@pytest.mark.parametrize("columns", [80, 0])  # 80 is the default
def test_the_live_line_fits_the_terminal_and_stays_below_log_lines(columns: int, text: Path, tmp_path: Path) -> None:
    status, raw = run_on_terminal("main.py", *run_args(tmp_path / "run", text), columns=columns)
    assert status == 0, raw
    updates = [part.rstrip() for part in re.split(r"[\r\n]+", raw) if re.match(r"\d+/12 ", part)]
    assert all(len(update) <= 80 for update in updates)
    fields = r"12/12 \S+, loss=\d\.\d{3}, left=00:00, val=\d\.\d{3}, tok/s=[\d.]+k?, saved=\d+"
    assert re.fullmatch(fields, updates[-1]), updates[-1]
    assert len(updates[-1]) > 77  # the bar takes the width that is left

    lines = screen(raw, 80)
    evals = [line for line in lines if re.match(r"step \d+: validation", line)]
    assert len(evals) == 3, lines
    for line in evals:
        assert re.fullmatch(r"step \d+: validation loss \d\.\d{4} nats per token \(\d+\.\d s\)", line)
    [last] = [line for line in lines if re.match(r"\d+/12 ", line)]  # log lines leave no copies of the live line
    assert lines.index(last) > lines.index(evals[-1])
    assert not [line for line in lines if line.startswith("step ") and "/12" in line]  # the live line has these
