"""Baselines: nanoGPT and the minGPT-DDP tutorial as they are published, and a minimal training loop."""

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

from benchmarks.harness import suppress_stdout
from char_dataset import ValidationDataset
from mingpt.loss import cross_entropy
from mingpt.optimizer import build_optimizer
from mingpt.parallel.strategy import DTYPES
from model import GPT
from trainer import Trainer

Step = Callable[[], Any]


def import_file(file: Path) -> ModuleType:
    """Imports a file under a name that no other module has."""
    name = f"baseline_{file.parent.name}_{file.stem}"
    loader = SourceFileLoader(name, str(file))
    spec = ModuleSpec(name, loader, origin=str(file))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses look up their module
    with suppress_stdout():
        loader.exec_module(module)
    return module


class NanoGPT:
    """nanoGPT's train.py: its model, optimizer, clipping and `get_batch`.

    As its defaults are, in fp32 on a CPU, and with autocast in the trainer's precision on a GPU.

    Args:
        folder: contains nanoGPT's model.py
        trainer: whose model size, text and batch size are used; nanoGPT's model has no biases
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        nanogpt, config = import_file(folder / "model.py"), trainer.model_config
        self.device, self.T, self.B = trainer.context.device, config.block_size, trainer.config.trainer.batch_size
        self.dtype, self.on_gpu = DTYPES[trainer.numerics.precision], self.device.type == "cuda"
        self.file = trainer.run_dir / "train.bin"
        trainer.train_data.tokens.astype(np.uint16).tofile(self.file)
        keys = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "dropout")
        sizes = {key: getattr(config, key) for key in keys}
        with suppress_stdout():
            self.model = nanogpt.GPT(nanogpt.GPTConfig(**sizes, bias=False)).to(self.device)
            self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)

    def step(self, learning_rate: float = 1e-3) -> None:
        """One step of training, after which the loss is read."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        x, y = (tensor.to(self.device, non_blocking=self.on_gpu) for tensor in self._batch())
        with torch.autocast(self.device.type, self.dtype, enabled=self.on_gpu and self.dtype != torch.float32):
            _, loss = self.model(x, y)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()

    def _batch(self) -> tuple[Tensor, Tensor]:
        data, T = np.memmap(self.file, dtype=np.uint16, mode="r"), self.T
        ix = torch.randint(len(data) - T, (self.B,))
        x = torch.stack([torch.from_numpy((data[i : i + T]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + T]).astype(np.int64)) for i in ix])
        return (x.pin_memory(), y.pin_memory()) if self.on_gpu else (x, y)

    @torch.no_grad()
    def evaluate(self, data: ValidationDataset) -> float:
        """The mean loss over the whole validation text, in nats per character, in the trainer's windows."""
        self.model.eval()
        total = 0.0
        for start in range(0, len(data), 64):
            idx, targets = (tensor.to(self.device) for tensor in data[range(start, min(start + 64, len(data)))])
            logits, _ = self.model(idx, targets)
            total += cross_entropy(logits, targets, "sum").item()
        self.model.train()
        return total / data.count(range(len(data)))


def tutorial_step(folder: Path, trainer: Trainer) -> Step:
    """A step of the tutorial's trainer in fp32, on batches of ours: its own loading is measured by `tutorial_fetch`.

    Args:
        folder: contains the tutorial's model.py
        trainer: whose model size, dropout and batches are used
    """
    tutorial, config = import_file(folder / "model.py"), trainer.model_config
    sizes = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")}
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), config.dropout)
    with suppress_stdout():
        model = tutorial.GPT(tutorial.GPTConfig(model_type=None, **sizes, **dropout)).to(trainer.context.device)
    optimizer = tutorial.create_optimizer(model, tutorial.OptimizerConfig(1e-3, 0.1))
    batches = sample_numbers(trainer)

    def step() -> None:
        idx, targets = (tensor.contiguous().to(trainer.context.device) for tensor in trainer.train_data[next(batches)])
        _, loss = model(idx, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def tutorial_fetch(folder: Path, trainer: Trainer, text: Path) -> Step:
    """Loads a batch as the tutorial does: encodes character by character with a dictionary, and collates.

    Args:
        folder: contains the tutorial's char_dataset.py
        trainer: whose block size and batch size are used
        text: the file
    """
    tutorial, T = import_file(folder / "char_dataset.py"), trainer.train_data.block_size
    B = trainer.config.trainer.batch_size
    with suppress_stdout():
        dataset = tutorial.CharDataset(tutorial.DataConfig(path=str(text), block_size=T))
    return lambda: torch.utils.data.default_collate([dataset[int(i)] for i in torch.randint(len(dataset), (B,))])


def sample_numbers(trainer: Trainer) -> Iterator[range]:
    """The sample numbers of consecutive batches."""
    B = trainer.config.trainer.batch_size
    return (range(first, first + B) for first in itertools.count(0, B))


def fetch_batches(trainer: Trainer) -> Step:
    """Loads the next batch at each call, as the trainer does."""
    batches = sample_numbers(trainer)
    return lambda: trainer.train_data[next(batches)]


def minimal_loop(trainer: Trainer) -> Step:
    """A step with the same model, autocast, optimizer and clipping, without logs, checks or loading of batches."""
    config, precision = trainer.config.optimizer, trainer.numerics.precision
    model, dtype, device = GPT(trainer.model_config), DTYPES[precision], trainer.context.device
    model.to(device)
    optimizer = build_optimizer(model, config, dtype)
    numbers = itertools.islice(sample_numbers(trainer), 50)
    batches = itertools.cycle([[tensor.to(device) for tensor in trainer.train_data[batch]] for batch in numbers])

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
            loss = model(*next(batches))[1]
        loss.backward()
        if config.grad_norm_clip is not None:
            clip_grad_norm_(model.parameters(), config.grad_norm_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
