"""Typed, bounded access to a foreign config: the only way that one is read.

A config is hostile input: every number has bounds, every word a list of known values. A key that is
missing or of the wrong type is a damaged file (`ModelFileError`). A value that is understood but
not supported is `UnsupportedModel`, which names the key, the value and the allowed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ModelFileError, UnsupportedModel


class Fields:
    """A foreign mapping; None and absence are the same except for `present`
    and `null`.

    `where` names the mapping in messages ("config.json"). `prefix` is put before every key
    ("qwen2." in GGUF metadata). `defaults` are the family's own values of absent keys.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self.defaults = defaults or {}

    def present(self, key: str) -> bool:
        return self.prefix + key in self.values

    def null(self, key: str) -> bool:
        """Return whether the file states a null."""
        return self.present(key) and self.values[self.prefix + key] is None

    def raw(self, key: str) -> Any:
        value = self.values.get(self.prefix + key)
        return self.defaults.get(key) if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFileError(self._say(key, value, "must be an integer"), param=key)
        if not low <= value <= high:
            raise UnsupportedModel(
                self._say(key, value, f"must be from {low} to {high}"), param=key
            )
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(self._say(key, value, "must be a number"), param=key)
        if not low <= value <= high:  # An exact comparison: an integer may exceed any float.
            allowed = f"must be from {low:g} to {high:g}"
            raise UnsupportedModel(self._say(key, value, allowed), param=key)
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return None if self.raw(key) is None else self.number(key, low, high)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(self._say(key, value, "must be true or false"), param=key)
        return value

    def word(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        value = self._value(key, default)
        choices = list(allowed)
        if not isinstance(value, str) or value not in choices:
            supported = "supported: " + ", ".join(choices)
            raise UnsupportedModel(self._say(key, value, supported), param=key)
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise ModelFileError(self._say(key, value, "must be an object"), param=key)
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Require that the key is absent, None, or one of `allowed`: any other value would change
        the result. Raises `UnsupportedModel`."""
        value = self.values.get(self.prefix + key)
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            return
        if isinstance(value, int | float) and not isinstance(value, bool) and value in allowed:
            return
        words = " or ".join(repr(one) for one in allowed) or "nothing"
        raise UnsupportedModel(self._say(key, value, f"supported: {words}"), param=key)

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.where} lacks {self.prefix}{key}", param=key)
        return value

    def _say(self, key: str, value: object, allowed: str) -> str:
        return f"{self.where}: {self.prefix}{key} is {value!r:.80}; {allowed}"
