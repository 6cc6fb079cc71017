"""Objects in Google Cloud Storage, through gcsfs.

https://cloud.google.com/storage/docs/request-preconditions: a generation names one version of an
object. Credentials are what gcsfs finds where Google's own tools keep them (`gcloud auth
application-default login`, GOOGLE_APPLICATION_CREDENTIALS, the machine's account). A large object
appears with its last chunk, which is sent when its digest was compared.
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
CHUNK = 32 << 20  # bytes, a multiple of 256 KiB; an object up to this size is sent in one request
READS = 5
"""How often an object is read again that others write meanwhile."""
OBJECT = "b/{}/o/{}"


class GoogleObjects:
    """Objects of a bucket below a prefix. chunk_size: a multiple of 256 KiB."""

    no_version = "1"

    def __init__(self, bucket: str, prefix: str, chunk_size: int = CHUNK) -> None:
        self.where = f"gs://{bucket}/{prefix}"
        self._bucket, self._prefix, self._chunk_size = bucket, prefix, chunk_size
        self._client: Any = None

    def read(self, name: str) -> Stored | None:
        at = self._bucket, self._key(name)

        async def read() -> Stored | None:
            described = await self._files()._call("GET", OBJECT, *at, json_out=True)
            if int(described["size"]) > LARGEST_READ:
                raise too_large(int(described["size"]), f"{self.where}/{name}")
            version = str(described["generation"])
            _, data = await self._files()._call("GET", OBJECT, *at, alt="media", generation=version)
            return Stored(data, version)

        for _ in range(READS):
            if (stored := self._ask(read, "404")) is not None:
                return stored
            if not self.has(name, ""):
                return None
        raise MachineError(
            "it is written all the time", where=f"{self.where}/{name}", fix="Run it again."
        )

    def write(self, name: str, data: bytes, expected: str) -> bool:
        async def write() -> bool:
            await self._files()._call(
                *("POST", f"{self._files()._location}/upload/storage/v1/b/{self._bucket}/o"),
                uploadType="media",
                name=self._key(name),
                ifGenerationMatch=expected or "0",
                headers={"Content-Type": "application/json"},
                data=data,
            )
            return True

        return self._ask(write, "412") or False

    def has(self, name: str, digest: str) -> bool:
        del digest  # Google keeps no SHA-256; what is there was compared before it appeared

        async def has() -> bool:
            await self._files()._call("GET", OBJECT, self._bucket, self._key(name))
            return True

        return self._ask(has, "404") or False

    def put(self, name: str, blob: Blob) -> None:
        if isinstance(blob.content, Path) and blob.size > self._chunk_size:
            self._put_chunks(name, blob, blob.content)
            return
        data = blob.content if isinstance(blob.content, bytes) else blob.content.read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
            raise changed(blob)

        async def put() -> None:
            from gcsfs.core import simple_upload

            at = self._bucket, self._key(name)
            await simple_upload(self._files(), *at, data, consistency="md5")

        self._ask(put)

    def part(self, name: str, start: int, end: int) -> bytes | None:
        async def part() -> bytes:
            at, sent = (self._bucket, self._key(name)), {"Range": f"bytes={start}-{end - 1}"}
            _, data = await self._files()._call("GET", OBJECT, *at, alt="media", headers=sent)
            return bytes(data)

        return self._ask(part, "404", "416")

    def sizes(self, folder: str) -> dict[str, int]:
        async def page(token: str | None) -> dict[str, Any]:
            answer: dict[str, Any] = await self._files()._call(
                *("GET", "b/{}/o", self._bucket),
                prefix=self._key(f"{folder}/"),
                pageToken=token,
                json_out=True,
            )
            return answer

        sizes: dict[str, int] = {}
        token: str | None = None
        while True:
            answer = self._ask(partial(page, token)) or {}
            for entry in answer.get("items", ()):
                sizes[entry["name"].removeprefix(f"{self._prefix}/")] = int(entry["size"])
            token = answer.get("nextPageToken")
            if not token:
                return sizes

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            at = self._bucket, self._key(name)
            self._ask(partial(self._files()._call, "DELETE", OBJECT, *at), "404")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            from fsspec.asyn import sync

            sync(client.loop, client.session.close)

    def _put_chunks(self, name: str, blob: Blob, path: Path) -> None:
        from gcsfs.core import initiate_upload, upload_chunk

        files, whole = self._files(), hashlib.sha256()
        location = self._ask(partial(initiate_upload, files, self._bucket, self._key(name)))
        kind = "application/octet-stream"
        with path.open("rb") as f:
            start, data = 0, f.read(self._chunk_size)
            while data:
                whole.update(data)
                following = f.read(self._chunk_size)
                if not following and f"sha256:{whole.hexdigest()}" != blob.digest:
                    raise changed(blob)
                self._ask(partial(upload_chunk, files, location, data, start, blob.size, kind))
                start, data = start + len(data), following

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _files(self) -> Any:
        """The client, made when it is needed: it has a thread, and does not survive a fork."""
        if self._client is None:
            import gcsfs

            self._client = gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)
        return self._client

    def _ask(self, work: Callable[[], Awaitable[T]], *accepted: str) -> T | None:
        """What the work gives; None for an error whose status is accepted."""
        from aiohttp import ClientError
        from fsspec.asyn import FSTimeoutError, sync
        from gcsfs.retry import ChecksumError, HttpError
        from google.auth.exceptions import GoogleAuthError

        try:
            result: T = sync(self._files().loop, work)
            return result
        except (HttpError, ChecksumError, ClientError, FSTimeoutError, OSError) as e:
            status = _status(e)
            if status in accepted:
                return None
            raise self._explained(e, status) from e
        except GoogleAuthError as e:
            raise self._explained(e, "401") from e

    def _explained(self, error: Exception, status: str) -> MachineError:
        if status == "404":
            return MachineError("there is no such bucket", where=self.where, fix="Create it first.")
        if status in ("401", "403"):
            return MachineError(
                f"not allowed ({status})",
                where=self.where,
                fix="Needed is the role Storage Object User; see `gcloud auth application-default "
                "login`.",
            )
        return MachineError(
            f"the store does not answer ({status or type(error).__name__})",
            where=self.where,
            fix="Check the network; the same command goes on where it stopped.",
        )


def _status(error: Exception) -> str:
    """As gcsfs tells it: by the kind of exception, or in a field."""
    kinds: dict[type[Exception], str] = {FileNotFoundError: "404", FileExistsError: "412"}
    if type(error) in kinds:
        return kinds[type(error)]
    if str(error).startswith("Forbidden"):
        return "403"
    return str(getattr(error, "code", None) or "")
