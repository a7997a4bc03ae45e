"""A target that is a function: SGLang's `/generate` as far as `hsdump generate` knows it, with faults on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answering = Callable[[list[int], Body], "Body | int"]
"""From prompt ids and sampling parameters to a response, or to an HTTP status."""


@dataclass
class FakeTarget:
    """What it was asked, and what it says."""

    answering: Answering
    model_path: str
    max_req_input_len: int = 1000
    asked: list[list[int]] = field(default_factory=list)
    parameters: list[Body] = field(default_factory=list)
    url: str = ""
    gone: bool = False
    """Connections are closed without a word from now on."""

    def facts(self) -> Body:
        return {
            "model_path": self.model_path,
            "max_req_input_len": self.max_req_input_len,
            "version": "0.0.1",
        }


def reply(prompt: list[int], output: list[int], finish: Body | None = None) -> Body:
    """Answer as SGLang does; by default stopped by the last token."""
    meta = {
        "finish_reason": finish or {"type": "stop", "matched": output[-1]},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
    }
    return {"text": "", "output_ids": output, "meta_info": meta}


@contextmanager
def serving(target: FakeTarget) -> Iterator[FakeTarget]:
    """Run it on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, target.facts())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            target.asked.append(body["input_ids"])
            target.parameters.append(body["sampling_params"])
            answer = target.answering(body["input_ids"], body["sampling_params"])
            if isinstance(answer, int):
                self._send(answer, {"error": {"message": "told to"}})
            else:
                self._send(200, answer)

        def _send(self, status: int, body: Body) -> None:
            if target.gone:
                self.close_connection = True
                return
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        target.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield target
        finally:
            server.shutdown()
            thread.join()
