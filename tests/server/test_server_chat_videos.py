"""Videos in a chat by OpenAI's client, as data and by address: tokens as transformers has them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")
pytest.importorskip("av", reason="needs the extra av")
from processes import Running, headrace, running

from headrace.base.filming import Sampling
from headrace.base.tiling import Filming, Fitting
from headrace.media import decode_video
from tiny import filmed
from tiny.qwen_chat import DEVIATION, END, FILM, LEAST, MEAN, MOST, PATCH, make, tokenizer

pytestmark = pytest.mark.slow
TOKENS = 12
SAMPLING = Sampling("even", 2.0, 4, 768, 2)


class Host(BaseHTTPRequestHandler):
    data = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.data)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{one.server_port}"
        one.shutdown()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, host: str
) -> Iterator[tuple[Running, Any, str]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    oracle = make(folder, request.param)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "64"]
    words += ["--kv-dtype", "float32", "--max-context", "512", "--fetch-hosts", host]
    with running(headrace(*words)) as one:
        yield one, oracle, request.param


def ask(client: openai.OpenAI, **video: Any) -> Any:
    parts: Any = [{"type": "video_url", "video_url": video}, {"type": "text", "text": "what?"}]
    return client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": parts}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )


def wanted(oracle: Any, kind: str, data: bytes) -> tuple[int, list[int]]:
    """Tokens of the prompt, and the greedy answer of transformers."""
    rule: Any = Fitting(2 * PATCH, LEAST, MOST)
    third = kind == "qwen3_vl"
    sampling = SAMPLING._replace(rule="spread") if third else SAMPLING
    made = decode_video(data, sampling, Filming(2 * PATCH, LEAST, MOST, 2) if third else rule)
    patches, grid = filmed.patched(filmed.normal(made.frames, MEAN, DEVIATION), PATCH)
    tiles, rows, columns = grid[0].tolist()
    each = "<|video_pad|>" * (rows * columns // 4)
    said = each * tiles
    if third:
        times = made.film.times
        means = [(times[at] + times[at + 1]) / 2 for at in range(0, len(times), 2)]
        said = "".join(
            f"<{mean:.1f} seconds><|vision_start|>{each}<|vision_end|>" for mean in means
        )
    said = f"<|im_start|>user\n<|vision_start|>{said}<|vision_end|>what?"
    ids = tokenizer().encode(f"{said}<|im_end|>\n<|im_start|>assistant\n").ids
    given = torch.tensor([ids])
    more = {} if third else {"second_per_grid_ts": torch.tensor([2 / _rate(made.film)])}
    with torch.no_grad():
        out = oracle.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            mm_token_type_ids=2 * (given == FILM).int(),
            pixel_values_videos=patches,
            video_grid_thw=grid,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
            **more,
        )
    return len(ids), [int(token) for token in out[0, len(ids) :]]


def _rate(film: Any) -> float:
    return float(len(film.frames) / film.total * film.rate)


def test_answers_are_those_of_transformers(served: tuple[Running, Any, str], host: str) -> None:
    server, oracle, kind = served
    data = filmed.file_of(filmed.drawn(40, 48, 32), 10)
    Host.data = data
    length, tokens = wanted(oracle, kind, data)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    for given in (url, url, f"http://{host}/film.mp4"):
        got = ask(server.openai(), url=given)
        assert got.usage.prompt_tokens == length
        assert got.choices[0].token_ids[: len(tokens)] == tokens
        assert got.usage.prompt_tokens_details.video_tokens >= 8
    assert got.usage.prompt_tokens_details.cached_tokens > 0
    fewer = ask(server.openai(), url=url, max_frames=2)
    assert fewer.usage.prompt_tokens < length


def test_what_is_refused(served: tuple[Running, Any, str]) -> None:
    server, _, _ = served
    client = server.openai()
    for given, said in (
        ({"url": "https://img.example.com/a.mp4"}, "fetch_hosts"),
        ({"url": "http://localhost/a.mp4"}, "fetch_hosts"),
        ({"url": "file:///etc/passwd"}, "data URL"),
        ({"url": "data:video/mp4;base64,AAAA"}, "not a video"),
        ({}, "either url or file_id"),
        ({"file_id": "file-1"}, "keeps no files"),
        ({"url": "data:video/mp4;base64,AAAA", "max_frames": -1}, "max_frames"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            ask(client, **given)
    long = filmed.file_of(filmed.drawn(400, 48, 48), 10)
    with pytest.raises(openai.BadRequestError, match=r"max_frames takes fewer|context"):
        ask(client, url="data:video/mp4;base64," + base64.b64encode(long).decode())
    for cut in (len(long) // 4, len(long) // 2):
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            ask(client, url="data:;base64," + base64.b64encode(long[:cut]).decode())
    models: Any = client.models.list().data[0]
    assert "video" in models.input_modalities
