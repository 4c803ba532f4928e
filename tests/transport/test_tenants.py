"""Tenants at the edge: what a client's tenant changes, and that no client gets into another's."""

from __future__ import annotations

import pytest
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import encode, pack_body, unpack_body
from kvd_client.protocol.messages import (
    Abort,
    Checkpoint,
    Credit,
    Drain,
    Failed,
    Finished,
    Forget,
    Generate,
    Pin,
    Ping,
    Pong,
    Prefixes,
    Result,
    Tokenize,
    Tokens,
    Unpin,
)

from kvd.cache.tenants import tenant_salt
from kvd.commands import Abort as AbortCommand
from kvd.commands import ForgetPrefixes, PinPrefix, Query, Submit
from kvd.commands import Unpin as UnpinCommand
from kvd.transport.bodies import run_text_job
from kvd.transport.errors import EndpointError, TenantUnknownError
from kvd.transport.tenants import Caller, caller_of_ipc_peer, caller_of_user_id, user_id
from kvd.transport.zap import load_curve_keys
from kvd.types import pack_tokens

ACME, RIVAL = Caller("acme"), Caller("rival")
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}]
KEYS = ["0" * 40, "1" * 40]


def send(harness, message, *bodies, caller, peer):
    harness.session.receive(peer, encode(message, *bodies), harness.now, caller)
    harness.settle()


def test_a_clients_salt_narrows_within_its_tenant():
    harness = Harness()
    generate = [(ACME, b""), (ACME, b"s"), (RIVAL, b""), (RIVAL, b"s"), (Caller(), b""), (Caller(), b"s")]
    for number, (caller, salt) in enumerate(generate, 1):
        message = Generate(request_id=request_id(number), input="text", cache_salt=salt)
        send(harness, message, b"abc", caller=caller, peer=b"peer%d" % number)
    salts = [command.tenant_salt for command in harness.commands if isinstance(command, Submit)]
    assert salts == [tenant_salt(caller.tenant, salt) for caller, salt in generate]
    assert len(set(salts)) == len(generate)
    assert salts[4] == b""


def test_pins_have_their_tenants_names_inside_and_their_own_outside():
    harness = Harness()
    pin = Pin(op_id=request_id(1), name="a", input="ids", cache_salt=b"s")
    for caller, peer in ((ACME, b"one"), (RIVAL, b"two"), (Caller(), b"three")):
        send(harness, pin, pack_tokens([5] * 16), caller=caller, peer=peer)
    recipes = [command.recipe for command in harness.commands if isinstance(command, PinPrefix)]
    assert [(each.name, each.tenant_salt) for each in recipes] == [
        ("acme/a", tenant_salt("acme", b"s")),
        ("rival/a", tenant_salt("rival", b"s")),
        ("a", tenant_salt("", b"s")),
    ]
    send(harness, Unpin(op_id=request_id(2), name="a"), caller=RIVAL, peer=b"two")
    assert [command.name for command in harness.commands if isinstance(command, UnpinCommand)] == ["rival/a"]
    send(harness, Prefixes(op_id=request_id(3)), caller=ACME, peer=b"one")
    assert [command.tenant for command in harness.commands if isinstance(command, Query)] == ["acme"]
    harness.engine_takes()
    names = [unpack_body(bodies[0]).get("name") for _, _, bodies in harness.received]
    assert names == ["a", "a", "a", "a", None]


def test_a_slash_in_a_name_reaches_no_other_tenant():
    harness = Harness()
    send(harness, Pin(op_id=request_id(1), name="acme/a", input="ids"), pack_tokens([5] * 16), caller=Caller(), peer=b"one")
    send(harness, Unpin(op_id=request_id(2), name="acme/a"), caller=Caller(), peer=b"one")
    assert [message.code for _, message, _ in harness.received] == ["bad_request"] * 2
    assert not harness.commands


def test_requests_of_another_tenant_can_neither_be_aborted_nor_fed():
    harness = Harness()
    send(harness, Generate(request_id=request_id(1), input="text", credit=2), b"abc", caller=ACME, peer=b"one")
    for message in (Abort(request_id=request_id(1)), Credit(request_id=request_id(1), num_tokens=5)):
        send(harness, message, caller=RIVAL, peer=b"two")
        assert only_failed([harness.received[-1][1]]).code == "not_found"
    assert [type(command) for command in harness.commands] == [Submit]


def test_who_takes_a_connection_over_gets_nothing_of_what_was_begun_on_it():
    """Routing ids are secret, but if one gets out it opens another tenant's stream to nobody."""
    harness = Harness()
    send(harness, Generate(request_id=request_id(1), input="text", max_tokens=5), b"abc", caller=ACME, peer=b"one")
    send(harness, Abort(request_id=request_id(1)), caller=RIVAL, peer=b"one")
    assert harness.session.taken_over == [b"one"]
    assert [command for command in harness.commands if isinstance(command, AbortCommand)] == [AbortCommand(request_id(1))]
    harness.engine_takes()
    assert not [message for _, message, _ in harness.received if isinstance(message, Tokens | Finished)]


