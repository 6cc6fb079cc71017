"""The place that an address names."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.publish.address import Address, refuse_credentials
from optimizer.publish.environments.prune import Prunable
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.hubs.hub import Hub
from optimizer.publish.hubs.mlflow import RegisteredModel
from optimizer.publish.registries.credentials import basic
from optimizer.publish.registries.layout import Layout
from optimizer.publish.registries.object_store import ObjectStore
from optimizer.publish.registries.objects import STORES, Objects
from optimizer.publish.registries.place import Place
from optimizer.publish.registries.registry import Registry
from optimizer.publish.registries.transport import Transport

PACKAGES = {**{name: store.packages for name, store in STORES.items()}, "mlflow": ("mlflow",)}
"""Packages that reach an address, by its scheme; the extra of that name installs them."""


def check_installed(address: Address) -> None:
    """Raises MachineError where the package that reaches the address is missing."""
    missing = [p for p in PACKAGES.get(address.store, ()) if find_spec(p) is None]
    if missing:
        raise MachineError(
            f"{missing[0]} is not installed",
            where=str(address),
            fix=f"pip install 'optimize-toolchain[{address.store}]'",
        )


def place_of(
    address: Address,
    docker: Path | None,
    *,
    plain: bool = False,
    hub: str | None = None,
    token_services: tuple[str, ...] = (),
) -> Place | Folders:
    """docker: the folder with docker's config.json, None where there is none. plain: HTTP to a
    registry elsewhere. hub: the address of another server than huggingface_hub's own default.
    token_services: see Transport. Raises MachineError where a package is missing."""
    if address.store == "hf":
        refuse_credentials(hub or "", "--hf-endpoint", "The token is that of `hf auth login`.")
        return Folders(Hub(address.name, hub))
    if address.store == "mlflow":
        check_installed(address)
        return Folders(RegisteredModel(address.name, address.host or None))
    if address.folder is not None or address.store:
        return prunable(address)
    basic_of = partial(basic, docker, address.host) if docker else lambda: None
    return Registry(Transport(address.host, basic_of, plain, token_services), address.name)


def prunable(address: Address) -> Prunable:
    """A layout or a store. Raises RecipeError for a registry."""
    if address.folder is not None:
        return Layout(address.folder)
    if address.store not in STORES:
        raise RecipeError(
            "a registry or a hub has retention of its own",
            where=str(address),
            accepted="oci-layout:, file://, s3://, gs:// and az:// addresses",
        )
    check_installed(address)
    bucket, _, prefix = address.name.partition("/")
    return ObjectStore(Objects(address.store, bucket, prefix))
