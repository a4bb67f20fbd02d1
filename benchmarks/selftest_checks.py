"""The checks of the self-test. The first line of a check's docstring is its title.

All ranks run a check together and make the same collectives, so what only one of them has found is raised at the end. A
check returns what it found, and raises CheckFailedError if that is wrong, or SkippedError.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import collect_env
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import ROOT, SMALL, Bench, Shape, SkippedError, machine_name, max_relative_error, to_options
from mingpt.config import GPTConfig
from mingpt.distributed.collectives import DistributedContext
from mingpt.distributed.launch_environment import RankInfo
from mingpt.errors import UserError
from mingpt.hardware.device import check_compiler, device_kind, has_bf16
from mingpt.parallel.memory import MemoryUsage, estimate_memory, format_bytes, measure_memory
from mingpt.snapshot.storage import fingerprint, load_snapshot
from model import GPT
from trainer import Trainer

Overrides = dict[str, Any]  # options of main.py, by key

STEPS = 20  # of a loss curve
FEW_STEPS = 8  # where bits are compared
FP16_SCALE = 2.0**10  # at GradScaler's own first scale, steps may overflow and be skipped
# Largest relative error of a loss and of a gradient norm, beside fp32 on a CPU. Errors measured on CPUs: 2e-7 in fp32;
# 3e-4 and 2e-3 in bf16, which has three bits fewer than fp16.
TOLERANCES = {"fp32": (1e-3, 1e-2), "bf16": (1e-2, 1e-1), "fp16": (1e-2, 1e-1)}

LAST_STEP = 40  # of the run that faults interrupt
FAULT_LIMIT = 180  # seconds after which its ranks are killed if they have not ended
LAUNCHER_VARIABLES = re.compile("RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|OMPI|PMI)_")

# Dense bf16 FLOP/s with accumulation in fp32, by a word of torch.cuda.get_device_name. NVIDIA's data sheets; for
# GeForce its white papers. The first that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
GPT2_VOCAB_SIZE = 50_257
# The default and the files in configs/, as far as they matter for speed. Each rank has the whole batch, at 124M
# parameters (with GPT-2's vocabulary) a tenth of it.
COLUMNS: dict[str, tuple[Shape, Overrides]] = {
    "default": (SMALL, {}),
    "10.7M": (
        Shape(6, 6, 384, 256, 64),
        {"model.architecture": "gpt2", "model.dropout": 0.2, "optimizer.name": "adamw"},
    ),
    "124M": (
        Shape(12, 12, 768, 1024, 48),
        {"model.architecture": "gpt2", "optimizer.name": "adamw", "trainer.micro_batch_size": 12},
    ),
}


class CheckFailedError(Exception):
    """A check found something wrong; the message says what."""


class SelfTest(Bench):
    """What all checks of a self-test share.

    Attributes:
        faults: the names of those injected so far
    """

    @cached_property
    def faults(self) -> list[str]:
        return []

    @cached_property
    def fault_dir(self) -> str:
        """The run folder of the run that faults interrupt."""
        return tempfile.mkdtemp(dir=self.folder)

    @cached_property
    def text(self) -> Path:
        """100,000 characters that a model learns within some steps, and the defaults of all keys beside it."""
        words = ["anna", "bob", "does", "eat", "figs", "\n"]
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text(" ".join(np.random.default_rng(0).choice(words, 25_000))[:100_000])
        file.with_suffix(".yaml").touch()
        return file

    @property
    def on_gpu(self) -> bool:
        return self.context.device.type == "cuda"

    def run_options(self, options: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> list[str]:
        """As in Bench, with the default of all other keys, whatever gpt2_train_cfg.yaml has."""
        return ["--config", str(self.text.with_suffix(".yaml")), *super().run_options(options, overrides)]


def share_groups(context: DistributedContext) -> None:
    """Makes trainers with equal process groups share them, since NCCL's buffers for each take memory on the GPU."""
    subgroup = context.subgroup
    made: dict[Any, DistributedContext] = {}

    def subgroup_once(groups: Iterable[Sequence[int]], description: str | None = None) -> DistributedContext:
        ranks = tuple(tuple(group) for group in groups)
        if (ranks, description) not in made:
            made[ranks, description] = subgroup(ranks, description)
        return made[ranks, description]

    context.subgroup = subgroup_once  # type: ignore[method-assign]


