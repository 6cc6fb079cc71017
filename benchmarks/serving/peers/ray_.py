"""https://docs.ray.io/en/latest/serve : serve.batch."""

from __future__ import annotations

import time
from typing import Any

from embedder import BUNDLE, ROWS, Embedder, port, read_arguments, rows
from ray import serve


class Replica:
    def __init__(self, bundle: str, most: str) -> None:
        import os

        os.environ[BUNDLE], os.environ[ROWS] = bundle, most
        self.embedder = Embedder()
        self.embed.set_max_batch_size(int(most))

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.0)
    async def embed(self, texts: list[str]) -> list[str]:
        return self.embedder(texts)

    async def __call__(self, request: Any) -> dict[str, str]:
        return {"embedding": await self.embed((await request.json())["input"])}


if __name__ == "__main__":
    import os

    read_arguments()
    serve.start(http_options={"host": "127.0.0.1", "port": port()})
    deployment = serve.deployment(Replica, max_ongoing_requests=1000)
    serve.run(deployment.bind(os.environ[BUNDLE], str(rows())))
    while True:
        time.sleep(1)
