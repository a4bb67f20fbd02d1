"""The start: the supervisor, the store, and the context of a trainer."""

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from mingpt.config import Config
from mingpt.distributed.launch_environment import (
    LOOPBACK,
    RankInfo,
    detect_launch_environment,
    host_and_port,
    listening_address,
    resolve_init_method,
    uses_agent_store,
)
from mingpt.errors import RunEnded, UserError
from mingpt.prepare_run import prepare_run
from mingpt.run_lock import lock_run
from mingpt.signals import is_interactive
from mingpt.survive.context import open_context
from mingpt.survive.loop import SurvivingLoop
from mingpt.survive.supervisor import RESTART_STATUS, SIGNALS, TOKEN, become_supervisor

if TYPE_CHECKING:
    from trainer import Trainer


def train_surviving(config: Config, trainer_class: "type[Trainer]") -> int:
    """Trains in this process if a supervisor has started it; otherwise this process becomes a supervisor.

    Returns:
        the exit status

    Raises:
        UserError: the launcher's variables are wrong, or another run uses a folder.
    """
    if TOKEN not in os.environ:
        supervise(config)
    info = detect_launch_environment(os.environ)
    init_method = _init_method(info, config)
    host, port = _host_port(info, init_method)
    with open_context(config, info, init_method, host, port) as context:
        try:
            prepare_run(config, context)
            status = SurvivingLoop(trainer_class(config, context), context).train()
        except RunEnded as ended:
            status = ended.status
        if status != RESTART_STATUS:
            context.membership.leave_run(status)
    return status


def supervise(config: Config) -> NoReturn:
    """Replaces this process by the supervisor of a trainer. Rank 0 first locks the run's folders and starts the store.

    Raises:
        UserError: this process is a session, the launcher's variables are wrong, or another run uses a folder.
    """
    if is_interactive():
        raise UserError(
            "distributed.survive is true, which replaces this process: start main.py in a shell, in a notebook by `!`"
        )
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
    """Hosts the store in a process of its own, which ends with this one. Returns its port.

    It listens at the address of `host` if that is known, else at all addresses of this machine.
    """
    address = listening_address(host) or ""
    is_dual = not address and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (address, port), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual, backlog=1024
        )
    except OSError as error:
        raise UserError(f"rank 0 can't host the store at {host}:{port}: {error.strerror}") from error
    port = listener.getsockname()[1]
    parent = os.getpid()
    if os.fork() == 0:
        try:
            for number in SIGNALS:  # the run saves a snapshot first, and this process ends with its parent
                signal.signal(number, signal.SIG_IGN)
            _store = dist.TCPStore(
                address or LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            while os.getppid() == parent:
                time.sleep(0.2)
        finally:  # no code of the caller may run in this process
            os._exit(0)
    return port
