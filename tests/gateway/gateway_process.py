"""A real gateway as a child process, beside a real daemon."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import openai

START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class GatewayProcess:
    """``kvd gateway`` on a port of its own, logs under ``root``."""

    def __init__(self, root: Path, endpoint: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.log_path = root / f"gateway.{len(list(root.glob('gateway.*')))}"
        command = [sys.executable, "-m", "kvd", "gateway", "--connect", endpoint, "--port", "0", "--log-format", "json"]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")} | (env or {})
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environ)
        self._clients: list[openai.OpenAI] = []
        self.port = self._port()

    def _port(self) -> int:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for record in self.records():
                if record.get("event") == "listening":
                    return int(record["port"])
            time.sleep(0.02)
        raise AssertionError(f"the gateway did not start: {self.log_path.read_text()}")

    def records(self) -> list[dict[str, Any]]:
        found = []
        for line in self.log_path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if error is not None:
            sys.stderr.write(f"--- {self.log_path}\n{self.log_path.read_text()}\n")

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """A client that is closed with the gateway."""
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0, timeout=30.0)
        self._clients.append(client)
        return client

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, None, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.request("POST", path, body, **{"content-type": "application/json", **headers})

    def request(self, method: str, path: str, body: bytes | None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.get("/health").status != 200:
            assert time.monotonic() < deadline_s, self.log_path.read_text()
            time.sleep(0.02)
