r"""Predicts step times on GPU clusters from data sheets, and the fastest strategy that fits into memory.

    python -m benchmarks.cluster_model
    python -m benchmarks.cluster_model --ranks 16 32 \
        --model.n_layer 48 --model.n_head 25 --model.n_embd 1600 --data.block_size 1024

Without sizes of a model, for GPTs of 124M to 13B parameters. No GPU was used; benchmarks/growth.py compares the same
arithmetic with steps measured on a CPU.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mingpt.config import Config, GPTConfig
from mingpt.config_parser import build_parser, config_options, read_config
from mingpt.muon import newton_schulz
from mingpt.optimizer import param_groups
from mingpt.parallel.build import estimate_memory
from mingpt.utils.errors import UserError
from mingpt.utils.logging import run_script
from model import GPT

VOCAB_SIZE = 50_257  # GPT-2's: with characters, the embeddings would be smaller
GPU_COUNTS = (8, 64, 1024)
TOKENS_PER_STEP = 2**21  # as for the 6.7B model of GPT-3's paper
MEMORY_FRACTION = 0.9  # of a GPU's memory; CUDA, NCCL and fragmentation take the rest


@dataclass(frozen=True)
class Cluster:
    """Equal nodes, as in their data sheets; a GPU has one rank. Bandwidths are in bytes per second, one direction.

    Args:
        name: for tables
        flops: dense bf16 floating-point operations per second of a GPU
        utilization: fraction of `flops` that matrix products reach; assumed
        elementwise_seconds: time per element of a block's input, besides matrix products; GPUs: part of `utilization`
        block_seconds: time per block and micro-batch, whatever its size; hidden on GPUs
        step_seconds: time per step, whatever its size
        overlap: fraction of backward's time in which communication is hidden
        memory: bytes per GPU
        memory_bandwidth: of a GPU
        host_bandwidth: from a GPU to its host
        intra_node_bandwidth: from a GPU to others of its node
        inter_node_bandwidth: from a node to others
        gpus_per_node: number of GPUs in a node
        latency: seconds per message, whatever its size
    """

    name: str
    flops: float = 989e12
    utilization: float = 0.5
    elementwise_seconds: float = 0.0
    block_seconds: float = 0.0
    step_seconds: float = 0.0
    overlap: float = 1.0
    memory: float = 141e9
    memory_bandwidth: float = 4.8e12
    host_bandwidth: float = 64e9
    intra_node_bandwidth: float = 450e9
    inter_node_bandwidth: float = 400e9
    gpus_per_node: int = 8
    latency: float = 10e-6

    def ring_seconds(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes; an all-reduce takes both.

        Each network card of a node has a ring, so a node sends each byte once, whatever its number of GPUs.
        """
        if ranks == 1:
            return 0.0
        bandwidth = self.intra_node_bandwidth
        if ranks > self.gpus_per_node:
            bandwidth = min(bandwidth, self.inter_node_bandwidth)
        return size * (ranks - 1) / ranks / bandwidth + self.latency * math.log2(ranks)


# NVIDIA's data sheets: H200 SXM (989 TFLOP/s dense bf16, 141 GB at 4.8 TB/s, NVLink 900 GB/s in both directions, PCIe
# 5), and DGX H200 (eight ConnectX-7 of 400 Gb/s for eight GPUs).
CLUSTERS = (
    Cluster("DGX H200, 8 x 400 Gb/s InfiniBand a node"),
    Cluster("the same GPUs, 100 Gb/s Ethernet a node", inter_node_bandwidth=12.5e9, latency=50e-6),
)
MODELS = {
    "124M": GPTConfig(architecture="gpt2", n_layer=12, n_head=12, n_embd=768, vocab_size=VOCAB_SIZE, block_size=1024),
    "1.5B": GPTConfig(architecture="gpt2", n_layer=48, n_head=25, n_embd=1600, vocab_size=VOCAB_SIZE, block_size=1024),
    "6.7B": GPTConfig(architecture="gpt2", n_layer=32, n_head=32, n_embd=4096, vocab_size=VOCAB_SIZE, block_size=1024),
    "13B": GPTConfig(architecture="gpt2", n_layer=40, n_head=40, n_embd=5120, vocab_size=VOCAB_SIZE, block_size=1024),
}


@dataclass(frozen=True)
class StepEstimate:
    """A configuration and the seconds of its step.

    Args:
        strategy, checkpointing, micro_batch_size: of the configuration
        memory: bytes on the GPU that needs most
        compute: forward and backward
        optimizer: the optimizer's step
        communication: the part that is not hidden behind computation
        stall: the copy of a snapshot, divided by the number of steps between two
    """

    strategy: str
    checkpointing: str
    micro_batch_size: int
    memory: float
    compute: float
    optimizer: float
    communication: float
    stall: float

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.communication + self.stall


