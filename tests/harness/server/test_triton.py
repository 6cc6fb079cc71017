"""Triton's extensions: model configuration and statistics, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.server.caches.cache import Cache
from optimizer.harness.server.grpc.messages import methods
from tests.harness.server.over_grpc import Ask, needs_grpc, over_grpc, texts_request
from tests.harness.server.serving import Client, on_server

MODEL = "/v2/models/tiny"


async def get(client: Client, path: str) -> Any:
    return (await client.ask("GET", path)).json


def test_the_configuration_describes_inputs_batches_and_device(made: Path) -> None:
    async def test(client: Client) -> None:
        config = await get(client, f"{MODEL}/config")
        assert config["max_batch_size"] == 7
        assert config["input"] == [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]
        assert {"name": "embedding", "data_type": "TYPE_FP32", "dims": [32]} in config["output"]
        assert config["instance_group"] == [{"name": "tiny_0", "kind": "KIND_CPU", "count": 2}]
        batching = {"preferred_batch_size": [4], "max_queue_delay_microseconds": 3000}
        assert config["dynamic_batching"] == batching
        raw = await get(client, f"{MODEL}-tensors/versions/1/config")
        assert raw["input"][0] == {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
        assert "dynamic_batching" not in raw
        assert (await client.ask("GET", "/v2/models/other/config")).status == 404

    words = ("--max-texts", "7", "--rows", "4", "--delay-ms", "3", "--workers", "2")
    on_server(made, test, *words)


def test_text_generation_is_decoupled(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        config = await get(client, "/v2/models/tiny-decoder/config")
        assert config["model_transaction_policy"] == {"decoupled": True}
        await client.complete("good", max_tokens=4)
        (entry,) = (await get(client, "/v2/models/tiny-decoder/stats"))["model_stats"]
        assert (entry["inference_count"], entry["execution_count"]) == (1, 4)

    on_server(decoder_bundle, test)


def test_statistics_count_rows_runs_failures_and_phases_of_each_model(made: Path) -> None:
    async def test(client: Client) -> None:
        await client.infer(["good", "bad film"])
        await client.infer(["good"], priority=-1)
        ids = {"name": "input_ids", "datatype": "INT64", "shape": [3, 1], "data": [2, 2, 2]}
        both = {"inputs": [ids, {**ids, "name": "attention_mask", "data": [1, 1, 1]}]}
        await client.ask("POST", f"{MODEL}-tensors/infer", both)
        texts, tensors = (await get(client, "/v2/models/stats"))["model_stats"]
        assert (texts["inference_count"], texts["execution_count"]) == (2, 2)
        assert texts["batch_stats"][0]["batch_size"] == 1
        assert texts["batch_stats"][0]["compute_infer"]["count"] == 2
        stats = texts["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"]) == (1, 1)
        phases = ("compute_input", "queue", "compute_infer", "compute_output")
        assert sum(stats[p]["ns"] for p in phases) == pytest.approx(stats["success"]["ns"], abs=9)
        assert texts["last_inference"] > 1_600_000_000_000
        assert (tensors["name"], tensors["inference_count"]) == ("tiny-tensors", 3)
        assert tensors["batch_stats"][0]["batch_size"] == 3

    on_server(made, test, "--batching", "alone")


def test_an_answer_from_the_cache_is_a_hit_and_no_inference(made: Path) -> None:
    async def test(client: Client) -> None:
        client.app.first_service().cache = Cache(1 << 20)
        for _ in range(3):
            await client.infer(["good"])
        (entry,) = (await get(client, f"{MODEL}/versions/1/stats"))["model_stats"]
        stats = entry["inference_stats"]
        assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (2, 1)
        assert (entry["inference_count"], stats["success"]["count"]) == (1, 3)
        assert (await get(client, f"{MODEL}/config"))["response_cache"] == {"enable": True}

    on_server(made, test)


@needs_grpc
def test_both_are_the_same_over_grpc(made: Path) -> None:
    async def test(client: Client, ask: Ask) -> None:
        await ask("ModelInfer", texts_request([b"good", b"a film"]))
        await asyncio.sleep(0)
        message = methods()["ModelConfig"].request(name="tiny")
        config, over_http = (await ask("ModelConfig", message)).config, f"{MODEL}/config"
        assert config.max_batch_size == (await get(client, over_http))["max_batch_size"]
        text, embedding = config.input[0], config.output[0]
        assert (text.data_type, list(text.dims)) == (13, [1])  # TYPE_STRING
        assert (embedding.data_type, list(embedding.dims)) == (11, [32])  # TYPE_FP32
        assert config.instance_group[0].kind == 2  # KIND_CPU
        stats = await ask("ModelStatistics", methods()["ModelStatistics"].request(name="tiny"))
        (entry,) = stats.model_stats
        assert (entry.inference_count, entry.inference_stats.success.count) == (2, 1)
        assert len((await ask("ModelStatistics")).model_stats) == 2

    over_grpc(made, test)
