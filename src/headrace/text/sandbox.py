"""The jinja environment in which chat templates run: closed, and bounded in time and memory.

A template comes with a model file, so it is foreign code. jinja's immutable sandbox keeps it from
attributes that reach outside and from changing its input, but not from exhausting the process. Here
every value that a template makes is measured and every loop turn is counted:

- *steps*: a counter is compiled into the body of every loop and macro (`_parse`); nothing else in
  the language repeats; the counter also checks the clock now and then;
- *size*: results of operators, calls, filters, block assignments, list and dict literals are
  checked against `MAX_VALUE`; an operation that could make a huge value in one step (repetition,
  powers, padding, replacing) runs only after its size is known; the other string methods and
  filters of that kind are absent;
- *output*: everything written, also inside macros, adds up to at most `MAX_WRITTEN`.

That bounds Python's work between two steps, not C's work in one of them. So a rendering is *small*
or not (ADR 0055). A small one runs in-process, within milliseconds, with small values, and only
with operations whose cost grows at most linearly with their values. At the first sign of anything
else it raises `Elsewhere`, and the whole rendering is done in a process that can be killed
(`text.rendering`).
"""

from __future__ import annotations

import json
import pprint
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_VALUE = 16 * 2**20
"""Characters of a string, or elements of a list, that a template may make."""
MAX_WRITTEN = 64 * 2**20
"""Characters written in one rendering, inside macros and assignments as well."""
MAX_NODES = 1_000_000
"""Values inside one list or dict, at any depth."""
MAX_STEPS = 150_000
"""Loop turns and macro calls of one rendering."""
MAX_SECONDS = 5.0
"""Last resort in seconds: only templates made to be slow reach it before the bounds above."""
SMALL_SECONDS = 0.02
SMALL_VALUE = 256 * 1024
"""Characters or elements of a value in a small rendering, and parts of a list or dict."""
MAX_BITS = 1024
"""Width of a number in a template's source."""


class Raised(Exception):
    """Error of a template that called `raise_exception`."""


class Exhausted(Exception):
    """Error of a bound that was reached; the message goes after "the chat template"."""


class Elsewhere(BaseException):
    """Signal that this rendering is not small. No template can catch it, nor a filter turn it into
    a value."""

    def __init__(self, *, always: bool = False) -> None:
        """Signal it; `always`: because of the template itself, not of this conversation."""
        self.always = always


