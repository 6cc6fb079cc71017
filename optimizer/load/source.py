"""Where a model comes from: a hub id, a folder, or a Python package that carries one.

Every file of the source stays inside it: a symbolic link that leads out, or a shard index that
names a path, is refused. (The hub's own cache links from snapshots/ to blobs/ of the same
repository; that is inside.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.reading import JSON_BYTES, check_regular, reading, words
from optimizer.harness.tasks import feature_extraction
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model
from optimizer.store import digest_file

PACKAGE = "python-package:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
FILES = (  # that are read by these names
    "config.json",
    "generation_config.json",
    "modules.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# bytes, before anything reads it: the vocabularies of a million tokens have 60 MB; others as many
# as a list of all labels or tensors
LIMITS = dict.fromkeys(
    [name for name in FILES if name.endswith(".json")], 20_000_000
) | dict.fromkeys(
    ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"), JSON_BYTES
)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".whl")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# What a text encoder is made of; formats of other frameworks in the same repository are not read.
CONFIG_PATTERNS = ("*config.json", "modules.json")
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")  # travel with the weights
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
    """folder: the model's own (config.json is in it). root: what links must stay inside.
    revision: the hub commit, "<distribution> <version>" of a package, None for a folder."""

    folder: Path
    root: Path
    revision: str | None


def resolve(section: Model) -> Source:
    """Find (for a hub id: fetch) the folder of `section.source`.

    Raises CheckpointError when there is no such folder or the choice is not clear, MachineError
    when a package is not installed or the hub cannot be reached.
    """
    name = section.source
    if name.startswith(PACKAGE):
        return _package(section, name.removeprefix(PACKAGE))
    path = local_path(name)
    if path.is_dir():
        folder = _subfolder(path, section)
        return Source(folder, _boundary(path), None)
    if path.exists():
        kind = "an archive" if path.suffix in ARCHIVES else "a file"
        raise CheckpointError(
            f"{name} is {kind}",
            where="model.source",
            accepted="a hub id, a folder, or python-package:<name>",
            fix="Unpack it yourself and give the folder." if kind == "an archive" else "",
        )
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"there is no folder {name}",
            where="model.source",
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
            fix=f"Relative folders are looked for in {Path.cwd()}.",
        )
    patterns = [*HUB_PATTERNS]
    patterns += ["*.bin"] if section.allow_pickle else []
    patterns += ["*.py"] if section.trust_remote_code else []
    patterns += _gguf(section)
    return _on_hub(section, patterns)


def local_path(name: str) -> Path:
    """The path that a source would have on this machine. Raises CheckpointError for one that no
    file can have: too long, or in the home of a user that is not there."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise CheckpointError(
            f"{shown!r} can be no path ({words(e)[:120]})",
            where="model.source",
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
        ) from e
    return path


def _gguf(section: Model) -> list[str]:
    """The pattern of the one GGUF file that is asked for, which holds its own config."""
    return [] if section.gguf_file is None else [f"*{Path(section.gguf_file).name}"]


def peek(section: Model) -> Source:
    """As `resolve`, but of a model on the hub only what CONFIG_PATTERNS names is fetched."""
    name = section.source
    if name.startswith(PACKAGE) or local_path(name).exists() or not HUB_ID.fullmatch(name):
        return resolve(section)
    patterns = [*CONFIG_PATTERNS, *(["*.py"] if section.trust_remote_code else [])]
    patterns += _gguf(section)
    return _on_hub(section, patterns)


def is_local(name: str) -> bool:
    """Whether a source is on this machine, or says that it is, and not on the hub."""
    return name.startswith(PACKAGE) or local_path(name).exists()


def local_folder(name: str) -> Path | None:
    """The folder of a source that is on this machine already; None for what only a hub has.

    Raises CheckpointError when there is a folder and it has no config.json, MachineError when a
    package is not installed.
    """
    if not is_local(name):
        return None
    folder = resolve(Model(source=name, task=feature_extraction.TASK.name)).folder
    read_json(folder / "config.json")
    return folder


def _on_hub(section: Model, patterns: list[str]) -> Source:
    snapshot = _snapshot(section.source, _commit(section.source, section.revision), patterns)
    return Source(_subfolder(snapshot, section), _boundary(snapshot), snapshot.name)


