"""How long will a step take on so many GPUs, and which strategy should it be? Arithmetic, on published figures.

    python scaling.py
    python scaling.py --ranks 16 32 --model.n_layer 48 --model.n_head 25 --model.n_embd 1600 --data.block_size 1024

Without options of main.py, models of GPT-2's and GPT-3's papers. No GPU was used: what the arithmetic is worth shows
where it is measured, on CPUs (growth.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mingpt.config import Config, GPTConfig
from mingpt.config_parser import build_parser, config_options, read_config
from mingpt.optimizer import param_groups
from mingpt.parallel.memory import estimate_memory, meta_model
from mingpt.utils.errors import UserError
from mingpt.utils.progress import run_script

VOCABULARY = 50_257  # GPT-2's; characters would leave less to the embeddings
NUMBERS = (8, 64, 1024)  # of GPUs
TOKENS = 2**21  # in a step, about what GPT-3's paper takes for its models of 7 billion parameters
FULL = 0.9  # of a GPU's memory: the rest is for CUDA, NCCL and fragments


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes, by its data sheets.

    Args:
        name: what it is
        flops: dense bf16 operations a second of a GPU
        share: of them that a step's products reach; assumed
        elementwise: seconds for each number of a block's input, beside its products; part of `share` for GPUs
        block: seconds for each block, whatever the batch; GPUs work meanwhile
        step: seconds for each step
        hides: share of backward's time in which ranks can send, at no cost to it
        memory: bytes of a GPU
        reads: bytes a second that a GPU reads from or writes to its memory
        host: bytes a second from a GPU to its host
        inside: bytes a second that a GPU sends to others of its node
        between: bytes a second that a node sends to others
        gpus: of a node
        latency: seconds for a message, however short
    """

    name: str
    flops: float = 989e12
    share: float = 0.5
    elementwise: float = 0.0
    block: float = 0.0
    step: float = 0.0
    hides: float = 1.0
    memory: float = 141e9
    reads: float = 4.8e12
    host: float = 64e9
    inside: float = 450e9
    between: float = 400e9
    gpus: int = 8
    latency: float = 10e-6

    def passes(self, number: float, ranks: int) -> float:
        """Seconds in which a ring of ranks sends so many bytes once around: all-gather or reduce-scatter.

        A node's network cards carry a ring each, so that a node sends each byte once, whatever the number of its GPUs.
        """
        if ranks == 1:
            return 0.0
        rate = self.inside if ranks <= self.gpus else min(self.inside, self.between)
        return number * (ranks - 1) / ranks / rate + self.latency * math.log2(ranks)


# NVIDIA's data sheets: H200 SXM (989 TFLOP/s dense bf16, 141 GB at 4.8 TB/s, NVLink 900 GB/s both directions together,
# PCIe 5), and DGX H200 (eight ConnectX-7 of 400 Gb/s for eight GPUs).
MACHINES = (
    Machine("DGX H200, 8 x 400 Gb/s InfiniBand a node"),
    Machine("the same GPUs, 100 Gb/s Ethernet a node", between=12.5e9, latency=50e-6),
)
SHAPES = {
    "124M": GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=VOCABULARY, block_size=1024),
    "1.5B": GPTConfig(n_layer=48, n_head=25, n_embd=1600, vocab_size=VOCABULARY, block_size=1024),
    "6.7B": GPTConfig(n_layer=32, n_head=32, n_embd=4096, vocab_size=VOCABULARY, block_size=1024),
    "13B": GPTConfig(n_layer=40, n_head=40, n_embd=5120, vocab_size=VOCABULARY, block_size=1024),
}


@dataclass(frozen=True)
class Plan:
    """A way to train, and seconds of its step.

    Args:
        strategy, checkpointing, micro_batch: distributed.strategy, trainer.activation_checkpointing and
            trainer.micro_batch_size
        memory: bytes on the GPU that needs most
        compute: forward and backward
        update: the optimizer's step
        waiting: for what ranks send, where nothing hides it
        stall: for the snapshot's copy, spread over the steps between two
    """

    strategy: str
    checkpointing: str
    micro_batch: int
    memory: float
    compute: float
    update: float
    waiting: float
    stall: float

    @property
    def step(self) -> float:
        """Seconds."""
        return self.compute + self.update + self.waiting + self.stall


