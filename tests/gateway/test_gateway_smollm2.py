"""The gateway in front of the real model: what it says is what kvd's own client is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from gateway_process import GatewayProcess

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.torch, pytest.mark.model]

CHAT = [{"role": "system", "content": "You answer in one sentence."}, {"role": "user", "content": "What is the capital of France?"}]


def test_the_openai_client_on_smollm2(tmp_path: Path, smollm2: Path):
    with (
        DaemonProcess(tmp_path, "--model", str(smollm2), "--kv-memory", "128MiB", fake=False) as daemon,
        GatewayProcess(tmp_path, daemon.endpoint) as gateway,
    ):
        gateway.wait_ready()
        openai = gateway.openai()
        model = next(iter(openai.models.list())).id
        with daemon.client() as client:
            wanted = client.chat(CHAT, max_tokens=24, temperature=0.0)
        chunks = list(openai.chat.completions.create(model=model, messages=CHAT, max_tokens=24, temperature=0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
        assert "Paris" in wanted.text
        answer = openai.chat.completions.create(model=model, messages=CHAT, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3)
        entries = answer.choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
        assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in entries)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 16
        thai = openai.completions.create(model=model, prompt="สวัสดี ครับ ผม", max_tokens=16, temperature=0, logprobs=1)
        assert len(thai.choices[0].logprobs.tokens) == thai.usage.completion_tokens
