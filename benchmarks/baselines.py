"""What is it compared with? nanoGPT and the minGPT-DDP tutorial as they are shipped, and the barest loop there is."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import silenced
from mingpt.optimizer import build_optimizer
from mingpt.parallel.data_parallel import DTYPES
from model import GPT
from trainer import Trainer

Step = Callable[[], Any]


def load(file: Path) -> ModuleType:
    """The module in a file, under a name that no other module has."""
    name = f"rival_{file.parent.name}_{file.stem}"
    loader = SourceFileLoader(name, str(file))
    spec = ModuleSpec(name, loader, origin=str(file))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    with silenced():
        loader.exec_module(module)
    return module


def nanogpt_step(folder: Path, made: Trainer) -> Step:
    """A step of nanoGPT's train.py on a CPU, with the model's shape, text and batch size of `made`.

    In fp32, with its optimizer, its clipping, its way to fetch a batch, and no biases: its defaults on a CPU.

    Args:
        folder: with its model.py
    """
    theirs, shape, B = load(folder / "model.py"), made.state.shape, made.config.trainer.batch_size
    T, file = shape.block_size, made.run_dir / "train.bin"
    made.training.tokens.astype(np.uint16).tofile(file)
    sizes = {key: getattr(shape, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "dropout")}
    with silenced():
        model = theirs.GPT(theirs.GPTConfig(**sizes, bias=False))
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def batch() -> tuple[Tensor, Tensor]:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - T, (B,))
        x = torch.stack([torch.from_numpy((data[i : i + T]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + T]).astype(np.int64)) for i in ix])
        return x, y

    def step() -> None:
        _, loss = model(*batch())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def tutorial_step(folder: Path, made: Trainer) -> Step:
    """A step of the tutorial's trainer in fp32, with the model's shape, text, batch size and dropout of `made`.

    It gets our batches: its own way to fetch them is measured apart.

    Args:
        folder: with its model.py
    """
    theirs, shape, dropout = load(folder / "model.py"), made.state.shape, made.state.shape.dropout
    sizes = {key: getattr(shape, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")}
    drops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
    with silenced():
        model = theirs.GPT(theirs.GPTConfig(model_type=None, **sizes, **drops))
    optimizer = theirs.create_optimizer(model, theirs.OptimizerConfig(1e-3, 0.1))
    numbers = fresh_numbers(made)

    def step() -> None:
        idx, targets = made.training[next(numbers)]
        _, loss = model(idx, targets.contiguous())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def tutorial_fetch(folder: Path, made: Trainer, text: Path) -> Step:
    """One batch as the tutorial fetches it: character by character from a dictionary, and collated.

    Args:
        folder: with its char_dataset.py
        made: has T and B
        text: the file
    """
    theirs, T, B = load(folder / "char_dataset.py"), made.training.block_size, made.config.trainer.batch_size
    with silenced():
        dataset = theirs.CharDataset(theirs.DataConfig(path=str(text), block_size=T))
    return lambda: torch.utils.data.default_collate([dataset[int(i)] for i in torch.randint(len(dataset), (B,))])


def fresh_numbers(made: Trainer) -> Iterator[range]:
    """The sample numbers of one batch after another."""
    B = made.config.trainer.batch_size
    return (range(first, first + B) for first in itertools.count(0, B))


def fetching(made: Trainer) -> Step:
    """One batch after another as we fetch it."""
    numbers = fresh_numbers(made)
    return lambda: made.training[next(numbers)]


def bare_loop(made: Trainer) -> Step:
    """The same mathematics with nothing around it: no log, no checks, batches made beforehand."""
    model, clip = GPT(made.state.shape), made.config.optimizer.grad_norm_clip
    optimizer = build_optimizer(model, made.config.optimizer, DTYPES[made.state.precision])
    batches = itertools.cycle([made.training[numbers] for numbers in itertools.islice(fresh_numbers(made), 50)])
    precision = made.state.precision

    def step() -> None:
        with torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32"):
            loss = model(*next(batches))[1]
        loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
