"""Ordinary changes of model and data train with the same losses with every strategy, and are saved and resumed."""

import json
import math
import os
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from char_dataset import CharDataset, ValidationDataset
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.optim import optimizer
from mingpt.parallel.strategy import Strategy
from mingpt.program import run_program
from mingpt.snapshot.load import EMBEDDINGS, load_pretrained
from model import GPT, MLP, Block, CausalSelfAttention
from tests.faults.runs import assert_same_run
from tests.helpers import NO_DROPOUT, loss_curve, read_rows, run_args, run_ranks, train_main, write_text
from tests.inside import assert_one_message, call_before, max_relative_error, newest_snapshot, open_trainer
from tests.parallel.runs import Options, change_buffers, count_one_token_only, freeze, run_changed, with_stages


def _after(cls: type[nn.Module], function: Callable[[Any], None]) -> None:
    """Calls a function at the end of a class's constructor."""
    init: Any = cls.__init__

    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        function(self)

    cls.__init__ = changed  # type: ignore[method-assign]


def share_block() -> None:
    """As ALBERT does."""

    def share(model: Any) -> None:
        model.transformer["h"] = nn.ModuleDict({str(number): model.blocks[0] for number in model.blocks})

    _after(GPT, share)


def register_buffers() -> None:
    """A mask, as in nanoGPT, and a buffer that snapshots do not contain, with values that only the CPU can make."""
    forward = CausalSelfAttention.forward
    embed = GPT.embed

    def register_mask(attention: Any) -> None:
        attention.register_buffer("mask", torch.arange(32).remainder(2).add(0.5))

    def masked(self: Any, x: Tensor, *args: Any) -> Tensor:
        return forward(self, x * self.mask[: x.size(1), None], *args)

    def register_scale(model: Any) -> None:
        values = [value.item() for value in torch.linspace(0.5, 1.5, 16)]
        model.register_buffer("scale", torch.tensor(values), persistent=False)

    def scaled(self: Any, *args: Any) -> Tensor:
        return embed(self, *args) * self.scale

    _after(CausalSelfAttention, register_mask)
    CausalSelfAttention.forward = masked  # type: ignore[method-assign]
    _after(GPT, register_scale)
    GPT.embed = scaled  # type: ignore[method-assign]


def add_second_head() -> None:
    """It is trained only if there are targets."""
    forward = GPT.forward

    def add(model: Any) -> None:
        model.second_head = nn.Linear(16, 13, bias=False)

    def with_head(self: Any, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = forward(self, idx, targets)
        if targets is not None:
            loss = loss + self.loss(self.second_head(self.embed(idx)), targets)
        return logits, loss

    _after(GPT, add)
    GPT.forward = with_head  # type: ignore[method-assign]


def use_random_numbers() -> None:
    """Random windows as in nanoGPT's get_batch, random targets that do not count, and random tokens."""

    def read(self: CharDataset, samples: Any) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.tokens) - self.block_size, (len(samples), 1))
        positions = starts + torch.arange(self.block_size + 1)
        text = torch.from_numpy(self.tokens[positions.numpy()].astype(np.int64))
        is_target = torch.from_numpy(np.random.rand(len(samples), self.block_size) < 0.7)
        idx = text[:, :-1].clone()
        idx[:, random.randrange(self.block_size)] = random.randrange(13)
        return idx, text[:, 1:].masked_fill(~is_target, IGNORE_INDEX)

    CharDataset.__getitem__ = read  # type: ignore[method-assign]


def mask_validation() -> None:
    read = ValidationDataset.batch

    def masked(self: ValidationDataset, windows: Any) -> tuple[Tensor, Tensor]:
        idx, targets = read(self, windows)
        return idx, targets.masked_fill(torch.rand(targets.shape) < 0.5, IGNORE_INDEX)

    ValidationDataset.batch = masked  # type: ignore[method-assign]


