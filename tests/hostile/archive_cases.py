"""Archives that are cut, flipped, compressed, or hold what no bundle does."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.cases import Case, ended


def of_tars(tar: Path, work: Path) -> Iterator[Case]:
    """Archives that are cut, flipped, compressed, or hold what no bundle does."""
    data = tar.read_bytes()
    files: dict[str, bytes] = {"empty": b"", "zeros": bytes(10240), "junk": b"x" * 5000}
    for i in range(12):
        files[f"cut at {i}"] = data[: len(data) * i // 12 // 512 * 512 + (i % 2) * 100]
    generator = random.Random(7)
    for i in range(30):
        at = generator.randrange(1024)
        files[f"byte {at} of a header flipped, {i}"] = (
            data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        )
    for kind in ("gz", "bz2", "xz"):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
            archive.addfile(tarfile.TarInfo("top/manifest.json"))
        files[kind] = out.getvalue()
    for what, members in TAR_MEMBERS.items():
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for member, content in members:
                archive.addfile(member, io.BytesIO(content))
        files[what] = out.getvalue()
    files["sparse, 3 GB"] = _sparse()
    for i, (what, content) in enumerate(files.items()):
        yield Case(f"tar {what}", _of_tar(work / f"{i}.tar", content))


def _member(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    size: int = 0,
    pax: dict[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.pax_headers = kind, link, size, pax or {}
    return member, bytes(size)


TAR_MEMBERS = {
    "5,000 characters": [_member("top/" + "x" * 5000)],
    "5,000 folders": [_member("top/" + "x/" * 5000 + "x")],
    "a file and a folder": [_member("top/a"), _member("top/a/b")],
    "a folder and a file": [_member("top/a/b"), _member("top/a")],
    "twice": [_member("top/a"), _member("top/a")],
    "without a folder": [_member("manifest.json")],
    "two folders": [_member("a/manifest.json"), _member("b/manifest.json")],
    "up": [_member("top/../../x")],
    "absolute": [_member("/etc/x")],
    "only a folder": [_member("top", tarfile.DIRTYPE)],
    "a link": [_member("top/a", tarfile.SYMTYPE, "/etc/passwd")],
    "a hard link": [_member("top/a"), _member("top/b", tarfile.LNKTYPE, "top/a")],
    "a device": [_member("top/a", tarfile.CHRTYPE)],
    "a fifo": [_member("top/a", tarfile.FIFOTYPE)],
    "another type": [_member("top/a", b"Z")],
    "NUL in a pax path": [_member("top/a", pax={"path": "top/a\0b"})],
    "a pax size": [_member("top/a", pax={"size": "99999999999999"})],
    "a negative pax size": [_member("top/a", pax={"size": "-5"})],
    "GNU.sparse in pax": [
        _member(
            "top/a",
            pax={
                "GNU.sparse.major": "1",
                "GNU.sparse.minor": "0",
                "GNU.sparse.realsize": "3221225472",
            },
        )
    ],
}


def _sparse() -> bytes:
    """An old GNU sparse member of 3 GB, in a tar of 10 KB."""
    member = tarfile.TarInfo("top/manifest.json")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = b"%011o\0" % 0
    header[398:410] = b"%011o\0" % 0
    header[483:495] = b"%011o\0" % (3 << 30)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(10240 - 512)


def _of_tar(path: Path, data: bytes) -> Callable[[], str]:
    def run() -> str:
        path.write_bytes(data)
        try:
            return ended(["check", str(path)], [str(path), "bundle"])
        finally:
            path.unlink()

    return run
