"""Limits on the connections of a server, in all and of one client.

At a limit the connection that has waited longest without a complete request is closed for the new
one, first of the client that has the most. So connections that are kept open and hardly used keep
nobody out, and no connection is closed whose request has arrived.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Protocol

RATE = 240  # bytes a second of a request that is still coming, as Kestrel's MinRequestBodyDataRate


class Connection(Protocol):
    """owner: its client, see `client_of`. waiting: False while a complete request is answered."""

    owner: str

    @property
    def waiting(self) -> bool: ...

    def drop(self) -> None:
        """Close it at once."""


class Connections:
    """Those of one server. most: in all; of_client: of one client."""

    def __init__(self, most: int, of_client: int) -> None:
        self._most, self._of_client = most, of_client
        self._by_client: dict[str, dict[Connection, None]] = {}  # the longest waiting first
        self._number = 0

    def enter(self, connection: Connection) -> bool:
        """Count it, and perhaps drop another for it; False where it must be refused."""
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

    def rest(self, connection: Connection) -> None:
        """It begins to wait: others have waited longer."""
        same = self._by_client.get(connection.owner, {})
        if connection in same:
            del same[connection]
            same[connection] = None

    def leave(self, connection: Connection) -> None:
        """It is closed; nothing where it had left, or never entered."""
        same = self._by_client.get(connection.owner, {})
        if connection in same:
            self._number -= 1
            del same[connection]
            if not same:
                del self._by_client[connection.owner]


def client_of(address: str) -> str:
    """Name of the client that an address belongs to: the address, of IPv6 its first 64 bits, which
    one site has."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))
    return str(ip)


def seconds_for(size: int, seconds: float) -> float:
    """Seconds from the start of a request in which more than `size` bytes of it must arrive: half
    of a client's time and one more for each RATE bytes, up to all of its time."""
    return min(seconds, seconds / 2 + size / RATE)
