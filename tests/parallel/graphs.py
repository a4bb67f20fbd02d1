"""Runs with and without CUDA graphs. Without a GPU, operations are recorded instead.

python -m tests.parallel.graphs FOLDER
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model
from char_dataset import CharDataset
from mingpt import start
from mingpt.config import conflicts
from mingpt.parallel.strategy import Strategy
from tests.helpers import run_args, run_main, write_text
from tests.parallel.runs import add_auxiliary_loss, change_buffers, count_one_token_only, freeze


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


def overflowing() -> Any:
    """Scales the loss as in fp16, so far that the gradients of the first steps overflow."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**127)
    return patch.object(torch.amp, "GradScaler", lambda device, enabled: scaler(device, enabled=True))


def compiled() -> Any:
    """Compiles by a backend whose operations can be recorded here."""
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


MUON = {"optimizer__name": "muon", "trainer__sample_every": 4}
# Changes and options of each run
RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "adamw": (nullcontext, {"optimizer__grad_norm_clip": None}),
    "muon": (nullcontext, {"trainer__precision": "bf16"} | MUON),
    "short last batch": (
        nullcontext,
        {"trainer__max_epochs": 1, "trainer__batch_size": 20, "trainer__micro_batch_size": None},
    ),
    "masked targets": (lambda: undone(count_one_token_only), {}),
    "an auxiliary loss": (lambda: undone(add_auxiliary_loss), {}),
    "frozen parameters": (lambda: undone(freeze), MUON),
    "buffers": (lambda: undone(partial(change_buffers, is_new=False)), {}),
}
GPU_RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "fp16": (nullcontext, {"trainer__precision": "fp16"} | MUON),
    "compiled": (nullcontext, {"trainer__compile": True, "trainer__precision": "bf16"}),
}
CPU_RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "overflows": (overflowing, MUON),
    "compiled": (compiled, {"trainer__compile": True}),
}


def tensor_learning_rate() -> AbstractContextManager:
    """Passes learning rates in fp32 tensors, from which a graph reads them, too."""
    update = Strategy.update
    return patch.object(Strategy, "update", lambda self, lr: update(self, torch.tensor(lr, device=self.device)))


def train_all(folder: Path) -> None:
    """Trains each run as a whole, without graphs, and in two parts."""
    text = write_text(folder / "text.txt")
    is_cuda = torch.cuda.is_available()
    options = {"trainer__deterministic": True, "optimizer__decay_steps": 12, "trainer__cuda_graphs": True}

    def train(name: str, part: str, **more: Any) -> None:
        assert run_main(run_args(folder / f"{name}-{part}", text, **options | more)) == 0, (name, part)

    with nullcontext() if is_cuda else recording_on_cpu():
        for name, (change, changes) in (RUNS | (GPU_RUNS if is_cuda else CPU_RUNS)).items():
            with change():
                train(name, "graphs", **changes)
                with tensor_learning_rate():
                    train(name, "plain", **changes, trainer__cuda_graphs=False)
                train(name, "parts", **changes, trainer__max_steps=6)
                train(name, "parts", **changes)


# CUDA graphs without CUDA


class Recording(TorchDispatchMode):
    """Records operations within a block, undoes what they change, and repeats them.

    Like the kernels of a CUDA graph, operations keep their tensors and their numbers.
    """

    active = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # so compiled code runs as compiled within the block, too

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
        self.random_state = torch.default_generator.get_state()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Recording.active = False
        for tensor, value in self.before.values():
            tensor.detach().copy_(value)
        torch.default_generator.set_state(self.random_state)

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


@contextmanager
def recording_on_cpu() -> Iterator[None]:
    """Makes strategies of one process record their steps, although the device is a CPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = {
        "CUDAGraph": Recording,
        "graph": lambda graph, stream, capture_error_mode: graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: Recording.active,
    }
    find = conflicts.find_start_conflicts
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(start, "find_start_conflicts", lambda config, ranks, device: find(config, ranks, "cuda")),
    ):
        yield


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
