"""https://mlserver.readthedocs.io : adaptive batching, in one process, which is its fastest."""

from __future__ import annotations

import asyncio

from embedder import Embedder, port, read_arguments, rows
from mlserver import MLModel, MLServer, ModelSettings, Settings, types
from mlserver.codecs import StringCodec

WAIT = 0.001  # seconds that a batch waits for more; 0 turns batches off


class Model(MLModel):
    async def load(self) -> bool:
        self.embedder = Embedder()
        return True

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        output = StringCodec.encode_output("embedding", self.embedder(texts))
        return types.InferenceResponse(model_name=self.name, outputs=[output])


if __name__ == "__main__":
    read_arguments()
    settings = Settings(
        host="127.0.0.1",
        http_port=port(),
        grpc_port=port() + 1,
        metrics_port=port() + 2,
        parallel_workers=0,
        debug=False,
    )
    batches = {"max_batch_size": rows(), "max_batch_time": WAIT} if rows() > 1 else {}
    model = ModelSettings(name="embedding", implementation=Model, **batches)
    asyncio.run(MLServer(settings).start([model]))
