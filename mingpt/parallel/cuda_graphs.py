"""Steps as CUDA graphs on one GPU, for models whose kernels take less time than Python takes to launch them.

A CUDA graph is a recorded sequence of kernels with fixed addresses, launched by one call. One graph makes forward and
backward of a micro-batch, and another one the update. What changes between steps is in tensors that
keep their addresses: tokens, targets, the weight of the micro-batch, the learning rate, and gradients, which are set to
zero and not deleted. The bits are the same as without graphs, because those steps use the same tensors
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A graph repeats kernels, but not the Python code that has launched them. So some replays are compared with the same step
without graphs, and the addresses in a graph with those of the program's tensors. After a difference, training continues
without graphs.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mingpt.config.conflicts import cuda_graphs_obstacle
from mingpt.distributed.context import PendingFlags
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.parallel.strategy import MicroBatch, Strategy
from mingpt.system.torch_versions import CONTINUES_AFTER_FAILED_RECORDING, untested_with_cuda_graphs

WARM_UPS = 3  # calls before a function is recorded; they allocate state and compile
# The first two replays are compared, and the next one after these numbers of steps: a wrong address may be right at
# first, and what changes from step to step does not change between micro-batches.
CHECKED = (WARM_UPS + 1, 23)
# Without trainer.deterministic, a replay may differ from the call by ten times as much as from another replay, at least
# by this part of what the call changes in the tensor, and at most by this part of the largest change of a tensor, since
# replays also differ if an address is wrong.
TOLERANCE = (0.001, 0.05)


class CUDAGraphs(Strategy):
    """Trains on one GPU. Whether steps are recorded (trainer.cuda_graphs) does not change any bit.

    Attributes:
        obstacle: why steps are not recorded; None: they are
    """

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
        self.obstacle = obstacle or untested_with_cuda_graphs()
        if self.obstacle and cfg.cuda_graphs is True:
            raise UserError(f"trainer.cuda_graphs is true, must be auto or false, because {self.obstacle}")
        if cfg.cuda_graphs is False:
            self.obstacle = "as configured"
        use = f"none ({self.obstacle})" if self.obstacle else "CUDA graphs after the first steps (one GPU)"
        self.description["graphs"] = use
        self.buffers = [module._buffers for module in self.model.modules() if module._buffers]
        self.recorded_addresses: set[int | str] = set()
        self.recorded_numbers: list[tuple[dict[str, Any], str, float]] = []
        self.num_updates = 0
        torch.cuda.reset_peak_memory_stats()  # an earlier run in this process may have needed more
        self.recorded_backward = Recorded(self._backward, self)
        self.recorded_update = Recorded(self._update, self)

    def tensors(self) -> list[Tensor]:
        """Returns everything that a step may change."""
        tensors = [*self.parameters.values(), *self.gradients.values()]
        for state in self.local_state.values():
            tensors += state.values()
        for named in [*self.buffers, vars(self.scaler)]:
            tensors += [each for each in named.values() if isinstance(each, Tensor)]
        return tensors

    def addresses(self) -> set[int | str]:
        """Returns the addresses of all tensors, and which parameters are trained."""
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        return {*map(Tensor.data_ptr, self.tensors()), *trained}

    def record_state(self) -> None:
        """Keeps addresses and Python numbers that graphs will contain."""
        self.recorded_addresses |= self.addresses()
        owners = [*map(vars, self.model.modules()), *self.optimizer.param_groups]
        numbers = [(owner, key, value) for owner in owners for key, value in owner.items() if key != "lr"]
        self.recorded_numbers = [each for each in numbers if isinstance(each[2], int | float)]

    def check_state(self) -> None:
        """Gives up graphs if addresses or numbers in them have changed."""
        if self.obstacle is not None:
            return
        for owner, key, value in self.recorded_numbers:
            if owner.get(key) != value:
                self.give_up(f"{key} changes, from {value} to {owner.get(key)}")
                return
        if not self.recorded_addresses <= self.addresses():
            self.give_up("a parameter, a gradient, a buffer or a moment was replaced, frozen or unfrozen")

    def zero_grad(self) -> None:
        """Sets the gradients of the step before to zero. Deleting them would change their addresses."""
        self.check_state()
        gradients = list(self.gradients.values())
        if self.obstacle is not None:
            super().zero_grad()
        elif gradients:  # there are none before the first step
            torch._foreach_zero_(gradients)

    def accumulate(self, micro_batch: MicroBatch, flags: PendingFlags) -> Tensor:
        idx, targets = self.to_device(micro_batch.idx, micro_batch.targets)
        self.seed(micro_batch.first)
        inputs = idx, targets, torch.full((), micro_batch.weight(flags), device=self.device)
        if self.obstacle is None and idx.shape != self.shape:  # the end of a batch
            return self.recorded_backward.call(*inputs)
        return self.recorded_backward(*inputs)

    def _backward(self, idx: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Computes the same as `accumulate`, from what changes between micro-batches."""
        loss = self.compute_loss(self.model, idx, targets) * weight
        self.scale_loss(loss).backward()
        return loss.detach()

    def update(self, lr: float | Tensor) -> Tensor:
        if not self.is_fused:
            return super().update(lr)
        self.lr.fill_(lr)
        norm = self.recorded_update()
        self.num_updates += 1
        return norm

    def _update(self) -> Tensor:
        for group in self.optimizer.param_groups:
            group["capturable"] = torch.cuda.is_current_stream_capturing()  # AdamW requires it then, else it warns
        norm = super().update(self.lr)
        for group in self.optimizer.param_groups:
            group["capturable"] = False
        return norm

    def give_up(self, obstacle: str, log: Callable[[str], None] = logger.warning) -> None:
        """Trains without graphs from now on.

        Raises:
            UserError: trainer.cuda_graphs is true.
        """
        self.obstacle = obstacle
        self.recorded_backward.graph = self.recorded_update.graph = None
        problem = f"CUDA graphs can't be used, because {obstacle}"
        if self.config.trainer.cuda_graphs is True:
            raise UserError(f"trainer.cuda_graphs is true, but {problem}; change that, or set it to auto")
        log(f"{problem}; training continues without them")


