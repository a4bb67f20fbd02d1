"""Rank, number of ranks and rendezvous address from a launcher's variables, and the network interface of gloo.

Here alone a launcher's variables are read as numbers, and checked.
"""

import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from mingpt.errors import UserError
from mingpt.files import make_folder
from mingpt.system.threads import omp_num_threads

MAX_RANKS = 2**20
MAX_PORT = 2**16 - 1
RESOLVE_SECONDS = 5.0  # for which the name of a host is looked up again, since a server of names may be slow to start
LOOPBACK = "127.0.0.1"
OWN_FILES = 100  # open files of a process, besides the connections whose number grows with that of the ranks
STORE_CONNECTIONS = 3  # of each rank, of which two belong to its HealthMonitor
DEFAULT_ROUTE_HOST = "192.0.2.1"  # an address reserved for documentation (RFC 5737): its route is the default one


@dataclass(frozen=True)
class RankInfo:
    """A process's rank, as far as its launcher sets it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str | None = None  # as `torch.distributed.init_process_group` takes it
    fallback_file: str | None = None  # in the run folder, unique to this start, if init_method's host does not resolve
    restart_count: int = 0  # as torchrun tells it


def detect_launch_environment(env: Mapping[str, str]) -> RankInfo:
    """Returns this process's rank according to its launcher's variables; without a launcher, rank 0 of 1.

    Raises:
        UserError: a launcher's variables are incomplete, not integers, out of range, or contradict each other.
    """
    omp_num_threads(env)  # raises
    restart_count = _integer(env, "TORCHELASTIC_RESTART_COUNT")
    return replace(_detect_rank(env), restart_count=restart_count)


def _detect_rank(env: Mapping[str, str]) -> RankInfo:
    if "RANK" in env:  # first, because torchrun sets it inside srun too
        info = _read_ranks(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return replace(info, init_method=_master_address(env))
    # Before SLURM: mpirun starts its daemons on other hosts as a SLURM step, whose variables its ranks inherit.
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        mpi = "OMPI_COMM_WORLD"
        info = _read_ranks(env, f"{mpi}_RANK", f"{mpi}_SIZE", f"{mpi}_LOCAL_RANK", f"{mpi}_LOCAL_SIZE")
        # mpirun creates this folder for a job, private to the user, and removes it after the job.
        folder = env.get("PMIX_SERVER_TMPDIR")
        job = env.get("PMIX_NAMESPACE")
        is_one_host = info.local_world_size == info.world_size
        file = f"file://{folder}/rendezvous-{job}" if folder and job and is_one_host else None
        return replace(info, init_method=_master_address(env, file))
    # The shell of a batch script has SLURM_PROCID and SLURM_NTASKS too, but it is a single process in no step.
    if "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1":
        info = _read_ranks(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        job_id = _integer(env, "SLURM_JOB_ID")
        step = _integer(env, "SLURM_STEP_ID")
        restarts = _integer(env, "SLURM_RESTART_COUNT")  # a requeued job keeps its number
        init_method = _master_address(env, _slurm_address(env, job_id, step))
        return replace(info, init_method=init_method, fallback_file=f".rendezvous-{job_id}.{step}.{restarts}")
    if "WORLD_SIZE" in env:
        return _read_ranks(env, "RANK", "WORLD_SIZE")  # raises: there is no RANK
    return RankInfo()


def _read_ranks(
    env: Mapping[str, str], rank: str, world_size: str, local_rank: str = "", local_world_size: str = ""
) -> RankInfo:
    """Reads the variables with these names; the last two need not be set."""
    found = {rank: env.get(rank), world_size: env.get(world_size)}
    found |= {name: env[name] for name in (local_rank, local_world_size, "WORLD_SIZE") if name in env}
    try:
        values = {name: int(value) for name, value in found.items()}  # type: ignore[arg-type]
        info = RankInfo(values[rank], values[world_size], values.get(local_rank), values.get(local_world_size))
        is_valid = 0 <= info.rank < info.world_size <= MAX_RANKS
        is_valid &= values.get("WORLD_SIZE", info.world_size) == info.world_size
        is_valid &= info.local_rank is None or info.local_rank >= 0
        if info.local_world_size is not None:
            is_valid &= (info.local_rank or 0) < info.local_world_size <= info.world_size
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        same = "" if world_size == "WORLD_SIZE" else f", and WORLD_SIZE, if set, equal to {world_size}"
        local = f", {local_rank} from 0 to {local_world_size} - 1" if local_world_size else ""
        raise UserError(
            f"environment: {found}; a launcher sets whole numbers, {rank} from 0 to {world_size} - 1{local}{same}; "
            "for one process unset them"
        )
    return info


@contextmanager
def reported_once_per_machine(info: RankInfo) -> Iterator[None]:
    """Lets one process on each machine report a UserError that all of them raise, such as a mistake in the yaml.

    That is local rank 0, and also rank 0, whose local rank may have been set to any number by hand.
    """
    try:
        yield
    except UserError as error:
        error.is_reported = info.local_rank not in (None, 0) and info.rank > 0
        raise


def allow_connections(info: RankInfo) -> None:
    """Prepares this process for connections to all other ranks, before it looks up the first name.

    It may open as many files as the system allows, where the limit is often 1,024. Beyond that, a store drops ranks
    that connect, without a word. For each connection, the store looks up a name and answers nobody meanwhile (torch
    2.13). A query that is lost is repeated after 1 second; by default, after 5.

    Raises:
        UserError: the system allows too few for so many ranks.
    """
    if info.world_size > 1:
        # For all threads, since glibc keeps the options of the first look-up.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    needed = OWN_FILES + info.world_size
    if info.rank == 0 and not uses_agent_store(info.init_method):
        needed += STORE_CONNECTIONS * info.world_size
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < needed:
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} may open {allowed} files and connections "
            f"(ulimit -Hn), must be at least {needed}: raise the limit, or start fewer processes"
        )
    with suppress(ValueError):  # on macOS it is infinite, and can't be set
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def restart_hint(env: Mapping[str, str]) -> str:
    """Returns how to resume after a rank has failed; empty if torchrun restarts, or has restarted, the run."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS")
    if restarts is None:
        return "; the same command resumes"
    return "; start torchrun with --max_restarts=3 and it resumes by itself" if restarts == "0" else ""


