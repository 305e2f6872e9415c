"""Conversion of another engine's server command line to ours (`headrace serve --from`).

The rows are in `base.other_engines`; here are the conversions of values, by the rows' `turn`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..base.environment import cache_root
from ..base.errors import OptionError, file_errors, one_of
from ..base.foreign import Undecodable, any_json
from ..base.names import nearest
from ..base.other_engines import ENGINES, SOURCES, OtherOption
from ..loader.catalog import CATALOG
from ..server.keys import Key, hash_of, write_keys

PROGRAMS = re.compile(
    r"(\S*/)?(vllm( serve)?|sglang( serve)?|llama-server|ollama( serve| run| create)?"
    r"|python[\d.]* -m (vllm\.entrypoints\.openai\.api_server|sglang\.launch_server)"
    r") "
)
"""Beginnings of a line that only name the program."""
CONTAINER = re.compile(r"(sudo )?(docker|podman|nerdctl) (container )?run ")
IMAGE = re.compile(
    r"\S+/(vllm|vllm-openai|sglang|llama\.cpp|ollama)(:[\w.-]+)?(@sha256:\w+)?", re.IGNORECASE
)
"""The engines' published images; the words after one in a container's line are the engine's."""
VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
"""Beginning of an environment variable's assignment."""
SWITCH = ("on", "off", "auto", "0", "1", "true", "false")
"""Values of llama.cpp's `-fa`."""
_TYPES = {
    **dict.fromkeys(("auto", ""), None),
    **dict.fromkeys(("half", "float16", "fp16", "f16"), "float16"),
    **dict.fromkeys(("float", "float32", "f32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
_KV_TYPES = {**_TYPES, "fp8": "fp8", "fp8_e4m3": "fp8", "q8_0": "int8"}
"""Type in another engine → ours; None: the default."""


@dataclass(slots=True)
class Translated:
    """A translated line under construction."""

    engine: str
    model: str | None = None
    options: dict[str, str | bool] = field(default_factory=dict)
    """Field of our options → its value."""
    notes: list[str] = field(default_factory=list)
    """Options left out, each with the reason."""
    ranks: dict[str, int] = field(default_factory=dict)
    """TP, PP and EP → size."""
    values_type: str | None = None
    """llama.cpp's type of V."""
    file: str | None = None
    unified: bool = False
    hashes: list[str] = field(default_factory=list)
    """Hashes of the API keys, for the file named by the option `keys`."""

    @property
    def arguments(self) -> list[str]:
        """The arguments of `headrace serve`."""
        written = [] if self.model is None else [self.model]
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                written.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                written += [f"--{flag}", value]
        return written

    def write_key_file(self) -> None:
        """Write the hashes of the line's API keys, if any; raise `OptionError` if that fails."""
        if not self.hashes:
            return
        path = Path(str(self.options["keys"]))
        with file_errors(OptionError, f"cannot write {path.parent}", "from"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_keys(path, [Key(f"key-{n}", one) for n, one in enumerate(self.hashes, start=1)])


Turn = Callable[[Translated, OtherOption, list[str]], None]


def translate(engine: str, words: list[str]) -> Translated:
    """Translate the words of another engine's command line.

    Raises `OptionError` for an unknown engine or option, and for an option whose absence would
    change the server's behaviour. Writes nothing: see `Translated.write_key_file`.
    """
    known = {name: word for word in _known(engine) for name in word.names}
    line = Translated(engine)
    rest = iter(_without_program(words, known, line))
    for name, values in _options(rest, known, line):
        word = known[name]
        TURNS[word.turn](line, replace(word, names=(name,)), values)
    _finish(line)
    return line


def listed(engine: str) -> str:
    """Return the table of an engine's options, one per line: theirs, ours, the difference."""
    rows = [(" ".join(word.names), _counterpart(word), word.note) for word in _known(engine)]
    wide = [min(36, max(len(row[column]) for row in rows)) for column in (0, 1)]
    lines = [f"{one:{wide[0]}}  {two:{wide[1]}}  {note}".rstrip() for one, two, note in rows]
    return "\n".join([f"held against {SOURCES[engine]}", *lines])


def _counterpart(word: OtherOption) -> str:
    ours = f"--{word.ours.replace('_', '-')}" if word.ours else ""
    match word.turn:
        case "omit" | "share" | "request":
            return "left out" + (f" ({word.ours})" if word.turn == "request" and ours else "")
        case "refuse":
            return "refused"
        case "copies":
            return "refused above 1"
        case "off":
            return f"--no-{ours[2:]}"
        case _ if word.turn == "file" or word.ours == "model":
            return "MODEL"
        case _:
            return f"{ours} {word.example}".rstrip()


def _known(engine: str) -> tuple[OtherOption, ...]:
    one_of(engine, ENGINES, "from", OptionError)
    return ENGINES[engine]


def _without_program(
    words: list[str], known: Mapping[str, OtherOption], line: Translated
) -> list[str]:
    """Remove the program and the variables before it that the table lacks.

    Such a variable becomes a note without its value, which may be a secret.
    """
    variables: list[str] = []
    while len(variables) < len(words) and (name := VARIABLE.match(words[len(variables)])):
        variables.append(name[1])
    kept = [word for name, word in zip(variables, words, strict=False) if name in known]
    line.notes += [
        f"{name}: set it in the environment of headrace" for name in variables if name not in known
    ]
    rest = words[len(variables) :]
    if CONTAINER.match(" ".join(rest[:4]) + " "):
        rest = _without_container(rest, line)
    found = PROGRAMS.match(" ".join(rest[:4]) + " ")
    return kept + rest[len(found[0].split()) if found else 0 :]


def _without_container(words: list[str], line: Translated) -> list[str]:
    """Remove the words for docker or podman, up to the image."""
    place = next((n for n, word in enumerate(words) if IMAGE.fullmatch(word)), None)
    if place is None:
        raise OptionError(
            f"no image of {line.engine} is in this line; give what is behind the image",
            param="from",
        )
    line.notes.append(f"what is before {words[place]}: ports, volumes and variables of a container")
    return words[place + 1 :]


def _options(
    rest: Iterator[str], known: Mapping[str, OtherOption], line: Translated
) -> Iterator[tuple[str, list[str]]]:
    """Yield each option in the table's spelling, with its values; pick up the model on the way."""
    ahead: list[str] = []
    for given in rest:
        ahead.append(given)
        while ahead:
            word = ahead.pop(0)
            if word == "PARAMETER":
                continue
            name, equals, value = word.partition("=")
            name, off = _spelling(name, known)
            if name not in known:
                if word.startswith("-") or line.model is not None:
                    near = nearest(name, list(known))
                    raise OptionError(
                        f"{line.engine}'s {name[:80]} is not known here{near}; leave it out, or "
                        f"headrace serve --from {line.engine} lists what is",
                        param="from",
                    )
                _model(line, word)
                continue
            values = [value] if equals else _taken(rest, ahead, known[name].values)
            if not values and known[name].values in ("one", "many"):
                raise OptionError(f"{line.engine}'s {name} needs a value", param="from")
            yield name, ["off"] if off else values


def _taken(rest: Iterator[str], ahead: list[str], kind: str) -> list[str]:
    """Take an option's values; a word that is not one stays in `ahead`."""
    values: list[str] = []
    while kind != "flag" and (word := next(rest, None)) is not None:
        if (kind == "many" and values and word.startswith("-")) or (
            kind == "switch" and word not in SWITCH
        ):
            ahead.append(word)
            break
        values.append(word)
        if kind != "many":
            break
    return values


def _spelling(name: str, known: Mapping[str, OtherOption]) -> tuple[str, bool]:
    """Return an option in the table's spelling, and whether it is the `--no-` form."""
    if name in known:
        return name, False
    dashed = "--" + name.lstrip("-").replace("_", "-")
    if name.startswith("--") and dashed in known:
        return dashed, False
    plain = "--" + dashed.removeprefix("--no-")
    if dashed.startswith("--no-") and plain in known and known[plain].values == "flag":
        return plain, True
    return name, False


def _model(line: Translated, name: str) -> None:
    if line.engine == "ollama":
        name = re.sub(r"^(hf\.co|huggingface\.co)/", "", name)
        if name.replace(":", "-") in CATALOG:
            name = name.replace(":", "-")
    line.model = name


def _finish(line: Translated) -> None:
    """Settle values that depend on several options."""
    if "EP" in line.ranks:
        line.ranks["EP"] = max(line.ranks["EP"], line.ranks.get("TP", 1))
    sizes = [f"{kind}{size}" for kind, size in line.ranks.items() if size > 1]
    if sizes:
        line.options["layout"] = ".".join(sizes)
    slots, context = line.options.get("max_sequences"), line.options.get("max_context")
    if line.engine == "llama.cpp" and slots and context and not line.unified:
        if int(context) < int(slots):
            raise OptionError(
                f"llama.cpp's --ctx-size {context} is less than a token for each of the {slots} "
                "slots of --parallel",
                param="from",
            )
        line.options["max_context"] = str(int(context) // int(slots))
    if line.values_type is not None:
        keys = line.options.get("kv_dtype", "float16")
        if (keys, line.values_type) == ("int8", "q4_0"):
            line.options["kv_dtype"] = "k8v4"
        elif _KV_TYPES.get(line.values_type) != keys:
            raise OptionError(
                "llama.cpp's --cache-type-v: K and V have one type here, or q8_0 and q4_0 (k8v4)",
                param="from",
            )
    if line.file is not None:
        line.model = f"{(line.model or '').partition(':')[0]}:{line.file}"


def _wrong(line: Translated, word: OtherOption, value: str, allowed: str) -> OptionError:
    return OptionError(
        f"{line.engine}'s {word.names[0]} {value:.80}: only {allowed} have a counterpart here",
        param="from",
    )


def _same(line: Translated, word: OtherOption, values: list[str]) -> None:
    if word.ours == "model":
        _model(line, values[0])
    else:
        line.options[word.ours] = values[0]


def _tokens(line: Translated, word: OtherOption, values: list[str]) -> None:
    """Parse a number, also with vLLM's k (1,000) and K (1,024); none and negative: our default."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kKmM]?)", values[0])
    if values[0] == "auto" or values[0].startswith("-"):
        return
    if found is None:
        raise _wrong(line, word, values[0], "numbers of at most 15 digits")
    unit = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[found[2]]
    count = int(float(found[1]) * unit)
    if count:
        line.options[word.ours] = str(count)


def _ranks(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values == ["off"]:
        return
    size = values[0] if values else "1"
    if not size.isdecimal() or len(size) > 9:
        raise _wrong(line, word, size, "numbers of at most 9 digits")
    if values or word.turn == "EP":
        line.ranks[word.turn] = int(size)


def _copies(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] != "1":
        _refuse(line, word, values)


def _refuse(line: Translated, word: OtherOption, values: list[str]) -> None:
    raise OptionError(f"{line.engine}'s {word.names[0]}: {word.note}", param="from")


def _omit(line: Translated, word: OtherOption, values: list[str]) -> None:
    line.notes.append(f"{word.names[0]}: {word.note}")


def _backend(line: Translated, word: OtherOption, values: list[str]) -> None:
    launchers = {"ray": "ray", "external_launcher": "env", "mp": None, "uni": None}
    _choose(line, word, values[0], launchers)


def _choose(
    line: Translated, word: OtherOption, value: str, choices: Mapping[str, str | None]
) -> None:
    if value not in choices:
        raise _wrong(line, word, value, ", ".join(one for one in choices if one))
    ours = choices[value]
    if ours is not None:
        line.options[word.ours] = ours


def _format(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] == "fp8":
        line.options[word.ours] = "fp8"
    else:
        _omit(line, word, values)


def _method(line: Translated, word: OtherOption, values: list[str]) -> None:
    method = values[0].lower()
    if method == "ngram":
        line.options["speculate"] = "ngram"
    elif method in ("nextn", "mtp"):
        line.options["draft_model"] = "mtp"
    elif method not in ("eagle", "eagle3", "standalone", "draft_model"):
        raise _wrong(line, word, values[0], "ngram, mtp (NEXTN), eagle, eagle3 and draft models")


def _drafts(line: Translated, word: OtherOption, values: list[str]) -> None:
    """Parse vLLM's JSON object of speculation."""
    try:
        given = any_json(values[0])
        method, model = given.get("method"), given.get("model")
    except (Undecodable, AttributeError):
        raise _wrong(line, word, values[0], "JSON objects") from None
    if method == "ngram":
        line.options["speculate"] = "ngram"
    elif isinstance(model, str):
        line.options["draft_model"] = model
    elif method in ("mtp", "deepseek_mtp"):
        line.options["draft_model"] = "mtp"
    else:
        raise _wrong(line, word, values[0], "a model, and the methods ngram and mtp,")


def _secret(line: Translated, word: OtherOption, values: list[str]) -> None:
    _keep_keys(line, [key for value in values for key in value.split(",")])


def _secrets(line: Translated, word: OtherOption, values: list[str]) -> None:
    with file_errors(OptionError, f"cannot read {values[0]}", "from"):
        lines = Path(values[0]).read_text(encoding="utf-8").splitlines()
    _keep_keys(line, [one.strip() for one in lines if one.strip() and not one.startswith("#")])


def _keep_keys(line: Translated, secrets: list[str]) -> None:
    """Keep the keys' hashes for a file of the cache folder, named after them."""
    hashes = dict.fromkeys(hash_of(secret) for secret in secrets if secret)
    if not hashes:
        raise OptionError(f"{line.engine}'s API key is empty", param="from")
    name = hash_of(",".join(hashes)).removeprefix("sha256:")[:16]
    line.hashes = list(hashes)
    line.options["keys"] = str(cache_root() / "keys" / f"{name}.toml")


def _origins(line: Translated, word: OtherOption, values: list[str]) -> None:
    try:
        given = any_json(values[0])
    except Undecodable:
        given = None
    if not isinstance(given, list):
        given = [values[0]]
    if not all(isinstance(one, str) for one in given):
        raise _wrong(line, word, values[0], "lists of strings")
    line.options[word.ours] = ",".join(given)


def _level(line: Translated, word: OtherOption, values: list[str]) -> None:
    level = {"critical": "error", "trace": "debug"}.get(values[0].lower(), values[0].lower())
    line.options[word.ours] = level


def _layers(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] == "0":
        line.options["device"] = "cpu"
    else:
        _omit(line, word, values)


def _none(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] == "none":
        line.options["device"] = "cpu"
    else:
        line.notes.append(f"{word.names[0]}: CUDA_VISIBLE_DEVICES chooses the GPU")


def _parts(line: Translated, word: OtherOption, values: list[str]) -> None:
    parts = values[0].split(",")
    if len(set(parts)) != 1:
        raise _wrong(line, word, values[0], "equal parts")
    line.ranks["TP"] = len(parts)


def _address(line: Translated, word: OtherOption, values: list[str]) -> None:
    """Parse a host, a port, both, or a URL; a lone IPv6 address needs no brackets."""
    given = values[0].strip()
    try:
        ipaddress.IPv6Address(given)
        given = f"[{given}]"
    except ValueError:
        pass
    try:
        parts = urlsplit(given if "://" in given else f"//{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _wrong(line, word, given, "HOST, HOST:PORT, [IPV6]:PORT and URLs of them") from None
    if port is None:
        port = {"http": 80, "https": 443}.get(parts.scheme)
    if host:
        line.options["host"] = host
    if port is not None:
        line.options["port"] = str(port)


def _page(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] in ("8", "16", "32", "64", "128"):
        line.options[word.ours] = values[0]
    else:
        line.notes.append(f"{word.names[0]}: blocks have 8, 16, 32, 64 or 128 tokens")


def _order(line: Translated, word: OtherOption, values: list[str]) -> None:
    if values[0] in ("fcfs", "priority"):
        line.options[word.ours] = values[0]
    else:
        line.notes.append(f"{word.names[0]}: the order is fcfs or priority")


def _adapter(line: Translated, word: OtherOption, values: list[str]) -> None:
    line.options.setdefault(word.ours, "1")


def _set(line: Translated, name: str, value: str | bool) -> None:
    line.options[name] = value


TURNS: Mapping[str, Turn] = {
    "same": _same,
    "ollama": _same,
    "tokens": _tokens,
    "slots": _tokens,
    "TP": _ranks,
    "PP": _ranks,
    "EP": _ranks,
    "copies": _copies,
    "refuse": _refuse,
    "omit": _omit,
    "share": _omit,
    "backend": _backend,
    "dtype": lambda line, word, values: _choose(line, word, values[0], _TYPES),
    "kv": lambda line, word, values: _choose(line, word, values[0], _KV_TYPES),
    "kv_v": lambda line, word, values: setattr(line, "values_type", values[0]),
    "format": _format,
    "names": lambda line, word, values: _set(line, word.ours, ",".join(values)),
    "flag": lambda line, word, values: _set(line, word.ours, values != ["off"]),
    "off": lambda line, word, values: _set(line, word.ours, False),
    "two": lambda line, word, values: _set(line, word.ours, "1" if values == ["off"] else "2"),
    "one": lambda line, word, values: _set(line, word.ours, "1"),
    "urgent": lambda line, word, values: _set(line, word.ours, "priority"),
    "adapter": _adapter,
    "debug": lambda line, word, values: (
        None if values[0] in ("0", "false") else _set(line, word.ours, "debug")
    ),
    "unified": lambda line, word, values: setattr(line, "unified", True),
    "file": lambda line, word, values: setattr(line, "file", values[0]),
    "drafts": _drafts,
    "method": _method,
    "secret": _secret,
    "secrets": _secrets,
    "origins": _origins,
    "level": _level,
    "layers": _layers,
    "none": _none,
    "parts": _parts,
    "address": _address,
    "page": _page,
    "order": _order,
    "request": _omit,
}
"""Name of a conversion → the function that applies it."""
