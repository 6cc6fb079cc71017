"""Files in base64, as answers about pixels hold them."""

from __future__ import annotations

import base64
import io

import numpy as np

from ...inputs.batch import Array
from ...inputs.image_file import import_pillow


def npy(array: Array) -> str:
    """Encode an array of a task's answer as a NumPy file (.npy) in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def png(grey: Array) -> str:
    """Encode a task's answer, pixels (height, width), uint8 or uint16, as a PNG in base64."""
    file = io.BytesIO()
    import_pillow().fromarray(grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
