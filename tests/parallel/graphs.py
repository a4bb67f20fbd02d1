"""Runs with and without CUDA graphs, with changes that people make. Without a GPU, operations are recorded instead.

python -m tests.parallel.graphs FOLDER
"""

import io
import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
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
from mingpt.system.torch_versions import CONTINUES_AFTER_FAILED_RECORDING
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


def counting() -> Any:
    """The count is not in snapshots, so a resumed run differs."""
    forward = model.GPT.forward

    def count(self: Any, *args: Any, **options: Any) -> Any:
        if self.training:
            self.count = getattr(self, "count", 0) + 1
        logits, loss = forward(self, *args, **options)
        return logits, loss if loss is None else loss * (1 + getattr(self, "count", 0) / 100)

    return patch.object(model.GPT, "forward", count)


def averaging() -> Any:
    """Replaces a tensor in an attribute, which a graph would read for ever."""
    forward = model.Block.forward

    def average(self: Any, x: Tensor, *args: Any) -> Tensor:
        if self.training:
            self.average = torch.lerp(getattr(self, "average", x.new_zeros(())), x.detach().abs().mean(), 0.1)
        return forward(self, x, *args) * (1 + getattr(self, "average", 0.0))

    return patch.object(model.Block, "forward", average)


def before_update(change: Callable[[cuda_graphs.CUDAGraphs, int], None]) -> Any:
    """Calls `change` with the number of each step between forward and backward, and the update."""
    backward = cuda_graphs.CUDAGraphs.forward_backward

    def changed(self: Any, *args: Any) -> list[Tensor]:
        losses = backward(self, *args)
        self.count = getattr(self, "count", 0) + 1
        change(self, self.count)
        return losses

    return patch.object(cuda_graphs.CUDAGraphs, "forward_backward", changed)


def after_step(change: Callable[[cuda_graphs.CUDAGraphs], None]) -> Any:
    train_step = Trainer.train_step

    def changed(self: Trainer) -> Any:
        result = train_step(self)
        change(self.strategy)  # type: ignore[arg-type]
        return result

    return patch.object(Trainer, "train_step", changed)


def delete_gradients(self: cuda_graphs.CUDAGraphs) -> None:
    self.optimizer.zero_grad()


def decay_less(self: cuda_graphs.CUDAGraphs) -> None:
    for group in self.optimizer.param_groups:
        group["weight_decay"] *= 0.99


def drop_more(self: cuda_graphs.CUDAGraphs) -> None:
    """Changes the dropout of later steps."""
    if self.num_updates == 7:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5


def skipping() -> Any:
    """Later passes skip the blocks, whose parameters get no gradient."""
    forward = model.Block.forward
    calls = iter(range(10**9))

    def skip(self: Any, x: Tensor, *args: Any) -> Tensor:
        return forward(self, x, *args) if next(calls) < 20 else x

    return patch.object(model.Block, "forward", skip)


def replace_gradients(self: cuda_graphs.CUDAGraphs, step: int) -> None:
    for parameter in self.parameters.values():
        parameter.grad = parameter.grad * 0.5  # type: ignore[operator]


def replace_late(self: cuda_graphs.CUDAGraphs, step: int) -> None:
    if step >= 8:
        replace_gradients(self, step)


def replace_moments(self: cuda_graphs.CUDAGraphs, step: int) -> None:
    if step == 8:
        for state in self.local_state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def freeze_late(self: cuda_graphs.CUDAGraphs) -> None:
    if self.num_updates == 8:
        self.parameters["transformer.wte.weight"].requires_grad_(False)


