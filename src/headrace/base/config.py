"""The public options, as one typed record: flags, Python arguments and config files share it.

Each field's metadata holds its help text and its allowed values. The command line is generated from
it, and `headrace explain` prints it resolved. A `Decision` holds the resolved value of "auto" and
the reason. An option earns its place here with a measurement; anything for debugging is in
`base.environment`.
"""

from __future__ import annotations

import math
import operator
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import HeadraceError, InvalidRequest, OptionError, file_errors, one_of
from .names import hinted

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
ROWS = 64
"""Sequences that run at the same time, unless a device's KV holds more."""
MOST_THREADS = 256
"""Maximum threads of the CPU kernels' pool (`csrc/library.cpp`)."""


def option(default: Any, help: str, **rules: Any) -> Any:
    """Make a field with its help text and rules: `choices` (values), `low` and `high` (bounds),
    `alias` (another spelling of the flag)."""
    return field(default=default, metadata={"help": help, **rules})


CPU_KERNELS = ("auto", "cpu", "avx512-bf16", "amx", "amx-bf16")
"""Values of `kernels` with which a CPU serves without PyTorch."""
CPU_VALUES = {
    "dtype": ("float32",),
    "kv_dtype": ("float32", "float16", "bfloat16", "int8", "k8v4"),
    "quantise": ("int8", "int4"),
}
"""Values of other options, besides auto, that these serve."""


def auto_kv_dtype(device: str, dtype: str, kernels: str = "auto") -> tuple[str, str]:
    """Return (type of the KV cache, reason) if the user left it open; arguments are resolved
    ones."""
    if device == "cpu" and dtype == "float32" and kernels != "ref":
        return "bfloat16", "half the memory of float32, and products at twice its rate"
    return dtype, "the type of the activations"


@hinted(OptionError)
@dataclass(slots=True)
class EngineOptions:
    """Options of one engine. None and "auto" are resolved at start, with a reason each."""

    model: str = option(
        DEFAULT_MODEL, "Catalog name, folder in Hugging Face layout, .gguf file, or hub id."
    )
    device: str = option("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "Type of activations and dense weights; auto follows the file and the device.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_dtype: str = option(
        "auto",
        "Type of the KV cache; auto: as dtype, but bfloat16 for float32 on a CPU; k8v4: keys in 8 "
        "bits and values in 4.",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "int8", "k8v4"),
    )
    kernels: str = option(
        "auto",
        "Which kernels serve; auto picks per operator. amx: those of the CPU, with dense bf16 "
        "weights through its tiles, where prompts are several times as fast and bits are its own; "
        "amx-bf16: also activations rounded to bf16, as on GPUs; avx512-bf16: the same "
        "without tiles.",
        choices=("auto", "ref", *CPU_KERNELS[1:], "triton"),
    )
    quantise: str = option(
        "auto",
        "Weights that come dense: kept as they are (none; auto, but int8 of a ranker or denoiser), "
        "or made smaller while loading: fp8 on a GPU, int8 or int4 on a CPU.",
        choices=("auto", "none", "fp8", "int8", "int4"),
        alias="quantize",
    )
    deterministic: bool = option(
        False,
        "Same bits for a request whatever else is in the batch, also on a GPU, where it costs "
        "speed; on the CPU it is always so.",
    )
    max_context: int | None = option(None, "Tokens of prompt and output; none: what fits.", low=8)
    max_sequences: int | None = option(
        None,
        "Sequences run at once; none: 64, a GPU more.",
        low=1,
        high=4096,
    )
    step_tokens: int | None = option(
        None, "Token budget of one step: bounds how long a prompt delays others.", low=16
    )
    block_size: int = option(
        16, "Tokens per KV block: the grain of prefix sharing.", choices=(8, 16, 32, 64, 128)
    )
    kv_memory: str = option(
        "auto",
        "Memory of the KV cache, as in 2GiB; auto: what remains, on a CPU 1,024 tokens a row.",
    )
    prefix_cache: bool = option(True, "Share the KV of equal prefixes between requests.")
    policy: str = option("fcfs", "Order of the waiting queue.", choices=("fcfs", "priority"))
    depth: int | None = option(
        None,
        "Steps in flight; 2 plans the next while one runs; none: 2 on a GPU, else 1.",
        low=1,
        high=2,
    )
    speculate: str = option(
        "auto",
        "Draft tokens from the text itself, or by a draft model, and verify several at once: the "
        "same answers in fewer steps, where that pays. auto: where drafts can be verified, which "
        "is on a CPU.",
        choices=("off", "auto", "ngram", "suffix", "draft"),
    )
    draft_model: str | None = option(
        None,
        "Draft model, used with the text (--speculate auto) or alone (draft): the name of a "
        "smaller model of the same vocabulary; the folder of an EAGLE head; mtp: the model's own "
        "layer that predicts further tokens; none: no draft model.",
    )
    max_waiting: int = option(1024, "Waiting requests before new ones are refused.", low=0)
    max_adapters: int = option(
        0, "LoRA adapters that can run at the same time; 0: none are served.", low=0, high=256
    )
    adapter_rank: int = option(16, "Largest rank of an adapter.", low=1, high=512)
    adapter_roots: str | None = option(
        None, "Folders below which adapters may be loaded over HTTP, as in PATH; none: none may."
    )
    role: str = option(
        "both",
        "Part in a prefill/decode split: prefill@tcp://HOST:PORT computes prompts for servers that "
        "ask there, decode@tcp://HOST:PORT,... asks where that pays; ?key=FILE after it for other "
        "hosts.",
    )
    executor: str = option(
        "inline",
        "Where the worker runs: in the engine's process or in one of its own.",
        choices=("inline", "multiproc"),
    )
    layout: str = option(
        "1",
        "Worker processes that share the model, on CPUs: TP2 is two, each with its part of every "
        "product, PP2 two with some layers each; the same answers, bit for bit.",
    )
    launcher: str = option(
        "local",
        "Starter of a layout's processes. local: this host; env: a launcher on each of several "
        "hosts that names the rank it started (torchrun, Slurm, LeaderWorkerSet): rank 0 serves; "
        "ray: this process, which is rank 0, on hosts that Ray chooses.",
        choices=("local", "env", "ray"),
    )
    rank_key: str | None = option(
        None, "File of a key that ranks on several hosts share; without it they meet on loopback."
    )
    threads: int | None = option(
        None, "CPU threads; none: the affinity mask.", low=1, high=MOST_THREADS
    )
    items: str | None = option(
        None,
        'Catalogue whose items the model retrieves over /v1/recommend: lines of {"item": NAME, '
        '"ids": [semantic ids]}.',
    )
    context_cache: str = option(
        "auto",
        "Disk space below the cache folder for computed KV, to be loaded after a restart or after "
        "the pool had no room; as in 4GiB, 0: none. auto: none, but for headrace serve 8GiB, or a "
        "tenth of the free space if that is less.",
    )
    context_cache_remote: str | None = option(
        None,
        "A store that machines share, below the disk, for computed KV: "
        "redis://HOST:6379/0 (Redis, Valkey), s3://BUCKET/FOLDER or another of fsspec.",
    )
    context_cache_quota: str | None = option(
        None,
        "Maximum disk space of one caller's context cache, as in 1GiB; none: all that others leave "
        "free.",
    )
    context_cache_keys: str | None = option(
        None,
        "Folder of a key for each caller, made when needed: with it the context cache on the disk "
        "and in the store is sealed, and removing a key makes a caller's part unreadable.",
    )
    context_cache_trace: str | None = option(
        None,
        "A file for the names of the prefixes that requests ask for, as headrace plan --tiers "
        "reads it; at most 256 MiB.",
    )
    kv_events: str | None = option(
        None,
        "Address (tcp://127.0.0.1:5557) where the blocks of the prefix cache are published as they "
        "come and go, with their tokens, in vLLM's form; missed events at the next port.",
    )
    cache_dir: str | None = option(None, "Where models are kept; none: ~/.cache/headrace.")
    offline: bool = option(False, "Never touch the network.")
    keep_packed: bool = option(
        True, "Keep weights repacked for this CPU in the cache, for a start in no time."
    )

    def verify(self) -> None:
        """Raise `OptionError` naming the first field outside its rules."""
        verify_options(self)


