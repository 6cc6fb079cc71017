"""Make artifacts/fashion-mnist/*.parquet of the Debian package `dataset-fashion-mnist` (MIT).

    apt-get install dataset-fashion-mnist          # or: apt-get download ... && dpkg -x ... FOLDER
    python calibration/make_fashion.py [FOLDER]    # default: /usr/share/datasets/fashion-mnist
    python calibration/train_fashion_vit.py        # the model of recipes/vit-fashion-int8.yaml

Each row is a PNG of 28 x 28 grey pixels and its label. The 10,000 test images are evaluate; of the
60,000 others the last 5,000 are kept from training: 4,936 to calibrate on and 64 to time. Digests
are of pixels and labels, in calibration/fashion.sha256: a PNG's bytes depend on the library.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
OUT = HERE.parent / "artifacts" / "fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
IMAGES, LABELS = 0x803, 0x801  # magic numbers of idx files: bytes in three axes, in one
SPLITS = {
    "train": ("train", slice(0, 55_000)),
    "calibrate": ("train", slice(55_000, 59_936)),
    "time": ("train", slice(59_936, 60_000)),
    "evaluate": ("t10k", slice(0, 10_000)),
}
Bytes = npt.NDArray[np.uint8]


def idx(file: Path, magic: int) -> Bytes:
    """Read an idx file: magic number, sizes (big-endian 32 bits), bytes."""
    content = gzip.decompress(file.read_bytes())
    if int.from_bytes(content[:4], "big") != magic:
        raise SystemExit(f"{file} is not an idx file of the expected kind")
    axes = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def read(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """Read (images (n, 28, 28), labels (n,)) of one of SPLITS."""
    name, rows = SPLITS[split]
    images = idx(folder / f"{name}-images-idx3-ubyte.gz", IMAGES)
    return images[rows], idx(folder / f"{name}-labels-idx1-ubyte.gz", LABELS)[rows]


def digest(images: Bytes, labels: Bytes) -> str:
    return hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()


def png(image: Bytes) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def main(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    lines = (HERE / "fashion.sha256").read_text().splitlines()
    expected = {name: value for value, name in (line.split() for line in lines)}
    OUT.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        images, labels = read(folder, split)
        if digest(images, labels) != expected[split]:
            raise SystemExit(
                f"{folder}: {split} has other pixels or labels than fashion.sha256 says"
            )
        table = pa.table({"image": [png(i) for i in images], "label": labels.astype(np.int64)})
        parquet.write_table(table, OUT / f"{split}.parquet")
        print(f"{OUT / split}.parquet: {len(labels)} images")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else INSTALLED)