def fail_recording(x: Tensor) -> Tensor:
    """Fails like CUDA, whose message has several lines."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
    return x


@contextmanager
def failing_for_good() -> Iterator[None]:
    """As before PyTorch 2.13."""
    with changed_blocks(fail_recording), patch.object(cuda_graphs, "CONTINUES_AFTER_FAILED_RECORDING", False):
        yield


def after_replay(change: Callable[["Recording", int], None]) -> Any:
    """Calls `change` with a graph after each of its replays, and with their number."""
    replay = Recording.replay

    @torch.no_grad()
    def changed(self: Recording) -> None:
        replay(self)
        self.num_replays = getattr(self, "num_replays", 0) + 1
        change(self, self.num_replays)

    return patch.object(Recording, "replay", changed)


def makes_update(graph: "Recording") -> bool:
    return any("adamw" in str(func) for func, *_ in graph.operations)


def change_one_gradient(graph: "Recording", replay: int) -> None:
    """One element of one gradient is wrong by ten percent."""
    if not makes_update(graph):
        gradient = next(tensor for tensor, _ in graph.before.values() if tensor.dim() == 2)
        gradient.view(-1)[gradient.abs().argmax()] *= 1.1


def change_to_nan(graph: "Recording", replay: int) -> None:
    if not makes_update(graph):
        next(tensor for tensor, _ in graph.before.values() if tensor.dim() == 2).view(-1)[:] = math.nan


def change_later(graph: "Recording", replay: int) -> None:
    if replay > 40:
        change_one_gradient(graph, replay)


def scale_gradients(graph: "Recording", by: float) -> None:
    """Replays differ from each other: each scales all gradients by 1, give or take `by`."""
    if not makes_update(graph):
        for tensor, _ in graph.before.values():
            if tensor.is_floating_point():
                tensor.mul_(1 + random.Random(graph.num_replays).uniform(-by, by))


def change_one_weight(graph: "Recording", replay: int) -> None:
    if makes_update(graph):
        next(tensor for tensor, _ in graph.before.values() if tensor.requires_grad).view(-1)[0] += 1e-4


def repeat_masks() -> Any:
    """Replays repeat the random numbers of the recording."""
    exit_recording = Recording.__exit__

    def keep(self: Recording, *args: Any) -> None:
        exit_recording(self, *args)
        self.operations = [each for each in self.operations if torch.Tag.nondeterministic_seeded not in each[0].tags]

    return patch.object(Recording, "__exit__", keep)


def overflowing() -> Any:
    """Scales the loss as in fp16, so far that the gradients of the first steps overflow."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**127)
    return patch.object(torch.amp, "GradScaler", lambda device, enabled: scaler(device, enabled=True))


def compiled() -> Any:
    """Compiles by a backend whose operations can be recorded here."""
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


READ = lambda x: x if x.sum().item() < 1e9 else -x  # noqa: E731
RANDOM = lambda x: x if torch.rand(()) < 2 else -x  # noqa: E731

NUMPY = lambda x: x * np.random.uniform(0.9, 1.1)  # noqa: E731

REPLACED = "a parameter, a gradient, a buffer or a moment was replaced, frozen or unfrozen;"
DIFFERS = "a recorded step differs from the same step without graphs: "
LARGE = "a step takes more than a third of the GPU's memory;"
UNORDERED = {"trainer__deterministic": False}
RANDOM_WARNING = "a step draws random numbers on the CPU;"

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
# Changes that a graph does not survive, and what the warning says.
CHANGED: dict[str, tuple[Callable[[], AbstractContextManager], str]] = {
    "numpy": (lambda: changed_blocks(NUMPY), RANDOM_WARNING),
    "a counter": (counting, "count changes, from "),
    "weight decay": (lambda: after_step(decay_less), "weight_decay changes, from 0.1 to 0.099;"),
    "dropout": (lambda: after_step(drop_more), "p changes, from 0.1 to 0.5;"),
    "an average": (averaging, DIFFERS),
    "gradients": (lambda: before_update(replace_gradients), REPLACED),
    "gradients, later": (lambda: before_update(replace_late), REPLACED),
    "no gradients": (lambda: after_step(delete_gradients), REPLACED),
    "no zeros": (lambda: patch.object(cuda_graphs.CUDAGraphs, "zero_grad", delete_gradients), REPLACED),
    "moments, later": (lambda: before_update(replace_moments), REPLACED),
    "frozen later": (lambda: after_step(freeze_late), REPLACED),
    "a recording fails": (
        lambda: changed_blocks(fail_recording),
        "a step can't be recorded: operation not permitted when stream is capturing;",
    ),
}
GPU_CHANGED = dict(CHANGED)
if not CONTINUES_AFTER_FAILED_RECORDING:
    del GPU_CHANGED["a recording fails"]
# Faults of recorded steps, which are simulated here.
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager], str]] = {
    "repeated dropout": (repeat_masks, DIFFERS),
    "a gradient": (lambda: after_replay(change_one_gradient), DIFFERS),
    "a gradient is NaN": (lambda: after_replay(change_to_nan), DIFFERS),
    "a weight": (lambda: after_replay(change_one_weight), DIFFERS),
}
GPU_RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "fp16": (nullcontext, {"trainer__precision": "fp16"} | MUON),
    "compiled": (nullcontext, {"trainer__compile": True, "trainer__precision": "bf16"}),
    "activation checkpointing": (nullcontext, {"trainer__activation_checkpointing": "selective"}),
    "a random number": (lambda: changed_blocks(RANDOM), {}),
}


