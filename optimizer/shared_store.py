"""Store of finished steps in a bucket of S3, Google Cloud Storage or Azure, shared by several
machines.

    store.json                    {"format": 1, "id": random}
    steps/<stage>/<key>.json      made_from.json of a finished step, which lists its files
    files/<sha256>                contents of files
    search/<recipe's name>.json   progress of a search (search/progress.py)

Each machine works in a folder of its own, an ordinary store (store.py), and fetches the steps that
it lacks. Laws (tested):
 1. A step appears complete: its list of files is written after the files.
 2. The bucket has no locks. If two machines make one step at once, which costs only time, the list
    written first is kept (If-None-Match). The other machine takes its files, so that all later
    steps are made from the same bytes.
 3. A fetched file has the digest in the list. A step with a missing or damaged file is made again,
    and its files replace those in the bucket.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import Any

from optimizer.foundation.buckets.blob import Blob
from optimizer.foundation.buckets.objects import (
    BUCKET,
    PREFIX,
    STORES,
    BucketObjects,
    StoredBytes,
    check_installed,
)
from optimizer.foundation.errors import KEPT, MachineError, RecipeError, StoreError
from optimizer.foundation.progress import say
from optimizer.harness.errors import BundleError
from optimizer.harness.shown import has_credentials

FORMAT = 1
MARK = "store.json"
ADDRESS = re.compile(f"({'|'.join(STORES)})://({BUCKET}){PREFIX}")
THREADS = 4
"""Files sent or fetched at once, each in parts of up to 128 MB."""
LARGE = 32_000_000
"""Bytes of a step whose transfer is reported."""
DIGEST = re.compile("[0-9a-f]{64}")
Files = Mapping[str, Mapping[str, Any]]
"""{name of a file in the folder of a step: {"size", "sha256"}}."""


@dataclass(frozen=True)
class SharedStep:
    """Finished step in a bucket.

    data: bytes of its made_from.json
    version: version of that object, for conditional writes
    files: {relative name: {size, sha256}} of its files; None where `data` is damaged
    """

    data: bytes
    version: dict[str, str]
    files: Files | None


class SharedStore:
    """Store in a bucket, with the folder of its steps on this machine.

    address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX
    cache: parent of the folders of all such stores

    Raises RecipeError for another address, MachineError for a missing package, and StoreError,
    which ends a run or a search, where the bucket cannot be read or written.
    """

    def __init__(self, address: str, cache: Path) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None:
            secret = has_credentials(address) or "@" in address or "?" in address
            raise RecipeError(
                f"{'the address' if secret else repr(address)[:200]} is not that of a store",
                where="command line: --store",
                accepted="a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX",
                fix="Credentials come from the usual settings of S3, Google Cloud and Azure.",
            )
        kind, bucket = match[1], match[2]
        check_installed(STORES[kind].packages, kind, address)
        prefix = address.removeprefix(f"{kind}://{bucket}/")
        self.address, self.cache = address, cache.absolute()
        self.folder = self.cache / kind / bucket / prefix
        self._objects = BucketObjects(kind, bucket, prefix)
        self._mark = b""
        self._damaged: set[str] = set()

    def __str__(self) -> str:
        return self.address

    def __reduce__(self) -> tuple[type[SharedStore], tuple[str, Path]]:
        return SharedStore, (self.address, self.cache)

    def identity(self) -> bytes:
        """Return the bytes of store.json, whose random id no other store has. The file is written
        if it is missing."""
        with _explained():
            if not self._exists():
                data = json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode()
                fix = "Give --store a folder that all machines mount."
                self._objects.check_conditions(MARK, data, fix)
                self._exists()
        return self._mark

    def _exists(self) -> bool:
        """Return True where the bucket has store.json. Raises StoreError for a store of another
        format."""
        stored = None if self._mark else self._objects.read(MARK)
        if stored is not None:
            document = _document(stored.data)
            if document.get("format") != FORMAT:
                raise StoreError(
                    f"the store has format {document.get('format')!r:.40}",
                    where=f"{self.address}/{MARK}",
                    accepted=f"format {FORMAT}",
                    fix="Give another prefix, or use the version of optimize-toolchain that wrote "
                    "it.",
                )
            self._mark = stored.data
        return bool(self._mark)

    def find(self, stage: str, key: str) -> SharedStep | None:
        """Return the finished step of a stage with this key; None if the bucket lacks it."""
        stored: StoredBytes | None = None
        with _explained():
            if self._exists():
                stored = self._objects.read(_name(stage, key))
        if stored is None:
            return None
        return SharedStep(stored.data, stored.version, _files(stored.data, key))

    def fetch(self, step: SharedStep, into: Path) -> bool:
        """Write the files of a step into a folder; return False where one is missing or damaged."""
        files = step.files or {}
        _announce("fetching", files, f"from {self.address}")

        def fetch_one(name: str) -> bool:
            return self._fetch_file(files[name], into / name)

        with _explained(), ThreadPoolExecutor(THREADS) as pool:
            return all(list(pool.map(fetch_one, files)))

    def _fetch_file(self, entry: Mapping[str, Any], file: Path) -> bool:
        name = f"files/{entry['sha256']}"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._objects.receive(name, entry["size"], file)
        except BundleError:
            why = "missing or truncated"
        else:
            with file.open("rb") as f:
                if file_digest(f, "sha256").hexdigest() == entry["sha256"]:
                    return True
            why = "damaged"
        say(f"store: {self.address}/{name} is {why}")
        self._damaged.add(name)
        return False

    def send(
        self, stage: str, key: str, folder: Path, data: bytes, version: dict[str, str] | None
    ) -> bool:
        """Write a finished step into the bucket: first its files, then its list of files.

        folder: folder of the step
        data: bytes of made_from.json
        version: version of the list to be replaced; None: no list is replaced

        Returns False where another machine wrote the list meanwhile.
        """
        self.identity()
        files: Files = json.loads(data)["files"]
        _announce("sending", files, f"to {self.address}")

        def send_one(name: str) -> None:
            entry = files[name]
            blob = Blob(f"sha256:{entry['sha256']}", entry["size"], folder / name)
            to = f"files/{entry['sha256']}"
            if to in self._damaged or not self._objects.has(to, blob):
                self._objects.put(to, blob)

        with _explained(), ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(send_one, files))
            return self._objects.write(_name(stage, key), data, version)

    def count_steps(self) -> int:
        """Return the number of finished steps in the bucket."""
        with _explained():
            return len(self._objects.sizes("steps"))

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small object; None if it is missing."""
        with _explained():
            stored = self._objects.read(name)
        return None if stored is None else stored.data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, replacing an older one."""
        with _explained():
            self._objects.put(name, Blob.describe(data))


Root = Path | SharedStore
"""Place of a store: a folder, or a bucket."""


def folder_of(root: Root) -> Path:
    """Return the folder that holds a store's steps on this machine."""
    return root if isinstance(root, Path) else root.folder


