"""Counts of a transcription engine, for `/metrics`. Times are in seconds, also those of audio."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ...base.request import StepStats

SECONDS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class HearingMetrics:
    """Instruments in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()

        def named(kind: type, name: str, words: str, labels: tuple[str, ...] = (), **more: object):  # type: ignore[no-untyped-def]
            made = kind(
                f"headrace_{name}", words, ["model_name", *labels], registry=self.registry, **more
            )
            return made if labels else made.labels(model)

        self._model = model
        self._sounds = named(
            Counter,
            "sounds",
            "Sounds by how they ended: heard, cancelled, or the code of an error.",
            ("outcome",),
        )
        self.audio = named(Counter, "audio_seconds", "Seconds of audio that were heard to the end.")
        self.busy = named(Gauge, "hearing_busy_seconds", "Seconds that the process computed.")
        self._device, self._predicted = (
            Counter(
                f"headrace:{one}_seconds", words, ["model_name"], registry=self.registry
            ).labels(model)
            for one, words in (
                ("device", "Time of steps on the device."),
                ("predicted", "Time that the roofline expected of the steps."),
            )
        )
        self.rtfx = named(
            Gauge, "rtfx", "Seconds of audio heard for each second that the process computed."
        )
        self.running = named(Gauge, "sounds_running", "Sounds that are being heard.")
        self.waiting = named(Gauge, "sounds_waiting", "Sounds that wait for their turn.")
        self.up = named(Gauge, "hearing_up", "1 while the engine is ready.")
        self.restarts = named(Counter, "hearing_restarts", "Processes begun after a failure.")
        self.failures = named(Counter, "hearing_failures", "Failures by kind.", ("kind",))
        for kind in ("death", "hang", "start", "task"):
            self.failures.labels(model, kind)
        self.first = named(
            Histogram,
            "first_segment_seconds",
            "From a sound's submission to its first segment.",
            buckets=SECONDS,
        )
        self.whole = named(
            Histogram, "sound_seconds", "From a sound's submission to its end.", buckets=SECONDS
        )

        self.sessions = named(Gauge, "live_sessions", "Sessions over a websocket.")
        self.partial = named(
            Histogram,
            "first_partial_seconds",
            "From the begin of speech, as it is noticed, to its first words.",
            buckets=SECONDS,
        )
        self.rewritten = named(
            Counter, "words_rewritten", "Words given out live that the final text does not have."
        )

    def stepped(self, stats: StepStats) -> None:
        """Count a step beside those of texts: predicted next to measured time."""
        self._device.inc(stats.seconds)
        self._predicted.inc(stats.predicted_seconds)

    def ended(self, outcome: str) -> None:
        self._sounds.labels(self._model, outcome).inc()

    def failed(self, kind: str) -> None:
        self.failures.labels(self._model, kind).inc()
