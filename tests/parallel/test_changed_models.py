"""What the constructor of a changed model makes is trained with every strategy, saved and loaded, or is refused."""

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt.optim import optimizer
from mingpt.snapshot.load import load_pretrained
from model import GPT, MLP, Block, CausalSelfAttention
from tests.helpers import (
    NO_DROPOUT,
    assert_equal_snapshots,
    assert_one_message,
    loss_curve,
    max_relative_error,
    newest_snapshot,
    open_trainer,
    read_rows,
    run_args,
    run_ranks,
    write_text,
)
from tests.parallel.runs import PIPELINE, Options, add_auxiliary_loss, change_buffers, run_changed, with_stages


def _after(cls: type[nn.Module], function: Callable[[Any], None]) -> None:
    """Calls a function at the end of a class's constructor."""
    init: Any = cls.__init__

    def changed(self: Any, *args: Any) -> None:
        init(self, *args)
        function(self)

    cls.__init__ = changed  # type: ignore[method-assign]


def tie_head() -> None:
    """As nanoGPT does."""

    def tie(model: Any) -> None:
        model.lm_head.weight = model.transformer["wte"].weight

    _after(GPT, tie)


def share_block() -> None:
    """As ALBERT does."""

    def share(model: Any) -> None:
        model.transformer["h"] = nn.ModuleList([model.blocks[0]] * len(model.blocks))

    _after(GPT, share)


def tie_blocks() -> None:
    def tie(model: Any) -> None:
        model.blocks[1].mlp.c_fc.weight = model.blocks[0].mlp.c_fc.weight

    _after(GPT, tie)


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

    def with_head(self: Any, idx: Tensor, targets: Tensor | None = None, cache: Any = None) -> Any:
        logits, loss = forward(self, idx, targets, cache)
        if targets is not None:
            loss = loss + self.loss(self.second_head(self.embed(idx)), targets)
        return logits, loss

    _after(GPT, add)
    GPT.forward = with_head  # type: ignore[method-assign]


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
    for i, (_, own) in enumerate(runs):
        assert loss_curve(folder / f"{i}-parts") == loss_curve(folder / f"{i}-whole"), own
        assert_equal_snapshots(folder / f"{i}-whole", folder / f"{i}-parts")
    return [folder / f"{i}-whole" for i, _ in enumerate(runs)]


def _load_changed(change: Callable[[], None], folders: list[Path], argv: list[str]) -> list[float]:
    """Returns the validation loss of the newest snapshot of each folder in a new model."""
    change()
    with open_trainer(*argv) as trainer:
        losses = []
        for folder in folders:
            model = load_pretrained(str(folder), "--snapshot").build_model()
            new = GPT(model.config)
            new.load_state_dict(newest_snapshot(folder)["model"])
            idx, targets = trainer.val_data[range(len(trainer.val_data))]
            _, loss = new.eval()(idx, targets)
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (tie_head, [(1, FSDP), (2, ON_TWO[1]), (2, ON_TWO[3]), (2, ON_TWO[4])]),
        (register_buffers, [(2, ON_TWO[0]), (2, ON_TWO[2]), (2, ON_TWO[4]), (2, STAGES[1])]),
        (tie_blocks, [(2, ON_TWO[0])]),
        (add_second_head, [(2, ON_TWO[0]), (2, ON_TWO[1])]),
        (share_block, [(1, FSDP), (2, ON_TWO[0]), (2, ON_TWO[3])]),
    ],
)
def test_the_model_that_the_constructor_makes_is_trained_saved_and_resumed(
    change: Callable[[], None], runs: list[tuple[int, Options]], tmp_path: Path
) -> None:
    same = [(1, ACCUMULATING), (1, PIPELINE | {"trainer__micro_batch_size": 2})]
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


def change_buffer_in_last_stage() -> None:
    unembed = GPT.unembed

    def counting(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return unembed(self, x)

    _after(GPT, lambda model: model.register_buffer("count", torch.zeros(())))
    GPT.unembed = counting  # type: ignore[method-assign]


def share_buffer() -> None:
    forward = Block.forward
    count = torch.zeros(())

    def counting(self: Any, *args: Any) -> Tensor:
        self.count += 1
        return forward(self, *args)

    _after(Block, lambda block: block.register_buffer("count", count))
    Block.forward = counting  # type: ignore[method-assign]


def use_embedding_in_last_stage() -> None:
    def with_positions(self: Any, x: Tensor) -> Tensor:
        return x @ self.transformer["wte"].weight.T

    GPT.unembed = with_positions  # type: ignore[method-assign]


def tie_data() -> None:
    def tie(model: Any) -> None:
        model.lm_head.weight.data = model.transformer["wte"].weight.data

    _after(GPT, tie)


def tie_buffer() -> None:
    _after(GPT, lambda model: model.register_buffer("emb", model.lm_head.weight.detach()[1:]))


def clone_state() -> None:
    state_dict: Any = GPT.state_dict

    def cloned(self: Any, **options: Any) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in state_dict(self, **options).items()}

    GPT.state_dict = cloned  # type: ignore[method-assign, assignment]


