"""https://lightning.ai/docs/litserve : max_batch_size, batch_timeout.

`from __future__ import annotations` is left out: LitServe reads the type of a request from the
annotation of decode_request, and refuses every request (422) where that is a string.
"""

from typing import Any

import litserve
from embedder import Embedder, port, read_arguments, rows


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002 - as LitServe calls it
        self.embedder = Embedder()

    def decode_request(self, request: dict[str, Any]) -> str:
        return str(request["input"])

    def batch(self, inputs: list[str]) -> list[str]:
        return list(inputs)

    def predict(self, x: Any) -> Any:
        return self.embedder(x) if rows() > 1 else self.embedder([x])[0]

    def unbatch(self, output: list[str]) -> list[str]:
        return output

    def encode_response(self, output: str) -> dict[str, str]:
        return {"embedding": output}


if __name__ == "__main__":
    read_arguments()
    api = Api(max_batch_size=rows(), batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=port(), generate_client_file=False, log_level="error")
