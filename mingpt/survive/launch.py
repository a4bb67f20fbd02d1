"""The start: the supervisor, the store, and the context of a trainer."""

import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from mingpt.config import Config
from mingpt.distributed.launch_environment import (
    LOOPBACK,
    RankInfo,
    detect_launch_environment,
    host_and_port,
    listening_address,
    local_address,
    resolve_init_method,
    select_gloo_interface,
)
from mingpt.distributed.rendezvous import generation_store, host_store, uses_agent_store
from mingpt.parallel.build import validate
from mingpt.survive.context import SurvivingContext
from mingpt.survive.supervisor import (
    FAILED,
    LAUNCHER,
    SIGNALS,
    TOKEN,
    become_supervisor,
    is_supervised,
    tell_supervisor,
)
from mingpt.utils.errors import PeerError, RunEnded, UserError, is_oom_error
from mingpt.utils.lock import lock_run
from mingpt.utils.logging import set_rank
from mingpt.utils.signals import PARENT


def launch_surviving(config: Config) -> AbstractContextManager[SurvivingContext]:
    """The context of a trainer. A process that is no trainer yet becomes the supervisor of one.

    Raises:
        UserError: the launcher's variables are wrong, or another run uses a folder.
    """
    if not is_supervised(os.environ):
        supervise(config)
    return open_context(config)


def supervise(config: Config) -> NoReturn:
    """Replaces this process by the supervisor of a trainer. Rank 0 locks the run's folders, and starts the store.

    Raises:
        UserError: the launcher's variables are wrong, or another run uses a folder.
    """
    info = detect_launch_environment(os.environ)
    if info.world_size == 1 and info.init_method is None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        info = detect_launch_environment(os.environ)
    init_method = _init_method(info, config)
    if info.rank == 0:
        for descriptor in lock_run(config.trainer):
            os.set_inheritable(descriptor, True)
        if not uses_agent_store(init_method):
            host, port = _host_port(info, init_method)
            port = _fork_store(host, port)
            if init_method == "env://":
                os.environ["MASTER_PORT"] = str(port)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ[LAUNCHER] = str(PARENT)
    become_supervisor()


def _init_method(info: RankInfo, config: Config) -> str:
    init_method = resolve_init_method(info, config.distributed.init_method, config.trainer.run_dir)
    if init_method.startswith("file://"):
        raise UserError(
            f"distributed.survive is true, which needs a store at a host and port, not {init_method}: set "
            "distributed.init_method to tcp://host:port, the first host and a free port of it"
        )
    return init_method


def _host_port(info: RankInfo, init_method: str) -> tuple[str, int]:
    """The store's address for all processes."""
    host, port = host_and_port(init_method)
    is_one_machine = info.local_world_size == info.world_size and not uses_agent_store(init_method)
    return LOOPBACK if is_one_machine else host, port


def _fork_store(host: str, port: int) -> int:
    """Hosts the store in a process of its own, which ends with this one. Returns its port."""
    reader, writer = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            for number in SIGNALS:  # the run saves a snapshot first, and this process ends with its parent
                signal.signal(number, signal.SIG_IGN)
            # It looks up the name of whoever connects, and answers nobody meanwhile (torch 2.13).
            os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
            store = _listen(host, port)
            os.write(writer, str(store.port).encode())
            while os.getppid() == parent:
                time.sleep(0.2)
        except BaseException as error:  # no code of the caller may run in this process
            os.write(writer, f"{error}".encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1000).decode()
    os.close(reader)
    if not answer.isdecimal():
        raise UserError(f"rank 0 can't host the store at {host}:{port}: {answer.splitlines()[0] if answer else ''}")
    return int(answer)


def _listen(host: str, port: int) -> dist.TCPStore:
    """Returns the store, which listens at the address of `host` if that is known, else at all of this machine's."""
    address = listening_address(host)
    if address is None:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    return host_store(address, port, None, timedelta(seconds=300))


@contextmanager
def open_context(config: Config) -> Iterator[SurvivingContext]:
    """Connects to the store, and returns a context that is no member yet.

    Raises:
        UserError: the launcher's variables are wrong, or the others did not connect.
    """
    info = detect_launch_environment(os.environ)
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    set_rank(info.rank)
    init_method = _init_method(info, config)
    host, port = _host_port(info, init_method)
    try:
        root = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        # The trainers of one supervisor have one token, so that those which come later find the others.
        store = generation_store(root, info.rank, info.world_size, timeout, os.environ[TOKEN])
        select_gloo_interface(dist.PrefixStore("network", store), info.rank, info.world_size, init_method)
        address = local_address(dist.PrefixStore("network", store), info.world_size, host)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} found no store at {host}:{port} "
            f"(distributed.timeout_seconds is {timeout.total_seconds():g}): {error}; are all {info.world_size} "
            "processes started, and does this address lead to the first one?"
        ) from error
    context = SurvivingContext(info, store, address, timeout)
    try:
        validate(config, info.world_size)
        yield context
    except UserError as error:
        error.is_reported = context.is_reported(str(error))
        raise
    except (PeerError, RunEnded):
        raise
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        tell_supervisor(FAILED)
        raise PeerError(f"the store at {host}:{port} is gone, or cut off from rank {info.rank}") from error
    except Exception as error:
        if context.has_failed_for_all(error):
            tell_supervisor(FAILED)
            raise
        if is_oom_error(error):  # which would end the run, with advice for all ranks
            raise MemoryError(str(error)) from error
        raise
    finally:
        context.membership.leave()
