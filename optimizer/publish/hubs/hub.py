"""Publish to a model repository on the Hugging Face Hub, or on a server with its protocol.

    tag VERSION            a commit with the bundle's files, README.md (model_card.py) and, under
                           attestations/, the attachments of the time of publishing
    branch ENVIRONMENT     the files of the version that it names, and environment.json:
                           {"history": [digests, oldest first]}
    branch main            the version published last; attestations/<digest>/<name>

The hub cannot move a tag atomically, so a tag never moves. A commit names its parent
(parent_commit), so that one of two simultaneous writers fails. Large files are sent before the
commit and found by digest, so that the next run does not send them again after a kill.
huggingface_hub reads the credentials of `hf auth login`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.hubs.folders import BundleFolder
from optimizer.publish.hubs.model_card import write_model_card
from optimizer.publish.model_pack import build_manifest
from optimizer.publish.registries.place import LARGEST_MANIFEST

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
CARD = "README.md"
ATTESTATIONS = "attestations/"
ENVIRONMENT = "environment.json"
STARTING = (".gitattributes", ".gitignore", CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")
"""Files that a repository may hold before the first bundle."""
ROUNDS = 5
"""Maximum attempts at a commit when other writers commit first."""
CONFLICT = (409, 412)
"""Statuses for a commit whose parent is no longer the head, and for a name that exists."""


class Hub:
    """FolderRegistry in a repository of the Hugging Face Hub; endpoint: URL of the server, None for
    huggingface_hub's default."""

    def __init__(self, repository: str, endpoint: str | None = None) -> None:
        from huggingface_hub import HfApi

        self.repository = repository
        self.api: HfApi = HfApi(endpoint=endpoint)
        self.where = f"hf://{repository}"
        self._absent = False

    def versions(self) -> dict[str, str]:
        return {ref.name: ref.target_commit for ref in self._refs("tags")}

    def environments(self) -> dict[str, str]:
        branches = self._refs("branches")
        return {ref.name: ref.target_commit for ref in branches if ref.name != MAIN}

    def read(self, revision: str, name: str) -> bytes | None:
        with self._explain_errors(), self._open(revision, name) as response:
            if response.status_code == 404:
                return None
            self._check(response)
            data = b""
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > max(verify.LARGEST, LARGEST_MANIFEST):
                    raise BundleError(f"{name} is above {verify.LARGEST:,} bytes", where=self.where)
            return data

    def receive(self, revision: str, name: str, size: int, into: Path) -> None:
        with self._explain_errors(), into.open("ab") as f:
            while f.tell() < size:
                self._append(revision, name, size, f)

    def _append(self, revision: str, name: str, size: int, f: BinaryIO) -> None:
        """Append the bytes of one response of the hub to the file `f`.

        size: bytes of the complete file

        Raises MachineError or HTTPError for a response without bytes.
        """
        from huggingface_hub.errors import HTTPError

        start = f.tell()
        try:
            with self._open(revision, name, start) as response:
                self._check(response)
                if start and response.status_code != 206:
                    f.seek(f.truncate(0))  # the server sends all of it
                for chunk in response.iter_bytes():  # at once: a broken connection loses nothing
                    f.write(chunk[: size - f.tell()])
        except HTTPError:
            if f.tell() <= start:
                raise
        if f.tell() <= start:
            raise MachineError(
                f"the hub sent {f.tell():,} of {size:,} bytes of {name}",
                where=self.where,
                fix="Run the same command again.",
            )

    def publish(self, folder: BundleFolder, tag: str, *, replace: bool) -> int:
        if tag in self.versions():
            raise RecipeError(
                "it names another bundle, and a tag on the hub does not move"
                + (" (--replace)" if replace else ""),
                where=f"{self.where}:{tag}",
                fix="Give the bundle another package.version.",
            )
        self._check_names(folder)
        with self._explain_errors():
            self.api.create_repo(self.repository, private=True, exist_ok=True)
            commit, sent = self._commit_folder(folder, tag)
            self._check_commit(commit, folder)
            self._check_manifest(commit, folder, tag)
            if not self._create_ref("tag", tag, commit):
                self._check_manifest(self.versions().get(tag, ""), folder, tag)
        return sent

    def attachments(self, digest: str) -> dict[str, bytes]:
        with self._explain_errors():
            head = self._head()
            start = _attestation(digest)
            names = [name for name in self._tree(head) if name.startswith(start)] if head else []
        contents = {name.removeprefix(start): self.read(head, name) for name in names}
        return {name: data for name, data in contents.items() if data is not None}

    def attach(self, digest: str, attachments: Mapping[str, bytes]) -> None:
        from huggingface_hub import CommitOperationAdd

        files = {f"{_attestation(digest)}{name}": data for name, data in attachments.items()}
        with self._explain_errors():
            for _ in range(ROUNDS):
                head = self._head()
                added = [CommitOperationAdd(name, data) for name, data in files.items()]
                if self._commit(MAIN, added, head, f"Attestations of {digest}"):
                    return
        raise self._overtaken_error()

    def read_history(self, environment: str) -> list[str]:
        data = self.read(environment, ENVIRONMENT)
        try:
            history = [] if data is None else verify.parse(data)["history"]
            return [str(digest) for digest in history]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BundleError(
                f"{ENVIRONMENT} has no list of digests", where=f"{self.where}:{environment}"
            ) from None

    def move(
        self, environment: str, revision: str, past: Sequence[str] | None, expected: str
    ) -> bool:
        """Let the branch of the environment name a revision, in one atomic step.

        The branch is created, or gets a commit whose parent must still be its head; else False.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        with self._explain_errors():
            if not expected:
                return self._create_ref("branch", environment, revision)
            before, after = self._tree(expected), self._tree(revision)
            after.pop(ENVIRONMENT, None)
            operations: list[Any] = [
                CommitOperationCopy(name, name, src_revision=revision)
                for name, file in after.items()
                if name not in before or before[name].blob_id != file.blob_id
            ]
            gone = set(before) - set(after) - {ENVIRONMENT}
            operations += [CommitOperationDelete(name) for name in sorted(gone)]
            if past is not None:
                data = json.dumps({"history": [*past]}, indent=1).encode()
                operations.append(CommitOperationAdd(ENVIRONMENT, data))
            message = f"{environment}: {revision}"
            return self._commit(environment, operations, expected, message) is not None

    def close(self) -> None:
        """Do nothing: huggingface_hub has one session per process."""

    def _commit_folder(self, folder: BundleFolder, tag: str) -> tuple[str, int]:
        """Commit the bundle's files to main; return the commit's id, and the bytes that are new."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        published = self._published_digests()
        card = write_model_card(folder.manifest, folder.reports, self.repository).encode()
        start = _attestation(folder.digest)
        contents: dict[str, Any] = {name: blob.content for name, blob in folder.files.items()}
        contents |= {CARD: card}
        contents |= {f"{start}{name}": data for name, data in folder.attachments.items()}
        for _ in range(ROUNDS):
            head = self._head()
            before = self._tree(head)
            self._check_repository(before)
            stays = {n for n in before if n in STARTING or n.startswith(ATTESTATIONS)}
            gone = set(before) - set(contents) - stays
            operations: list[Any] = [CommitOperationAdd(n, data) for n, data in contents.items()]
            operations += [CommitOperationDelete(name) for name in sorted(gone)]
            message = f"{folder.manifest['name']} {tag}"
            if commit := self._commit(MAIN, operations, head, message):
                sent = sum(
                    blob.size for blob in folder.files.values() if blob.digest not in published
                ) + sum(len(data) for data in folder.attachments.values())
                return commit, sent
        raise self._overtaken_error()

    def _published_digests(self) -> set[str]:
        """Return the digests of the files of all versions in the hub's repository."""
        digests: set[str] = set()
        for revision in self.versions().values():
            data = self.read(revision, verify.MANIFEST)
            if data is not None:
                digests.add(digest_of(data))
                digests |= {f"sha256:{f['sha256']}" for f in verify.parse(data)["files"].values()}
        return digests

    def _commit(self, branch: str, operations: list[Any], parent: str, message: str) -> str | None:
        """Commit to a branch of the hub's repository; return the commit's id; None if the branch's
        head is no longer `parent`."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            commit = self.api.create_commit(
                self.repository,
                operations,
                commit_message=message,
                revision=branch,
                parent_commit=parent,
            )
        except HfHubHTTPError as e:
            if _status(e) in CONFLICT:
                return None
            raise
        return str(commit.oid)

    def _create_ref(self, kind: str, name: str, commit: str) -> bool:
        """Make a tag or a branch of the hub's repository; False if the name exists."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            if kind == "tag":
                self.api.create_tag(self.repository, tag=name, revision=commit)
            else:
                self.api.create_branch(self.repository, branch=name, revision=commit)
        except HfHubHTTPError as e:
            if _status(e) in CONFLICT:
                return False
            raise
        return True

    def _check_names(self, folder: BundleFolder) -> None:
        taken = [n for n in folder.files if n in (CARD, ENVIRONMENT) or n.startswith(ATTESTATIONS)]
        if taken:
            raise BundleError(f"the repository needs the name {taken[0]}", where=self.where)

    def _check_repository(self, files: Mapping[str, Any]) -> None:
        """Raise RecipeError if the branch main, whose files publishing replaces, holds anything but
        a bundle.

        files: {name: file} on that branch
        """
        others = [n for n in files if n not in STARTING and not n.startswith(ATTESTATIONS)]
        if others and verify.MANIFEST not in files:
            raise RecipeError(
                f"the repository holds other files than bundles: {others[0]}",
                where=self.where,
                accepted="a new name, an empty repository, or one of bundles",
                fix="Publish to another repository.",
            )

    def _check_commit(self, commit: str, folder: BundleFolder) -> None:
        """Raises MachineError for files left out, silently, by the repository's .gitignore."""
        missing = sorted(set(folder.files) - set(self._tree(commit)))
        if missing:
            raise MachineError(
                f"the commit {commit[:12]} lacks {missing[0]}",
                where=self.where,
                fix="Remove the .gitignore from the repository, and run the same command again.",
            )

    def _check_manifest(self, commit: str, folder: BundleFolder, tag: str) -> None:
        data = self.read(commit, verify.MANIFEST) if commit else None
        if data is None or digest_of(build_manifest(data, self.where)) != folder.digest:
            raise RecipeError(
                "another bundle was published under this tag meanwhile",
                where=f"{self.where}:{tag}",
                fix="Give the bundle another package.version.",
            )

    def _head(self) -> str:
        """Return the id of the commit that the branch main names; "" for a repository that the hub
        lacks."""
        return next((r.target_commit for r in self._refs("branches") if r.name == MAIN), "")

    def _tree(self, revision: str) -> dict[str, Any]:
        """Return {name: RepoFile} of all files of the hub's repository at a revision."""
        from huggingface_hub.hf_api import RepoFile

        listed = self.api.list_repo_tree(self.repository, revision=revision, recursive=True)
        return {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}

    def _refs(self, kind: str) -> Sequence[Any]:
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._explain_errors():
            try:
                refs: Sequence[Any] = getattr(self.api.list_repo_refs(self.repository), kind)
            except RepositoryNotFoundError:
                if not self._absent:
                    say(f"{self.where}: no such repository, or this token may not read it")
                self._absent = True
                return []
            return refs

    @contextmanager
    def _open(self, revision: str, name: str, start: int = 0) -> Iterator[Any]:
        """Yield the response to a GET of a file of the hub's repository, from the byte `start`
        on."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.repository, name, revision=revision, endpoint=self.api.endpoint)
        headers = {**build_hf_headers(token=self.api.token), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            yield response

    def _check(self, response: Any) -> None:
        """Raise huggingface_hub's error for a response with a status of 400 or more."""
        from huggingface_hub.utils import hf_raise_for_status

        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)

    def _overtaken_error(self) -> MachineError:
        return MachineError(
            f"another writer committed first, {ROUNDS} times",
            where=self.where,
            fix="Run the same command again; files that arrived are not sent again.",
        )

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Inside, raise errors of huggingface_hub as MachineError."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

        try:
            yield
        except (
            *(HTTPError, LocalTokenNotFoundError, ConnectionError),
            *(RuntimeError, ValueError),  # from an upload's thread; for a refused response or card
        ) as e:
            cause = f" ({e.__cause__})" if isinstance(e, RuntimeError) and e.__cause__ else ""
            reason = (f"{e}{cause}".strip().splitlines() or [type(e).__name__])[0][:300]
            fixes = {401: "hf auth login", 403: "hf auth login, with a token that may write there"}
            status = _status(e) if isinstance(e, HfHubHTTPError) else 0
            raise MachineError(
                reason,
                where=self.where,
                fix=fixes.get(status, "Run the same command again; it resumes."),
            ) from e


def _attestation(digest: str) -> str:
    return f"{ATTESTATIONS}{digest.removeprefix('sha256:')}/"


def _status(error: Any) -> int:
    return int(error.response.status_code) if error.response is not None else 0
