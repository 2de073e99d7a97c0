"""`halfbyte serve` over both engines, asked by the real `openai` client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from processes import end, environment, free_port, status, wait_for
from served_models import NEW_TOKENS, PROMPTS, dequantized, tokens_of

SECONDS = 400  # until a server answers; two free cores need 40
pytestmark = pytest.mark.timeout(SECONDS + 200)
ENGINES = {
    "vllm": ["--", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"],
    "transformers": ["--device", "cpu"],
}
WORDS = [" ".join(f"t{token}" for token in prompt) for prompt in PROMPTS]


@dataclass
class Server:
    engine: str
    port: int
    process: subprocess.Popen[str]
    log: Path
    right: list[str]  # what it is to go on with, prompt by prompt

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=60, max_retries=0)

    def goes_on(self, prompt: str, **options: Any) -> Any:
        options = {"max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": self.body} | options
        return self.client.completions.create(model=self.client.models.list().data[0].id, prompt=prompt, **options)

    @property
    def body(self) -> dict[str, Any]:
        return {"ignore_eos": True} if self.engine == "vllm" else {}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ENGINES])
def server(
    request: pytest.FixtureRequest, models: Callable[..., Path], cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from transformers import AutoModelForCausalLM

    folder, path = tmp_path_factory.mktemp("server"), models("llama", "nf4", nested=True)
    dense = AutoModelForCausalLM.from_pretrained(dequantized(folder / "dense", path))
    right = [" ".join(f"t{token}" for token in made) for made in tokens_of(dense)]
    port = free_port()
    engine = request.param
    command = [sys.executable, "-m", "halfbyte", "serve", str(path), "--port", str(port), "--engine", engine]
    command += ["--dtype", "float32", *ENGINES[engine]]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=environment(cache, 2) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, stdout=log, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(port, process, folder / "log", SECONDS)
            yield Server(engine, port, process, folder / "log", right)
        finally:
            end(process)


def test_completions(server: Server) -> None:
    """Each prompt alone, then all at once, several times."""
    for words, right in zip(WORDS, server.right, strict=True):
        answer = server.goes_on(words)
        assert answer.choices[0].text.split() == right.split()
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == NEW_TOKENS
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(server.goes_on, WORDS * 3))
    assert [answer.choices[0].text.split() for answer in answers] == [right.split() for right in server.right] * 3


def test_streaming(server: Server) -> None:
    asked = {
        "model": server.client.models.list().data[0].id, "temperature": 0, "max_tokens": NEW_TOKENS,
        "messages": [{"role": "user", "content": WORDS[0]}], "extra_body": server.body,
    }  # fmt: skip
    whole = server.client.chat.completions.create(**asked).choices[0]
    chunks = [
        chunk.choices[0] for chunk in server.client.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    parts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert len(parts) > 3
    assert "".join(parts).split() == whole.message.content.split() == server.right[0].split()
    assert chunks[-1].finish_reason == whole.finish_reason == "length"


def test_stop(server: Server) -> None:
    """A word that ends the answer is not part of it; transformers' server says that it knows no such words."""
    right = server.right[1].split()
    if server.engine == "transformers":
        with pytest.raises(openai.BadRequestError, match="stop is given, which transformers' server ignores"):
            server.goes_on(WORDS[1], stop=right[:1])
        return
    last = next(place for place, word in enumerate(right) if place and word not in right[:place])
    answer = server.goes_on(WORDS[1], stop=[right[last]])
    assert answer.choices[0].text.split() == right[:last]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": "no list"}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "t5", "max_tokens": "many"}),
        ("/v1/nowhere", {"prompt": "t5"}),
    ],
)
def test_bad_requests(server: Server, path: str, body: dict[str, Any]) -> None:
    """They are told so, and the server goes on."""
    assert status(server.port, path, {"model": server.client.models.list().data[0].id} | body) in (400, 404, 422)
    assert status(server.port, "/health") == 200
    assert server.goes_on(WORDS[0]).choices[0].text.split() == server.right[0].split()


def test_a_client_that_dies(server: Server) -> None:
    """Its request is dropped, and the next one answered."""
    body = json.dumps(
        {"model": server.client.models.list().data[0].id, "prompt": WORDS[0], "max_tokens": 200, "stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for _ in range(6):  # more than there are places
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            assert client.recv(64).startswith(b"HTTP/1.1 200")
    assert server.goes_on(WORDS[2]).choices[0].text.split() == server.right[2].split()


def test_the_end(server: Server) -> None:
    """It has said who serves and why. SIGTERM ends it, after the answer that it was at, and the port is free."""
    told = server.log.read_text(encoding="utf-8")
    assert f"halfbyte: {server.engine} " in told
    assert "(--engine asks for it) serves" in told
    answer = server.goes_on(WORDS[0], max_tokens=200, stream=True)
    text = next(answer).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].text for chunk in answer if chunk.choices)
    assert len(text.split()) == 200
    assert server.process.wait(60) == 0
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))
