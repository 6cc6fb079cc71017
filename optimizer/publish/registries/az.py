"""Objects in Azure Blob Storage, through adlfs.

https://learn.microsoft.com/en-us/rest/api/storageservices/specifying-conditional-headers-for-blob-service-operations.
The account and who may write to it are what adlfs takes from the environment
(AZURE_STORAGE_CONNECTION_STRING; AZURE_STORAGE_ACCOUNT_NAME with a key, a token or `az login`),
and nothing else. A blob appears when the list of its blocks is committed, after its digest was
compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from optimizer.foundation.errors import MachineError
from optimizer.publish.registries.objects import LARGEST_READ, Stored, changed, too_large
from optimizer.publish.registries.place import Blob

T = TypeVar("T")
PART = 32 << 20  # bytes; a blob up to this size is sent in one request
MOST_PARTS = 50_000
LOST = (409, 412)  # statuses of a write whose condition does not hold
ABSENT = (404, 416)


class AzureObjects:
    """Objects of a container below a prefix."""

    no_version = '"0x0"'

    def __init__(self, container: str, prefix: str, part_size: int = PART) -> None:
        self.where = f"az://{container}/{prefix}"
        self._container, self._prefix, self._part_size = container, prefix, part_size
        self._client: Any = None

    def read(self, name: str) -> Stored | None:
        async def read() -> Stored:
            stream = await self._blob(name).download_blob()
            if stream.size > LARGEST_READ:
                raise too_large(stream.size, f"{self.where}/{name}")
            return Stored(await stream.readall(), stream.properties.etag)

        return self._ask(read, ABSENT)

    def write(self, name: str, data: bytes, expected: str) -> bool:
        from azure.core import MatchConditions

        condition: dict[str, Any] = {"overwrite": False}
        if expected:
            condition = {
                "overwrite": True,
                "etag": expected,
                "match_condition": MatchConditions.IfNotModified,
            }

        async def write() -> bool:
            await self._blob(name).upload_blob(data, **condition)
            return True

        return self._ask(write, (*LOST, 404)) or False

    def has(self, name: str, digest: str) -> bool:
        del digest  # Azure keeps no SHA-256; what is there was compared before it was committed

        async def has() -> bool:
            await self._blob(name).get_blob_properties()
            return True

        return self._ask(has, ABSENT) or False

    def put(self, name: str, blob: Blob) -> None:
        if isinstance(blob.content, Path) and blob.size > self._part_size:
            self._put_parts(name, blob, blob.content)
            return
        data = blob.content if isinstance(blob.content, bytes) else blob.content.read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
            raise changed(blob)

        async def put() -> None:
            await self._blob(name).upload_blob(data, overwrite=True, validate_content=True)

        self._ask(put)

    def part(self, name: str, start: int, end: int) -> bytes | None:
        async def part() -> bytes:
            stream = await self._blob(name).download_blob(offset=start, length=end - start)
            data: bytes = await stream.readall()
            return data

        return self._ask(part, ABSENT)

    def sizes(self, folder: str) -> dict[str, int]:
        async def sizes() -> dict[str, int]:
            listed = (
                self._files()
                .service_client.get_container_client(self._container)
                .list_blobs(name_starts_with=f"{self._prefix}/{folder}/")
            )
            return {b.name.removeprefix(f"{self._prefix}/"): b.size async for b in listed}

        return self._ask(sizes) or {}

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self._ask(self._blob(name).delete_blob, (404,))

    def close(self) -> None:
        from fsspec.asyn import sync

        client, self._client = self._client, None
        if client is not None:
            sync(client.loop, client.service_client.close)

    def _put_parts(self, name: str, blob: Blob, path: Path) -> None:
        """In blocks; the blob appears with all of them, once its digest is known to be right."""
        from azure.storage.blob import BlobBlock

        size = max(self._part_size, -(-blob.size // MOST_PARTS))
        whole, blocks = hashlib.sha256(), list[Any]()
        with path.open("rb") as f:
            while data := f.read(size):
                whole.update(data)
                block = f"{len(blocks):08}"
                self._ask(partial(self._blob(name).stage_block, block, data))
                blocks.append(BlobBlock(block_id=block))
        if f"sha256:{whole.hexdigest()}" != blob.digest:
            raise changed(blob)
        self._ask(partial(self._blob(name).commit_block_list, blocks))

    def _files(self) -> Any:
        """The client, made when it is needed: it has a thread, and does not survive a fork."""
        if self._client is None:
            import adlfs

            try:
                self._client = adlfs.AzureBlobFileSystem(
                    skip_instance_cache=True, use_listings_cache=False, anon=False
                )
            except ValueError:
                raise self._no_account() from None
        return self._client

    def _blob(self, name: str) -> Any:
        key = f"{self._prefix}/{name}"
        return self._files().service_client.get_blob_client(self._container, key)

    def _ask(self, work: Callable[[], Awaitable[T]], accepted: Collection[int] = ()) -> T | None:
        """What the work gives; None for an error whose status is accepted."""
        from azure.core.exceptions import AzureError
        from fsspec.asyn import FSTimeoutError, sync

        try:
            result: T = sync(self._files().loop, work)
            return result
        except (AzureError, FSTimeoutError, OSError) as e:
            status = getattr(e, "status_code", None)
            if status in accepted and getattr(e, "error_code", "") != "ContainerNotFound":
                return None
            raise self._explained(e, status) from e

    def _explained(self, error: Exception, status: int | None) -> MachineError:
        code = str(getattr(error, "error_code", "") or status or type(error).__name__)
        if code == "ContainerNotFound":
            return MachineError(
                "there is no such container", where=self.where, fix="Create it first."
            )
        if status in (401, 403) or type(error).__name__ == "ClientAuthenticationError":
            return MachineError(
                f"not allowed ({code})",
                where=self.where,
                fix="Needed is the role Storage Blob Data Contributor; see `az login`.",
            )
        return MachineError(
            f"the store does not answer ({code})",
            where=self.where,
            fix="Check the network and the account; the same command goes on where it stopped.",
        )

    def _no_account(self) -> MachineError:
        return MachineError(
            "no storage account",
            where=self.where,
            fix="Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and run "
            "`az login`.",
        )