class Recorded:
    """Calls a function, and after the first calls replays its kernels instead, as long as that gives the same.

    Args:
        function: returns a new tensor with one element
        strategy: has the tensors that the function may change in place
    """

    def __init__(self, function: Callable[..., Tensor], strategy: CUDAGraphs) -> None:
        self.function = function
        self.strategy = strategy
        # Its own, for the first calls as well: gradients are added on the stream of the first pass that is alive, and
        # PyTorch 2.12 and 2.13 free the memory of cuBLAS on a stream with any graph of the stream (pytorch#193402).
        self.stream = torch.cuda.Stream()
        self.num_calls = 0
        self.graph: Any = None
        self.checked: int | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.strategy.check_state()
        if self.strategy.obstacle is None:
            self.num_calls += 1
            if self.num_calls < WARM_UPS:
                return self.call(*inputs)
            if self.num_calls == WARM_UPS:
                return self._watch(*inputs)
            if self.graph is None:
                self._record(*inputs)
        if self.strategy.obstacle is not None:
            return self.function(*inputs)
        if self.num_calls <= WARM_UPS + 2 or self.checked != self.strategy.num_updates in CHECKED:
            return self._check(*inputs)
        return self._replay(*inputs)

    def call(self, *inputs: Tensor) -> Tensor:
        """Calls the function on the stream of the graph."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _replay(self, *inputs: Tensor) -> Tensor:
        for fixed, tensor in zip(self.inputs, inputs, strict=True):
            fixed.copy_(tensor)
        self.graph.replay()
        return self.output.clone()  # the next replay changes it

    def _watch(self, *inputs: Tensor) -> Tensor:
        """Calls the function and looks for what a recording would not survive, or comparisons would not find."""
        self.strategy.record_state()
        random_states = _cpu_random_states()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.call(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "called a synchronizing CUDA operation" in str(warning.message):
                self.strategy.give_up(f"{warning.filename}, line {warning.lineno}, waits for the GPU")
                return output
        if _cpu_random_states() != random_states:
            self.strategy.give_up("a step draws random numbers on the CPU")
        # Evaluation and short batches need activations of their own, and a comparison needs two copies of the state.
        elif self.strategy.config.trainer.cuda_graphs == "auto" and (
            3 * torch.cuda.max_memory_allocated() > torch.cuda.mem_get_info()[1]
        ):
            self.strategy.give_up("a step takes more than a third of the GPU's memory", logger.info)
        self.strategy.check_state()
        return output

    def _record(self, *inputs: Tensor) -> None:
        """Records the function's kernels, which do not run yet, and the output that each replay fills.

        Raises:
            UserError: the function can't be recorded, and PyTorch can't continue, or trainer.cuda_graphs is true.
        """
        self.inputs = _clones(inputs)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Other threads may use the GPU.
        recording = torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local")
        try:
            with kept_attributes(self.strategy.model.modules()), recording:
                self.output = self.function(*self.inputs)
            self.graph = graph
        except Exception as error:
            # After an error in the block, the end of the recording raises another one, and its stream stays current.
            torch.cuda.set_stream(stream)
            reason, *_ = str(error.__context__ or error).split("\n")
            problem = f"a step can't be recorded: {reason}"
            if not CONTINUES_AFTER_FAILED_RECORDING:
                raise UserError(f"{problem}; set trainer.cuda_graphs to false, in a new process") from error
            self.strategy.give_up(problem)

    @torch.no_grad()
    def _check(self, *inputs: Tensor) -> Tensor:
        """Replays, and compares with a call from the same state, whose result counts if they differ."""
        self.checked = self.strategy.num_updates
        state = self.strategy.tensors()
        before = _clones(state)
        random_state = torch.cuda.get_rng_state()

        def run(function: Callable[..., Tensor]) -> list[Tensor]:
            torch._foreach_copy_(state, before)
            torch.cuda.set_rng_state(random_state)
            with torch.enable_grad():
                return [function(*inputs), *state]

        noise = _differences(_clones(run(self._replay)), run(self._replay))  # of kernels that are not deterministic
        expected = _clones(run(self.call))
        found = run(self._replay)
        change = _differences(expected, [torch.zeros_like(found[0]), *before])
        smallest, largest = (0, 0) if self.strategy.config.trainer.deterministic else TOLERANCE
        if (_differences(found, expected) <= (10 * noise).clamp(smallest * change, largest * change[1:].max())).all():
            return found[0]
        torch._foreach_copy_(found, expected)
        earlier = ", and maybe earlier ones," if self.num_calls > WARM_UPS + 2 else ""  # replays without a comparison
        self.strategy.give_up(
            f"a recorded step{earlier} differs from the same step without graphs: it depends on Python code whose "
            "values change between steps, or on a tensor that is neither a parameter nor a buffer"
        )
        return found[0]


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undoes what a block assigns to attributes of modules, such as a counter."""
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for attributes, values in before:
            attributes.update(values)


def _cpu_random_states() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Returns the norm of the difference of each pair."""
    norms = [torch.dist(_finite(one), _finite(other)) for one, other in zip(found, expected, strict=True)]
    return torch.stack(norms).nan_to_num()


def _finite(tensor: Tensor) -> Tensor:
    return tensor.float().nan_to_num(0, 0, 0)  # in fp16, gradients overflow in the first steps
