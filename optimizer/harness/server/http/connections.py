"""Limit the connections of a server, in total and per client.

At a limit a new connection replaces the one that has waited longest without a complete request,
first of the client with the most connections. So idle connections lock nobody out, and no
connection with a complete request is closed.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Protocol

RATE = 240  # minimum bytes a second of a request, as Kestrel's MinRequestBodyDataRate


class Connection(Protocol):
    """Interface of an open connection to the server.

    owner: client of the connection, see `client_of`
    waiting: False while a complete request is answered
    """

    owner: str

    @property
    def waiting(self) -> bool: ...

    def drop(self) -> None:
        """Close the client's connection at once."""


class Connections:
    """Open connections of one server.

    most: maximum number of connections
    of_client: maximum number of one client's connections
    """

    def __init__(self, most: int, of_client: int) -> None:
        self._most, self._of_client = most, of_client
        self._by_client: dict[str, dict[Connection, None]] = {}  # the longest waiting first
        self._number = 0

    def enter(self, connection: Connection) -> bool:
        """Count a client's new connection to the server; return False if it must be refused.

        At a limit, a waiting connection is dropped to make room; without one, the new one is
        refused.
        """
        same = self._by_client.get(connection.owner, {})
        if len(same) >= self._of_client:
            crowds = [same]
        elif self._number >= self._most:
            crowds = sorted(self._by_client.values(), key=len, reverse=True)
        else:
            crowds = []
        if crowds:
            oldest = next((c for crowd in crowds for c in crowd if c.waiting), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.drop()
        self._by_client.setdefault(connection.owner, {})[connection] = None
        self._number += 1
        return True

    def start_waiting(self, connection: Connection) -> None:
        """Record that a client's connection waits for a request from now on.

        Of its client's connections it becomes the last that is dropped.
        """
        same = self._by_client.get(connection.owner, {})
        if connection in same:
            del same[connection]
            same[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a client's connection that is closed; a second call does nothing."""
        same = self._by_client.get(connection.owner, {})
        if connection in same:
            self._number -= 1
            del same[connection]
            if not same:
                del self._by_client[connection.owner]


def client_of(address: str) -> str:
    """Return the server's client of an address: an IPv4 address, or the first 64 bits of an IPv6
    address.

    All IPv6 addresses with the same first 64 bits belong to one site.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))
    return str(ip)


def seconds_for(size: int, seconds: float) -> float:
    """Return the seconds from the start of a client's request within which more than `size` bytes
    must arrive.

    seconds: maximum seconds of any request

    The limit is half of `seconds` plus one second per RATE bytes, and `seconds` at most.
    """
    return min(seconds, seconds / 2 + size / RATE)
