"""Small vocabularies, made by hand: every byte a token, and a few special tokens."""

from __future__ import annotations

from typing import Any

from headrace.text.pieces import BYTE_TO_CHAR

SPECIALS = ["<|end|>", "<|im_start|>", "</think>", "<think>", "[TOOL_CALLS]", "[ARGS]"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata: 256 bytes, a few merges, special tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ã ¼", "ðŁ ĳ"]
    merged = [merge.replace(" ", "") for merge in merges if merge != "ðŁ ĳ"]
    tokens = [BYTE_TO_CHAR[byte] for byte in range(256)] + merged + ["ðŁ", "ðŁĳ"]
    merges.insert(-1, "ð Ł")
    types = [1] * len(tokens) + [3] * len(SPECIALS) + [4] * len(USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *SPECIALS, *USER_DEFINED],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
        "tokenizer.ggml.add_bos_token": False,
        **changes,
    }


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata in the way of Llama 2 and Gemma: scores, byte tokens, runs of spaces."""
    control = ["<unk>", "<bos>", "<eos>"]
    user = ["\n", "\n\n", "  ", "   ", "<tag>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "an",
        "▁a",
        "re",
        "on",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "aa",
        "aaa",
        "aaaa",
        "ü",
        "日",
        "本",
        "日本",
        "👍",
    ]
    letters = list("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-")
    tokens = [*control, *user, *byte_tokens, *words, *letters]
    scores = [0.0] * (len(tokens) - len(words) - len(letters))
    scores += [-float(rank) for rank in range(len(words) + len(letters))]
    types = [2, 3, 3, *[4] * len(user), *[6] * 256, *[1] * (len(words) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        **changes,
    }
