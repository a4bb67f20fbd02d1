"""Compiled code is kept in the run folder, except after a compiler was killed."""

import os
import shutil
from pathlib import Path

import pytest
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from mingpt.system.compile_cache import VARIABLE, use_compile_cache
from tests.helpers import run_args, run_program


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
    library.parent.mkdir(parents=True)
    library.touch()
    assert is_kept(default_cache_dir())


@pytest.mark.slow
def test_a_second_start_compiles_nothing(text: Path, tmp_path: Path) -> None:
    """The last, shorter batch of an evaluation is not compiled again."""
    compilations = tmp_path / "compilations"
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {compilations}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    options = {"model__n_layer": 1, "trainer__compile": True, "trainer__eval_every": 9, "trainer__save_every": 9}
    libraries = []
    for steps in (2, 4, 6):
        compilations.write_text("")
        argv = run_args(tmp_path / "run", text, trainer__max_steps=steps, optimizer__decay_steps=9, **options)
        done = run_program("main.py", *argv, CXX=str(compiler), **{VARIABLE: None})
        assert done.returncode == 0, done.stderr
        libraries.append(sum("-shared" in line for line in compilations.read_text().splitlines()))
    assert libraries[0] > 0
    assert libraries[1:] == [0, 0]
