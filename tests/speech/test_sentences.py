"""Texts in pieces that are spoken one by one."""

from __future__ import annotations

import pytest

from headrace.speech.sentences import FIRST, MOST, clauses, cut, pieces, sentences


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two! Three? Four…", ["One.", "Two!", "Three?", "Four…"]),
        ('He said: "Go." Then he left.', ['He said: "Go."', "Then he left."]),
        ("Dr. Smith met J. R. Stone, e.g. on 3.5 acres.", None),
        ("It costs 1,284.50 in all.", None),
        ("a.m. is early", None),
        ("first line\n\nsecond line", ["first line", "second line"]),
        (
            "こんにちは。げんき ですか？「はい。」",
            ["こんにちは。", "げんき ですか？", "「はい。」"],
        ),
        (" \n ", []),
        ("...", ["..."]),
    ],
)
def test_sentences(text: str, found: list[str] | None) -> None:
    assert sentences(text) == ([text] if found is None else found)


def test_clauses_have_the_marks_behind_them() -> None:
    text = 'Mr. Hill, who (they say) is old; said: "no" — really? Yes'
    assert clauses(text) == [
        ("Mr. Hill,", ","),
        ("who (they say) is old;", ";"),
        ("said:", ":"),
        ('"no" —', ","),
        ("really?", "?"),
        ("Yes", ""),
    ]


def test_nothing_is_lost_and_no_piece_is_long() -> None:
    text = "The water turns the wheel, and " * 60 + "x" * 1000 + " " + "水。" * 200
    for most in (1, 2, 10, 77, MOST):
        found = cut(text, most)
        assert all(0 < len(piece) <= most for piece in found)
        assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert "".join(pieces(text)).replace(" ", "") == text.replace(" ", "")


def test_the_first_clause_of_a_long_sentence_is_a_piece() -> None:
    long = "The water turns the wheel, and the wheel turns the mill of the town."
    assert len(long) > FIRST
    assert pieces(long) == ["The water turns the wheel,", long[27:]]
    assert pieces(f"Short. {long}") == ["Short.", long]
    assert pieces("Well, " + "a " * 40 + "b.") == ["Well, " + "a " * 40 + "b."]


@pytest.mark.parametrize("text", ["!" * 60_000 + "a", "." * 60_000 + "x", "a" + " " * 60_000 + "b"])
def test_long_runs_of_marks_and_spaces_cost_no_more_than_other_text(text: str) -> None:
    """Tried from each of its characters, such a run would take minutes."""
    assert len(sentences(text)) == 1
    assert len(clauses(text)) == 1
