"""Baselines: the published nanoGPT and minGPT-DDP tutorial, and a minimal training loop."""

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import suppress_stdout
from char_dataset import ValidationDataset
from mingpt.nn.layers import cross_entropy
from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.strategy import DTYPES
from model import GPT
from trainer import Trainer

Step = Callable[[], Any]


def import_model(folder: Path) -> SimpleNamespace:
    """Returns the definitions in a project's model.py."""
    return SimpleNamespace(**runpy.run_path(str(folder / "model.py")))


def model_sizes(trainer: Trainer) -> dict[str, int]:
    """Returns the sizes of a trainer's model, by the names of the arguments in both projects."""
    keys = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
    return {key: getattr(trainer.model_config, key) for key in keys}


class NanoGPT:
    """nanoGPT's train.py: its model, optimizer, clipping and `get_batch`.

    It trains in fp32 on a CPU, nanoGPT's default, and with autocast in the trainer's precision on a GPU. The model does
    not have biases.

    Args:
        folder: folder of nanoGPT's model.py
        trainer: provides model size, text and batch size
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.device = trainer.context.device
        self.on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES[trainer.numerics.precision]
        self.T = trainer.model_config.block_size
        self.B = trainer.config.trainer.batch_size
        self.file = trainer.run_dir / "train.bin"
        trainer.train_data.tokens.astype(np.uint16).tofile(self.file)
        with suppress_stdout():
            nanogpt = import_model(folder)
            config = nanogpt.GPTConfig(**model_sizes(trainer), dropout=trainer.model_config.dropout, bias=False)
            self.model = nanogpt.GPT(config).to(self.device)
            self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)

    def step(self, learning_rate: float = 1e-3) -> None:
        """Trains one step and reads the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        x, y = self._batch()
        with torch.autocast(self.device.type, self.dtype, enabled=self.on_gpu and self.dtype != torch.float32):
            _, loss = self.model(x, y)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()

    def _batch(self) -> tuple[Tensor, Tensor]:
        data = np.memmap(self.file, dtype=np.uint16, mode="r")
        T = self.T
        ix = torch.randint(len(data) - T, (self.B,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        if self.on_gpu:
            x = x.pin_memory().to(self.device, non_blocking=True)
            y = y.pin_memory().to(self.device, non_blocking=True)
        return x, y

    @torch.no_grad()
    def evaluate(self, data: ValidationDataset) -> float:
        """Returns the mean loss over the whole validation text, in nats per character, with the trainer's windows."""
        self.model.eval()
        total = 0.0
        for start in range(0, len(data), 64):  # windows after the last one do not have targets
            idx, targets = (tensor.to(self.device) for tensor in data[range(start, start + 64)])
            logits, _ = self.model(idx, targets)
            total += cross_entropy(logits, targets, "sum").item()
        self.model.train()
        return total / data.count(range(len(data)))


def tutorial_step(folder: Path, trainer: Trainer) -> Step:
    """Returns a step of the tutorial's trainer in fp32, on this program's batches, since its own loader is far slower.

    Args:
        folder: folder of the tutorial's model.py
        trainer: provides model size, dropout and batches
    """
    device = trainer.context.device
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), trainer.model_config.dropout)
    with suppress_stdout():
        tutorial = import_model(folder)
        config = tutorial.GPTConfig(model_type=None, **model_sizes(trainer), **dropout)
        model = tutorial.GPT(config).to(device)
    optimizer = tutorial.create_optimizer(model, tutorial.OptimizerConfig(1e-3, 0.1))
    B = trainer.config.trainer.batch_size
    firsts = itertools.count(0, B)

    def step() -> None:
        first = next(firsts)
        idx, targets = trainer.train_data[range(first, first + B)]
        _, loss = model(idx.contiguous().to(device), targets.contiguous().to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def minimal_loop(trainer: Trainer) -> Step:
    """Returns a step with the same model, autocast, optimizer and clipping, without logs, checks and data loading."""
    config = trainer.config.optimizer
    dtype = DTYPES[trainer.numerics.precision]
    device = trainer.context.device
    B = trainer.config.trainer.batch_size
    model = GPT(trainer.model_config).to(device)
    optimizer = build_optimizer(model, config, dtype)
    loaded = []
    for first in range(0, 50 * B, B):
        idx, targets = trainer.train_data[range(first, first + B)]
        loaded.append((idx.to(device), targets.to(device)))
    batches = itertools.cycle(loaded)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(*next(batches))[1]
        loss.backward()
        if config.grad_norm_clip is not None:
            clip_grad_norm_(model.parameters(), config.grad_norm_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
