"""The place that an address names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from optimizer.publish.address import Address
from optimizer.publish.credentials import basic
from optimizer.publish.folders import Folders
from optimizer.publish.hub import Hub
from optimizer.publish.layout import Layout
from optimizer.publish.place import Place
from optimizer.publish.registry import Registry
from optimizer.publish.transport import Transport


def place_of(
    address: Address, docker: Path, *, plain: bool = False, hub: str | None = None
) -> Place | Folders:
    """docker: the folder with docker's config.json. plain: HTTP to a registry elsewhere. hub: the
    address of another server than huggingface_hub's own default."""
    if address.store == "hf":
        return Folders(Hub(address.name, hub))
    if address.folder is not None:
        return Layout(address.folder)
    return Registry(
        Transport(address.host, partial(basic, docker, address.host), plain), address.name
    )
