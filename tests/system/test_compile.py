"""Compiled code is used again."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import run_args, run_program


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
        done = run_program("main.py", *argv, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        libraries.append(sum("-shared" in line for line in compilations.read_text().splitlines()))
    assert libraries[0] > 0
    assert libraries[1:] == [0, 0]
