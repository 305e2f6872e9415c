"""Reference answers of transformers: logits and greedy tokens in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

_eager = modeling_gemma3.eager_attention_forward


def _capped(module: Any, *tensors: Any, **settings: Any) -> Any:
    """Gemma 3's attention reads the soft cap from its config and then forgets to apply it."""
    return _eager(module, *tensors, softcap=module.attn_logit_softcapping, **settings)


modeling_gemma3.eager_attention_forward = _capped
for _module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
    # Its own recurrence, token by token: the products of its chunks are less exact than the limits
    # of these tests.
    _module.torch_chunk_gated_delta_rule = _module.torch_recurrent_gated_delta_rule


class Oracle:
    """One model in transformers, eager attention (the only one with Gemma's soft cap)."""

    def __init__(self, source: Path | Any) -> None:
        self.model = source
        if isinstance(source, Path):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager"
            )
        self.model.eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, V] fp32."""
        return self.model(torch.tensor([tokens])).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most likely tokens after the prompt, one by one, with its own cache."""
        ids, out = torch.tensor([prompt]), []
        kept: dict[str, Any] = {}
        for _ in range(count):
            result = self.model(ids, use_cache=True, **kept)
            # transformers 5.24 calls it `cache`, and warns of the older name.
            name = "cache" if "cache" in result else "past_key_values"
            kept = {name: result[name]}
            out.append(int(result.logits[0, -1].argmax()))
            ids = torch.tensor([[out[-1]]])
        return out

    def decided(
        self, make: Callable[[int], list[int]], count: int, tie: float
    ) -> tuple[list[int], list[int]]:
        """(prompt, the `count` tokens after it): of make(0), make(1) … the first after which no
        best token is nearer to the second than `tie`, so that rounding decides none of them."""
        for seed in range(20):
            prompt = make(seed)
            tokens = self.greedy(prompt, count)
            if (self.gaps(prompt, tokens) >= tie).all():
                return prompt, tokens
        raise AssertionError("no prompt decides: its weights are too alike")

    @torch.inference_mode()
    def gaps(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Distance from the best to the second logit at each of `tokens`: how safe each is."""
        logits = self.logits(prompt + tokens)[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        return best[:, 0] - best[:, 1]
