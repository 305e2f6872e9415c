"""The part of another replica's stream that is new to a client with its beginning."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.route.resume import END, Diverged, Resume


def event(identity: str, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"id": identity, "choices": [choice]}).encode() + b"\n\n"


def told(identity: str, pieces: list[str]) -> list[bytes]:
    head = event(identity, {"role": "assistant", "content": ""})
    return [
        head,
        *(event(identity, {"content": piece}) for piece in pieces),
        event(identity, {}, "stop"),
        END + b"\n\n",
    ]


def seen(stream: bytes) -> tuple[str, list[str], set[str], int]:
    """Text, finish reasons, identities and greetings of a stream."""
    values = [json.loads(one[6:]) for one in stream.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for value in values for choice in value["choices"]]
    return (
        "".join(one["delta"].get("content") or "" for one in choices),
        [one["finish_reason"] for one in choices if one["finish_reason"]],
        {value["id"] for value in values},
        sum("role" in one["delta"] for one in choices),
    )


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@given(st.text(min_size=1), st.lists(st.integers(0)), st.lists(st.integers(0)), st.integers(0))
def test_the_client_reads_each_character_once(
    text: str, here: list[int], there: list[int], death: int
) -> None:
    """Whatever the pieces are in which each replica tells the text, and wherever one dies."""
    first, second = told("a", cut(text, here)), told("b", cut(text, there))
    sent = b"".join(first[: death % len(first)])
    resume = Resume(sent)
    news = b"".join(resume.news(one[:-2]) for one in second)
    identity = "a" if sent else "b"
    assert seen(sent + news) == (text, ["stop"], {identity}, 1)
    assert (sent + news).count(END) == 1


def test_another_text_is_no_continuation() -> None:
    resume = Resume(b"".join(told("a", ["a ri", "ver"])[:3]))
    with pytest.raises(Diverged, match="another text"):
        resume.news(event("b", {"content": "a lake"})[:-2])


@pytest.mark.parametrize("first", [5, True, ["a"]])
def test_a_text_does_not_continue_another_type(first: Any) -> None:
    resume = Resume(event("a", {"content": first}))
    with pytest.raises(Diverged):
        resume.news(event("b", {"content": "a river"})[:-2])


def test_calls_of_tools_go_on_within_their_arguments() -> None:
    def call(**function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": function}]}

    resume = Resume(event("a", call(name="depth", arguments='{"ri')))
    (news,) = [resume.news(event("b", call(name="depth", arguments='{"river": 1}'))[:-2])]
    (kept,) = json.loads(news[6:])["choices"][0]["delta"]["tool_calls"]
    assert kept == {"index": 0, "type": "function", "function": {"arguments": 'ver": 1}'}}
