"""Resuming a run from its snapshots: what they contain, damage, and what has changed: keys, text, code, model."""

import hashlib
import io
import re
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sample
import trainer
from mingpt import start
from mingpt.config.parser import read_config
from mingpt.config.schema import GPTConfig, OptimizerConfig, config_to_dict
from mingpt.optim.optimizer import learning_rate
from mingpt.parallel import numerics
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot.folder import SnapshotFolder, load_snapshot
from model import GPT, MLP
from tests.faults.runs import assert_same_run
from tests.helpers import ROOT, read_rows, run_args, run_each_captured, run_main, run_ranks, train_run, write_text
from tests.inside import assert_one_message, list_snapshots, newest_snapshot

SIX_STEPS = {"trainer__max_steps": 6, "optimizer__decay_steps": 12}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and two runs with snapshots at steps 3 and 6: one/ on one rank, two/ on two."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    for ranks, name in ((1, "one"), (2, "two")):
        train_run(folder / name, text, ranks, **SIX_STEPS)
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run on one rank."""
    return shutil.copytree(trained / "one", tmp_path / "run")


def test_a_snapshot_opens_with_torch_load_and_has_the_documented_content(trained: Path) -> None:
    """The run has two ranks."""
    run = trained / "two"
    snapshot = torch.load(run / "snapshots/step_00000006.pt", weights_only=True)
    assert isinstance(snapshot["format"], int)
    assert f'version = "{snapshot["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert (snapshot["step"], snapshot["samples"]) == (6, 6 * 7)
    assert snapshot["vocabulary"] == "".join(sorted(set((trained / "text.txt").read_text())))
    assert snapshot["scaler"] == {}  # fp32 needs none
    assert snapshot["val_loss"] == read_rows(run, "eval")[-1]["val_loss"]
    assert snapshot["code"] == start.code_digests()
    assert load_snapshot(str(run / "snapshots/step_00000003.pt"))["val_loss"] is None

    config = snapshot["config"]
    expected = config_to_dict(read_config(run_args(run, trained / "text.txt", **SIX_STEPS)))
    assert config["distributed"].pop("init_method").startswith("file://")
    del expected["distributed"]["init_method"]
    assert config == expected
    assert {type(section) for section in (config, *config.values())} == {dict}

    model = GPT(GPTConfig(**config["model"], block_size=16, vocab_size=len(snapshot["vocabulary"])))
    model.load_state_dict(snapshot["model"])
    assert set(snapshot["model"]) == set(snapshot["optimizer"]) == {name for name, _ in model.named_parameters()}
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"} <= set(snapshot["model"])
    assert {int(state["step"]) for state in snapshot["optimizer"].values()} == {6}


def test_resume_skips_a_damaged_snapshot_and_restores_the_same_bits_also_from_one_of_an_earlier_version(
    trained: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has other keys and entries, which are not reported as changes."""
    older, file = (run_dir / f"snapshots/step_0000000{step}.pt" for step in (3, 6))
    snapshot = load_snapshot(str(older))
    snapshot["config"]["distributed"]["survive"] = True
    snapshot["config"]["trainer"]["save_minutes"] = None
    del snapshot["config"]["model"]["bias"]
    SnapshotFolder(f"{run_dir}/snapshots", keep=9).write(snapshot, flush=True)
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    assert run_main(run_args(run_dir, trained / "text.txt", **SIX_STEPS)) == 0
    out, err = capsys.readouterr()
    [damaged] = err.splitlines()
    assert f"{file} is damaged (the bytes of its part archive/data.pkl do not" in damaged
    assert f"resuming from {older}\n" in out
    assert not re.search(" has changed|changed since|the learning rate of", out)
    assert_same_run(trained / "one", run_dir)
    assert load_snapshot(str(file))["step"] == 6


