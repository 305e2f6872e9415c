"""Steady state of one engine under load: the means and tails that a plan starts from.

An engine with a batch of B sequences decodes a step in t_d. A prompt has P tokens that are not in
the cache. It goes through in n = ceil(P / q) chunks of q tokens next to the decoding batch, in
steps of t_m. It costs the batch t_p = P / q · (t_m - t_d). So at R requests a second with O output
tokens each, R ≤ 1 / (t_p + O · t_d / B); `load` of this is used. ρ = R · t_p is the share of
prefill.

TPOT ≈ t_d / (1 - ρ): a token waits for the prefills that come meanwhile.
ITL p99 ≈ t_m: more than one in a hundred tokens comes from a mixed step.
TTFT p99 ≈ t_d + n · t_m · (1 + ln(100) · ρ / (2 · (1 - ρ))): the step that runs, and prompts before
it as in a queue with fixed service times.

With drafts t_d is a token's share of a step that verifies k of each sequence, with the best k: t(B
· (1 + k)) / (1 + a_1 + … + a_k), where a_i is the share of steps that accept the i-th draft.

With pools the prefill engine has only the prompt (t_p = its steps, without a batch), and the decode
engine never sees one: TPOT = ITL = t_d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base.errors import DoesNotFit
from .composition import compose, decode_step, prefill_step, verify_step
from .counts import Case, device_bytes, kv_share
from .formats import kv_bytes_of_all
from .hardware import Hardware
from .memory import USABLE, plan_memory
from .step import StepModel

MAX_BATCH = 1024
MAX_STEP_TOKENS = 8192
TAIL = math.log(100)


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand, in means."""

    rate: float
    """Requests a second."""
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """Prompt tokens that are expected from the prefix cache."""
    accepted: tuple[float, ...] = ()
    """Share of steps that accept at least 1, 2, … drafts of a sequence, if drafts are verified."""

    @property
    def fresh(self) -> int:
        return max(1, self.input_tokens - self.shared_tokens)


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits in seconds, meant for the 99th percentile."""

    ttft: float
    tpot: float
    itl: float | None = None

    def miss(self, ttft: float, tpot: float, itl: float) -> float:
        """Return the largest ratio of the three to its limit; at most 1: kept."""
        return max(ttft / self.ttft, tpot / self.tpot, itl / self.itl if self.itl else 0.0)


@dataclass(frozen=True, slots=True)
class State:
    """Performance of one engine at one setting."""

    batch: int
    step_tokens: int
    rate: float
    """Requests a second of one engine."""
    ttft: float
    tpot: float
    itl: float


class Engine:
    """One engine of a layout, with the times of its steps remembered."""

    def __init__(self, case: Case, hardware: Hardware, demand: Demand) -> None:
        self.case, self.hardware, self.demand = case, hardware, demand
        self._model = StepModel(case, hardware)
        self._context = demand.input_tokens + demand.output_tokens // 2
        self._decodes: dict[int, float] = {}
        self._mixed: dict[tuple[int, int], float] = {}

    def decode(self, batch: int) -> float:
        """Return the seconds of a decode step, with the server's overhead, per token."""
        if batch not in self._decodes:
            step = decode_step(self.case.arch, batch, self._context)
            around = self.hardware.loop.around(batch)
            each, tokens = around + self._model.seconds(step), 1.0
            for drafts, chance in enumerate(self.demand.accepted, 1):
                tokens += chance
                step = verify_step(self.case.arch, batch, self._context, drafts)
                each = min(each, (around + self._model.seconds(step)) / tokens)
            self._decodes[batch] = each
        return self._decodes[batch]

    def mixed(self, batch: int, chunk: int) -> float:
        """Return the seconds of a step that also has a chunk, from the middle of the prompt."""
        if (found := self._mixed.get((batch, chunk))) is not None:
            return found
        fresh = self.demand.fresh
        start = self.demand.shared_tokens + (fresh - chunk) // 2
        starts, counts = [self._context] * batch + [start], [1] * batch + [chunk]
        around = self.hardware.loop.around(batch + 1)
        seconds = around + self._model.seconds(compose(self.case.arch, starts, counts))
        self._mixed[batch, chunk] = seconds
        return seconds

    def prompt(self, step_tokens: int) -> float:
        """Return the seconds of a whole prompt without a batch."""
        chunk = min(self.demand.fresh, step_tokens)
        chunks = math.ceil(self.demand.fresh / chunk)
        start = self.demand.shared_tokens + (self.demand.fresh - chunk) // 2
        return chunks * self._model.seconds(prefill_step(self.case.arch, [chunk], start))

    def together(self, batch: int, step_tokens: int, load: float) -> State | None:
        """Compute prefill and decode in one engine; None if no chunk fits with the batch."""
        room = step_tokens - batch
        if room < 16:
            return None
        chunk = min(self.demand.fresh, room)
        chunks = math.ceil(self.demand.fresh / chunk)
        decode, mixed = self.decode(batch), self.mixed(batch, chunk)
        prefill = self.demand.fresh / chunk * max(0.0, mixed - decode)
        rate = load / (prefill + self.demand.output_tokens * decode / batch)
        busy = rate * prefill
        ttft = decode + chunks * mixed * (1 + TAIL * busy / (2 * (1 - busy)))
        return State(batch, step_tokens, rate, ttft, decode / (1 - busy), mixed)

    def prefill_only(self, step_tokens: int, load: float) -> State:
        """Compute a prefill pool's engine; the KV then travels to the decode pool."""
        seconds = self.prompt(step_tokens)
        wait = 1 + TAIL * load / (2 * (1 - load))
        return State(1, step_tokens, load / seconds, seconds * wait, 0.0, 0.0)

    def decode_only(self, batch: int, load: float) -> State:
        """Compute a decode pool's engine."""
        seconds = self.decode(batch)
        rate = load * batch / (self.demand.output_tokens * seconds)
        return State(batch, MAX_STEP_TOKENS, rate, 0.0, seconds, seconds)

    def transfer(self) -> float:
        """Return the seconds in which a prompt's KV goes over the link."""
        link = self.hardware.link_bandwidth
        size = self.demand.input_tokens * kv_bytes_of_all(self.case.arch, self.case.kv_dtype)
        return size / (link * self.hardware.efficiency.network)

    def room(self) -> int:
        """Return the sequences of the demanded length that one engine holds, at most `MAX_BATCH`.

        Raises `DoesNotFit` if not even one does.
        """
        length = self.demand.input_tokens + self.demand.output_tokens
        weights, memory = device_bytes(self.case), self.hardware.memory
        device = "cpu" if self.hardware.kind == "cpu" else "cuda"
        if weights > USABLE[device] * memory:
            raise DoesNotFit(
                f"the weights take {weights / 1e9:.0f} GB of a device's {memory / 1e9:.0f} GB, of "
                f"which {USABLE[device]:.0%} are planned"
            )
        try:
            plan = plan_memory(
                self.case.arch,
                weight_bytes=weights,
                available=memory,
                rows=MAX_BATCH,
                step_tokens=MAX_STEP_TOKENS,
                max_context=length,
                kv_dtype=self.case.kv_dtype,
                dtype=self.case.dtype,
                device=device,
                kv_share=kv_share(self.case),
            )
        except DoesNotFit:
            raise DoesNotFit(
                f"beside {weights / 1e9:.0f} GB of weights {memory / 1e9:.0f} GB have no "
                f"room for {length:,} tokens of KV and the activations"
            ) from None
        held = min(plan.rows, int(plan.full_sequences))
        if held < 1:
            raise DoesNotFit(f"no room for one sequence of {length:,} tokens")
        return held
