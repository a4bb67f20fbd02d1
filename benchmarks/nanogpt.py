"""A side of a benchmark: main.py with the model, optimizer and batches of nanoGPT.

python -m benchmarks.nanogpt FOLDER [options of main.py], with nanoGPT's model.py in FOLDER

Its precision is nanoGPT's default: fp32 on a CPU, and the configured one on a GPU, where the model is compiled.
"""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from main import process_group
from mingpt.config.parser import read_config
from mingpt.distributed.launcher import RankInfo
from mingpt.program import exit_process, run_program
from trainer import StepResult, Trainer


class NanoGPT(Trainer):
    """Steps of nanoGPT in the loop of main.py."""

    def prepare(self, folder: str) -> None:
        """Builds the model and the optimizer of nanoGPT's code in a folder."""
        device = self.context.device
        self.other: Any = runpy.run_path(f"{folder}/model.py")["GPT"](self.model.config).to(device)
        self.optimizer = self.other.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
        if device.type == "cuda":
            self.other.compile()
        self.batches = self.random_batches()

    def random_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields batches (B, T) like `get_batch` in nanoGPT's train.py."""
        T = self.config.data.block_size
        device = self.context.device
        file = self.run_dir / "train.bin"
        self.train_data.tokens[:].astype(np.uint16).tofile(file)
        while True:
            data = np.memmap(file, dtype=np.uint16, mode="r")
            ix = torch.randint(len(data) - T, (self.config.trainer.batch_size,))
            x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
            y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
            if device.type == "cuda":
                x, y = x.pin_memory(), y.pin_memory()
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def train_step(self) -> StepResult:
        x, y = next(self.batches)
        with self.strategy.autocast() if x.is_cuda else nullcontext():
            _, loss = self.other(x, y)
        loss.backward()
        norm = clip_grad_norm_(self.other.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        batch = self.next_batch()
        self.progress.step += 1
        self.progress.samples = batch.stop
        return StepResult(batch, [loss.detach()], norm, 1e-3, self.signals.signal, False)


def run(argv: Sequence[str]) -> int:
    folder, *options = argv
    config = read_config(options)
    with process_group(config, RankInfo()) as context:
        trainer = NanoGPT(config, context)
        trainer.prepare(folder)
        return trainer.train()


if __name__ == "__main__":
    exit_process(run_program(run, sys.argv[1:]))