@lru_cache
def flops_per_step(shape: GPTConfig, B: int) -> float:
    """Floating-point operations of forward and backward: 6 for each weight in a product and token, and attention's.

    Attention is counted whole, although half of it is masked (as in Chowdhery et al., "PaLM", 2022, appendix B).
    """
    named = meta_model(shape).named_parameters()
    weights = sum(parameter.numel() for name, parameter in named if parameter.dim() == 2 and "wpe" not in name)
    T = shape.block_size
    return B * T * (6 * weights + 12 * shape.n_layer * shape.n_embd * T)


@lru_cache
def muon_flops(shape: GPTConfig) -> float:
    """Floating-point operations of Muon's five iterations on all matrices of the blocks."""
    C = shape.n_embd
    longer = (3 * C, C, 4 * C, 4 * C)  # each matrix is C on its other side
    return shape.n_layer * sum(5 * (4 * C * C * n + 2 * C**3) for n in longer)


def plan(config: Config, shape: GPTConfig, ranks: int, machine: Machine) -> Plan:
    """The step of a configuration on so many ranks.

    Sharded blocks travel in bf16 and gradients in fp32. What is sent in backward hides behind it, but for one block or
    bucket; what zero1 sends after its step doesn't hide. What selective checkpointing computes again is not counted.
    """
    knobs, strategy = config.trainer, config.distributed.strategy
    model, rate = meta_model(shape), machine.flops * machine.share
    a = sum(parameter.numel() for parameter in model.parameters())
    share = -(-knobs.batch_size // ranks)
    passes = -(-share // (knobs.micro_batch_size or share))
    again = {"none": 1.0, "selective": 1.0, "full": 4 / 3}[knobs.activation_checkpointing]
    inputs = share * shape.block_size * shape.n_embd
    blocks = shape.n_layer * (inputs * machine.elementwise + passes * machine.block)
    compute = again * (flops_per_step(shape, share) / rate + blocks)

    parts = ranks if strategy != "ddp" else 1
    groups = param_groups(model, config.optimizer)
    muons = sum(parameter.numel() for group in groups if group["muon"] for parameter in group["params"])
    update = machine.step + (16 * muons + 28 * (a - muons)) / machine.reads / parts + 8 * a / machine.reads
    # Matrices are whole where Muon's products are made: a rank has at least one, and waits for the one that has most.
    pieces = {"ddp": 1, "zero1": 4 * shape.n_layer}.get(strategy, shape.n_layer)
    most = -(-pieces // ranks) / pieces
    if config.optimizer.name == "muon":
        update += most * muon_flops(shape) / rate

    once, gradients = machine.passes(2 * a, ranks), machine.passes(4 * a, ranks)
    forward, backward = (part * compute / passes * machine.hides for part in (1 / 3, 2 / 3))
    one = 1 / shape.n_layer
    if strategy in ("ddp", "zero1"):
        last = min(1.0, config.distributed.bucket_cap_mb * 2**20 / (4 * a))
        waiting = exposed(2 * gradients, backward, last)
        waiting += gradients if strategy == "zero1" else 0.0
    elif strategy == "zero2":
        waiting = exposed(once, forward, one) + exposed(gradients, backward, one)
    else:
        waiting = (passes - 1) * (exposed(once, forward, one) + exposed(once, backward, one))
        waiting += exposed(once, forward, one) + exposed(once + gradients, backward, one)
    if strategy in ("zero2", "fsdp"):  # rows to whole matrices, and back
        waiting += 2 * 4 * muons * most / (machine.inside if ranks <= machine.gpus else machine.between / machine.gpus)

    state = 12 * a - 4 * muons
    stall = state / machine.host + (machine.passes(state, ranks) if strategy != "ddp" else 0.0)
    memory = estimate_memory(
        config, shape, ranks, "bf16", "cpu"
    ).total  # T is long enough for the kernel that GPUs have, too
    return Plan(
        strategy,
        knobs.activation_checkpointing,
        knobs.micro_batch_size or share,
        memory,
        compute,
        update,
        waiting,
        stall / knobs.save_every,
    )


def exposed(sent: float, hiding: float, last: float) -> float:
    """Seconds of sending that nothing hides: what is longer than the computing beside it, and at least the last part.

    Args:
        sent: seconds that sending takes
        hiding: seconds of computing beside it
        last: share that is sent when computing is over, or before it begins
    """
    return max(sent - hiding, sent * last)


def plans(config: Config, shape: GPTConfig, ranks: int, machine: Machine) -> Iterator[Plan]:
    """For each strategy, its fastest way that fits into memory; none for one that doesn't fit."""
    share = -(-config.trainer.batch_size // ranks)
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        ways = []
        for checkpointing in ("none", "selective", "full"):
            for micro_batch in (2**power for power in reversed(range(share.bit_length()))):
                trainer = replace(
                    config.trainer, activation_checkpointing=checkpointing, micro_batch_size=min(micro_batch, share)
                )
                distributed = replace(config.distributed, strategy=strategy)
                found = plan(replace(config, trainer=trainer, distributed=distributed), shape, ranks, machine)
                if found.memory <= FULL * machine.memory:
                    ways.append(found)
                    break
        if ways:
            yield min(ways, key=lambda way: way.step)


def tables(config: Config, shapes: dict[str, GPTConfig], numbers: Sequence[int]) -> Iterator[str]:
    """A Markdown table for each cluster, line by line."""
    for machine in MACHINES:
        yield f"### {machine.name}\n"
        columns = "model", "GPUs", "pick", "tokens a second", "of linear", "waiting", "optimizer", "others' steps in it"
        yield f"| {' | '.join(columns)} |"
        yield "|" + " --- |" * 8
        for name, shape in shapes.items():
            B = max(TOKENS // shape.block_size, *numbers)
            asked = replace(config, trainer=replace(config.trainer, batch_size=B))
            for ranks in numbers:
                ways = sorted(plans(asked, shape, ranks, machine), key=lambda way: way.step)
                if not ways:
                    yield f"| {name} | {ranks} | none fits | | | | | |"
                    continue
                best, *others = ways
                how = f"`{best.strategy}`, micro-batch {best.micro_batch}"
                how += f", checkpointing `{best.checkpointing}`" * (best.checkpointing != "none")
                lone = flops_per_step(shape, B) / (machine.flops * machine.share * ranks)
                words = ", ".join(f"{way.strategy} {way.step / best.step:.2f}" for way in others)
                tokens = B * shape.block_size / best.step
                yield (
                    f"| {name} | {ranks:,} | {how} | {tokens:,.0f} | {lone / best.step:.0%} | "
                    f"{best.waiting / best.step:.1%} | {best.update / best.step:.1%} | {words or 'none fits'} |"
                )
        yield ""


def run(argv: Sequence[str]) -> None:
    """Prints what the command line asks for."""
    parser = build_parser()
    parser.description = __doc__
    parser.add_argument("--ranks", nargs="+", type=int, default=NUMBERS, metavar="N", help="numbers of GPUs")
    asked = parser.parse_args(argv)
    for number in asked.ranks:
        if number < 1:
            raise UserError(f"--ranks: {number} is no number of GPUs, must be at least 1")
    config, shapes = read_config(config_options(asked)), SHAPES
    if any(getattr(asked, f"model.{key}") for key in ("n_layer", "n_head", "n_embd")):
        sizes = {key: getattr(config.model, key) for key in ("n_layer", "n_head", "n_embd", "bias")}
        shape = GPTConfig(**sizes, vocab_size=VOCABULARY, block_size=config.data.block_size)
        number = sum(parameter.numel() for parameter in meta_model(shape).parameters())
        shapes = {f"{number / 1e6:,.0f}M": shape}
    for line in tables(config, shapes, asked.ranks):
        print(line)


if __name__ == "__main__":
    sys.exit(run_script(run))
