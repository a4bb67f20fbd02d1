"""Detects the launcher (torchrun, SLURM, mpirun or none), and reads rank, number of ranks and rendezvous address."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mingpt.errors import UserError

OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]


@dataclass(frozen=True)
class RankInfo:
    """A process's rank and rendezvous address, with None for values that the launcher does not set."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str | None = None  # URL for `torch.distributed.init_process_group`


def detect_launch_environment(env: Mapping[str, str]) -> RankInfo:
    """Returns this process's rank from its launcher's variables; without a launcher, rank 0 of 1.

    Raises:
        UserError: a launcher's variables are incomplete, not integers, or out of range.
    """
    address = None
    if "RANK" in env:  # first, because torchrun also sets it inside srun
        info = _read_ranks(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # MPI before SLURM: mpirun starts its daemons on other hosts as a SLURM step, and its ranks inherit their variables.
    elif "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        info = _read_ranks(env, *OPEN_MPI)
        # mpirun creates this folder for each job, private to the user, and removes it after the job.
        folder = env.get("PMIX_SERVER_TMPDIR")
        job = env.get("PMIX_NAMESPACE")
        is_one_host = info.local_world_size == info.world_size
        address = f"file://{folder}/rendezvous-{job}" if folder and job and is_one_host else None
    elif "MPI_LOCALRANKID" in env:  # MPICH and Intel MPI. PMI_RANK does not identify them, because srun can set it.
        info = _read_ranks(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    # The shell of a batch script also has SLURM_PROCID and SLURM_NTASKS, but it is a single process and not in a step.
    elif "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1":
        info = _read_ranks(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        address = _slurm_address(env)
    elif "PMI_RANK" in env or "PMI_SIZE" in env:  # other launchers of MPI programs
        info = _read_ranks(env, "PMI_RANK", "PMI_SIZE")
    elif "WORLD_SIZE" in env:
        return _read_ranks(env, "RANK", "WORLD_SIZE")  # raises, since RANK is not set
    else:
        return RankInfo()
    return replace(info, init_method=_master_address(env, address))


def _read_ranks(
    env: Mapping[str, str], rank: str, world_size: str, local_rank: str = "", local_world_size: str = ""
) -> RankInfo:
    """Reads the variables with these names. The last two are optional in the environment."""
    found = {rank: env.get(rank), world_size: env.get(world_size)}
    found |= {name: env[name] for name in (local_rank, local_world_size) if name in env}
    values = {name: int(value) for name, value in found.items() if value is not None and value.isdecimal()}
    if len(values) < len(found) or values[rank] >= values[world_size]:
        raise UserError(
            f"environment: {found}; {rank} must be an integer from 0 to {world_size} - 1; to train in one process, "
            "unset them"
        )
    return RankInfo(values[rank], values[world_size], values.get(local_rank), values.get(local_world_size))


def _master_address(env: Mapping[str, str], default: str | None) -> str | None:
    """Returns env:// if MASTER_ADDR and MASTER_PORT are set, the default if neither is, and None if one is missing."""
    given = [name in env for name in ("MASTER_ADDR", "MASTER_PORT")]
    if all(given):
        return "env://"
    return None if any(given) else default


def _slurm_address(env: Mapping[str, str]) -> str | None:
    """Returns the address of rank 0: the first host of a SLURM step, and a port that other steps are unlikely to use.

    The list of hosts is compressed: node[01-03,07],gpu5 starts with node01. SLURM_LAUNCH_NODE_IPADDR does not help: it
    is the host where srun was called, possibly a login node.
    """
    first = re.match(r"([^,\[]|\[[^]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = "127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
    number = int(env.get("SLURM_JOB_ID", 0)) + 1009 * int(env["SLURM_STEP_ID"])
    return f"tcp://{host}:{10000 + number % 20000}"  # below 32768, where systems assign ports
