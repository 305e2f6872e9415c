"""Rules, walks and windows; tokens against transformers' own generation."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import EngineFault
from headrace.base.groups import group_bytes
from headrace.loader.whisper import open_transcription
from headrace.loader.whisper_files import WhisperFiles, open_whisper
from headrace.speech.captions import clock, srt, vtt
from headrace.speech.conductor import WalkUnderWay
from headrace.speech.decoding import DecodingOptions, Utterance, compression, decode_window
from headrace.speech.features import RATE, WINDOW, log_mel
from headrace.speech.rules import rules_of
from headrace.speech.transcript import Segment, Transcriber, Transcript
from headrace.speech.voice import chunks, levels, speech_spans
from headrace.speech.windows import Windows
from headrace.speech.words import split_words
from headrace.worker.alignment import cheapest_path
from headrace.worker.time_rules import RulesOfRow

from .whisper_parts import WhisperParts, sound

FIRST = 266
"""Token of <|0.00|> in the small model."""


@pytest.fixture(scope="module")
def files(folder: Path) -> WhisperFiles:
    return open_whisper(folder)


def rules(files: WhisperFiles, *, times: bool = True) -> RulesOfRow:
    return RulesOfRow(rules_of(files, times=times, begin=0))


def allowed(files: WhisperFiles, said: list[int], *, times: bool = True) -> set[int]:
    logits = np.zeros(files.vocab, np.float32)
    logits[:257] = 20.0  # Words are so likely that no rule of sums decides.
    shares = rules(files, times=times).log_shares(logits, said)
    return set(np.flatnonzero(shares > -np.inf).tolist())


def test_times_come_in_pairs_and_never_go_back(files: WhisperFiles) -> None:
    assert allowed(files, []) == set(range(FIRST, FIRST + 51)), "at most one second in"
    behind_first = allowed(files, [FIRST + 5])
    assert 65 in behind_first
    assert not behind_first & set(range(FIRST, FIRST + 1501))
    after_text = allowed(files, [FIRST + 5, 65])
    assert FIRST + 5 not in after_text, "no segment of no length"
    assert FIRST + 6 in after_text
    assert 66 in after_text
    closed = allowed(files, [FIRST + 5, 65, FIRST + 9])
    assert closed == {256, *range(FIRST + 9, FIRST + 1501)}
    assert 65 in allowed(files, [FIRST + 5, 65, FIRST + 9, FIRST + 9])


def test_suppressed_tokens_are_never_said(files: WhisperFiles) -> None:
    plain = allowed(files, [65], times=False)
    assert not plain & {1, 2, *range(257, FIRST + 1501)}
    assert 256 in plain
    assert not allowed(files, [], times=False) & {220, 256}


def test_a_time_is_said_where_times_together_are_likelier(files: WhisperFiles) -> None:
    logits = np.zeros(files.vocab, np.float32)
    logits[65], logits[FIRST + 10 : FIRST + 1000] = 3.0, 0.0
    shares = rules(files).log_shares(logits, [FIRST, 66])
    assert int(shares.argmax()) > FIRST


@pytest.mark.parametrize("times", [True, False])
def test_greedy_tokens_are_those_of_transformers(
    files: WhisperFiles, oracle: Any, transcriber: Transcriber, times: bool
) -> None:
    """The oracle's logits, one pass over the whole text a token, under the same rules."""
    options = DecodingOptions(language="en", times=times, temperatures=(0.0,))
    found = transcriber.transcribe(sound(4), options)
    prefix = [257, 258, 261] + ([] if times else [265])
    said: list[int] = []
    own = rules(files, times=times)
    with torch.no_grad():
        features = torch.from_numpy(log_mel(sound(4), files.mels).T[None].copy())
        encoded = (oracle.model.encoder(features).last_hidden_state,)
        while len(said) < 224:
            ids = torch.tensor([prefix + said])
            logits = oracle(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            token = int(own.log_shares(logits.numpy(), said).argmax())
            if token == 256:
                break
            said.append(token)
    got = [token for segment in found.segments for token in segment.tokens]
    assert spoken_of(transcriber, options, 4).tokens == said
    assert set(got) <= set(said)


def spoken_of(transcriber: Transcriber, options: DecodingOptions, seed: int) -> Utterance:
    """A window, as its walk gives it."""

    def walk() -> Any:
        with Windows(transcriber.files).open(sound(seed), short=False, aligns=False) as window:
            return (yield from decode_window(transcriber.files, options, "en", [], window, 0))

    jobs = transcriber.jobs
    job = WalkUnderWay(walk(), jobs.share())
    assert jobs.lend(job.share) is not None
    jobs.add(job)
    while not job.done:
        jobs.turn()
    jobs.take_back(job.share, 0)
    if job.error is not None:
        raise job.error
    assert isinstance(job.result, Utterance)
    return job.result


def test_a_beam_is_worth_what_it_says(
    folder: Path, files: WhisperFiles, transcriber: Transcriber
) -> None:
    """The tokens that three beams chose, decoded again in one chunk, have the score that the search
    summed up over requests for one token each."""
    options = DecodingOptions(language="en", beams=3, temperatures=(0.0,))
    spoken = spoken_of(transcriber, options, 5)
    tokens, own, total = spoken.tokens, rules(files), 0.0
    parts = WhisperParts(open_transcription(folder, coded=False), windows=1, rows=1)
    parts.encode(sound(5), 0)
    prefix = [257, 258, 261]
    chunks_of = [*prefix, *tokens]
    found = [
        row
        for first in range(0, len(chunks_of), 100)
        for row in parts.logits(0, 0, chunks_of[first : first + 100], first)
    ]
    for at, row in enumerate(found[len(prefix) - 1 :]):
        shares = own.log_shares(row, tokens[:at])
        if at < len(tokens):
            total += float(shares[tokens[at]])
        elif len(tokens) < 224:
            total += float(shares[256])
    assert len(tokens) > 5
    assert np.isclose(total / (len(tokens) + 1), spoken.log_share, atol=1e-5)


def test_side_by_side_is_as_alone(transcriber: Transcriber) -> None:
    """Two sounds whose turns are taken in turns say what each says alone; all windows come back."""
    options = DecodingOptions(language="en", temperatures=(0.0, 0.6), seed=4)
    free = transcriber.jobs.free_windows
    alone = [transcriber.transcribe(sound(seed), options) for seed in (6, 7)]
    found = together(transcriber, [sound(6), sound(7)], options)
    assert [one.segments for one in found] == [one.segments for one in alone]
    assert transcriber.jobs.free_windows == free


def test_one_window_is_opened_between_two_steps(transcriber: Transcriber) -> None:
    """Its features are computed in the loop, which other models' texts wait for."""
    jobs = transcriber.jobs
    jobs.turn()
    one, two = jobs.share(), jobs.share()
    window = jobs.lend(one)
    assert window is not None
    assert jobs.lend(two) is None
    jobs.turn()
    other = jobs.lend(two)
    assert other is not None
    jobs.take_back(one, window)
    jobs.take_back(two, other)


def together(
    transcriber: Transcriber, sounds: list[np.ndarray], options: DecodingOptions
) -> list[Transcript]:
    runs = [
        transcriber.sequential(one, options, words=False, told=lambda new, upto: None)
        for one in sounds
    ]
    found: dict[int, Any] = {}
    while len(found) < len(runs):
        for number, run in enumerate(runs):
            if number not in found:
                try:
                    next(run)
                except StopIteration as end:
                    found[number] = end.value
        transcriber.jobs.turn()
    return [found[number] for number in range(len(runs))]


def test_a_short_sound_passes_a_long_one(transcriber: Transcriber) -> None:
    """A window of a new sound is encoded and decoded before the one that a long sound has just
    begun, and all windows come back."""
    options = DecodingOptions(language="en", temperatures=(0.0,))
    ended: list[str] = []

    def told(name: str) -> Any:
        return lambda new, upto: ended.append(name)

    long = np.concatenate([sound(seed, 30.0) for seed in range(4)])
    old = transcriber.sequential(long, options, words=False, told=told("old"))
    next(old)
    while not ended:  # Then it has had a window, and asks for the next one.
        transcriber.jobs.turn()
        next(old)
    new = transcriber.sequential(sound(16), options, words=False, told=told("new"))
    free = transcriber.jobs.free_windows
    while transcriber.jobs.free_windows == free:  # The sound is looked at in pieces first.
        next(new)
    for _ in new:
        next(old)
        transcriber.jobs.turn()
    old.close()
    assert ended[:2] == ["old", "new"]
    assert transcriber.jobs.idle


def test_chunks_of_a_sound_are_decoded_at_the_same_time(transcriber: Transcriber) -> None:
    """A window counts as unread until its first token only; then new sounds come before others."""
    options = DecodingOptions(language="en", temperatures=(0.0,))
    long = np.concatenate([sound(1, 20.0), np.zeros(2 * RATE, np.float32), sound(2, 20.0)])
    run = transcriber.chunked(long, options, words=False, told=lambda new, upto: None)
    jobs, most = transcriber.jobs, 0
    for _ in run:
        jobs.turn()
        decoding = [job for job, asked in jobs._jobs.items() if not asked.fresh]
        most = max(most, len(decoding))
        assert sum(asked.fresh for asked in jobs._jobs.values()) <= 1
        assert all(job.share.old for job in decoding)
    assert most == len(cut(long)) > 1
    assert jobs.idle


def test_equal_sounds_share_nothing(transcriber: Transcriber) -> None:
    """They may be of different keys."""
    options = DecodingOptions(language="en", temperatures=(0.0,))
    scheduler = transcriber.jobs._core.scheduler
    before = scheduler.stats().encodings.computed
    one, other = together(transcriber, [sound(6), sound(6)], options)
    assert one == other
    assert scheduler.stats().encodings.computed == before + 2


def test_a_walk_that_is_left_gives_its_window_back(transcriber: Transcriber) -> None:
    free = transcriber.jobs.free_windows
    run = transcriber.sequential(sound(6), DecodingOptions(), words=False, told=lambda n, u: None)
    for _ in range(3):
        next(run)
        transcriber.jobs.turn()
    run.close()
    assert transcriber.jobs.idle
    assert transcriber.jobs.free_windows == free
    options = DecodingOptions(language="en", temperatures=(0.0,))
    found = transcriber.transcribe(sound(8), options)
    assert found == transcriber.transcribe(sound(8), options)


def test_an_error_of_a_step_ends_its_sound_alone(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DecodingOptions(language="en", temperatures=(0.0,))
    wanted = transcriber.transcribe(sound(3), options)
    with monkeypatch.context() as broken:
        broken.setattr(RulesOfRow, "log_shares", lambda *given: 1 / 0)
        with pytest.raises(EngineFault, match="ZeroDivisionError"):
            transcriber.transcribe(sound(6), options)
    assert transcriber.jobs.idle
    assert transcriber.transcribe(sound(3), options) == wanted


def test_long_sounds_have_rising_times_within_their_length(transcriber: Transcriber) -> None:
    long = np.concatenate([sound(seed, 20.0) for seed in (1, 2)])
    for chunked in (False, True):
        options = DecodingOptions(temperatures=(0.0,))
        told: list[float] = []
        found = transcriber.transcribe(
            long, options, chunked=chunked, told=lambda new, upto, told=told: told.append(upto)
        )
        assert found.language in ("en", "de")
        assert told[-1] == found.seconds == 40.0
        ends = [0.0]
        for segment in found.segments:
            assert 0 <= segment.start < segment.end <= 40.0
            ends.append(segment.start)
        assert ends == sorted(ends)


def drained(pieces: Generator[None, None, Any]) -> tuple[Any, int]:
    """Return the result of a computation in pieces, and the number of its pauses."""
    count = 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value, count
        count += 1


def cut(samples: np.ndarray) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = drained(chunks(samples))[0]
    return found


def test_hours_are_no_single_computation(transcriber: Transcriber) -> None:
    """Texts of other models have their steps between the pieces; the levels are the same."""
    minutes = np.random.default_rng(6).normal(0, 1e-6, 11 * 60 * RATE).astype(np.float32)
    level, pauses = drained(levels(minutes))
    assert pauses == 2
    parts = [
        drained(levels(minutes[at : at + 300 * RATE]))[0] for at in range(0, 660 * RATE, 300 * RATE)
    ]
    assert np.array_equal(level, np.concatenate(parts))
    silent = transcriber.sequential(
        minutes, DecodingOptions(language="en"), words=False, told=lambda new, upto: None
    )
    found, pauses = drained(silent)
    assert (found.left_out, pauses) == ([(0.0, 660.0, "inaudible")], 22)


def test_nothing_in_nothing(transcriber: Transcriber) -> None:
    assert transcriber.transcribe(np.empty(0, np.float32)).text == ""
    assert cut(np.zeros(0, np.float32)) == []
    assert cut(np.zeros(160_000, np.float32)) == []


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
def test_no_text_is_made_of_zeros(transcriber: Transcriber, chunked: bool) -> None:
    seconds = 40
    told: list[float] = []
    found = transcriber.transcribe(
        np.zeros(seconds * RATE, np.float32),
        DecodingOptions(temperatures=(0.0,)),
        chunked=chunked,
        told=lambda _, upto: told.append(upto),
    )
    assert (found.text, found.language) == ("", "")
    assert found.left_out == [(0.0, seconds, "quiet" if chunked else "inaudible")]
    assert told[-1] == seconds


def test_what_is_left_out_lies_between_what_is_said(transcriber: Transcriber) -> None:
    """A window of zeros between two of noise: its time is counted, its words are not made up."""
    noise = np.random.default_rng(5).normal(0, 0.1, 5 * RATE).astype(np.float32)
    sound = np.zeros(3 * WINDOW, np.float32)
    sound[: len(noise)] = sound[-len(noise) :] = noise
    options = DecodingOptions(language="en", temperatures=(0.0,), times=False)
    options = replace(options, most_silence=2.0, sure_silence=2.0)
    found = transcriber.transcribe(sound, options)
    assert found.left_out == [(30.0, 60.0, "inaudible")]
    assert {segment.start for segment in found.segments} == {0.0, 60.0}


def test_spans_hold_the_loud_and_leave_the_quiet() -> None:
    quiet = np.random.default_rng(0).normal(size=32_000).astype(np.float32) * 1e-3
    loud = np.random.default_rng(1).normal(size=48_000).astype(np.float32) * 0.1
    whole = np.concatenate([quiet, loud, quiet, loud, quiet])
    found = speech_spans(whole, drained(levels(whole))[0])
    assert len(found) == 2
    for (begin, end), wanted in zip(found, ((32_000, 80_000), (112_000, 160_000)), strict=True):
        assert wanted[0] - 8_000 < begin <= wanted[0]
        assert wanted[1] <= end < wanted[1] + 8_000
    long = cut(np.tile(np.concatenate([loud] * 5 + [quiet[:1600]]), 6))
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


def test_words_hold_all_tokens_once(files: WhisperFiles) -> None:
    ids = files.tokenizer.encode(" Hello, wörld: it's “me” (you).").ids
    words = split_words(files, ids, "en")
    assert [token for _, own in words for token in own] == ids
    assert [text for text, _ in words][:3] == [" Hello,", " wörld:", " it's"]


def test_words_lie_in_their_segments(transcriber: Transcriber) -> None:
    options = DecodingOptions(language="en", temperatures=(0.0,))
    found = transcriber.transcribe(sound(9), options, words=True)
    words = [word for segment in found.segments for word in segment.words]
    assert all(0 <= word.start <= word.end <= 9.1 for word in words)
    starts = [word.start for word in words]
    assert starts == sorted(starts)


def test_a_window_keeps_what_times_of_words_need_only_where_they_are_wanted(
    transcriber: Transcriber,
) -> None:
    encoder = transcriber.jobs._core.executor.worker.encoder
    options = DecodingOptions(language="en", temperatures=(0.0,))
    for words in (False, True):
        transcriber.transcribe(sound(9), options, words=words)
        (item,) = [one for one in encoder._items.values() if one.slot == max(encoder._items)]
        wanted = {layer for layer, _ in transcriber.files.alignment}
        assert set(item.keys) == (wanted if words else set())
        transcriber.jobs._core.scheduler.reset()


def test_all_that_encodings_take_is_planned(transcriber: Transcriber) -> None:
    """Blocks of every slot, and K in fp32 of windows whose words are wanted."""
    built = transcriber.jobs._on_close.__self__
    shape, memory = built.encoder, built.memory
    (group,) = memory.pool.cross
    blocks = group_bytes([group], memory.pool.block_size)
    keys = 4 * 1_500 * 128 * len({layer for layer, _ in transcriber.files.alignment})
    slots = group.blocks // 94
    assert slots > shape.bound // shape.slot == transcriber.jobs.free_windows
    assert memory.encoding_bytes > blocks + slots * keys


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
