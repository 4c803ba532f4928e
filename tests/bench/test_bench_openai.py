"""The OpenAI client against a scripted HTTP server: what it reads of a good answer, and what it says about bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from kvd.bench.measuring import Ask, BenchError
from kvd.bench.openai_server import OpenAiServer

pytestmark = pytest.mark.socket

ASK = Ask([{"role": "user", "content": "hello"}], 3)
CHUNKED = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}


def delta(text, finish=None):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


GOOD = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    delta("one"),
    delta(" two"),
    delta(" é", "length"),
    USAGE,
]


def events(items, end="data: [DONE]\n\n"):
    return "".join(f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items) + end


def chunked(text, size=7):
    """Cut anywhere, as a server may."""
    data = text.encode()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return CHUNKED.encode() + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def talk(answers, call, *, timeout_s=5.0, path="", model="m"):
    """Serve one connection per answer (bytes by path, or a coroutine), and make ``call`` of a client; what was asked comes with what it gave."""
    requests, serving, is_over = [], [], asyncio.Event()

    async def serve(reader, writer):
        serving.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        body = await reader.readexactly(length)
        requests.append((head.split(" ")[0], head.split(" ")[1], head, json.loads(body) if body else None))
        answer = answers.get(head.split(" ")[1], b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        if answer == b"silence":
            await is_over.wait()
        with contextlib.suppress(ConnectionError):
            writer.write(answer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def both():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                return await call(OpenAiServer(f"http://127.0.0.1:{port}{path}", model=model, timeout_s=timeout_s, api_key="sesame"))
            finally:
                is_over.set()
                await asyncio.gather(*serving)

    return asyncio.run(both()), requests


def ask(answer, **options):
    return talk({"/v1/chat/completions": answer}, lambda server: server.ask(ASK), **options)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_streamed_answer_is_read_however_it_is_cut(size):
    answer, requests = ask(chunked(events(GOOD), size))
    assert answer.text == "one two é"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 3, 4)
    assert len(answer.arrivals) == 3
    assert 0 < answer.ttft_s <= answer.ended_s - answer.asked_s
    method, path, head, body = requests[0]
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert "Bearer sesame" in head
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (3, 0, True, True)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_base_may_end_with_the_version(path):
    _, requests = ask(chunked(events(GOOD)), path=path)
    assert requests[0][1] == "/v1/chat/completions"


def test_an_answer_without_chunks_is_read_until_the_connection_ends():
    answer, _ = ask(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + events(GOOD).encode())
    assert answer.completion_tokens == 3


def test_a_token_without_text_counts_once_there_was_text():
    answer, _ = ask(chunked(events([delta("a"), delta(""), delta("é"), USAGE])))
    assert len(answer.arrivals) == 3


def test_the_first_listed_model_is_asked_for():
    models = json.dumps({"data": [{"id": "the-model"}]})
    listed = f"HTTP/1.1 200 OK\r\nContent-Length: {len(models)}\r\n\r\n{models}".encode()
    _, requests = talk({"/v1/models": listed, "/v1/chat/completions": chunked(events(GOOD))}, lambda server: server.ask(ASK), model="")
    assert requests[-1][3]["model"] == "the-model"


ERROR = json.dumps({"error": {"message": "the prompt\nis too long", "type": "invalid_request_error"}})


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(ERROR)}\r\n\r\n{ERROR}".encode(),
            "refused",
            "answered 400: the prompt is too long",
        ),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nburn", "refused", "answered 500: burn"),
        (chunked(events([delta("a"), {"error": {"message": "engine died"}}])), "failed", "engine died"),
        (chunked(events([delta("a")], end="")), "failed", r"without \[DONE\]"),
        (chunked(events(GOOD))[:-60], "failed", "broke off a stream"),
        (chunked(events(["{nonsense"])), "failed", "broke off a stream"),
        (chunked(events(["5"])), "failed", "is no JSON object"),
        (CHUNKED.encode() + b"zz\r\n", "failed", "broke off a stream"),
        (chunked(events(GOOD[:-1])), "refused", "include_usage"),
        (b"SSH-2.0-OpenSSH\r\n", "unavailable", "no HTTP server"),
        (b"", "unavailable", "no HTTP server"),
    ],
    ids=["400", "500", "error event", "no DONE", "cut", "no JSON", "no object", "no chunk", "no usage", "no HTTP", "closed"],
)
def test_a_bad_answer_is_said_in_words(answer, kind, message):
    with pytest.raises(BenchError, match=message) as failure:
        ask(answer)
    assert failure.value.kind == kind


@pytest.mark.parametrize(
    ("answer", "message"), [(b"silence", "did not answer within"), (CHUNKED.encode() + b"5\r\n", "fell silent|broke off")]
)
def test_silence_has_an_end(answer, message):
    with pytest.raises(BenchError, match=message):
        ask(answer, timeout_s=0.3)


def test_nobody_at_the_address():
    async def both():
        server = OpenAiServer("http://127.0.0.1:9", timeout_s=2.0)
        assert not await server.is_ready()
        await server.ask(ASK)

    with pytest.raises(BenchError, match="can't be asked") as failure:
        asyncio.run(both())
    assert failure.value.kind == "unavailable"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BenchError, match="no http://") as failure:
        OpenAiServer(url)
    assert failure.value.kind == "usage"


@pytest.mark.parametrize(
    ("answers", "ready"),
    [
        ({"/health": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"}, True),
        ({"/health": b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n"}, False),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"}, True),
        ({}, False),
    ],
    ids=["health", "loading", "no health", "nothing"],
)
def test_whether_it_is_ready(answers, ready):
    found, _ = talk(answers, lambda server: server.is_ready())
    assert found is ready


def test_the_version_is_what_the_server_tells():
    told = b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{"version": "0.32.0"}'
    assert talk({"/version": told}, lambda server: server.version())[0] == "0.32.0"
    assert talk({}, lambda server: server.version())[0] == "unknown"
