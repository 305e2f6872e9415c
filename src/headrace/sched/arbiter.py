"""The order of several models' steps on one device.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with steps in place of packets. A model's
*finish* is the time that its steps took, divided by its weight, on a clock that all models share. A
step starts at its model's finish, or at the clock if that is later, so that a model without work
saves nothing up. The model whose step starts first is next, and the clock is set to that start.

Two models that both have work get time in proportion to their weights: over any interval the parts
of their times, each divided by its weight, differ by at most one longest step of each. A model that
gets work is next, unless steps of others start at the same point of the clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.base.errors import OptionError


class Arbiter:
    """The shares of models in a device's time; models are known by number."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._finish: dict[int, float] = {}
        self._weight: dict[int, float] = {}
        self._served: dict[int, int] = {}
        """Number of the latest step of each model."""
        self._steps = 0

    def join(self, model: int, weight: float = 1.0) -> None:
        """Count a model in. Raises `OptionError` unless the weight is above 0."""
        self.weigh(model, weight)
        self._finish[model], self._served[model] = self._clock, 0

    def weigh(self, model: int, weight: float) -> None:
        """Set a model's weight. Raises `OptionError` unless it is above 0."""
        if not weight > 0:
            raise OptionError(f"weight must be above 0, not {weight:g}", param="weight")
        self._weight[model] = weight

    def leave(self, model: int) -> None:
        """Count a model out."""
        del self._finish[model], self._weight[model], self._served[model]

    def order(self, models: Iterable[int]) -> list[int]:
        """Return models that have work, the next one first: by the start of its step, then by how
        long ago it had one."""
        clock, finish, served = self._clock, self._finish, self._served
        return sorted(models, key=lambda model: (max(clock, finish[model]), served[model]))

    def begin(self, model: int, seconds: float) -> None:
        """Note that a step of this model begins, which is expected to take `seconds`."""
        self._clock = max(self._clock, self._finish[model])
        self._finish[model] = self._clock + seconds / self._weight[model]
        self._steps += 1
        self._served[model] = self._steps

    def correct(self, model: int, seconds: float) -> None:
        """Note that a step took `seconds` longer than was expected (shorter, if below 0)."""
        self._finish[model] += seconds / self._weight[model]
