"""Rules, walks and windows; tokens against transformers' own generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from headrace.speech.captions import clock, srt, vtt
from headrace.speech.conductor import Conductor, WalkUnderWay
from headrace.speech.decoding import DecodingOptions, Encode, Utterance, compression, decode_window
from headrace.speech.features import RATE, WINDOW
from headrace.speech.network import Chunk, Network
from headrace.speech.rules import Rules
from headrace.speech.transcript import Segment, Transcriber
from headrace.speech.voice import chunks, speech_spans
from headrace.speech.words import cheapest_path, split_words

from .test_network import heard, sound

FIRST = 266
"""Token of <|0.00|> in the small model."""


@pytest.fixture
def transcriber(network: Network) -> Transcriber:
    return Transcriber(network)


def allowed(network: Network, said: list[int], *, times: bool = True) -> set[int]:
    logits = np.zeros(network.files.vocab, np.float32)
    logits[:257] = 20.0  # Words are so likely that no rule of sums decides.
    shares = Rules(network.files, times=times).log_shares(logits, said)
    return set(np.flatnonzero(shares > -np.inf).tolist())


def test_times_come_in_pairs_and_never_go_back(network: Network) -> None:
    assert allowed(network, []) == set(range(FIRST, FIRST + 51)), "at most one second in"
    behind_first = allowed(network, [FIRST + 5])
    assert 65 in behind_first
    assert not behind_first & set(range(FIRST, FIRST + 1501))
    after_text = allowed(network, [FIRST + 5, 65])
    assert FIRST + 5 not in after_text, "no segment of no length"
    assert FIRST + 6 in after_text
    assert 66 in after_text
    closed = allowed(network, [FIRST + 5, 65, FIRST + 9])
    assert closed == {256, *range(FIRST + 9, FIRST + 1501)}
    assert 65 in allowed(network, [FIRST + 5, 65, FIRST + 9, FIRST + 9])


def test_suppressed_tokens_are_never_said(network: Network) -> None:
    plain = allowed(network, [65], times=False)
    assert not plain & {1, 2, *range(257, FIRST + 1501)}
    assert 256 in plain
    assert not allowed(network, [], times=False) & {220, 256}


def test_a_time_is_said_where_times_together_are_likelier(network: Network) -> None:
    logits = np.zeros(network.files.vocab, np.float32)
    logits[65], logits[FIRST + 10 : FIRST + 1000] = 3.0, 0.0
    shares = Rules(network.files, times=True).log_shares(logits, [FIRST, 66])
    assert int(shares.argmax()) > FIRST


@pytest.mark.parametrize("times", [True, False])
def test_greedy_tokens_are_those_of_transformers(
    network: Network, oracle: Any, transcriber: Transcriber, times: bool
) -> None:
    """The oracle's logits, one pass over the whole text a token, under the same rules."""
    options = DecodingOptions(language="en", times=times, temperatures=(0.0,))
    found = transcriber.transcribe(sound(4), options)
    mel = heard(network, 4, 0)
    prefix = [257, 258, 261] + ([] if times else [265])
    said: list[int] = []
    rules = Rules(network.files, times=times)
    with torch.no_grad():
        features = torch.from_numpy(mel.T[None].copy())
        encoded = (oracle.model.encoder(features).last_hidden_state,)
        while len(said) < 224:
            ids = torch.tensor([prefix + said])
            logits = oracle(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            token = int(rules.log_shares(logits.numpy(), said).argmax())
            if token == 256:
                break
            said.append(token)
    got = [token for segment in found.segments for token in segment.tokens]
    assert spoken_of(network, options, 4).tokens == said
    assert set(got) <= set(said)


def spoken_of(network: Network, options: DecodingOptions, seed: int) -> Utterance:
    return spoken_in(network, options, sound(seed))


def spoken_in(network: Network, options: DecodingOptions, samples: np.ndarray) -> Utterance:
    """A window, as its walk gives it."""

    def walk() -> Any:
        yield Encode(samples, 0)
        return (yield from decode_window(network.files, options, "en", [], 0, [0, 1, 2], 0))

    conductor, job = Conductor(network), WalkUnderWay(walk())
    conductor.add(job)
    while not conductor.idle:
        conductor.turn()
    if job.error is not None:
        raise job.error
    assert isinstance(job.result, Utterance)
    return job.result


def test_a_beam_is_worth_what_it_says(network: Network) -> None:
    """The tokens that three beams chose, transcribed again in one chunk, have the score that the
    search summed up over steps and copies between slots."""
    options = DecodingOptions(language="en", beams=3, temperatures=(0.0,))
    spoken = spoken_of(network, options, 5)
    tokens, rules, total = spoken.tokens, Rules(network.files, times=True), 0.0
    heard(network, 5, 0)
    chunk = Chunk(0, 0, 0, [257, 258, 261, *tokens], [])
    for first in range(0, len(tokens) + 1, 50):
        wanted = range(first, min(first + 50, len(tokens) + 1))
        logits = network.decode([chunk._replace(wanted=[2 + at for at in wanted])])
        for row, at in zip(logits, wanted, strict=True):
            shares = rules.log_shares(row, tokens[:at])
            if at < len(tokens):
                total += float(shares[tokens[at]])
            elif len(tokens) < 224:
                total += float(shares[256])
    assert len(tokens) > 5
    assert np.isclose(total / (len(tokens) + 1), spoken.log_share, atol=1e-5)


def test_side_by_side_is_as_alone(network: Network) -> None:
    """Two sounds whose turns are taken in turns say what each says alone; all slots come back."""
    options = DecodingOptions(language="en", temperatures=(0.0, 0.6), seed=4)
    alone = [Transcriber(network).transcribe(sound(seed), options) for seed in (6, 7)]
    both = Transcriber(network)
    runs = [
        both.sequential(sound(seed), options, words=False, told=lambda new, upto: None)
        for seed in (6, 7)
    ]
    found: dict[int, Any] = {}
    while len(found) < 2:
        for number, run in enumerate(runs):
            if number not in found:
                try:
                    next(run)
                except StopIteration as end:
                    found[number] = end.value
        both.conductor.turn()
    assert [found[0].segments, found[1].segments] == [one.segments for one in alone]
    assert len(both.conductor.free_windows) == network.windows
    assert len(both.conductor.free_sequences) == network.sequences


def test_a_short_sound_passes_a_long_one(network: Network) -> None:
    """Turns of one length: a window behind four others of a sound, three of which are under way."""
    options = DecodingOptions(language="en", temperatures=(0.0,))
    at = [0.0]

    def clock() -> float:
        at[0] += 0.01
        return at[0]

    def turns(long: np.ndarray | None) -> int:
        transcriber = Transcriber(network)
        transcriber.conductor = Conductor(network, clock)

        def nothing(new: list[Segment], upto: float) -> None:
            pass

        old = None
        if long is not None:
            old = transcriber.sequential(long, options, words=False, told=nothing)
            for _ in range(250):  # Two and a half seconds: it is no longer young.
                next(old)
                transcriber.conductor.turn()
        new = transcriber.sequential(sound(6), options, words=False, told=nothing)
        taken = 0
        for _ in new:
            if old is not None:
                next(old)
            transcriber.conductor.turn()
            taken += 1
        if old is not None:
            old.close()
        return taken

    alone = turns(None)
    beside = turns(np.concatenate([sound(seed, 30.0) for seed in range(8)]))
    assert alone <= beside < 2 * alone


def test_a_walk_that_is_left_gives_its_slots_back(network: Network) -> None:
    transcriber = Transcriber(network)
    run = transcriber.sequential(sound(6), DecodingOptions(), words=False, told=lambda n, u: None)
    for _ in range(3):
        next(run)
        transcriber.conductor.turn()
    run.close()
    assert transcriber.conductor.idle
    assert len(transcriber.conductor.free_windows) == network.windows
    found = transcriber.transcribe(sound(8), DecodingOptions(language="en", temperatures=(0.0,)))
    again = Transcriber(network).transcribe(
        sound(8), DecodingOptions(language="en", temperatures=(0.0,))
    )
    assert found == again


def test_long_sounds_have_rising_times_within_their_length(network: Network) -> None:
    long = np.concatenate([sound(seed, 20.0) for seed in (1, 2)])
    for chunked in (False, True):
        options = DecodingOptions(temperatures=(0.0,))
        told: list[float] = []
        found = Transcriber(network).transcribe(
            long, options, chunked=chunked, told=lambda new, upto, told=told: told.append(upto)
        )
        assert found.language in ("en", "de")
        assert told[-1] == found.seconds == 40.0
        ends = [0.0]
        for segment in found.segments:
            assert 0 <= segment.start < segment.end <= 40.0
            ends.append(segment.start)
        assert ends == sorted(ends)


def test_nothing_in_nothing(network: Network) -> None:
    assert Transcriber(network).transcribe(np.empty(0, np.float32)).text == ""
    assert chunks(np.zeros(0, np.float32)) == []
    assert chunks(np.zeros(160_000, np.float32)) == []


@pytest.mark.parametrize(
    ("no_speech", "log_share", "silent"),
    [
        (0.93, -0.82, True),  # Zeros: "you".
        (0.81, -0.95, True),  # A tone of 1 kHz: "You".
        (0.78, -1.92, True),  # A tone of 440 Hz.
        (0.73, -0.80, False),  # "Two.", said very quietly.
        (0.58, -0.78, False),  # "Stop."
        (0.36, -1.07, False),  # "You." between zeros.
        (0.90, -0.30, False),  # A text this likely was said, whatever the first token says.
    ],
)
def test_what_is_silence(no_speech: float, log_share: float, silent: bool) -> None:
    """Measured on Whisper base, all but the last."""
    heard = Utterance([1], log_share, no_speech)
    assert heard.silent(DecodingOptions()) is silent


@pytest.mark.parametrize("chunked", [False, True])
def test_no_text_is_made_of_zeros(network: Network, chunked: bool) -> None:
    seconds = 40
    told: list[float] = []
    found = Transcriber(network).transcribe(
        np.zeros(seconds * RATE, np.float32),
        DecodingOptions(temperatures=(0.0,)),
        chunked=chunked,
        told=lambda _, upto: told.append(upto),
    )
    assert (found.text, found.language) == ("", "")
    assert found.left_out == [(0.0, seconds, "quiet" if chunked else "inaudible")]
    assert told[-1] == seconds


def test_what_is_left_out_lies_between_what_is_said(network: Network) -> None:
    """A window of zeros between two of noise: its time is counted, its words are not made up."""
    noise = np.random.default_rng(5).normal(0, 0.1, 5 * RATE).astype(np.float32)
    sound = np.zeros(3 * WINDOW, np.float32)
    sound[: len(noise)] = sound[-len(noise) :] = noise
    options = DecodingOptions(language="en", temperatures=(0.0,), times=False)
    options = replace(options, most_silence=2.0, sure_silence=2.0)
    found = Transcriber(network).transcribe(sound, options)
    assert found.left_out == [(30.0, 60.0, "inaudible")]
    assert {segment.start for segment in found.segments} == {0.0, 60.0}


def test_spans_hold_the_loud_and_leave_the_quiet() -> None:
    quiet = np.random.default_rng(0).normal(size=32_000).astype(np.float32) * 1e-3
    loud = np.random.default_rng(1).normal(size=48_000).astype(np.float32) * 0.1
    found = speech_spans(np.concatenate([quiet, loud, quiet, loud, quiet]))
    assert len(found) == 2
    for (begin, end), wanted in zip(found, ((32_000, 80_000), (112_000, 160_000)), strict=True):
        assert wanted[0] - 8_000 < begin <= wanted[0]
        assert wanted[1] <= end < wanted[1] + 8_000
    long = chunks(np.tile(np.concatenate([loud] * 5 + [quiet[:1600]]), 6))
    assert all(0 < end - begin <= 480_000 for begin, end in long)
    assert all(one[1] <= other[0] for one, other in pairwise(long))


def test_the_cheapest_path_is_the_cheapest() -> None:
    """Against every path, by trying them all."""
    draw = np.random.default_rng(2)

    def best(cost: np.ndarray, i: int, j: int) -> float:
        before = [
            best(cost, a, b)
            for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1))
            if a >= 0 and b >= 0
        ]
        return float(cost[i, j]) + (min(before) if before else 0.0)

    for shape in ((1, 1), (1, 6), (4, 5), (5, 3)):
        cost = draw.normal(size=shape)
        rows, columns = cheapest_path(cost)
        assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, shape[0] - 1, shape[1] - 1)
        assert np.isclose(cost[rows, columns].sum(), best(cost, shape[0] - 1, shape[1] - 1))


