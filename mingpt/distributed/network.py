"""Rendezvous addresses, and the network interface that gloo uses."""

import os
import platform
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from mingpt.distributed.launcher import RankInfo
from mingpt.errors import UserError

LOOPBACK = "127.0.0.1"
DEFAULT_ROUTE_HOST = "192.0.2.1"  # reserved for documentation (RFC 5737), so packets to it take the default route


def resolve_init_method(info: RankInfo, init_method: str | None) -> str:
    """Returns `init_method`, or the launcher's address if it is None.

    Raises:
        UserError: there is no address, its host does not resolve, or its file can't be opened.
    """
    found = init_method or info.init_method
    if found is None or (found == "env://" and info.init_method != "env://"):
        variables = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        raise UserError(
            f"environment: {variables}; rank {info.rank} of {info.world_size} does not have a rendezvous address: set "
            "both (on one machine, for example MASTER_ADDR=127.0.0.1 MASTER_PORT=29500), or set "
            "distributed.init_method to tcp://host:port or file:///path"
        )
    source = "environment: the rendezvous address" if init_method is None else "distributed.init_method"
    if found.startswith("file://"):
        try:  # otherwise, PyTorch silently retries until the timeout or longer
            with open(found.removeprefix("file://"), "ab"):
                return found
        except OSError as error:
            raise UserError(
                f"{source} is {found}, which can't be opened: {error.strerror}; name a file in a folder that "
                "exists and that you may write to"
            ) from error
    host, port = host_and_port(found)
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is invalid, for example with two dots
        raise UserError(
            f"{source} is {host}:{port}, but this machine, {platform.node()}, can't resolve {host!r}; set MASTER_ADDR "
            "and MASTER_PORT, or distributed.init_method, with a name of rank 0's host that resolves, or its IP address"
        ) from error
    return found


def uses_agent_store(init_method: str | None) -> bool:
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
