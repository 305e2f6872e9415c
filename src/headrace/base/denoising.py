"""Denoising as all parts see it: a denoiser's shape, its solver, and a picture's parameters."""

from __future__ import annotations

from typing import Literal, NamedTuple

SolverKind = Literal["ddim", "euler", "euler_ancestral", "dpmpp_2m", "flow_euler"]
Betas = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Prediction = Literal["epsilon", "sample", "v_prediction"]
Spacing = Literal["leading", "linspace", "trailing"]
MOST_STEPS = 1000
"""Maximum steps of a picture, if its solver's training had as many."""
MOST_GUIDANCE = 100.0
MOST_PICTURES = 10
"""Maximum pictures of one request."""
MOST_PARTIAL = 3
"""Maximum pictures that are sent before the last one."""
TIMES = 256
"""Features of a time step."""


class NoiseSolver(NamedTuple):
    """The way from noise to a picture, by the names and defaults of diffusers' schedulers."""

    kind: SolverKind
    trained: int = 1000
    """Time steps of the training."""
    betas: Betas = "linear"
    first: float = 0.0001
    last: float = 0.02
    """Noise that the first and the last time step add."""
    predicts: Prediction = "epsilon"
    """Output of the model; that of `flow_euler` is a velocity."""
    spacing: Spacing = "linspace"
    offset: int = 0
    """Offset of each time step, with spacing `leading`."""
    clip: float = 0.0
    """Largest number of a predicted picture; 0: it is not clipped."""
    to_one: bool = True
    """Whether the last step of `ddim` leaves no noise."""
    shift: float = 1.0
    """Shift of `flow_euler`'s noise levels (Esser et al. 2024)."""

    @property
    def most(self) -> int:
        """Maximum steps of a picture, each at a time step of its own."""
        return max(1, min(MOST_STEPS, self.trained - self.offset - (self.kind == "dpmpp_2m")))


class Denoiser(NamedTuple):
    """A class-conditional diffusion transformer (Peebles and Xie 2022, arXiv 2212.09748)."""

    channels: int
    size: int
    """Rows and columns of a picture."""
    patch: int
    """Rows and columns of a patch, which is a token."""
    classes: int
    """Number of classes; as a class, this number stands for none."""
    outputs: int
    """Output channels of the model: those of a picture, or twice as many with variances."""
    solver: NoiseSolver

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return (self.size // self.patch) ** 2

    @property
    def numbers(self) -> int:
        """Numbers of a picture."""
        return self.channels * self.size**2


class PictureWish(NamedTuple):
    """Parameters of a requested picture, verified against its denoiser."""

    label: int
    steps: int
    guidance: float
    """Factor on the class's difference (Ho and Salimans 2022); at most 1: no guidance."""
    choice: int = 0
    """Number of the picture in its request: part of its random stream."""
    partial: int = 0
    """Pictures that are reported before the last, at equal distances."""

    @property
    def entries(self) -> int:
        """Entries of a step: with the class, and without it if there is guidance."""
        return 2 if self.guidance > 1 else 1

    def reports(self, done: int) -> bool:
        """Return whether the picture after `done` steps is reported."""
        if done == self.steps:
            return True
        places = [self.steps * each // (self.partial + 1) for each in range(1, self.partial + 1)]
        return done in places


class GivenSpec(NamedTuple):
    """Input numbers of a step: patches of pictures [N, ·], or features of times [R, ·]."""

    of: Literal["patches", "times"]
