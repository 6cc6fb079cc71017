"""Raw tensors of many rows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness import tasks
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.model import RequestLimits, ServedModel


@pytest.mark.parametrize(("length", "most"), [(32, 2), (8, 8), (10, 6)])
def test_raw_rows_run_in_parts_of_as_many_positions_as_the_longest_texts_have(
    length: int, most: int, made: Path
) -> None:
    model, parts = ServedModel(Bundle(made), RequestLimits(20, 2)), list[int]()
    assert tasks.longest(model.contract) == 32
    infer = model.predictor.infer

    def watched(arrays: Mapping[str, Any]) -> Any:
        parts.append(len(arrays["input_ids"]))
        return infer(arrays)

    model.predictor = replace(model.predictor, infer=watched)
    names = [spec.name for spec in model.contract.inputs]
    ids = np.random.default_rng(0).integers(1, 9, (20, length))
    arrays = {n: ids if n == "input_ids" else np.ones_like(ids) for n in names}
    outputs = model.infer(model.check_inputs(arrays))
    assert max(parts) == most
    assert sum(parts) == 20
    for name, array in infer(arrays).items():
        np.testing.assert_allclose(outputs[name], array, rtol=0, atol=1e-5)
