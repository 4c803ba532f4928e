"""What requests may ask for of their tokens and of their prompt, from both clients through a daemon of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from kvd_client import AsyncClient, Client, errors
from kvd_client.results import Completion

pytestmark = pytest.mark.e2e

EOS = 256
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    root: Path = tmp_path_factory.mktemp("outputs")
    with DaemonProcess(root) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def complete(client: Client, prompt: Any = "what follows", **options: Any) -> Completion:
    return client.generate(prompt, **{**GREEDY, "max_tokens": 24, **options})


def test_a_bias_favours_and_a_ban_takes_out(client: Client) -> None:
    assert complete(client, logit_bias={ord("Q"): 100}).text == "Q" * 24
    plain = complete(client)
    most = max(set(plain.token_ids), key=plain.token_ids.count)
    assert most not in complete(client, banned_token_ids=[most]).token_ids
    assert most not in complete(client, logit_bias=[(most, -100)]).token_ids


def test_nothing_but_what_is_allowed_comes_out_and_log_probabilities_are_the_models_own(client: Client) -> None:
    answer = complete(client, allowed_token_ids=[ord("x"), ord("y")], logprobs=3, temperature=1.0, seed=4)
    assert set(answer.text) == {"x", "y"}
    assert len(answer.choices[0].logprobs) == 24
    for entry in answer.choices[0].logprobs:
        assert entry.token_id in (ord("x"), ord("y"))
        assert entry.logprob < 0
        assert entry.top[0][1] >= entry.logprob
    assert answer.choices[0].cumulative_logprob == pytest.approx(sum(entry.logprob for entry in answer.choices[0].logprobs))


def test_bad_words_do_not_come_out(client: Client) -> None:
    plain = complete(client, max_tokens=60).text
    word = next(plain[at : at + 2] for at in range(10, 60) if " " not in plain[at : at + 2])
    again = complete(client, max_tokens=60, bad_words=[word])
    first = plain.index(word) + 1
    assert word not in again.text
    assert again.text[:first] == plain[:first]
    letter = plain[3]
    assert letter not in complete(client, bad_words=letter).text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allowed_token_ids": [65, 66], "banned_token_ids": [66, 65]}, "no token may be sampled"),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "no token may be sampled"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2, "ignore_eos": False}, "before min_tokens"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids has the id 257"),
        ({"logit_bias": {1: 101}}, "logit_bias of id 1 is 101"),
        ({"logit_bias": [(1, 1), (1, 2)]}, "twice"),
        ({"logit_bias": {65: 1}, "beam_width": 2}, "logit_bias and beam don't go together"),
        ({"bad_words": ["x"], "beam_width": 2}, "bad_words and beam don't go together"),
        ({"bad_words": ["  "]}, "not all of them spaces"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"truncate_prompt": -2}, "truncate_prompt is -2"),
        ({"tools": [{"name": "t"}]}, "tools are for the chat template"),
        ({"include_stop": True}, "include_stop is about stop strings"),
    ],
)
def test_a_bad_combination_says_what_is_wrong(client: Client, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.BadRequest, match=reason):
        complete(client, **options)


def test_rules_that_leave_nothing_later_end_the_request_with_a_clear_error(client: Client) -> None:
    with pytest.raises(errors.BadRequest, match="leaves no token to go on with"):
        complete(client, allowed_token_ids=[ord("a"), ord("b")], bad_words=["aa", "ab", "ba", "bb"])
    assert complete(client).text == complete(client).text


def test_the_prompt_is_echoed_with_its_log_probabilities(client: Client) -> None:
    prompt = "to be echoed, and long enough for several blocks of sixteen"
    both = complete(client, prompt, echo=True, prompt_logprobs=2)
    assert both.prompt is not None
    assert (both.prompt.text, bytes(both.prompt.token_ids)) == (prompt, prompt.encode())
    assert [entry.token_id for entry in both.prompt.logprobs] == list(prompt.encode()[1:])
    assert all(len(entry.top) == 2 for entry in both.prompt.logprobs)
    assert both.usage.cached_tokens == 0
    again = complete(client, prompt, prompt_logprobs=2)
    assert again.prompt is not None
    assert (again.usage.cached_tokens, again.prompt.text) == (0, "")
    assert again.prompt.logprobs == both.prompt.logprobs
    echoed = complete(client, prompt, echo=True)
    assert echoed.prompt is not None
    assert (echoed.prompt.text, echoed.prompt.logprobs, echoed.text) == (prompt, (), both.text)
    assert echoed.usage.cached_tokens > 0, "what was scored is cached like any other prompt"
    assert complete(client, prompt).prompt is None


def test_a_token_is_scored_in_the_prompt_as_it_was_in_the_output(client: Client) -> None:
    answer = complete(client, "scores", logprobs=1, max_tokens=40)
    scored = complete(client, list(b"scores") + list(answer.token_ids), prompt_logprobs=1, max_tokens=1)
    assert scored.prompt is not None
    told = [(entry.token_id, entry.logprob) for entry in scored.prompt.logprobs[5:]]
    assert told == [(entry.token_id, entry.logprob) for entry in answer.choices[0].logprobs]


def test_a_prompt_of_one_token_has_no_log_probabilities(client: Client) -> None:
    alone = complete(client, [65], prompt_logprobs=0)
    assert alone.prompt is not None
    assert alone.prompt.logprobs == ()


def test_a_long_prompts_log_probabilities_come_in_parts_and_are_all_there(client: Client) -> None:
    prompt = "0123456789" * 150
    for choices in (1, 3):
        answer = complete(client, prompt, prompt_logprobs=20, n=choices, max_tokens=2)
        assert answer.prompt is not None
        assert len(answer.prompt.logprobs) == 1499
        assert len(answer.choices) == choices
    stream = client.generate(prompt, stream=True, prompt_logprobs=20, max_tokens=2)
    next(stream)
    assert stream.prompt == answer.prompt
    list(stream)


def test_a_prompt_is_truncated_from_its_beginning(client: Client) -> None:
    whole = complete(client, "the end", echo=True)
    for prompt in ("cut away: the end", list(b"cut away: the end")):
        kept = complete(client, prompt, echo=True, truncate_prompt=7)
        assert kept.prompt is not None
        assert (kept.prompt.text, kept.usage.prompt_tokens, kept.text) == ("the end", 7, whole.text)
    chat = client.chat([{"role": "user", "content": "hi"}], echo=True, truncate_prompt=11, max_tokens=1)
    assert chat.prompt is not None
    assert chat.prompt.text == "assistant: "
    most = client.hello().limits.max_model_len
    fitted = complete(client, "long " * most, truncate_prompt=-1, max_tokens=3)
    assert fitted.usage.prompt_tokens == most - 3
    with pytest.raises(errors.PromptTooLong, match="send its end alone"):
        complete(client, "x" * (9 * most), truncate_prompt=5)


def test_tools_reach_the_chat_template(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    answer = client.chat([{"role": "user", "content": "hi"}], tools=tools, echo=True, max_tokens=4)
    assert answer.prompt is not None
    assert answer.prompt.text.startswith('tools: [{"type": "function"')
    with pytest.raises(errors.BadRequest, match="given twice"):
        client.chat([{"role": "user", "content": "hi"}], tools=tools, template_args={"tools": []})


def test_a_stop_string_heeds_min_tokens_and_stays_in_the_text_if_asked(client: Client) -> None:
    plain = complete(client, max_tokens=60).text
    stop = plain[20:23]
    first = plain.index(stop)
    assert complete(client, max_tokens=60, stop=stop).text == plain[:first]
    assert complete(client, max_tokens=60, stop=stop, include_stop=True).text == plain[: first + 3]
    later = complete(client, max_tokens=60, stop=plain[5], min_tokens=30)
    end = plain.find(plain[5], 30)
    assert later.text == (plain[:end] if end >= 0 else plain)


def test_the_command_line_has_them(daemon: DaemonProcess, tmp_path: Path) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "kvd", *arguments, "--connect", daemon.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    ask = ("generate", "--prompt", "abc", "--temperature", "0", "--max-tokens", "4", "--ignore-eos")
    assert run(*ask, "--logit-bias", f"{ord('Q')}=100", "--echo") == "abcQQQQ\n"
    assert run(*ask, "--logit-bias", f"{ord('Q')}=100", "--echo", "--stream") == "abcQQQQ\n"
    assert set(run(*ask, "--allow-token-id", "120", "--allow-token-id", "121", "--ban-token-id", "121").strip()) == {"x"}
    told = json.loads(run(*ask, "--echo", "--prompt-logprobs", "1", "--truncate-prompt", "2", "--bad-word", "e", "--json"))
    assert told["prompt"]["text"] == "bc"
    echoed = json.loads(run(*ask, "--logit-bias", f"{ord('Q')}=100", "--echo", "--json"))
    assert (echoed["text"], echoed["prompt"]["text"]) == ("QQQQ", "abc"), "as the help says"
    drawing = ("generate", "--prompt", "abc", "--max-tokens", "12", "--ignore-eos", "--json")
    drawn = json.loads(run(*drawing))
    again = json.loads(run(*drawing, "--seed", str(drawn["seed"])))
    assert (again["token_ids"], again["seed"]) == (drawn["token_ids"], drawn["seed"])
    assert [entry["token_id"] for entry in told["prompt"]["logprobs"]] == [ord("c")]
    (tmp_path / "tools.json").write_text('[{"name": "look_up"}]')
    chat = run("chat", "--prompt", "hi", "--tools", str(tmp_path / "tools.json"), "--echo", "--max-tokens", "2")
    assert chat.startswith('tools: [{"name": "look_up"}]\nuser: hi\nassistant: ')
    assert "ID=BIAS" in run(*ask, "--logit-bias", "five", code=64)
    assert "needs --json" in run(*ask, "--prompt-logprobs", "1", code=64)


def test_many_prompts_are_answered_in_their_order(client: Client, daemon: DaemonProcess) -> None:
    prompts: list[Any] = [f"prompt number {number}" for number in range(40)] + [list(b"ids"), [{"role": "user", "content": "hi"}]]
    answers = client.generate_many(prompts, max_in_flight=7, max_tokens=5, **GREEDY)
    assert [answer.text for answer in answers[:40]] == [complete(client, prompt, max_tokens=5).text for prompt in prompts[:40]]
    assert answers[41].text == client.chat(prompts[41], max_tokens=5, **GREEDY).text
    with pytest.raises(errors.BadRequest):
        client.generate_many(["good", [999999], "good"], max_tokens=5)
    assert client.generate_many([]) == []

    async def asynchronously() -> list[str]:
        async with AsyncClient(daemon.endpoint) as other:
            with pytest.raises(errors.BadRequest):
                await other.generate_many(["good", [999999]], max_tokens=5)
            return [each.text for each in await other.generate_many(prompts, max_in_flight=5, max_tokens=5, **GREEDY)]

    assert asyncio.run(asynchronously()) == [answer.text for answer in answers]
