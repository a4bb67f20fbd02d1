"""Steps of nanoGPT with a trainer's text, model size and batch size."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from mingpt.parallel.strategy import DTYPES
from trainer import Trainer


def nanogpt_step(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Returns a step of nanoGPT in its default precision: fp32 on a CPU, and the trainer's precision on a GPU.

    On a GPU, it is compiled, which is the default of nanoGPT's train.py.

    Args:
        folder: contains nanoGPT's model.py
    """
    device = trainer.context.device
    nanogpt = runpy.run_path(str(folder / "model.py"))
    model = nanogpt["GPT"](trainer.model_config).to(device)  # the sizes have the same names
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    dtype = torch.float32
    if device.type == "cuda":
        dtype = DTYPES[trainer.numerics.precision]
        model.compile()
    batches = nanogpt_batches(trainer)

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            _, loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt_batches(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches (B, T) like `get_batch` in nanoGPT's train.py."""
    T = trainer.config.data.block_size
    file = trainer.run_dir / "train.bin"
    trainer.train_data.tokens[:].astype(np.uint16).tofile(file)
    while True:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - T, (trainer.config.trainer.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        if trainer.context.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        yield x.to(trainer.context.device, non_blocking=True), y.to(trainer.context.device, non_blocking=True)