@hinted(OptionError)
@dataclass(slots=True)
class ServerOptions:
    """Options of the HTTP service."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    served_name: str | None = option(
        None,
        "Name of the model, or several between commas.",
    )
    max_body: int = option(4 * 2**20, "Largest request body, in bytes.", low=1024)
    max_concurrent: int = option(1024, "Requests in work before new ones get 503.", low=1)
    drain_seconds: float = option(30.0, "How long SIGTERM waits for running requests.", low=0)
    store: str | None = option(
        None, "File of stored responses and of the usage ledger; none: they are kept in memory."
    )
    files: str | None = option(
        None, "Folder of uploaded files and of batches; none: there are no such routes."
    )
    max_file: int = option(200 * 2**20, "Largest uploaded file, in bytes.", low=1024)
    file_quota: int = option(
        2**30,
        "Bytes of the files of one key, uploads and results; over it no upload is taken and no "
        "batch is begun.",
        low=1024,
    )
    keys: str | None = option(
        None, "File of API keys (headrace keys); with it every route but health needs a key."
    )
    pinned_prompts: str | None = option(None, "File of prompts that stay in the context cache.")
    operator_port: int | None = option(
        None, "Port of the operator's routes; none: they are not served.", low=0, high=65535
    )
    operator_host: str = option("127.0.0.1", "Address of the operator's port.")
    tls_cert: str | None = option(
        None, "Certificate chain (PEM) for HTTPS; read again when it changes."
    )
    tls_key: str | None = option(None, "Private key of the certificate (PEM).")
    tls_clients: str | None = option(
        None, "CA (PEM) that clients' certificates must come from: mutual TLS."
    )
    hosts: str | None = option(
        None,
        "Names under which this server is reached besides addresses and local names, as in "
        "api.example.com,.example.org; without keys it answers under no others.",
    )
    cors_origins: str | None = option(
        None,
        "Origins whose web pages may use this server, as in https://a.example,https://b.example; "
        "none: only its own page.",
    )
    fetch_hosts: str | None = option(
        None,
        "Hosts from which pictures and videos of a chat are fetched by their http(s) address, as "
        "in img.example.com,.example.org; none: nothing is fetched.",
    )
    programs: str | None = option(
        None,
        "Foreign programs to serve in addition to the model, between commas: catalog names, .onnx "
        "files.",
    )
    program_memory: float = option(
        4.0, "GB of a program's weights, and of values in a run.", low=0.001, high=1e6
    )
    program_seconds: float = option(
        30.0, "Time limit of a program's run, in seconds.", low=0.001, high=1e6
    )
    program_lanes: int | None = option(
        None, "Runs of programs at a time; none: one for each processor.", low=1, high=256
    )
    grpc_port: int | None = option(
        None,
        "Port of KServe v2 over gRPC, at the address of the other; none: it is not served.",
        low=0,
        high=65535,
    )
    otlp_endpoint: str | None = option(
        None, "OpenTelemetry collector for traces, as in http://host:4318; none: no traces."
    )
    log_level: str = option(
        "info", "Least severe line that is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "Form of the log lines.", choices=("text", "json"))

    def verify(self) -> None:
        verify_options(self)
        if self.served_name is not None and not all(self.served_names):
            raise OptionError(
                f"served_name must be names between commas, not {self.served_name!r:.200}",
                param="served_name",
            )

        if not all(self.program_names):
            raise OptionError(
                f"programs must be names between commas, not {self.programs!r:.200}",
                param="programs",
            )

    @property
    def program_names(self) -> list[str]:
        """Names in `programs`."""
        return [] if self.programs is None else self.programs.split(",")

    @property
    def served_names(self) -> list[str]:
        """Names in `served_name`; empty: the model's own name."""
        return [] if self.served_name is None else self.served_name.split(",")


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved option, or one feature that was turned off, and the reason."""

    name: str
    value: str
    reason: str


_TYPES: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
_WORDS = {
    "None": "None",
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}


def verify_options(options: Any) -> None:
    """Check every field of an options record against its metadata's rules."""
    for spec in fields(options):
        value = getattr(options, spec.name)
        allowed_types = str(spec.type).split(" | ")
        if not any(_TYPES[name](value) for name in allowed_types):
            raise OptionError(
                f"{spec.name} must be {' or '.join(_WORDS[name] for name in allowed_types)}, "
                f"not {value!r:.80}",
                param=spec.name,
            )
    verify_bounds(options, OptionError)


BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "low": ("at least", operator.ge),
    "high": ("at most", operator.le),
    "above": ("above", lambda value, bound: math.isfinite(value) and value > bound),
}
"""Rule of an option → its words and test."""


def verify_bounds(options: Any, kind: type[HeadraceError] = InvalidRequest) -> None:
    """Raise `kind` for the first field of a record outside its `option`'s choices or bounds."""
    for spec in fields(options):
        name, value, rules = spec.name, getattr(options, spec.name), spec.metadata
        if value is None:
            continue
        if "choices" in rules and value not in rules["choices"]:
            one_of(str(value), [str(choice) for choice in rules["choices"]], name, kind)
        for rule, (words, holds) in BOUNDS.items():
            if rule in rules and not holds(value, rules[rule]):
                raise kind(f"{name} must be {words} {rules[rule]}, not {value}", param=name)


def read_toml(path: Path, what: str, param: str) -> dict[str, Any]:
    """Read a TOML file. Raises `OptionError`: "cannot read `what`" with the reason."""
    with file_errors(OptionError, f"cannot read {what}", param):
        text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path} is not valid TOML: {error}", param=param) from None


def parse_size(text: str, param: str) -> int:
    """Return the bytes of a size such as `2GiB`, `512MiB`, `1.5GB` or a plain number of bytes."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1024**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}
    stripped = text.strip().lower()
    number = stripped.rstrip("bikmgt")
    try:
        value = float(number) * units[stripped[len(number) :].strip()]
    except (ValueError, KeyError):
        raise OptionError(
            f"{param} must be a size such as 2GiB or 512MiB, not {text!r}", param=param
        ) from None
    if not 0 <= value < 2**63:
        raise OptionError(f"{param} is out of range: {text!r}", param=param)
    return int(value)


TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Units of a time, in seconds."""


def parse_seconds(text: str, param: str, *, bare: bool = False) -> float:
    """Return the seconds of a time such as `80ms`, `1.5s`, `2m` or `1h`.

    Zero needs no unit. Other numbers without one are seconds if `bare`, and refused if not.
    """
    number, unit = text.strip(), ""
    while number and (number[-1].isalpha() or number[-1] == "µ"):
        number, unit = number[:-1], number[-1] + unit
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and unit.lower() in {*TIMES, ""}):
        raise OptionError(
            f"{param} must be a time such as 80ms, 1.5s or 2m, not {text!r:.60}", param=param
        )
    if value and not unit and not bare:
        raise OptionError(
            f"{param} needs a unit: {number}ms or {number}s, not {text!r:.60}", param=param
        )
    return value * TIMES[unit.lower() or "s"]