def flops_per_step(model_config: GPTConfig, batch_size: int) -> int:
    """Floating-point operations of forward and backward.

    They equal the usual formula: 6 per token and weight in a matrix product, and 12 n_layer n_embd T per token for
    attention, whose masked half is counted too (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    return batch_size * _flops_per_sequence(model_config)


@lru_cache
def _flops_per_sequence(model_config: GPTConfig) -> int:
    model, idx = meta_gpt(model_config), torch.zeros(1, model_config.block_size, dtype=torch.long, device="meta")
    # Fused attention kernels would count the scores that backward recomputes, too.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(model(idx, idx)[1], list(model.parameters()))
    return counter.get_total_flops()


@lru_cache
def muon_flops(model_config: GPTConfig) -> int:
    """Floating-point operations of Muon's Newton-Schulz iterations in bf16 for all matrices of the blocks."""
    with FlopCounterMode(display=False) as counter:
        for parameter in meta_gpt(model_config).blocks[0].parameters():
            if parameter.dim() == 2:
                newton_schulz(parameter.detach()[None], torch.bfloat16, parameter)
    return model_config.n_layer * counter.get_total_flops()


@lru_cache
def meta_gpt(model_config: GPTConfig) -> GPT:
    """The model on the meta device, which takes no memory."""
    with torch.device("meta"):
        return GPT(model_config)


