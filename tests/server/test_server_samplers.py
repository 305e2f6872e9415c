"""Samplers of vLLM, llama.cpp and of front ends for both: what reaches the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.server.app import create_app

# What SillyTavern's text completion sends to a server that it has no name for, at its defaults.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "hello",
    "model": "fake",
    "max_new_tokens": 9,
    "max_tokens": 9,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n",":"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "generic",
    "api_server": "http://127.0.0.1:8000",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "rep_pen": 1.1,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.1,
    "repeat_last_n": 0,
    "n_predict": 9,
    "num_predict": 9,
    "num_ctx": 8192,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
    "stream": False,
}


async def post(body: dict[str, Any], path: str = "/v1/completions") -> tuple[FakeEngine, Any]:
    engine = FakeEngine()
    app = create_app(engine)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(path, json=body)
    return engine, reply


async def test_all_that_a_front_end_has_switched_off() -> None:
    engine, reply = await post(SILLYTAVERN)
    assert reply.status_code == 200, reply.text
    sampling = engine.seen[0][1]
    assert (sampling.max_tokens, sampling.repetition_penalty) == (9, 1.1)
    assert sampling.stop == ["\nUser:"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("xtc_probability", 0.5),
        ("dry_multiplier", 0.8),
        ("mirostat_mode", 2),
        ("tfs", 0.9),
        ("smoothing_factor", 0.2),
        ("dynamic_temperature", True),
        ("guidance_scale", 2),
        ("banned_strings", ["x"]),
        ("guided_whitespace_pattern", "[ ]?"),
        ("rep_pen", 1.5),
        ("n_predict", 10),
        ("repeat_penalty", 1.3),
    ],
)
async def test_what_is_switched_on_and_not_done_is_named(field: str, value: Any) -> None:
    _, reply = await post(SILLYTAVERN | {field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


async def test_other_names_alone() -> None:
    other = {
        "typical": 0.9,
        "nsigma": 2.0,
        "rep_pen": 1.2,
        "sampler_seed": 7,
        "n_predict": 3,
        "ban_eos_token": True,
        "stopping_strings": ["x"],
    }
    engine, reply = await post({"prompt": "a"} | other)
    assert reply.status_code == 200, reply.text
    found = engine.seen[0][1]
    assert (found.typical_p, found.top_n_sigma, found.repetition_penalty) == (0.9, 2.0, 1.2)
    assert (found.seed, found.max_tokens, found.ignore_eos, found.stop) == (7, 3, True, ["x"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_vllms_fields_reach_the_engine(path: str) -> None:
    asked = {
        "bad_words": ["foo"],
        "allowed_token_ids": [5, 6],
        "typical_p": 0.8,
        "top_a": 0.1,
        "repeat_penalty": 1.3,
    }
    prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    prompt.pop("messages" if path == "/v1/completions" else "prompt")
    engine, reply = await post(prompt | asked, path)
    assert reply.status_code == 200, reply.text
    found = engine.seen[0][1]
    assert (found.bad_words, found.allowed_token_ids) == (["foo"], [5, 6])
    assert (found.typical_p, found.top_a, found.repetition_penalty) == (0.8, 0.1, 1.3)
    _, reply = await post(prompt | {"allowed_token_ids": []}, path)
    assert reply.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize("path", ["/completion", "/api/generate"])
async def test_the_other_interfaces_have_typical_p(path: str) -> None:
    own = {"model": "fake", "prompt": "a"}
    more = {"typical_p": 0.7, "repeat_penalty": 1.4}
    body = own | (more if path == "/completion" else {"options": more, "stream": False})
    engine, reply = await post(body, path)
    assert reply.status_code == 200, reply.text
    found = engine.seen[0][1]
    assert (found.typical_p, found.repetition_penalty) == (0.7, 1.4)
