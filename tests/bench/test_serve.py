"""`halfbyte bench serve`: the load and its times against a server whose times are known; records and tables."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.bench import load as loads
from halfbyte.bench import serve as bench
from halfbyte.bench import servers
from halfbyte.bench.load import Answer, Load
from halfbyte.cli import app
from halfbyte.measure import records

FIRST, BETWEEN, TOKENS = 0.1, 0.03, 5


class Handler(BaseHTTPRequestHandler):
    """Answers in words, the first after FIRST and the others each after BETWEEN seconds."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        if body["prompt"] == "wrong":
            self.send_error(400, "a wrong prompt")
            return
        self._begin("text/event-stream")
        time.sleep(FIRST)
        for number in range(TOKENS):
            time.sleep(BETWEEN if number else 0)
            self._event({"choices": [{"text": f" {body['prompt']}{number}"}]})
        self._event({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_the_load_is_seeded_and_bounded() -> None:
    load = Load("m", ["a", "b", "c"], 20, TOKENS, seed=3)
    assert load.order() == load.order() != Load("m", ["a", "b", "c"], 20, TOKENS, seed=4).order()
    with answering() as server:
        started = time.monotonic()
        answers = loads.run(server.server_port, load, 10)
        took = time.monotonic() - started
        sent = [body["prompt"] for body in server.bodies]  # type: ignore[attr-defined]
        few = loads.run(server.server_port, Load("m", ["a"], 50, TOKENS, seconds=0.01), 2)
    assert 1 <= len(few) <= 2  # a busy machine may begin the second one too late
    assert [answer.prompt for answer in answers] == load.order()
    assert sorted(sent) == sorted(load.order())
    assert all(answer.text == "".join(f" {answer.prompt}{i}" for i in range(TOKENS)) for answer in answers)
    assert took < len(answers) * (FIRST + BETWEEN * TOKENS)  # not one after the other


def test_times_are_those_of_the_server() -> None:
    with answering() as server:
        facts = loads.summary(loads.run(server.server_port, Load("m", ["a"], 4, TOKENS, ignore_eos=True), 2))
        assert server.bodies[0] == {  # type: ignore[attr-defined]
            "model": "m", "prompt": "a", "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
    assert (facts["requests"], facts["failed"], facts["tokens"]) == (4, 0, 4 * TOKENS)
    assert 1e3 * FIRST <= facts["first_ms_p50"] <= facts["first_ms_p99"]
    assert 0.9e3 * BETWEEN <= facts["between_ms_p50"] <= facts["between_ms_p99"]
    assert facts["tokens_per_s"] < 2 * TOKENS / (FIRST + BETWEEN * (TOKENS - 1))


def test_percentiles_and_failures() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [loads.percentile(values, p) for p in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert loads.percentile([7.0], 99) == 7.0
    assert loads.percentile([], 50) is None
    with answering() as server:
        (answer,) = loads.run(server.server_port, Load("m", ["wrong"], 1, TOKENS), 1)
    assert answer.error.startswith("400: ")
    assert loads.summary([answer]) == {"requests": 1, "failed": 1, "error": answer.error}
    assert loads.ask(server.server_port, Load("m", ["a"], 1, 1), "a").error
    assert loads.summary([])["error"] == "no request was begun"
    good = Answer("a", 0.0, [1.0, 2.0], "x", 2)
    assert loads.summary([good, answer])["error"] == answer.error


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that nobody loads: its servers answer by the Handler."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    (path / "model.safetensors").touch()
    monkeypatch.setattr(bench, "make_prompts", lambda model, settings: ["a", "b"])
    monkeypatch.setattr("halfbyte.serving.choice.is_installed", lambda name: True)
    return path


def test_a_record_of_both_providers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    told: list[int] = []  # how many tokens each request asks for

    @contextmanager
    def running(command: Any, variables: Any, port: int) -> Iterator[None]:
        asked.append((command, variables))
        with answering() as server:
            monkeypatch.setattr(loads, "ask", ask_at(server.server_port))
            yield

    plain = loads.ask

    def ask_at(port: int) -> Any:
        return lambda _, load, prompt: told.append(load.new_tokens) or plain(port, load, prompt)

    monkeypatch.setattr(servers, "running", running)
    monkeypatch.setattr(bench, "UNTIMED_TOKENS", 2)
    options = [
        "--engine",
        "vllm",
        "--clients",
        "1,3",
        "--requests",
        "2",
        "--new-tokens",
        str(TOKENS),
        "--baseline",
        "dense",
    ]
    result = CliRunner().invoke(
        app, ["bench", "serve", str(model), *options, "--out", str(tmp_path), "--", "--seed", "1"]
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/serve.json")
    record = records.read(path)
    assert [(row["provider"], row["clients"], row["requests"]) for row in record["rows"]] == [
        ("halfbyte", 1, 2), ("halfbyte", 3, 6), ("without halfbyte", 1, 2), ("without halfbyte", 3, 6),
    ]  # fmt: skip
    assert all(row["same_as_alone"] == row["requests"] and row["tokens_per_s"] > 0 for row in record["rows"])
    assert {(row["model"], row.get("checkpoint")) for row in record["rows"]} == {("model", None), ("model", "dense")}
    # Prompts alone and again, then each load behind one request of each client.
    assert told == 2 * [*[TOKENS] * 3, 2, *[TOKENS] * 2, *[2] * 3, *[TOKENS] * 6]
    (ours, none), (theirs, plugins) = asked
    assert (none, plugins) == ({}, {"VLLM_PLUGINS": "none"})
    assert ours[-2:] == theirs[-2:] == ["--seed", "1"]
    assert str(model) in ours
    assert "dense" in theirs
    text = bench.markdown(record)
    assert text.count("| 3 |") == 2
    assert "without halfbyte" in text


def test_a_server_that_does_not_start_is_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the baseline the record says why; of halfbyte's it is an error."""
    settings = bench.Settings("vllm", (1,), 1, 8, TOKENS, baseline="dense")
    failing = (["python", "-c", "raise ValueError('no such kind of model')"], {})
    monkeypatch.setattr(servers, "without", lambda *_: failing)
    with answering() as server:
        monkeypatch.setattr(servers, "free_port", lambda: server.server_port)
        monkeypatch.setattr(servers, "with_halfbyte", lambda *_: (["sleep", "60"], {}))
        ours, theirs = (
            bench.serve_rows(str(model), provider, ["a", "b"], settings, lambda step: None)
            for provider in bench.providers_of(settings)
        )
        assert next(ours)["tokens"] == TOKENS
        monkeypatch.setattr(servers, "free_port", lambda: 9)
        assert next(theirs)["left_out"] == "ValueError: no such kind of model"
    monkeypatch.setattr(servers, "with_halfbyte", lambda *_: failing)
    with pytest.raises(ValueError, match="the server did not start: ValueError: no such kind of model"):
        next(bench.serve_rows(str(model), bench.OURS, ["a", "b"], settings, lambda step: None))


def test_only_so_many_clients(model: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", str(model), "--clients", "65"])
    assert result.exit_code == 2
    assert "64" in result.output


def test_last_words_of_a_process(tmp_path: Path) -> None:
    """The reason that was told first, without who told it; not the code that raised."""
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=9) ERROR 11-26 17:30:24 [core.py:1330] ValueError: no such weight\n"
        "    raise RuntimeError(\nRuntimeError: See root cause above.\n\n"
    )
    assert servers.last_words(log) == "ValueError: no such weight"
    log.write_text(
        "Fatal Python error: Illegal instruction\n\nCurrent thread 0x7f (most recent call first):\n"
        "(EngineCore pid=9) ERROR 11-26 20:28:37 [core.py:1512] RuntimeError: cancelled\n"
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    )
    assert servers.last_words(log) == "Fatal Python error: Illegal instruction"
    log.write_text("the end\n")
    assert servers.last_words(log) == "the end"
    log.write_text("")
    assert servers.last_words(log) == "it said nothing"


def test_a_named_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint and tokenizer are made for the run, and rows have its name."""
    pytest.importorskip("transformers")
    served: list[Path] = []

    @contextmanager
    def running(command: Any, variables: Any, port: int) -> Iterator[None]:
        (path,) = [Path(part) for part in command if Path(part).is_dir()]
        served.append(path)
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {one.name for one in path.iterdir()}
        with answering() as server:
            monkeypatch.setattr(loads, "ask", lambda _, load, prompt: plain(server.server_port, load, prompt))
            yield

    plain = loads.ask
    monkeypatch.setattr(servers, "running", running)
    monkeypatch.setattr("halfbyte.serving.choice.is_installed", lambda name: True)
    options = ["--engine", "vllm", "--clients", "1", "--requests", "1", "--new-tokens", str(TOKENS), "--baseline", ""]
    result = CliRunner().invoke(app, ["bench", "serve", "tiny", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/serve.json")
    assert [(row["model"], row["failed"]) for row in records.read(path)["rows"]] == [("tiny", 0)]
    assert not served[0].exists()