class Meter:
    """Resources that one rendering has used."""

    __slots__ = ("deadline", "parts", "small", "steps", "value", "written")

    def __init__(self, *, small: bool = False) -> None:
        self.small = small
        self.steps = 0
        self.written = 0
        self.value = SMALL_VALUE if small else MAX_VALUE
        self.parts = SMALL_VALUE // 4 if small else MAX_NODES
        self.deadline = time.monotonic() + (SMALL_SECONDS if small else MAX_SECONDS)

    def step(self, constant: int) -> None:
        """Count one turn of a body that writes `constant` characters of its own."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Exhausted(f"takes more than {MAX_STEPS} steps")
        self.look()
        self.write(constant)

    def look(self) -> None:
        """Check the clock."""
        if time.monotonic() > self.deadline:
            if self.small:
                raise Elsewhere
            raise Exhausted(f"takes longer than {MAX_SECONDS:g} seconds")

    def write(self, size: int) -> None:
        self.written += size
        if self.written > MAX_WRITTEN:
            raise Exhausted(f"writes more than {MAX_WRITTEN} characters")


METER: ContextVar[Meter] = ContextVar("headrace_template_meter")
"""The meter of the rendering that runs in this thread or task."""


def check(size: int) -> None:
    meter = METER.get()
    if size > meter.value:
        if meter.small:
            raise Elsewhere
        raise Exhausted(f"makes a value larger than {MAX_VALUE}")


def sized(value: Any) -> Any:
    """Return the value if its own length is not too large."""
    if isinstance(value, str | list | tuple | dict):
        check(len(value))
    return value


def weighed(value: Any) -> Any:
    """Return the value if its whole content is not too large. A list of the same list twice, forty
    levels deep, is small until something writes it out."""
    if isinstance(value, str):
        return sized(value)
    total, count, pending, most = 0, 0, [value], METER.get().parts
    while pending:
        item = pending.pop()
        count += 1
        if count + len(pending) > most:
            if METER.get().small:
                raise Elsewhere
            raise Exhausted(f"makes a value of more than {MAX_NODES} parts")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, int):
            total += item.bit_length() // 3
        check(total)
    return value


class _Generation(Extension):
    """Tag `{% generation %}…{% endgeneration %}`, which marks text for training; here only its body
    counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_SCOPES = ("_loop_vars", "_block_vars")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the helpers that published templates use."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_written,
        )
        self.filters = {
            name: _guarded(function, small=name in SMALL_FILTERS)
            for name, function in self.filters.items()
            if name in ALLOWED_FILTERS
        }
        own: dict[str, Callable[..., Any]] = {
            "tojson": tojson,
            "replace": _replace,
            "join": _join,
            "indent": _indent,
            "string": _string,
            "batch": _batch,
            "slice": _slice,
            "format": _format,
        }
        self.filters.update((name, _guarded(own[name], small=True)) for name in own)
        self.filters["pprint"] = _guarded(_pprint, small=False)
        self.filters["wordwrap"] = _guarded(_wordwrap, small=False)
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for found in tree.find_all(nodes.Const):
            if isinstance(found.value, int) and found.value.bit_length() > MAX_BITS:
                raise TemplateSyntaxError("a number is too long", found.lineno, name, filename)
        bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for body in bodies:
            constant = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            tick = _own("tick", [nodes.Const(constant)])
            body.body.insert(0, nodes.ExprStmt(tick).set_lineno(body.lineno))
        for block in list(tree.find_all(nodes.AssignBlock)):
            block.filter = nodes.Filter(block.filter, "string", [], [], None, None)
            block.filter.set_lineno(block.lineno)
        _Wrap().visit(tree)
        tree.set_environment(self)
        return tree

    def tick(self, constant: int) -> None:
        METER.get().step(constant)

    def held(self, value: Any) -> Any:
        return weighed(value)

    def joined(self, *values: Any) -> str:
        """Apply the operator `~`."""
        texts = [str(weighed(value)) for value in values]
        check(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        # jinja wraps str.format in its own function, which remembers the method.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            name = function.__name__
            if name in _REFUSED_METHODS:
                raise Exhausted(f"calls str.{name}, which templates may not")
            METER.get().look()
            # Within a loop or a block jinja also passes its variables.
            own = {key: one for key, one in kwargs.items() if key not in _SCOPES}
            if name == "replace":
                return _replace(owner, *args, **own)
            if name == "join":
                return _join(args[0], owner)
            if name in ("format", "format_map"):
                _check_format(owner, "{", (*args, *own.values()))
        return sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    check(len(value) * max(times, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if METER.get().small:
                raise Elsewhere(always=True)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right if isinstance(right, tuple) else (right,))
        return sized(super().call_binop(context, operator, left, right))


class _Wrap:
    """Rewriter that puts `~`, and list and dict literals, through the environment's own
    functions."""

    def visit(self, node: Any) -> Any:
        for name, value in node.iter_fields():
            if isinstance(value, list):
                value[:] = [
                    self.visit(item) if isinstance(item, nodes.Node) else item for item in value
                ]
            elif isinstance(value, nodes.Node):
                setattr(node, name, self.visit(value))
        if isinstance(node, nodes.Concat):
            return _own("joined", node.nodes).set_lineno(node.lineno)
        literal = isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        )
        if literal and not _constant(node):
            return _own("held", [node]).set_lineno(node.lineno)
        return node


def _constant(node: nodes.Node) -> bool:
    return not any(True for _ in node.find_all((nodes.Name, nodes.Call, nodes.Filter)))


def _own(name: str, args: list[Any]) -> nodes.Call:
    """Make a call of the environment's method, by a path that no template variable can hide."""
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


_REFUSED_METHODS = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode"]
)
ALLOWED_FILTERS = frozenset(
    """
    abs attr capitalize count d default dictsort e escape first float forceescape groupby int items
    last length list lower map max min reject rejectattr reverse round safe select selectattr sort
    sum title trim truncate unique upper urlencode wordcount
    """.split()  # noqa: SIM905 - one name per line would hide the list
)


SMALL_FILTERS = frozenset(
    """
    abs capitalize count d default e escape first float int items last length list lower map
    reject rejectattr reverse safe select selectattr title trim upper
    """.split()  # noqa: SIM905
)
"""Filters that a small rendering may use: their time is at most proportional to their values. Any
other is allowed as well, in a process (`Elsewhere`)."""


