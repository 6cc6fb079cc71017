"""Convolutions are quantized after their norms are folded, by a rule that is stated, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optimizer.compress import convolutions, segment
from optimizer.compress.apply.weights import autoround, bias_correction
from optimizer.compress.data import calibration
from optimizer.compress.methods.weights.autoround import learn_rounding
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.compress.selection import Selection, select
from optimizer.compress.simulate import QuantConvolution, simulate_state
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.foundation import state as compressed_state
from optimizer.foundation.conv_geometry import (
    SAME,
    ConvGeometry,
    ExtraPadding,
    PaddedConvolution,
    flatten_positions,
    split_padding,
)
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import CompressedState, Range
from optimizer.load.stage import STAGE as LOAD
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.schema import Model, Quantize
from tests.compress.checkpoints import contents
from tests.conftest import heavy_tailed
from tests.vision import recipe, write

INT8 = Scheme(8)
STATIC: dict[str, Any] = {"method": "rtn", "activations": {"range": "minmax"}}
LEARNED = {**STATIC, "method": "autoround", "autoround": {"steps": 20}}
LAYERS: dict[str, dict[str, Any]] = {
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": (3, 2), "padding": (1, 0), "stride": (2, 1)},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "grouped": {"kernel_size": 3, "padding": 1, "groups": 2},
    "depthwise": {"kernel_size": 3, "padding": 1, "groups": 4, "bias": False},
    "of one place": {"kernel_size": 1},
}


SIDES: dict[str, ExtraPadding | Literal["same"]] = {
    "padded on one side": (0, 1, 0, 2),
    "padded as TensorFlow does": SAME,
}
LAYERS |= {name: {"kernel_size": 3, "stride": 2, "groups": 4} for name in SIDES}


def layer(name: str) -> nn.Conv2d:
    made = nn.Conv2d(4, 8, **LAYERS[name])
    made = PaddedConvolution(made, SIDES[name]) if name in SIDES else made
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(heavy_tailed(tuple(parameter.shape), 20 + i, 0.3))
    return made


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convolutions")
    (root / "load").mkdir()
    model = Model(source=str(write(root / "regnet", "regnet")), task="image-classification")
    LOAD.run(model, out=root / "load")
    return root / "load"


@pytest.fixture(scope="module")
def source(loaded: Path) -> ModelSource:
    return open_source("image-classification", loaded)


@pytest.fixture(scope="module")
def state(loaded: Path, tmp_path_factory: pytest.TempPathFactory) -> CompressedState:
    root = tmp_path_factory.mktemp("state")
    (root / "state").mkdir()
    COMPRESS.run(recipe(root, "regnet", STATIC).compression, loaded, out=root / "state")
    return compressed_state.read(root / "state")


@pytest.fixture
def choose(source: ModelSource) -> Callable[..., Selection]:
    def call(sparsity: Sparsity | None = None, **quantize: Any) -> Selection:
        return select(source, Quantize(**{**STATIC, **quantize}), sparsity)

    return call


def test_every_convolution_of_the_blocks_is_quantized(choose: Callable[..., Selection]) -> None:
    chosen = choose()
    assert len(chosen.quantized) == 3 * 3 + 2
    assert all(".encoder.stages." in name for name in chosen.quantized)
    assert {"regnet.embedder.embedder.convolution", "classifier.1"} <= {
        n.module for n in chosen.notes
    }


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"method": "gptq"}, "quantize.method"),
        ({"method": "smoothquant"}, "quantize.method"),
        ({"method": "awq", "activations": None}, "quantize.method"),
        ({"activations": None}, "quantize.activations"),
        ({"activations": {"granularity": "token"}}, "quantize.activations"),
        ({"activations": {"symmetric": True}}, "quantize.activations"),
        ({"sparsity": Sparsity(method="magnitude", pattern="2:4")}, "sparsity"),
        ({"weights": {"bits": 4}}, "quantize.weights"),
        ({"weights": {"symmetric": False}}, "quantize.weights"),
    ],
)
def test_what_a_convolution_is_not_quantized_with_is_refused(
    choose: Callable[..., Selection], changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(RecipeError, match=r"keep_float") as e:
        choose(**changes)
    assert e.value.where == where


def test_learned_rounding_is_taken(choose: Callable[..., Selection]) -> None:
    assert len(choose(method="autoround").quantized) == 3 * 3 + 2


@pytest.fixture(scope="module")
def learned(loaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("learned")
    (root / "state").mkdir()
    COMPRESS.run(recipe(root, "regnet", LEARNED).compression, loaded, out=root / "state")
    return root / "state"


def test_learned_convolutions_are_nearer_to_float_than_rounded_ones(
    loaded: Path, state: CompressedState, learned: Path, tmp_path: Path
) -> None:
    model = load_torch_model(open_checkpoint(loaded), "image-classification")
    section = recipe(tmp_path, "regnet", STATIC).compression

    def distance(of: CompressedState) -> float:
        apart = [
            simulate_state(model, of)(**batch).logits - model(**batch).logits
            for batch in calibration.make_batches(section, loaded)
        ]
        return float(torch.cat(apart).norm())

    with torch.no_grad():
        assert distance(compressed_state.read(learned)) < 0.9 * distance(state)
    rows = json.loads((learned / "modules.json").read_text())
    notes = [row["note"] for row in rows if row["scheme"] != "float"]
    assert len(notes) == 11
    assert all(note.startswith("learned: ") for note in notes)


def test_a_killed_run_of_learned_convolutions_resumes_to_the_same_bytes(
    loaded: Path, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = recipe(tmp_path, "regnet", LEARNED).compression
    out, calls = tmp_path / "out", []
    out.mkdir()
    original = segment.compress

    def killed(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as m:
        m.setattr(segment, "compress", killed)
        with pytest.raises(KeyboardInterrupt):
            COMPRESS.run(section, loaded, out=out)
    COMPRESS.run(section, loaded, out=out)
    assert contents(out) == contents(learned)


def test_what_learns_sees_inputs_as_the_state_quantizes_them(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step of the first block its loss is what the rounded state is off by."""
    first: list[Tuned] = []

    def listening(*arguments: Any, **options: Any) -> Tuned:
        first.append(learn_rounding(*arguments, **options))
        return first[-1]

    monkeypatch.setattr(autoround, "learn_rounding", listening)
    (tmp_path / "out").mkdir()
    section = recipe(tmp_path, "regnet", {**STATIC, "bias_correction": False}).compression
    COMPRESS.run(recipe(tmp_path, "regnet", LEARNED).compression, loaded, out=tmp_path / "out")
    (tmp_path / "plain").mkdir()
    COMPRESS.run(section, loaded, out=tmp_path / "plain")
    model = load_torch_model(open_checkpoint(loaded), "image-classification")
    quantized = simulate_state(model, compressed_state.read(tmp_path / "plain"))
    block = "regnet.encoder.stages.0.layers.0"
    error = energy = 0.0
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    for batch in calibration.make_batches(section, loaded):
        outputs.clear()
        for one in (model, quantized):
            module = one.get_submodule(block)
            handle = module.register_forward_hook(keep)
            with torch.no_grad():
                one(**batch)
            handle.remove()
        error += float((outputs[1] - outputs[0]).square().sum())
        energy += float(outputs[0].square().sum())
    # the state's biases are rounded to steps of integer sums, and learning's are not yet
    assert first[0].before == pytest.approx(error / energy, rel=0.02)