def test_a_run_resumes_in_fp16_and_back(run_dir: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler's state is restored if the snapshot has one."""
    monkeypatch.setattr(numerics, "choose_precision", lambda requested, *_: (requested, "as asked"))
    monkeypatch.setattr(start, "find_start_conflicts", lambda *_: [])
    for precision, steps, tracker in (("fp16", 7, 1), ("fp16", 8, 2), ("fp32", 9, None)):
        options = {"trainer__precision": precision, "trainer__max_steps": steps}
        assert run_main(run_args(run_dir, trained / "text.txt", **options)) == 0
        assert newest_snapshot(run_dir)["scaler"].get("_growth_tracker") == tracker  # steps since the scale changed


@pytest.mark.parametrize(("steps", "message"), [(1, "step 1: the validation loss"), (2, "step 2: the norm of the ")])
def test_weights_that_are_not_finite_are_not_saved(
    steps: int, message: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The loss of a step is finite, and its update overflows: the last one, which is evaluated, or one before.

    A save of the latter may have ended, and failed, before the loss of the next step is known.
    """
    monkeypatch.setattr(trainer, "learning_rate", lambda *_: 1e38)  # the configuration allows none that overflows
    argv = run_args(tmp_path / "run", trained / "text.txt", trainer__max_steps=steps, trainer__save_every=1)
    assert run_main(argv) == 2
    assert message in capsys.readouterr().err
    assert list_snapshots(tmp_path / "run") == []
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


def test_retuning_keys_follow_the_yaml_and_changes_are_logged(
    trained: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text, whose tokens were lost, loses a character, too. The learning rate is so low that the weights stay."""
    shutil.rmtree(run_dir / "data")
    before = newest_snapshot(run_dir)
    code = {**before["code"], "model.py": "another content", "mingpt/nn/own.py": "removed"}
    del code["trainer.py"]
    SnapshotFolder(f"{run_dir}/snapshots", keep=9).write(before | {"code": code}, flush=True)
    text = tmp_path / "text.txt"
    text.write_text((trained / "text.txt").read_text().replace("f", "s"))
    options = {"optimizer__learning_rate": 1e-12, "optimizer__decay_steps": 20, "trainer__batch_size": 5}
    assert run_main(run_args(run_dir, text, **options, trainer__max_steps=8)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    logged = out.partition("resuming from")[2].partition("step 7/8")[0]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (trained / "text.txt", text)]
    assert f"the text's SHA-256 {digests[0]} -> {digests[1]}" in logged
    assert "the learning rate of step 6 was " in logged
    assert re.search(r"changed since the snapshot: .*, model\.py another content -> ", logged)
    config = OptimizerConfig(learning_rate=1e-12, warmup_steps=4, decay_steps=20)
    rates = [row["learning_rate"] for row in read_rows(run_dir) if row["step"] > 6]
    assert rates == pytest.approx([learning_rate(step, 8, config) for step in (7, 8)])
    after = newest_snapshot(run_dir)
    assert after["samples"] == 6 * 7 + 2 * 5
    assert after["vocabulary"] == before["vocabulary"]
    for name, weight in after["model"].items():
        torch.testing.assert_close(weight, before["model"][name], rtol=0, atol=1e-10, msg=name)


# Code of the model that has changed

IN_MLP = "transformer.h.*.mlp."


def reshape(mlp: Any) -> None:
    mlp.c_fc = nn.Linear(16, 32, bias=False)
    mlp.c_proj = nn.Linear(32, 16, bias=False)


def rename(mlp: Any) -> None:
    mlp.output = mlp.c_proj
    del mlp.c_proj
    mlp.forward = lambda x: mlp.output(mlp.act(mlp.c_fc(x)))


@pytest.mark.parametrize(
    ("change", "strategy", "difference"),
    [
        (reshape, "fsdp", f"of another shape: {IN_MLP}c_fc.weight, {IN_MLP}c_proj.weight"),
        (rename, "ddp", f"new in the model: {IN_MLP}output.weight, {IN_MLP}output.bias; missing in the model: "),
    ],
)
def test_a_changed_model_does_not_continue_a_run_but_may_begin_one_with_its_weights(
    change: Any, strategy: str, difference: str, trained: Path, run_dir: Path, tmp_path: Path
) -> None:
    options = {"distributed__strategy": strategy, "optimizer__learning_rate": 1e-30}
    again, new = (run_args(tmp_path / name, trained / "text.txt", **options) for name in ("run", "new"))
    argvs = [again, [*new, "--trainer.init_from", str(run_dir), "--trainer.max_steps", "1"]]
    ranks = 2 if strategy == "fsdp" else 1
    results, *others = run_ranks(ranks, _run_changed, change, argvs, run_dir, tmp_path=tmp_path)
    (status, err), (new_status, new_err), (sample_status, sample_err) = results
    assert (status, new_status, sample_status) == (2, 0, 2)
    assert_one_message(
        err, "are not those of the model, whose code has changed: ", difference, "To train it, set another"
    )
    assert [other_results[0] for other_results in others] == [(2, "")] * (ranks - 1)
    assert_one_message(sample_err, "are not those of the model in model.py: ", difference)
    assert "do not fit the model, and are not used: " in new_err
    before, after = newest_snapshot(run_dir)["model"], newest_snapshot(tmp_path / "new")["model"]
    unchanged = [name for name in after if "attn.c_attn" in name or "wte" in name]
    assert len(unchanged) == 5
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
