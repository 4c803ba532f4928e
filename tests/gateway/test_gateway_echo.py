"""Echoed prompts that end within a character, through the OpenAI client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from daemon_process import DaemonProcess
from gateway_process import GatewayProcess

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with DaemonProcess(tmp_path_factory.mktemp("d"), "--kv-memory", "4MiB") as daemon:
        daemon.wait_ready()
        with GatewayProcess(daemon.root, daemon.endpoint, "--served-model-name", "small") as gateway:
            gateway.wait_ready()
            yield gateway.openai()


PROMPTS = {"é": "é".encode(), "a\ufffd": b"a\xe3\x81", "\ufffd": b"\xc3", "\ufffd\ufffd\ufffd": b"\xae\xff\xf9", "abc": b"abc"}


@pytest.mark.parametrize("logprobs", [None, 1])
def test_where_nothing_is_generated_nothing_finishes_a_character(client, logprobs):
    prompts = [list(prompt) for prompt in PROMPTS.values()]
    answer = client.completions.create(model="small", prompt=prompts, echo=True, max_tokens=0, logprobs=logprobs)
    assert [choice.text for choice in answer.choices] == list(PROMPTS)
    assert answer.usage.completion_tokens == 0
    if logprobs is not None:
        assert [len(choice.logprobs.tokens) for choice in answer.choices] == list(map(len, prompts))
    for text, prompt in zip(PROMPTS, prompts, strict=True):
        alone = client.completions.create(model="small", prompt=prompt, echo=True, max_tokens=0, logprobs=logprobs)
        assert alone.choices[0].text == text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("only", "text"), [(0x82, "aあ"), (0x78, "a\ufffdx"), (0xE3, "a\ufffd\ufffd")])
def test_what_is_generated_finishes_it_or_not(client, only, text, stream):
    bias = {"logit_bias": {str(only): 100}, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(
        model="small", prompt=list(b"a\xe3\x81"), echo=True, max_tokens=1, temperature=0, stream=stream, **bias
    )
    pieces = answer if stream else [answer]
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == text