def test_words_hold_all_tokens_once(network: Network) -> None:
    ids = network.files.tokenizer.encode(" Hello, wörld: it's “me” (you).").ids
    words = split_words(network.files, ids, "en")
    assert [token for _, own in words for token in own] == ids
    assert [text for text, _ in words][:3] == [" Hello,", " wörld:", " it's"]


def test_words_lie_in_their_segments(network: Network) -> None:
    options = DecodingOptions(language="en", temperatures=(0.0,))
    found = Transcriber(network).transcribe(sound(9), options, words=True)
    words = [word for segment in found.segments for word in segment.words]
    assert all(0 <= word.start <= word.end <= 9.1 for word in words)
    starts = [word.start for word in words]
    assert starts == sorted(starts)


def test_a_window_keeps_what_times_of_words_need_only_where_they_are_wanted(
    network: Network,
) -> None:
    options = DecodingOptions(language="en", temperatures=(0.0,))
    Transcriber(network).transcribe(sound(9), options)
    assert network.keys[0] == {}
    Transcriber(network).transcribe(sound(9), options, words=True)
    assert len(network.keys[0]) == len({layer for layer, _ in network.files.alignment})


def test_captions() -> None:
    segments = [Segment(0.0, 1.5, " Hi --> there", []), Segment(3599.9996, 3661.25, " on\nand", [])]
    assert clock(3661.25, ",") == "01:01:01,250"
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHi -> there\n\n"
        "2\n01:00:00,000 --> 01:01:01,250\non and\n\n"
    )
    assert vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHi -> there\n")


def test_loops_compress() -> None:
    assert compression("la " * 100) > 2.4 > compression("The quick brown fox jumps over the dog.")
