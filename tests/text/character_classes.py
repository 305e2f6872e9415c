"""The classes of characters by which the library's regular expressions cut text, as C++ reads them:

    python tests/text/character_classes.py > src/headrace/text/csrc/classes.inc

Asked of the library itself, since the Unicode version of its tables is what counts.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

CLASSES = {1: r"\p{L}", 2: r"\p{N}", 3: r"\s"}
"""Class in `csrc/words.h` → its pattern; 0: none of them."""


def runs() -> list[int]:
    """`first << 2 | class` of each run of code points of one class, ascending."""
    code_points = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    kinds = dict.fromkeys(code_points, 0)
    text = "".join(map(chr, code_points))
    for kind, pattern in CLASSES.items():
        split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), behavior="removed")
        other = {code for piece, _ in split.pre_tokenize_str(text) for code in map(ord, piece)}
        for code in code_points:
            if code not in other:
                assert kinds[code] == 0
                kinds[code] = kind
    found: list[int] = []
    for code in range(0x110000):
        kind = kinds.get(code, 0)
        if not found or found[-1] & 3 != kind:
            found.append(code << 2 | kind)
    return found


def main() -> None:
    values = runs()
    for begin in range(0, len(values), 10):
        print(" ".join(f"{value:#x}," for value in values[begin : begin + 10]))


if __name__ == "__main__":
    main()
