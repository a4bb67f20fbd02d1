"""Log lines on pipes and terminals, and the exit status of scripts."""

import os
import re
import sys
from pathlib import Path

import pytest

from mingpt.monitoring.logging import configure_logging, logger, set_rank
from mingpt.program import exit_process
from tests.helpers import main_process, read_rows, run_args, run_on_terminal, run_program, start_ranks, wait_for_step
from tests.inside import newest_snapshot

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def test_a_pipe_gets_plain_dated_lines(text: Path, tmp_path: Path) -> None:
    """With relative paths, from another folder, and the name of a text that ASCII can't encode."""
    text.rename(tmp_path / "ü.txt")
    done = run_program("main.py", *run_args(Path("run"), "ü.txt"), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    assert "\\xfc.txt: 3,000 tokens" in out
    assert not re.findall(r"[^\x20-\x7e\n]", out)  # no carriage return, no escape code
    assert out.endswith("\n")
    for row in read_rows(tmp_path / "run"):
        line = rf"^{DATE}step +{row['step']}/12  loss {row['loss']:.4f}  .* tokens/s  \d:\d\d:\d\d left$"
        assert len(re.findall(line, out, re.MULTILINE)) == 1
    for row in read_rows(tmp_path / "run", "eval"):
        losses = f"{row['val_loss']:.4f} nats per token, {row['val_bpb']:.4f} bits per byte"
        line = rf"^{DATE}step {row['step']}: validation loss {losses} \(\d+\.\d s\)$"
        assert len(re.findall(line, out, re.MULTILINE)) == 1
    for command in ("sample.py --snapshot", "plot.py run", "export.py --snapshot"):
        assert command in out.partition("done in")[2]


def test_ranks_other_than_0_log_warnings_and_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    for rank in (0, 1):
        set_rank(rank, rank)
        for log in (logger.info, logger.warning, logger.error):
            log(f"from rank {rank}")
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{DATE}from rank 0\n", out)
    assert err == "".join(f"{level}: from rank {rank}\n" for rank in (0, 1) for level in ("warning", "error"))
    configure_logging("stderr")
    logger.info("for people")
    assert capsys.readouterr() == ("", "for people\n")
    configure_logging()


def test_the_end_of_a_program_does_not_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with pytest.raises(SystemExit, match="2"):
        exit_process(2)


def test_training_continues_when_the_reader_of_stdout_ends(text: Path, tmp_path: Path) -> None:
    """As in `main.py | head -1`; SIGTERM then still saves."""
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__max_steps=1_000_000, trainer__save_every=1_000_000)
    stdout = tmp_path / "stdout"
    os.mkfifo(stdout)
    [process], _ = start_ranks(1, main_process, argv, stdout, tmp_path / "stderr", tmp_path=tmp_path)
    with stdout.open() as reader:
        assert reader.readline()
    wait_for_step(run_dir, 20)
    process.terminate()
    process.join(60)
    assert (process.exitcode, (tmp_path / "stderr").read_text()) == (143, "")
    assert newest_snapshot(run_dir)["step"] == read_rows(run_dir)[-1]["step"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_training_continues_when_the_disk_of_its_output_is_full(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text)
    [process], _ = start_ranks(1, main_process, argv, "/dev/full", "/dev/full", tmp_path=tmp_path)
    process.join(60)
    assert process.exitcode == 0
    assert len(read_rows(tmp_path / "run")) == 12  # and no other line in metrics.jsonl
    assert newest_snapshot(tmp_path / "run")["step"] == 12


def test_a_terminal_gets_a_bar_below_log_lines(text: Path, tmp_path: Path) -> None:
    status, raw = run_on_terminal("main.py", *run_args(tmp_path / "run", text))
    assert status == 0, raw
    bars = [part.rstrip() for part in re.split(r"[\r\n]+", raw) if re.match(r"\d+/12 ", part)]
    assert all(len(bar) <= 80 for bar in bars)
    assert re.fullmatch(r"12/12 \S+ 00:00 left, loss \d\.\d{4}, [\d,]+ tokens/s", bars[-1]), bars[-1]
    lines = [line.rpartition("\r")[2].rstrip() for line in raw.split("\r\n")]  # what stays on the terminal
    assert len([line for line in lines if re.match(r"step \d+: validation loss", line)]) == 3
    assert len([line for line in lines if re.match(r"\d+/12 ", line)]) == 1  # log lines leave no copies of the bar
