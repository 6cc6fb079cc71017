"""Adapt registries that hold versions as folders of plain files (a model hub, MLflow) to Releases.

The ModelPack manifest of a version is computed from its manifest.json, so that a bundle has the
same digest here and in a registry of blobs, and every fetched file is compared with it. Attachments
belong to that digest; their names are digests of their content, and their order is by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.trust import verify
from optimizer.publish.attachments import ATTACHMENTS, Attachment
from optimizer.publish.environments.history import SUFFIX, history_manifest, parse_digests
from optimizer.publish.model_pack import build_manifest, build_referrer, read_layers
from optimizer.publish.registries.place import Json, describe

NAME_LENGTH = 16  # hexadecimal digits of an attachment's digest in its name


@dataclass(frozen=True)
class BundleFolder:
    """Bundle to publish: digest of its ModelPack manifest; manifest.json, report.json, files and
    attachments by name."""

    digest: str
    manifest: Json
    reports: Sequence[Json]
    files: Mapping[str, Blob]
    attachments: Mapping[str, bytes]

    @property
    def version(self) -> str:
        return str(self.manifest["version"])

    @property
    def size(self) -> int:
        """Bytes of all files and attachments of the bundle."""
        files = sum(blob.size for blob in self.files.values())
        return files + sum(len(data) for data in self.attachments.values())


class FolderRegistry(Protocol):
    """Registry of folders. A revision is an immutable state of its files: a commit, a number.

    Errors: MachineError for a registry that does not answer or refuses.
    """

    def versions(self) -> dict[str, str]:
        """Return {published version of the bundle: revision}, oldest first; {} for a registry that
        does not exist yet."""

    def environments(self) -> dict[str, str]:
        """Return {name of an environment: revision of the bundle that it names}."""

    def read(self, revision: str, name: str) -> bytes | None:
        """Return the bytes of a small file of a published bundle; None for a missing file."""

    def receive(self, revision: str, name: str, size: int, into: Path) -> None:
        """Append the missing bytes of a bundle's file to the file `into`."""

    def publish(self, folder: BundleFolder, tag: str, *, replace: bool) -> int:
        """Make one complete revision, then tag it; return the bytes that no version there had.

        replace: move a tag that names another bundle.
        Raises RecipeError for a tag that another writer gave to another bundle meanwhile.
        """

    def attachments(self, digest: str) -> dict[str, bytes]:
        """Return {name: bytes} of the attachments of the bundle with this digest."""

    def attach(self, digest: str, attachments: Mapping[str, bytes]) -> None:
        """Add attachments to the bundle with this digest; present attachments stay."""

    def read_history(self, environment: str) -> list[str]:
        """Return the digests that the environment has named, oldest first, or []."""

    def move(
        self, environment: str, revision: str, past: Sequence[str] | None, expected: str
    ) -> bool:
        """Let the environment name a revision; False if it does not name the revision `expected`
        ("" for none) now. past: new history of digests; None leaves it as it is."""

    def close(self) -> None:
        """Close the connections to the registry."""


def attachment_name(attachment: Attachment, data: bytes) -> str:
    """Return a name made of the content's digest, so that no attachment overwrites another."""
    return f"{hashlib.sha256(data).hexdigest()[:NAME_LENGTH]}{attachment.suffix}"


class Folders:
    """Releases in a registry that stores folders, such as the Hugging Face Hub or MLflow, and no
    blobs."""

    def __init__(self, registry: FolderRegistry) -> None:
        self.registry = registry
        self._manifests: dict[str, bytes | None] = {}  # by revision
        self._files: dict[str, tuple[str, str]] = {}  # {digest: (revision, name)}
        self._contents: dict[str, bytes] = {}  # attachments and their manifests, by digest

    def send(self, blob: Blob) -> None:
        """Do nothing: `publish` sends the files, and a history needs no blob."""

    def publish(self, folder: BundleFolder, tag: str, *, replace: bool) -> int:
        """Publish a bundle, or only attachments that the registry lacks; return the bytes sent."""
        if tag in self.registry.environments():
            raise RecipeError(
                "this tag is the name of an environment",
                where=f"tag {tag}",
                fix="Give the bundle another package.version, or the address another tag.",
            )
        revision = self.registry.versions().get(tag)
        if revision is None or self._digest(revision) != folder.digest:
            return self.registry.publish(folder, tag, replace=replace)
        there = self.registry.attachments(folder.digest)
        missing = {n: data for n, data in folder.attachments.items() if n not in there}
        if missing:
            self.registry.attach(folder.digest, missing)
        return sum(len(data) for data in missing.values())

    def read_manifest(self, reference: str) -> bytes | None:
        if reference.startswith("sha256:"):
            if reference in self._contents:
                return self._contents[reference]
            revision = self._revision(reference)
            return self._manifest(revision) if revision else None
        versions, environments = self.registry.versions(), self.registry.environments()
        environment = reference.removesuffix(SUFFIX)
        if reference not in versions and reference != environment:
            past = self.registry.read_history(environment) if environment in environments else []
            return history_manifest(past) if past else None
        revision = versions.get(reference) or environments.get(reference)
        return self._manifest(revision) if revision else None

    def receive(self, digest: str, size: int, into: Path) -> None:
        if digest in self._contents:
            data = self._contents[digest]
            with into.open("ab") as f:
                f.write(data[f.tell() :])
            return
        revision, name = self._files[digest]
        self.registry.receive(revision, name, size, into)

    def referrers(self, subject: str) -> list[Json]:
        data = self.read_manifest(subject)
        if data is None:
            return []
        listed = []
        for name, content in sorted(self.registry.attachments(subject).items()):
            attachment = next((a for a in ATTACHMENTS if name.endswith(a.suffix)), None)
            if attachment is None:
                continue
            blob = Blob.describe(content)
            manifest = build_referrer(blob, attachment.media_type, name, describe(data))
            self._contents |= {blob.digest: content, digest_of(manifest): manifest}
            listed.append(describe(manifest))
        return listed

    def tags(self) -> list[str]:
        return sorted({*self.registry.versions(), *self.registry.environments()})

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Move an environment; see the registry's `move` for simultaneous writers."""
        if last in self.registry.versions():
            raise RecipeError("a version has this name", where=last, fix="Give another: --to NAME.")
        current = self.registry.environments().get(last, "")
        if (self._digest(current) if current else "") != expected:
            return False
        digest = digest_of(tags[last])
        revision = self._revision(digest)
        if revision is None:
            raise MachineError(f"{digest} was removed meanwhile", where=last)
        history = tags.get(f"{last}{SUFFIX}")
        past = None if history is None else parse_digests(history, last)
        return self.registry.move(last, revision, past, current)

    def close(self) -> None:
        self.registry.close()

    def _revision(self, digest: str) -> str | None:
        """Return the revision of the version or environment whose bundle has this digest."""
        revisions = [*self.registry.versions().values(), *self.registry.environments().values()]
        return next((r for r in revisions if self._digest(r) == digest), None)

    def _digest(self, revision: str) -> str:
        data = self._manifest(revision)
        return "" if data is None else digest_of(data)

    def _manifest(self, revision: str) -> bytes | None:
        """Return the bytes of a revision's ModelPack manifest; None without a bundle there."""
        if revision not in self._manifests:
            data = self.registry.read(revision, verify.MANIFEST)
            manifest = None if data is None else build_manifest(data, f"revision {revision}")
            self._manifests[revision] = manifest
            if manifest is not None:
                layers = read_layers(manifest, f"revision {revision}")
                self._files |= {e["digest"]: (revision, name) for name, e in layers.items()}
        return self._manifests[revision]
