"""Which network do ranks talk over, where a machine's own name does not tell?"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from urllib.parse import urlsplit

import torch.distributed as dist

DEFAULT_ROUTE_HOST = "192.0.2.1"  # an address kept for documentation (RFC 5737): its route is the default one
GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


def select_gloo_interface(store: dist.Store, rank: int, size: int, init_method: str) -> None:
    """Makes gloo use the network towards the other machines, where it would take the loopback alone.

    gloo listens where this machine's name leads, and many systems lead it to 127.0.1.1 or nowhere: others can't reach
    that. What GLOO_SOCKET_IFNAME says, goes first; and on one machine the loopback is right.

    Args:
        store: that ranks share
        rank: this process's number
        size: how many there are
        init_method: where ranks meet
    """
    store.set(f"host/{rank}", platform.node())
    hosts = {store.get(f"host/{other}") for other in range(size)}
    if len(hosts) == 1 or "GLOO_SOCKET_IFNAME" in os.environ or _address_towards(platform.node()) is not None:
        return
    meeting = os.environ.get("MASTER_ADDR") if init_method == "env://" else urlsplit(init_method).hostname
    address = _address_towards(meeting or "") or _address_towards(DEFAULT_ROUTE_HOST)
    if address is not None and (name := _interface(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None if there is no way but the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # of a datagram socket, this sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def _interface(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none, or this is no Linux
                found = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
