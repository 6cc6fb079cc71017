"""Check the Host header of a request against DNS rebinding.

A web page whose name resolves to this machine can reach a server here from its scripts; the header
then has the name of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True)
class Hosts:
    """Names under which clients may address the server.

    names: accepted names in lower case. The address of the connection is accepted too, and on a
        loopback address the names of loopback
    """

    names: frozenset[str] = frozenset()

    def accept(self, header: str, address: str) -> bool:
        """Return True if a request with this `Host` header is accepted.

        header: value of the header; "" without one, which every browser sends
        address: address that the connection was made to
        """
        name = _name(header)
        if not header.strip() or name in self.names or name == address:
            return True
        local = name == "localhost" or name.endswith(".localhost") or is_loopback(name)
        return local and is_loopback(address)


def is_loopback(address: str) -> bool:
    """Return True for an address of a server that only this machine can reach."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _name(header: str) -> str:
    """Return the host that a request's header Host names, without its port, in lower case."""
    host = header.strip().lower()
    if host.startswith("["):  # an address of IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")
