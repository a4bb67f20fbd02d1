"""What goes with what? Settings that refuse each other, and how many ranks they suit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mingpt.utils.errors import UserError

if TYPE_CHECKING:
    from mingpt.config import Config


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
