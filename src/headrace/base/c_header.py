"""Our own C headers as ctypes: one description of what Python and C++ share."""

from __future__ import annotations

import ctypes
import keyword
import re
from ctypes import Structure
from pathlib import Path
from typing import Any, TypeVar

Struct = TypeVar("Struct", bound=Structure)

_TYPES: dict[str, Any] = {f"{name}_t": getattr(ctypes, f"c_{name}") for name in (
    "int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64"
)}  # fmt: skip
_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double, "void": None}
_COMMENT = re.compile(r"//[^\n]*")
_NUMBER = re.compile(r"#define (\w+) (\d+)$", re.MULTILINE)
_ENUM = re.compile(r"enum (\w+) \{([^#}]*)\};")
_CODE = re.compile(r"EACH\((\w+), (\d+), (\w+)\)")
_STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
_FIELD = re.compile(r"(?:const )?(\w+)(\*?) ([^;]+);")
_FUNCTION = re.compile(r"^(?:HR_)?API ([\w ]+[ *]+)(\w+)\(([^)]*)\)", re.MULTILINE)


class Header:
    """Numbers, structs and functions of our own headers and sources, not of any C."""

    def __init__(self, *files: Path) -> None:
        """Read the files in order. A struct is one `typedef struct { … } Name;`; an enumerator and
        a `#define` are read if they are digits."""
        text = _COMMENT.sub("", "\n".join(file.read_text("utf-8") for file in files))
        self.numbers = {name: int(number) for name, number in _NUMBER.findall(text)}
        """Value of each `#define`."""
        self.enums = {
            name: {of: int(number) for of, number in re.findall(r"(\w+) = (\d+)", body)}
            for name, body in _ENUM.findall(text)
        }
        """Enumeration → enumerator → value."""
        self.codes = {name: (int(code), struct) for name, code, struct in _CODE.findall(text)}
        """Entries `EACH(name, code, struct)` of the header's table of records."""
        self.functions = {
            name: (_type(result), [_type(one) for one in re.findall(r"[^,]+", arguments)])
            for result, name, arguments in _FUNCTION.findall(text)
        }
        """Function → type of its result and of its arguments."""
        self._bodies = {name: body for body, name in _STRUCT.findall(text)}
        self._structs: dict[str, type[Structure]] = {}

    def laid(self, kind: type[Struct]) -> type[Struct]:
        """Decorator: give one of our classes the fields of the struct with its name."""
        assert kind.__name__ not in self._structs, f"{kind.__name__} is laid out already"
        kind._fields_ = list(self._fields(self._bodies[kind.__name__]))
        self._structs[kind.__name__] = kind
        return kind

    def struct(self, name: str) -> type[Structure]:
        """Return the class of a struct; one that is not ours is made here."""
        if name not in self._structs:
            self.laid(type(name, (Structure,), {}))
        return self._structs[name]

    def _fields(self, body: str) -> Any:
        for kind, pointer, names in _FIELD.findall(body):
            for declared in names.split(", "):
                name, _, count = declared.rstrip("]").partition("[")
                type_ = ctypes.c_void_p if pointer else _TYPES.get(kind) or self.struct(kind)
                size = self.numbers[count] if count in self.numbers else int(count or 0)
                yield name + "_" * keyword.iskeyword(name), type_ * size if count else type_


def _type(declared: str) -> Any:
    """Return the type of a result or an argument, declared with or without a name."""
    if "*" in declared:
        text = re.match(r"\s*const char\* ?\w*$", declared)
        return ctypes.c_char_p if text else ctypes.c_void_p
    return _TYPES[declared.split()[0]]
