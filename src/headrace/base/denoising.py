"""Denoising as all parts see it: the shapes of a denoiser, its text encoder and its decoder, its
solver, and a picture's parameters."""

from __future__ import annotations

from math import isqrt
from typing import Literal, NamedTuple

SolverKind = Literal["ddim", "euler", "euler_ancestral", "dpmpp_2m", "pndm", "flow_euler"]
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
    """Whether the last step of `ddim` and `pndm` leaves no noise."""
    shift: float = 1.0
    """Shift of `flow_euler`'s noise levels (Esser et al. 2024)."""

    @property
    def most(self) -> int:
        """Maximum steps of a picture, each at a time step of its own."""
        return max(1, min(MOST_STEPS, self.trained - self.offset - (self.kind == "dpmpp_2m")))

    def evaluations(self, steps: int) -> int:
        """Return how often the model runs for a picture of so many steps: `pndm` does its second
        step twice."""
        return steps + (self.kind == "pndm" and steps > 1)


class Decoder(NamedTuple):
    """The decoder of a pipeline: it makes pictures of latents (Rombach et al. 2022)."""

    channels: int
    widths: tuple[int, ...]
    """Channels at each size of the picture, the smallest first; each is twice the one before."""
    layers: int
    """Residual blocks at each size."""
    groups: int
    attends: bool
    """Whether places of the smallest size see each other."""
    mixes: bool
    """Whether a convolution of latents alone comes first."""
    scaling: float
    """Latents are divided by it, and `shift` is added."""
    shift: float

    @property
    def slices(self) -> int:
        """Parts of its work, of which a step of a picture computes one: a residual block or an
        attention, and what makes pixels of the last."""
        return 3 + self.attends + len(self.widths) * self.layers

    @property
    def factor(self) -> int:
        """Rows and columns of a picture for each of its latent's."""
        return 1 << (len(self.widths) - 1)