# Runs that checks compare


def tiny_options(world_size: int) -> list[str]:
    """Options of main.py for a model of 0.1M parameters, with two micro-batches per rank or more."""
    values = {
        "model.dropout": 0.1,
        "optimizer.warmup_steps": 4,
        "trainer.max_steps": 40,
        "trainer.micro_batch_size": 2,
        "trainer.precision": "fp32",
        "trainer.threads": 1,
        "distributed.timeout_seconds": 120,
    }
    return [*Shape(2, 2, 64, 32, 4 * max(2, world_size)).options, *to_options(values)]


def strategy_options(test: SelfTest) -> dict[str, Overrides]:
    """The options that select each strategy that this number of ranks allows."""
    found: dict[str, Overrides] = {name: {"distributed.strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp")}
    found["tree"] = {"distributed.reduction": "tree"}
    if test.on_gpu:  # which the tree requires there
        found["tree"]["trainer.deterministic"] = "true"
    if test.context.world_size % 2 == 0:
        found["2 stages"] = {"distributed.pipeline_stages": 2}
    return found


def require_gpu(test: SelfTest) -> None:
    if not test.on_gpu:
        raise SkippedError("it needs a CUDA GPU")


@contextmanager
def open_trainer(
    test: SelfTest,
    overrides: Mapping[str, Any],
    options: Sequence[str] | None = None,
    context: DistributedContext | None = None,
    warmup_steps: int = 0,
) -> Iterator[Trainer]:
    """A trainer as `Bench.build_trainer` makes it, by default with `tiny_options`; exit releases its process groups."""
    gc.collect()  # an earlier trainer holds memory
    if test.on_gpu:
        torch.cuda.empty_cache()
    if options is None:
        options = tiny_options(test.context.world_size)
    callbacks = test.context.exit_callbacks
    before = len(callbacks)
    try:
        trainer = test.build_trainer(options, overrides, context, warmup_steps)
        yield trainer
        trainer.snapshots.writer.wait()
    finally:
        while len(callbacks) > before:
            callbacks.pop()()
        torch.use_deterministic_algorithms(False)


def full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters and of their optimizer state, on the CPU of each rank."""
    copies = {}
    for name, weight, state in trainer.strategy.iter_full_state():
        copies[name] = {key: tensor.cpu().clone() for key, tensor in {"": weight, **state}.items()}
    return copies


class Curve(NamedTuple):
    """Losses and gradient norms of a run's steps, and a digest of its state at the end."""

    losses: list[float]
    norms: list[float]
    digest: str


def train_curve(
    test: SelfTest, overrides: Mapping[str, Any], steps: int, context: DistributedContext | None = None
) -> Curve:
    """Trains a run of its own, or one that resumes in `trainer.run_dir`, and saves its last step there."""
    losses = []
    norms = []
    with open_trainer(test, overrides, context=context) as trainer:
        if trainer.strategy.scaler.is_enabled():
            trainer.strategy.scaler.scale(torch.zeros((), device=trainer.context.device))  # creates the scale
            trainer.strategy.scaler.update(FP16_SCALE)
        for _ in range(steps):
            result = trainer.train_step()
            losses.append(trainer.strategy.mean_loss(result.losses).item())
            norms.append(result.grad_norm.item())
        trainer.save_snapshot(None)
        return Curve(losses, norms, fingerprint(full_state(trainer)))


# The machine


