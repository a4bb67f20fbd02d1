"""Steps of nanoGPT, the tutorial and a bare loop, with a trainer's text, model size and batch size."""

import itertools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.strategy import DTYPES
from model import GPT
from trainer import Trainer

Step = Callable[[], object]
Batches = Iterator[tuple[Tensor, Tensor]]


def training_step(model: nn.Module, optimizer: Optimizer, batches: Batches, dtype: torch.dtype) -> Step:
    """Returns a step without logs and checks, in fp32 or with autocast to bf16 or fp16."""
    device = next(model.parameters()).device

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_step(trainer: Trainer) -> Step:
    """Returns a step with this program's model and optimizer, without loading of data."""
    dtype = DTYPES[trainer.numerics.precision]
    model = GPT(trainer.model_config).to(trainer.context.device)
    optimizer = build_optimizer(model, trainer.config.optimizer, dtype)
    loaded = list(itertools.islice(trainer_batches(trainer), 50))
    return training_step(model, optimizer, itertools.cycle(loaded), dtype)


def tutorial_step(trainer: Trainer, folder: Path) -> Step:
    """Returns a step of the tutorial in fp32, on this program's batches, since its own loader is many times slower.

    Args:
        folder: contains the tutorial's model.py
    """
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), trainer.model_config.dropout)
    config = SimpleNamespace(**vars(trainer.model_config), **dropout, model_type=None)
    tutorial = runpy.run_path(str(folder / "model.py"))
    model = tutorial["GPT"](config).to(trainer.context.device)
    optimizer = tutorial["create_optimizer"](model, tutorial["OptimizerConfig"](1e-3, 0.1))
    return training_step(model, optimizer, trainer_batches(trainer), torch.float32)


def trainer_batches(trainer: Trainer) -> Batches:
    """Yields batches (B, T) of this program."""
    B = trainer.config.trainer.batch_size
    for first in itertools.count(0, B):
        idx, targets = trainer.train_data[range(first, first + B)]
        yield idx.contiguous().to(trainer.context.device), targets.contiguous().to(trainer.context.device)


def nanogpt_step(trainer: Trainer, folder: Path) -> Step:
    """Returns a step of nanoGPT in its default precision: fp32 on a CPU, and the trainer's precision on a GPU.

    On a GPU, it is compiled, which is the default of nanoGPT's train.py.

    Args:
        folder: contains nanoGPT's model.py
    """
    device = trainer.context.device
    nanogpt = runpy.run_path(str(folder / "model.py"))
    model = nanogpt["GPT"](trainer.model_config).to(device)  # the sizes have the same names
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    if device.type != "cuda":
        return training_step(model, optimizer, nanogpt_batches(trainer), torch.float32)
    model.compile()
    return training_step(model, optimizer, nanogpt_batches(trainer), DTYPES[trainer.numerics.precision])


def nanogpt_batches(trainer: Trainer) -> Batches:
    """Yields batches (B, T) like `get_batch` in nanoGPT's train.py."""
    T = trainer.config.data.block_size
    file = trainer.run_dir / "train.bin"
    trainer.train_data.tokens.astype(np.uint16).tofile(file)
    while True:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - T, (trainer.config.trainer.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        if trainer.context.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        yield x.to(trainer.context.device, non_blocking=True), y.to(trainer.context.device, non_blocking=True)