def count_parameters(model: GPT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def estimate_step(config: Config, model_config: GPTConfig, ranks: int, cluster: Cluster) -> StepEstimate:
    """Predicts the step of a configuration.

    Parameters of sharded blocks are sent in bf16 and gradients in fp32. Communication in backward is hidden behind it,
    except for the last block or bucket; zero1's after its step is not. What selective checkpointing recomputes is not
    counted.
    """
    cfg, strategy = config.trainer, config.distributed.strategy
    flops_rate = cluster.flops * cluster.utilization
    local_batch_size = -(-cfg.batch_size // ranks)
    micro_batch_size = cfg.micro_batch_size or local_batch_size
    micro_batches = -(-local_batch_size // micro_batch_size)
    recompute = {"none": 1.0, "selective": 1.0, "full": 4 / 3}[cfg.activation_checkpointing]
    elements = local_batch_size * model_config.block_size * model_config.n_embd
    per_block = elements * cluster.elementwise_seconds + micro_batches * cluster.block_seconds
    products = flops_per_step(model_config, local_batch_size) / flops_rate
    compute = recompute * (products + model_config.n_layer * per_block)

    model = meta_gpt(model_config)
    parameters, shards = count_parameters(model), ranks if strategy != "ddp" else 1
    groups = param_groups(model, config.optimizer)
    muon = sum(parameter.numel() for group in groups if group["muon"] for parameter in group["params"])
    traffic = (16 * muon + 28 * (parameters - muon)) / shards + 8 * parameters  # bytes
    optimizer = cluster.step_seconds + traffic / cluster.memory_bandwidth
    # Muon multiplies full matrices. Ranks wait for the one with the most of them, which has at least one.
    pieces = {"ddp": 1, "zero1": 4 * model_config.n_layer}.get(strategy, model_config.n_layer)
    largest_share = -(-pieces // ranks) / pieces
    if config.optimizer.name == "muon":
        optimizer += largest_share * muon_flops(model_config) / flops_rate

    gather, reduce = (cluster.ring_seconds(size * parameters, ranks) for size in (2, 4))  # bf16, fp32
    forward, backward = (part * compute / micro_batches * cluster.overlap for part in (1 / 3, 2 / 3))
    block = 1 / model_config.n_layer
    if strategy in ("ddp", "zero1"):
        bucket = min(1.0, (config.distributed.bucket_cap_mb or 25) * 2**20 / (4 * parameters))
        communication = exposed_seconds(2 * reduce, backward, bucket) + (reduce if strategy == "zero1" else 0.0)
    elif strategy == "zero2":
        communication = exposed_seconds(gather, forward, block) + exposed_seconds(reduce, backward, block)
    else:
        gathers = exposed_seconds(gather, forward, block) + exposed_seconds(gather, backward, block)
        communication = (micro_batches - 1) * gathers
        communication += exposed_seconds(gather, forward, block) + exposed_seconds(gather + reduce, backward, block)
    if strategy in ("zero2", "fsdp"):  # Muon gathers rows to full matrices, and scatters them
        single = ranks <= cluster.gpus_per_node
        bandwidth = cluster.intra_node_bandwidth if single else cluster.inter_node_bandwidth / cluster.gpus_per_node
        communication += 2 * 4 * muon * largest_share / bandwidth

    snapshot = 12 * parameters - 4 * muon
    stall = snapshot / cluster.host_bandwidth
    stall += cluster.ring_seconds(snapshot, ranks) if strategy != "ddp" else 0.0
    # If T is above 512 the CPU, too, has a fused attention kernel.
    memory = estimate_memory(config, model, ranks, "bf16", "cpu").total
    seconds = compute, optimizer, communication, stall / cfg.save_every
    return StepEstimate(strategy, cfg.activation_checkpointing, micro_batch_size, memory, *seconds)


def exposed_seconds(communication: float, compute: float, last: float) -> float:
    """Seconds of communication that computation does not hide.

    Args:
        communication: seconds that it takes
        compute: seconds of computation meanwhile
        last: fraction that can't overlap, such as the last bucket, which is sent after backward
    """
    return max(communication - compute, communication * last)


def fastest_per_strategy(
    config: Config, model_config: GPTConfig, ranks: int, cluster: Cluster
) -> Iterator[StepEstimate]:
    """Yields the fastest configuration of each strategy that fits into memory, if there is one."""
    local_batch_size = -(-config.trainer.batch_size // ranks)
    sizes = [2**power for power in reversed(range(local_batch_size.bit_length()))]
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        distributed, estimates = replace(config.distributed, strategy=strategy), []
        for checkpointing in ("none", "selective", "full"):
            for size in sizes:
                trainer = replace(config.trainer, activation_checkpointing=checkpointing, micro_batch_size=size)
                candidate = replace(config, trainer=trainer, distributed=distributed)
                estimate = estimate_step(candidate, model_config, ranks, cluster)
                if estimate.memory <= MEMORY_FRACTION * cluster.memory:
                    estimates.append(estimate)
                    break
        if estimates:
            yield min(estimates, key=lambda estimate: estimate.seconds)


def tables(config: Config, models: dict[str, GPTConfig], gpu_counts: Sequence[int]) -> Iterator[str]:
    """A Markdown table for each cluster, line by line."""
    for cluster in CLUSTERS:
        yield f"### {cluster.name}\n"
        columns = "model", "GPUs", "pick", "tokens a second", "of linear", "waiting", "optimizer", "others' steps in it"
        yield f"| {' | '.join(columns)} |"
        yield "|" + " --- |" * 8
        for name, model_config in models.items():
            batch_size = max(TOKENS_PER_STEP // model_config.block_size, *gpu_counts)
            resized = replace(config, trainer=replace(config.trainer, batch_size=batch_size))
            for ranks in gpu_counts:
                candidates = fastest_per_strategy(resized, model_config, ranks, cluster)
                estimates = sorted(candidates, key=lambda estimate: estimate.seconds)
                if not estimates:
                    yield f"| {name} | {ranks} | none fits | | | | | |"
                    continue
                best, *others = estimates
                pick = f"`{best.strategy}`, micro-batch {best.micro_batch_size}"
                pick += f", checkpointing `{best.checkpointing}`" * (best.checkpointing != "none")
                ideal = flops_per_step(model_config, batch_size) / (cluster.flops * cluster.utilization * ranks)
                compared = ", ".join(f"{other.strategy} {other.seconds / best.seconds:.2f}" for other in others)
                tokens = batch_size * model_config.block_size / best.seconds
                shares = f"{best.communication / best.seconds:.1%} | {best.optimizer / best.seconds:.1%}"
                yield (
                    f"| {name} | {ranks:,} | {pick} | {tokens:,.0f} | {ideal / best.seconds:.0%} | {shares} | "
                    f"{compared or 'none fits'} |"
                )
        yield ""


def run(argv: Sequence[str]) -> None:
    """Prints the tables that the command line asks for.

    Raises:
        UserError: an option is wrong.
    """
    parser = build_parser()
    parser.description = __doc__
    parser.add_argument("--ranks", nargs="+", type=int, default=GPU_COUNTS, metavar="N", help="numbers of GPUs")
    args = parser.parse_args(argv)
    for number in args.ranks:
        if number < 1:
            raise UserError(f"--ranks: {number} is no number of GPUs, must be at least 1")
    config, models = read_config(config_options(args)), MODELS
    if any(getattr(args, f"model.{key}") for key in ("n_layer", "n_head", "n_embd")):
        sizes = {key: getattr(config.model, key) for key in ("architecture", "n_layer", "n_head", "n_embd", "bias")}
        model_config = GPTConfig(**sizes, vocab_size=VOCAB_SIZE, block_size=config.data.block_size)
        models = {f"{count_parameters(meta_gpt(model_config)) / 1e6:,.0f}M": model_config}
    for line in tables(config, models, args.ranks):
        print(line)


if __name__ == "__main__":
    sys.exit(run_script(run))
