"""Files in base64, as answers about pixels hold them."""

from __future__ import annotations

import base64
import io

import numpy as np

from ...inputs.batch import Array
from ...inputs.image_file import import_pillow


def npy(array: Array) -> str:
    """Return an array as a NumPy file (.npy)."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def png(grey: Array) -> str:
    """Return pixels (height, width), uint8 or uint16, as a PNG."""
    file = io.BytesIO()
    import_pillow().fromarray(grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
