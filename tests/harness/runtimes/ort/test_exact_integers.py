"""Integer products are exact on processors where ONNX Runtime saturates by default."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.harness.runtimes.extreme_products import EXACT, FORMS, X, write


@pytest.mark.parametrize("form", FORMS)
def test_integer_products_are_exact_on_this_processor(form: str, tmp_path: Path) -> None:
    with OrtRunner(write(form, tmp_path / "m.onnx"), threads=1) as runner:
        np.testing.assert_array_equal(runner.infer({"x": X})["y"], EXACT)


def test_the_product_that_is_asked_is_the_one_described() -> None:
    (node,) = onnx.load_model_from_string(exact_integers.PRODUCT).graph.node
    assert (node.op_type, list(node.input)) == ("MatMulInteger", ["a", "b"])
    onnx.checker.check_model(exact_integers.PRODUCT, full_check=True)


def test_the_setting_is_made_where_products_saturate_and_only_there(tmp_path: Path) -> None:
    """EXACT is not set elsewhere, where it would slow a forward pass down by half."""
    import onnxruntime

    name, value = exact_integers.EXACT
    with OrtRunner(write("static", tmp_path / "m.onnx"), threads=1) as runner:
        needed = saturates(onnxruntime, tmp_path)
        options = runner._session.get_session_options()
        if needed:
            assert options.get_session_config_entry(name) == value
        else:
            with pytest.raises(RuntimeError, match="does not have configuration"):
                options.get_session_config_entry(name)
    assert exact_integers.settings(onnxruntime) == (((name, value),) if needed else ())


def saturates(ort: Any, folder: Path) -> bool:
    """Return True if the graph has wrong sums with default session options."""
    options = ort.SessionOptions()
    session = ort.InferenceSession(write("dynamic", folder / "d.onnx"), options)
    return not np.array_equal(session.run(None, {"x": X})[0], EXACT)


RUN = """
import sys
from pathlib import Path
from typing import Any
import numpy as np
from optimizer.harness.runtimes.ort.run import OrtRunner
with OrtRunner(Path(sys.argv[1]), threads=1) as runner:
    np.save(sys.argv[3], runner.infer({"x": np.load(sys.argv[2])})["y"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_they_are_exact_on_a_processor_with_avx2_and_without_vnni(
    form: str, tmp_path: Path
) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("needs an emulator of processors: apt install qemu-user")
    model, x, y = write(form, tmp_path / "m.onnx"), tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, X)
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", RUN, *map(str, (model, x, y))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert y.is_file(), done.stderr[-2000:]
    np.testing.assert_array_equal(np.load(y), EXACT)