def test_who_takes_a_connection_over_gets_no_answer_of_its_operations():
    """Neither the engine's (ACME's prefixes) nor a text thread's (the ids of ACME's text)."""
    harness = Harness()
    send(harness, Prefixes(op_id=request_id(1)), caller=ACME, peer=b"one")
    harness.session.receive(b"one", encode(Tokenize(op_id=request_id(2), input="text"), b"secret"), harness.now, ACME)
    send(harness, Ping(), caller=RIVAL, peer=b"one")
    harness.engine_takes()
    assert [type(message) for _, message, _ in harness.received] == [Pong]
    send(harness, Prefixes(op_id=request_id(1)), caller=RIVAL, peer=b"one")
    harness.engine_takes()
    assert [type(message) for _, message, _ in harness.received[1:]] == [Result], "its own it gets"


LEAVING = {
    "silent": lambda harness: harness.session.tick(harness.now + 10_000),
    "gone": lambda harness: harness.session.on_gone(b"one"),
    "making room": lambda harness: [send(harness, Ping(), caller=ACME, peer=peer) for peer in (b"two", b"three")],
}


@pytest.mark.parametrize("way", LEAVING)
def test_who_takes_the_place_of_a_client_that_has_left_gets_nothing_of_it(way):
    """Its answers are still under way, though nothing is heard of it any more."""
    harness = Harness(max_clients=2)
    send(harness, Generate(request_id=request_id(1), input="text", max_tokens=5), b"abc", caller=ACME, peer=b"one")
    send(harness, Prefixes(op_id=request_id(2)), caller=ACME, peer=b"one")
    harness.session.receive(b"one", encode(Tokenize(op_id=request_id(3), input="text"), b"secret"), harness.now, ACME)
    jobs, outgoing = harness.session.take_text_jobs(), harness.session.take_outgoing()
    assert (len(jobs), len(outgoing)) == (1, 0)
    LEAVING[way](harness)
    assert harness.session.taken_over == []
    harness.received.clear()
    send(harness, Ping(), caller=RIVAL, peer=b"one")
    assert b"one" in harness.session.taken_over
    for job in jobs:
        harness.session.on_text(run_text_job(job, harness.text, "2026-01-01"), harness.now)
    harness.run()
    assert [type(message) for peer, message, _ in harness.received if peer == b"one"] == [Pong]


@pytest.mark.parametrize("way", LEAVING)
def test_a_client_that_comes_back_gets_the_answers_of_what_it_had_begun(way):
    harness = Harness(max_clients=2)
    send(harness, Prefixes(op_id=request_id(2)), caller=ACME, peer=b"one")
    LEAVING[way](harness)
    send(harness, Prefixes(op_id=request_id(2)), caller=ACME, peer=b"one")
    harness.run()
    assert [type(message) for peer, message, _ in harness.received if peer == b"one"] == [Result], "once, though it has asked again"
    assert harness.session.taken_over == []


def test_of_how_many_that_have_left_the_caller_is_known_is_bounded_and_of_others_nothing_is_sent():
    harness = Harness(max_clients=2)
    for number in range(1, 8):
        send(harness, Prefixes(op_id=request_id(number)), caller=ACME, peer=b"%d" % number)
        harness.session.on_gone(b"%d" % number)
    assert harness.session.taken_over == [b"1", b"2", b"3", b"4", b"5"]
    for number in range(1, 8):
        send(harness, Ping(), caller=RIVAL, peer=b"%d" % number)
    harness.run()
    assert {type(message) for _, message, _ in harness.received} == {Pong}


def test_who_has_left_with_nothing_open_makes_room_first():
    harness = Harness(max_clients=2)
    send(harness, Prefixes(op_id=request_id(1)), caller=ACME, peer=b"one")
    harness.session.on_gone(b"one")
    for number in range(5):
        send(harness, Ping(), caller=ACME, peer=b"idle %d" % number)
        harness.session.on_gone(b"idle %d" % number)
    harness.engine_takes()
    assert [peer for peer, message, _ in harness.received if isinstance(message, Result)] == [b"one"]


def test_user_ids_and_credentials():
    assert caller_of_user_id(user_id("acme")) == ACME
    assert caller_of_user_id(user_id("")) == Caller()
    assert caller_of_ipc_peer("localhost:1000:1000:77", 1000) == Caller("uid:1000", is_operator=True)
    assert caller_of_ipc_peer("localhost:1000:0:77", 0) == Caller("uid:1000")
    assert caller_of_ipc_peer(":0:1000:77", 1000).is_operator
    for text in ("", "acme", "Tenant=acme"):
        with pytest.raises(TenantUnknownError):
            caller_of_user_id(text)
    for text in ("", "localhost", "localhost:1000", "localhost:-1:0:0", "localhost:1000:0:0:0", "localhost:1000:0:0\n"):
        with pytest.raises(TenantUnknownError):
            caller_of_ipc_peer(text, 0)


def clients_of(tmp_path, text):
    (tmp_path / "key").write_text(KEYS[0] + "\n")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "clients").write_text(text)
    keys = load_curve_keys(str(tmp_path / "key"), str(tmp_path / "clients"))
    assert keys is not None
    return sorted(keys.tenants.values())


