"""A run whose model.py was changed is refused in one message, and its weights can begin a new run."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sample
from mingpt.program import run_program as exit_status_of
from model import MLP
from tests.helpers import (
    assert_one_message,
    newest_snapshot,
    run_args,
    run_captured,
    run_each_captured,
    run_ranks,
    train_main,
    write_text,
)

C_PROJ = "transformer.h.*.mlp.c_proj.weight"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder next to its text.txt."""
    folder = tmp_path_factory.mktemp("trained")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=1)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder / "run"


def reshape(mlp: Any) -> None:
    mlp.c_fc = nn.Linear(16, 32, bias=False)
    mlp.c_proj = nn.Linear(32, 16, bias=False)


def rename(mlp: Any) -> None:
    mlp.output = mlp.c_proj
    del mlp.c_proj
    mlp.forward = lambda x: mlp.output(mlp.act(mlp.c_fc(x)))


def convert(mlp: Any) -> None:
    mlp.c_fc.to(torch.float64)
    mlp.forward = lambda x: mlp.c_proj(mlp.act(mlp.c_fc(x.double()).float()))


@pytest.mark.parametrize(
    ("change", "strategy", "difference"),
    [
        (reshape, "fsdp", f"of another shape: transformer.h.*.mlp.c_fc.weight, {C_PROJ}"),
        (convert, "ddp", "of another dtype: transformer.h.*.mlp.c_fc.weight"),
        (rename, "ddp", f"new in the model: {C_PROJ.replace('c_proj', 'output')}; missing in the model: {C_PROJ}"),
    ],
    ids=["reshape", "convert", "rename"],
)
def test_a_changed_model_does_not_continue_a_run_but_may_begin_one_with_its_weights(
    change: Any, strategy: str, difference: str, run_dir: Path, tmp_path: Path
) -> None:
    options = {"distributed__strategy": strategy, "optimizer__learning_rate": 1e-30}
    again, new = (run_args(folder, run_dir.with_name("text.txt"), **options) for folder in (run_dir, tmp_path / "new"))
    argvs = [again, [*new, "--trainer.init_from", str(run_dir), "--trainer.max_steps", "1"]]
    ranks = 2 if strategy == "fsdp" else 1
    results, *others = run_ranks(ranks, _run_changed, change, argvs, run_dir, tmp_path=tmp_path)
    (status, err), (new_status, new_err), (sample_status, sample_err) = results
    assert (status, new_status, sample_status) == (2, 0, 2)
    assert_one_message(err)
    assert f"are not those of the model, whose code has changed: {difference}. To train it, set another" in err
    assert [other_results[0] for other_results in others] == [(2, "")] * (ranks - 1)
    assert_one_message(sample_err)
    assert f"are not those of the model in model.py: {difference}" in sample_err

    # With trainer.init_from, weights are converted to another dtype.
    assert (f"do not fit the model, and are not used: {difference}\n" in new_err) == (change is not convert)
    before, after = newest_snapshot(run_dir)["model"], newest_snapshot(tmp_path / "new")["model"]
    unchanged = [name for name in after if "attn.c_attn" in name or "wte" in name]
    assert len(unchanged) == 3
    for name in unchanged:
        torch.testing.assert_close(after[name], before[name])


def _run_changed(change: Any, argvs: list[list[str]], run_dir: Path) -> list[tuple[int, str]]:
    """Runs main.py with these command lines, and sample.py, after a change of model.py. Returns statuses and stderr."""
    init = MLP.__init__

    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        change(self)

    MLP.__init__ = changed
    results = [(status, err) for status, _, err in run_each_captured(argvs)]
    with redirect_stderr(io.StringIO()) as stderr:
        status = exit_status_of(sample.run, ["--snapshot", str(run_dir)])
    return [*results, (status, stderr.getvalue())]


def test_weights_of_which_none_fits_are_refused(run_dir: Path, tmp_path: Path) -> None:
    snapshot = newest_snapshot(run_dir)
    snapshot["model"] = {f"other.{name}": weight for name, weight in snapshot["model"].items()}
    torch.save(snapshot, tmp_path / "other.pt")
    argv = run_args(tmp_path / "new", run_dir.with_name("text.txt"), trainer__init_from=tmp_path / "other.pt")
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err)
    assert f"trainer.init_from: no weights of {tmp_path}/other.pt fit the model: new in the model: " in err
