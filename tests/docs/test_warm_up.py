"""The script on the page that warms a store up sends what an engine takes, once each."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from tests.docs.pages import DOCS, blocks_of

(SCRIPT,) = (
    block.text
    for block in blocks_of(DOCS / "howto/operate.md")
    if block.remark == "needs a running server"
)


class Endpoint(BaseHTTPRequestHandler):
    """Takes completions as vLLM does, and answers with a number of tokens."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = json.dumps({"usage": {"prompt_tokens": 7}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Endpoint.bodies.clear()
    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()
        thread.join()


def test_every_request_is_sent_once_for_one_token(tmp_path: Path, url: str) -> None:
    asked: list[dict[str, Any]] = [
        {
            "model": "m",
            "messages": [],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"model": "m", "messages": [], "max_completion_tokens": 512, "min_tokens": 9, "n": 4},
        {"model": "m", "prompt": "So be it.", "max_tokens": 99},
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(map(json.dumps, asked)) + "\n\n")
    run = [sys.executable, "-c", SCRIPT, url, str(requests)]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, timeout=15)
    assert (ran.stdout, ran.stderr) == ("21 tokens sent\n", "")
    wanted = [
        {"model": "m", "messages": [], "max_tokens": 1, "stream": False},
        {"model": "m", "messages": [], "max_tokens": 1, "stream": False},
        {"model": "m", "prompt": "So be it.", "max_tokens": 1, "stream": False},
    ]
    assert sorted(map(_text, Endpoint.bodies)) == sorted(map(_text, wanted))


def _text(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)