def machine(test: SelfTest) -> str:
    """GPUs, libraries, memory, compiler and attention."""
    names = test.context.all_gather_object(machine_name(test.context.device))
    facts = []
    for name in dict.fromkeys(names):
        number = names.count(name)
        facts.append(f"{number} rank{'s' if number > 1 else ''} on {name}")
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if driver and torch.version.cuda and not torch.cuda.is_available() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise CheckFailedError(f"there is a GPU with driver {driver}, but PyTorch {torch.__version__} can't use it")
    if driver and not torch.version.cuda:
        facts.append("there is a GPU, but this build of PyTorch is for CPUs")
    if test.on_gpu:
        free, total = torch.cuda.mem_get_info(test.context.device)
        nccl = "none"
        if dist.is_nccl_available():
            nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
        facts += [f"driver {driver}", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
        facts += [f"NCCL {nccl}", f"{format_bytes(free)} of {format_bytes(total)} free"]
    try:
        check_compiler(test.context.device)
        facts.append("compiler found")
    except UserError as error:
        facts.append(str(error).removeprefix("trainer.compile is true, but "))
    return ", ".join([*facts, f"attention: {_attention(test)}"])


class _Operations(TorchDispatchMode):
    """Records the names of the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _attention(test: SelfTest) -> str:
    """The operations of attention in a forward pass of the default configuration, in its precision."""
    options = replace(SMALL, B=max(SMALL.B, test.context.world_size)).options
    with open_trainer(test, {}, options) as trainer, _Operations() as operations:
        trainer.strategy.compute_loss(trainer.strategy.full_model, *trainer.train_data[range(2)])
    return ", ".join(sorted(name for name in operations.names if "dot_product" in name)) or "bmm"


# Results and bits


def precisions(test: SelfTest) -> list[str]:
    found = ["fp32"]
    if not test.on_gpu or has_bf16(test.context.device)[0]:
        found.append("bf16")
    if test.on_gpu:
        found.append("fp16")
    return found


def losses(test: SelfTest) -> str:
    """Losses of each strategy and precision, beside fp32 on a CPU."""
    overrides: Overrides = {"model.dropout": 0}
    reference = train_curve(test, overrides, STEPS, DistributedContext(RankInfo()))
    found = []
    wrong = []
    for precision in precisions(test):
        loss_limit, norm_limit = TOLERANCES[precision]
        loss_errors = []
        norm_errors = []
        for name, strategy in strategy_options(test).items():
            if name == "tree" and precision == "fp16":
                continue
            curve = train_curve(test, overrides | strategy | {"trainer.precision": precision}, STEPS)
            loss_error = max_relative_error(curve.losses, reference.losses)
            norm_error = max_relative_error(curve.norms, reference.norms)
            loss_errors.append(loss_error)
            norm_errors.append(norm_error)
            if not loss_error <= loss_limit:  # also if it is NaN
                wrong.append(f"{name}'s losses in {precision} differ by {loss_error:.2g} (allowed {loss_limit:g})")
            if not norm_error <= norm_limit:
                wrong.append(
                    f"{name}'s gradient norms in {precision} differ by {norm_error:.2g} (allowed {norm_limit:g})"
                )
        found.append(
            f"{precision}: losses within {max(loss_errors):.1g} (allowed {loss_limit:g}), "
            f"gradient norms within {max(norm_errors):.1g} (allowed {norm_limit:g})"
        )
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    return f"{', '.join(strategy_options(test))}: {'; '.join(found)}"


def resume(test: SelfTest) -> str:
    """An interrupted run that resumes has the bits of a whole one."""
    names = strategy_options(test)
    wrong = []
    for name, strategy in names.items():
        overrides = strategy | {"trainer.deterministic": "true"}
        whole = train_curve(test, overrides, FEW_STEPS)
        overrides["trainer.run_dir"] = tempfile.mkdtemp(dir=test.folder)
        first = train_curve(test, overrides, FEW_STEPS // 2)
        second = train_curve(test, overrides, FEW_STEPS // 2)
        resumed = Curve(first.losses + second.losses, first.norms + second.norms, second.digest)
        if resumed == whole:
            continue
        step = FEW_STEPS
        for number, (loss, expected) in enumerate(zip(resumed.losses, whole.losses, strict=True), start=1):
            if loss != expected:
                step = number
                break
        wrong.append(f"{name} from step {step} on")
    if wrong:
        raise CheckFailedError(f"other bits with {'; '.join(wrong)}; it was resumed after step {FEW_STEPS // 2}")
    return f"{', '.join(names)}: the same bits after {FEW_STEPS} steps"


def tree(test: SelfTest) -> str:
    """reduction: tree has the same bits on any number of ranks."""
    context = test.context
    overrides = strategy_options(test)["tree"]
    if context.world_size == 1:
        raise SkippedError("there is one rank: start it with torchrun --nproc_per_node=N")
    curves = {}
    for ranks in range(1, context.world_size + 1):
        groups = [range(ranks), range(ranks, context.world_size)]
        group = context.subgroup([group for group in groups if group])
        if context.rank < ranks:
            curves[ranks] = train_curve(test, overrides, FEW_STEPS, group)
        context.all_gather_object(None)  # the others wait
    wrong = [str(ranks) for ranks, curve in curves.items() if curve != curves[context.world_size]]
    if wrong:
        raise CheckFailedError(f"other bits on {', '.join(wrong)} ranks than on {context.world_size}")
    return f"the same bits on 1 to {context.world_size} ranks after {FEW_STEPS} steps"


def snapshot(test: SelfTest) -> str:
    """A snapshot written during steps is the state at its own."""
    names = strategy_options(test)
    wrong = []
    for name, overrides in names.items():
        with open_trainer(test, overrides, warmup_steps=3) as trainer:
            expected = full_state(trainer)
            step = trainer.step
            storage = trainer.snapshots.storage
            write = storage.write
            goes_on = threading.Event()

            def write_later(*args: Any, write: Any = write, goes_on: Any = goes_on) -> str:
                goes_on.wait(60)
                return write(*args)

            storage.write = write_later  # type: ignore[assignment, method-assign]
            trainer.save_snapshot(None)
            for _ in range(3):
                trainer.train_step()
            goes_on.set()
            trainer.snapshots.writer.wait()
            if test.context.rank in trainer.snapshots.writer_ranks:
                saved = load_snapshot(storage.file(step))
                found = {key: {"": weight, **saved["optimizer"][key]} for key, weight in saved["model"].items()}
                if fingerprint(found) != fingerprint(expected):
                    wrong.append(name)
    if wrong:
        raise CheckFailedError(f"the file has other bits than the state at its step with {', '.join(wrong)}")
    return f"{', '.join(names)}: the file has the bits of a blocking copy"


# Faults. Rank 0 makes these checks alone, with ranks of its own under torchrun. All interrupt the same run, which each
# start resumes.


def kill(test: SelfTest) -> str:
    """kill -9 of a rank in a step: the others name it."""
    return _interrupt(test, "kill")


def oom(test: SelfTest) -> str:
    """A rank runs out of memory: it says so, others name it."""
    return _interrupt(test, "oom", "error: out of memory in training")


def stop(test: SelfTest) -> str:
    """SIGSTOP of a rank: the others name it after a timeout."""
    return _interrupt(test, "stop")


def restart(test: SelfTest) -> str:
    """The run that these faults interrupted resumes and ends."""
    if test.context.rank:
        return ""
    if not test.faults:
        raise SkippedError("no fault came before it: name one of kill, oom and stop too")
    outcome = _start_ranks(test, "none")
    resumed = re.search(r"resuming from \S*step_(\d+)\.pt", outcome.output)
    if outcome.status or not resumed:
        raise CheckFailedError(f"it did not resume, or not end: {_last_line(outcome)}")
    return f"resumed from step {int(resumed[1])} after {', '.join(test.faults)}, and ended at step {LAST_STEP}"


class Outcome(NamedTuple):
    """What ranks with a fault have done.

    Args:
        status: exit status of torchrun
        output: stdout and stderr of all ranks
        message: the first message in which another rank names the last one, or None
        seconds: from the fault to that message
    """

    status: int
    output: str
    message: str | None
    seconds: float


def _interrupt(test: SelfTest, fault: str, own_message: str = "") -> str:
    if test.context.rank:
        return ""
    outcome = _start_ranks(test, fault)
    if test.faults and "resuming from" not in outcome.output:
        raise CheckFailedError(f"the run did not resume after {test.faults[-1]}: {_last_line(outcome)}")
    test.faults.append(fault)
    if outcome.message is None:
        raise CheckFailedError(f"no rank named rank {_number_of_ranks(test) - 1}: {_last_line(outcome)}")
    if own_message not in outcome.output:
        raise CheckFailedError(f"the rank itself did not report {own_message!r}: {_last_line(outcome)}")
    found = f"after {outcome.seconds:.1f} s: {shorten(outcome.message, 150)}"
    if test.on_gpu and not _has_gpu_for_each(test):
        found = f"with gloo, as there are fewer GPUs than ranks, {found}"
    return found


def _number_of_ranks(test: SelfTest) -> int:
    return max(2, test.context.local_world_size)


def _has_gpu_for_each(test: SelfTest) -> bool:
    return test.on_gpu and torch.cuda.device_count() >= _number_of_ranks(test)


def _fault_options(test: SelfTest) -> list[str]:
    """Options of main.py; on GPUs, with gloo if there is none for each rank."""
    has_gpus = _has_gpu_for_each(test)
    overrides: Overrides = {
        "trainer.run_dir": test.fault_dir,
        "trainer.micro_batch_size": "null",
        "trainer.max_steps": LAST_STEP,
        "trainer.log_every": 1,
        "trainer.eval_every": LAST_STEP,
        "trainer.sample_every": "null",
        "trainer.save_every": 2,
        "distributed.backend": "nccl" if has_gpus else "gloo",
        "distributed.timeout_seconds": 20 if has_gpus else 8,
    }
    return test.run_options(tiny_options(_number_of_ranks(test)), overrides)


def _last_line(outcome: Outcome) -> str:
    """Why the ranks have ended, as far as a line can say it."""
    lines = outcome.output.splitlines()
    errors = [line for line in lines if "rror: " in line]
    return f"torchrun's exit status is {outcome.status}; {(errors or lines or ['no output'])[-1]}"


def _start_ranks(test: SelfTest, fault: str) -> Outcome:
    """Starts main.py with a fault on ranks of its own, and waits until they have ended."""
    folder = Path(tempfile.mkdtemp(dir=test.folder))
    ranks = _number_of_ranks(test)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "benchmarks.fault_injection", fault, str(folder), *_fault_options(test)]
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env["TMPDIR"] = str(test.folder)  # where torchrun leaves a folder if it is killed
    output = ""
    message = None
    named_at = 0.0
    # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the others.
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        timer = threading.Timer(FAULT_LIMIT, _kill_all, (process, folder))
        timer.start()
        try:
            for line in process.stdout or ():
                output += line
                if message is None and f"error: rank {ranks - 1} (" in line:
                    named_at = time.time()
                    message = line.partition("error: ")[2].partition(";")[0].strip()
                    _kill(folder / f"pid-{ranks - 1}")  # torchrun would wait 30 seconds for one that is stopped
            process.wait()
        finally:
            timer.cancel()
            _kill_all(process, folder)
    struck = folder / "struck"
    if fault != "none" and not struck.exists():
        del test.fault_dir  # that run may have ended
        test.faults.clear()
        outcome = Outcome(process.returncode, output, None, 0.0)
        raise CheckFailedError(f"the ranks ended before the fault: {_last_line(outcome)}")
    seconds = 0.0
    if message is not None and struck.exists():
        seconds = named_at - float(struck.read_text())
    return Outcome(process.returncode, output, message, seconds)


def _kill_all(process: subprocess.Popen[str], folder: Path) -> None:
    process.kill()
    for file in folder.glob("pid-*"):
        _kill(file)


def _kill(pid_file: Path) -> None:
    with suppress(OSError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


# Memory and speed


def memory(test: SelfTest) -> str:
    """Memory per rank, estimated and measured."""
    found = []
    wrong = []
    for name, overrides in strategy_options(test).items():
        estimate, usage, peak = _measure_memory(test, overrides)
        kept = estimate.total - estimate.unsharded
        result = f"{name} {kept / 2**20:.1f}/{usage.total / 2**20:.1f}"
        if test.on_gpu:
            result += f" (peak with activations {peak / 2**20:.1f})"
        found.append(result)
        if abs(usage.total - kept) > 0.1 * kept:
            wrong.append(result)
    if wrong:
        raise CheckFailedError(f"MiB estimated/measured differ: {', '.join(wrong)}")
    return f"MiB estimated/measured: {', '.join(found)}"


def _measure_memory(test: SelfTest, overrides: Overrides) -> tuple[MemoryUsage, MemoryUsage, int]:
    """The estimate, what the rank that has most holds between steps, and the peak of its allocator in bytes."""
    gc.collect()
    before = 0
    if test.on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    options = tiny_options(test.context.world_size)
    if test.on_gpu:  # where a tiny model takes less than the workspaces of libraries
        options += ["--model.n_layer", "8", "--model.n_embd", "512", "--data.block_size", "256"]
    with open_trainer(test, overrides, options, warmup_steps=3) as trainer:
        peak = torch.cuda.max_memory_allocated() - before if test.on_gpu else 0
        model = meta_model(trainer.model_config)
        estimate = estimate_memory(trainer.config, model, test.context.world_size, trainer.numerics.precision)
        measured = test.context.all_gather_object(asdict(measure_memory(trainer.strategy)))
        usages = [MemoryUsage(**values) for values in measured]
        peaks = test.context.all_gather_object(peak)
        return estimate, max(usages, key=lambda usage: usage.total), max(peaks)


def waits(test: SelfTest) -> str:
    """No step waits for the GPU (cuda.set_sync_debug_mode)."""
    require_gpu(test)
    found = {}
    for name, strategy in strategy_options(test).items():
        for precision in precisions(test):
            if name == "tree" and precision == "fp16":
                continue
            places = _waiting_places(test, strategy | {"trainer.precision": precision})
            if places:
                found[f"{name} in {precision}"] = places
    if found:
        raise CheckFailedError("; ".join(f"{case}: {', '.join(places)}" for case, places in found.items()))
    return f"no step of {', '.join(strategy_options(test))} in {', '.join(precisions(test))}"


def _waiting_places(test: SelfTest, overrides: Overrides) -> list[str]:
    """The lines that wait for the GPU in three steps."""
    # A warning, unlike an error, leaves the ranks in step, and shows all places.
    with open_trainer(test, overrides, warmup_steps=3) as trainer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(3):
                trainer.train_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = set()
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            places.add(f"{warning.filename}:{warning.lineno}")
    return sorted(places)


def speed(test: SelfTest) -> str:
    """Tokens per second and MFU of three models.

    MFU: model FLOP utilization, the operations of a step that count in flops_per_step, in those of the GPU's peak.
    """
    require_gpu(test)
    found = []
    for name, (shape, overrides) in COLUMNS.items():
        text = _gpt2_text(test) if name == "124M" else {}
        options = replace(shape, B=shape.B * test.context.world_size).options
        try:
            for compiled in ("false", "true"):
                torch.compiler.reset()
                with open_trainer(test, overrides | text | {"trainer.compile": compiled}, options) as trainer:
                    label = f"{name} compiled" if compiled == "true" else name
                    found.append(f"{label} {_measure_speed(test, trainer)}")
        except UserError as error:
            found.append(f"{name}: {error}")
    return "; ".join(found)


def _gpt2_text(test: SelfTest) -> Overrides:
    """A text with as many different characters as GPT-2 has tokens."""
    file = test.folder / f"gpt2-{test.context.rank}.txt"
    alphabet = range(0x20000, 0x20000 + GPT2_VOCAB_SIZE)
    drawn = np.random.default_rng(0).choice(alphabet, 2 * 10**6).tolist()
    file.write_text("".join(chr(code) for code in [*alphabet, *drawn]), encoding="utf-8")
    return {"data.path": file}


def peak_flops(name: str) -> float | None:
    """The peak in PEAK_FLOPS of a GPU with this name."""
    for key, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{key}\b", name):
            return flops
    return None


def _measure_speed(test: SelfTest, trainer: Trainer) -> str:
    test.time_calls(trainer.train_step, 3)  # compiles
    times = test.context.broadcast_object(max(3, round(2 / test.time_calls(trainer.train_step))))
    seconds = test.time_calls(trainer.train_step, times) / times
    batch_size = trainer.config.trainer.batch_size
    precision = trainer.numerics.precision
    text = f"{batch_size * trainer.train_data.block_size / seconds:,.0f} tokens/s in {precision}"
    peak = peak_flops(device_kind(test.context.device))
    if peak is None or precision != "bf16":
        return text
    mfu = flops_per_step(trainer.model_config, batch_size) / seconds / (peak * test.context.world_size)
    return f"{text} (MFU {mfu:.1%})"


def meta_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def flops_per_step(config: GPTConfig, batch_size: int) -> int:
    """Floating-point operations of forward and backward.

    They equal the usual formula: 6 per token and weight in a matrix product, and 12 n_layer n_embd T per token for
    attention, whose masked half is counted too (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    model = meta_model(config)
    idx = torch.zeros(1, config.block_size, dtype=torch.long, device="meta")
    # Fused attention kernels would count the scores that backward recomputes, too.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        torch.autograd.grad(loss, list(model.parameters()))
    return batch_size * counter.get_total_flops()
