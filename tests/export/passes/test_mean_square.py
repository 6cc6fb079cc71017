from __future__ import annotations

import numpy as np

from optimizer.export.passes.mean_square import divide_by_root, divides_by_root
from tests.export.graphs import answer, graph

FORMS = "g (float[n] x, float[n] v) => (float[n] y) { r = Sqrt(v) i = Reciprocal(r) y = Mul(A, B) }"


def test_a_product_with_the_reciprocal_of_a_root_divides_by_the_root() -> None:
    for a, b in (("x", "i"), ("i", "x")):
        model = graph(FORMS.replace("A", a).replace("B", b))
        assert not divides_by_root(model)
        divide_by_root(model)
        assert divides_by_root(model)
        assert np.allclose(answer(model, x=np.float32([6]), v=np.float32([4])), [3])