def test_the_list_of_clients_names_their_tenants(tmp_path):
    assert clients_of(tmp_path, f"# all\n{KEYS[0]} acme\n{KEYS[1]}\n") == ["", "acme"]
    assert clients_of(tmp_path, f"{KEYS[0]} acme # of alice\n{KEYS[1]} # bob\n") == ["", "acme"]
    assert clients_of(tmp_path, f"{KEYS[0]} acme\n{KEYS[0]} acme #twice\n") == ["acme"]


@pytest.mark.parametrize(
    "line",
    [
        f"{KEYS[0]} alice's laptop",
        f"{KEYS[0]} uid:7",
        f"{KEYS[0]} a/b",
        f"{KEYS[0]} two words",
        f"{KEYS[1]} a\n{KEYS[1]} b",
        f"{KEYS[1]}\n{KEYS[1]} b",
    ],
)
def test_what_is_no_tenants_name_is_refused_with_its_line(tmp_path, line):
    with pytest.raises(EndpointError, match=f"line {line.count(chr(10)) + 1}: .*tenant"):
        clients_of(tmp_path, line + "\n")


def test_an_unread_failure_is_no_other_tenants():
    harness = Harness(ready=False)
    send(harness, Generate(request_id=request_id(1), input="text"), b"abc", caller=ACME, peer=b"one")
    ((peer, message, _),) = harness.received
    assert peer == b"one"
    assert isinstance(message, Failed)


def forget_commands(harness):
    return [command for command in harness.commands if isinstance(command, ForgetPrefixes)]


@pytest.mark.parametrize(
    ("fields", "tenant", "salt"),
    [
        ({}, "acme", None),
        ({"cache_salt": b""}, "acme", tenant_salt("acme", b"")),
        ({"cache_salt": b"s"}, "acme", tenant_salt("acme", b"s")),
        ({"tenant": "acme"}, "acme", None),
    ],
)
def test_a_client_forgets_within_its_tenant(fields, tenant, salt):
    harness = Harness()
    send(harness, Forget(op_id=request_id(1), **fields), caller=ACME, peer=b"one")
    (command,) = forget_commands(harness)
    assert (command.tenant, command.tenant_salt, command.token_ids) == (tenant, salt, b"")


def test_prefixes_are_forgotten_by_their_whole_blocks():
    harness = Harness()
    for number, (kind, body) in enumerate([("ids", pack_tokens(range(40))), ("text", b"x" * 32), ("messages", pack_body(MESSAGES))], 1):
        send(harness, Forget(op_id=request_id(number), input=kind, cache_salt=b"s"), body, caller=ACME, peer=b"one")
    ids, text, messages = forget_commands(harness)
    assert {each.tenant_salt for each in (ids, text, messages)} == {tenant_salt("acme", b"s")}
    assert ids.token_ids == pack_tokens(range(40))
    assert len(text.token_ids) == 4 * 31, "a text's last token may be another one where the text goes on"
    assert messages.token_ids == pack_tokens(list(b"<system>You are a helpful assistant."))


@pytest.mark.parametrize("caller", [ACME, Caller(), Caller("uid:1000")])
def test_only_an_operator_forgets_for_another_tenant(caller):
    harness = Harness()
    send(harness, Forget(op_id=request_id(1), tenant="rival"), caller=caller, peer=b"one")
    assert only_failed([harness.received[-1][1]]).code == "bad_request"
    assert not harness.commands
    send(harness, Forget(op_id=request_id(2), tenant="rival"), caller=Caller("uid:0", is_operator=True), peer=b"two")
    assert forget_commands(harness)[0].tenant == "rival"


@pytest.mark.parametrize(
    ("fields", "body", "code"),
    [
        ({"input": "path"}, b"x" * 99, "bad_request"),
        ({"cache_salt": bytes(65)}, None, "bad_request"),
        ({"input": "ids"}, pack_tokens(range(15)), "pin_too_short"),
        ({"input": "ids"}, None, "bad_request"),
        ({}, pack_tokens(range(64)), "bad_request"),
        ({"cache_salt": b"s"}, b"You are", "bad_request"),
    ],
)
def test_a_forget_that_can_not_be_meant_is_refused(fields, body, code):
    harness = Harness()
    send(harness, Forget(op_id=request_id(1), **fields), *([] if body is None else [body]), caller=ACME, peer=b"one")
    assert only_failed([harness.received[-1][1]]).code == code
    assert not harness.commands


@pytest.mark.parametrize("operation", [Drain, Checkpoint])
def test_what_concerns_everybody_is_not_one_tenants_to_do(operation):
    harness = Harness()
    send(harness, operation(op_id=request_id(1)), caller=ACME, peer=b"one")
    assert only_failed([harness.received[-1][1]]).code == "bad_request"
    assert not harness.commands
    for number, caller in enumerate([Caller(), Caller("uid:0", is_operator=True)], 2):
        send(harness, operation(op_id=request_id(number)), caller=caller, peer=b"%d" % number)
    assert len(harness.commands) == 2
