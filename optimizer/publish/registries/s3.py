"""Objects in Amazon S3, and in stores that speak its protocol, through s3fs.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html. Credentials, region
and endpoint are found by botocore where every tool of AWS has them (AWS_PROFILE, ~/.aws, the
machine's role, AWS_ENDPOINT_URL), and nowhere else. Each object is sent with its SHA-256, which
S3 computes again before the object appears, so that one that is there is whole. What a killed
upload in parts leaves is invisible; a lifecycle rule (AbortIncompleteMultipartUpload) removes it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import MachineError
from optimizer.publish.registries.objects import LARGEST_READ, Stored, changed, too_large
from optimizer.publish.registries.place import Blob

PART = 32 << 20  # bytes; an object up to this size is sent in one request
MOST_PARTS = 10_000
AT_ONCE = 4  # parts on their way
SECONDS = 60  # without a byte
ABSENT = frozenset({"404", "NoSuchKey"})
LOST = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
"""Codes for a write whose condition did not hold, or that another one overtook."""
NO_PERMISSION = frozenset({"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"})


class S3Objects:
    """Objects of a bucket below a prefix. part_size: bytes, at least 5 MiB for Amazon's own."""

    no_version = '"0"'

    def __init__(self, bucket: str, prefix: str, part_size: int = PART) -> None:
        self.where = f"s3://{bucket}/{prefix}"
        self._bucket, self._prefix, self._part_size = bucket, prefix, part_size
        self._client: Any = None

    def read(self, name: str) -> Stored | None:
        answer = self._ask("get_object", name, ABSENT)
        if answer is None:
            return None
        if answer["ContentLength"] > LARGEST_READ:
            raise too_large(answer["ContentLength"], f"{self.where}/{name}")
        return Stored(answer["Body"], answer["ETag"])

    def write(self, name: str, data: bytes, expected: str) -> bool:
        condition = {"IfMatch": expected} if expected else {"IfNoneMatch": "*"}
        sent = {"Body": data, "ChecksumSHA256": _checksum(hashlib.sha256(data)), **condition}
        return self._ask("put_object", name, LOST | ABSENT, **sent) is not None

    def has(self, name: str, digest: str) -> bool:
        answer = self._ask("head_object", name, ABSENT, ChecksumMode="ENABLED")
        if answer is None:
            return False
        if answer.get("ChecksumType") != "FULL_OBJECT":  # of an upload in parts it is of theirs
            return True
        recorded = base64.b64decode(answer.get("ChecksumSHA256", "")).hex()
        return recorded in ("", digest.removeprefix("sha256:"))

    def put(self, name: str, blob: Blob) -> None:
        if isinstance(blob.content, Path) and blob.size > self._part_size:
            self._put_parts(name, blob, blob.content)
            return
        data = blob.content if isinstance(blob.content, bytes) else blob.content.read_bytes()
        whole = hashlib.sha256(data)
        if f"sha256:{whole.hexdigest()}" != blob.digest:
            raise changed(blob)
        self._ask("put_object", name, Body=data, ChecksumSHA256=_checksum(whole))

    def part(self, name: str, start: int, end: int) -> bytes | None:
        absent = ABSENT | {"416", "InvalidRange"}
        answer = self._ask("get_object", name, absent, Range=f"bytes={start}-{end - 1}")
        return None if answer is None else answer["Body"]

    def sizes(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        page: dict[str, str] = {"Prefix": f"{self._prefix}/{folder}/"}
        while True:
            answer = self._ask("list_objects_v2", "", **page)
            for entry in answer.get("Contents", ()):
                sizes[entry["Key"].removeprefix(f"{self._prefix}/")] = entry["Size"]
            if not answer.get("IsTruncated"):
                return sizes
            page["ContinuationToken"] = answer["NextContinuationToken"]

    def remove(self, names: Collection[str]) -> None:
        keys = [{"Key": f"{self._prefix}/{name}"} for name in names]
        answer = self._ask("delete_objects", "", Delete={"Objects": keys, "Quiet": True})
        if errors := answer.get("Errors"):
            raise MachineError(
                f"{len(errors)} of {len(keys)} objects were not removed ({errors[0].get('Code')})",
                where=self.where,
            )

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and client._s3 is not None:
            client.close_session(client.loop, client._s3creator)

    def _files(self) -> Any:
        """The client, made when it is needed: it has a thread, and does not survive a fork."""
        if self._client is None:
            import s3fs

            self._client = s3fs.S3FileSystem(
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs={"read_timeout": SECONDS, "retries": {"mode": "standard"}},
            )
        return self._client

    def _put_parts(self, name: str, blob: Blob, path: Path) -> None:
        """In parts; the object appears with all of them, once the digest is known to be right."""
        size = max(self._part_size, -(-blob.size // MOST_PARTS))
        begun = self._ask("create_multipart_upload", name, ChecksumAlgorithm="SHA256")
        upload = {"UploadId": begun["UploadId"]}

        def send(data: bytes, number: int) -> dict[str, Any]:
            named: dict[str, Any] = {
                "PartNumber": number,
                "ChecksumSHA256": _checksum(hashlib.sha256(data)),
            }
            answer = self._ask("upload_part", name, Body=data, **upload, **named)
            return {**named, "ETag": answer["ETag"]}

        try:
            parts: list[dict[str, Any]] = []
            whole = hashlib.sha256()
            with path.open("rb") as f, ThreadPoolExecutor(AT_ONCE) as pool:
                pieces, numbers = iter(lambda: f.read(size), b""), count(1)
                while several := list(islice(pieces, AT_ONCE)):
                    for data in several:
                        whole.update(data)
                    parts += pool.map(send, several, numbers)
            if f"sha256:{whole.hexdigest()}" != blob.digest:
                raise changed(blob)
            done = self._ask(
                *("complete_multipart_upload", name, frozenset({"NoSuchUpload", "404"})),
                **upload,
                MultipartUpload={"Parts": parts},
            )
            if done is None and not self.has(name, blob.digest):
                raise MachineError("an upload in parts was aborted by another", where=self.where)
        except BaseException:
            with suppress(MachineError):
                self._ask("abort_multipart_upload", name, **upload)
            raise

    def _ask(
        self, method: str, name: str, accepted: Collection[str] = (), **sent: Any
    ) -> dict[str, Any] | Any:
        """The store's answer, with "Body" read; None for an error whose code is accepted."""
        from botocore.exceptions import BotoCoreError
        from fsspec.asyn import FSTimeoutError, sync

        at = {"Key": f"{self._prefix}/{name}"} if name else {}
        try:
            return sync(self._files().loop, self._answer, method, {**at, **sent})
        except (OSError, BotoCoreError, FSTimeoutError) as e:
            response = getattr(e.__cause__, "response", None) or {}
            code = str(response.get("Error", {}).get("Code", ""))
            if code in accepted:
                return None
            raise self._explained(e, code) from e

    async def _answer(self, method: str, sent: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._files()._call_s3(method, Bucket=self._bucket, **sent)
        if method == "get_object":
            async with answer["Body"] as body:
                fits = answer["ContentLength"] <= LARGEST_READ
                return {**answer, "Body": await body.read() if fits else b""}
        return answer

    def _explained(self, error: Exception, code: str) -> MachineError:
        kind = type(error).__name__
        if code == "NoSuchBucket":
            return MachineError("there is no such bucket", where=self.where, fix="Create it first.")
        if code in NO_PERMISSION or isinstance(error, PermissionError):
            return MachineError(
                f"not allowed ({code})",
                where=self.where,
                fix="Check `aws sts get-caller-identity`. Needed are s3:GetObject, s3:PutObject "
                "and s3:ListBucket; to prune, s3:DeleteObject.",
            )
        if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            return MachineError(
                f"no credentials ({kind})",
                where=self.where,
                fix="Set AWS_PROFILE, or run `aws configure`.",
            )
        return MachineError(
            f"the store does not answer ({code or kind})",
            where=self.where,
            fix="Check the network, the region and AWS_ENDPOINT_URL; the same command goes on "
            "where it stopped.",
        )


def _checksum(whole: Any) -> str:
    """As S3 writes a digest."""
    return base64.b64encode(whole.digest()).decode()
