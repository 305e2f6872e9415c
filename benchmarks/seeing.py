"""Pictures in a chat: the tower beside transformers, a second turn, and gaps of streams.

    python benchmarks/seeing.py [--rounds 5] [--seconds 20] [--json FILE]

The model has the shape of SmolVLM-256M (SigLIP-B/16 at 512 x 512, 1,024 patches; 30 layers of 576)
and random weights; a picture is one tile of 256 tokens.

  tower    seconds of a tile: transformers in fp32, our exact and our int8 products, in turns, and
           the largest relative error of the rows that the language model reads
  turns    seconds to the first token of a second question about one picture, and of the same
           question after as many tokens of text; encodings that the second turn computed
  gaps     gaps between pieces of eight streams, alone, next to one new text of as many tokens after
           the other, and next to pictures

Needs the packages of the tests. Both clocks want a quiet machine: the load average is written down.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from several_models import Clock, serving, stream, summed

from headrace.engine.clients.pictures import open_picture_prompts
from headrace.loader import open_model
from headrace.text import load_tokenizer
from tiny import seeing_chat
from tiny.seeing_worker import encode, prompt_of, worker_of

EYE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
STREAMS = 8


def drawn(seed: int) -> Image.Image:
    """A picture of 512 x 512 whose squares are noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(16, 0).repeat(16, 1))


def tower(folder: Path, oracle: Any, rounds: int) -> dict[str, Any]:
    """Time a tile by each; none of them is warm for the first time."""
    files = open_model(str(folder))
    prompts = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert prompts is not None
    prompt = prompt_of(prompts, [drawn(1)])
    values = np.asarray(drawn(1), np.float32).transpose(2, 0, 1) / 255
    moments = seeing_chat.MEAN, seeing_chat.DEVIATION
    mean, deviation = (np.array(one, np.float32)[:, None, None] for one in moments)
    pixels = torch.from_numpy((values - mean) / deviation)[None, None]
    workers = {name: worker_of(files, quantise=name) for name in ("auto", "int8")}

    def reference() -> Any:
        with torch.inference_mode():
            return oracle.model.get_image_features(pixels, return_dict=True).pooler_output

    runs = {"transformers": reference}
    for name, worker in workers.items():
        runs[name] = partial(encode, worker, prompt)
    rows = {name: np.asarray(run()[0]) for name, run in runs.items()}
    right = rows.pop("transformers")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    errors = {name: np.abs(one - right).max() / np.abs(right).max() for name, one in rows.items()}
    return {
        "seconds": {name: round(statistics.median(one), 4) for name, one in seconds.items()},
        "relative_error": {name: float(f"{one:.2g}") for name, one in errors.items()},
    }


def shown(seed: int, *, picture: bool = True) -> list[dict[str, Any]]:
    """Return the parts of a question about a picture, or about as many tokens of text."""
    question = f"{seed} What is this?"
    if not picture:
        return [{"type": "text", "text": question + " mill" * 52}]
    room = io.BytesIO()
    drawn(seed).save(room, "PNG")
    data = base64.b64encode(room.getvalue()).decode()
    url = f"data:image/png;base64,{data}"
    return [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def asked(client: httpx.Client, url: str, messages: list[Any], tokens: int = 1) -> float:
    """Return the seconds to the last of so many tokens."""
    body = {"model": "seen", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - begin


def computed(client: httpx.Client, url: str) -> int:
    """Return the number of encodings that the server has computed."""
    text = client.get(f"{url}/metrics").text
    found = re.search(r'encodings_total\{[^}]*end="computed"[^}]*\} (\S+)', text)
    return int(float(found[1])) if found else 0


def turns(url: str, rounds: int) -> dict[str, Any]:
    """Ask twice about each picture, and twice after as much text."""
    again = "And what else is there? " * 4
    seen: list[float] = []
    read: list[float] = []
    more = 0
    with httpx.Client(timeout=300) as client:
        for seed in range(rounds):
            for picture, into in ((True, seen), (False, read)):
                told = [{"role": "user", "content": shown(seed, picture=picture)}]
                asked(client, url, told, 8)
                before = computed(client, url)
                told += [{"role": "assistant", "content": "A mill."}]
                told += [{"role": "user", "content": again}]
                into.append(asked(client, url, told))
                more += computed(client, url) - before
    medians = {"picture": statistics.median(seen), "text": statistics.median(read)}
    return medians | {"encodings": more}


def gaps(url: str, seconds: float) -> dict[str, Any]:
    """Stream eight answers, alone and next to new prompts."""
    found = {}
    for name in ("alone", "texts", "pictures"):
        clock = Clock()
        each: list[list[float]] = [[] for _ in range(STREAMS)]
        threads = [
            threading.Thread(
                target=stream, args=(url, "seen", clock, one), kwargs={"logprobs": True}
            )
            for one in each
        ]
        for thread in threads:
            thread.start()
        seed, until = 1000, time.monotonic() + seconds
        with httpx.Client(timeout=300) as client:
            while time.monotonic() < until:
                if name == "alone":
                    time.sleep(0.1)
                    continue
                content = shown(seed, picture=name == "pictures")
                asked(client, url, [{"role": "user", "content": content}])
                seed += 1
        clock.end.set()
        for thread in threads:
            thread.join()
        found[name] = summed([gap for one in each for gap in one]) | {"prompts": seed - 1000}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "seen"
        oracle = seeing_chat.make(folder, text=TEXT, tile=512, **EYE)
        record: dict[str, Any] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        record["tower"] = tower(folder, oracle, given.rounds)
        print(json.dumps(record["tower"], indent=1), flush=True)
        del oracle
        with serving(f"{folder}:name=seen", rows=12) as (url, _, _):
            record["turns"] = turns(url, given.rounds)
            print(json.dumps(record["turns"], indent=1), flush=True)
            record["gaps"] = gaps(url, given.seconds)
            print(json.dumps(record["gaps"], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
