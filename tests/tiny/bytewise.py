"""A Llama whose tokens are bytes, with a chat template: tests say which token comes next."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny.llama import write_llama

END = 256
"""Id of the end-of-turn token; ids below it are the bytes."""
MARK = 257
"""Id of a special token that ends nothing."""
THINK, UNTHINK = 258, 259
VOCAB = 320
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = TEMPLATE.replace("<assistant>", "<assistant><think>") + "{# </think> #}"
"""A template whose answers begin with reasoning."""


def byte_symbols() -> list[str]:
    """The 256 characters by which byte-level vocabularies write bytes, in the order of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    fill = (byte for byte in range(256) if byte not in symbols)
    symbols |= {byte: chr(256 + place) for place, byte in enumerate(fill)}
    return [symbols[byte] for byte in range(256)]


def make(folder: Path, *, context: int = 512, layers: int = 2, template: str = TEMPLATE) -> Path:
    """Write the model to `folder`, in the hub's layout."""
    write_llama(folder, VOCAB, END, context=context, layers=layers)
    vocabulary = {symbol: index for index, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, special=True) for text in ("<|end|>", "<|mark|>")]
    tokenizer.add_special_tokens(marks)
    marks = ["<think>", "</think>"]
    tokenizer.add_tokens([*marks, *(f"<extra{place}>" for place in range(VOCAB - THINK - 2))])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    return folder
