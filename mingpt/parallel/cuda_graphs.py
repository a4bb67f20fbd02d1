"""Steps as CUDA graphs on one GPU, for models whose kernels take less time than Python takes to launch them.

A CUDA graph is a recorded sequence of kernels with fixed addresses, launched by one call. One graph makes forward and
backward of a micro-batch, and another one the update. What changes between steps is in tensors that
keep their addresses: tokens, targets, the weight of the micro-batch, the learning rate, and gradients, which are set to
zero and not deleted. The bits are the same as without graphs, because those steps use the same tensors
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.config.conflicts import cuda_graphs_obstacle
from mingpt.distributed.context import PendingFlags
from mingpt.errors import UserError, is_oom_error
from mingpt.monitoring.logging import logger
from mingpt.parallel.strategy import MicroBatch, Strategy

WARM_UPS = 3  # calls before a function is recorded; they allocate state and compile


class CUDAGraphs(Strategy):
    """Trains on one GPU. Whether steps are recorded (trainer.cuda_graphs) does not change any bit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        cfg = self.config.trainer
        self.shape = (min(cfg.micro_batch_size or cfg.batch_size, cfg.batch_size), self.config.data.block_size)
        self.lr = torch.zeros((), device=self.device)
        obstacle = cuda_graphs_obstacle(self.config, self.context.world_size, self.context.device.type)
        # Others would wait for a learning rate on the GPU in each step.
        self.is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        if not self.is_fused:
            obstacle = f"the optimizer, {type(self.optimizer).__name__}, is not fused"
        if obstacle and cfg.cuda_graphs is True:
            raise UserError(f"trainer.cuda_graphs is true, must be auto or false, because {obstacle}")
        if cfg.cuda_graphs is False:
            obstacle = "as configured"
        self.description["graphs"] = f"none ({obstacle})" if obstacle else "CUDA graphs after the first steps (one GPU)"
        stream = torch.cuda.Stream()
        buffers = [(module, name) for module in self.model.modules() for name, _ in module.named_buffers(recurse=False)]
        self.recorded_backward = Recorded(self._backward, buffers, stream, cfg.cuda_graphs, obstacle)
        self.recorded_update = Recorded(self._update, [], stream, cfg.cuda_graphs, obstacle)

    def zero_grad(self) -> None:
        """Sets the gradients of the step before to zero. Deleting them would change their addresses."""
        if gradients := list(self.gradients.values()):  # there are none before the first step
            torch._foreach_zero_(gradients)

    def accumulate(self, micro_batch: MicroBatch, flags: PendingFlags) -> Tensor:
        if micro_batch.idx.shape != self.shape:  # the end of a batch
            return super().accumulate(micro_batch, flags)
        idx, targets = self.to_device(micro_batch.idx, micro_batch.targets)
        self.seed(micro_batch.first)
        return self.recorded_backward(idx, targets, torch.full((), micro_batch.weight(flags), device=self.device))

    def _backward(self, idx: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Computes the same as `accumulate`, from what changes between micro-batches."""
        loss = self.compute_loss(self.model, idx, targets) * weight
        self.scale_loss(loss).backward()
        return loss.detach()

    def update(self, lr: float | Tensor) -> Tensor:
        if not self.is_fused:
            return super().update(lr)
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
        function: returns a new tensor, and does not depend on Python objects that change between calls
        buffers: module and name of each buffer that the function may change in place
        stream: runs the first calls, as required before a recording
        setting: trainer.cuda_graphs
        obstacle: why the function is not recorded; None: it is
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        buffers: list[tuple[nn.Module, str]],
        stream: torch.cuda.Stream,
        setting: str | bool,
        obstacle: str | None,
    ) -> None:
        self.function = function
        self.buffers = buffers
        self.stream = stream
        self.setting = setting
        self.obstacle = obstacle
        self.num_warm_ups = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.obstacle is not None:
            return self.function(*inputs)
        if self.num_warm_ups < WARM_UPS:
            self.num_warm_ups += 1
            return self._warm_up(*inputs)
        if self.graph is None:
            self.inputs = [tensor.clone() for tensor in inputs]
            self.graph, self.output = self._record()
        for fixed, tensor in zip(self.inputs, inputs, strict=True):
            fixed.copy_(tensor)
        self.graph.replay()
        return self.output.clone()  # the next replay changes it

    def _warm_up(self, *inputs: Tensor) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs) if self.num_warm_ups < WARM_UPS else self._watched(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _watched(self, *inputs: Tensor) -> Tensor:
        """Calls the function and looks for obstacles, because PyTorch can't continue after a recording that fails.

        Source: CUDAGraph::reset in PyTorch's CUDAGraph.cpp.

        Raises:
            UserError: the function can't be recorded, and trainer.cuda_graphs is true.
        """
        random_states = torch.get_rng_state(), random.getstate()
        buffers = [getattr(module, name) for module, name in self.buffers]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.function(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if not torch.equal(torch.get_rng_state(), random_states[0]) or random.getstate() != random_states[1]:
            self.obstacle = "it draws random numbers on the CPU"
        for (module, name), buffer in zip(self.buffers, buffers, strict=True):
            if getattr(module, name) is not buffer:
                self.obstacle = f"{type(module).__name__} replaces its buffer {name}"
        for warning in caught:
            if "called a synchronizing CUDA operation" in str(warning.message):
                self.obstacle = f"{warning.filename}, line {warning.lineno}, waits for the GPU"
        if self.obstacle is not None:
            problem = f"a step can't be recorded as CUDA graphs, because {self.obstacle}"
            if self.setting is True:
                raise UserError(f"trainer.cuda_graphs is true, but {problem}; change that, or set it to auto")
            logger.warning(f"{problem}; it runs without graphs, with the same result")
        return output

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Returns a graph of the function's kernels, which do not run yet, and the output that each replay fills.

        Raises:
            UserError: the function can't be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU
                output = self.function(*self.inputs)
        except Exception as error:
            if is_oom_error(error):
                raise
            # After an error in the block, the end of the recording raises another one.
            reason, *_ = str(error.__context__ or error).split("\n")
            problem = f"a step can't be recorded as CUDA graphs: {reason}"
            raise UserError(f"{problem}; set trainer.cuda_graphs to false") from error
        torch.cuda.set_rng_state(random_state)
        return graph, output