def add_hook() -> None:
    """Of a kind that trains some rows only."""
    _after(GPT, lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient / 2))


def limit_norm() -> None:
    """Each pass changes the rows of its tokens."""
    _after(GPT, lambda model: setattr(model.transformer["wte"], "max_norm", 0.01))


def average_weights() -> None:
    """Each pass changes a frozen copy, like a teacher's."""
    forward = MLP.forward

    def add(mlp: Any) -> None:
        mlp.teacher = copy.deepcopy(mlp.c_fc).requires_grad_(False)
        mlp.teacher.weight.data += 1

    def averaged(self: Any, x: Tensor) -> Tensor:
        self.teacher.weight.data.lerp_(self.c_fc.weight.data, 0.1)
        return forward(self, x) + self.teacher(x).mean(-1, keepdim=True)

    _after(MLP, add)
    MLP.forward = averaged  # type: ignore[method-assign]


def skip_an_expert() -> None:
    """Each rank skips one expert of a mixture, as Mixtral's code in transformers skips those without tokens."""
    forward = MLP.forward
    used = 1 - int(os.environ["RANK"])

    def add(mlp: Any) -> None:
        mlp.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    _after(MLP, add)
    MLP.forward = lambda self, x: forward(self, x) + self.experts[used](x)  # type: ignore[method-assign]


def use_module_of_list() -> None:
    """Each block uses the first one's MLP, which is not among its modules."""
    forward = Block.forward

    def share(model: Any) -> None:
        for block in model.blocks.values():
            block.shared = [model.blocks[0].mlp]

    def with_shared(self: Any, x: Tensor, *args: Any) -> Tensor:
        return forward(self, x, *args) + self.shared[0](x)

    _after(GPT, share)
    Block.forward = with_shared  # type: ignore[method-assign]


IN_STAGES = "distributed.pipeline_stages is 2, must be 1 for this model.py: "
NOT_FSDP = "distributed.strategy is fsdp, must be ddp or zero1, because "
NO_GRADIENT = "model.py: transformer.h.0.mlp.experts.0.weight got no gradient on rank 0; with several ranks, each"
IS_CHANGED = "model.py: a forward pass changes the parameter "


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (tie_head, STAGES[0], f"{IN_STAGES}transformer.wte.weight and lm_head.weight are one parameter, but belong to"),
        (add_head_bias, STAGES[0], f"{IN_STAGES}the stage of head_bias is unknown; parameters must belong to a"),
        (change_buffer_in_last_stage, STAGES[0], f"{IN_STAGES}several stages change the buffer count, or not"),
        (share_buffer, STAGES[0], f"{IN_STAGES}several stages change the buffer transformer.h.0.count, or not"),
        (use_embedding_in_last_stage, STAGES[0], f"{IN_STAGES}in stages, it raises KeyError('wte')"),
        (add_auxiliary_loss, STAGES[0], f"{IN_STAGES}with random weights, the loss of the whole model is "),
        (use_module_of_list, STAGES[0], f"{IN_STAGES}with random weights, the loss of the whole model is "),
        (tie_blocks, FSDP, f"{NOT_FSDP}transformer.h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are one"),
        (add_hook, FSDP, f"{NOT_FSDP}lm_head.weight has a hook"),
        (skip_an_expert, ON_TWO[0], NO_GRADIENT),
        (skip_an_expert, ON_TWO[2], NO_GRADIENT),
        (skip_an_expert, ON_TWO[4], NO_GRADIENT),
        (limit_norm, ON_TWO[4], f"{IS_CHANGED}transformer.wte.weight; with several ranks or shards, use a buffer"),
        (average_weights, ON_TWO[0], f"{IS_CHANGED}mlp.teacher.weight; with several"),
        (average_weights, FSDP, f"{IS_CHANGED}mlp.teacher.weight; with several"),
        (tie_data, {}, "model.py: transformer.wte.weight and lm_head.weight share memory, which training would sep"),
        (clone_state, {}, "model.py: transformer.wte.weight in the state dict must be a parameter or a buffer itself"),
        (tie_buffer, {}, "model.py: lm_head.weight and emb share memory, which training would separate; copy it, or"),
    ],
)
def test_what_can_not_be_distributed_is_refused(
    change: Callable[[], None], options: Options, message: str, text: Path, tmp_path: Path
) -> None:
    argv = run_args(tmp_path / "run", text, **options)
    [[(status, _, err)], [(_, _, other)]] = run_ranks(2, run_changed, change, [argv], tmp_path=tmp_path)
    assert (status, other) == (2, "")
    assert_one_message(err)
    assert message in err
