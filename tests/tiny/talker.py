"""A Llama with a trained vocabulary and ChatML, for whole servers."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny.llama import write_llama

VOCAB = 400
CONTEXT = 512
CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'raise' %}"
    "{{ raise_exception('no such conversation') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The headrace carries water to the turbine, and the turbine turns the water into work.",
    "Die Brücke über den Fluß wurde früher gebaut, und 水 flows under it: 流れる水。",
    "def carry(water: int) -> int:\n    return water * 2  # naïve\n",
    'A list of words: one, two, three; "quoted", (bracketed) and 12345 numbers! 🙂🚀',
]


def make(folder: Path, *, hidden: int = 64) -> Path:
    """Write the model to `folder`, in the hub's layout."""
    write_llama(folder, VOCAB, 2, hidden=hidden, context=CONTEXT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
