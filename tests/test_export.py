"""Exports in the format of transformers, and runs that start from pretrained weights."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from export import run
from mingpt.config.parser import read_config
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot.load import Pretrained, load_pretrained
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from model import GPT
from tests.helpers import (
    assert_equal_snapshots,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_each_captured,
    run_program,
    run_ranks,
    train_main,
    write_text,
)

CHARACTERS = 'figs ñandú—🙂"\\\t'


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gpt2", True), id="gpt2"),
        pytest.param(("gpt2", False), id="gpt2 without bias", marks=pytest.mark.slow),
        pytest.param(("nanochat", True), id="nanochat"),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps; noise is added to the newest weights, so that outputs differ clearly."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text().replace("figs", CHARACTERS), encoding="utf-8")
    architecture, bias = request.param
    changes = {
        "model__architecture": architecture,
        "model__bias": bias,
        "data__block_size": 256,
    }
    argv = run_args(folder / "run", text, trainer__max_steps=6, **changes)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    snapshots = SnapshotStorage(str(folder / "run/snapshots"), keep=9)
    snapshot = load_snapshot(snapshots.file(6))
    torch.manual_seed(3)  # with some seeds the greedy text repeats one character
    snapshot["model"] = {name: weight + 0.5 * torch.randn_like(weight) for name, weight in snapshot["model"].items()}
    snapshots.write(snapshot, None)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """The export of `trained`."""
    out = trained.parent / "exported"
    out.mkdir()
    done = run_program("export.py", "--snapshot", str(trained), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(out) in done.stdout
    return out


def load(path: Path) -> Pretrained:
    return load_pretrained(str(path), "--snapshot")


def test_an_export_has_the_weights_by_the_names_of_transformers(trained: Path, exported: Path) -> None:
    weights = load(trained).weights
    stored = safetensors.torch.load_file(exported / "model.safetensors")
    c_fc = weights["transformer.h.1.mlp.c_fc.weight"]
    c_attn = weights["transformer.h.1.attn.c_attn.weight"]
    if "model.embed_tokens.weight" in stored:
        assert torch.equal(stored["model.layers.1.mlp.fc1.weight"], c_fc)
        assert torch.equal(stored["model.layers.1.self_attn.k_proj.weight"], c_attn[16:32])
    else:
        assert torch.equal(stored["transformer.h.1.mlp.c_fc.weight"], c_fc.T)
        assert torch.equal(stored["transformer.h.1.attn.c_attn.weight"], c_attn.T)
        assert stored["transformer.h.1.attn.c_attn.bias"].shape == (48,)


def test_the_model_card_has_text_loss_and_command(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    card, snapshot = (exported / "README.md").read_text(), load_snapshot(str(trained / "snapshots/step_00000006.pt"))
    assert snapshot["text_sha256"] in card
    assert f"{snapshot['val_loss']:.4f} nats" in card
    assert f"The tokenizer knows the {len(snapshot['vocabulary'])} distinct characters of the training text." in card
    assert f"A character-level GPT of architecture {snapshot['config']['model']['architecture']}: 2 layers" in card
    command = card.partition("Trained by\n\n```\npython main.py ")[2].partition("\n```\n")[0]
    options = shlex.split(command)
    with pytest.raises(SystemExit, match="0"):
        read_config([*options, "--trainer.run_dir", f"{tmp_path}/again", "--print_config"])
    config = capsys.readouterr().out
    assert config.replace(f"{tmp_path}/again", str(trained)) == (trained / "config.yaml").read_text()


@pytest.mark.slow
def test_transformers_has_the_same_tokens_logits_and_greedy_text(trained: Path, exported: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    pretrained = load(trained)
    text = f"anna {CHARACTERS}\n\n  bob"
    tokens = tokenizer(text)["input_ids"]
    assert tokens == [pretrained.vocabulary.index(character) for character in text]
    assert tokenizer.decode(tokens) == text
    [knows] = re.findall(r"The tokenizer knows [^|]*", (exported / "README.md").read_text())
    _, error, _, expression, _ = knows.split("`")
    with pytest.raises(Exception, match=re.escape(error)):  # tokenizers raises nothing narrower
        tokenizer("anna€")
    assert eval(expression, {"text": "€anna€ñ€", "tokenizer": tokenizer}) == "annañ"

    gpt = GPT(pretrained.model_config).eval()
    gpt.load_state_dict(pretrained.weights)
    idx = torch.tensor([tokens * 10])[:, :256]
    found, expected = model(idx).logits, gpt(idx)[0]
    assert expected.std() > 0.5  # logits near zero would be equal within the tolerance
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)

    prompt = tokenizer("anna ñ", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, do_sample=False, max_length=6 + 200)[0])
    assert len(set(text)) > 5
    options = ("--prompt", "anna ñ", "--max_new_tokens", "200", "--temperature", "0")
    done = run_program("sample.py", "--snapshot", str(trained), *options)
    assert (done.stdout, done.stderr) == (text, "")
    torch.manual_seed(1)
    assert len(tokenizer.decode(model.generate(**tokenizer("a", return_tensors="pt"))[0])) == 256


# trainer.init_from


ADOPTED: dict[str, Any] = {"model__architecture": "nanochat", "model__bias": True, "data__block_size": 64}


def options_from(source: Path) -> dict[str, Any]:
    """Returns options of a run that starts from weights, with defaults for keys that differ from SMALL_CONFIG."""
    return {"trainer__init_from": source} | ADOPTED


def test_a_run_starts_from_a_snapshot_and_new_characters_get_new_embeddings(trained: Path, tmp_path: Path) -> None:
    pretrained, per_character = load(trained), ("transformer.wte.weight", "lm_head.weight")
    text = write_text(tmp_path / "other.txt")
    text.write_text(text.read_text().replace("bob", "Zoë"), encoding="utf-8")
    for world_size, source in ((1, trained / "snapshots/step_00000006.pt"), (2, trained), (1, trained / "snapshots")):
        changes = {"trainer__max_steps": 1, "optimizer__learning_rate": 1e-30} | options_from(source)
        argv = run_args(tmp_path / source.name, text, **changes)
        assert run_ranks(world_size, train_main, *argv, tmp_path=tmp_path) == [0] * world_size
        snapshot = newest_snapshot(tmp_path / source.name)
        vocabulary = snapshot["vocabulary"]
        assert (snapshot["step"], snapshot["samples"]) == (1, 7)
        assert vocabulary == "".join(sorted({*pretrained.vocabulary, *"Zoë"}))
        for name, weight in pretrained.weights.items():
            found = snapshot["model"][name]
            if name not in per_character:
                assert torch.allclose(found, weight, rtol=1e-6, atol=0), name
                continue
            rows = dict(zip(vocabulary, found, strict=True))
            for character, row in zip(pretrained.vocabulary, weight, strict=True):
                assert torch.allclose(rows.pop(character), row, rtol=1e-6, atol=0), (name, character)
            assert rows.keys() == {*"Zë"}
            assert all(0 < row.std() < 0.05 for row in rows.values())


@pytest.mark.parametrize("trained", [("nanochat", True)], indirect=True, ids=["nanochat"])
def test_a_run_that_started_from_weights_resumes_without_them(trained: Path, tmp_path: Path) -> None:
    """The weights determine block_size, and add characters to the vocabulary."""
    text, source = write_text(tmp_path / "other.txt"), shutil.copytree(trained, tmp_path / "source")
    text.write_text(text.read_text().replace("bob", "anna"))
    changes = {"trainer__max_steps": 6} | options_from(source)
    whole, parts = (run_args(tmp_path / name, text, **changes) for name in ("whole", "parts"))
    assert run_ranks(1, train_main, *whole, tmp_path=tmp_path) == [0]
    first = [*parts, "--trainer.max_steps", "3", "--optimizer.decay_steps", "6"]
    assert run_ranks(1, train_main, *first, tmp_path=tmp_path) == [0]
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "parts/cache")
    assert run_ranks(1, train_main, *parts, tmp_path=tmp_path) == [0]
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "parts")
    assert [row["step"] for row in read_rows(tmp_path / "parts", "start")] == [0, 3]


@pytest.mark.parametrize("trained", [("nanochat", True)], indirect=True, ids=["nanochat"])
def test_a_run_from_scratch_does_not_use_other_weights_when_it_resumes(trained: Path, tmp_path: Path) -> None:
    """A message says so, and the snapshots do not name the other weights."""
    shutil.copytree(trained, tmp_path / "run")
    argv = run_args(tmp_path / "run", trained.parent / "text.txt", trainer__max_steps=7, **options_from(trained))
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0, err
    assert "warning: trainer.init_from is not used, since the run continues from" in err
    assert "changed since the snapshot: trainer.max_steps 6 -> 7\n" in out
    assert newest_snapshot(tmp_path / "run")["config"]["trainer"]["init_from"] is None


@pytest.mark.parametrize("trained", [("nanochat", True)], indirect=True, ids=["nanochat"])
def test_a_start_from_other_weights_is_refused_in_one_message(trained: Path, exported: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", write_text(tmp_path / "text.txt"), **options_from(trained))
    cases = [
        ("trainer.init_from", f"{tmp_path}/nowhere", f": no snapshot at {tmp_path}/nowhere"),
        ("trainer.init_from", str(exported), f": no snapshot at {exported}"),
        ("trainer.init_from", str(exported / "config.json"), f": {exported}/config.json is damaged: "),
        ("model.n_layer", "3", f" is 3, but 2 in trainer.init_from, {trained}: set it to 2"),
        ("data.block_size", "32", " is 32, but 256 in trainer.init_from"),
    ]
    commands = [[*argv, f"--{key}", value] for key, value, _ in cases]
    [results] = run_ranks(1, run_each_captured, commands, tmp_path=tmp_path)
    for (status, _, err), (key, _, message) in zip(results, cases, strict=True):
        assert (status, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"error: {key}{message}")
    assert not list((tmp_path / "run").glob("snapshots/step_*"))


# Mistakes in the options of export.py


def test_a_refused_export_is_one_message_and_writes_nothing(
    trained: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "full").mkdir()
    for file in ("file", "full/file"):
        (tmp_path / file).write_text("notes")
    snapshot, convolutions = load(trained).snapshot, trained.with_name("convolutions.pt")
    snapshot["config"]["model"]["conv_kernel_size"] = 4
    torch.save(snapshot, convolutions)
    for snapshot, out, message in (
        (trained, "full", f"--out: {tmp_path}/full is not an empty folder"),
        (trained, "file", f"--out: {tmp_path}/file is not an empty folder"),
        (trained, "file/below", f"--out: {tmp_path}/file/below can't be written"),
        (tmp_path / "none", "new", f"--snapshot: no snapshot at {tmp_path}/none"),
        (exported, "new", f"--snapshot: no snapshot at {exported}"),
        (convolutions, "new", f"--snapshot: {convolutions} has model.conv_kernel_size 4, must be null: "),
    ):
        monkeypatch.setattr(sys, "argv", ["export.py", "--snapshot", str(snapshot), "--out", str(tmp_path / out)])
        assert exit_status_of(run, sys.argv[1:]) == 2
        stdout, stderr = capsys.readouterr()
        assert (stdout, len(stderr.splitlines())) == ("", 1)
        assert stderr.startswith(f"error: {message}")
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"file", "full", "full/file"}
