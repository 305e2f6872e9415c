"""Pre-tokenization of each family before byte-level BPE: the `tokenizer.ggml.pre` table.

The patterns are those that the families publish in their `tokenizer.json`; the keys are the names
in GGUF files. Sources: the tokenizer.json of one member of each family, and the list of names in
llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .native import WordRules

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
)
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied one after the other, each to the pieces of the previous one."""

    patterns: tuple[str, ...]
    digits: bool = False
    """Every digit stands alone, before the patterns."""
    nfc: bool = False
    """Text is brought into Unicode normal form C first."""
    ignore_merges: bool = False
    """A word that is a token as a whole is taken as it is."""

    @property
    def native(self) -> WordRules | None:
        """Return these rules for our own library; None if it does not know them."""
        return None if self.digits or len(self.patterns) > 1 else _NATIVE.get(self.patterns[0])

    def build(self) -> pre_tokenizers.PreTokenizer:
        from tokenizers import Regex, pre_tokenizers  # Local: see `native`.

        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        from tokenizers import normalizers  # Local, as above.

        return normalizers.NFC() if self.nfc else None


_NATIVE = {GPT2: WordRules(0), QWEN2: WordRules(1, digits=1), LLAMA3: WordRules(1, digits=3)}
_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((GPT2,), digits=True)
_QWEN2 = PreTokenizer((QWEN2,), nfc=True)
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True)
_GPT4O = PreTokenizer((GPT4O,))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": PreTokenizer((GPT2,), nfc=True),
    "dbrx": PreTokenizer((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "kormo": _QWEN2,
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4": _LLAMA3,
    "exaone4": _GPT2,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
}
