"""Make the client of the registry, layout, store or hub at an address."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from optimizer.foundation.buckets import objects
from optimizer.foundation.buckets.objects import STORES, BucketObjects
from optimizer.foundation.errors import RecipeError
from optimizer.publish.address import BundleAddress, refuse_credentials
from optimizer.publish.environments.prune import PrunablePlace
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.hubs.hub import Hub
from optimizer.publish.hubs.mlflow import RegisteredModel
from optimizer.publish.registries.credentials import read_basic
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.registries.object_store import ObjectStore
from optimizer.publish.registries.place import Place
from optimizer.publish.registries.registry import Registry
from optimizer.publish.registries.transport import Transport

PACKAGES = {**{name: store.packages for name, store in STORES.items()}, "mlflow": ("mlflow",)}
"""{scheme of an address: packages that reach it}; the extra of that name installs them."""


def check_installed(address: BundleAddress) -> None:
    """Raises MachineError for a missing package that publishing to the address needs."""
    objects.check_installed(PACKAGES.get(address.store, ()), address.store, str(address))


def make_place(
    address: BundleAddress,
    docker: Path | None,
    *,
    plain: bool = False,
    hub: str | None = None,
    token_services: tuple[str, ...] = (),
) -> Place | Folders:
    """Make the client of the registry, hub or bucket at a bundle's address.

    docker: folder with docker's config.json; None: no credentials are read
    plain: True uses HTTP instead of HTTPS also for hosts other than this machine
    hub: URL of the hub's server; None for huggingface_hub's default
    token_services: HOST or HOST:PORT of further services that may get the registry's password

    Raises MachineError for a missing package.
    """
    if address.store == "hf":
        refuse_credentials(hub or "", "--hf-endpoint", "The token is that of `hf auth login`.")
        return Folders(Hub(address.name, hub))
    if address.store == "mlflow":
        check_installed(address)
        return Folders(RegisteredModel(address.name, address.host or None))
    if address.folder is not None or address.store:
        return make_prunable(address)
    basic = partial(read_basic, docker, address.host) if docker else lambda: None
    return Registry(Transport(address.host, basic, plain, token_services), address.name)


def make_prunable(address: BundleAddress) -> PrunablePlace:
    """Make the client of a layout or an object store. Raises RecipeError for a registry or hub."""
    if address.folder is not None:
        return OciLayout(address.folder)
    if address.store not in STORES:
        raise RecipeError(
            "registries and hubs remove old versions by their own retention",
            where=str(address),
            accepted="oci-layout:, file://, s3://, gs:// and az:// addresses",
        )
    check_installed(address)
    bucket, _, prefix = address.name.partition("/")
    return ObjectStore(BucketObjects(address.store, bucket, prefix))
