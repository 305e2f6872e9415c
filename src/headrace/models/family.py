"""A family of models as data, and a reader of both formats by its single table of fields.

A table maps each field of `ModelArch` to a constant, a `Field` (its keys in a `config.json` and in
GGUF metadata, bounds, default), or a function of the `Config`. A dotted path is a field of a part:
`moe.experts`. A path with a leading `_` is only read by other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ..base.arch import BeyondText, Caps, Chunks, Encoder, Mla, ModelArch, Moe, Recurrence, Uneven
from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import Graph

REQUIRED: Any = object()
"""Default of a field that a config must have."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Field(NamedTuple):
    """One number, flag or word of an architecture, with its place in each format."""

    kind: Literal["integer", "number", "flag", "word"]
    hf: tuple[str, ...]
    """Keys of `config.json`, of which the first present one counts; () if only GGUF has it."""
    gguf: str
    """Key of GGUF metadata, without the architecture; "" if there is none."""
    low: float = 0
    high: float | str = 0
    """Upper bound, or the path of the field with the bound."""
    default: Any = REQUIRED
    """Value for a missing key, or a function of the config. Defaults of transformers' classes are
    in `Family.defaults` and precede it."""
    words: Mapping[str, Any] = NOTHING
    """Meanings of the allowed words."""
    zero: bool = False
    """Whether a zero in GGUF means that the key is absent."""
    tensors: tuple[str, ...] = ()
    """Tensors of a GGUF file; the flag is set if any of them is present."""
    null: bool = False
    """Whether a null in a `config.json` means None, not the default."""


def integer(
    hf: str | tuple[str, ...],
    gguf: str,
    low: int,
    high: int | str,
    default: Any = REQUIRED,
    *,
    zero: bool = False,
    null: bool = False,
) -> Field:
    return Field("integer", _keys(hf), gguf, low, high, default, zero=zero, null=null)


def number(
    hf: str, gguf: str, low: float, high: float, default: Any = REQUIRED, *, zero: bool = False
) -> Field:
    return Field("number", _keys(hf), gguf, low, high, default, zero=zero)


def flag(
    hf: str | tuple[str, ...], gguf: str = "", default: Any = REQUIRED, *, tensors: Any = ()
) -> Field:
    return Field("flag", _keys(hf), gguf, default=default, tensors=_keys(tensors))


def word(hf: str | tuple[str, ...], gguf: str, words: Mapping[str, Any], default: Any) -> Field:
    return Field("word", _keys(hf), gguf, default=default, words=words)


def _keys(hf: str | tuple[str, ...]) -> tuple[str, ...]:
    return (hf,) if isinstance(hf, str) and hf else tuple(hf)


class Names(NamedTuple):
    """Names of a family's tensors, as renamings to Hugging Face's for the plain decoder."""

    gguf: Mapping[str, str] = NOTHING
    """Part of a layer's tensor, with or without its ending → ours; besides the common ones."""
    hf: Mapping[str, str] = NOTHING
    """Part of a name in a folder → ours."""
    unread: str = r"(?!)"
    """Pattern of names in a folder that the text model does not need."""
    permuted: bool = False
    """Whether rows of q and k in GGUF have the halves of a rotary pair adjacent."""
    transposed: Literal["", "interleaved", "halves", "perhaps"] = ""
    """Order of gate and up in a folder's transposed stacks of experts; "": no such stacks;
    "perhaps": halves, if the stacks have no other shape."""
    predicts: bool = False
    """Whether there may be layers after the last one, which predict a second token."""


class Family(NamedTuple):
    """One family: the form of its files, and the computation of its models."""

    name: str
    """`ModelArch.family`."""
    describe: Callable[[ModelArch], Graph]
    types: Mapping[str, tuple[str, ...]]
    """Values of `model_type` → allowed class names. `…ForConditionalGeneration` contains the text
    model's config."""
    gguf: str = ""
    """Value of `general.architecture`; "" if GGUF is not read."""
    when: Callable[[Fields], bool] | None = None
    """Test for this family in files with a shared `general.architecture`; None: the default."""
    defaults: Mapping[str, Any] = NOTHING
    """Values of absent keys in a `config.json`."""
    fields: Mapping[str, Any] = NOTHING
    """Fields that differ from `common.FIELDS`."""
    allowed: Mapping[str, tuple[Any, ...]] = NOTHING
    """Key of a `config.json` → its only allowed values, if present."""
    gguf_allowed: Mapping[str, tuple[Any, ...]] = NOTHING
    own: tuple[str, ...] = ()
    """Keys of either format that functions of the table read, forbidden for other families."""
    names: Names = Names()
    guests: tuple[str, ...] = ()
    """Values of `model_type` of other families' text models that its folders may contain."""

    def keys(self, *, gguf: bool) -> set[str]:
        """Return the keys of a format that this family itself reads or allows."""
        rows = [row for row in self.fields.values() if isinstance(row, Field)]
        read = {row.gguf for row in rows} if gguf else {key for row in rows for key in row.hf}
        return read | set(self.own) | set(self.gguf_allowed if gguf else self.allowed)


