"""The gateway through the OpenAI client and bare HTTP, in front of a real daemon with the fake executor."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from gateway_process import GatewayProcess

from kvd.cli.exits import Exit

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

MAX_MODEL_LEN = 65536
CHAT = [{"role": "system", "content": "Be brief. " * 4}, {"role": "user", "content": "Who is there?"}]
LONG = {"prompt": "x", "max_tokens": 60000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    root = tmp_path_factory.mktemp("d")
    with DaemonProcess(root, "--max-model-len", str(MAX_MODEL_LEN), "--kv-memory", "64MiB") as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def gateway(daemon: DaemonProcess) -> Iterator[GatewayProcess]:
    with GatewayProcess(daemon.root, daemon.endpoint, "--served-model-name", "small", "--served-model-name", "alias") as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> openai.OpenAI:
    return gateway.openai()


def greedy(prompt: str, num_tokens: int) -> str:
    return bytes(expected_tokens(prompt.encode(), num_tokens)).decode()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def num_open(daemon: DaemonProcess) -> int:
    with daemon.client() as client:
        requests = client.status()["requests"]
    return requests["running"] + requests["waiting"] + requests["stalled"]


def test_a_chat(client: openai.OpenAI, daemon: DaemonProcess):
    answer = client.chat.completions.create(model="small", messages=CHAT, max_completion_tokens=8, temperature=0, user="me")
    with daemon.client() as own:
        wanted = own.chat(CHAT, max_tokens=8, temperature=0.0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (wanted.text, "assistant", wanted.finish_reason)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "small", "chatcmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (wanted.usage.prompt_tokens, wanted.usage.completion_tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.kvd[0]["total_ms"] > 0


def test_a_streamed_chat_is_the_whole_one_and_counts_cached_tokens(client: openai.OpenAI):
    options = {"model": "small", "messages": CHAT, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens - 16 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    plain = list(client.chat.completions.create(**options, stream=True))
    assert plain[-1].choices
    assert plain[-1].usage is None


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI):
    options = {"model": "small", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(prompt="abc", **options)
    ids = client.completions.create(prompt=list(b"abc"), **options)
    several = client.completions.create(prompt=["abc", "de"], n=2, **options)
    lists = client.completions.create(prompt=[list(b"abc"), list(b"de")], **options)
    assert text.choices[0].text == ids.choices[0].text == greedy("abc", 8)
    assert [(choice.index, choice.text) for choice in lists.choices] == [(0, greedy("abc", 8)), (1, greedy("de", 8))]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[::2]] == [greedy("abc", 8), greedy("de", 8)]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (5, 32)
    assert (text.object, text.id[:5], text.choices[0].finish_reason) == ("text_completion", "cmpl-", "length")
    assert len(client.completions.create(model="small", prompt="abc", extra_body={"ignore_eos": True}).choices[0].text) == 16


def test_a_stream_of_several_prompts_and_choices(client: openai.OpenAI):
    options = {"model": "small", "prompt": ["abc", "de"], "n": 2, "max_tokens": 20, "seed": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_each_text_and_its_log_probabilities(client: openai.OpenAI, stream: bool):
    options = {"model": "small", "max_tokens": 6, "temperature": 0, "n": 2, "extra_body": {"ignore_eos": True}, "stream": stream}
    answer = client.completions.create(prompt=["abc", "de"], echo=True, logprobs=1, **options)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for index, prompt in enumerate(["abc", "abc", "de", "de"]):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own) == prompt + greedy(prompt, 6)
        told = [choice.logprobs for choice in own if choice.logprobs]
        assert "".join(token for each in told for token in each.tokens) == prompt + greedy(prompt, 6)
        assert [offset for each in told for offset in each.text_offset] == list(range(len(prompt) + 6))
        values = [value for each in told for value in each.token_logprobs]
        assert values[0] is None
        assert all(value < 0 for value in values[1:])


def test_a_prompt_is_scored_and_nothing_generated(client: openai.OpenAI):
    options = {"model": "small", "prompt": "abcd", "temperature": 0, "logprobs": 2}
    scored = client.completions.create(**options, echo=True, max_tokens=0)
    longer = client.completions.create(**options, echo=True, max_tokens=3, extra_body={"ignore_eos": True})
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == ("abcd", "length", 0)
    assert choice.logprobs.token_logprobs == longer.choices[0].logprobs.token_logprobs[:4]
    told = (
        client.completions.create(model="small", prompt="abcd", max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0].prompt_logprobs
    )
    assert told[0] is None
    assert [each[str(byte)]["logprob"] for each, byte in zip(told[1:], b"bcd", strict=True)] == choice.logprobs.token_logprobs[1:]
    assert all(next(reversed(each.values()))["rank"] == 1 for each in told[1:])
    chat = client.chat.completions.create(model="small", messages=CHAT, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_what_may_come_out_is_as_the_request_says(client: openai.OpenAI):
    options = {"model": "small", "prompt": "abc", "max_tokens": 8, "temperature": 0}
    biased = client.completions.create(**options, logit_bias={str(ord("Q")): 100}).choices[0]
    assert biased.text == "Q" * 8
    allowed = client.completions.create(**options, extra_body={"allowed_token_ids": [65, 66], "ignore_eos": True}).choices[0]
    assert set(allowed.text) <= {"A", "B"}
    with pytest.raises(openai.BadRequestError, match="no token may be sampled"):
        client.completions.create(**options, extra_body={"allowed_token_ids": [65], "bad_words": ["A"]})
    cut = client.completions.create(**options, extra_body={"truncate_prompt_tokens": 2, "ignore_eos": True})
    assert (cut.usage.prompt_tokens, cut.choices[0].text) == (2, greedy("bc", 8))


def test_tools_are_told_the_model_and_answers_stay_text(client: openai.OpenAI):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    options = {"model": "small", "messages": CHAT, "max_tokens": 3, "temperature": 0}
    plain, told = client.chat.completions.create(**options), client.chat.completions.create(**options, tools=[tool])
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens + len('"look_up"')
    assert told.choices[0].message.tool_calls is None
    without = client.chat.completions.create(**options, tools=[tool], tool_choice="none")
    assert without.usage.prompt_tokens == plain.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**options, tools=[tool], tool_choice="required")


def test_stop_ends_the_text_before_it(client: openai.OpenAI):
    full = greedy("abc", 24)
    options = {"model": "small", "prompt": "abc", "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for stop in (full[9:11], ["nowhere", full[9:11]]):
        answer = client.completions.create(**options, stop=stop)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (full[: full.index(full[9:11])], "stop")
    chunks = list(client.completions.create(**options, stop=full[9:11], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == full[: full.index(full[9:11])]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_the_tokens(client: openai.OpenAI, stream: bool):
    options = {"model": "small", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}, "stream": stream}
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **options)
    choices = [chunk.choices[0] for chunk in chat] if stream else chat.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    text = "".join(choice.delta.content or "" for choice in choices) if stream else choices[0].message.content
    assert "".join(entry.token for entry in entries) == text
    assert all(
        len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token and entry.logprob == entry.top_logprobs[0].logprob < 0
        for entry in entries
    )
    completion = client.completions.create(prompt="abc", logprobs=1, **options)
    choices = [chunk.choices[0] for chunk in completion] if stream else completion.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert "".join(tokens) == greedy("abc", 6)
    assert offsets == list(range(6))


@pytest.mark.grammar
def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="small",
        messages=CHAT,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["age"] <= 99
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(model="small", messages=CHAT, max_tokens=5, extra_body={"guided_choice": ["left", "right"]})
    assert answer.choices[0].message.content in ("left", "right")
    with pytest.raises(openai.BadRequestError, match="objekt"):
        client.completions.create(model="small", prompt="x", extra_body={"structured_outputs": {"json": {"type": "objekt"}}})


def test_the_models(client: openai.OpenAI, gateway: GatewayProcess):
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("alias").max_model_len == MAX_MODEL_LEN
    assert client.completions.create(model="alias", prompt="x", max_tokens=1).model == "alias"
    unnamed = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert json.loads(unnamed.body)["model"] == "small"
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="x")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"temperature": -1}, 400, "temperature", "bad_request"),
        ({"top_p": 0}, 400, "top_p", "bad_request"),
        ({"max_tokens": 0}, 400, "max_tokens", "bad_request"),
        ({"n": 1000}, 400, "n", "bad_request"),
        ({"n": 2**31}, 400, "n", "bad_request"),
        ({"logprobs": 21}, 400, "logprobs", "bad_request"),
        ({"stop": [""]}, 400, "stop", "bad_request"),
        ({"prompt": ""}, 400, None, "bad_request"),
        ({"prompt": [70000]}, 400, None, "bad_request"),
        ({"prompt": [-1]}, 400, "prompt", None),
        ({"n": 10**30}, 400, "n", None),
        ({"min_tokens": 10**20}, 400, "min_tokens", None),
        ({"cache_salt": "x" * 65}, 400, "cache_salt", "bad_request"),
        ({"max_tokens": MAX_MODEL_LEN}, 400, None, "context_length_exceeded"),
        ({"prompt": "x" * MAX_MODEL_LEN}, 400, None, "context_length_exceeded"),
        ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ({"banned_token_ids": [1] * 4097}, 400, "banned_token_ids", "bad_request"),
        ({"bad_words": ["x"] * 4097}, 400, "bad_words", "bad_request"),
        ({"logit_bias": {"0" * 5000 + "7": 1}}, 400, "logit_bias", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_their_status_and_form(
    gateway: GatewayProcess, fields: dict, status: int, param: str | None, code: str, stream: bool
):
    reply = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": stream, **fields})
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    assert (reply.error["param"], reply.error["code"], reply.error["type"]) == (param, code, "invalid_request_error")
    assert reply.error["message"]


def test_what_is_not_the_api(gateway: GatewayProcess):
    assert gateway.get("/nowhere").status == 404
    assert gateway.get("/v1/completions").status == 405
    assert gateway.request("POST", "/v1/completions", b'{"prompt":"x"}', **{"content-type": "text/plain"}).status == 415
    assert gateway.post("/v1/completions", b"{").status == 400
    big = gateway.post("/v1/completions", b" " * ((8 << 20) + 1))
    assert (big.status, big.error["code"]) == (413, "too_large")
    for error in (gateway.get("/nowhere").error, big.error):
        assert set(error) == {"message", "type", "param", "code"}


def test_a_body_without_an_end_in_sight_is_cut(gateway: GatewayProcess):
    """Chunked, so that no header says how long it will be."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    parts = iter([b" " * (1 << 20)] * 9)
    try:
        connection.request("POST", "/v1/completions", parts, {"content-type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it did not wait for the rest
    finally:
        connection.close()
    assert gateway.get("/health").status == 200


def test_a_client_that_goes_away_takes_its_request_along(gateway: GatewayProcess, daemon: DaemonProcess):
    stream = gateway.openai().completions.create(model="small", prompt="x", max_tokens=60000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    wait_for(lambda: num_open(daemon) == 1)  # others of before may be about to end
    stream.close()
    wait_for(lambda: num_open(daemon) == 0)
    with socket.create_connection(("127.0.0.1", gateway.port)) as raw:
        body = json.dumps(LONG).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_for(lambda: num_open(daemon) == 1)
    wait_for(lambda: num_open(daemon) == 0)
    assert not [record for record in gateway.records() if record.get("level") in {"error", "critical"}]


def test_a_key_is_asked_for_everywhere_but_at_health(daemon: DaemonProcess, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfrom-file\n")
    with GatewayProcess(tmp_path, daemon.endpoint, "--api-key-file", str(keys), env={"KVD_API_KEY": "from-env"}) as gateway:
        gateway.wait_ready()
        assert gateway.get("/health").status == 200
        for path in ("/v1/models", "/v1/models/x"):
            assert gateway.get(path).status == 401
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic from-env"}, {"authorization": "from-env"}):
            reply = gateway.post("/v1/completions", {"prompt": "x"}, **headers)
            assert (reply.status, reply.error["code"], reply.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        for key in ("from-file", "from-env"):
            model = next(iter(gateway.openai(key).models.list())).id
            assert gateway.openai(key).completions.create(model=model, prompt="x", max_tokens=1).usage.completion_tokens == 1
        with pytest.raises(openai.AuthenticationError):
            gateway.openai("wrong").models.list()
        assert "from-file" not in gateway.log_path.read_text()


def test_beyond_its_bound_it_asks_to_come_back(daemon: DaemonProcess, tmp_path):
    with GatewayProcess(tmp_path, daemon.endpoint, "--max-requests", "1") as gateway:
        gateway.wait_ready()
        client = gateway.openai()
        model = next(iter(client.models.list())).id
        stream = client.completions.create(model=model, prompt="x", max_tokens=60000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        reply = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "rate_limit_error", "1")
        stream.close()
        wait_for(lambda: gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200)


def test_without_a_daemon_and_through_its_restart(tmp_path):
    endpoint = f"ipc://{tmp_path}/s.sock"
    with GatewayProcess(tmp_path, endpoint) as gateway:
        reply = gateway.get("/health")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        with DaemonProcess(tmp_path, "--fake-step-ms", "2") as daemon:  # so that the answer is not over when it is killed
            gateway.wait_ready()
            client = gateway.openai()
            model = next(iter(client.models.list())).id
            wanted = client.completions.create(model=model, prompt="abc", max_tokens=4, temperature=0).choices[0].text
            stream = client.completions.create(model=model, prompt="x", max_tokens=8000, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            daemon.kill()
            with pytest.raises(openai.APIError, match="vanished"):
                list(stream)
            assert gateway.get("/health").status == 503
        with DaemonProcess(tmp_path):
            gateway.wait_ready()
            answer = client.completions.create(model=model, prompt="abc", max_tokens=4, temperature=0)
            assert answer.choices[0].text == wanted
        with DaemonProcess(tmp_path, "--block-size-tokens", "32"):
            gateway.wait_ready()
            other = client.completions.create(model=model, prompt="abc", max_tokens=4, temperature=0)
            assert other.system_fingerprint != answer.system_fingerprint


def test_idle_connections_are_in_nobodys_way(daemon: DaemonProcess, tmp_path):
    with GatewayProcess(tmp_path, daemon.endpoint, "--max-requests", "1") as gateway, contextlib.ExitStack() as open_ones:
        gateway.wait_ready()
        for _ in range(8):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
        assert gateway.get("/health").status == 200
        assert gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


def test_what_outlasts_the_drain_is_told_so(daemon: DaemonProcess, tmp_path):
    with GatewayProcess(tmp_path, daemon.endpoint, "--drain-timeout", "0.3") as gateway, ThreadPoolExecutor() as pool:
        gateway.wait_ready()
        client = gateway.openai()
        model = next(iter(client.models.list())).id
        whole = pool.submit(gateway.post, "/v1/completions", LONG)
        stream = client.completions.create(model=model, prompt="x", max_tokens=60000, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        wait_for(lambda: num_open(daemon) == 2)
        gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shuts down"):
            list(stream)
        reply = whole.result()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "draining", "1")
        assert gateway.process.wait(30) == Exit.OK
        assert not [record for record in gateway.records() if record.get("level") in {"error", "critical"}]
    wait_for(lambda: num_open(daemon) == 0)


def accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_sigterm_lets_answers_end_and_a_second_one_does_not(daemon: DaemonProcess, tmp_path):
    with GatewayProcess(tmp_path, daemon.endpoint) as gateway:
        gateway.wait_ready()
        client = gateway.openai()
        model = next(iter(client.models.list())).id
        options = {"model": model, "prompt": "x", "stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(max_tokens=3000, **options)
        text = next(stream).choices[0].text
        gateway.process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert len(text.encode("latin-1", "replace")) > 1000
        client.close()
        assert gateway.process.wait(30) == Exit.OK
    with GatewayProcess(tmp_path, daemon.endpoint) as gateway:
        gateway.wait_ready()
        stream = gateway.openai().completions.create(max_tokens=60000, **options)
        next(stream)
        gateway.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not accepts(gateway.port))  # two signals that nobody has heard yet are one
        assert gateway.process.poll() is None
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == Exit.TERMINATED
        stream.close()
    wait_for(lambda: num_open(daemon) == 0)


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{before}\nfrom kvd.cli.app import main\nsys.exit(main({list(arguments)!r}))"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=30, check=False)


def test_what_it_does_not_start_with(tmp_path):
    open_host = run("gateway", "--host", "0.0.0.0")
    assert (open_host.returncode, "api-key-file" in open_host.stderr) == (Exit.CONFIG, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = run("gateway", "--port", str(taken.getsockname()[1]))
    assert (in_use.returncode, "in use" in in_use.stderr) == (Exit.TEMPORARY, True)
    missing = run("gateway", "--api-key-file", str(tmp_path / "none"))
    assert missing.returncode == Exit.NO_INPUT
    (tmp_path / "empty").write_text("# nothing\n")
    assert run("gateway", "--api-key-file", str(tmp_path / "empty")).returncode == Exit.CONFIG
    assert run("gateway", "--max-body-bytes", "8MB").returncode == Exit.USAGE
    assert run("gateway", "--port", "0", "--connect", "http://x").returncode == Exit.USAGE
    without = run("gateway", before="sys.modules['uvicorn'] = None")
    assert (without.returncode, "pip install '.[http]'" in without.stderr) == (Exit.CONFIG, True)
