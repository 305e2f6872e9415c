"""Information about models for Ollama's clients: true values, under its names."""

from __future__ import annotations

import hashlib
import math
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ....base.errors import UnsupportedModel
from ....roofline.weights import parameters
from ...infill import infill_of
from .convert import TAG
from .reply import YEAR, stamp
from .schema import Details, Listed, Loaded, ShowReply

if TYPE_CHECKING:
    from ....base.arch import ModelArch
    from ...service import Service

INTERFACE = "0.13.0"
"""Version of Ollama whose interface these routes follow; clients compare it."""
_LEVEL = re.compile(r"(?i)(?<![a-z0-9])(i?q\d+_[a-z0-9_]+|bf16|f16|f32)(?![a-z0-9])")


def names(service: Service) -> list[str]:
    """List the model and its adapters, with a tag: some clients append one to every name."""
    adapters = sorted(adapter.name for adapter in getattr(service.engine, "adapters", ()))
    return [name if ":" in name else name + TAG for name in (*service.names, *adapters)]


def details(service: Service) -> Details:
    files = service.engine.files
    level = next((_LEVEL.search(path.name) for path in files.weights), None)
    family = files.arch.family
    return {
        "parent_model": "",
        "format": files.format,
        "family": family,
        "families": [family],
        "parameter_size": _size(_count(files.arch)),
        "quantization_level": level[0].upper() if level else "unknown",
    }


@lru_cache(maxsize=4)
def _count(arch: ModelArch) -> int:
    """Count the parameters; 0 for a family without a description."""
    try:
        return int(sum(parameters(arch).values()))
    except UnsupportedModel:
        return 0


def _size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def listed(service: Service, name: str) -> Listed:
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(service.started),
        "size": sum(path.stat().st_size for path in service.engine.files.weights if path.exists()),
        "digest": hashlib.sha256(service.fingerprint.encode()).hexdigest(),
        "details": details(service),
    }


def loaded(service: Service, name: str) -> Loaded:
    one = listed(service, name)
    return {
        "name": name,
        "model": name,
        "size": one["size"],
        "digest": one["digest"],
        "details": one["details"],
        "expires_at": stamp(_expiry(service)),
        "size_vram": one["size"] if service.engine.options.device == "cuda" else 0,
        "context_length": service.engine.max_context,
    }


def _expiry(service: Service) -> float:
    """Return the time at which the model rests if no request comes; in a century if it stays."""
    left = math.inf if service.residents is None else service.residents.expires_in(service)
    return time.time() + left if math.isfinite(left) else service.started + 100 * YEAR


def capabilities(service: Service) -> list[str]:
    engine = service.engine
    if engine.files.arch.task != "tokens":
        return ["embedding"]
    found = ["completion"]
    template = engine.files.template_for(tools=True) or ""
    if "tools" in template:
        found.append("tools")
    if service.speech.marks is not None:
        found.append("thinking")
    if infill_of(service) is not None:
        found.append("insert")
    return found


def show(service: Service) -> ShowReply:
    engine = service.engine
    arch = engine.files.arch
    family = arch.family
    defaults = service.defaults
    given = {"temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p}
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": service.name,
        "general.parameter_count": _count(arch),
        f"{family}.context_length": engine.max_context,
        f"{family}.embedding_length": arch.hidden,
        f"{family}.block_count": arch.layers,
        f"{family}.attention.head_count": arch.heads,
        f"{family}.attention.head_count_kv": arch.kv_heads,
        f"{family}.feed_forward_length": arch.intermediate,
        f"{family}.vocab_size": arch.vocab_size,
    }
    return {
        "license": engine.files.licence or "",
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in given.items()),
        "template": engine.files.chat_template or "",
        "details": details(service),
        "model_info": info,
        "capabilities": capabilities(service),
        "modified_at": stamp(service.started),
    }
