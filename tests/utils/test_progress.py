"""What the person watching sees, on terminals of any width and in files."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    clean_env,
    loss_curve,
    read_rows,
    run_args,
    run_on_terminal,
    run_program,
    set_columns,
    write_text,
)

from mingpt.config import GPTConfig
from mingpt.utils.progress import format_duration, model_summary
from model import GPT

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def test_a_file_gets_plain_dated_lines(tmp_path: Path) -> None:
    """From another folder, too, where paths are relative, and of a text whose name ASCII can't write."""
    write_text(tmp_path / "ü.txt")
    done = run_program("main.py", *run_args(Path("run"), "ü.txt"), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    assert "\\xfc.txt: 3,000 characters" in said
    assert not re.findall(r"[^\x20-\x7e\n]", said)  # no carriage return, no escape code
    assert said.endswith("\n")
    for step, loss in loss_curve(tmp_path / "run"):
        shown = rf"^{DATE}step +{step}/12  loss {loss:.4f}  .* tokens/s  \d+:\d\d left$"
        assert len(re.findall(shown, said, re.MULTILINE)) == 1
    for row in read_rows(tmp_path / "run", "eval"):
        shown = rf"^{DATE}step {row['step']}: validation loss {row['val_loss']:.4f} nats per character \(\d+\.\d s\)$"
        assert len(re.findall(shown, said, re.MULTILINE)) == 1
    for program_to_come in ("sample.py --snapshot", "plot.py run", "export.py --snapshot"):
        assert program_to_come in said.partition("done in")[2]


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_a_terminal_gets_a_live_line_that_fits(columns: int, text: Path, tmp_path: Path) -> None:
    status, raw = run_on_terminal("main.py", *run_args(tmp_path / "run", text), columns=columns)
    assert status == 0, raw
    losses, evaluations = dict(loss_curve(tmp_path / "run")), read_rows(tmp_path / "run", "eval")
    shown = [part.rstrip() for part in re.split(r"[\r\n]+", raw) if re.match(r"\d+/12 ", part)]
    assert all(len(line) <= columns for line in shown)
    assert {f"loss {loss:.3f}" for loss in losses.values()} <= set(re.findall(r"\bloss [\d.]+", " ".join(shown)))
    assert {f"val {row['val_loss']:.3f}" for row in evaluations} == set(re.findall(r"val [\d.]+", " ".join(shown)))
    whole = r"12/12 \S+ loss \d\.\d{3} val \d\.\d{3} [\d.]+k? tok/s 0:00 left saved 0:\d\d ago"
    assert re.fullmatch(whole, shown[-1]), shown[-1]
    assert len(shown[-1]) > columns - 3  # the bar takes what is left
    assert "\x1b[" not in raw.replace("\x1b[A", "")  # no colour

    seen = screen(raw, columns)
    told = [line for line in seen if "validation loss" in line and not line.startswith("done")]
    assert len(told) == 3, seen
    for line in told:
        assert re.fullmatch(r"step \d+: validation loss \d\.\d{4} nats per character \(\d+\.\d s\)", line)
    [last] = [line for line in seen if re.match(r"\d+/12 ", line)]  # one live line, at its end; none was left behind
    assert seen.index(last) > seen.index(told[-1])
    assert not [line for line in seen if line.startswith("step ") and "/12" in line]  # the live line says it


def test_the_live_line_follows_the_terminal(text: Path, tmp_path: Path) -> None:
    def resize(process: subprocess.Popen, master: int, raw: bytes) -> None:
        if re.search(rb"\r[1-9]\d*/120 ", raw):
            set_columns(master, 120)

    argv = run_args(tmp_path / "run", text, trainer__max_steps=120, trainer__eval_every=999, trainer__log_every=99)
    status, raw = run_on_terminal("main.py", *argv, watch=resize)
    assert status == 0, raw
    widths = [len(part.rstrip()) for part in re.split(r"[\r\n]+", raw) if re.match(r"\d+/120 ", part)]
    assert max(widths[:2]) <= 80
    assert 117 < widths[-1] <= 120


class SlowLibrary(BaseHTTPRequestHandler):
    """A web server from which a text of 70 characters comes in 1.3 seconds."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "70")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        for part in range(14):
            time.sleep(0.1 if part else 0)
            self.wfile.write(b"abcde")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def slow_library() -> Iterator[str]:
    """The server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowLibrary) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/text.txt"
        server.shutdown()
        thread.join()


def test_work_that_takes_long_has_a_bar_on_a_terminal_while_it_lasts(slow_library: str, tmp_path: Path) -> None:
    """Fetching takes more than a second; encoding does not, and has none."""
    code = f"from pathlib import Path; from corpus import encode_corpus; encode_corpus({slow_library!r}, Path({{!r}}))"
    command = [sys.executable, "-c", code.format(f"{tmp_path}/pipe")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=clean_env()) as piped:
        status, raw = run_on_terminal("-c", code.format(f"{tmp_path}/terminal"))
        assert (piped.communicate(timeout=60)[1], piped.returncode, status) == (b"", 0, 0)
    bars = [part for part in re.split("[\r\n]+", raw) if part.strip()]
    assert bars
    assert all(re.match(r"fetching: +\d+%\|.*\| \d+\.\d/70\.0", bar) for bar in bars), bars
    assert not "".join(screen(raw, 80))  # nothing is left of it


def test_an_error_of_another_rank_stands_on_a_line_of_its_own() -> None:
    line = "print('50/60 #####', end='', flush=True)"
    status, raw = run_on_terminal("-c", f"from screen import complain; {line}; complain('rank 1 is gone')")
    assert status == 0
    assert screen(raw.replace("\r\x1b[K", "\r" + 80 * " " + "\r"), 81)[0] == "error: rank 1 is gone"


def screen(raw: str, columns: int) -> list[str]:
    """The lines that a terminal with an endless page would show in the end."""
    page: list[list[str]] = [[" "] * columns]
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
            if column == columns:
                row, column = row + 1, 0
            page += [[" "] * columns for _ in range(row + 1 - len(page))]
            page[row][column] = sign
            column += 1
        page += [[" "] * columns for _ in range(row + 1 - len(page))]
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
    assert format_duration(seconds) == shown


@pytest.mark.parametrize("bias", [True, False])
def test_the_summary_adds_up_to_the_models_parameters(bias: bool) -> None:
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, bias=bias, vocab_size=70, block_size=24)
    model = GPT(config)
    title, *layers, total = (line.split() for line in model_summary(model).splitlines())
    assert title == ["layer", "parameters", "bytes"]
    counts = {name: (int(count.replace(",", "")), int(size.replace(",", ""))) for name, count, size in layers}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert total == ["total", f"{parameters:,}", f"{4 * parameters:,}"]
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [parameters, 4 * parameters]
    assert counts["transformer.wte"] == (70 * 32, 4 * 70 * 32)
    assert counts["transformer.h.*.attn.c_attn"][0] == 3 * (3 * 32 * 32 + 3 * 32 * bias)