def resolve_init_method(rank_info: RankInfo, init_method: str | None, run_dir: str) -> str:
    """Returns `init_method`, else the launcher's, or a file in `run_dir` if the launcher's host does not resolve.

    Raises:
        UserError: there is none, it leads nowhere, or the run folder can't be created.
    """
    found = init_method or rank_info.init_method
    if found is None or (found == "env://" and rank_info.init_method != "env://"):
        variables = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        raise UserError(
            f"environment: {variables}; rank {rank_info.rank} of {rank_info.world_size} has no rendezvous "
            "address: set both, or set distributed.init_method to tcp://host:port or file:///path"
        )
    source = "environment: the rendezvous address" if init_method is None else "distributed.init_method"
    if found.startswith("file://"):
        try:  # PyTorch would try to open it for as long as the timeout, or longer, in silence
            with open(found.removeprefix("file://"), "ab"):
                return found
        except OSError as error:
            raise UserError(
                f"{source} is {found}, which can't be opened: {error.strerror}; name a file in a folder that "
                "exists and that you may write to"
            ) from error
    host, port = host_and_port(found)
    may_fall_back = init_method is None and rank_info.fallback_file is not None and found != "env://"
    if _resolves(host, 0.0 if may_fall_back else RESOLVE_SECONDS):
        return found
    if not may_fall_back:
        raise UserError(
            f"{source} is {host}:{port}, but this machine, {platform.node()}, knows no host {host!r}; name the host of "
            "rank 0 as this machine knows it, or its IP address"
        )
    folder = Path(run_dir).resolve()
    make_folder(folder, "trainer.run_dir")
    return f"file://{folder / str(rank_info.fallback_file)}"


def uses_agent_store(init_method: str | None) -> bool:
    """Returns whether ranks rendezvous at the store of torchrun's agent."""
    return init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def host_and_port(init_method: str) -> tuple[str, int]:
    """Returns the address of the store at env:// or tcp://host:port, which have been checked."""
    if init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    url = urlsplit(init_method)
    return url.hostname, url.port  # type: ignore[return-value]


def _resolves(host: str, seconds: float) -> bool:
    """Whether the name of a host has an address, now or within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError, UnicodeError):  # UnicodeError: no name of a host at all, such as one with two dots
            socket.getaddrinfo(host, None)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)


def machine_id() -> str:
    """A text that differs between machines, of which several may have the same host name."""
    return f"{platform.node()} {psutil.boot_time():.0f}"


def select_gloo_interface(is_one_host: bool, init_method: str) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface that leads to the other ranks, unless it is set already.

    gloo would look up the host's own name, which takes seconds where a server of names does not answer, and which many
    systems map to 127.0.1.1 or to nothing. Between hosts, the name is right if it leads to an address of a network.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if is_one_host or not _address_towards(platform.node()):
        master = "" if init_method.startswith("file://") else host_and_port(init_method)[0]
        address = LOOPBACK if is_one_host else _address_towards(master) or _address_towards(DEFAULT_ROUTE_HOST)
        for name, addresses in psutil.net_if_addrs().items():
            if address in (interface.address for interface in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


def _integer(env: Mapping[str, str], name: str, highest: int = 2**31) -> int:
    """Returns a variable's value; 0, if it is not set."""
    text = env.get(name, "0")
    if not text.isdecimal() or int(text) > highest:
        raise UserError(f"environment: {name} is {text!r}, must be a whole number from 0 to {highest}")
    return int(text)


def _master_address(env: Mapping[str, str], default: str | None = None) -> str | None:
    """Returns env:// if MASTER_ADDR and MASTER_PORT are set, the default if neither is; one alone is a mistake."""
    given = [name in env for name in ("MASTER_ADDR", "MASTER_PORT")]
    if not any(given):
        return default
    if not all(given):
        return None
    _integer(env, "MASTER_PORT", MAX_PORT)
    if not env["MASTER_ADDR"]:
        raise UserError("environment: MASTER_ADDR is empty, must be the host of rank 0")
    return "env://"


def _slurm_address(env: Mapping[str, str], job: int, step: int) -> str | None:
    """Returns the first host of a SLURM step, where its rank 0 is, with a port that other steps hardly have.

    The list is compressed: node[01-03,07],gpu5 begins with node01. SLURM_LAUNCH_NODE_IPADDR does not help: it is the
    host where srun was called, possibly a login node.
    """
    first = re.match(r"([^,\[]|\[[^]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
    if first is None:
        return None
    host = "127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
    return f"tcp://{host}:{10000 + (job + 1009 * step) % 20000}"  # below 32768, where systems assign ports


def _address_towards(host: str) -> str | None:
    """Returns this host's IPv4 address on the route to another one; None if there is no route but the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # of a datagram socket, this sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None
