"""Stand-in for vLLM's server: answers the paths of the OpenAI API with its command line."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        models = {"data": [{"id": OPTIONS["--served-model-name"], "options": OPTIONS}]}
        known = {"/health": b"", "/v1/models": json.dumps(models).encode()}
        self.answer(200 if self.path in known else 404, known.get(self.path, b"{}"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer(404, b"{}")
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        time.sleep(0.02)
        for i in range(body["max_tokens"]):
            self.event(json.dumps({"choices": [{"text": f" {i}"}]}))
            time.sleep(0.002)
        self.event("[DONE]")

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    where = OPTIONS["--host"], int(OPTIONS["--port"])
    ThreadingHTTPServer(where, Handler).serve_forever()
