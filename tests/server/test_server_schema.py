"""The API's document against the server: every operation, every check of schemathesis.

`HEADRACE_SCHEMA_EXAMPLES=500 pytest tests/server/test_server_schema.py` looks for longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import fake_server, running

EXAMPLES = int(os.environ.get("HEADRACE_SCHEMA_EXAMPLES", "3"))
PHASES = "examples,coverage,fuzzing" + (",stateful" if EXAMPLES > 20 else "")
SETTINGS = """
[checks]
# What a schema cannot say: ids of this vocabulary, the name of this model, a field that needs
# another, a context that is full. Such a refusal is a 400 that names the field.
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "503"]
# One of the two workers puts the engine to sleep while the other asks: 503 is the document's word
# for that (status_code_conformance holds it to the operations that have it), 500 is nobody's.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]
"""


@pytest.mark.slow
@pytest.mark.timeout(240 + EXAMPLES * 60)
@pytest.mark.parametrize("port", ["public", "operator"])
def test_every_operation_keeps_to_the_document(tmp_path: Path, port: str) -> None:
    pytest.importorskip("schemathesis")  # Its script may be in another environment's folder.
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    options = f"port=0, operator_port=0, files={str(tmp_path / 'files')!r}"
    with running(fake_server(options=options)) as server:
        url = server.url
        if port == "operator":
            url = server.await_line(r"operator: (https?://\S+)").group(1)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "schemathesis.cli",
                "--config-file",
                str(settings),
                "run",
                url + "/openapi.json",
                "--max-examples",
                str(EXAMPLES),
                "--phases",
                PHASES,
                "--checks",
                "all",
                "--request-timeout",
                "20",
                "--generation-database",
                "none",
                "--seed",
                "1",
                "--continue-on-failure",
                "--workers",
                "2",
                "--exclude-path",
                "/v1/stats/stream",  # It never ends by itself.
                "--exclude-path",
                "/operate/drain",  # After it there is nothing to test.
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-20_000:]
        text = httpx.get(server.url + "/metrics").text
    assert "headrace_http_requests_in_work 0.0" in text
    assert not [line for line in text.splitlines() if 'status="500"' in line]
