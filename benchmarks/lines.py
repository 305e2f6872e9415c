"""Count lines of Python and C++ files: all, and without blank lines, comments and docstrings.

Run: python benchmarks/lines.py [FILE[:NAME,NAME...] ...]; without files the parts written by hand
(ADR 0073). NAME is
a class or function of the module: only these are counted.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "headrace"
COUNTED = (
    "server/files/form.py",
    "bench/http.py",
    "roofline/plot.py",
    "text/native.py",
    "text/csrc/*.cpp",
    "text/csrc/*.h",
)


def python_code(text: str) -> int:
    """Lines that hold a token which is neither a comment nor a docstring."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def only(text: str, names: str) -> str:
    lines = text.splitlines()
    return "\n".join(
        line
        for node in ast.parse(text).body
        if getattr(node, "name", None) in names.split(",")
        for line in lines[node.lineno - 1 : node.end_lineno]
    )


def native_code(text: str) -> int:
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())


def main() -> None:
    files = sys.argv[1:] or [
        f"{path}" for pattern in COUNTED for path in sorted(SOURCE.glob(pattern))
    ]
    for name in files:
        file, _, names = name.partition(":")
        text = Path(file).read_text()
        if names:
            text = only(text, names)
        code = python_code(text) if file.endswith(".py") else native_code(text)
        print(f"{Path(name).name}: {len(text.splitlines())} lines, {code} of code")


if __name__ == "__main__":
    main()