def add_parameters() -> None:
    """A scale, a mixture of channels, LoRA, ReZero's scalar and a gate. Their values are part of the constructor.

    Parameters without weight decay have an attribute, as in Mamba and timm.
    """
    forward = Block.forward

    def add(block: Any) -> None:
        block.scale = nn.Parameter(torch.ones(4, 4))
        block.mix = nn.Parameter(torch.eye(16))
        block.lora_a = nn.Parameter(torch.randn(2, 16))
        block.lora_b = nn.Parameter(torch.zeros(16, 2))
        block.alpha = nn.Parameter(torch.tensor([1.0]))
        block.gate_bias = nn.Parameter(torch.ones(1))
        block.zero = nn.Linear(16, 16)
        nn.init.zeros_(block.zero.weight)
        block.zero.weight.no_weight_decay = True

    def check_marks(model: Any, config: Any) -> None:
        assert sum(hasattr(parameter, "no_weight_decay") for parameter in model.parameters()) == len(model.blocks)

    def with_parameters(self: Any, x: Tensor, *args: Any) -> Tensor:
        y = self.alpha * forward(self, x, *args) * self.scale.flatten()
        return x + self.gate_bias * (y @ self.mix + y @ self.lora_a.T @ self.lora_b.T) + self.zero(x)

    _after(Block, add)
    Block.forward = with_parameters  # type: ignore[method-assign]
    call_before(optimizer, "param_groups", check_marks)


def pad_vocabulary() -> None:
    """To a multiple of 64, as nanochat does."""

    def pad(model: Any) -> None:
        model.transformer["wte"] = nn.Embedding(64, model.config.n_embd)

    _after(GPT, pad)


def penalize_logits_in_forward() -> None:
    """z-loss, as a term that GPT.forward adds."""
    forward = GPT.forward

    def penalized(self: GPT, *args: Any, **options: Any) -> Any:
        logits, loss = forward(self, *args, **options)
        if loss is not None and self.training:
            loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
        return logits, loss

    GPT.forward = penalized  # type: ignore[method-assign]


def mix_in_embedding() -> None:
    """nanochat's gates, x = a x + b x0. Stages exchange one tensor, so x0 is a part of it."""
    embed = GPT.embed
    forward = Block.forward
    unembed = GPT.unembed

    def add(block: Any) -> None:
        block.gates = nn.Parameter(torch.tensor([0.9, 0.3]))

    def with_x0(self: Any, x: Tensor, *args: Any) -> Tensor:
        x, x0 = x.chunk(2, -1)
        a, b = self.gates
        return torch.cat((forward(self, a * x + b * x0, *args), x0), -1)

    _after(Block, add)
    GPT.embed = lambda self, *args: embed(self, *args).repeat(1, 1, 2)  # type: ignore[method-assign]
    Block.forward = with_x0  # type: ignore[method-assign]
    GPT.unembed = lambda self, x: unembed(self, x.chunk(2, -1)[0])  # type: ignore[method-assign]


ACCUMULATING = {"trainer__batch_size": 8, "trainer__micro_batch_size": 2}
ON_TWO: list[Options] = [
    ACCUMULATING,
    {"trainer__batch_size": 8, "distributed__strategy": "zero1"},
    {**ACCUMULATING, "distributed__strategy": "zero2"},
    {**ACCUMULATING, "distributed__strategy": "fsdp", "trainer__activation_checkpointing": "full"},
    {**ACCUMULATING, "distributed__reduction": "tree", "optimizer__name": "adamw"},
]
FSDP = {**ACCUMULATING, "distributed__strategy": "fsdp"}
STAGES = [with_stages(2), with_stages(2, distributed__strategy="fsdp")]
EVERYWHERE = [(2, ON_TWO[0]), (2, FSDP), (2, with_stages(2, trainer__micro_batch_size=2))]
PARTS = (("whole", 6), ("parts", 4), ("parts", 6))


def _train(change: Callable[[], None], runs: list[tuple[int, Options]], folder: Path, **options: Any) -> list[Path]:
    """Trains with each number of ranks and options, as a whole and in two parts, which must have the same bits.

    Returns:
        the run folders
    """
    text = write_text(folder / "text.txt")
    argvs: dict[int, list[list[str]]] = {}
    for i, (ranks, own) in enumerate(runs):
        for name, steps in PARTS:
            argv = run_args(folder / f"{i}-{name}", text, **(own | options), trainer__max_steps=steps)
            argvs.setdefault(ranks, []).append(argv)
    for ranks, each in argvs.items():
        for results in run_ranks(ranks, run_changed, change, each, tmp_path=folder):
            assert [status for status, _, _ in results] == [0] * len(each), results
    for i, _ in enumerate(runs):
        assert_same_run(folder / f"{i}-whole", folder / f"{i}-parts")
    return [folder / f"{i}-whole" for i, _ in enumerate(runs)]