@pytest.mark.parametrize("changes", [{"padding_mode": "reflect"}, {"padding": "same"}])
def test_padding_that_no_integer_of_0_makes_is_refused_by_name(
    source: ModelSource, choose: Callable[..., Selection], changes: dict[str, Any]
) -> None:
    name = "regnet.encoder.stages.0.layers.0.layer.1.convolution"
    own = source.model.get_submodule(name)
    before = {key: getattr(own, key) for key in changes}
    try:
        for key, value in changes.items():
            setattr(own, key, value)
        with pytest.raises(RecipeError, match=f"{name}.*padding"):
            choose()
    finally:
        for key, value in before.items():
            setattr(own, key, value)


def test_the_quantizer_meets_the_folded_weights(
    source: ModelSource, state: CompressedState
) -> None:
    assert len(state.weights) == 11
    for name, q in state.weights.items():
        ours = rtn(source.tensors[name].flatten(1), INT8)
        assert torch.equal(q.integers, ours.integers)
        assert torch.equal(q.scale, ours.scale)


def test_biases_are_steps_of_the_integer_sums_and_half_a_step_off_at_most(
    source: ModelSource, state: CompressedState
) -> None:
    assert len(state.replaced) == 11
    for name, bias in state.replaced.items():
        module = name.removesuffix(".bias")
        covered = state.range_of(module)
        assert covered is not None
        step = covered.scale * state.weight_of(module).scale[:, 0].numpy().astype(np.float64)
        count = np.rint(bias.numpy() / step)
        assert np.array_equal((count * step).astype(np.float32), bias.numpy())
        moved = np.abs(bias.double().numpy() - source.tensors[name].double().numpy())
        assert (moved <= 0.5 * step + 2.0**-24 * np.abs(bias.numpy())).all()
        again = convolutions.round_bias(bias, covered, state.weight_of(module).scale)
        assert torch.equal(again, bias)


