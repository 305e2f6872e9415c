"""Texts that tokenizers disagree on, when they disagree."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import strategies as st

PLAIN = [
    "",
    " ",
    "Hello  wörld, it's a fine DAY, isn't it? WE'LL see; I'D say.",
    "   leading and trailing   ",
    "a\n\n\n\nb\t\tc \n d \r\n e\r",
    "1234567890 3.14159 1,000,000 ½ ² ① 0x7f",
    "日本語のテキスト。中文，标点！한국어 ไทย हिन्दी العربية עברית русский Ελληνικά",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🏳️‍🌈 ☃️ \U0001f9d1‍\U0001f680",
    "for i in range(10):\n\tif x[i] >= 3:\n\t\treturn {'a': \"b\\n\"}  # çà\n",
    "https://example.org/a_b?c=d&e=%20f#g user@example.org",
    "zero\u200bwidth, soft\u00adhyphen, nbsp\u00a0here, ideographic\u3000space",
    "\u0000\u0001\x7f\u0085\u2028",
    "ﬁ ﬂ Ⅷ ㎏ ½",
    "x" * 3000,
    "ab" * 2000,
    "Donaudampfschifffahrtsgesellschaftskapitän" * 20,
    " " * 31 + "x" + " " * 7,
    "\n" * 31 + "x" + "\n" * 3,
    "</s> [INST] <s> <0x0A> ▁",
]
DECOMPOSED = ["e\u0301 A\u030a o\u0308 \u1112\u1161\u11ab \u0301x"]

_POOL = "aAzZ019 .,'\"\n\t\r_-<|>éñ日本한ру👍\u200d🏽"


def random_texts(count: int, seed: int = 1) -> list[str]:
    """Short texts of characters that interact: letters, digits, spaces, joiners, any plane."""
    rng = random.Random(seed)
    near = ["".join(rng.choices(_POOL, k=rng.randint(1, 60))) for _ in range(count)]
    planes = [(0x20, 0x2FF), (0x370, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x1FFFF)]
    far = [
        "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 40)))
        for _ in range(count // 4)
    ]
    return near + far


def source_code() -> str:
    """A long text that is always there."""
    return Path(random.__file__).read_text(encoding="utf-8")


TEXT = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=_POOL, max_size=60),
    st.lists(st.sampled_from([*PLAIN[:13], "\n", "  ", "<tag>", "hello world"]), max_size=4).map(
        "".join
    ),
)
