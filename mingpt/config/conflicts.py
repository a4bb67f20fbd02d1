"""Finds values of keys that conflict with each other, with the number of ranks, or with the device.

Each message begins with the name of a key.
"""

from collections.abc import Iterable, Iterator

from mingpt.config.schema import Config
from mingpt.errors import UserError


def find_conflicts(config: Config, precision: str | None = None) -> Iterator[str]:
    """Yields a message for each conflict between keys.

    Args:
        precision: the precision that a run has chosen (fp32, bf16 or fp16); None: as configured
    """
    model = config.model
    optimizer = config.optimizer
    trainer = config.trainer
    distributed = config.distributed
    stages = distributed.pipeline_stages

    if trainer.cuda_graphs and (
        distributed.uses_fsdp or distributed.reduction == "tree" or trainer.activation_checkpointing != "none"
    ):
        yield (
            "trainer.cuda_graphs is true, must be false with distributed.strategy zero2 or fsdp, distributed.reduction "
            "tree, and trainer.activation_checkpointing"
        )
    if model.n_embd % model.n_head:
        yield f"model.n_embd is {model.n_embd}, must be divisible by model.n_head, {model.n_head}"
    elif model.architecture == "nanochat" and model.n_embd // model.n_head % 2:
        yield (
            f"model.n_embd / model.n_head is {model.n_embd} / {model.n_head}, must be even with model.architecture "
            "nanochat, because its rotary positions pair dimensions; or set model.architecture to gpt2"
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate is {optimizer.min_learning_rate}, must be at least 0 and at most "
            f"optimizer.learning_rate, {optimizer.learning_rate}"
        )
    if trainer.max_epochs is None and trainer.max_steps is None:
        yield "trainer.max_epochs and trainer.max_steps are both null; set one, or training would not end"

    obstacle = fp16_obstacle(config)
    if (precision or trainer.precision) == "fp16" and obstacle:
        yield (
            f"{obstacle} is not possible in fp16 (trainer.precision: {trainer.precision}); set trainer.precision to "
            "fp32 or bf16"
        )

    if distributed.cpu_offload:
        if distributed.strategy != "fsdp":
            yield f"distributed.cpu_offload is true, which needs distributed.strategy fsdp, not {distributed.strategy}"
        if stages > 1:
            yield f"distributed.cpu_offload is true, must be false with distributed.pipeline_stages {stages}"
        if optimizer.name == "muon":
            yield (
                "optimizer.name is muon, must be adamw with distributed.cpu_offload, because Muon needs whole "
                "matrices, but host memory holds shards"
            )

    if distributed.reduction == "tree":
        reason = "with distributed.reduction tree, whose bits depend on it"
        if distributed.strategy != "ddp":
            yield f"distributed.strategy is {distributed.strategy}, must be ddp with distributed.reduction tree"
        if stages > 1:
            yield f"distributed.reduction is tree, must be fast with distributed.pipeline_stages {stages}"
        if trainer.micro_batch_size is None:
            yield f"trainer.micro_batch_size is null, must be a number {reason}"
        if trainer.threads not in ("auto", 1):
            yield f"trainer.threads is {trainer.threads}, must be auto or 1 {reason}"

    if stages > model.n_layer:
        yield (
            f"distributed.pipeline_stages is {stages}, must be at most model.n_layer, {model.n_layer}, because each "
            "stage needs a block"
        )
    if stages > 1 and trainer.micro_batch_size is None:
        yield (
            f"trainer.micro_batch_size is null, must be a number with distributed.pipeline_stages {stages}, because "
            f"stages work on several micro-batches at once, best on {4 * stages} or more"
        )


def find_start_conflicts(config: Config, world_size: int, device_type: str) -> Iterator[str]:
    """Yields a message for each conflict with the number of ranks or with the device."""
    trainer = config.trainer
    distributed = config.distributed
    batch_size = trainer.batch_size
    stages = distributed.pipeline_stages

    if stages > 1:
        yield from _find_pipeline_conflicts(config, world_size)
    elif batch_size < world_size:
        yield (
            f"trainer.batch_size is {batch_size}, fewer than the {world_size} ranks, which need a sequence each; raise "
            f"it, or start at most {batch_size} processes"
        )
    elif distributed.reduction == "tree":
        size = trainer.micro_batch_size or batch_size  # find_conflicts refuses null
        if -(-batch_size // size) < world_size:
            yield (
                f"trainer.batch_size / trainer.micro_batch_size is {batch_size} / {size}, fewer micro-batches than the "
                f"{world_size} ranks, which need one each with distributed.reduction tree; lower "
                "trainer.micro_batch_size, or start fewer processes"
            )

    if trainer.cuda_graphs and (world_size > 1 or device_type != "cuda"):
        yield f"trainer.cuda_graphs is true, which needs one process on a CUDA GPU, not {world_size} on {device_type}"

    if device_type == "cuda":
        if distributed.reduction == "tree" and not trainer.deterministic:
            yield "trainer.deterministic is false, must be true with distributed.reduction tree on GPUs"
        return
    if distributed.cpu_offload:
        yield f"distributed.cpu_offload is true, which needs a CUDA GPU; on {device_type} set it to false"
    if trainer.precision == "fp16":
        yield f"trainer.precision is fp16, which needs a CUDA GPU; on {device_type} set it to auto, fp32 or bf16"


def fp16_obstacle(config: Config) -> str | None:
    """Returns the key that excludes fp16; None: there is none."""
    if config.distributed.cpu_offload:  # the CPU's optimizer would not wait until the GPU has found an overflow
        return "distributed.cpu_offload"
    if config.distributed.reduction == "tree":
        return "distributed.reduction tree"
    return None


def _find_pipeline_conflicts(config: Config, world_size: int) -> Iterator[str]:
    stages = config.distributed.pipeline_stages
    batch_size = config.trainer.batch_size
    size = config.trainer.micro_batch_size or batch_size  # find_conflicts refuses null
    replicas = world_size // stages
    if world_size % stages:
        yield (
            f"distributed.pipeline_stages is {stages}, which does not divide the {world_size} processes; start "
            f"{(replicas + 1) * stages} processes, or set it to 1"
        )
        return
    micro_batches = batch_size // (replicas * size)
    if batch_size % (replicas * size):
        yield (
            f"trainer.batch_size is {batch_size}, must be a multiple of {replicas * size} with "
            f"distributed.pipeline_stages {stages}: {replicas} replicas x trainer.micro_batch_size {size}, because all "
            "micro-batches of a pipeline have the same size"
        )
    elif micro_batches < stages:
        yield (
            f"trainer.batch_size / replicas / trainer.micro_batch_size is {batch_size} / {replicas} / {size}, "
            f"only {micro_batches} micro-batches for {stages} stages, which would wait "
            f"{(stages - 1) / (micro_batches + stages - 1):.0%} of the time; lower trainer.micro_batch_size"
        )


def refuse(conflicts: Iterable[str]) -> None:
    """Raises a UserError that lists all conflicts, if there are any."""
    if messages := list(conflicts):
        raise UserError("\n  ".join(messages))
