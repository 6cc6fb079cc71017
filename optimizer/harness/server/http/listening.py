"""Resolve the address that a server listens on, and open its sockets."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, MachineError
from .hosts import is_loopback

BACKLOG = 2048  # connections that wait to be accepted, as uvicorn has it


@dataclass(frozen=True)
class HostAddress:
    """One address of a host that the server listens on.

    family, address: as in Python's socket module
    """

    host: str
    port: int
    family: int
    address: Any

    @property
    def loopback(self) -> bool:
        """Return True if only this machine can reach the address."""
        return is_loopback(str(self.address[0]).partition("%")[0])


def resolve_addresses(host: str, port: int) -> list[HostAddress]:
    """Resolve the server's host to all of its addresses. Raises InputError if it has none."""
    try:
        resolved = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, ValueError):  # a name that DNS cannot write is a ValueError
        raise _report_no_address(
            host, "it is neither an address nor a name that this machine resolves"
        ) from None
    unique = dict.fromkeys((family, address) for family, *_, address in resolved)
    return [HostAddress(host, port, family, address) for family, address in unique]


def open_sockets(hosts: list[HostAddress]) -> list[socket.socket]:
    """Open the server's listening socket for each address; with port 0, all on the same free port.

    Raises MachineError for a port that is in use or not allowed, and InputError for addresses that
    do not belong to this machine.
    """
    sockets = list[socket.socket]()
    try:
        for one in hosts:
            port = sockets[0].getsockname()[1] if sockets else one.port
            address = (one.address[0], port, *one.address[2:])
            try:
                listener = socket.create_server(address, family=one.family, backlog=BACKLOG)
            except OSError as e:
                if e.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # such as ::1 of localhost where there is no IPv6
                raise _report_no_listener(one, e) from None
            listener.setblocking(False)
            sockets.append(listener)
        if not sockets:
            raise _report_no_address(hosts[0].host, "it is not an address of this machine")
    except BaseException:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def refuse_exposed(host: str) -> InputError:
    """Return the error of a server that other machines could reach without a token.

    It is raised unless --insecure is set.
    """
    return InputError(
        f"other machines reach {host!r:.80}, and the server asks them for no token",
        where="--host",
        accepted="--token-file FILE, or --insecure where a firewall or the platform of "
        "a container decides who reaches the server",
    )


def _report_no_address(host: str, why: str) -> InputError:
    return InputError(
        f"cannot listen on {host!r:.80}: {why}",
        where="--host",
        accepted="an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them",
    )


def _report_no_listener(one: HostAddress, error: OSError) -> MachineError:
    where, other = f"{one.host}:{one.port}", "Give another --port, or 0 for any that is free."
    if error.errno == errno.EADDRINUSE:
        return MachineError(
            "cannot listen: another program listens there", where=where, fix=f"End it. {other}"
        )
    return MachineError(f"cannot listen ({error.strerror})", where=where, fix=other)
