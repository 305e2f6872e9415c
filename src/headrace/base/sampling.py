"""The user's sampling parameters, and the bounds of every field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .errors import InvalidRequest
from .names import hinted

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 256
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: the quotient would overflow float32."""


@hinted(InvalidRequest)
@dataclass(slots=True)
class SamplingParams:
    """Sampling of one request; the field names and defaults of vLLM's offline API.

    `max_tokens=None` means up to the end of the context. `logprobs=k` returns the chosen token's
    log-probability and the k most likely (of the raw distribution, before temperature and
    filters); `prompt_logprobs=k` the same for each prompt token but the first. `None` for
    `stop`, `stop_token_ids`, `bad_words` or `logit_bias` is the same as none of them.
    `seed` makes the text a function of prompt and parameters alone, whatever the batch.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    typical_p: float = 1.0
    """1 for all tokens. Like the next two, applied to the distribution before temperature."""
    top_a: float = 0.0
    """Tokens below `top_a` times the square of the largest probability are left out."""
    top_n_sigma: float = 0.0
    """Logits more than this number of standard deviations below the largest are left out; 0 or -1
    disables it."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be drawn; None for all."""
    bad_words: list[str] = field(default_factory=list)
    """Words that the answer may not contain: the token that would complete one is not drawn."""
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    """Largest number of reasoning tokens; then the mark that ends it is forced. None for no
    limit."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        # As in vLLM's own defaults.
        self.stop = [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.bad_words = [] if self.bad_words is None else self.bad_words
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequest` naming the first field that is out of its bounds."""
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _number("top_a", self.top_a, 0.0, 1.0)
        _number("top_n_sigma", self.top_n_sigma, -1.0, 100.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        for name, kind, words in (
            ("stop", list | tuple, "a list of texts"),
            ("stop_token_ids", list | tuple, "a list of token ids"),
            ("bad_words", list | tuple, "a list of texts"),
            ("logit_bias", dict, "a dictionary of token ids and numbers"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequest(f"{name} must be {words}", param=name)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"at most {MAX_STOP_TOKENS} stop tokens are allowed", param="stop_token_ids"
            )
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a stop string has 1 to {MAX_STOP_LENGTH} characters", param="stop"
                )
        for token in self.stop_token_ids:
            _token("stop_token_ids", token, vocab_size)
        self._verify_bans(vocab_size)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"at most {MAX_LOGIT_BIAS} biases are allowed", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _number("logit_bias", bias, -100.0, 100.0)

    def _verify_bans(self, vocab_size: int | None) -> None:
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must be a list of at least one token id",
                    param="allowed_token_ids",
                )
            for token in self.allowed_token_ids:
                _token("allowed_token_ids", token, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} words are allowed", param="bad_words")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip() or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"a bad word has 1 to {MAX_STOP_LENGTH} characters that are not all spaces",
                    param="bad_words",
                )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r:.80}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}", param=name)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r:.80}", param=name)
    if not low <= value <= high or (open_low and value == low):
        bound = f"above {low:g}, up to {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be {bound}, not {value:g}", param=name)


def _token(name: str, value: object, vocab_size: int | None) -> None:
    high = 2**31 if vocab_size is None else vocab_size
    _integer(name, value, 0, high - 1)
