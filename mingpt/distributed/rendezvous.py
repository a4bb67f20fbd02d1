"""The rendezvous of ranks at a key-value store, and the network interface that gloo uses."""

import hashlib
import os
import platform
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from mingpt.distributed.launcher import RankInfo
from mingpt.errors import UserError

POLL_SECONDS = 0.02  # seconds between checks of the store; a rendezvous needs several checks
LOOPBACK = "127.0.0.1"
DEFAULT_ROUTE_HOST = "192.0.2.1"  # reserved for documentation (RFC 5737), so packets to it take the default route


def resolve_init_method(info: RankInfo, init_method: str | None) -> str:
    """Returns `init_method`, or the launcher's address if it is None; raises a UserError if there is no address."""
    found = init_method or info.init_method
    if found is None or (found == "env://" and info.init_method != "env://"):
        variables = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        raise UserError(
            f"environment: {variables}; rank {info.rank} of {info.world_size} does not have a rendezvous address: set "
            "both (on one machine, for example MASTER_ADDR=127.0.0.1 MASTER_PORT=29500), or set "
            "distributed.init_method to tcp://host:port or file:///path"
        )
    return found


def uses_agent_store(init_method: str) -> bool:
    """Returns whether ranks rendezvous at the store of torchrun's agent."""
    return init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def host_and_port(init_method: str) -> tuple[str, int]:
    """Returns the address of the store at env:// or tcp://host:port. Both have been checked before."""
    if init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    url = urlsplit(init_method)
    return url.hostname, url.port  # type: ignore[return-value]


def machine_id() -> str:
    """Returns a string that identifies this machine, even if other machines have the same host name."""
    return f"{platform.node()} {psutil.boot_time():.0f}"


def rendezvous(init_method: str, rank: int, world_size: int, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Returns a store that contains only the keys of this start, and whether all ranks are on one machine.

    A store may outlive its ranks: torchrun gives the same store to every generation of workers, and a file remains
    when ranks exit. gloo would read the addresses of dead processes there (torch 2.13: workers then hang or are refused
    at about every second restart). The restart count does not identify a generation, because a change of membership
    does not increase it. So each rank writes a new token, and joins the generation of the tokens that it sees, again
    whenever one changes. Dead ranks join none. A generation that all ranks have joined is complete.

    Raises:
        ValueError, RuntimeError, OSError: the address is invalid, or the other ranks did not connect.
    """
    store: dist.Store
    if init_method.startswith("file://"):  # PyTorch's rendezvous treats # and ? as the end of the path
        store = dist.FileStore(init_method.removeprefix("file://"), world_size)
        store.set_timeout(timeout)
    else:
        host, port = host_and_port(init_method)
        is_host = rank == 0 and not uses_agent_store(init_method)
        listener = None
        if is_host and host in (LOOPBACK, "localhost"):  # a store would listen at all addresses
            host = LOOPBACK
            listener = socket.create_server((host, port), backlog=1024).detach()
        store = dist.TCPStore(host, port, is_master=is_host, timeout=timeout, master_listen_fd=listener)
    token = f"{machine_id()}/{uuid.uuid4().hex}"
    store.set(f"token/{rank}", token)
    keys = [f"token/{other}" for other in range(world_size)]
    tokens: list[str] = []
    joined = ""  # a digest of all tokens
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if joined and store.add(joined, 0) == world_size:
            return dist.PrefixStore(joined, store), len({other.split("/")[0] for other in tokens}) == 1
        if store.check(keys):
            tokens = [value.decode() for value in store.multi_get(keys)]
            generation = hashlib.sha256("".join(tokens).encode()).hexdigest()
            if token in tokens and generation != joined:
                if rank == 0:
                    # With this key of NCCL's watchdog in the store, NCCL would also end these ranks after some minutes
                    # (HeartbeatMonitor::runLoop in ProcessGroupNCCL.cpp).
                    store.delete_key("exception_dump")
                joined = generation
                store.add(joined, 1)
                continue
        time.sleep(POLL_SECONDS)  # not a request that blocks, which Ctrl-C can't interrupt
    raise TimeoutError(f"not all {world_size} ranks have connected to the store")


def select_gloo_interface(is_one_host: bool, init_method: str) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set, to the interface that leads to the other ranks.

    By default, gloo looks up the host's own name. This takes seconds if a DNS server does not answer, and on many
    systems the name resolves to 127.0.1.1 or not at all. Between hosts, gloo's default works if the name resolves to an
    address other than the loopback.
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


def _address_towards(host: str) -> str | None:
    """Returns this host's IPv4 address on the route to another host; None if the only route is the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # sends nothing, since this is a datagram socket
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None