def _guarded(function: Callable[..., Any], *, small: bool) -> Callable[..., Any]:
    """Wrap a filter: its result is checked against the bound; jinja's marks on it are kept."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get(None)
        if meter is None:  # jinja would compute constants while it compiles.
            raise nodes.Impossible
        if meter.small and not small:
            raise Elsewhere(always=True)
        meter.look()
        return sized(function(*args, **kwargs))

    guarded.__dict__.update(getattr(function, "__dict__", {}))
    return guarded


def _written(value: Any) -> Any:
    """Check everything that is written before it becomes text."""
    if isinstance(value, Undefined):
        return value
    meter = METER.get(None)
    if meter is None:  # jinja compiles, and would write constants.
        if isinstance(value, str):
            return value
        raise nodes.Impossible
    text = value if isinstance(value, str) else str(weighed(value))
    meter.write(len(text))
    return text


def _string(value: Any) -> str:
    text = str(value if isinstance(value, str | Undefined) else weighed(value))
    return str(sized(text))


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = _string(value)
    times = text.count(old) if old else len(text) + 1
    check(len(text) + times * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    texts: list[str] = []
    total = 0
    for value in values:
        if attribute is not None:
            value = value.get(attribute, "") if isinstance(value, dict) else value[attribute]
        texts.append(_string(value))
        total += len(texts[-1]) + len(separator)
        check(total)
    return str(separator).join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int):
        check(width)
        width = " " * width
    lines = _string(text).split("\n")
    check(sum(map(len, lines)) + len(lines) * len(width))
    return "\n".join(
        width + line if (line or blank) and (first or place) else line
        for place, line in enumerate(lines)
    )


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
    items = list(value)
    if fill_with is not None:
        check(linecount)
    rows = [items[first : first + linecount] for first in range(0, len(items), linecount)]
    if rows and fill_with is not None:
        rows[-1] += [fill_with] * (linecount - len(rows[-1]))
    return rows


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> list[list[Any]]:
    items = list(value)
    check(slices)
    each, more = divmod(len(items), slices)
    rows, place = [], 0
    for number in range(slices):
        end = place + each + (number < more)
        full = number < more or fill_with is None
        rows.append(items[place:end] if full else [*items[place:end], fill_with])
        place = end
    return rows


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise ValueError("format takes values by place or by name, not both")
    pattern = _string(value)
    _check_format(pattern, "%", (*args, *kwargs.values()))
    return pattern % (kwargs or args)


def _pprint(value: Any) -> str:
    return pprint.pformat(weighed(value))


def _wordwrap(
    text: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str = "\n",
    break_on_hyphens: bool = True,
) -> str:
    lines: list[str] = []
    for line in _string(text).splitlines():
        lines += textwrap.wrap(
            line,
            width=width,
            expand_tabs=False,
            replace_whitespace=False,
            break_long_words=break_long_words,
            break_on_hyphens=break_on_hyphens,
        ) or [""]
    check(sum(map(len, lines)) + len(lines) * len(wrapstring))
    return wrapstring.join(lines)


def _check_format(pattern: str, mark: str, values: Iterable[Any]) -> None:
    """Check a format string's result for these values against the bound: each of its fields may
    repeat all of them."""
    _narrow(pattern)
    total = sum(len(value if isinstance(value, str) else str(weighed(value))) for value in values)
    check(len(pattern) + pattern.count(mark) * total)


_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")


def _narrow(pattern: str) -> None:
    """Refuse format strings with large field widths in them; no template needs one above a few."""
    digits = 0
    for char in pattern:
        digits = digits + 1 if char.isdigit() else 0
        if digits > 3 and ("%" in pattern or "{" in pattern):
            raise Exhausted("formats with a width of more than three digits")
    if ("*" in pattern and "%" in pattern) or _NESTED_FIELD.search(pattern):
        raise Exhausted("formats with a width taken from a value")


def _check_bits(bits: int) -> None:
    if bits > 100_000:
        raise Exhausted("makes a number of more than 100000 bits")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as published templates expect it: not escaped for HTML, in the order given."""
    if isinstance(indent, int) and indent > 16:
        raise Exhausted("indents JSON by more than 16")
    return json.dumps(
        weighed(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def rendered(template: Any, variables: Mapping[str, Any], *, small: bool = False) -> str:
    """Return the text that a template of this environment writes.

    Raises `Elsewhere` (if it has to be small), `Raised`, `Exhausted`, and any error of a failing
    template.
    """
    token = METER.set(Meter(small=small))
    try:
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            length += len(part)
            check(length)
            parts.append(part)
        return "".join(parts)
    finally:
        METER.reset(token)


def _raise(message: str) -> None:
    raise Raised(str(message)[:1000])


def _now(pattern: str) -> str:
    if len(pattern) > 200:
        raise Exhausted("asks for a date in more than 200 characters")
    return datetime.now().strftime(pattern)
