import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import export
import sample
from export import model_card
from mingpt.config.parser import read_config
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot.load import load_pretrained
from model import GPT
from tests.faults.runs import assert_same_run
from tests.helpers import read_rows, run_args, run_each_captured, run_on, run_ranks, train_run, write_text
from tests.inside import newest_snapshot

SNAPSHOT = "snapshots/step_00000006.pt"
CHARACTERS = 'figs ñandú—🙂"\\\t'
with_bias = pytest.mark.parametrize("trained", [True], indirect=True)


@pytest.fixture(scope="module", params=[True, pytest.param(False, id="without bias", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps, with noise in the newest weights, so that outputs differ clearly."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text().replace("figs", CHARACTERS), encoding="utf-8")
    changes = {"model__bias": request.param, "data__block_size": 256}
    train_run(folder / "run", text, trainer__max_steps=6, **changes)
    snapshot = torch.load(folder / "run" / SNAPSHOT, weights_only=True)
    torch.manual_seed(3)  # with some seeds the greedy text repeats one character
    snapshot["model"] = {name: weight + 0.5 * torch.randn_like(weight) for name, weight in snapshot["model"].items()}
    torch.save(snapshot, folder / "run" / SNAPSHOT)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed")
    out = trained.parent / "exported"
    (trained.parent / "empty").mkdir()
    out.symlink_to("empty")
    assert exit_status_of(export.run, ["--snapshot", str(trained), "--out", str(out)]) == 0
    return out


def test_the_model_card_has_text_loss_and_command_without_password_and_home_directory(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, snapshot = (exported / "README.md").read_text(), newest_snapshot(trained)
    assert snapshot["text_sha256"] in card
    assert f"{snapshot['val_loss']:.4f} nats" in card
    assert "A GPT-2: 2 layers" in card
    command = card.partition("Trained by\n\n```\npython main.py ")[2].partition("\n```\n")[0]
    options = shlex.split(command)
    with pytest.raises(SystemExit, match="0"):
        read_config([*options, "--trainer.run_dir", f"{tmp_path}/again", "--print_config"])
    config = capsys.readouterr().out
    assert config.replace(f"{tmp_path}/again", str(trained)) == (trained / "config.yaml").read_text()

    pretrained = load_pretrained(str(trained), "--snapshot")
    pretrained.snapshot["config"]["data"]["path"] = "http://user:secret@host/@text.txt"
    assert "--data.path=http://host/@text.txt" in model_card(pretrained, "name")
    monkeypatch.setenv("HOME", str(trained.parent))
    assert f"--trainer.run_dir=~/{trained.name}" in model_card(pretrained, "name")


def test_transformers_has_the_same_tokens_logits_and_greedy_text(
    trained: Path, exported: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    pretrained = load_pretrained(str(trained), "--snapshot")
    text = f"anna {CHARACTERS}\n\n  bob"
    tokens = tokenizer(text)["input_ids"]
    assert tokens == [pretrained.tokenizer.vocabulary.index(character) for character in text]
    assert tokenizer.decode(tokens) == text

    assert model.generation_config.top_k == 0  # all tokens; transformers' default is 50

    gpt = GPT(pretrained.model_config).eval()
    gpt.load_state_dict(pretrained.weights)
    idx = torch.tensor([tokens * 10])[:, :256]
    found, expected = model(idx).logits, gpt(idx)[0]
    assert expected.std() > 0.5  # logits near zero would be equal within the tolerance
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)

    transformers.logging.enable_propagation()
    prompt = tokenizer("anna ñ", return_tensors="pt")
    [greedy] = tokenizer.batch_decode(model.generate(**prompt, do_sample=False, max_new_tokens=200))
    assert len(set(greedy)) > 5
    options = ("--prompt", "anna ñ", "--max_new_tokens", "200", "--temperature", "0")
    capfd.readouterr()
    assert exit_status_of(sample.run, ["--snapshot", str(trained), *options]) == 0
    assert capfd.readouterr() == (greedy, "")

    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    batch = tokenizer(["bob anna ñ", "anna ñ"], return_tensors="pt", padding=True, padding_side="left")
    texts = tokenizer.batch_decode(model.generate(**batch, do_sample=False, max_new_tokens=50))
    assert texts[1][4:] == greedy[:56]
    assert caplog.text == ""


def test_transformers_4_finds_the_class_of_the_tokenizer_and_only_the_inputs_of_the_model(exported: Path) -> None:
    """Without its list of inputs, transformers 4 adds token_type_ids, which change GPT-2's logits."""
    import transformers

    config = json.loads((exported / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert list(tokenizer("anna", return_tensors="pt")) == ["input_ids", "attention_mask"]
    config = json.loads((exported / "config.json").read_text())
    assert config["n_ctx"] == 256  # for llama.cpp


def window_of_64(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    distance = torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 64))


@with_bias
def test_a_refused_export_is_one_message_and_writes_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    out = tmp_path / "out"
    (out / "full").mkdir(parents=True)
    for file in ("file", "full/file"):
        (out / file).write_text("notes")

    def refused(snapshot: Path, name: str, message: str) -> None:
        assert exit_status_of(export.run, ["--snapshot", str(snapshot), "--out", str(out / name)]) == 2
        stdout, stderr = capsys.readouterr()
        assert (stdout, len(stderr.splitlines())) == ("", 1)
        assert stderr.startswith(f"error: {message}")
        assert {str(path.relative_to(out)) for path in out.rglob("*")} == {"file", "full", "full/file"}

    refused(trained, "full", f"--out: {out}/full is not an empty folder")
    refused(trained, "file", f"--out: {out}/file is not an empty folder")
    refused(trained, "file/below", f"--out: {out}/file/below can't be written")
    snapshot = torch.load(trained / SNAPSHOT, weights_only=True)
    snapshot["model"]["transformer.h.0.conv_1.weight"] = torch.ones(16, 1, 4)
    torch.save(snapshot, tmp_path / "convolutions.pt")
    refused(
        tmp_path / "convolutions.pt", "new", "--snapshot: the GPT2LMHeadModel of transformers has other weights: Error"
    )
    differ = "--snapshot: the logits of the GPT2LMHeadModel of transformers differ from this program's by "
    # The window is longer than there are characters.
    with monkeypatch.context() as changed_code:
        changed_code.setattr("model.attention", window_of_64)
        refused(trained, "new", differ)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "mingpt.snapshot.hf_export")
    refused(trained, "new", "export.py needs transformers 5 (")


def args_from(source: Path, run_dir: Path, text: Path, **changes: Any) -> list[str]:
    """Returns the command line of a run that starts from weights, whose block_size it adopts."""
    return run_args(run_dir, text, trainer__init_from=source, data__block_size=..., **changes)


def test_a_run_starts_from_a_snapshot_and_new_characters_get_new_embeddings(trained: Path, tmp_path: Path) -> None:
    pretrained, per_character = load_pretrained(str(trained), "--snapshot"), "transformer.wte.weight"
    text = write_text(tmp_path / "other.txt")
    text.write_text(text.read_text().replace("bob", "Zoë"), encoding="utf-8")
    changes = {"trainer__max_steps": 1, "optimizer__learning_rate": 1e-30}
    file, folder, run = sources = (trained / SNAPSHOT, trained / "snapshots", trained)
    for world_size, given in ((1, (file, folder)), (2, (run,))):
        argvs = [args_from(source, tmp_path / source.name, text, **changes) for source in given]
        run_on("cpu", world_size, argvs, tmp_path)
    for source in sources:
        snapshot = newest_snapshot(tmp_path / source.name)
        vocabulary = snapshot["vocabulary"]
        assert (snapshot["step"], snapshot["samples"]) == (1, 7)
        assert vocabulary == "".join(sorted({*pretrained.tokenizer.vocabulary, *"Zoë"}))
        known = [vocabulary.index(character) for character in pretrained.tokenizer.vocabulary]
        for name, weight in pretrained.weights.items():
            found = snapshot["model"][name]
            rows = known if name == per_character else slice(None)
            assert torch.allclose(found[rows], weight, rtol=1e-6, atol=0), name
            if name == per_character:
                assert all(0 < found[vocabulary.index(character)].std() < 0.05 for character in "Zë")


@with_bias
def test_a_run_that_started_from_weights_resumes_without_them(trained: Path, tmp_path: Path) -> None:
    """The weights determine block_size, and add characters to the vocabulary."""
    text, source = write_text(tmp_path / "other.txt"), shutil.copytree(trained, tmp_path / "source")
    text.write_text(text.read_text().replace("bob", "anna"))
    whole, parts = (args_from(source, tmp_path / name, text, trainer__max_steps=6) for name in ("whole", "parts"))
    run_on("cpu", 1, [whole, [*parts, "--trainer.max_steps", "3", "--optimizer.decay_steps", "6"]], tmp_path)
    shutil.rmtree(source)
    argvs = [[*parts, "--data.block_size", "64"], parts]
    [[(refused, _, err), (resumed, _, _)]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert (refused, len(err.splitlines()), resumed) == (2, 1, 0)
    assert err.startswith("error: data.block_size is 64, but 256 in the snapshot of step 3 in the run folder; set it ")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert [row["step"] for row in read_rows(tmp_path / "parts", "start")] == [0, 3]


@with_bias
def test_weights_of_another_shape_are_refused_and_a_run_that_continues_uses_none(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    argv = args_from(trained, tmp_path / "run", write_text(tmp_path / "text.txt"))
    snapshot = newest_snapshot(trained)
    weights = {f"other.{name}": weight for name, weight in snapshot["model"].items()}
    torch.save(snapshot | {"model": weights}, tmp_path / "other.pt")
    cases = [
        ("trainer.init_from", f"{tmp_path}/nowhere", f": {tmp_path}/nowhere can't be loaded: [Errno 2]"),
        ("trainer.init_from", f"{exported}/config.json", f": {exported}/config.json can't be loaded: cut short, or "),
        ("trainer.init_from", f"{tmp_path}/other.pt", f": no weights of {tmp_path}/other.pt fit the model: new in "),
        ("model.n_layer", "3", f" is 3, but 2 in trainer.init_from, {trained}; set it to 2"),
        ("data.block_size", "512", " is 512, but 256 in trainer.init_from"),
    ]
    commands = [[*argv, f"--{key}", value] for key, value, _ in cases]
    results, others = run_ranks(2, run_each_captured, commands, tmp_path=tmp_path)
    assert others == [(2, "", "")] * len(cases)
    for (refused, _, err), (key, _, message) in zip(results, cases, strict=True):
        assert (refused, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"error: {key}{message}")
    assert not list((tmp_path / "run").glob("snapshots/step_*"))

    from_scratch = shutil.copytree(trained, tmp_path / "from scratch")
    continued = args_from(trained, from_scratch, trained.parent / "text.txt", trainer__max_steps=7)
    [out] = run_on("cpu", 1, [continued], tmp_path)
    assert "changed since the snapshot: trainer.max_steps 6 -> 7\n" in out
    assert newest_snapshot(from_scratch)["config"]["trainer"]["init_from"] is None
