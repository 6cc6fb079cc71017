"""An engine's own words about its layers become a verdict on each module.

The sample has the form of EngineInspector.get_engine_information(JSON) of a DETAILED engine
(inspect's docstring names the pages); no GPU was here to record one. The kernels' names are of
those that TensorRT 10 prints for transformers with Q/DQ.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from optimizer.harness.runtimes.trt.inspect import (
    list_unreported_modules,
    precision_fallbacks,
    read_layers,
)

INT8 = "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1"
HALF = "sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize64x128x32_stage5_warpsize2x2x1"
CONVOLVED = "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_i8i8_i8i32_f32_nchw_vect_c_32kcrs"
QUERY, KEY, DENSE, HEAD = "l.0.query", "l.0.key", "l.0.dense", "head"


def tensor(name: str, kind: str) -> dict[str, Any]:
    return {"Name": name, "Dimensions": [8, 384], "Format/Datatype": kind}


def layer(name: str, nodes: list[str], tactic: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": "gemm",
        "Inputs": [tensor(f"i{i}", kind) for i, kind in enumerate(inputs)],
        "Outputs": [tensor("o", "Half")],
        "TacticName": tactic,
        "StreamId": 0,
        "Metadata": "\x1f".join(f"[ONNX Layer: {n}]" for n in nodes),
    } | more


QKV = layer(
    "__myl_FcMulAdd_myl0_25",
    [f"{QUERY}/MatMul", f"{KEY}/MatMul", "l.0.query/Add"],
    INT8,
    "Int8",
    "Int8",
    "Float",
)
COPY = layer("Reformatting CopyNode", [f"{DENSE}/MatMul"], "", "Half", LayerType="Reformat")
WIDE = layer(f"{DENSE}/MatMul_myl0_51", [f"{DENSE}/MatMul"], HALF, "Half", "Half")
PACKED = layer(f"{HEAD}/MatMul_myl0_70", [f"{HEAD}/MatMul"], "_gemm_w4", "Half", "Int4", "Half")
SAMPLE = {"Layers": [QKV, COPY, WIDE, PACKED, "a layer that is only named"], "Bindings": ["x"]}
MODULES = {m: {"product": f"{m}/MatMul"} for m in (QUERY, KEY, DENSE, HEAD)}
STATIC = {"weight": "int8 channel", "activation": "int8"}
FOUR = {"weight": "int4 group 64", "activation": "float"}


def read(document: Any = SAMPLE) -> dict[str, Any]:
    return read_layers(json.dumps(document), MODULES)


def test_each_module_has_the_kernel_that_multiplies_by_its_weight() -> None:
    found = read()
    assert {m: found[m]["multiplies"] for m in (QUERY, KEY, DENSE)} == {
        QUERY: "INT8",
        KEY: "INT8",
        DENSE: "HALF",
    }
    assert found[DENSE]["layer"] == WIDE["Name"]  # not the copy before it


def test_what_fused_with_a_module_is_named() -> None:
    assert read()[QUERY]["fused"] == [f"{KEY}/MatMul", "l.0.query/Add"]


def test_a_module_that_runs_wider_than_asked_is_found_and_no_other() -> None:
    asked = {QUERY: STATIC, KEY: STATIC, DENSE: STATIC, HEAD: FOUR}
    assert precision_fallbacks(asked, read()) == {
        DENSE: f"int8 activations requested, half in {WIDE['Name']}"
    }


def test_codes_that_enter_the_kernel_widened_are_found() -> None:
    unpacked = layer("gemm", [f"{HEAD}/MatMul"], HALF, "Half", "Half")
    found = read({"Layers": [unpacked]})
    assert list(precision_fallbacks({HEAD: FOUR}, found)) == [HEAD]


def test_weights_told_apart_from_the_inputs_count() -> None:
    kept = layer("conv", [f"{HEAD}/MatMul"], CONVOLVED, "Half", Weights={"Type": "Int8"})
    found = read({"Layers": [kept]})
    assert (found[HEAD]["weight"], found[HEAD]["multiplies"]) == ("INT8", "INT8")


@pytest.mark.parametrize("key", ["DataType", "Datatype"])
def test_types_are_found_where_eleven_puts_them(key: str) -> None:
    split = {**PACKED, "Inputs": [{"Name": "w", "Format": "Row major", key: "Int4"}]}
    assert read({"Layers": [split]})[HEAD]["weight"] == "INT4"


def test_what_an_engine_does_not_tell_is_neither_passed_nor_failed() -> None:
    dynamic = layer("g", [f"{HEAD}/MatMul"], "_gemm", "N/A due to dynamic shapes")
    found = read({"Layers": [dynamic]})
    assert precision_fallbacks({HEAD: FOUR, QUERY: STATIC}, found) == {}
    assert list_unreported_modules({HEAD: FOUR, QUERY: STATIC}, found) == [HEAD, QUERY]


def test_an_engine_without_detail_tells_nothing() -> None:
    assert read({"Layers": ["one", "two"]}) == {}


def test_a_module_in_two_kernels_runs_in_the_wider_one() -> None:
    narrow = layer("a", [f"{QUERY}/MatMul"], INT8, "Int8", "Int8")
    for other, told in ((HALF, "HALF"), ("_gemm_untold", None)):
        wide = layer("b", [f"{QUERY}/MatMul"], other, "Half" if told else "", "")
        for layers in ([narrow, wide], [wide, narrow]):
            assert read({"Layers": layers})[QUERY]["multiplies"] == told


def test_an_unknown_kernel_that_reads_half_weights_is_not_called_int8() -> None:
    kernel = layer("g", [f"{QUERY}/MatMul"], "untold", "Int8", Weights={"Type": "Half"})
    found = read({"Layers": [kernel]})
    assert found[QUERY]["multiplies"] is None
    assert list_unreported_modules({QUERY: STATIC}, found) == [QUERY]


def test_of_modules_that_share_a_kernel_none_passes_by_anothers_codes() -> None:
    nodes = [f"{HEAD}/MatMul", f"{DENSE}/MatMul"]
    found = read({"Layers": [layer("g", nodes, "untold", "Half", "Int4", "Half")]})
    asked = {HEAD: FOUR, DENSE: FOUR}
    assert list_unreported_modules(asked, found) == [HEAD, DENSE]
    floats = read({"Layers": [layer("g", nodes, "untold", "Half", "Half")]})
    assert sorted(precision_fallbacks(asked, floats)) == [HEAD, DENSE]
