"""The order of several models' steps on one device.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with steps in place of packets. A model's
*finish* is the time that its steps took, divided by its weight, on a clock that all models share. A
step starts at its model's finish, or at the clock if that is later, so that a model without work
saves nothing up. The model whose step starts first is next, and the clock is set to that start.

Two models that both have work get time in proportion to their weights: over any interval the parts
of their times, each divided by its weight, differ by at most one longest step of each. A model that
gets work is next, unless steps of others start at the same point of the clock.

Texts that are read token by token wait for whole steps of others. So their model has its turn
early, on credit, once others have had as long as its own latest step, or as many times that as the
heaviest of them outweighs it: no token waits for two long steps, and no model has more than its
share and half of the time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from headrace.base.errors import OptionError

LEAST_WAIT = 0.005
"""Seconds of others' steps that a stream waits in any case."""


class Arbiter:
    """The shares of models in a device's time; models are known by number."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._finish: dict[int, float] = {}
        self._weight: dict[int, float] = {}
        self._served: dict[int, int] = {}
        """Number of the latest step of each model."""
        self._waited: dict[int, float] = {}
        """Seconds of others' steps since each model's latest."""
        self._own: dict[int, float] = {}
        """Seconds of each model's latest step."""
        self._credit: set[int] = set()
        """Models whose latest step came early. No other waits for it: two streams whose early steps
        made each other due would leave a third model none."""
        self._early: set[int] = set()
        """Models of the latest order that come before their turn: then the clock stays."""
        self._steps = 0

    def join(self, model: int, weight: float = 1.0) -> None:
        """Count a model in. Raises `OptionError` unless the weight is above 0."""
        self.weigh(model, weight)
        self._finish[model], self._served[model] = self._clock, 0
        self._waited[model] = self._own[model] = 0.0

    def weigh(self, model: int, weight: float) -> None:
        """Set a model's weight. Raises `OptionError` unless it is above 0."""
        if not weight > 0:
            raise OptionError(f"weight must be above 0, not {weight:g}", param="weight")
        self._weight[model] = weight

    def leave(self, model: int) -> None:
        """Count a model out."""
        del self._finish[model], self._weight[model], self._served[model]
        del self._waited[model], self._own[model]
        self._credit.discard(model)

    def order(self, models: Iterable[int], streaming: Container[int] = ()) -> list[int]:
        """Return models that have work, the next one first: by the start of its step, then by how
        long ago it had one. `streaming`: models whose texts are read token by token, which come
        first once they have waited."""
        starts = {model: max(self._clock, self._finish[model]) for model in models}
        most = max((self._weight[model] for model in starts), default=0.0)
        first = min(starts.values(), default=0.0)
        self._early = set()
        due = set()
        for model in starts:
            borne = max(LEAST_WAIT, self._own[model] * most / self._weight[model])
            if model in streaming and self._waited[model] >= borne:
                due.add(model)
                if starts[model] > first:
                    self._early.add(model)
        return sorted(starts, key=lambda one: (one not in due, starts[one], self._served[one]))

    def begin(self, model: int, seconds: float) -> None:
        """Note that a step of this model begins, which is expected to take `seconds`."""
        start = max(self._clock, self._finish[model])
        if model in self._early:
            self._credit.add(model)
        else:
            self._credit.discard(model)
            self._clock = start
        self._finish[model] = start + seconds / self._weight[model]
        self._steps += 1
        self._served[model] = self._steps
        self._waited[model] = self._own[model] = 0.0
        self._charge(model, seconds)

    def correct(self, model: int, seconds: float) -> None:
        """Note that a step took `seconds` longer than was expected (shorter, if below 0)."""
        self._finish[model] += seconds / self._weight[model]
        self._charge(model, seconds)

    def _charge(self, model: int, seconds: float) -> None:
        self._own[model] += seconds
        if model in self._credit:
            return
        for other in self._waited:
            if other != model:
                self._waited[other] += seconds