def _load_changed(change: Callable[[], None], folders: list[Path], argv: list[str]) -> list[float]:
    """Returns the validation loss of the newest snapshot of each folder in a new model."""
    change()
    with open_trainer(*argv) as trainer:
        batch = trainer.val_data[range(len(trainer.val_data))]
        models = [load_pretrained(str(folder), "--snapshot").build_model() for folder in folders]
        return [model.eval()(*batch)[1].item() for model in models]


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (register_buffers, [(2, ON_TWO[0]), (2, ON_TWO[2]), (2, ON_TWO[4]), (2, STAGES[1])]),
        (add_second_head, [(2, ON_TWO[0]), (2, ON_TWO[1])]),
        (share_block, [(1, FSDP), (2, ON_TWO[3])]),
        (use_random_numbers, EVERYWHERE),
        (count_one_token_only, [*EVERYWHERE, (2, ON_TWO[4])]),
        (freeze, [(2, ON_TWO[1]), *EVERYWHERE[1:]]),
        (add_parameters, EVERYWHERE),
        (pad_vocabulary, EVERYWHERE),
        (penalize_logits_in_forward, EVERYWHERE),
        (mix_in_embedding, EVERYWHERE),
    ],
)
def test_the_model_that_the_constructor_makes_is_trained_saved_and_resumed(
    change: Callable[[], None], runs: list[tuple[int, Options]], tmp_path: Path
) -> None:
    same: list[tuple[int, Options]] = [(1, ACCUMULATING)]
    if any("model__n_layer" in options for _, options in runs):
        same.append((1, with_stages(1, trainer__micro_batch_size=2)))
    folders = _train(change, [*same, *runs], tmp_path, **NO_DROPOUT, trainer__eval_every=6)
    for folder, (_, options) in zip(folders, [*same, *runs], strict=True):
        expected = folders["model__n_layer" in options]
        curves = [[loss for _, loss in loss_curve(each)] for each in (folder, expected)]
        assert max_relative_error(*curves) < 1e-5, options
    argv = run_args(tmp_path / "load", tmp_path / "text.txt")
    [losses] = run_ranks(1, _load_changed, change, folders, argv, tmp_path=tmp_path)
    for folder, loss in zip(folders, losses, strict=True):
        [row] = read_rows(folder, "eval")
        assert math.isclose(row["val_loss"], loss, rel_tol=1e-5)


def _train_export_and_start(argv: list[str], out: Path, new_argv: list[str]) -> list[int]:
    pad_vocabulary()
    options = ["--snapshot", str(out.with_name("run")), "--out", str(out)]
    return [train_main(*argv), run_program(export.run, options), train_main(*new_argv)]


def test_a_padded_vocabulary_is_sampled_exported_and_starts_another_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = write_text(tmp_path / "text.txt")
    argv = run_args(tmp_path / "run", text, trainer__max_steps=6, trainer__sample_every=1)
    new_text = tmp_path / "new.txt"
    new_text.write_text(text.read_text().replace("bob", "Zoë"), encoding="utf-8")
    options = {"trainer__init_from": tmp_path / "run", "trainer__max_steps": 1, "optimizer__learning_rate": 1e-30}
    new_argv = run_args(tmp_path / "new", new_text, **options)
    out = tmp_path / "exported"
    assert run_ranks(1, _train_export_and_start, argv, out, new_argv, tmp_path=tmp_path) == [[0, 0, 0]]
    assert len(read_rows(tmp_path / "run", "sample")) == 6
    old, new = (newest_snapshot(tmp_path / name) for name in ("run", "new"))
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(old["vocabulary"])
    for name in EMBEDDINGS & old["model"].keys():
        before, after = old["model"][name], new["model"][name]
        assert len(before) == len(after) == 64
        for token, character in enumerate(old["vocabulary"]):
            found = after[new["vocabulary"].index(character)]
            assert torch.allclose(found, before[token], rtol=1e-6, atol=0), character


def test_random_numbers_in_an_evaluation_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    runs = [(1, ACCUMULATING), (2, ON_TWO[0])]
    options = {**NO_DROPOUT, "trainer__eval_every": 6, "optimizer__learning_rate": 1e-9}
    folders = _train(mask_validation, runs, tmp_path, **options)
    one, two = (read_rows(folder, "eval")[0]["val_loss"] for folder in folders)
    assert one == pytest.approx(two, rel=1e-6)


