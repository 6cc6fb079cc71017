"""Read a file, or the answer of a server."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from optimizer.foundation.errors import DataError
from optimizer.publish.address import refuse_credentials

SECONDS = 10.0
LARGEST = 1 << 30  # bytes


def read(place: str) -> str:
    """Read the log or metrics of a server's requests as text, from a file or from http:// and
    https:// addresses. Raises DataError where it cannot be read."""
    try:
        if place.startswith(("http://", "https://")):
            refuse_credentials(place, "URL", "Save the answer with curl, and name that file.")
            with urllib.request.urlopen(place, timeout=SECONDS) as answer:
                data: bytes = answer.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise DataError(
                    f"the answer has more than {LARGEST:,} bytes",
                    where=place,
                    fix="Save it with curl, and name that file.",
                )
        else:
            data = Path(place).read_bytes()
        return data.decode("utf-8")
    except FileNotFoundError:
        raise DataError(
            "there is no such file",
            where=place,
            accepted="a file, or an address of http:// or https://",
            fix="Save the answer with curl -o, and name that file.",
        ) from None
    except (OSError, ValueError) as e:
        raise DataError(f"cannot be read ({e})", where=place) from None
