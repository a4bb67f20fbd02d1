"""Steps as CUDA graphs on one GPU, for models whose kernels take less time than Python takes to launch them.

A CUDA graph is a recorded sequence of kernels with fixed addresses, launched by one call. One graph makes forward and
backward of a micro-batch, and another one the update. What changes between steps is in tensors that keep their
addresses: tokens, targets, the weight of the micro-batch, the learning rate, and gradients, which are set to zero and
not deleted (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A graph repeats kernels, but not the Python code that has launched them: trainer.cuda_graphs is for models and
optimizers whose Python code does the same in each step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mingpt.distributed.context import PendingNumbers
from mingpt.errors import UserError
from mingpt.parallel.strategy import MicroBatch, Strategy

WARM_UPS = 3  # calls before a function is recorded; they allocate state and compile


class CUDAGraphs(Strategy):
    """Trains on one GPU, and replays recorded steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if torch.__version__ < "2.11":  # it records copies from memory that is soon used for other data
            raise UserError(f"trainer.cuda_graphs is true, which needs PyTorch 2.11 or newer, not {torch.__version__}")
        cfg = self.config.trainer
        self.shape = (min(cfg.micro_batch_size or cfg.batch_size, cfg.batch_size), self.config.data.block_size)
        self.lr = torch.zeros((), device=self.device)
        self.description["graphs"] = f"CUDA graphs after {WARM_UPS} calls"
        self.recorded_backward = Recorded(self._backward)
        self.recorded_update = Recorded(self._update)

    def zero_grad(self) -> None:
        """Sets the gradients of the step before to zero. Deleting them would change their addresses."""
        if gradients := list(self.gradients.values()):  # there are none before the first step
            torch._foreach_zero_(gradients)

    def accumulate(self, micro_batch: MicroBatch, target_counts: PendingNumbers) -> Tensor:
        idx, targets = self.to_device(micro_batch.idx, micro_batch.targets)
        self.seed(micro_batch.first)
        inputs = idx, targets, torch.full((), micro_batch.weight(target_counts), device=self.device)
        if idx.shape != self.shape:  # the end of a batch
            return self.recorded_backward.call(*inputs)
        return self.recorded_backward(*inputs)

    def _backward(self, idx: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Computes the same as `accumulate`, from what changes between micro-batches."""
        loss = self.compute_loss(self.model, idx, targets) * weight
        self.scale_loss(loss).backward()
        return loss.detach()

    def update(self, lr: float | Tensor) -> Tensor:
        self.lr.fill_(lr)
        return self.recorded_update()

    def _update(self) -> Tensor:
        for group in self.optimizer.param_groups:
            group["capturable"] = torch.cuda.is_current_stream_capturing()  # AdamW requires it then, else it warns
        norm = super().update(self.lr)
        for group in self.optimizer.param_groups:
            group["capturable"] = False
        return norm


class Recorded:
    """Calls a function, and after the first calls replays its kernels instead.

    Args:
        function: returns a new tensor
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        # Its own, for the first calls as well: gradients are added on the stream of the first pass that is alive, and
        # PyTorch 2.12 and 2.13 free the memory of cuBLAS on a stream with any graph of the stream (pytorch#193402).
        self.stream = torch.cuda.Stream()
        self.num_calls = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= WARM_UPS:
            return self.call(*inputs)
        if self.num_calls == WARM_UPS + 1:
            self._record(*inputs)
        for fixed, tensor in zip(self.inputs, inputs, strict=True):
            fixed.copy_(tensor)
        self.graph.replay()
        return self.output.clone()  # the next replay changes it

    def call(self, *inputs: Tensor) -> Tensor:
        """Calls the function on the stream of the graph."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _record(self, *inputs: Tensor) -> None:
        """Records the function's kernels, which do not run yet, and the output that each replay fills."""
        self.inputs = [tensor.clone() for tensor in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.output = self.function(*self.inputs)
