"""Runs with and without CUDA graphs, with changes that people make. Without a GPU, operations are recorded instead.

python -m tests.parallel.graphs FOLDER
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model
from char_dataset import CharDataset
from mingpt.config import conflicts
from mingpt.config.schema import OptimizerConfig
from mingpt.optim.optimizer import param_groups
from mingpt.parallel import build, cuda_graphs, strategy
from tests.helpers import run_args, run_main, write_text
from tests.parallel.runs import add_auxiliary_loss, change_buffers, count_one_token_only, freeze
from trainer import Trainer


@contextmanager
def undone(change: Callable[[], None]) -> Iterator[None]:
    """Makes a change of tests/parallel/runs.py for the block."""
    changed = [
        (CharDataset, "__getitem__"),
        (model.MLP, "__init__"),
        (model.MLP, "forward"),
        (model.GPT, "__init__"),
        (model.GPT, "forward"),
    ]
    before = [getattr(owner, name) for owner, name in changed]
    change()
    yield
    for (owner, name), value in zip(changed, before, strict=True):
        setattr(owner, name, value)


def changed_blocks(change: Callable[[Tensor], Tensor]) -> Any:
    forward = model.Block.forward
    return patch.object(model.Block, "forward", lambda self, *args: change(forward(self, *args)))


def other_weights() -> Any:
    """Evaluates a part of the optimizer's state in place of the weights, like docs/changes/averaged_weights.diff."""
    evaluate = Trainer.evaluate

    def evaluate_other(self: Trainer) -> None:
        weights = {name: parameter.detach() for name, parameter in self.strategy.parameters.items()}
        own = {name: weight.clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.copy_(self.strategy.local_state[name]["exp_avg"])
        evaluate(self)
        for name, weight in weights.items():
            weight.copy_(own[name])

    return patch.object(Trainer, "evaluate", evaluate_other)


class SGD(torch.optim.SGD):
    """It adds gradients with `alpha`, so each step would read a learning rate from the GPU."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert all(isinstance(group["lr"], float) for group in self.param_groups)
        super().step()


def sgd() -> Any:
    def build(module: nn.Module, config: OptimizerConfig, *args: Any) -> torch.optim.Optimizer:
        return SGD(param_groups(module, config), lr=0.1, momentum=0.9)

    return patch.object(strategy, "build_optimizer", build)


READ = lambda x: x if x.sum().item() < 1e9 else -x  # noqa: E731
RANDOM = lambda x: x if torch.rand(()) < 2 else -x  # noqa: E731

MUON = {"optimizer__name": "muon", "trainer__sample_every": 4}
# Changes and options of each run
RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "adamw": (nullcontext, {"model__architecture": "gpt2", "optimizer__grad_norm_clip": None}),
    "muon": (nullcontext, {"trainer__precision": "bf16"} | MUON),
    "short last batch": (
        nullcontext,
        {"trainer__max_epochs": 1, "trainer__batch_size": 20, "trainer__micro_batch_size": None},
    ),
    "masked targets": (lambda: undone(count_one_token_only), {}),
    "an auxiliary loss": (lambda: undone(add_auxiliary_loss), {}),
    "frozen parameters": (lambda: undone(freeze), {"model__architecture": "gpt2"} | MUON),
    "buffers": (lambda: undone(partial(change_buffers, is_new=False)), {}),
    "new buffers": (lambda: undone(partial(change_buffers, is_new=True)), {}),
    "other weights": (other_weights, {}),
    "sgd": (sgd, {}),
    "a read": (lambda: changed_blocks(READ), {}),
}
GPU_RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "fp16": (nullcontext, {"trainer__precision": "fp16"} | MUON),
    "compiled": (nullcontext, {"trainer__compile": True, "trainer__precision": "bf16"}),
    "activation checkpointing": (nullcontext, {"trainer__activation_checkpointing": "selective"}),
    "a random number": (lambda: changed_blocks(RANDOM), {}),
}


def train_all(folder: Path) -> None:
    """Trains each run as a whole, without graphs, and in two parts, and once where graphs are required."""
    text = write_text(folder / "text.txt")
    is_cuda = torch.cuda.is_available()
    with nullcontext() if is_cuda else recording_on_cpu():
        for name, (change, options) in (RUNS | GPU_RUNS if is_cuda else RUNS).items():
            options = options | {"trainer__deterministic": True, "optimizer__decay_steps": 12}  # noqa: PLW2901
            parts: list[tuple[str, dict[str, Any]]] = [
                ("graphs", {}),
                ("plain", {"trainer__cuda_graphs": False}),
                ("parts", {"trainer__max_steps": 6}),
                ("parts", {}),
            ]
            with change():
                for part, more in parts:
                    assert run_main(run_args(folder / f"{name}-{part}", text, **options | more)) == 0, (name, part)
        for change in (sgd, partial(changed_blocks, READ)):
            with change():
                assert run_main(run_args(folder / "required", text, trainer__cuda_graphs=True)) == 2


# CUDA graphs without CUDA


class Recording(TorchDispatchMode):
    """Records operations within a block, undoes what they change, and repeats them.

    Like the kernels of a CUDA graph, operations keep their tensors and their numbers.
    """

    active = False

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "CUDA can't record a read"
        if func._schema.is_mutable:
            for tensor in find_tensors((args, kwargs)):
                self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        outputs = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, find_tensors(outputs)))
        return outputs

    def __enter__(self) -> "Recording":
        Recording.active = True
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Recording.active = False
        for tensor, value in self.before.values():
            tensor.detach().copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            is_view = any(result.alias_info for result in func._schema.returns)
            if is_view and not func._schema.is_mutable:
                continue
            for output, result in zip(outputs, find_tensors(func(*args, **kwargs)), strict=True):
                if output is not result:
                    output.copy_(result)


def find_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class WarnOfReads(TorchDispatchMode):
    """Warns of reads like torch.cuda.set_sync_debug_mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            place = next(frame for frame in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in frame.filename)
            warnings.warn_explicit(
                "called a synchronizing CUDA operation", UserWarning, place.filename, place.lineno or 0
            )
        return func(*args, **kwargs or {})


@contextmanager
def recording_on_cpu() -> Iterator[None]:
    """Makes strategies of one process record their steps, although the device is a CPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    reads = WarnOfReads()
    cuda = {
        "CUDAGraph": Recording,
        "graph": lambda graph, capture_error_mode: graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: Recording.active,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: reads.__enter__() if mode == "warn" else reads.__exit__(None, None, None),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    obstacle = conflicts.cuda_graphs_obstacle

    def on_gpu(config: Any, world_size: int, device: str) -> str | None:
        return obstacle(config, world_size, "cuda")

    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(torch, "get_rng_state", lambda: torch.zeros(1)),  # dropout draws on the CPU
        patch.object(cuda_graphs, "cuda_graphs_obstacle", on_gpu),
        patch.object(conflicts, "cuda_graphs_obstacle", on_gpu),
        patch.object(build, "Strategy", cuda_graphs.CUDAGraphs),
    ):
        yield


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
