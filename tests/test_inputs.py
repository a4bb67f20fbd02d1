"""Bad input of every kind ends at once with status 2 and one message that names it, and does not leave files."""

import ctypes
import io
import json
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

import export
import plot
import sample
from main import main
from mingpt.distributed import network
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot import __main__ as listing
from tests.helpers import (
    assert_one_message,
    run_args,
    run_main,
    run_ranks,
    write_text,
)

TWO = {"RANK": "0", "WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
ONE = {"RANK": "0", "WORLD_SIZE": "1"}
WRONG_KEY = ["--trainer.max_step", "3"]

# Variables, options, and parts of the message
CASES: list[tuple[dict[str, str], list[str], list[str]]] = [
    ({}, ["--trainer.run_dir", ""], ["trainer.run_dir", "found '', must be at least one character"]),
    ({}, ["--config", "text.txt"], ["text.txt holds '", "it must hold the sections data, model"]),
    ({}, ["--model.n_embd", "65536"], ["out of memory before the first step"]),
    (TWO, ["--distributed.init_method", "env://"], ["MASTER_ADDR", "MASTER_PORT", "a rendezvous address"]),
    (ONE | {"LOCAL_RANK": "3"}, WRONG_KEY, ["--trainer.max_step is not known"]),
    (TWO, ["--distributed.init_method", "tcp://no-such-host.invalid:29400"], ["init_method", "can't resolve"]),
    (TWO, ["--distributed.init_method", "file:///proc/x"], ["init_method is file:///proc/x", "can't be opened"]),
    ({}, ["--optimizer.learning_rate", "3e38"], ["step 1: the validation loss is not finite", "(3e+38)"]),
    ({}, ["--data.path", "nosuch::file:///text.txt"], ["data.path: nosuch::file:///text.txt can't be read"]),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.1)


@pytest.mark.parametrize(("env", "argv", "parts"), CASES, ids=range(len(CASES)))
def test_bad_input_of_a_run_is_refused_in_one_message(
    env: dict[str, str],
    argv: list[str],
    parts: list[str],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert run_main([*run_args(tmp_path / "run", text, trainer__max_steps=1), *argv]) == 2
    _, err = capsys.readouterr()
    assert_one_message(err)
    assert all(part in err for part in parts), err
    assert len(err) < 3000
    assert {path.name for path in tmp_path.iterdir()} <= {"text.txt", "run"}


@pytest.mark.parametrize("content", ["null", '{"identity": 3}'])
def test_a_damaged_index_of_the_text_cache_is_made_again(content: str, text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1)
    (tmp_path / "run/cache").mkdir(parents=True)
    (tmp_path / "run/cache/text.json").write_text(content)
    assert run_main(argv) == 0
    assert json.loads((tmp_path / "run/cache/text.json").read_text())["sha256"]


# Other scripts


PROGRAMS = {"sample.py": sample.run, "export.py": export.run, "mingpt.snapshot": listing.run, "plot.py": plot.run}


COMMANDS = {
    "train": ["main.py", *run_args(Path("runs/new"), "books/text.txt", trainer__max_steps=1)],
    "resume": ["main.py", *run_args(Path("runs/old"), "books/text.txt", trainer__max_steps=2)],
    "encode": ["main.py", *run_args(Path("runs/old"), "other.txt", trainer__max_steps=2)],
    "sample": ["sample.py", "--snapshot", "runs/old", "--max_new_tokens", "1"],
    "export": ["export.py", "--snapshot", "runs/old", "--out", "runs/exported"],
    "list": ["mingpt.snapshot", "runs/old"],
    "plot": ["plot.py", "runs/old"],
}
# A place, its mode, the commands that are refused, and some of those that work
MODES = [
    ("books/text.txt", 0o000, "train", "resume"),
    ("other.txt", 0o200, "encode", ""),
    ("books", 0o000, "train resume", "sample"),
    ("runs", 0o555, "train export", "resume list"),
    ("runs/old", 0o000, "resume sample export list plot", ""),
    ("runs/old", 0o555, "resume", "sample export list"),
    ("runs/old/.lock", 0o444, "resume", "sample"),
    ("runs/old/cache", 0o000, "resume", "sample"),
    ("runs/old/cache", 0o555, "encode", "resume"),
    ("runs/old/cache/text.json", 0o000, "", "resume"),
    ("runs/old/config.yaml", 0o000, "", "resume"),
    ("runs/old/metrics.jsonl", 0o000, "resume plot", "sample"),
    ("runs/old/metrics.jsonl", 0o444, "", "resume"),
    ("runs/old/snapshots", 0o000, "resume sample export list", ""),
    ("runs/old/snapshots", 0o555, "resume", "sample export list"),
    ("runs/old/snapshots/step_00000001.pt", 0o000, "resume sample export", ""),
]


@pytest.mark.skipif(sys.platform != "linux", reason="root gives up its capabilities by a system call of Linux")
def test_files_of_any_mode_work_or_are_named_in_one_message(tmp_path: Path) -> None:
    [results] = run_ranks(1, _run_with_modes, tmp_path, tmp_path=tmp_path)
    for place, mode, refused, working in MODES:
        for command in working.split():
            assert results[place, mode, command] == (0, ""), (place, mode, command)
        for command in refused.split():
            status, err = results[place, mode, command]
            assert status == 2, (place, mode, command, err)
            assert_one_message(err)
            assert place in err, (place, mode, command, err)


def _run_with_modes(folder: Path) -> dict[tuple[str, int, str], tuple[int, str]]:
    """Runs the commands without the capabilities of root, which ignore modes."""
    os.chdir(folder)
    os.mkdir("books")
    for name in ("books/text.txt", "other.txt"):
        write_text(Path(name))
    assert run_main(run_args(Path("runs/old"), "books/text.txt", trainer__max_steps=1)) == 0
    shutil.copytree("runs", "kept")
    no_capabilities = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), no_capabilities) == 0
    results = {}
    for place, mode, refused, working in MODES:
        for command in (*refused.split(), *working.split()):
            before = os.stat(place).st_mode
            os.chmod(place, mode)
            program, *argv = COMMANDS[command]
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as stderr:
                results[place, mode, command] = exit_status_of(PROGRAMS.get(program, main), argv), stderr.getvalue()
            with suppress(FileNotFoundError):
                os.chmod(place, before)
            shutil.rmtree("runs")
            shutil.copytree("kept", "runs")
    return results


def test_without_a_folder_for_temporary_files_the_message_names_the_variable(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert run_main(run_args(tmp_path / "run", text, trainer__max_steps=1)) == 2
    err = capsys.readouterr().err
    assert_one_message(err)
    assert err.startswith("error: environment: No usable temporary directory found in ")
    assert err.endswith("; set TMPDIR to a folder that can be written\n")
