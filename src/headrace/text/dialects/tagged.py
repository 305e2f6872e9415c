"""Calls whose arguments stand one by one between tags: text as it is, all else as JSON.

| dialect | who writes it |
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
from ..jsonstream import SPACES, Malformed, Reader, read_literal, skip_space
from ..lark import TEXT, Rules, literal
from ..parameters import as_json, choices, escaped, properties, resolved, written
from ..tools import Tool
from .dialect import CallFormat, Dialect, Value

FLAG = "IS_TEXT"
"""Stands for true or false in a tag that says whether its value is text."""


@dataclass(frozen=True, slots=True)
class TaggedFormat(CallFormat):
    """A call is `begin`, for each argument `key`, the value, `value_end`, then `end`.

    Where `key` ends with a new line, one stands on either side of the value and is not of it.
    """

    key: str = ""
    """`KEY` stands for the argument's name."""
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
        before, _, behind = self.key.partition("KEY")
        heads = behind.partition(FLAG)
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
        """Any text and what stands behind a value."""
        closer = self.value_end.strip()
        if closer in special:
            behind = self.value_end.partition(closer)[2]
            return f"{TEXT} <[{special[closer]}]> {literal(behind, special)}"
        rules[f"t_text[suffix={json.dumps(self.value_end, ensure_ascii=False)}]"] = TEXT
        return "t_text"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def reader(form: TaggedFormat, main: str) -> Callable[[str, Calls], SectionReader]:
    """What reads the calls of a format, with any space between two tags. `main`: the opener behind
    which a call is certain; behind others it names a tool on offer."""
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
    """These, with any space around them; returns what follows."""
    char = yield from skip_space()
    for tag in tags:
        yield from read_literal(tag, char)
        char = yield from skip_space()
    return char


def _read_name(after: str, char: str) -> Generator[None, str, tuple[str, str]]:
    """(name of a tool, first character behind it that is not of what ends it)"""
    name = ""
    while char not in ((after[0],) if after else ("<", *SPACES)):
        name += char
        if len(name) > MAX_NAME:
            raise Malformed("a name that does not end")
        char = yield
    if after:
        yield from read_literal(after, char)
        char = yield
    return name.strip(), char


def _read_arguments(
    form: TaggedFormat, calls: Calls, name: str, char: str
) -> Generator[None, str, None]:
    """What stands between the call's name and its end, which is read too."""
    start, _, behind = form.key.partition("KEY")
    behind, flagged, last_tag = behind.partition(FLAG)
    first, *more = start.split()
    end, *closing = form.end.split()
    tool = calls.known.get(name) if calls.known else None
    comma = ""
    calls.arguments("{")
    while True:
        char = yield from skip_space(char)
        if not (yield from read_either(first, end, char)):
            break
        char = (yield from _read_tags(more)) if more else (yield)
        key = yield from _read_key(behind.split(), char)
        kind = written(tool, key)
        if flagged:
            flag = yield from _read_key(last_tag.split(), (yield))
            kind = "text" if flag == "true" else "json"
        calls.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        comma = ", "
        if kind == "text":
            calls.arguments('"')
            yield from _read_value(form, lambda text: calls.arguments(escaped(text)))
            calls.arguments('"')
        else:
            parts: list[str] = []
            yield from _read_value(form, parts.append)
            calls.arguments(as_json("".join(parts)))
        char = yield
    # The call is whole: what closes its frame may be missing.
    calls.arguments("}")
    calls.end()
    for tag in closing:
        char = yield from skip_space()
        yield from read_literal(tag, char)


def _read_key(tags: Sequence[str], char: str) -> Generator[None, str, str]:
    """A text from its first character on to what stands behind it, which is read too."""
    stop, *closing = tags
    key = char
    while not key.endswith(stop):
        key += yield
        if len(key) > MAX_NAME + len(stop):
            raise Malformed("a name that does not end")
    for tag in closing:
        char = yield from skip_space()
        yield from read_literal(tag, char)
    return key[: -len(stop)].strip()


def _read_value(form: TaggedFormat, sink: Callable[[str], None]) -> Generator[None, str, None]:
    """A value to its closing tag; of padding one new line on either side goes."""
    closer = form.value_end.strip()
    stops = ("\n" + closer, closer) if form.padded else (closer,)
    char = yield
    yield from read_to(stops, sink, None if form.padded and char == "\n" else char)


def _dialect(
    name: str,
    form: TaggedFormat,
    marks: tuple[str, ...],
    *,
    tokens: tuple[str, ...] = (),
    wrappers: tuple[str, ...] = (),
) -> Dialect:
    """`tokens`: what may be a special token beside the frame's two ends."""
    opener = (form.open or form.begin.partition("NAME")[0]).split()[0]
    closer = (form.close or form.end).split()[-1]
    return Dialect(
        name=name,
        read=reader(form, opener),
        format=form,
        openers=(opener,),
        wrappers=wrappers,
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
"""In the order in which detection asks them."""
