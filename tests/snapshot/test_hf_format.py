"""Weights of transformers begin a run and are sampled without transformers, and go back to it unchanged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import export
import sample
from mingpt.errors import UserError
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot.load import load_pretrained
from tests.helpers import ROOT, run_args, run_each_captured, run_ranks, train_run, write_text
from tests.inside import assert_one_message, byte_pair_tokenizer, hub_form, newest_snapshot, prepare_text

SIZES = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
ADOPTED: dict[str, Any] = {"model__n_layer": ..., "model__n_head": ..., "model__n_embd": ...}  # keys of the weights


def build(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model("gpt2", **{"vocab_size": 300, **SIZES, **changes})
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms, too
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer = byte_pair_tokenizer((ROOT / "README.md").read_text(), 300)
    (folder / "tokenizer.json").write_text(hub_form(tokenizer), encoding="utf-8")
    return folder


def logits(path: Path | str, idx: Tensor) -> Tensor:
    with torch.inference_mode():
        return load_pretrained(str(path), "--snapshot").build_model().eval()(idx)[0]


def test_logits_are_equal_here_and_after_a_run_and_its_export(tmp_path: Path) -> None:
    model = build()
    import transformers

    text = write_text(tmp_path / "text.txt")
    folder = save(model, tmp_path / "theirs", max_shard_size="10KB")  # in several files
    assert len(list(folder.glob("*.safetensors"))) > 1
    idx = torch.randint(300, (3, 32))
    with torch.inference_mode():
        expected = model(idx).logits
    assert expected.std() > 0.3
    assert torch.allclose(logits(folder, idx), expected, rtol=0, atol=1e-5)

    prepare_text(text, tmp_path / "tokens", str(folder / "tokenizer.json"))
    options = {"trainer__init_from": folder, "trainer__max_steps": 2, "data__block_size": ..., **ADOPTED}
    train_run(tmp_path / "run", tmp_path / "tokens", 2, **options)
    assert exit_status_of(export.run, ["--snapshot", str(tmp_path / "run"), "--out", str(tmp_path / "ours")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        exported = theirs(idx).logits
    tuned = logits(tmp_path / "run", idx)
    assert not torch.allclose(tuned, expected, atol=1e-3)  # it has been trained
    assert torch.allclose(exported, tuned, rtol=0, atol=1e-5)
    assert torch.allclose(logits(tmp_path / "ours", idx), tuned, rtol=0, atol=1e-6)
    content = json.loads((tmp_path / "ours/tokenizer.json").read_text())
    assert content == json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    generated = theirs.generate(idx[:1, :4], max_new_tokens=9, sequence_bias={(0,): 1e4})
    assert generated[0, 4:].tolist() == [0]  # which ends the text
    assert tokenizer("anna ñ")["input_ids"] == load_pretrained(str(folder), "").tokenizer.encode("anna ñ", "").tolist()


def test_the_validation_loss_is_the_one_of_transformers(tmp_path: Path) -> None:
    """With nanoGPT's files, and windows of a shorter context than the weights'."""
    model = build()
    text = write_text(tmp_path / "text.txt")
    folder = save(model, tmp_path / "theirs")
    prepare_text(text, tmp_path / "tokens", str(folder / "tokenizer.json"))
    (tmp_path / "tokens/meta.json").unlink()
    options = {"trainer__init_from": folder, "trainer__max_steps": 1, "optimizer__learning_rate": 1e-30, **ADOPTED}
    train_run(tmp_path / "run", tmp_path / "tokens", **options)
    tokens = torch.frombuffer(bytearray((tmp_path / "tokens/val.bin").read_bytes()), dtype=torch.uint16).long()
    losses = []
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        with torch.inference_mode():
            found = model(window[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(found, window[1:], reduction="none"))
    assert newest_snapshot(tmp_path / "run")["val_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)


def test_openais_file_has_masks_and_no_prefix(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = build()
    folder = save(model, tmp_path / "theirs")
    weights = {name.removeprefix("transformer."): weight.clone() for name, weight in model.state_dict().items()}
    del weights["lm_head.weight"]
    for block in range(2):
        weights[f"h.{block}.attn.bias"] = torch.ones(32, 32).tril()[None, None]
        weights[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    halves = {name: weight.bfloat16() for name, weight in weights.items() if "mlp" in name}
    safetensors.save_file(weights | halves, folder / "model.safetensors")
    idx = torch.randint(300, (3, 32))
    model.transformer.load_state_dict({name: weight.float() for name, weight in halves.items()}, strict=False)
    with torch.inference_mode():
        assert torch.allclose(logits(folder, idx), model(idx).logits, rtol=0, atol=1e-5)


def test_a_folder_is_sampled_and_not_exported_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = save(build(), tmp_path / "theirs")
    assert exit_status_of(sample.run, ["--snapshot", str(folder), "--max_new_tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("<|endoftext|>")
    assert exit_status_of(export.run, ["--snapshot", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "is a folder of transformers already" in capsys.readouterr().err


def test_other_tokens_than_those_of_the_weights_are_refused(tmp_path: Path) -> None:
    """Characters in a folder do not begin with the weights of byte pairs, and a token needs a row of the embedding."""
    folder = save(build(), tmp_path / "theirs")
    prepare_text(write_text(tmp_path / "text.txt"), tmp_path / "tokens", "char")
    small = save(build(vocab_size=290), tmp_path / "small")
    argvs = [
        run_args(tmp_path / "run", path, trainer__init_from=weights, data__block_size=..., **ADOPTED)
        for weights, path in ((folder, tmp_path / "tokens"), (small, tmp_path / "text.txt"))
    ]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    messages = (
        f"data.path: {tmp_path}/tokens has the tokens of another tokenizer than this run or trainer.init_from",
        "tokenizer.json has 300 tokens, but the embedding has 290 rows",
    )
    for (status, _, err), message in zip(results, messages, strict=True):
        assert status == 2
        assert_one_message(err, message)


CASES = [
    ({"activation_function": "relu"}, 'activation_function "relu", must be "gelu_new" or'),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true, must be false"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06, must be 1e-05"),
    ({"scale_attn_weights": False}, "scale_attn_weights false, must be true"),
    ({"n_inner": 32}, "n_inner 32, must be null or 64"),
    ({"model_type": "llama"}, 'model_type "llama", must be "gpt2"'),
    ({"n_head": None}, "can't be read: KeyError: 'n_head'"),
    ({"n_layer": 3}, "the weights are not those of the model in model.py: new in the model: transformer.h"),
    ({"n_layer": 1}, "the weights are not those of the model in model.py: missing in the model: transformer.h"),
]


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_what_model_py_lacks_is_one_message(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if (key, value) != ("n_head", None)}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        load_pretrained(str(folder), "--snapshot").build_model()
    assert message in str(refused.value)
    assert str(refused.value).startswith("--snapshot: ")


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "theirs")
    for name in ("tokenizer.json", "model.safetensors"):
        partial = shutil.copytree(folder, tmp_path / name)
        (partial / name).unlink()
        with pytest.raises(UserError, match=f"^--snapshot: {partial} has no model.safetensors or no tokenizer.json"):
            load_pretrained(str(partial), "--snapshot")
