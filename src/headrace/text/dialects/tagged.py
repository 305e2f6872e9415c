"""Calls with each argument between its own tags: text as it is, all else as JSON.

| dialect | models |
|---|---|
| `qwen3_coder` | Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5 |
| `glm` (one tag a line), `glm47` (no spaces) | GLM 4.5 and 4.6, Ling 3; GLM 4.7 and later |
| `minimax` | MiniMax M2 |
| `seed` | Seed-OSS |
| `dsml`, `dsml_v4` | DeepSeek V3.2; V4 |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..calls import MAX_NAME, Calls, SectionReader, read_either, read_to
from ..jsonstream import SPACES, Ended, Malformed, Reader, Writer, read_literal, skip_space
from ..lark import TEXT, Rules, literal
from ..parameters import Written, as_json, choices, closed, properties, resolved, written
from ..tools import Tool
from .dialect import CallFormat, Dialect, Value

FLAG = "IS_TEXT"
"""Placeholder for true or false in a tag that says whether its value is text."""
_MAX_TAGS = 64
"""Largest number of parameters of a tool for which a value ends only at their tags; with more, any
tag ends it."""


@dataclass(frozen=True, slots=True)
class TaggedFormat(CallFormat):
    """Format of a call: `begin`, for each argument `key`, the value, `value_end`, then `end`.

    If `key` ends with a new line, one stands on either side of the value and is not part of it.
    """

    key: str = ""
    """Text before a value; `KEY` stands for the argument's name."""
    value_end: str = ""
    quoted: bool = False

    @property
    def padded(self) -> bool:
        return self.key.endswith("\n")

    def begin_key(self, name: str, *, text: bool) -> str:
        return self.key.replace("KEY", name).replace(FLAG, "true" if text else "false")

    def body(self, arguments: str) -> str:
        parts = []
        for key, value in json.loads(arguments).items():
            head = self.begin_key(key, text=isinstance(value, str))
            parts += [head, _shown(value), self.value_end]
        return "".join(parts)

    def arguments(
        self, tool: Tool, name: str, value: Value, special: Mapping[str, int]
    ) -> tuple[str, Rules]:
        rules: dict[str, str] = {}
        parts = [
            (self._argument(tool, key, schema, value, special, rules), required)
            for key, schema, required in properties(tool)
        ]
        if parts:
            sequence = " ".join(one if required else f"({one})?" for one, required in parts)
            return sequence, list(rules.items())
        if closed(tool):
            return '""', []
        before, _, after = self.key.partition("KEY")
        heads = after.partition(FLAG)
        flag = f'("true" | "false") {literal(heads[2], special)}' if heads[1] else ""
        text = self._text(special, rules)
        rules["t_any"] = (
            f'{literal(before, special)} /[^<>"\\s]{{1,64}}/ {literal(heads[0], special)}'
            f" {flag} {text}"
        )
        return "t_any*", list(rules.items())

    def _argument(
        self,
        tool: Tool,
        key: str,
        schema: Any,
        value: Value,
        special: Mapping[str, int],
        rules: dict[str, str],
    ) -> str:
        kind, end = written(tool, key), literal(self.value_end, special)
        head = {text: literal(self.begin_key(key, text=text), special) for text in (True, False)}
        allowed = choices(resolved(schema, tool.parameters))
        if allowed:
            texts = (
                f"{head[isinstance(one, str)]} {literal(_shown(one), special)}" for one in allowed
            )
            return f"({' | '.join(texts)}) {end}"
        as_text = f"{head[True]} {self._text(special, rules)}"
        as_value = f"{head[False]} {value(schema)} {end}"
        if kind == "either" and FLAG in self.key:
            return f"({as_text} | {as_value})"
        return as_value if kind == "json" else as_text

    def _text(self, special: Mapping[str, int], rules: dict[str, str]) -> str:
        """Make the rule of any text up to a value's end, and of the end."""
        closer = self.value_end.strip()
        if closer in special:
            rest = self.value_end.partition(closer)[2]
            return f"{TEXT} <[{special[closer]}]> {literal(rest, special)}"
        rules[f"t_text[suffix={json.dumps(self.value_end, ensure_ascii=False)}]"] = TEXT
        return "t_text"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def reader(form: TaggedFormat, main: str) -> Callable[[str, Calls], SectionReader]:
    """Make a reader of a format's calls, with any space between two tags. `main`: the opener after
    which a call is certain; after others it must name an offered tool."""
    before, _, after = form.begin.partition("NAME")
    frame, heads = form.open.split(), before.split()

    def read(opener: str, calls: Calls) -> SectionReader:
        tags = [*frame, *heads]
        char = yield from _read_tags(tags[tags.index(opener) + 1 :])
        while True:
            calls.begin()
            name, char = yield from _read_name(after.strip(), char)
            if opener != main and (calls.known is None or name not in calls.known):
                raise Malformed("not the name of a tool")
            calls.start(name)
            yield from _read_arguments(form, calls, name, char)
            if not frame:
                return None
            char = yield from skip_space()
            if not (yield from read_either(heads[0], form.close, char)):
                return None
            char = yield from _read_tags(heads[1:])

    return read


