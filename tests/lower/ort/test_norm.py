from __future__ import annotations

from collections.abc import Callable

from optimizer.lower.ort import norm
from tests.lower.decoder_graphs import Decoder, answers, text
from tests.lower.running import difference


def test_a_sum_and_its_norm_become_one_operator_of_the_same_value(
    decoders: Callable[[str], Decoder],
) -> None:
    made = decoders("heads normed")
    model = made.model
    done = norm.fuse(model)
    assert done == ("model.layers.0.post_attention_layernorm", "model.norm")
    assert [n.op_type for n in model.graph].count("SkipSimplifiedLayerNormalization") == 2
    given = text(9, (0, 3))
    wanted = answers(made.model, given, (7, 1, 1))
    assert difference(answers(model, given, (7, 1, 1)), wanted) < 3e-6
