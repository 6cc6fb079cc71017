"""Requests choose an adapter by the model's name, and share no cache with those of others."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

from optimizer.export import onnx_file
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.generate import Options
from optimizer.lower.onnx.optional import adapters
from tests.decoders import HEADS, KV_HEADS, WIDTH
from tests.harness.server.grpc.test_stream import asked, column, sent
from tests.harness.server.over_grpc import Ask, needs_grpc, over_grpc
from tests.harness.server.serving import Client, Reply, on_server
from tests.harness.server.versions.test_loader import TOKEN, on_loader
from tests.package.bundles.small_bundle import edited

NAMES = ("law", "sql")
VALUES = WIDTH * KV_HEADS // HEADS
MODULES = {"q0": WIDTH, "v1": VALUES}
PROMPTS = ("a good film", "bad", "the phone was good")


def record(manifest: Any, bundle: Path, name: str) -> None:
    data = (bundle / name).read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "measured": False}
    manifest["files"][name] = entry


@pytest.fixture(scope="module")
def adapted(decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a decoder with two adapters; the first changes one module. Read-only."""
    bundle = Path(shutil.copytree(decoder_bundle, tmp_path_factory.mktemp("adapted") / "bundle"))
    (file,) = bundle.glob("model/*/model.onnx")
    model = onnx_file.load(file)
    for node in model.graph:
        if node.op_type == "MatMul" and str(node.outputs[0].name) in MODULES:
            node.metadata_props["module"] = str(node.outputs[0].name)
    modules = {name: (WIDTH, out) for name, out in MODULES.items()}
    adapters.add(model, modules, MODULES)
    ir.save(model, file)
    (bundle / "adapters").mkdir()
    draw = np.random.default_rng(0)
    for rank, name in enumerate(NAMES, 2):
        shapes = {f"{m}.lora_A": (WIDTH, rank) for m in [*MODULES][-rank + 1 :]}
        shapes |= {f"{m.removesuffix('A')}B": (rank, MODULES[m[:2]]) for m in [*shapes]}
        matrices = {n: draw.normal(0, 0.5, s).astype(np.float32) for n, s in shapes.items()}
        save_file(matrices, bundle / f"adapters/{name}.safetensors")

    def change(manifest: Any) -> None:
        manifest["contract"]["generation"]["adapters"] = list(NAMES)
        for name in (str(file.relative_to(bundle)), *(f"adapters/{n}.safetensors" for n in NAMES)):
            record(manifest, bundle, name)

    return edited(bundle, change)


def texts(bundle: Path, adapter: str | None) -> list[str]:
    options = Options(8, temperature=0, ignore_eos=True)
    with Bundle(bundle, adapter=adapter) as opened:
        return [opened.generate([prompt], options)[0].text for prompt in PROMPTS]


def test_without_an_adapter_the_texts_are_those_of_the_model(
    adapted: Path, decoder_bundle: Path
) -> None:
    assert texts(adapted, None) == texts(decoder_bundle, None)


def test_a_server_gives_texts_of_several_adapters_at_once_as_each_alone(adapted: Path) -> None:
    expected = {"tiny-decoder": texts(adapted, None), **{n: texts(adapted, n) for n in NAMES}}
    assert len(set(map(tuple, expected.values()))) == 3

    async def complete(client: Client, name: str, prompt: str) -> Reply:
        options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"model": name, "prompt": prompt, **options}
        return await client.ask("POST", "/v1/completions", body, TOKEN)

    async def test(client: Client, _: object) -> None:
        asked = [(name, i) for i in range(len(PROMPTS)) for name in expected]
        for cached in ("miss", "hit"):
            replies = await asyncio.gather(*(complete(client, n, PROMPTS[i]) for n, i in asked))
            for (name, i), reply in zip(asked, replies, strict=True):
                assert reply.headers["x-cache"] == cached
                assert reply.json["model"] == name
                assert reply.json["choices"][0]["text"] == expected[name][i]
        listed = (await client.ask("GET", "/v1/models", b"", TOKEN)).json["data"]
        assert [entry["id"] for entry in listed] == [*expected]
        unknown = await complete(client, "sq", "a")
        assert unknown.status == 404
        assert "tiny-decoder and law and sql" in unknown.json["error"]["message"]

    on_loader(test, adapted, words=("--cache-mib", "1", "--prefix-cache-mib", "1"))