def digests(section: Model) -> dict[str, str]:
    """What a key of this model depends on besides its section: {file: sha256} of a local source,
    {hub id: commit} of one on the hub (a commit says all, so planning fetches no weights)."""
    name = section.source
    on_hub = not name.startswith(PACKAGE) and not local_path(name).exists()
    if on_hub and HUB_ID.fullmatch(name):
        return {name: _commit(name, section.revision)}
    source = resolve(section)
    return {str(f.relative_to(source.folder)): digest(f) for f in files(source)}


def digest(file: Path) -> str:
    """sha256 of a file, read once per process while it stays as it is. Raises MachineError for one
    that this user may not read."""
    with reading(file):
        status = file.stat()
        return _digest(file.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest(file: Path, inode: int, size: int, modified: int) -> str:
    del inode, size, modified  # they say which file it was
    return digest_file(file)


def files(source: Source) -> list[Path]:
    """Every file below the model's folder, sorted, but for hidden ones and Python's caches, which
    nothing reads. Raises CheckpointError when one leads out."""
    paths = []
    for path in sorted(source.folder.rglob("*")):
        parts = path.relative_to(source.folder).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        _check_name(path)
        with reading(path, fix="It is a link that leads nowhere: remove it, or get the file."):
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
    """The folder that links may not leave: of a snapshot in the hub's cache, the repository."""
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
            f"{section.subfolder!r} leaves {root}",
            where="model.subfolder",
            accepted="a folder inside model.source",
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {section.subfolder!r} in {root}",
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
            fix="Only its files are read, so without what it depends on (--no-deps) will do. "
            f"Run: pip install {name}",
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
            fix="Set model.subfolder to the one you mean."
            if everything != "none"
            else f"Set model.gguf_file to one of: {', '.join(ggufs)}"
            if ggufs
            else "",
        )
    folder = Path(str(distribution.locate_file(candidates[0]))).resolve()
    return Source(folder, folder, f"{distribution.name} {distribution.version}")


def not_installed(name: str) -> list[str]:
    """What a package asks for and this machine lacks: it was installed with --no-deps."""
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
    """The commit a revision means, asked once per process: the key that a plan is made with and
    the files that a run reads are then of one commit, whatever is pushed in between."""
    return _snapshot(name, revision, [*CONFIG_PATTERNS]).name


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's snapshot folder, named by its commit, with the files that match.

    The library itself resolves the revision, honours HF_HUB_OFFLINE, and falls back to its cache
    when the hub does not answer.
    """
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
            "the hub asks for a login that may read this model",
            where=where,
            fix="Accept its terms on the hub, then run: hf auth login",
        ) from e
    except HFValidationError as e:
        raise CheckpointError(
            f"that is no name of a model on the hub ({_first_line(e)})",
            where=where,
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
        ) from e
    except (RepositoryNotFoundError, RevisionNotFoundError) as e:
        what = "revision" if isinstance(e, RevisionNotFoundError) else "model"
        raise CheckpointError(
            f"the hub has no such {what}" + (f": {revision}" if revision else ""),
            where=where,
            accepted="a hub id (owner/name), a folder, or python-package:<name>",
            fix="A private model needs: hf auth login",
        ) from e
    except OSError as e:  # every failure of the library's own that is left is one
        raise MachineError(
            f"the hub cannot be reached and the local cache lacks this model ({_first_line(e)})",
            where=where,
            fix="Give model.source a folder, or fetch it where there is a network (hf download "
            f"{name}) and copy the cache here (HF_HOME says where it is).",
        ) from e


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def shard_files(folder: Path, index: Path) -> dict[str, Path]:
    """{tensor: file} of a shard index. Raises CheckpointError for a name that is a path, or a
    shard that is not there."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(
            "the shard index is corrupt: it has no weight_map of tensors to files",
            where=str(index),
            fix="Get the file again.",
        )
    with reading(index, fix="Get the file again."):
        shards = sorted(set(named.values()))
    for shard in shards:
        if not isinstance(shard, str) or shard != PurePosixPath(shard).name or "\\" in shard:
            raise CheckpointError(
                f"shard {shard!r} is a path", where=str(index), accepted="names of files beside it"
            )
        if not (folder / shard).is_file():
            raise CheckpointError(
                f"shard {shard} is missing ({len(shards)} are listed)",
                where=str(index),
                fix="Get the missing file: the download was not finished.",
            )
    return {tensor: folder / shard for tensor, shard in named.items()}
