"""Compiled code is kept in the run folder, and what a killed compiler has left there is not used."""

import _ctypes
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, assert_equal_snapshots, clean_env, loss_curve, run_args, run_program, write_text

from mingpt.hardware.compile_cache import VARIABLE, use_compile_cache

TINY = {
    "model__n_layer": 1,
    "trainer__compile": True,
    "trainer__threads": 1,
    "trainer__eval_every": 9,
    "trainer__save_every": 9,
    "trainer__sample_every": None,
}


def test_unfinished_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "cache/ab"
    folder.mkdir(parents=True)
    library = Path(_ctypes.__file__).read_bytes()
    contents = {
        "whole.so": library,
        "cut.so": library[:-1],
        "header.so": library[:30],
        "holes.so": bytes(len(library)),
        "no_table.so": library[:40] + bytes(8) + library[48:],
        "empty.so": b"",
        "empty.py": b"",
        "code.py": b"0",
        "free.lock": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    use_compile_cache(tmp_path / "unused")
    assert {file.name for file in folder.iterdir()} == {"whole.so", "code.py", "free.lock"}
    assert not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_survives_a_killed_compiler(tmp_path: Path) -> None:
    """The last, shorter batch of an evaluation is not compiled for itself either."""
    text = write_text(tmp_path / "text.txt")
    compilations = tmp_path / "compilations"
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {compilations}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)

    def count_libraries() -> int:
        lines = compilations.read_text().splitlines()
        compilations.write_text("")
        return sum("-shared" in line for line in lines)

    def train(name: str, steps: int) -> None:
        argv = run_args(tmp_path / name, text, trainer__max_steps=steps, optimizer__decay_steps=9, **TINY)
        done = run_program("main.py", *argv, CXX=str(compiler), **{VARIABLE: None})
        assert done.returncode == 0, done.stderr

    # A run that is killed while the compiler works.
    argv = run_args(tmp_path / "run", text, trainer__max_steps=2, optimizer__decay_steps=9, **TINY)
    command = [sys.executable, str(ROOT / "main.py"), *argv]
    env = clean_env(CXX=str(compiler), **{VARIABLE: None})
    with subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "run").glob("cache/compiled/**/*.so"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    train("run", 2)
    assert count_libraries() > 0

    train("run", 4)
    assert count_libraries() == 0
    for library in (tmp_path / "run").glob("cache/compiled/**/*.so"):
        library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    train("run", 6)
    assert count_libraries() > 0

    shutil.copytree(tmp_path / "run/cache", tmp_path / "whole/cache")
    train("whole", 6)
    assert count_libraries() == 0
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "run")
    assert loss_curve(tmp_path / "whole") == loss_curve(tmp_path / "run")
