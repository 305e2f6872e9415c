"""Choice of the place of a prompt's computation: by the total time that waiting requests lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.split import SplitChoice

seconds = st.floats(0.001, 10.0)


@given(seconds, seconds, seconds)
def test_an_idle_server_computes_its_prompts_itself(
    computing: float, moving: float, ahead: float
) -> None:
    assert not SplitChoice(computing, computing, moving, 0.0, ahead, 0).pays


@given(seconds, seconds, st.integers(1, 64))
def test_what_decodes_beside_it_weighs(computing: float, ahead: float, decoding: int) -> None:
    """An idle prefill server and a quick link: it pays. Behind more than all lose: it does not."""
    assert SplitChoice(computing, computing, computing / 100, 0.0, 0.0, decoding).pays
    assert not SplitChoice(
        computing, computing, 0.001, 0.0, ahead + computing * decoding, decoding
    ).pays


@given(seconds, seconds, seconds, seconds, st.integers(0, 64))
def test_more_to_do_here_never_keeps_a_prompt_here(
    computing: float, moving: float, here: float, there: float, decoding: int
) -> None:
    if SplitChoice(computing, computing, moving, here, there, decoding).pays:
        assert SplitChoice(computing, computing, moving, here + 1, there, decoding).pays
        if computing > moving:
            assert SplitChoice(computing, computing, moving, here, there, decoding + 1).pays


def test_a_slow_link_is_not_taken() -> None:
    assert not SplitChoice(1.0, 1.0, 30.0, 0.0, 0.0, 8).pays
    assert SplitChoice(1.0, 1.0, 3.0, 0.0, 0.0, 8).pays


def test_what_only_this_cache_has_is_not_computed_elsewhere() -> None:
    """The next turn of a long conversation: 0.1 s here, 5 s where nobody knows it."""
    assert not SplitChoice(0.1, 5.0, 0.01, 0.0, 0.0, 8).pays
    assert SplitChoice(0.1, 0.1, 0.01, 0.0, 0.0, 8).pays