def test_v2_answers_with_the_adapter_of_a_parameter_and_caches_for_it_alone(adapted: Path) -> None:
    expected = {"tiny-decoder": texts(adapted, None), **{n: texts(adapted, n) for n in NAMES}}

    async def infer(client: Client, adapter: str | None, model: str = "tiny-decoder") -> Reply:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [3], "data": PROMPTS}
        parameters = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        parameters |= {"adapter": adapter} if adapter else {}
        body = {"inputs": [tensor], "outputs": [{"name": "text"}], "parameters": parameters}
        return await client.ask("POST", f"/v2/models/{model}/infer", body, TOKEN)

    async def test(client: Client, _: object) -> None:
        for cached in ("miss", "hit"):
            for name in expected:
                reply = await infer(client, None if name == "tiny-decoder" else name)
                assert reply.headers["x-cache"] == cached
                assert reply.json["outputs"][0]["data"] == expected[name]
        unknown = await infer(client, "sq")
        assert unknown.status == 404
        assert "tiny-decoder, law, sql" in unknown.json["error"]
        as_model = await infer(client, None, "sql")
        assert as_model.status == 404
        assert "with the parameter adapter: sql" in as_model.json["error"]

    on_loader(test, adapted, words=("--cache-mib", "1"))


@needs_grpc
def test_over_grpc_texts_and_streams_are_those_of_the_adapter(adapted: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        options = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        for name in NAMES:
            expected = texts(adapted, name)[0]
            request = asked(PROMPTS[0], 0, "text", adapter=name, **options)
            whole = await ask("ModelInfer", request)
            assert whole.raw_output_contents[0][4:].decode() == expected
            pieces = await sent(ask.stream(), request)
            assert b"".join(column(p, "text") for p in pieces).decode() == expected

    over_grpc(adapted, test)


def test_a_model_without_adapters_refuses_the_parameter(made: Path) -> None:
    async def test(client: Client) -> None:
        reply = await client.infer(["good"], adapter="sql")
        assert reply.status == 400
        assert "tiny has no adapters" in reply.json["error"]

    on_server(made, test)


def test_a_similar_question_has_no_answer_of_another_adapter(
    adapted: Path, semantic: tuple[str, ...]
) -> None:
    """The two questions are equal to the encoder, and the answers of all adapters differ."""

    async def ask(client: Client, name: str, content: str) -> tuple[str, str]:
        options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        body = {"model": name, "messages": [{"role": "user", "content": content}], **options}
        reply = await client.ask("POST", "/v1/chat/completions", body, TOKEN)
        return reply.headers["x-cache"], reply.json["choices"][0]["message"]["content"]

    async def test(client: Client, _: object) -> None:
        names = ("tiny-decoder", *NAMES)
        first = {name: await ask(client, name, "a good film") for name in names}
        assert {state for state, _ in first.values()} == {"miss"}
        assert len({text for _, text in first.values()}) == len(names)
        for name in names:
            assert await ask(client, name, "A  GOOD film") == ("semantic", first[name][1])

    on_loader(test, adapted, words=semantic)


def test_an_adapter_that_the_bundle_lacks_is_refused_with_those_it_has(adapted: Path) -> None:
    with pytest.raises(InputError, match=r"no adapter 'sq'.*law, sql"):
        Bundle(adapted, adapter="sq")


def test_guessed_tokens_are_refused_with_adapters(adapted: Path) -> None:
    with pytest.raises(InputError, match="proven without adapters"):
        Bundle(adapted, adapter="sql", prompt_lookup=3)
    with pytest.raises(InputError, match="guessed tokens"):
        on_server(adapted, lambda _: asyncio.sleep(0), "--prompt-lookup", "3")


@pytest.mark.parametrize("cut", [4, 40, -4])
def test_a_damaged_adapter_is_refused(cut: int, adapted: Path, tmp_path: Path) -> None:
    from optimizer.harness.runtimes.ort.adapters import read

    data = (adapted / "adapters/sql.safetensors").read_bytes()
    (tmp_path / "sql.safetensors").write_bytes(data[:cut])
    with pytest.raises(BundleError, match="the adapter cannot be read"):
        read(tmp_path / "sql.safetensors")
