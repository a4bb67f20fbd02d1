"""Compiled code is kept in the run folder, except after a compiler was killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from mingpt.system.compile_cache import VARIABLE, use_compile_cache
from tests.helpers import ROOT, assert_equal_snapshots, clean_env, loss_curve, run_args, run_program, write_text

TINY = {
    "model__n_layer": 1,
    "trainer__compile": True,
    "trainer__threads": 1,
    "trainer__eval_every": 9,
    "trainer__save_every": 9,
    "trainer__sample_every": None,
}


def test_the_cache_of_a_process_that_was_killed_while_it_compiled_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    library = tmp_path / "cache/ab/library.so"
    library.parent.mkdir(parents=True)
    library.touch()

    def is_kept(variable: str) -> bool:
        monkeypatch.setenv(VARIABLE, variable)
        use_compile_cache(tmp_path / "cache")
        return library.exists()

    assert is_kept(default_cache_dir())
    assert os.environ[VARIABLE] == str(tmp_path / "cache")
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
        assert is_kept(str(tmp_path / "another"))
        assert not is_kept(default_cache_dir())
    library.parent.mkdir()
    library.touch()
    assert is_kept(default_cache_dir())


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_survives_a_killed_compiler(tmp_path: Path) -> None:
    """The last, shorter batch of an evaluation is not compiled again."""
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
    for library in (tmp_path / "run").glob("cache/compiled/**/*.so"):
        library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    train("run", 2)
    assert count_libraries() > 0

    for steps in (4, 6):
        train("run", steps)
        assert count_libraries() == 0

    shutil.copytree(tmp_path / "run/cache", tmp_path / "whole/cache")
    train("whole", 6)
    assert count_libraries() == 0
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "run")
    assert loss_curve(tmp_path / "whole") == loss_curve(tmp_path / "run")