CPU_RUNS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "overflows": (overflowing, MUON),
    "compiled": (compiled, {"trainer__compile": True}),
    "tolerance": (nullcontext, {"trainer__deterministic": False}),
}


def train_all(folder: Path) -> None:
    """Trains each run as a whole, without graphs, and in two parts; and runs where graphs are required."""
    text = write_text(folder / "text.txt")
    is_cuda = torch.cuda.is_available()
    options = {"trainer__deterministic": True, "optimizer__decay_steps": 12}

    def train(name: str, part: str, **more: Any) -> None:
        assert run_main(run_args(folder / f"{name}-{part}", text, **options | more)) == 0, (name, part)

    with nullcontext() if is_cuda else recording_on_cpu():
        for name, (change, changes) in (RUNS | (GPU_RUNS if is_cuda else CPU_RUNS)).items():
            with change():
                train(name, "graphs", **changes)
                train(name, "plain", **changes, trainer__cuda_graphs=False)
                train(name, "parts", **changes, trainer__max_steps=6)
                train(name, "parts", **changes)
        for name, (change, _) in (GPU_CHANGED if is_cuda else CHANGED).items():
            with change():
                train(name, "graphs")
                train(name, "plain", trainer__cuda_graphs=False)
        if not is_cuda:
            train("faults", "plain", trainer__cuda_graphs=False)
            for name, (change, _) in FAULTS.items():
                with change():
                    train(name, "graphs")
        for change in (sgd, partial(changed_blocks, READ), averaging):
            with change():
                assert run_main(run_args(folder / "required", text, **options, trainer__cuda_graphs=True)) == 2


# Runs of the emulation with a change, options, status, and the warning, error or information; None: there is none.
OTHERS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any], int, str | None]] = {
    "a fault later": (
        lambda: after_replay(change_later),
        {"trainer__max_steps": 30},
        0,
        "because a recorded step, and maybe earlier ones, differs from the same step without graphs: ",
    ),
    "large": (lambda: patch.object(torch.cuda, "max_memory_allocated", lambda: 2), {}, 0, LARGE),
    "large, required": (
        lambda: patch.object(torch.cuda, "max_memory_allocated", lambda: 2),
        {"trainer__cuda_graphs": True},
        0,
        None,
    ),
    "can't continue": (
        failing_for_good,
        {},
        2,
        "error: a step can't be recorded: operation not permitted when stream is capturing; set trainer.cuda_graphs to "
        "false, in a new process",
    ),
    "without graphs": (
        skipping,
        {"trainer__cuda_graphs": False},
        2,
        "transformer.h.0.attn.c_attn.weight got no gradient",
    ),
    "atomics": (lambda: after_replay(lambda graph, replay: scale_gradients(graph, 1e-3)), UNORDERED, 0, None),
    "garbage": (lambda: after_replay(lambda graph, replay: scale_gradients(graph, 0.5)), UNORDERED, 0, DIFFERS),
}


def train_others(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Returns the exit status, stdout and stderr of OTHERS."""
    text = write_text(folder / "text.txt")
    done = {}
    with recording_on_cpu():
        for name, (change, options, *_) in OTHERS.items():
            with change(), redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
                argv = run_args(folder / name, text, **{"trainer__deterministic": True} | options)
                done[name] = (run_main(argv), stdout.getvalue(), stderr.getvalue())
    return done


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


class WarnOfReads(TorchDispatchMode):
    """Warns of reads like torch.cuda.set_sync_debug_mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

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
        "graph": lambda graph, stream, capture_error_mode: graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: None,
        "max_memory_allocated": lambda: 1,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (0, 3),
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
        patch.object(cuda_graphs, "untested_with_cuda_graphs", lambda: None),
        patch.object(cuda_graphs, "CONTINUES_AFTER_FAILED_RECORDING", True),
        patch.object(conflicts, "cuda_graphs_obstacle", on_gpu),
        patch.object(build, "Strategy", cuda_graphs.CUDAGraphs),
    ):
        yield


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