def _read_tags(tags: Sequence[str]) -> Reader:
    """Read tags with any space around them; return the character that follows."""
    char = yield from skip_space()
    for tag in tags:
        yield from read_literal(tag, char)
        char = yield from skip_space()
    return char


def _read_name(after: str, char: str) -> Generator[None, str, tuple[str, str]]:
    """Read a tool's name; return it and the first character after its end."""
    name = ""
    while char not in ((after[0],) if after else ("<", *SPACES)):
        name += char
        if len(name) > MAX_NAME:
            raise Malformed("a name that does not end")
        char = yield
    if after:
        yield from read_literal(after, char)
        char = yield
    return _name(name), char


def _name(text: str) -> str:
    """Strip a name between two tags; raise `Malformed` if it holds a tag or a further line."""
    name = text.strip()
    if "<" in name or "\n" in name:
        raise Malformed("a name that does not end")
    return name


def _read_arguments(
    form: TaggedFormat, calls: Calls, name: str, char: str
) -> Generator[None, str, None]:
    """Read a call from its name to its end."""
    start, _, after = form.key.partition("KEY")
    after, flagged, last_tag = after.partition(FLAG)
    first, *more = start.split()
    stop, *tags = after.split()
    end, *closing = form.end.split()
    tool = calls.known.get(name) if calls.known else None
    strays = {} if calls.held else _strays(start, stop, tool)
    stops = _stops(form, () if calls.held else (*strays, end))
    writer = calls.writer
    writer.open("{")
    comma = found = ""
    while True:
        if not found:
            char = yield from skip_space(char)
            found = first if (yield from read_either(first, end, char)) else end
            if found == first and more:
                char = yield from _read_tags(more)
            elif found == first:
                char = yield
        elif found == start:
            char = yield
        if found == end:
            break
        key = strays.get(found) or (yield from _read_key(stop, char))
        yield from _read_further(tags)
        kind = written(tool, key)
        if flagged:
            flag_stop, *further = last_tag.split()
            flag = yield from _read_key(flag_stop, (yield))
            yield from _read_further(further)
            kind = "text" if flag == "true" else "json"
        writer.hold(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        comma = ", "
        found = yield from _read_value(form, writer, kind, stops)
        if found == form.value_end.strip():
            char, found = (yield), ""
    # The call is complete: the end of its frame may be missing.
    writer.close()
    calls.end()
    yield from _read_further(closing)


def _strays(start: str, stop: str, tool: Tool | None) -> dict[str, str]:
    """Return the tags of parameters at which a value ends without its own end, with their names.

    These are the tags of the declared parameters, so that a text may hold others. For a tool
    without declared parameters it is the beginning of any tag, without a name.
    """
    declared = tool.parameters.get("properties") if tool else None
    if isinstance(declared, Mapping) and 0 < len(declared) <= _MAX_TAGS:
        return {start + name + stop: name for name in declared}
    return {start: ""}


def _stops(form: TaggedFormat, strays: Sequence[str]) -> tuple[str, ...]:
    """Return all ends of a value: its own and the stray tags. Each is also there with the new line
    before it, which is not part of the value."""
    closer = form.value_end.strip()
    lines = [f"\n{each}" for each in ((closer, *strays) if form.padded else strays)]
    return (closer, *strays, *lines)


def _read_further(tags: Sequence[str]) -> Generator[None, str, None]:
    """Read tags with any space before them."""
    for tag in tags:
        char = yield from skip_space()
        yield from read_literal(tag, char)


def _read_key(stop: str, char: str) -> Generator[None, str, str]:
    """Read a name from its first character to `stop`, which is read too."""
    key = char
    while not key.endswith(stop):
        key += yield
        if len(key) > MAX_NAME + len(stop):
            raise Malformed("a name that does not end")
    return _name(key[: -len(stop)])


def _read_value(
    form: TaggedFormat, writer: Writer, kind: Written, stops: tuple[str, ...]
) -> Generator[None, str, str]:
    """Read a value to the first of `stops`; return that stop. Padding loses one new line on either
    side."""
    char = yield
    first = None if form.padded and char == "\n" else char
    if kind == "text":
        found = yield from read_to(stops, writer.text, first)
        writer.text("")
        writer.close()
        return found.strip("\n")
    parts: list[str] = []
    try:
        found = yield from read_to(stops, parts.append, first)
    except Ended:
        value = as_json("".join(parts), literals=kind == "json")
        if value != '""' and (kind == "either" or not value.startswith('"')):
            writer.write(value)
        raise
    writer.write(as_json("".join(parts), literals=kind == "json"))
    return found.strip("\n")


def _dialect(
    name: str,
    form: TaggedFormat,
    marks: tuple[str, ...],
    *,
    tokens: tuple[str, ...] = (),
    wrappers: tuple[str, ...] = (),
) -> Dialect:
    """Make a dialect; `tokens` are texts, other than the frame's two ends, that may be special
    tokens."""
    heads = form.begin.partition("NAME")[0].split()
    opener = form.open.strip() or heads[0]
    closer = (form.close or form.end).split()[-1]
    if form.open:
        wrappers = (*wrappers, heads[0])
    return Dialect(
        name=name,
        read=reader(form, opener),
        format=form,
        openers=(opener,),
        wrappers=wrappers,
        closers=(closer,),
        markers=frozenset([opener, closer, *tokens]),
        marks=marks,
    )


QWEN3_CODER = _dialect(
    "qwen3_coder",
    TaggedFormat(
        begin="<tool_call>\n<function=NAME>\n",
        key="<parameter=KEY>\n",
        value_end="\n</parameter>\n",
        end="</function>\n</tool_call>",
        separator="\n",
    ),
    ("<tool_call>", "<function=", "<parameter="),
    wrappers=("<function=",),
)
_GLM_TAGS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM = _dialect(
    "glm",
    TaggedFormat(
        begin="<tool_call>NAME\n",
        key="<arg_key>KEY</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        end="</tool_call>",
        separator="\n",
    ),
    ("<tool_call>", "<arg_key>", "<arg_value>"),
    tokens=_GLM_TAGS,
)
GLM47 = _dialect(
    "glm47",
    TaggedFormat(
        begin="<tool_call>NAME",
        key="<arg_key>KEY</arg_key><arg_value>",
        value_end="</arg_value>",
        end="</tool_call>",
    ),
    ("<tool_call>", "</arg_key><arg_value>"),
    tokens=_GLM_TAGS,
)
MINIMAX = _dialect(
    "minimax",
    TaggedFormat(
        open="<minimax:tool_call>\n",
        begin='<invoke name="NAME">\n',
        key='<parameter name="KEY">',
        value_end="</parameter>\n",
        end="</invoke>\n",
        close="</minimax:tool_call>",
    ),
    ("<minimax:tool_call>", "<invoke name=", "<parameter name="),
)
SEED = _dialect(
    "seed",
    TaggedFormat(
        begin="<seed:tool_call>\n<function=NAME>\n",
        key="<parameter=KEY>",
        value_end="</parameter>\n",
        end="</function>\n</seed:tool_call>",
        separator="\n",
    ),
    ("<seed:tool_call>", "<function=", "<parameter="),
)


def _dsml(name: str, block: str) -> Dialect:
    mark = "｜DSML｜"
    form = TaggedFormat(
        open=f"<{mark}{block}>\n",
        begin=f'<{mark}invoke name="NAME">\n',
        key=f'<{mark}parameter name="KEY" string="{FLAG}">',
        value_end=f"</{mark}parameter>\n",
        end=f"</{mark}invoke>\n",
        close=f"</{mark}{block}>",
    )
    return _dialect(name, form, (mark, f"{block}>"), tokens=(mark,))


DSML, DSML_V4 = _dsml("dsml", "function_calls"), _dsml("dsml_v4", "tool_calls")
TAGGED = QWEN3_CODER, GLM47, GLM, MINIMAX, SEED, DSML, DSML_V4
"""Dialects in the order of detection."""