_PARTS: Mapping[str, Callable[..., Any]] = {
    "beyond": BeyondText,
    "caps": Caps,
    "chunks": Chunks,
    "encoder": Encoder,
    "mla": Mla,
    "moe": Moe,
    "recurrence": Recurrence,
    "uneven": Uneven,
}


class Config:
    """A family's config, read field by field.

    `outer` is the whole config of a multimodal model. `tensors` and `factors` are a GGUF file's
    tensor names, and the content of its rope tensors.
    """

    def __init__(
        self,
        family: Family,
        table: Mapping[str, Any],
        fields: Fields,
        outer: Fields | None = None,
        *,
        tensors: Collection[str] = (),
        factors: Mapping[str, Sequence[float]] = NOTHING,
    ) -> None:
        self.family = family
        self.table = table
        self.fields = fields
        self.outer = outer or fields
        self.gguf = bool(fields.prefix)
        self.tensors = tensors
        self.factors = factors
        self._found: dict[str, Any] = {}

    def __getitem__(self, path: str) -> Any:
        """Read the field of this path, once."""
        if path not in self._found:
            row = self.table[path]
            if isinstance(row, Field):
                row = self.read(row)
            self._found[path] = row(self) if callable(row) else row
        return self._found[path]

    def key(self, field: Field) -> str:
        """Return the key of a field in this format, "" if it has none."""
        if self.gguf:
            return field.gguf
        stated = (key for key in field.hf if self.fields.values.get(key) is not None)
        return next(stated, field.hf[0] if field.hf else "")

    def read(self, field: Field, default: Any = REQUIRED) -> Any:
        """Read a field by its own keys. Raises as `reader.from_hf`."""
        if self.gguf and field.tensors:
            return not set(field.tensors).isdisjoint(self.tensors)
        key = self.key(field)
        if field.null and not self.gguf and self.fields.null(key):
            return None
        raw = self.fields.raw(key) if key else None
        zero = field.zero and self.gguf and raw == 0 and not isinstance(raw, bool)
        absent = raw is None or zero
        if absent:
            if default is REQUIRED and callable(field.default):
                default = field.default(self)
            elif default is REQUIRED and field.default is not REQUIRED:
                return field.words.get(field.default, field.default)
            if default is None or (zero and default is not REQUIRED):
                return default
        known = None if default is REQUIRED else default
        if field.kind == "flag":
            return self.fields.flag(key, known)
        if field.kind == "word":
            return field.words[self.fields.word(key, field.words, known)]
        high: Any = self[field.high] if isinstance(field.high, str) else field.high
        if field.kind == "integer":
            return self.fields.integer(key, int(field.low), high, known)
        value = self.fields.number(key, field.low, high, known)
        return plain(value) if self.gguf else value

    def refuse(self, path: str, why: str) -> UnsupportedModel:
        """Make the error for the value of the field at `path`, read from its own key."""
        key = self.key(self.table[path])
        return UnsupportedModel(
            f"{self.fields.where}: {self.fields.prefix}{key} is {self[path]}; {why}", param=key
        )

    def arch(self) -> ModelArch:
        """Read all fields."""
        parts: dict[str, dict[str, Any]] = {}
        whole: dict[str, Any] = {}
        for path in self.table:
            part, _, name = path.partition(".")
            if name and self._has(part):
                parts.setdefault(part, {})[name] = self[path]
            elif not name and part[0] != "_":
                whole[part] = self[path]
        for part, values in parts.items():
            if part in whole:
                whole[part] = replace(whole[part], **values)
            else:
                whole[part] = _PARTS[part](**values)
        return ModelArch(family=self.family.name, **whole)

    def _has(self, part: str) -> bool:
        """Return whether the model has a part: experts, if their number is not zero."""
        return part != "moe" or bool(self["moe.experts"])


def plain(value: float) -> float:
    """Return a number stored in fp32 as originally written: 1e-06, not 9.99999997e-07."""
    return float(f"{value:.7g}")