def test_both_operands_of_residual_adds_have_ranges(state: CompressedState) -> None:
    assert {name.partition(".stages.")[2] for name in state.summands} == {
        *(f"{block}.layer.2.activation" for block in ("0.layers.0", "1.layers.0", "1.layers.1")),
        *(f"{block}.shortcut.normalization" for block in ("0.layers.0", "1.layers.0")),
        "1.layers.1.shortcut",
    }


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_simulated_is_torchs_convolution_of_the_integers(name: str) -> None:
    like, x, covered = layer(name), heavy_tailed((2, 4, 9, 8), 5), Range(-0.7, 2.1)
    q = rtn(like.weight.detach().flatten(1), INT8)
    integers = (torch.round(x / covered.scale) + covered.zero_point).clamp(0, 255)
    with torch.no_grad():
        found = QuantConvolution(q, like, "tensor", covered)(x)
        like.weight.copy_(q.dequantize().reshape(like.weight.shape))
        expected = like((integers - covered.zero_point) * covered.scale)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_the_matrix_is_a_filter_in_the_order_that_is_stated() -> None:
    weight = heavy_tailed((8, 2, 3, 2), 4)
    q = rtn(weight.flatten(1), INT8)
    x, (_, channels, height, width) = torch.zeros(1, 2, 3, 2), weight.shape
    filters = ConvGeometry((height, width), (1, 1), (0, 0), (1, 1), 1)
    for c, h, w in np.ndindex(channels, height, width):
        one = x.clone()
        one[0, c, h, w] = 1.0
        found = filters.conv2d(one, q.dequantize())[0, :, 0, 0]
        assert torch.equal(found, q.dequantize()[:, (c * height + h) * width + w])
        assert torch.allclose(found, weight[:, c, h, w], atol=float(q.scale.max()) / 2)


@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_of_what_a_convolution_gives_is_what_it_gives_at_the_mean_patch(name: str) -> None:
    like, images = layer(name), heavy_tailed((3, 4, 9, 8), 6)
    filters, weight = ConvGeometry.read(like), like.weight.detach().flatten(1)
    mean = filters.apply_to_patch(weight, filters.mean_patch(images).mean(0))
    expected = flatten_positions(filters.conv2d(images, weight)).mean(0)
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)


def test_zeros_on_some_sides_are_those_of_torchs_padding() -> None:
    plain, images = nn.Conv2d(4, 8, 3, 2, 1), heavy_tailed((2, 4, 9, 8), 7)
    padded = PaddedConvolution(plain, (0, 1, 2, 0))
    with torch.no_grad():
        expected = plain(nn.functional.pad(images, (0, 1, 2, 0)))
        assert torch.equal(padded(images), expected)
        assert torch.equal(
            ConvGeometry.read(padded).conv2d(images, plain.weight.flatten(1), plain.bias), expected
        )


@pytest.mark.parametrize(
    "layout", [(3, 1, 1), (3, 2, 1), (5, 2, 1), (4, 3, 1), (1, 2, 1), (3, 1, 4)]
)
@pytest.mark.parametrize("size", [(9, 8), (10, 11)])
def test_padding_by_the_size_of_an_image_is_transformers_own(
    layout: tuple[int, int, int], size: tuple[int, int]
) -> None:
    from transformers.models.mobilenet_v2.modeling_mobilenet_v2 import apply_tf_padding

    kernel, stride, dilation = layout
    plain, images = (
        nn.Conv2d(4, 8, kernel, stride, dilation=dilation),
        heavy_tailed((2, 4, *size), 7),
    )
    with torch.no_grad():
        expected = plain(apply_tf_padding(images, plain))
        assert torch.equal(PaddedConvolution(plain, SAME)(images), expected)


@pytest.mark.parametrize("kernel", [1, 4, 5, (2, 3)])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_padding_in_words_is_pytorchs_own(kernel: int | tuple[int, int], padding: str) -> None:
    by_words = nn.Conv2d(4, 8, kernel, padding=padding, dilation=1 + (kernel == 4))
    images = heavy_tailed((2, 4, 9, 10), 8)
    with torch.no_grad():
        expected = by_words(images)
        by_words.padding, sides = split_padding(by_words)
        assert torch.equal(PaddedConvolution(by_words, sides)(images), expected)


def test_a_corrected_bias_is_the_checkpoints_and_its_correction_but_for_half_a_step(
    loaded: Path, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    section = recipe(tmp_path, "regnet", {**STATIC, "bias_correction": True}).compression
    COMPRESS.run(section, loaded, out=tmp_path / "state")
    corrected = compressed_state.read(tmp_path / "state")
    corrections = bias_correction.read(tmp_path / "state")
    source = open_source("image-classification", loaded)
    for name, added in corrections.items():
        module = name.removesuffix(".bias")
        covered = corrected.range_of(module)
        assert covered is not None
        step = convolutions.compute_bias_step(covered, corrected.weight_of(module).scale)
        moved = corrected.replaced[name].double() - (source.tensors[name] + added).double()
        assert bool((moved.abs() <= 0.5001 * step + 1e-6).all())
