"""Read and write objects in a bucket of S3, Google Cloud Storage or Azure Blob Storage.

obstore (https://developmentseed.org/obstore) sends the requests; credentials, region and endpoint
come from each store's usual settings. An object appears complete, with its digest compared, or not
at all; a conditional write succeeds only if the object still has the version that was read. Parts
of a killed upload stay until a lifecycle rule of the bucket removes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError

T = TypeVar("T")
BUCKET = "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
PREFIX = "(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
"""Prefixes hold only characters that need no escape in any store."""
LARGEST_READ = 64 << 20  # bytes of an object that is read into memory: an index, a manifest
PART = 32 << 20  # bytes; a larger file is sent in parts of this size
MOST_PARTS = 10_000  # of one object, in S3
CONCURRENT_PARTS = 4
PIECE = 64 << 20  # bytes fetched at a time
CLIENT = {"allow_http": True, "timeout": "15m", "read_timeout": "60s"}
RETRIES: dict[str, Any] = {"max_retries": 4}
CREDENTIAL_SECONDS = 300  # until S3 credentials are read from botocore again, which refreshes them
MD5_TAG = re.compile('"([0-9a-f]{32})"')
"""ETag that is the MD5 of the content, unless the store encrypts with a customer's key."""
NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
CODE = re.compile(r"<Code>(\w{1,60})</Code>|status code: (\d{3})")


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of an object, and its version for a conditional write."""

    data: bytes
    version: dict[str, str]


NO_VERSION: dict[str, str] = {"e_tag": '"0x0"', "version": "1"}
"""Version that no object has."""


@dataclass(frozen=True)
class BucketKind:
    """Kind of object store, such as S3, and how to connect to it.

    connect: function (bucket, prefix) -> client of obstore.
    permissions, fix: advice for a refused request, and settings to check without an answer.
    """

    packages: tuple[str, ...]
    connect: Callable[[str, str], Any]
    permissions: str
    fix: str


class BucketObjects:
    """Objects below a prefix of a bucket; names are relative to it, e.g. "index.json".

    Reads follow writes at once, as S3, Google and Azure promise. Errors: MachineError for a store
    that does not answer or refuses.

    store: key of STORES.
    part_size: bytes per part of an upload; at least 5 MiB for Amazon's S3.
    """

    def __init__(self, store: str, bucket: str, prefix: str, part_size: int = PART) -> None:
        self.where = f"{store}://{bucket}/{prefix}"
        self._store, self._part_size = STORES[store], part_size
        self._bucket, self._prefix = bucket, prefix
        self._connected: Any = None

    def read(self, name: str) -> StoredBytes | None:
        """Read an object; None for a missing one. Raises BundleError above LARGEST_READ bytes."""
        import obstore

        def read() -> StoredBytes:
            result = obstore.get(self._client(), name)
            meta = result.meta
            if meta["size"] > LARGEST_READ:
                raise build_size_error(meta["size"], f"{self.where}/{name}")
            version = {"e_tag": meta["e_tag"] or "", "version": meta["version"] or ""}
            return StoredBytes(bytes(result.bytes()), {k: v for k, v in version.items() if v})

        return self._request(read)

    def write(self, name: str, data: bytes, expected: dict[str, str] | None) -> bool:
        """Write an object if its version is `expected` (None: missing), else return False."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def write() -> bool:
            try:
                obstore.put(self._client(), name, data, mode=expected or "create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._request(write) or False

    def has(self, name: str, blob: Blob) -> bool:
        """Return True for an object in the bucket of the blob's size and, if its ETag is an MD5,
        its content."""
        import obstore

        meta = self._request(lambda: obstore.head(self._client(), name))
        if meta is None or meta["size"] != blob.size:
            return False
        tag = MD5_TAG.fullmatch(meta["e_tag"] or "")
        if tag is None or blob.size > self._part_size:
            return True
        if hashlib.md5(blob.read(), usedforsecurity=False).hexdigest() == tag[1]:
            return True
        stored = self.part(name, 0, blob.size) if blob.size else b""
        return stored is not None and digest_of(stored) == blob.digest

    def put(self, name: str, blob: Blob) -> None:
        """Write a complete object to the bucket. Raises BundleError for a file that changed since
        its digest."""
        if isinstance(blob.content, Path) and blob.size > self._part_size:
            size = max(self._part_size, -(-blob.size // MOST_PARTS))
            with blob.content.open("rb") as file:
                self._put(
                    name,
                    _read_and_check(blob, file, size),
                    chunk_size=size,
                    max_concurrency=CONCURRENT_PARTS,
                    use_multipart=True,
                )
            return
        data = blob.read()
        if digest_of(data) != blob.digest:
            raise changed_error(blob)
        self._put(name, data, use_multipart=False)

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """Read bytes from `start` up to `end` or the object's end; None if there are none."""
        import obstore

        options: Any = {"range": (start, end)}
        return self._request(
            lambda: bytes(obstore.get(self._client(), name, options=options).bytes()), "416"
        )

    def receive(self, name: str, size: int, into: Path) -> None:
        """Append the missing bytes of an object of `size` bytes to a file; the caller checks the
        digest. Raises BundleError for a missing or shorter object."""
        with into.open("ab") as f:
            while (start := f.tell()) < size:
                data = self.part(name, start, min(start + PIECE, size))
                if not data:
                    raise BundleError(
                        f"the store has no object of {size:,} bytes here",
                        where=f"{self.where}/{name}",
                    )
                f.write(data[: size - start])

    def check_conditions(self, name: str, data: bytes, fix: str) -> None:
        """Try conditional writes on an object whose bytes never change; it is written if missing.

        Raises MachineError, with the advice `fix`, for a store that ignores conditions, where one
        of two simultaneous writes would be lost.
        """
        self.write(name, data, None)
        if self.write(name, data, None) or self.write(name, data, NO_VERSION):
            raise MachineError(
                "the store ignores the conditions of writes (If-None-Match, If-Match), so that one "
                "of two simultaneous writes would be lost",
                where=self.where,
                accepted="Amazon S3, or a store with conditional writes",
                fix=fix,
            )

    def sizes(self, folder: str) -> dict[str, int]:
        """Return {name: bytes} of the objects whose names begin with "folder/"."""
        import obstore

        def sizes() -> dict[str, int]:
            listed = obstore.list(self._client(), f"{folder}/")
            return {entry["path"]: entry["size"] for page in listed for entry in page}

        return self._request(sizes) or {}

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; a missing one is not an error."""
        import obstore

        def remove(paths: list[str]) -> bool:
            obstore.delete(self._client(), paths)
            return True

        if not self._request(partial(remove, [*names])):  # Google and Azure stop at a missing one
            for name in names:
                self._request(partial(remove, [name]))

    def close(self) -> None:
        """Drop the client; obstore closes its connections."""
        self._connected = None

    def _put(self, name: str, data: Any, **options: Any) -> None:
        import obstore

        if self._request(lambda: obstore.put(self._client(), name, data, **options)) is None:
            raise MachineError("the store did not accept it", where=f"{self.where}/{name}")

    def _client(self) -> Any:
        """Return the client of the object store, made at the first request: obstore's threads do
        not survive a fork."""
        if self._connected is None:
            self._connected = self._store.connect(self._bucket, self._prefix)
        return self._connected

    def _request(self, work: Callable[[], T], accepted: str = "404") -> T | None:
        """Return work(); None for a missing object, or where the store answers with the status
        `accepted`. Other failures become MachineError."""
        from obstore.exceptions import BaseError

        try:
            return work()
        except FileNotFoundError as e:
            if NO_BUCKET.search(str(e)):
                raise MachineError(
                    "there is no such bucket", where=self.where, fix="Create it first."
                ) from None
            return None
        except BaseError as e:
            code = next((c for match in CODE.findall(str(e)) for c in match if c), type(e).__name__)
            if accepted in re.findall(r"status code: (\d{3})", str(e)):
                return None
            raise self._explain(type(e).__name__, code) from None

    def _explain(self, kind: str, code: str) -> MachineError:
        """Build an error without obstore's text, which contains addresses and headers.

        kind: name of obstore's exception
        code: HTTP status; the exception's name where there is none
        """
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return MachineError(
                f"not allowed ({code})", where=self.where, fix=self._store.permissions
            )
        return MachineError(
            f"the store does not answer ({code})",
            where=self.where,
            fix=f"Check the network and {self._store.fix}, and run the same command again.",
        )


def _connect_s3(bucket: str, prefix: str) -> Any:
    """Connect with botocore's region, endpoint and credentials (AWS_PROFILE, ~/.aws, the machine's
    role, AWS_ENDPOINT_URL). S3 compares each object with its SHA-256 before it appears."""
    import botocore.exceptions
    import botocore.session
    from obstore.store import S3Store

    try:
        session = botocore.session.Session()
        service = session.create_client("s3").meta
        credentials = session.get_credentials()
        if credentials is None:
            raise botocore.exceptions.NoCredentialsError()
    except botocore.exceptions.BotoCoreError as e:
        raise MachineError(
            f"no credentials ({type(e).__name__})",
            where=f"s3://{bucket}/{prefix}",
            fix="Set AWS_PROFILE, or run `aws configure`.",
        ) from None

    def provide() -> Any:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIAL_SECONDS),
        }

    return S3Store(
        bucket,
        prefix=prefix,
        region=service.region_name if service.region_name != "aws-global" else "us-east-1",
        endpoint=service.endpoint_url,
        checksum_algorithm="SHA256",
        client_options=CLIENT,
        retry_config=RETRIES,
        credential_provider=provide,
    )


def _connect_gs(bucket: str, prefix: str) -> Any:
    from obstore.store import GCSStore

    return GCSStore(bucket, prefix=prefix, client_options=CLIENT, retry_config=RETRIES)


def _connect_az(container: str, prefix: str) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore

    try:
        return AzureStore(container, prefix=prefix, client_options=CLIENT, retry_config=RETRIES)
    except BaseError:
        raise MachineError(
            "no storage account",
            where=f"az://{container}/{prefix}",
            fix="Set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or, after "
            "`az login`, AZURE_USE_AZURE_CLI=true.",
        ) from None


STORES = {
    "s3": BucketKind(
        ("obstore", "botocore"),
        _connect_s3,
        "Check `aws sts get-caller-identity`. Needed are s3:GetObject, s3:PutObject and "
        "s3:ListBucket; to prune, s3:DeleteObject.",
        "the bucket's region, AWS_REGION and AWS_ENDPOINT_URL",
    ),
    "gs": BucketKind(
        ("obstore",),
        _connect_gs,
        "Needed is the role Storage Object User; see `gcloud auth application-default login`.",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": BucketKind(
        ("obstore",),
        _connect_az,
        "Needed is the role Storage Blob Data Contributor; see `az login`.",
        "AZURE_STORAGE_ACCOUNT_NAME",
    ),
}
"""Object stores by the scheme of an address."""


def check_installed(packages: Sequence[str], extra: str, where: str) -> None:
    """Raise MachineError for a missing package that a kind of bucket needs.

    packages: packages that must be importable
    extra: name of the extra that installs them
    where: place for the message
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{missing[0]} is not installed",
            where=where,
            fix=f"pip install 'optimize-toolchain[{extra}]'",
        )


def _read_and_check(blob: Blob, file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield a file to be sent to a bucket in pieces of `size` bytes. Raises BundleError, which
    aborts the upload, at the end of a file whose digest is not the blob's."""
    digest = hashlib.sha256()
    while piece := file.read(size):
        digest.update(piece)
        yield piece
    if f"sha256:{digest.hexdigest()}" != blob.digest:
        raise changed_error(blob)


def build_size_error(size: int, where: str) -> BundleError:
    """Build the error for a bucket's object that is too large to read into memory."""
    return BundleError(f"it has {size:,} bytes, above {LARGEST_READ:,}", where=where)


def changed_error(blob: Blob) -> BundleError:
    """Build the error for a file that, while it is sent to a bucket, no longer has the digest it
    was read with."""
    return BundleError("the file changed while it was published", where=f"{blob.content!s:.200}")
