"""`headrace clients`: settings with the names of the server that runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest, Unreachable
from headrace.cli.clients import CLIENTS, command


class Handler(BaseHTTPRequestHandler):
    reply: ClassVar[bytes] = json.dumps(
        {"data": [{"id": "own:name", "max_model_len": 777}]}
    ).encode()

    def do_GET(self) -> None:
        allowed = self.path == "/v1/models" and self.headers["authorization"] == "Bearer hr-secret"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments))


def test_settings_have_the_servers_names_and_no_key(url: str) -> None:
    for given in (url, f"{url}/v1/", url.removeprefix("http://")):
        done = run("--url", given, "--api-key", "hr-secret")
        assert done.exit_code == 0, done.output
        for title, _ in CLIENTS.values():
            assert f"# {title}\n" in done.stdout
        assert done.stdout.count("own:name") == 5
        assert "contextLength: 777" in done.stdout
        assert "hr-secret" not in done.stdout
        assert "/v1/v1" not in done.stdout


def test_yaml_settings_are_yaml(url: str) -> None:
    yaml = pytest.importorskip("yaml")
    read = {
        name: yaml.safe_load(run(name, "--url", url, "--key", "hr-secret").stdout)
        for name in ("continue", "litellm")
    }
    assert read["continue"]["models"][0]["apiBase"] == f"{url}/v1"
    assert read["continue"]["models"][0]["model"] == "own:name"
    assert read["litellm"]["model_list"][0]["litellm_params"]["model"] == "openai/own:name"


def test_what_is_wrong_is_named(url: str) -> None:
    assert isinstance(run("contiune").exception, InvalidRequest)
    assert "did you mean continue?" in run("contiune").exception.message
    assert "wants an --api-key" in run("--url", url).exception.message
    gone = run("--url", "http://127.0.0.1:9").exception
    assert isinstance(gone, Unreachable)
    assert "headrace serve starts one" in gone.message
