"""Who am I? What a launcher tells a process: its place among all, and where they meet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mingpt.utils.errors import UserError


@dataclass(frozen=True)
class RankInfo:
    """A process's place among all of a run, as far as its launcher tells.

    Args:
        rank: its number among all
        size: how many there are
        local_rank: its number among those of its machine
        local_size: how many its machine has
        init_method: where ranks meet
        fallback: a file of this start alone, to meet at in the run folder where init_method's host has no address
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    init_method: str | None = None
    fallback: str | None = None


def detect_launch_environment(env: Mapping[str, str]) -> RankInfo:
    """This process's place, from the environment that its launcher has set; without a launcher it is alone.

    RANK goes first: torchrun sets it, inside srun too, and so does whoever starts ranks by hand.

    Raises:
        UserError: a launcher's variables are there by half, or are no numbers that fit.
    """
    if "RANK" in env:
        rank, size, local_rank, local_size = _numbers(env, ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return RankInfo(rank, size, local_rank, local_size, _meeting(env))
    # Before SLURM: mpirun starts its daemons on other machines as a SLURM step, whose variables its ranks inherit.
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        rank, size, local_rank, local_size = _numbers(
            env,
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        )
        file = _job_file(env) if local_size == size else None
        return RankInfo(rank, size, local_rank, local_size, _meeting(env, file))
    # The shell of a batch script has SLURM_PROCID and SLURM_NTASKS too, but is in no step: nobody else comes there.
    if "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1":
        needed = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
        rank, size, job, step, local_rank = _numbers(env, needed, ("SLURM_LOCALID",))
        fallback = f".meeting-{job}.{step}.{env.get('SLURM_RESTART_COUNT', 0)}"  # a requeued job has the same number
        return RankInfo(rank, size, local_rank, None, _meeting(env, _step_address(env, job, step)), fallback)
    if "WORLD_SIZE" in env:
        _numbers(env, ("RANK", "WORLD_SIZE"))
    return RankInfo()


def resolve_init_method(place: RankInfo, init_method: str | None, run_dir: str) -> str:
    """The address, as an init_method, at which this process meets the others: as configured, else as its place says.

    Raises:
        UserError: nobody tells, or the run folder can't be made.
    """
    where = init_method or place.init_method
    if where is None:
        found = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        raise UserError(
            f"environment: {found}; rank {place.rank} of {place.size} must know where to meet the others: "
            "set both, or distributed.init_method to tcp://host:port or file:///path"
        )
    host = urlsplit(where).hostname
    if init_method is None and place.fallback is not None and host is not None and not _has_address(host):
        folder = Path(run_dir).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {folder} can't be made: {error.strerror}; set it to a folder that you may write to"
            ) from error
        return f"file://{folder / place.fallback}"
    return where


def _numbers(env: Mapping[str, str], needed: Sequence[str], optional: Sequence[str] = ()) -> list[Any]:
    """What these variables hold, the first two being rank and number of ranks; None for an optional one that is not."""
    rank, size, *_ = needed
    found = {name: env.get(name) for name in needed}
    found |= {name: env[name] for name in (*optional, "WORLD_SIZE") if name in env}
    try:
        numbers = {name: int(value) for name, value in found.items()}  # type: ignore[arg-type]
        if not 0 <= numbers[rank] < numbers[size] == numbers.get("WORLD_SIZE", numbers[size]):
            raise ValueError
    except (TypeError, ValueError):
        same = "" if size == "WORLD_SIZE" else f", and WORLD_SIZE, if at all, as {size}"
        raise UserError(
            f"environment: {found}; a launcher sets whole numbers, {rank} from 0 to {size} - 1{same}; "
            "for one process unset them"
        ) from None
    return [numbers.get(name) for name in (*needed, *optional)]


def _meeting(env: Mapping[str, str], guess: str | None = None) -> str | None:
    """MASTER_ADDR and MASTER_PORT where both are set, the guess where neither is; one alone is a mistake."""
    given = [name in env for name in ("MASTER_ADDR", "MASTER_PORT")]
    return "env://" if all(given) else None if any(given) else guess


def _step_address(env: Mapping[str, str], job: int, step: int) -> str | None:
    """The first machine of a SLURM step, where its rank 0 is, and a port that other steps there hardly have.

    The list is compressed: node[01-03,07],gpu5 begins with node01. SLURM_LAUNCH_NODE_IPADDR is no help: it is where
    srun was typed, maybe on a login node.
    """
    first = re.match(r"([^,\[]|\[[^]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = "127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
    return f"tcp://{host}:{10000 + (job + 1009 * step) % 20000}"  # below 32768, where systems hand out ports


def _job_file(env: Mapping[str, str]) -> str | None:
    """A file in the folder that mpirun makes for a job and removes after it, private to the user."""
    folder, job = env.get("PMIX_SERVER_TMPDIR"), env.get("PMIX_NAMESPACE")
    return f"file://{folder}/meeting-{job}" if folder and job else None


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