def add_noise() -> None:
    """Adds random numbers to the gradients, which ranks have exchanged."""

    def add(strategy: Strategy, lr: Any) -> None:
        for parameter in strategy.parameters.values():
            parameter.grad += 0.1 * torch.randn_like(parameter)

    call_before(Strategy, "update", add)


def test_noise_of_gradients_is_the_same_on_all_ranks_and_resumed(tmp_path: Path) -> None:
    runs = [(1, ACCUMULATING), (2, ON_TWO[0]), (2, ON_TWO[1]), (2, ON_TWO[4])]
    one, *others = _train(add_noise, runs, tmp_path, **NO_DROPOUT)
    for folder in others[:2]:
        assert max_relative_error(*([loss for _, loss in loss_curve(each)] for each in (folder, one))) < 1e-5


@pytest.mark.parametrize(("is_new", "runs"), [(False, [*ON_TWO[::2], STAGES[1]]), (True, [*ON_TWO[:4:3], STAGES[0]])])
def test_buffers_that_change_in_training_are_those_of_the_first_rank_and_resumed(
    is_new: bool, runs: list[Options], tmp_path: Path
) -> None:
    every = {"trainer__activation_checkpointing": "none", "trainer__eval_every": 3}  # no pass is repeated
    folders = _train(partial(change_buffers, is_new=is_new), [*product([2], runs)], tmp_path, **every)
    for folder, options in zip(folders, runs, strict=True):
        replicas = 2 // options.get("distributed__pipeline_stages", 1)
        passes = 8 // replicas // options.get("trainer__micro_batch_size", 2)
        assert newest_snapshot(folder)["model"]["transformer.h.0.mlp.count"] == 6 * passes


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023) with a momentum in bf16, and a counter."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["count"] += 1
                momentum = state["momentum"].float().lerp(parameter.grad, 0.1)
                parameter.sub_(momentum.sign() * group["lr"] / state["count"].item())
                state["momentum"].copy_(momentum)


def use_lion() -> None:
    optimizer.AdamW = Lion  # type: ignore[misc, assignment]


def test_optimizer_state_keeps_its_dtypes(tmp_path: Path) -> None:
    runs = [*product([2], [ON_TWO[0], ON_TWO[1], FSDP, STAGES[0]])]
    for folder in _train(use_lion, runs, tmp_path, optimizer__name="adamw"):
        state = newest_snapshot(folder)["optimizer"]["transformer.wte.weight"]
        assert {key: each.dtype for key, each in state.items()} == {"momentum": torch.bfloat16, "count": torch.int64}


def add_head_bias() -> None:
    def add(model: Any) -> None:
        model.head_bias = nn.Parameter(torch.zeros(13))

    _after(GPT, add)


def skip_an_expert() -> None:
    """Each rank skips one expert of a mixture, as Mixtral's code in transformers skips those without tokens."""
    forward = MLP.forward
    used = 1 - int(os.environ["RANK"])

    def add(mlp: Any) -> None:
        mlp.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    _after(MLP, add)
    MLP.forward = lambda self, x: forward(self, x) + self.experts[used](x)  # type: ignore[method-assign]


IN_STAGES = "distributed.pipeline_stages is 2, must be 1 for this model.py: "
NO_GRADIENT = "model.py: transformer.h.0.mlp.experts.0.weight got no gradient on rank 0; each loss must depend on all"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (add_head_bias, STAGES[0], f"{IN_STAGES}several stages have head_bias; a parameter must belong to"),
        (skip_an_expert, ON_TWO[0], NO_GRADIENT),
        (skip_an_expert, ON_TWO[2], NO_GRADIENT),
        (skip_an_expert, ON_TWO[4], NO_GRADIENT),
    ],
)
def test_what_can_not_be_distributed_is_refused(
    change: Callable[[], None], options: Options, message: str, text: Path, tmp_path: Path
) -> None:
    argv = run_args(tmp_path / "run", text, **options)
    [[(status, _, err)], [(_, _, other)]] = run_ranks(2, run_changed, change, [argv], tmp_path=tmp_path)
    assert (status, other) == (2, "")
    assert_one_message(err, message)