def folder_option(root: Root) -> str:
    """Return the option of the command line with which a user chooses the store's local folder."""
    return "--store" if isinstance(root, Path) else "--store-cache"


def options(root: Root) -> list[str]:
    """Return the command line options that select a store."""
    if isinstance(root, Path):
        return ["--store", str(root)]
    return ["--store", root.address, "--store-cache", str(root.cache)]


def _announce(what: str, files: Files, place: str) -> None:
    """Print a line before a transfer that takes long.

    what: "fetching" or "sending"
    files: files that are transferred
    place: "from ADDRESS" or "to ADDRESS"
    """
    if (size := sum(entry["size"] for entry in files.values())) > LARGE:
        say(f"store: {what} {len(files)} files, {size / 1e6:.0f} MB, {place}")


def _name(stage: str, key: str) -> str:
    return f"steps/{stage}/{key}.json"


def _document(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; {} where it holds something else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _files(data: bytes, key: str) -> Files | None:
    """Return the files that a step's list in the bucket names. None where the list is damaged,
    belongs to another step, or names a file outside the step's folder."""
    document = _document(data)
    files = document.get("files")
    if document.get("key") != key or not isinstance(files, dict):
        return None
    for name, entry in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(entry, dict):
            return None
        if not (isinstance(entry.get("size"), int) and DIGEST.fullmatch(str(entry.get("sha256")))):
            return None
    return files


@contextmanager
def _explained() -> Iterator[None]:
    """Inside, turn errors of the bucket into StoreError, which ends the run. Any other MachineError
    would only drop one target or one candidate, and the next would fail in the same way."""
    try:
        yield
    except StoreError:
        raise
    except (MachineError, BundleError) as e:
        fix = f"{e.fix} {KEPT}".strip()
        raise StoreError(e.problem, where=e.where, accepted=e.accepted, fix=fix) from e
