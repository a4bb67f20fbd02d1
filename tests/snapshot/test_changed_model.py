"""A run whose model.py was changed is refused in one message, and its weights can begin a new run."""

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sample
from mingpt.program import run_program as exit_status_of
from model import MLP, CausalSelfAttention
from tests.helpers import assert_one_message, newest_snapshot, run_args, run_captured, run_ranks, train_main

C_PROJ = "transformer.h.*.mlp.c_proj.weight"


def add(attention: Any) -> None:
    attention.gate = nn.Parameter(torch.ones(2))


def remove(attention: Any) -> None:
    attention.c_proj = nn.Identity()


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


# Changes of a module, and what differs from weights of before
CHANGES: dict[str, tuple[Any, Any, str]] = {
    "add": (CausalSelfAttention, add, "new in the model: transformer.h.*.attn.gate"),
    "remove": (CausalSelfAttention, remove, "missing in the model: transformer.h.*.attn.c_proj.weight"),
    "reshape": (MLP, reshape, f"of another shape: transformer.h.*.mlp.c_fc.weight, {C_PROJ}"),
    "convert": (MLP, convert, "of another dtype: transformer.h.*.mlp.c_fc.weight"),
    "rename": (MLP, rename, f"new in the model: {C_PROJ.replace('c_proj', 'output')}; missing in the model: {C_PROJ}"),
}


def _run_changed(change: str, runs: list[list[str]]) -> list[tuple[int, str, str]]:
    """For `run_ranks`: runs main.py with these command lines after a change of model.py."""
    module, function, _ = CHANGES[change]
    init = module.__init__

    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        function(self)

    module.__init__ = changed
    results = []
    rendezvous = os.environ["TEST_INIT_METHOD"]
    for i, argv in enumerate(runs):
        os.environ["TEST_INIT_METHOD"] = f"{rendezvous}-{i}"
        results.append(run_captured(*argv))
    return results


def _sample_changed(change: str, run_dir: str) -> tuple[int, str]:
    _run_changed(change, [])
    with redirect_stderr(io.StringIO()) as stderr:
        status = exit_status_of(sample.run, ["--snapshot", run_dir])
    return status, stderr.getvalue()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_does_not_continue_a_run_but_may_begin_one_with_its_weights(
    change: str, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(1, train_main, *run_args(run_dir, text, trainer__max_steps=3), tmp_path=tmp_path) == [0]
    before = newest_snapshot(run_dir)
    _, _, difference = CHANGES[change]

    again = run_args(run_dir, text)
    new = run_args(tmp_path / "new", text, trainer__init_from=run_dir, optimizer__learning_rate=1e-30)
    [[(status, _, err), (new_status, _, new_err)]] = run_ranks(1, _run_changed, change, [again, new], tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err)
    assert f"are not those of the model, whose code has changed: {difference}. To train it, set another" in err
    if change == "reshape":
        fsdp = [*again, "--distributed.strategy", "fsdp"]
        [[(status, _, err)], [(_, _, other)]] = run_ranks(2, _run_changed, change, [fsdp], tmp_path=tmp_path)
        assert (status, other) == (2, "")
        assert difference in err

    assert new_status == 0, new_err
    # With trainer.init_from, weights are converted to another dtype.
    assert (f"do not fit the model, and are not used: {difference}\n" in new_err) == (change != "convert")
    after = newest_snapshot(tmp_path / "new")
    unchanged = [name for name in after["model"] if "attn.c_attn" in name or "wte" in name]
    assert len(unchanged) == 3
    for name in unchanged:
        torch.testing.assert_close(after["model"][name], before["model"][name])

    [(status, err)] = run_ranks(1, _sample_changed, change, str(run_dir), tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err)
    assert f"are not those of the model in model.py: {difference}" in err


def test_weights_of_which_none_fits_are_refused(text: Path, tmp_path: Path) -> None:
    assert run_ranks(1, train_main, *run_args(tmp_path / "run", text, trainer__max_steps=1), tmp_path=tmp_path) == [0]
    snapshot = newest_snapshot(tmp_path / "run")
    snapshot["model"] = {f"other.{name}": weight for name, weight in snapshot["model"].items()}
    torch.save(snapshot, tmp_path / "other.pt")
    argv = run_args(tmp_path / "new", text, trainer__init_from=tmp_path / "other.pt")
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err)
    assert f"trainer.init_from: no weights of {tmp_path}/other.pt fit the model: new in the model: " in err
