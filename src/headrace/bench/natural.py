"""Workloads of realistic text: six classes in which speculation performs differently.

Random words say nothing about drafts (SPEED-Bench, arXiv 2604.09557), so each class asks for real
work on real text: code and manual pages of the Python that runs the bench, and the short texts
below, written for this file. Prompts have natural lengths, answers those of the options. The same
seed and Python give the same prompts.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..base.sections import read_sections

_MODULES = """
argparse bisect calendar cmd code codeop colorsys configparser contextlib copy csv dataclasses
difflib filecmp fileinput fnmatch fractions functools getopt glob gzip heapq html.parser inspect
ipaddress json.decoder json.encoder keyword linecache mimetypes netrc ntpath operator optparse
pathlib platform pprint queue quopri random reprlib sched shelve shlex shutil statistics string
tarfile tempfile textwrap timeit tokenize trace types urllib.parse uuid warnings wave weakref
zipapp
"""
MODULES = tuple(_MODULES.split())
"""Modules whose source every Python has; missing ones are left out."""
LINES = range(12, 40)
"""Allowed number of lines of a function to edit."""
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
"""Replacement of a comparison in code with a bug to fix."""
ONLY_CODE = "Answer with the whole function and nothing else."


@cache
def _functions() -> list[str]:
    """Return functions with a docstring and a comparison, as in the source."""
    found = []
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and (node.end_lineno or 0) - node.lineno + 1 in LINES
                and ast.get_docstring(node)
                and any(isinstance(one, ast.Compare) for one in ast.walk(node))
                and _locals(node)
                and f"{_locals(node)[0]}_value" not in text
            ):
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                found.append("\n".join(line[node.col_offset :] for line in lines))
    return found


def _sources() -> Iterator[Path]:
    for name in MODULES:
        spec = find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            yield Path(spec.origin)


@cache
def _listed() -> list[Path]:
    """List sources that define a function."""
    return [one for one in _sources() if "\ndef " in one.read_text(encoding="utf-8")]


def _locals(function: ast.FunctionDef) -> list[str]:
    """List names that a function binds and uses, the most used first."""
    names = [one.id for one in ast.walk(function) if isinstance(one, ast.Name)]
    bound = {
        one.id
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and len(one.id) > 1
    }
    return sorted(bound, key=lambda name: (-names.count(name), name))


def _parsed(text: str) -> ast.FunctionDef:
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def _rename(text: str) -> tuple[str, str]:
    name = _locals(_parsed(text))[0]
    return f"Rename the variable `{name}` to `{name}_value`. {ONLY_CODE}", text


def _describe(text: str) -> tuple[str, str]:
    docstring = _parsed(text).body[0]
    lines = text.splitlines()
    bare = [*lines[: docstring.lineno - 1], *lines[docstring.end_lineno or 0 :]]
    return f"Add a docstring that says what this function does. {ONLY_CODE}", "\n".join(bare)


def _mend(text: str) -> tuple[str, str]:
    lines = text.splitlines()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Compare):
            left, right = node.left, node.comparators[0]
            line = lines[right.lineno - 1]
            if left.end_lineno == right.lineno and line.isascii():
                # Only the operator: parentheses around an operand belong to neither side.
                sign = SWAPPED.get(line[left.end_col_offset : right.col_offset].strip())
                if sign:
                    front, after = line[: left.end_col_offset], line[right.col_offset :]
                    lines[right.lineno - 1] = f"{front} {sign} {after}"
                    break
    return f"One comparison in this function is wrong. Mend it. {ONLY_CODE}", "\n".join(lines)


def _code_edit(rng: random.Random) -> list[str]:
    """Return the user's messages: an edit, and the code."""
    wanted, code = rng.choice((_rename, _describe, _mend))(rng.choice(_functions()))
    return [f"{wanted}\n\n```python\n{code}\n```"]


@cache
def _pages() -> list[str]:
    """List the modules' texts at the top of their sources."""
    texts = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in _sources()]
    return [text[:3000] for text in texts if text and len(text) > 400]


def _retrieval(rng: random.Random) -> list[str]:
    """Return a question about three pages, with their text."""
    pages = rng.sample(_pages(), 3)
    shown = "\n\n".join(f"[{number}]\n{page}" for number, page in enumerate(pages, 1))
    question = f"What is described in [{rng.randint(1, 3)}]? Quote the sentences that say so."
    return [f"Use only these pages.\n\n{shown}\n\n{question}"]


_TEXTS = {
    name: text.splitlines() for name, _, text in read_sections(Path(__file__).with_suffix(".txt"))
}
OPENERS, STORIES, PASSAGES = (_TEXTS[name] for name in ("openers", "stories", "passages"))
LANGUAGES = "German", "French", "Spanish", "Italian"


def _chat(rng: random.Random) -> list[str]:
    return rng.choice(OPENERS).split("|")


def _prose(rng: random.Random) -> list[str]:
    return [f"Write a short story about {rng.choice(STORIES)}."]


def _translation(rng: random.Random) -> list[str]:
    passages = rng.sample(PASSAGES, 2)
    return [f"Translate into {rng.choice(LANGUAGES)}:\n\n" + "\n\n".join(passages)]


TOOLS = (
    "You work on a code base with tools. To use one, answer with a single line of JSON: "
    '{"tool": "search", "pattern": …}, {"tool": "read", "path": …, "first": …, "last": …} or '
    '{"tool": "replace", "path": …, "old": …, "new": …}. When you are done, say what you changed.'
)


def _tool_loop(rng: random.Random) -> list[str]:
    """Return the request to an agent, then its tools' answers, independent of its calls."""
    path = rng.choice(_listed())
    lines = path.read_text(encoding="utf-8").splitlines()
    defined = [number for number, line in enumerate(lines) if line.lstrip().startswith("def ")]
    first = rng.choice(defined)
    name = lines[first].split("def ")[1].split("(")[0]
    hits = [
        {"path": path.name, "line": number + 1, "text": line.strip()}
        for number, line in enumerate(lines)
        if name in line
    ]
    shown = {"path": path.name, "first": first + 1, "lines": lines[first : first + 30]}
    return [
        f"Rename the function {name} in {path.name} to {name}_checked, everywhere.",
        json.dumps({"hits": hits[:12]}),
        json.dumps(shown),
        json.dumps({"replaced": 1, "path": path.name, "left": max(len(hits) - 1, 0)}),
    ]


CLASSES: dict[str, Callable[[random.Random], list[str]]] = {
    "code-edit": _code_edit,
    "tool-loop": _tool_loop,
    "conversation": _chat,
    "prose": _prose,
    "translation": _translation,
    "retrieval": _retrieval,
}
"""Makers of each class's user messages, turn by turn."""
SYSTEM = {"tool-loop": TOOLS}
"""System prompts by class."""
