"""Mistaken option names: the nearest of ours, or ours for a name of another engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from .errors import HeadraceError

Record = TypeVar("Record")

OURS = {
    "max_context": "max_model_len ctx_size n_ctx num_ctx context_length",
    "layout TP2": "tensor_parallel_size tp tp_size tensor_split",
    "layout PP2": "pipeline_parallel_size pp pp_size",
    "layout EP2": "enable_expert_parallel expert_parallel_size ep_size",
    "launcher": "distributed_executor_backend",
    "kv_memory": "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes",
    "kv_dtype": "kv_cache_dtype cache_type_k cache_type_v",
    "max_sequences": "max_num_seqs max_running_requests num_parallel parallel max_batch_size",
    "step_tokens": "max_num_batched_tokens chunked_prefill_size ubatch_size",
    "quantise": "quantization quantize",
    "prefix_cache": "enable_prefix_caching",
    "max_adapters": "enable_lora max_loras max_loras_per_batch",
    "adapter_rank": "max_lora_rank",
    "draft_model": "speculative_model speculative_config model_draft speculative_draft_model_path",
    "device": "n_gpu_layers gpu_layers num_gpu",
    "threads": "num_thread num_threads n_threads",
    "policy": "scheduling_policy schedule_policy",
    "cache_dir": "download_dir",
    "served_name": "served_model_name alias",
    "keys": "api_key",
    "tls_cert": "ssl_certfile ssl_cert_file",
    "tls_key": "ssl_keyfile ssl_key_file",
    "tls_clients": "ssl_ca_certs",
    "cors_origins": "allowed_origins",
    "log_level": "uvicorn_log_level",
    "otlp_endpoint": "otlp_traces_endpoint",
    "max_tokens": "max_new_tokens num_predict n_predict",
    "repetition_penalty": "repeat_penalty",
    "temperature": "temp",
    "stop": "stop_sequences",
}
"""Our options, with an example value if needed → the names in vLLM, SGLang, llama.cpp and
Ollama."""
FOREIGN = {theirs: ours for ours, names in OURS.items() for theirs in names.split()}


def hint(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the addition to a message about an unknown name: "; …", or "".

    `spell` writes one of ours as the user would: a flag, a keyword.
    """
    plain = name[:100].lstrip("-").replace("-", "_")
    ours, _, example = FOREIGN.get(plain, "").partition(" ")
    if ours in known:
        return f"; here that is {spell(ours)}{example and f' ({example})'}"
    return nearest(plain, known, spell)


def nearest(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the most similar known name: "; did you mean …?", or ""."""
    import difflib  # Local: only mistakes need it.

    near = difflib.get_close_matches(name[:200], known, n=1, cutoff=0.75)
    return f"; did you mean {spell(near[0])}?" if near else ""


def hinted(error: type[HeadraceError]) -> Callable[[type[Record]], type[Record]]:
    """Make a record raise `error` with a hint for an unknown keyword, not a bare `TypeError`."""

    def decorate(kind: type[Record]) -> type[Record]:
        plain: Any = kind.__init__
        known = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]

        @wraps(plain)
        def init(self: Record, *given: Any, **named: Any) -> None:
            try:
                plain(self, *given, **named)
            except TypeError:
                for name in named:
                    if name not in known:
                        words = f"{kind.__name__} has no {name[:100]}{hint(name, known)}"
                        raise error(words, param=name[:100]) from None
                raise

        kind.__init__ = init  # type: ignore[method-assign, assignment]
        return kind

    return decorate
