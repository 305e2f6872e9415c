"""Solvers: the steps from noise to a picture, with the results of diffusers' schedulers.

DDIM (Song et al. 2020, arXiv 2010.02502), PNDM's multistep form (Liu et al. 2022, arXiv
2202.09778), Euler and its ancestral form (Karras et al. 2022, arXiv
2206.00364), DPM-Solver++ 2M (Lu et al. 2022, arXiv 2211.01095) and Euler for flow matching (Esser
et al. 2024, arXiv 2403.03206). Noise levels are computed in fp64 and kept in fp32, as they keep
them; a picture is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import exp, inf, log, pi, sqrt
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..base.denoising import TIMES, NoiseSolver
from ..base.errors import UnsupportedModel

Floats = npt.NDArray[np.float32]
MULTISTEP = (
    (1.0,), (-1 / 2, 3 / 2), (5 / 12, -16 / 12, 23 / 12), (-9 / 24, 37 / 24, -59 / 24, 55 / 24),
)  # fmt: skip
"""Factors of the last outputs, the newest last, by their number (Adams and Bashforth)."""


class Schedule(NamedTuple):
    """The steps of a solver."""

    times: tuple[float, ...]
    """Time of each step, as the model reads it."""
    levels: tuple[float, ...]
    """Before each step and after the last: σ of its noise; for `ddim` and `pndm` the products of
    alphas before and after each step."""
    begin: float
    """Factor on the first noise."""


@lru_cache(maxsize=64)
def schedule(solver: NoiseSolver, steps: int) -> Schedule:
    """Compute the times and noise levels of a number of steps."""
    if solver.kind == "flow_euler":
        return _flow(solver, steps)
    whole = max(1, steps - 1) if solver.kind == "pndm" else steps
    alphas, times = _alphas(solver), _times(solver, whole)
    if solver.kind in ("ddim", "pndm"):
        before, apart = [int(time) for time in times], solver.trained // whole
        if steps > whole:  # The second step of `pndm` begins again where the first one did.
            times = [*times[:2], *times[1:]]
            before = [before[0], before[1] + apart, *before[1:]]
        last = 1.0 if solver.to_one else float(alphas[0])
        pairs = [(alphas[at], alphas[at - apart] if at >= apart else last) for at in before]
        return Schedule(tuple(times), tuple(float(one) for pair in pairs for one in pair), 1.0)
    sigmas = np.sqrt((1 - alphas) / alphas)
    found = np.interp(times, np.arange(len(sigmas)), sigmas).astype(np.float32)
    begin = float(found.max())
    if solver.kind == "dpmpp_2m":
        begin = 1.0
    elif solver.spacing == "leading":
        begin = sqrt(begin**2 + 1)
    return Schedule(tuple(times), (*map(float, found), 0.0), begin)


def verify(solver: NoiseSolver) -> None:
    """Raise `UnsupportedModel` if a time step adds no noise in fp32, or leaves nothing of a
    picture: the levels of such steps are 0 or infinite."""
    if solver.kind == "flow_euler":
        return
    alphas = _alphas(solver)
    for key, at in (("beta_start", 0), ("beta_end", -1)):
        if not 0 < alphas[at] < 1:
            raise UnsupportedModel(
                f"scheduler_config.json: by beta_start, beta_end and num_train_timesteps the time "
                f"steps leave from {alphas[0]:g} to {alphas[-1]:g} of a picture; supported: below "
                "1, above 0",
                param=key,
            )


@lru_cache(maxsize=4)
def _alphas(solver: NoiseSolver) -> Floats:
    """Return the products of what each time step leaves of a picture [trained]."""
    count = solver.trained
    if solver.betas == "squaredcos_cap_v2":

        def bar(part: float) -> float:
            return float(np.cos((part + 0.008) / 1.008 * pi / 2) ** 2)

        betas = [min(1 - bar((at + 1) / count) / bar(at / count), 0.999) for at in range(count)]
        noise = np.array(betas, np.float32)
    elif solver.betas == "scaled_linear":
        ends = sqrt(solver.first), sqrt(solver.last)
        noise = np.linspace(*ends, count).astype(np.float32) ** 2
    else:
        noise = np.linspace(solver.first, solver.last, count).astype(np.float32)
    return np.cumprod((1 - noise).astype(np.float64)).astype(np.float32)


def _times(solver: NoiseSolver, steps: int) -> list[float]:
    """Return the time of each step, the noisiest first."""
    trained, further = solver.trained, int(solver.kind == "dpmpp_2m")
    whole = solver.kind in ("ddim", "dpmpp_2m", "pndm")
    if solver.spacing == "linspace":
        times = np.linspace(0, trained - 1, steps + further)
        times = times.round() if whole else times.astype(np.float32).astype(np.float64)
        return [float(one) for one in times[::-1][:steps]]
    if solver.spacing == "leading":
        ratio = trained // (steps + further)
        return [float(at * ratio + solver.offset) for at in range(steps + further)][::-1][:steps]
    times = np.arange(trained, 0, -trained / steps).round()[:steps] - 1
    return [float(one) for one in times]


def _flow(solver: NoiseSolver, steps: int) -> Schedule:
    def shifted(part: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return solver.shift * part / (1 + (solver.shift - 1) * part)

    first, last = shifted(np.array([1.0, 1 / solver.trained])).tolist()
    sigmas = shifted(np.linspace(first, last, steps)).astype(np.float32)
    times = sigmas * np.float32(solver.trained)
    return Schedule(tuple(map(float, times)), (*map(float, sigmas), 0.0), 1.0)


class Trajectory:
    """One picture's way from noise: the picture so far, and the history that its solver keeps."""

    def __init__(self, solver: NoiseSolver, steps: int, noise: Callable[[int], Floats]) -> None:
        """`noise` draws normal numbers of the picture's shape: 0 the first, n after step n."""
        self._solver, self._steps, self._noise = solver, steps, noise
        self._schedule = schedule(solver, steps)
        self.picture: Floats = noise(0) * np.float32(self._schedule.begin)
        self.done = 0
        """Steps that are done."""
        self._before: Floats | None = None
        """Prediction of the step before, for `dpmpp_2m`."""
        self._outputs: list[Floats] = []
        """The last outputs of the model, for `pndm`."""
        self._began: Floats = self.picture

    @property
    def time(self) -> float:
        """Time of the next step."""
        return self._schedule.times[self.done]

    def given(self) -> Floats:
        """Return the picture as the model reads it."""
        if not self._solver.kind.startswith("euler"):
            return self.picture
        return self.picture / np.float32(sqrt(self._schedule.levels[self.done] ** 2 + 1))

    def advance(self, output: Floats) -> None:
        """Do a step with the model's output, of the picture's shape."""
        step = {
            "ddim": self._ddim,
            "dpmpp_2m": self._dpmpp,
            "pndm": self._pndm,
            "flow_euler": self._flow_euler,
        }.get(self._solver.kind, self._euler)
        self.picture = step(output).astype(np.float32, copy=False)
        self.done += 1

    def _ddim(self, output: Floats) -> Floats:
        now, after = self._schedule.levels[2 * self.done : 2 * self.done + 2]
        signal, noise, x = np.float32(sqrt(now)), np.float32(sqrt(1 - now)), self.picture
        predicts, whole, apart = self._solver.predicts, cast(Any, output), cast(Any, output)
        if predicts == "epsilon":
            whole = (x - noise * output) / signal
        elif predicts == "sample":
            apart = (x - signal * output) / noise
        else:
            whole, apart = signal * x - noise * output, signal * output + noise * x
        if self._solver.clip:
            whole = np.clip(whole, -self._solver.clip, self._solver.clip)
        found: Floats = np.float32(sqrt(after)) * whole + np.float32(sqrt(1 - after)) * apart
        return found

    def _pndm(self, output: Floats) -> Floats:
        now, after = self._schedule.levels[2 * self.done : 2 * self.done + 2]
        x, kept = self.picture, [*self._outputs, output][-4:]
        if self.done == 1:  # The first step again, with what its end has shown.
            x, kept = self._began, self._outputs
            mixed: Any = (output + kept[0]) / np.float32(2)
        else:
            factors = np.array(MULTISTEP[len(kept) - 1], np.float32)
            mixed = np.tensordot(factors, np.stack(kept), 1)
        self._outputs = kept
        if self._solver.predicts == "v_prediction":
            mixed = np.float32(sqrt(now)) * mixed + np.float32(sqrt(1 - now)) * x
        by = (after - now) / (now * sqrt(1 - after) + sqrt(now * (1 - now) * after))
        found: Floats = np.float32(sqrt(after / now)) * x - np.float32(by) * mixed
        return found

    def _euler(self, output: Floats) -> Floats:
        now, after = self._schedule.levels[self.done : self.done + 2]
        whole: Any = self.picture - np.float32(now) * output
        if self._solver.predicts == "v_prediction":
            far = now**2 + 1
            whole = self.picture / np.float32(far) - np.float32(now / sqrt(far)) * output
        slope = (self.picture - whole) / np.float32(now)
        if self._solver.kind == "euler":
            found: Floats = self.picture + slope * np.float32(after - now)
            return found
        up = sqrt(after**2 * (now**2 - after**2) / now**2)
        down = sqrt(after**2 - up**2)
        moved: Floats = self.picture + slope * np.float32(down - now)
        moved += self._noise(self.done + 1) * np.float32(up)
        return moved

    def _flow_euler(self, output: Floats) -> Floats:
        now, after = self._schedule.levels[self.done : self.done + 2]
        found: Floats = self.picture + np.float32(after - now) * output
        return found

    def _dpmpp(self, output: Floats) -> Floats:
        levels, at = self._schedule.levels, self.done
        (_, signal, noise), (far, to_signal, to_noise) = map(_parts, levels[at : at + 2])
        whole: Any = output
        if self._solver.predicts == "epsilon":
            whole = (self.picture - np.float32(noise) * output) / np.float32(signal)
        elif self._solver.predicts == "v_prediction":
            whole = np.float32(signal) * self.picture - np.float32(noise) * output
        before, self._before = self._before, whole
        kept = 1 - exp(_parts(levels[at])[0] - far)
        moved: Floats = np.float32(to_noise / noise) * self.picture
        moved += np.float32(to_signal * kept) * whole
        # No noise is left after the last step, which is of first order then in any case.
        if before is None or at == self._steps - 1:
            return moved
        ratio = (_parts(levels[at])[0] - _parts(levels[at - 1])[0]) / (far - _parts(levels[at])[0])
        moved += np.float32(0.5 * to_signal * kept) * ((whole - before) / np.float32(ratio))
        return moved


def _parts(sigma: float) -> tuple[float, float, float]:
    """Return (log of signal over noise, signal, noise) of a noise level."""
    signal = 1 / sqrt(sigma**2 + 1)
    return (-log(sigma) if sigma > 0 else inf), signal, sigma * signal


def time_features(time: float, late: int, count: int = TIMES) -> Floats:
    """Return cosines, then sines, of a time [count], in fp32 as diffusers computes them with a
    `downscale_freq_shift` of `late`."""
    half = count // 2
    exponents = (
        np.float32(-log(10_000)) * np.arange(half, dtype=np.float32) / np.float32(half - late)
    )
    turns = np.float32(time) * np.exp(exponents)
    return np.concatenate([np.cos(turns), np.sin(turns)])


def normal(seed: int, choice: int, number: int, shape: tuple[int, ...]) -> Floats:
    """Draw normal numbers: numpy's `Philox` with the key (seed, picture's number) and the counter's
    third word `number` (0: the first noise), `standard_normal` in fp32."""
    bits = np.random.Philox(counter=number << 128, key=choice << 64 | seed)
    found: Floats = np.random.Generator(bits).standard_normal(shape, np.float32)
    return found
