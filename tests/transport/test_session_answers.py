"""Answers at the edge: text and tokens in order, where a stop ends them, and one terminal message with its counts."""

from __future__ import annotations

from edge_harness import Harness, request_id, text_of
from kvd_client.protocol.messages import Finished, Sampling, Tokens

from kvd.commands import FinishChoice
from kvd.types import pack_tokens, unpack_tokens


def test_text_comes_back_with_one_terminal_message_and_counts():
    harness = Harness()
    harness.generate(body=b"abc", max_tokens=5)
    harness.now = 100.5
    harness.run()
    received = harness.take()
    assert text_of(received) == "abcab"
    tokens = [message for message, _ in received if isinstance(message, Tokens)]
    assert [message.first_index for message in tokens] == [0, 1, 2, 3, 4]
    ids = [token for message, bodies in received if isinstance(message, Tokens) for token in unpack_tokens(bodies[0])]
    assert ids == list(b"abcab")
    (finished,) = [message for message, _ in received if isinstance(message, Finished)]
    assert received[-1][0] is finished
    assert finished.choices[0].finish_reason == "length"
    assert finished.choices[0].num_tokens == 5
    assert finished.usage.prompt_tokens == 3
    assert finished.usage.cached_tokens == 3
    assert finished.usage.completion_tokens == 5
    assert finished.timings.total_ms == 500
    assert finished.timings.ttft_ms == 500
    assert finished.timings.queue_ms == 1
    assert harness.session.num_requests == 0


def test_a_stop_string_ends_the_choice_at_the_edge():
    harness = Harness()
    harness.generate(body=b"hello stop world ", stop=("stop",), max_tokens=100)
    harness.engine_takes()
    for _ in range(14):  # the engine runs ahead of the edge's FinishChoice
        harness.session.on_events(harness.engine.step(), harness.now)
    assert [command for command in harness.commands if isinstance(command, FinishChoice)] == [FinishChoice(request_id(1), 0)]
    harness.run()
    received = harness.take()
    assert text_of(received) == "hello "
    finished = received[-1][0]
    assert isinstance(finished, Finished)
    assert finished.choices[0].finish_reason == "stop"
    assert finished.choices[0].num_tokens == len("hello stop")
    assert finished.usage.completion_tokens == len("hello stop")
    assert sum(len(bodies[0]) // 4 for message, bodies in received if isinstance(message, Tokens)) == len("hello stop")


def test_the_text_of_the_stop_token_is_dropped_and_its_id_kept():
    harness = Harness()
    harness.generate(body=b"ab!", stop_token_ids=(ord("!"),), max_tokens=100)
    harness.run()
    received = harness.take()
    assert text_of(received) == "ab"
    assert b"".join(bodies[0] for message, bodies in received if isinstance(message, Tokens)) == pack_tokens(list(b"ab!"))
    assert received[-1][0].choices[0].finish_reason == "stop"


def test_an_unfinished_character_never_goes_out():
    harness = Harness()
    harness.generate(body="é€😀".encode(), max_tokens=9 + 2)
    harness.run()
    received = harness.take()
    for message, bodies in received:
        if isinstance(message, Tokens):
            bodies[1].decode()
    assert text_of(received) == "é€😀é"


def test_choices_have_streams_of_their_own():
    harness = Harness()
    harness.generate(body=b"xy", n=3, max_tokens=4)
    harness.run()
    received = harness.take()
    assert [text_of(received, choice=choice) for choice in range(3)] == ["xyxy"] * 3
    assert [end.choice for end in received[-1][0].choices] == [0, 1, 2]
    assert received[-1][0].usage.completion_tokens == 12


def test_without_text_only_ids_are_sent():
    harness = Harness()
    harness.generate(text=False)
    harness.run()
    assert all(len(bodies) == 1 for message, bodies in harness.take() if isinstance(message, Tokens))


def test_logprobs_pass():
    harness = Harness()
    harness.generate(sampling=Sampling(logprobs=2), max_tokens=1)
    harness.run()
    first = harness.take_messages()[0]
    assert isinstance(first, Tokens)
    assert (first.logprobs[0].token_id, first.logprobs[0].logprob, len(first.logprobs[0].top)) == (97, -0.5, 2)
