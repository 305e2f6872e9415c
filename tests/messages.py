"""Form of every message to a user: one clause, as ADR 0075 says.

A message follows `error: ` on the command line, or the class of an exception. It is the `message`
in the body of an HTTP error, or part of a line of the log. The name of a file or a field often
precedes it. So it begins in lower case unless a name begins it, and ends without a full stop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from budgets import trees

ORDINARY = re.compile(r"(?:A|I|[A-Z][a-z]+)(?=[\s,:;]|$)")
"""A capitalised word that is no name: acronyms, fields and names such as LoadGen have more."""
NAMES = frozenset({"Headrace", "Hugging", "Linux", "Prometheus", "Python", "Triton"})
"""Names that are written like an ordinary word with a capital."""
SENTENCES = re.compile(r"[.!?] (?=[A-Z])")
LOGS = frozenset({"debug", "info", "warning", "error", "exception"})


def errors() -> set[str]:
    """Every class of `HeadraceError`, which tells a user what was wrong."""
    found = {"HeadraceError"}
    classes = [
        (node.name, {ast.unparse(base).split(".")[-1] for base in node.bases})
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    while more := {name for name, bases in classes if bases & found} - found:
        found |= more
    return found


def text(node: ast.expr) -> str | None:
    """The literal with `{}` for what is put into it; None where it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and (left := text(node.left)) is not None:
        return left + (text(node.right) or "{}")
    return None


def texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif (found := text(node)) is not None:
        yield found


def told() -> Iterator[tuple[str, str]]:
    """Every message that is written where it is raised, logged or found."""
    kinds = errors()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            *owner, name = ast.unparse(node.func).split(".")
            if name in kinds or name == "fail" or (owner == ["log"] and name in LOGS):
                given = node.args[:1]
            elif name == "Finding":  # Its first argument says how bad it is.
                given = node.args[1:]
            else:
                continue
            for one in given:
                yield from ((f"{module}:{node.lineno}", found) for found in texts(one))


def wrong_with(message: str) -> str | None:
    """The rule that a message breaks; None where it keeps all."""
    begins = ORDINARY.match(message)
    if begins and begins[0] not in NAMES:
        return "begins with a capital"
    if message.rstrip().endswith((".", "!")):
        return "ends with a full stop"
    if SENTENCES.search(message):
        return "is more than one sentence: join them by a semicolon or a colon"
    return None


def test_messages_to_users_are_clauses() -> None:
    found = list(told())
    assert len(found) > 700  # Else the search no longer sees how errors are raised.
    wrong = [f"{where} {why}: {one!r}" for where, one in found if (why := wrong_with(one))]
    assert not wrong, "\n".join(wrong)


def test_the_rule_refuses_what_it_should() -> None:
    assert wrong_with("The prompt is empty") == "begins with a capital"
    assert wrong_with("the prompt is empty.") == "ends with a full stop"
    assert wrong_with("no model x. A model is a folder") is not None
    for good in ("the prompt is empty", "GGUF: {} is 3", "LoadGen wrote no {}", "{} is in v1.2 GB"):
        assert wrong_with(good) is None
