"""The daemon's LoRA adapters as models of the API."""

from __future__ import annotations

import asyncio

import pytest
from http_server import Daemon
from kvd_client.aio import AsyncClient
from kvd_client.errors import AdapterUnusable, KvdError, NotFound

from kvd.gateway import adapter_names
from kvd.gateway.adapter_names import AdapterNames
from kvd.gateway.app import Gateway, Limits
from kvd.gateway.errors import ApiError, api_error

pytestmark = pytest.mark.socket

LIMITS = Limits(max_requests=100, max_body_bytes=1000, request_timeout_s=60.0)


def gateway_of(daemon: Daemon) -> Gateway:
    return Gateway(daemon, served_names=(), api_keys=(), limits=LIMITS)  # type: ignore[arg-type]


def test_a_name_is_asked_for_once_and_made_up_ones_not_all_the_time():
    async def test() -> None:
        daemon, now = Daemon(), [100.0]
        names = AdapterNames(now=lambda: now[0])
        client: AsyncClient = daemon  # type: ignore[assignment]
        daemon.adapter_names = ["poet"]
        for _ in range(3):
            assert await names.names(client, wanted="poet") == ("poet",)
            assert await names.names(client, wanted="made up") == ("poet",)
        assert daemon.num_adapter_lists == 1
        daemon.adapter_names = ["poet", "clerk"]
        assert await names.names(client, wanted="clerk") == ("poet",)
        now[0] += adapter_names._KEPT_S
        assert await names.names(client, wanted="poet") == ("poet",)
        assert await names.names(client, wanted="clerk") == ("poet", "clerk")
        assert await names.usable(client) == ("poet", "clerk")
        assert daemon.num_adapter_lists == 3

    asyncio.run(test())


def test_one_that_can_not_be_used_is_not_offered_but_may_be_named_to_hear_why():
    async def test() -> None:
        daemon = Daemon()
        daemon.adapter_names, daemon.unusable = ["poet", "dora"], ["dora"]
        names, client = AdapterNames(), daemon
        assert await names.usable(client) == ("poet",)  # type: ignore[arg-type]
        assert await names.names(client, wanted="dora") == ("poet", "dora")  # type: ignore[arg-type]

    asyncio.run(test())


def test_a_model_is_the_base_or_an_adapter_of_it():
    async def test() -> None:
        daemon = Daemon("first")
        daemon.adapter_names = ["poet", "first"]
        gateway = gateway_of(daemon)
        names = [(await gateway._require_model(name))[::2] for name in (None, "first", "poet")]
        assert names == [("first", ""), ("first", ""), ("poet", "poet")]
        with pytest.raises(ApiError, match="served: first, poet") as refused:
            await gateway._require_model("other")
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("no adapter is named 'poet'", code="not_found"), 404, "model_not_found"),
        (AdapterUnusable("adapter poet: use_dora is set", code="adapter_unusable"), 400, "adapter_unusable"),
    ],
)
def test_what_the_daemon_says_of_an_adapter_has_its_status(error: KvdError, status: int, code: str):
    refusal = api_error(error)
    assert (refusal.status, refusal.code) == (status, code)
