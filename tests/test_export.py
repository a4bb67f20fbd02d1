"""Elsewhere and back: what transformers opens, writes and gives back, and runs that start from it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_equal_snapshots,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_program,
    run_ranks,
    train_main,
    write_text,
)

from export import export, run
from mingpt.config_parser import read_config
from mingpt.snapshot.pretrained import Pretrained, load_pretrained
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from mingpt.utils.progress import run_script
from model import GPT

CHARACTERS = 'figs ñandú—🙂"\\\t'


@pytest.fixture(
    scope="module", params=[pytest.param(True, id="bias"), pytest.param(False, id="no bias", marks=pytest.mark.slow)]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps, with and without biases, of which the newest has weights with strong opinions."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text().replace("figs", CHARACTERS), encoding="utf-8")
    argv = run_args(folder / "run", text, trainer__max_steps=6, data__block_size=256, model__bias=request.param)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    snapshots = SnapshotStorage(str(folder / "run/snapshots"), keep=9)
    snapshot = load_snapshot(snapshots.file(6))
    torch.manual_seed(0)
    snapshot["model"] = {name: weight + 0.5 * torch.randn_like(weight) for name, weight in snapshot["model"].items()}
    snapshots.write(snapshot, None)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """The same as a folder for transformers."""
    out = trained.parent / "exported"
    done = run_program("export.py", "--snapshot", str(trained), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(out) in done.stdout
    return out


def quietly(path: Path) -> Pretrained:
    return load_pretrained(str(path), "--snapshot", pytest.fail)


def test_what_comes_back_is_what_went_out(trained: Path, exported: Path) -> None:
    went, back = quietly(trained), quietly(exported)
    assert (went.shape, went.vocabulary) == (back.shape, back.vocabulary)
    assert went.weights.keys() == back.weights.keys()
    assert all(torch.equal(weight, back.weights[name]) for name, weight in went.weights.items())


@pytest.mark.slow
def test_sample_writes_the_same_from_an_export(trained: Path, exported: Path) -> None:
    knobs = ("--prompt", "anna ñ", "--max_new_tokens", "300", "--temperature", "0")
    one, other = (run_program("sample.py", "--snapshot", str(place), *knobs) for place in (trained, exported))
    assert (one.returncode, one.stderr) == (0, "")
    assert other.stdout == one.stdout


def test_the_model_card_tells_text_loss_and_command(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    card, snapshot = (exported / "README.md").read_text(), load_snapshot(str(trained / "snapshots/step_00000006.pt"))
    assert snapshot["text_sha256"] in card
    assert f"{snapshot['val_loss']:.4f} nats" in card
    [line] = [line for line in card.splitlines() if line.startswith("Trained by `python main.py ")]
    words = shlex.split(line.removeprefix("Trained by `python main.py ").removesuffix("`."))
    with pytest.raises(SystemExit, match="0"):
        read_config([*words, "--trainer.run_dir", f"{tmp_path}/again", "--print_config"])
    again = capsys.readouterr().out
    assert again.replace(f"{tmp_path}/again", str(trained)) == (trained / "config.yaml").read_text()


@pytest.mark.slow
def test_transformers_opens_it_with_the_same_logits_and_the_same_greedy_text(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    mine = quietly(trained)
    words = f"anna {CHARACTERS}\n\n  bob"
    tokens = tokenizer(words)["input_ids"]
    assert tokens == [mine.vocabulary.index(character) for character in words]
    assert tokenizer.decode(tokens) == words
    with pytest.raises(Exception, match="UNK"):  # tokenizers raises nothing narrower
        tokenizer("anna€")

    idx = torch.tensor([tokens * 10])[:, :256]
    theirs, ours = model(idx).logits, mine.model().eval()(idx)[0]
    assert ours.std() > 0.5  # else the same would say little
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-5)

    prompt = tokenizer("anna ñ", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, do_sample=False, max_length=6 + 200)[0])
    knobs = ("--prompt", "anna ñ", "--max_new_tokens", "200", "--temperature", "0")
    assert text == run_program("sample.py", "--snapshot", str(trained), *knobs).stdout
    assert len(set(text)) > 5
    torch.manual_seed(1)
    assert len(tokenizer.decode(model.generate(**tokenizer("a", return_tensors="pt"))[0])) == 256

    model.save_pretrained(tmp_path / "saved")  # as after fine-tuning there
    tokenizer.save_pretrained(tmp_path / "saved")
    back = quietly(tmp_path / "saved")
    assert all(torch.equal(weight, back.weights[name]) for name, weight in mine.weights.items())


# Starting from weights


def started(run: Path, source: Path, text: Path, tmp_path: Path, number: int = 1, **changes: Any) -> dict[str, Any]:
    """The snapshot of a run that starts from `source`, after a step whose learning rate is 0."""
    knobs = {"trainer__max_steps": 1, "optimizer__learning_rate": 1e-30, "data__block_size": 256} | changes
    argv = run_args(run, text, trainer__init_from=source, **knobs)
    assert run_ranks(number, train_main, *argv, tmp_path=tmp_path) == [0] * number
    return newest_snapshot(run)


def test_a_run_starts_from_an_export_or_a_snapshot_with_a_fresh_optimizer(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    old = quietly(trained)
    text = trained.parent / "text.txt"
    for name, source, number in (("one", exported, 1), ("two", trained, 2)):
        bias = {"model__bias": old.shape.bias}
        snapshot = started(tmp_path / name, source, text, tmp_path, number, **bias)
        assert (snapshot["step"], snapshot["samples"], snapshot["vocabulary"]) == (1, 7, old.vocabulary)
        for key, weight in old.weights.items():
            assert torch.allclose(snapshot["model"][key], weight, rtol=1e-6, atol=0), key
    assert not torch.equal(old.weights["transformer.wte.weight"], GPT(old.shape).transformer.wte.weight)


def test_new_characters_get_new_rows_and_old_ones_stay(exported: Path, tmp_path: Path) -> None:
    old = quietly(exported)
    text = write_text(tmp_path / "other.txt")
    text.write_text(text.read_text().replace("bob", "Zoë"), encoding="utf-8")
    snapshot = started(tmp_path / "run", exported, text, tmp_path, model__bias=old.shape.bias)
    vocabulary = snapshot["vocabulary"]
    assert vocabulary == "".join(sorted({*old.vocabulary, *"Zoë"}))
    rows_now, rows_then = snapshot["model"]["transformer.wte.weight"], old.weights["transformer.wte.weight"]
    assert len(rows_now) == len(vocabulary)
    for token, character in enumerate(vocabulary):
        if character in old.vocabulary:
            then = rows_then[old.vocabulary.index(character)]
            assert torch.allclose(rows_now[token], then, rtol=1e-6, atol=0), character
        else:
            assert 0 < rows_now[token].std() < 0.05


def test_such_a_run_goes_on_from_its_own_snapshot_without_what_it_started_from(exported: Path, tmp_path: Path) -> None:
    text, source = write_text(tmp_path / "other.txt"), shutil.copytree(exported, tmp_path / "source")
    knobs = {"trainer__init_from": source, "data__block_size": 256, "model__bias": quietly(exported).shape.bias}
    whole, parts = (run_args(tmp_path / name, text, **knobs) for name in ("whole", "parts"))
    assert run_ranks(1, train_main, *whole, tmp_path=tmp_path) == [0]
    first = [*parts, "--trainer.max_steps", "6", "--optimizer.decay_steps", "12"]
    assert run_ranks(1, train_main, *first, tmp_path=tmp_path) == [0]
    shutil.rmtree(source)
    assert run_ranks(1, train_main, *parts, tmp_path=tmp_path) == [0]
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "parts")
    assert [row["step"] for row in read_rows(tmp_path / "parts", "start")] == [0, 6]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.init_from", "{tmp}/nowhere", ["trainer.init_from", "{tmp}/nowhere", "no snapshot"]),
        ("trainer.init_from", "{tmp}/broken", ["trainer.init_from", "{tmp}/broken", "n_embd", "export it again"]),
        ("model.n_layer", "3", ["model.n_layer is 3, but 2", "set model.n_layer to 2"]),
        ("data.block_size", "64", ["data.block_size is 64, but 256", "set data.block_size to 256"]),
    ],
)
def test_what_cannot_be_started_from_is_said_in_one_message(
    key: str, value: str, said: list[str], exported: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    del config["n_embd"]
    (broken / "config.json").write_text(json.dumps(config))
    knobs = {"trainer__init_from": exported, "data__block_size": 256, "model__bias": quietly(exported).shape.bias}
    argv = run_args(tmp_path / "run", write_text(tmp_path / "text.txt"), **knobs)
    argv += [f"--{key}", value.replace("{tmp}", str(tmp_path))]
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    [line] = err.splitlines()
    for words in said:
        assert words.replace("{tmp}", str(tmp_path)) in line
    assert not list((tmp_path / "run").glob("snapshots/*"))


# Bad input of export.py


@pytest.mark.parametrize(
    ("snapshot", "out", "said"),
    [
        ("{run}", "{tmp}/full", ["--out", "{tmp}/full", "not an empty folder"]),
        ("{run}", "{tmp}/file", ["--out", "{tmp}/file", "not an empty folder"]),
        ("{run}", "{tmp}/file/below", ["--out", "{tmp}/file/below", "can't be written"]),
        ("{tmp}/none", "{tmp}/new", ["--snapshot", "{tmp}/none", "no snapshot"]),
        ("{export}", "{tmp}/new", ["--snapshot", "{export}", "an export already"]),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_written(
    snapshot: str,
    out: str,
    said: list[str],
    trained: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    places = {"{run}": str(trained), "{tmp}": str(tmp_path), "{export}": str(exported)}

    def placed(words: str) -> str:
        for name, place in places.items():
            words = words.replace(name, place)
        return words

    monkeypatch.setattr(sys, "argv", ["export.py", "--snapshot", placed(snapshot), "--out", placed(out)])
    assert run_script(run) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    for words in said:
        assert placed(words) in line
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["mine"]


def test_a_folder_to_write_must_be_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        run([])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--out" in printed.err.splitlines()[-1]


def test_an_export_that_fails_leaves_nothing(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("export.os.replace", full)
    with pytest.raises(Exception, match="No space left"):
        export(quietly(trained), "run", tmp_path / "out")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    export(quietly(trained), "run", tmp_path / "out")  # an empty folder will do
    assert len(os.listdir(tmp_path / "out")) == 6
