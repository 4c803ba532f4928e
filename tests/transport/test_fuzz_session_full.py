"""The session's fuzzing and its state machine at length."""

from __future__ import annotations

import pytest
import test_fuzz_session as fuzz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_session_machine import Conversations

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

LONG = settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LONG
@given(messages=st.lists(fuzz.frames, max_size=6))
def test_rubbish(messages):
    fuzz.test_rubbish_never_raises_and_a_valid_request_works_afterwards.hypothesis.inner_test(messages)


@LONG
@given(body=fuzz.chats.map(fuzz.pack) | st.binary(max_size=200) | fuzz.nested)
def test_chats(body):
    fuzz.test_a_chat_body_gives_ids_or_a_clear_failure.hypothesis.inner_test(body)


class LongConversations(Conversations):
    pass


TestLongConversations = LongConversations.TestCase
TestLongConversations.settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