class TextEncoder(NamedTuple):
    """The text encoder of a pipeline: T5's (Raffel et al. 2019, arXiv 1910.10683)."""

    vocabulary: int
    hidden: int
    heads: int
    size: int
    """Numbers of a head."""
    inner: int
    layers: int
    eps: float
    buckets: int
    distance: int
    """Distances of keys fall into `buckets`, all from `distance` on into the last of each side."""
    activation: Literal["gelu_tanh", "relu"]
    gated: bool
    most: int
    """Tokens of a text."""
    pad: None = None

    @property
    def slices(self) -> int:
        """Parts of its work, of which a step of a picture computes one: each layer's attention,
        each feed-forward, and the last norm."""
        return 2 * self.layers + 1

    @property
    def reach(self) -> int:
        """`AttentionSpec.reach`."""
        return -(-self.most // 16) * 16


class CausalEncoder(NamedTuple):
    """The text encoder of a pipeline: CLIP's (Radford et al. 2021, arXiv 2103.00020)."""

    vocabulary: int
    hidden: int
    heads: int
    inner: int
    layers: int
    eps: float
    activation: Literal["quick_gelu", "gelu"]
    most: int
    """Tokens of a text: each text is padded to as many."""
    pad: int
    """Token after a text's end."""

    @property
    def slices(self) -> int:
        """Parts of its work: see `TextEncoder.slices`; the first is the tokens' places."""
        return 2 * self.layers + 2

    @property
    def reach(self) -> int:
        """`AttentionSpec.reach`."""
        return -(-self.most // 16) * 16


class UnetLevel(NamedTuple):
    """A size of the pictures inside a UNet, on the way down or up."""

    width: int
    """Channels."""
    layers: int
    """Residual blocks."""
    depth: int
    """Transformer layers after each; 0: none."""
    heads: int


class Unet(NamedTuple):
    """A UNet whose places attend to each other and to texts (Rombach et al. 2022)."""

    down: tuple[UnetLevel, ...]
    """From the picture's size on; each next level has half the lines and columns, rounded up."""
    up: tuple[UnetLevel, ...]
    """From the smallest size on."""
    middle: UnetLevel | None
    """Two residual blocks with transformer layers between them; None: nothing."""
    groups: int
    eps: float

    @property
    def width(self) -> int:
        """Channels of the largest size, and features of a time step."""
        return self.down[0].width


Phase = tuple[Literal["text", "step", "slice"], int]
"""Kind of work that a picture's row does in a step, and its number among those of its kind."""


class Denoiser(NamedTuple):
    """A diffusion transformer that is conditioned on classes (Peebles and Xie 2022, arXiv
    2212.09748) or on texts (Chen et al. 2023, arXiv 2310.00426), or a UNet."""

    channels: int
    size: int
    """Rows and columns of a picture."""
    patch: int
    """Rows and columns of a patch, which is a token."""
    classes: int
    """Number of classes; as a class, this number stands for none. 0: it is conditioned on texts."""
    outputs: int
    """Output channels of the model: those of a picture, or twice as many with variances."""
    solver: NoiseSolver
    decoder: Decoder | None = None
    """None: latents are the pictures."""
    t5: TextEncoder | None = None
    stretch: float = 1.0
    """Factor between the places of patches, and what its table of positions was trained for."""
    unet: Unet | None = None
    """None: it is a transformer."""
    clip: CausalEncoder | None = None

    @property
    def reads(self) -> TextEncoder | CausalEncoder | None:
        """Encoder of its texts; None: it is conditioned on classes."""
        return self.t5 or self.clip

    @property
    def features(self) -> int:
        """Features of a time step."""
        return TIMES if self.unet is None else self.unet.width

    @property
    def texts(self) -> int:
        """Most tokens of a text; 0: it reads none."""
        return 0 if self.reads is None else self.reads.most

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of a finished picture."""
        if self.decoder is None:
            return self.channels, self.size, self.size
        side = self.size * self.decoder.factor
        return self.decoder.channels, side, side

    def phases(self, wish: PictureWish) -> list[Phase]:
        """List the work of a picture: its texts are encoded slice by slice, its steps done, and
        each picture that is reported is decoded slice by slice."""
        encoded = 0 if self.reads is None else len(wish.texts) * self.reads.slices
        found: list[Phase] = [("text", at) for at in range(encoded)]
        slices = 0 if self.decoder is None else self.decoder.slices
        for step in range(1, wish.steps + 1):
            found.append(("step", step))
            if wish.reports(step):
                found += [("slice", at) for at in range(slices)]
        return found

    def proof(self) -> PictureWish:
        """Return the wish of a first picture, which goes through all parts."""
        return PictureWish(0, 1, 2.0, texts=((0,), (0,)) if self.texts else ())

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return (self.size // self.patch) ** 2


class PictureWish(NamedTuple):
    """Parameters of a requested picture, verified against its denoiser."""

    label: int
    steps: int
    """Runs of the model: `NoiseSolver.evaluations`."""
    guidance: float
    """Factor on the class's difference (Ho and Salimans 2022); at most 1: no guidance."""
    choice: int = 0
    """Number of the picture in its request: part of its random stream."""
    partial: int = 0
    """Pictures that are reported before the last, at equal distances."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Tokens of the text of each entry: the prompt, then what guidance leads away from."""

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
    """Input numbers of a step: patches of pictures [N, ·], features of times [R, ·], or rows of
    encoded texts [T, ·]."""

    of: Literal["patches", "times", "texts"]


class PictureConvSpec(NamedTuple):
    """A convolution of pictures whose rows are their places, line by line: a product with `side`²
    rows around each place, side by side, with zeros outside."""

    lines: int
    columns: int
    """Size of the pictures that are read."""
    side: int = 3
    up: int = 1
    """Times that each line and column is repeated before."""
    stride: int = 1
    """Lines and columns from one place to the next."""
    cut: int = 0
    """Lines and columns that are left out at the end of those repeated."""

    @property
    def made(self) -> tuple[int, int]:
        """Lines and columns of the result."""
        sizes = (each * self.up - self.cut for each in (self.lines, self.columns))
        lines, columns = (-(-each // self.stride) for each in sizes)
        return lines, columns


class GroupNormSpec(NamedTuple):
    """A norm of groups of columns over all rows of an entry (Wu and He 2018), then perhaps SiLU."""

    groups: int
    eps: float
    silu: bool = False


STRIP = 512
"""Rows of a convolution's strip, at most: side² times as wide, they lie in the caches."""


def strip_of(rows: int) -> int:
    """Return the rows of the strips of results whose rows are multiples of `rows`."""
    found = [one for at in range(1, isqrt(rows) + 1) if not rows % at for one in (at, rows // at)]
    return max(one for one in found if one <= STRIP)
