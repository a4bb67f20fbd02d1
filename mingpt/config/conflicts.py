"""Finds values of keys that conflict with each other, with the number of ranks, or with the device.

Each message begins with the name of a key.
"""

from mingpt.config.schema import Config
from mingpt.errors import UserError


def find_conflicts(config: Config) -> list[str]:
    """Returns a message for each conflict between keys."""
    model, optimizer, trainer, distributed = config.model, config.optimizer, config.trainer, config.distributed
    offload = distributed.cpu_offload
    tree = distributed.reduction == "tree"
    stages = distributed.pipeline_stages
    checkpointing = trainer.activation_checkpointing != "none"
    obstacle = fp16_obstacle(config)
    conflicts = (
        (
            model.n_embd % model.n_head,
            f"model.n_embd is {model.n_embd}, must be divisible by model.n_head, {model.n_head}",
        ),
        (
            trainer.max_epochs is None and trainer.max_steps is None,
            "trainer.max_epochs and trainer.max_steps are both null; set one, or training would not end",
        ),
        (
            trainer.precision == "fp16" and obstacle,
            f"trainer.precision is {trainer.precision}, must be fp32 or bf16 with {obstacle}",
        ),
        (offload and distributed.strategy != "fsdp", "distributed.strategy must be fsdp with distributed.cpu_offload"),
        (offload and stages > 1, "distributed.cpu_offload must be false with distributed.pipeline_stages"),
        # Muon needs whole matrices, but host memory holds shards.
        (offload and optimizer.name == "muon", "optimizer.name is muon, must be adamw with distributed.cpu_offload"),
        (tree and distributed.strategy != "ddp", "distributed.strategy must be ddp with distributed.reduction tree"),
        (tree and stages > 1, "distributed.reduction is tree, must be fast with distributed.pipeline_stages"),
        # The bits depend on both.
        (
            tree and trainer.micro_batch_size is None,
            "trainer.micro_batch_size is null, must be a number with distributed.reduction tree",
        ),
        (
            tree and trainer.threads not in ("auto", 1),
            f"trainer.threads is {trainer.threads}, must be auto or 1 with distributed.reduction tree",
        ),
        (
            trainer.cuda_graphs and (distributed.uses_fsdp or tree or checkpointing),
            "trainer.cuda_graphs is true, must be false with distributed.strategy zero2 or fsdp, distributed.reduction "
            "tree, and trainer.activation_checkpointing",
        ),
        (
            stages > model.n_layer,
            f"distributed.pipeline_stages is {stages}, must be at most model.n_layer, {model.n_layer}",
        ),
        (
            stages > 1 and trainer.micro_batch_size is None,
            "trainer.micro_batch_size is null, must be a number with distributed.pipeline_stages, because stages work "
            f"on several micro-batches at once, best on {4 * stages} or more",
        ),
    )
    return [message for is_conflict, message in conflicts if is_conflict]


def find_start_conflicts(config: Config, world_size: int, device_type: str) -> list[str]:
    """Returns a message for each conflict with the number of ranks or with the device."""
    trainer = config.trainer
    distributed = config.distributed
    batch_size = trainer.batch_size
    size = trainer.micro_batch_size or batch_size
    stages = distributed.pipeline_stages
    replicas = world_size // stages
    tree = distributed.reduction == "tree"
    is_cuda = device_type == "cuda"
    conflicts = (
        (
            stages == 1 and batch_size < world_size,
            f"trainer.batch_size is {batch_size}, fewer than the {world_size} ranks, which need a sequence each",
        ),
        (
            tree and -(-batch_size // size) < world_size,
            f"trainer.micro_batch_size is {size}, too large: the {world_size} ranks need a micro-batch each of "
            f"trainer.batch_size {batch_size} with distributed.reduction tree",
        ),
        (
            world_size % stages,
            f"distributed.pipeline_stages is {stages}, which does not divide the {world_size} processes",
        ),
        (
            stages > 1 and world_size % stages == 0 and batch_size % (replicas * size),
            f"trainer.batch_size is {batch_size}, must be a multiple of {replicas * size} with "
            f"distributed.pipeline_stages {stages}: {replicas} replicas x trainer.micro_batch_size {size}, because all "
            "micro-batches of a pipeline have the same size",
        ),
        (
            trainer.cuda_graphs and (world_size > 1 or not is_cuda),
            f"trainer.cuda_graphs is true, which needs one process on a CUDA GPU, not {world_size} on {device_type}",
        ),
        (
            is_cuda and tree and not trainer.deterministic,
            "trainer.deterministic is false, must be true with distributed.reduction tree on GPUs",
        ),
        (
            distributed.cpu_offload and not is_cuda,
            f"distributed.cpu_offload is true, which needs a CUDA GPU; on {device_type} set it to false",
        ),
        (
            trainer.precision == "fp16" and not is_cuda,
            f"trainer.precision is fp16, which needs a CUDA GPU; on {device_type} set it to auto, fp32 or bf16",
        ),
    )
    return [message for is_conflict, message in conflicts if is_conflict]


def fp16_obstacle(config: Config) -> str | None:
    """Returns the key that excludes fp16; None: there is none."""
    if config.distributed.cpu_offload:  # the CPU's optimizer would not wait until the GPU has found an overflow
        return "distributed.cpu_offload"
    if config.distributed.reduction == "tree":
        return "distributed.reduction tree"
    if config.distributed.pipeline_stages > 1:  # all stages would have to skip a step whose gradients overflow
        return "distributed.pipeline_stages"
    return None


def refuse(conflicts: list[str]) -> None:
    """Raises a UserError that lists all conflicts, if there are any."""
    if conflicts:
        raise UserError("\n  ".join(conflicts))
