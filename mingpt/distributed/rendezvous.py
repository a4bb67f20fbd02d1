"""The rendezvous of ranks at a key-value store, and a comparison between ranks that needs no process group."""

import errno
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from mingpt.distributed.network import LOOPBACK, host_and_port, uses_agent_store

POLL_SECONDS = 0.01  # seconds between checks of the store; a rendezvous needs several checks


def rendezvous(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns a store that contains only the keys of this launch.

    Raises:
        ValueError, RuntimeError, OSError: the address is invalid, or the other ranks did not connect.
    """
    if init_method.startswith("file://"):  # PyTorch's rendezvous treats # and ? as the end of the path
        file_store = dist.FileStore(init_method.removeprefix("file://"), world_size)
        file_store.set_timeout(timeout)
        return generation_store(file_store, rank, world_size, timeout)
    host, port = host_and_port(init_method)
    has_agent = uses_agent_store(init_method)
    is_host = rank == 0 and not has_agent
    listener = None
    if is_host and host in (LOOPBACK, "localhost"):
        host = LOOPBACK
        listener = socket.create_server((host, port), backlog=1024).detach()  # a store listens at all addresses itself
    store: dist.Store = dist.TCPStore(host, port, is_master=is_host, timeout=timeout, master_listen_fd=listener)
    if not has_agent:
        store = dist.PrefixStore("by hand", store)  # the agent of another run may use this port
        claim_rank(store, rank, world_size)
    return generation_store(store, rank, world_size, timeout)


def claim_rank(store: dist.Store, rank: int, world_size: int) -> None:
    """Claims a rank in the run at this store. A rank of another run with the same port does not change it.

    Raises:
        OSError: the run has a different number of processes, or another process with this rank.
    """
    for name, value in (("number of processes", str(world_size)), (f"process of rank {rank}", uuid.uuid4().hex)):
        if store.compare_set(name, "", value).decode() != value:
            raise OSError(errno.EADDRINUSE, f"the run at this address has a different {name}")


def generation_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns a view of a store, with a prefix that only the ranks of this start use. The store may outlive its ranks.

    torchrun gives the same store to every generation of workers, and a file remains when ranks exit. gloo would read
    the addresses of dead processes there (torch 2.13: workers then hang or are refused at about every second restart).
    The restart count does not identify a generation, because a change of membership does not increase it. So each rank
    writes a new token. Rank 0 offers a new prefix to the tokens that it sees, and again whenever one changes. A rank
    that finds an offer to its own token accepts it. Dead ranks can't accept. When all have accepted, rank 0 confirms.

    Only rank 0 reads the keys of all ranks. Ranks poll, because Ctrl-C can't interrupt a request that blocks.

    Raises:
        TimeoutError: the other ranks did not connect.
    """
    token = uuid.uuid4().hex
    store.set(f"token/{rank}", token)
    own_offer = f"offer/{token}"
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0:
            _offer_prefix(store, world_size)
        if store.check([own_offer]):
            prefix = store.get(own_offer).decode()
            store.set(f"{prefix}/accepted/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/accepted/{other}" for other in range(world_size)]):
                # With this key of NCCL's watchdog in the store, NCCL would also end these ranks after some minutes
                # (HeartbeatMonitor::runLoop in ProcessGroupNCCL.cpp). The ranks that could set it again are dead.
                store.delete_key("exception_dump")
                store.set(f"{prefix}/confirmed", "")
            if store.check([f"{prefix}/confirmed"]):
                return dist.PrefixStore(prefix, store)
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"not all {world_size} ranks have connected to the store")


def _offer_prefix(store: dist.Store, world_size: int) -> None:
    """Offers a new prefix to the tokens of all ranks, unless all of them already have the same offer."""
    token_keys = [f"token/{rank}" for rank in range(world_size)]
    if not store.check(token_keys):
        return
    offer_keys = [f"offer/{token.decode()}" for token in store.multi_get(token_keys)]
    if not store.check(offer_keys) or len(set(store.multi_get(offer_keys))) > 1:
        store.multi_set(offer_keys, [uuid.uuid4().hex] * world_size)  # type: ignore[attr-defined]


def all_equal(store: dist.Store, rank: int, world_size: int, value: str) -> bool:
    """Returns whether all ranks pass the same value. Rank 0 compares the values."""
    store.set(f"value/{rank}", value)
    if rank == 0:
        values = store.multi_get([f"value/{other}" for other in range(world_size)])
        store.set("is equal", str(len(set(values)) == 1))
    return store.get("is equal") == b"True"
