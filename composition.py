"""What goes with what? Settings that refuse each other, and how many ranks they suit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from errors import UserError

if TYPE_CHECKING:
    from main import Config


def check_sections(config: Config) -> None:
    """Makes sure that keys of different sections go with each other.

    Raises:
        ValueError: two do not; it begins with the name of one.
    """
    if config.distributed.cpu_offload and config.distributed.strategy != "fsdp":
        raise ValueError(
            f"distributed.cpu_offload is true, which needs distributed.strategy fsdp, not {config.distributed.strategy}"
        )
    if config.distributed.cpu_offload and config.optimizer.name == "muon":
        raise ValueError(
            "optimizer.name is muon, must be adamw with distributed.cpu_offload: Muon needs whole matrices, and "
            "the host's memory has parts"
        )
    if (stages := config.distributed.pipeline_stages) > 1:
        why = f"with distributed.pipeline_stages {stages}"
        if stages > config.model.n_layer:
            raise ValueError(
                f"distributed.pipeline_stages is {stages}, must be at most model.n_layer, {config.model.n_layer}: "
                "each stage needs a block"
            )
        if config.trainer.micro_batch_size is None:
            count = config.trainer.batch_size
            size = max((n for n in range(1, count + 1) if count % n == 0 and count // n >= 4 * stages), default=1)
            raise ValueError(
                f"trainer.micro_batch_size is null, must be a number {why}, such as {size}: stages work on several "
                f"micro-batches at once, best on {4 * stages} or more"
            )
        if config.distributed.cpu_offload:
            raise ValueError(f"distributed.cpu_offload is true, must be false {why}")
        if config.distributed.reduction == "tree":
            raise ValueError(f"distributed.reduction is tree, must be fast {why}")
    if config.distributed.reduction == "tree":
        knobs, why = config.trainer, "with distributed.reduction tree, whose bits depend on it"
        if config.distributed.strategy != "ddp":
            raise ValueError(
                f"distributed.strategy is {config.distributed.strategy}, must be ddp with distributed.reduction tree"
            )
        if knobs.micro_batch_size is None:
            raise ValueError(f"trainer.micro_batch_size is null, must be a number {why}")
        if knobs.threads not in ("auto", 1):
            raise ValueError(f"trainer.threads is {knobs.threads}, must be auto or 1 {why}")
        if knobs.precision == "fp16":
            raise ValueError("trainer.precision is fp16, must be auto, fp32 or bf16 with distributed.reduction tree")


def check_shares(config: Config, ranks: int) -> None:
    """Makes sure that each rank has something to do.

    Raises:
        UserError: names the key, and what would do.
    """
    knobs, stages = config.trainer, config.distributed.pipeline_stages
    count, portion = knobs.batch_size, knobs.micro_batch_size or knobs.batch_size
    if stages > 1:
        _check_pipeline(config, ranks)
    elif count < ranks:
        raise UserError(
            f"trainer.batch_size is {count}, fewer than the {ranks} ranks, and each needs a sequence: raise it, or "
            f"start at most {count} processes"
        )
    if config.distributed.reduction == "tree" and -(-count // portion) < ranks:
        raise UserError(
            f"trainer.batch_size / trainer.micro_batch_size is {count} / {portion}, fewer micro-batches than the "
            f"{ranks} ranks, and with distributed.reduction tree each needs one: lower trainer.micro_batch_size, or "
            "start fewer processes"
        )


def _check_pipeline(config: Config, ranks: int) -> None:
    stages, count = config.distributed.pipeline_stages, config.trainer.batch_size
    size = config.trainer.micro_batch_size or count
    if ranks % stages:
        raise UserError(
            f"distributed.pipeline_stages is {stages}, of which {ranks} processes are no multiple: start "
            f"{-(-ranks // stages) * stages} processes, or set it to 1"
        )
    replicas = ranks // stages
    if count % (replicas * size):
        raise UserError(
            f"trainer.batch_size is {count}, must be a multiple of {replicas * size} with distributed.pipeline_stages "
            f"{stages}: {replicas} replicas x trainer.micro_batch_size {size}, as stages pass on micro-batches of one "
            "size"
        )
    number = count // replicas // size
    if number < stages and config.distributed.pipeline_schedule == "1f1b":
        raise UserError(
            f"trainer.batch_size / replicas / trainer.micro_batch_size is {count} / {replicas} / {size}, {number} "
            f"micro-batches for {stages} stages, which would wait {(stages - 1) / (number + stages - 1):.0%} of the "
            "time: lower trainer.micro_batch_size, or set distributed.pipeline_schedule to gpipe, which takes it"
        )
