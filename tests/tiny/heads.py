"""Small random heads that draft, as folders in the format of "speculators" or as a further layer of
a model, and the same heads in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from . import families

WIDTH = 192
DRAFT_VOCAB = 400
LAYERS = [2, 1, 3]
"""Inputs of EAGLE-3 from a target of three layers; the last is the input of its last norm."""
_LAYER: dict[str, Any] = {
    "vocab_size": families.VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": families.CONTEXT,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
}


def target(folder: Path) -> None:
    """A llama that the heads fit."""
    families.make(folder, "llama", hidden_size=WIDTH)


class Head(nn.Module):
    """Tokens and states [L, D] → states [L, D] and logits [L, V] of the whole text: one call."""

    def __init__(self, kind: str, *, norms: bool = False) -> None:
        super().__init__()
        torch.manual_seed(13)
        config = transformers.LlamaConfig(**_LAYER)
        config._attn_implementation = "eager"
        llama = transformers.models.llama.modeling_llama
        self.kind, self.norms = kind, norms
        self.table: nn.Module | None = None
        """Embeds the tokens that it reads; None: the target's table."""
        self.layer = llama.LlamaDecoderLayer(config, 0)
        self.rotary = llama.LlamaRotaryEmbedding(config)
        rms = lambda: llama.LlamaRMSNorm(WIDTH, 1e-6)  # noqa: E731
        self.mixing = nn.Linear(
            (3 if kind == "eagle3" else 2) * WIDTH, WIDTH, bias=norms and kind == "eagle"
        )
        if kind == "eagle3":
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.layer.self_attn, name)
                setattr(
                    self.layer.self_attn, name, nn.Linear(2 * WIDTH, old.out_features, bias=False)
                )
            self.hidden_norm, self.norm = rms(), rms()
            self.lm_head = nn.Linear(WIDTH, DRAFT_VOCAB, bias=False)
            ids = torch.randperm(families.VOCAB)[:DRAFT_VOCAB].sort().values
            self.register_buffer("ids", ids)
        elif norms:
            self.before, self.behind = rms(), rms()
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter += torch.randn_like(parameter) * 0.2
                else:
                    nn.init.normal_(parameter, std=0.15)
                parameter.copy_(parameter.bfloat16().float())

    def mixed(self, states: list[torch.Tensor]) -> torch.Tensor:
        """States of the target's layers, as EAGLE-3 is given them."""
        return self.mixing(torch.cat(states, -1))

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, model: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = (self.table or model.model.embed_tokens)(tokens)
        angles = self.rotary(x[None], torch.arange(len(x))[None])
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        layer = self.layer
        if self.kind == "eagle":
            x = self.before(x) if self.norms else x
            x = self.mixing(torch.cat([x, states], -1))
            normed = layer.input_layernorm(x) if self.norms else x
        else:
            x, normed = states, self.hidden_norm(states)
            tokens_normed = layer.input_layernorm(model.model.embed_tokens(tokens))
            x = normed if self.norms else x
            normed = torch.cat([tokens_normed, normed], -1)
        mixed = layer.self_attn(normed[None], position_embeddings=angles, attention_mask=mask)[0]
        x = x + mixed[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if self.kind == "eagle3":
            logits = torch.full((len(x), families.VOCAB), float("-inf"))
            logits[:, self.ids] = self.lm_head(self.norm(x))
            return x, logits
        return x, model.lm_head(self.behind(x) if self.norms else x)

    def state(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Return its input from the target, [L, D]."""
        found = model.model(tokens[None], output_hidden_states=True)
        if self.kind == "eagle":
            return found.last_hidden_state[0]
        layers = found.hidden_states
        # What transformers calls the last is behind the norm.
        last: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
        model.model(tokens[None])
        hook.remove()
        return self.mixed([last[0][0] if one == 3 else layers[one][0] for one in LAYERS])


def make(folder: Path, kind: str, *, norms: bool = False, **more: Any) -> None:
    """Save `Head(kind, norms=norms)`; `more` goes to its config."""
    head = Head(kind, norms=norms)
    at = "transformer" if kind == "eagle" else "layers.0"
    tensors = {f"{at}.{name}": value for name, value in head.layer.state_dict().items()}
    mixing = "fusion_fc" if kind == "eagle" else "fc"
    tensors[f"{mixing}.weight"] = head.mixing.weight
    config: dict[str, Any] = {
        "speculators_model_type": kind,
        "architectures": [],
        "transformer_layer_config": {"model_type": "llama", **_LAYER},
    }
    if kind == "eagle3":
        tensors["layers.0.hidden_norm.weight"] = head.hidden_norm.weight
        tensors["norm.weight"], tensors["lm_head.weight"] = head.norm.weight, head.lm_head.weight
        config |= {"norm_before_residual": norms, "draft_vocab_size": DRAFT_VOCAB}
        config |= {"eagle_aux_hidden_state_layer_ids": LAYERS}
    elif norms:
        tensors[f"{mixing}.bias"] = head.mixing.bias
        tensors["embedding_layernorm.weight"] = head.before.weight
        tensors["pre_lm_head_layernorm.weight"] = head.behind.weight
        config |= {"layernorms": True, "fusion_bias": True}
    else:
        del tensors[f"{at}.input_layernorm.weight"]
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in tensors.items()}
    if kind == "eagle3":
        ids = head.ids
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.isin(torch.arange(families.VOCAB), ids)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def predicting(folder: Path, family: str) -> None:
    """A model of three layers with a fourth that predicts the token after the next."""
    families.make(folder, family, num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    width = config["hidden_size"]
    torch.manual_seed(5)
    extra = {
        "eh_proj": torch.randn(width, 2 * width) * 0.15,
        "enorm": 1 + torch.randn(width) * 0.2,
        "hnorm": 1 + torch.randn(width) * 0.2,
        "shared_head.norm": 1 + torch.randn(width) * 0.2,
        "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head": tensors["lm_head.weight"].clone(),
    }
    tensors |= {f"model.layers.3.{name}.weight": one.bfloat16() for name, one in extra.items()}
    save_file(tensors, folder / "model.safetensors")


class Predictor(nn.Module):
    """The further layer of `predicting`, in the way of `Head`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = transformers.AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = 4
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        self.layer, self.rotary = model.model.layers[3], model.model.rotary_emb
        self.eps = config.rms_norm_eps
        found = load_file(folder / "model.safetensors")
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        self.extra = {name: found[f"model.layers.3.{name}.weight"].float() for name in names}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.extra[name]

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, model: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._norm(model.model.embed_tokens(tokens), "enorm")
        x = torch.cat([x, self._norm(states, "hnorm")], -1) @ self.extra["eh_proj"].T
        angles = self.rotary(x[None], torch.arange(len(x))[None])
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        x = self.layer(x[None], position_embeddings=angles, attention_mask=mask)[0]
        return x, model.lm_head(self._norm(x, "shared_head.norm"))

    def state(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model.model(tokens[None]).last_hidden_state[0]
