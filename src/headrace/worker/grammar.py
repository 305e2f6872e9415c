"""Rows with grammar-constrained answers: a matcher for each, and the masks that it puts on logits.

A matcher follows the tokens of its sequence and tells which token may come next; llguidance does
the matching. Waits are as short as possible. A grammar is compiled in a thread (`GrammarCompiler`).
Once a step has its tokens, the masks of the next one are computed while the engine books the
result, plans and runs the forward pass (`GrammarMasks`).

A grammar holds for the sequence's life: after it is complete only the ids that end a sequence are
left. After a preemption a new matcher is made and fed the generated tokens. An error in a matcher
ends its own sequence (`StepResult.failures`).

Drafts have a mask for each position: the matcher walks over them and comes back. They are cut where
the grammar would not follow, since no such token can be drawn.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.step import Admission
from ..kernels.arrays import Array
from ..kernels.program import LOGITS
from .arrays import like
from .compile_queue import CompileQueue
from .features import Arrived, Indices, RowFeature

if TYPE_CHECKING:
    import torch

MakeTokenizer = Callable[[], Any]
"""Function that makes the model's `llguidance.LLTokenizer`; called once, when the first grammar
comes."""

DEADLINE = 30.0
"""Seconds after which waiting for a grammar's compilation is given up."""
KEPT = 64
"""Compiled grammars that are remembered, the latest used ones."""
LIMITS: Mapping[str, int] = {"max_lexer_states": 50_000}
"""Limits of one matcher that differ from llguidance's defaults: a lexer state takes one to two
kilobytes, so a row stays below 100 MB."""


DEAD_END = "no token of the model can continue"
SHARED_FROM = 12
"""Rows from which the matchers of a step are shared among llguidance's threads. One takes about 0.1
ms, so a few are done before the threads are awake, above all on busy cores."""
_MINUS_INFINITY = np.float32(-np.inf).view(np.int32)


class GrammarFault(Exception):
    """Error of a grammar that cannot be compiled, or a matcher that gave up; half a sentence for
    the user.

    It leaves this module only as text.
    """


class GrammarCompiler:
    """Compiler of grammars in threads, and cache by source. May be called from any thread."""

    def __init__(
        self, make_tokenizer: MakeTokenizer, *, limits: Mapping[str, int] = LIMITS
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._limits: dict[str, Any] = dict(limits)
        self._tokenizer: Any = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[Any]] = OrderedDict()
        self._since: dict[str, float] = {}
        """Time of the first request, by grammar that is not compiled yet."""
        self._told: set[str] = set()
        """Grammars with a callback for the end of their compilation."""
        self._queue = CompileQueue(self._compile)

    def prepare(self, source: str, owner: str = "", done: Callable[[], None] | None = None) -> bool:
        """Start to compile, unless that was started; return whether it is done (or has failed).

        A caller that waits must ask again: a grammar without a waiting caller is not compiled.
        `done` is called, from any thread, when it is done or has failed.
        """
        coming = self._future(source, owner)
        if coming.done():
            return True
        if done is not None and source not in self._told:
            self._told.add(source)
            coming.add_done_callback(lambda _: self._tell(source, done))
        self._queue.ask(source)
        return self._late(source)

    def _tell(self, source: str, done: Callable[[], None]) -> None:
        self._told.discard(source)
        done()

    def matcher(self, source: str) -> Any:
        """Return a matcher at the beginning; wait for the grammar. Raises `GrammarFault`."""
        coming = self._future(source, "")
        if not coming.done() and self._late(source):
            raise GrammarFault(f"it takes longer than {DEADLINE:.0f} seconds to compile")
        # A copy: it starts with the first one's findings about the grammar.
        return coming.result().deep_copy()

    @property
    def words(self) -> int:
        """Return the length of a mask in 32-bit words; known once there is a matcher."""
        return -(-int(self._tokenizer.vocab_size) // 32)

    def close(self) -> None:
        self._queue.close()

    def _future(self, source: str, owner: str) -> Future[Any]:
        with self._lock:
            found = self._known.get(source)
            if found is None or found.cancelled():
                self._since[source] = time.monotonic()
                found = self._known[source] = self._queue.submit(source, owner)
                found.add_done_callback(lambda _: self._since.pop(source, None))
                self._trim()
            else:
                self._known.move_to_end(source)
            return found

    def _trim(self) -> None:
        """Forget the oldest compiled grammars; those still compiling are kept for their callers."""
        done = [source for source, future in self._known.items() if future.done()]
        for source in done[: max(0, len(done) - KEPT)]:
            del self._known[source]

    def _late(self, source: str) -> bool:
        since = self._since.get(source)
        return since is not None and time.monotonic() - since > DEADLINE

    def _compile(self, source: str) -> Any:
        # Local: a machine without constrained answers needs no llguidance.
        from llguidance import LLMatcher, LLParserLimits

        with self._making:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._make_tokenizer()
                except Exception as error:
                    raise GrammarFault(f"the model's tokenizer serves no grammars: {error}") from (
                        error
                    )
        limits = LLParserLimits(**self._limits, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        check(matcher)
        matcher.compute_bitmask()  # Its tables for the first token, once for all copies.
        check(matcher)
        return matcher


class Mask(NamedTuple):
    """Allowed tokens at one position."""

    allowed: npt.NDArray[np.int32]
    """Bits [V] in 32-bit words: bit i of the whole tells whether token i is allowed."""
    bias: npt.NDArray[np.float32] | None
    """Bias [V]: 0 where allowed, else -inf; made if logits lie on the host."""


class Form:
    """Grammar state of one row."""

    __slots__ = ("coming", "fault", "masks", "matcher", "passed")

    def __init__(self) -> None:
        self.matcher: Any = None
        self.masks: list[Mask] = []
        """Masks of the next token, then of the token after each announced draft, as far as the
        grammar follows."""
        self.fault: str | None = None
        """Reason why the sequence has to end; the row is not masked any more."""
        self.coming: Future[None] | None = None
        """Job that computes the masks."""
        self.passed = 0
        """Positions of the next step that are not drawn, since the grammar forces their tokens."""

    def wait(self) -> None:
        """Wait until its matcher and its masks are at rest."""
        assert self.coming is not None
        self.coming.result()

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, as `speculate.Forcing` has it."""
        self.wait()
        if self.fault is not None or self.matcher.is_stopped():
            return ()
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens


class GrammarMasks(RowFeature):
    """Grammars of all rows that have one. Calls come from the worker's thread."""

    want = LOGITS

    def __init__(self, compiler: GrammarCompiler, vocabulary: int, *, on_host: bool) -> None:
        """Start without rows. `on_host`: logits lie in host memory."""
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._on_host = on_host
        self._forms: dict[int, Form] = {}
        self._threads = ThreadPoolExecutor(2, "headrace-masks")
        self._executor: Any = None

    def admit(self, admission: Admission) -> bool:
        """Begin to make the row's matcher and its first mask."""
        grammar = admission.spec.grammar
        if grammar is None:
            return False
        form = self._forms[admission.row] = Form()
        generated = admission.tokens[admission.prompt_length :]
        form.coming = self._threads.submit(self._begin, form, grammar, generated)
        return True

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._forms.pop(row, None)

    def form(self, row: int) -> Form | None:
        """Return a row's grammar state; None if it has no grammar."""
        return self._forms.get(row)

    def announce(self, row: int, drafts: Sequence[int]) -> int:
        """Begin to compute the masks after each draft of a row whose tokens were all taken. Returns
        the number of drafts that the grammar allows; a draft after those can never be drawn."""
        form = self._forms[row]
        form.wait()
        if form.fault is not None or not drafts or form.matcher.is_stopped():
            return 0
        count = 0

        def work() -> None:
            nonlocal count
            count = form.matcher.validate_tokens(list(drafts))

        _guarded([form], work)
        if count:
            form.coming = self._threads.submit(self._walk, form, list(drafts[:count]))
        return count

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        """Set the logits of forbidden tokens to -inf. A drafting row appears here once for each of
        its positions, in order."""
        indices: list[int] = []
        masks: list[Mask] = []
        last, depth = -1, 0
        for place, row in enumerate(rows.tolist()):
            form = self._forms.get(row)
            if form is not None:
                depth = depth + 1 if row == last else form.passed
                last, form.passed = row, 0
                form.wait()
                if form.fault is None and depth < len(form.masks):
                    indices.append(place)
                    masks.append(form.masks[depth])
        if self._on_host:
            # In numpy even for a tensor: torch would share each row among threads, which the
            # kernels' thread pool keeps busy. A sum, since setting by a mask mispredicts its
            # branches (30 compared with 1,600 µs).
            host = np.asarray(logits)
            for place, mask in zip(indices, masks, strict=True):
                assert mask.bias is not None
                host[place] += mask.bias
        elif masks:
            words = like(np.stack([mask.allowed for mask in masks]), logits)
            index = like(np.array(indices), logits)
            banned = expand(words)[:, : logits.shape[1]]
            logits[index] = logits[index].masked_fill_(banned, float("-inf"))

    def advance(self, rows: Indices, arrived: Arrived) -> dict[int, str]:
        """Begin to compute the next masks. Waits for the tokens: the next step's masks follow from
        them."""
        faults: dict[int, str] = {}
        moving: dict[int, tuple[Form, list[int]]] = {}
        for place, (row, token) in enumerate(zip(rows.tolist(), arrived(), strict=True)):
            form = self._forms.get(row)
            if form is None:
                continue
            _, tokens = moving.get(row, (form, []))
            if len(tokens) >= len(form.masks):
                form.fault = form.fault or DEAD_END
            if form.fault is not None:
                faults[place] = f"the grammar cannot be kept: {form.fault}"
            else:
                moving[row] = form, [*tokens, token]
        if moving:
            coming = self._threads.submit(self._move, list(moving.values()))
            for form, _ in moving.values():
                form.coming = coming
        return faults

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._forms.clear()

    # In threads; a form is in one job at a time

    def _begin(self, form: Form, source: str, generated: list[int]) -> None:
        def work() -> None:
            form.matcher = self._compiler.matcher(source)
            form.matcher.consume_tokens(generated)
            self._mask([form])

        _guarded([form], work)

    def _move(self, moving: list[tuple[Form, list[int]]]) -> None:
        forms = [form for form, _ in moving]

        def work() -> None:
            shared = len(moving) >= SHARED_FROM
            for form, tokens in moving:
                for token in tokens[: len(tokens) - shared]:
                    form.matcher.consume_token(token)
            if shared:
                pairs = [(form.matcher, tokens[-1]) for form, tokens in moving]
                self._parallel().consume_token_par(pairs)
            self._mask(forms)

        _guarded(forms, work)

    def _walk(self, form: Form, drafts: list[int]) -> None:
        words = np.empty((len(drafts), self._compiler.words), np.int32)
        address, width = words.ctypes.data, words.shape[1] * words.itemsize

        def work() -> None:
            matcher = form.matcher
            for place, token in enumerate(drafts):
                matcher.consume_token(token)
                matcher.unsafe_compute_mask_ptr(address + place * width, width)
            matcher.rollback(len(drafts))
            check(matcher)
            for allowed in words:
                if not allowed.any():
                    return  # The draft before it can never be drawn.
                form.masks.append(self._made(allowed))

        _guarded([form], work)

    def _mask(self, forms: list[Form]) -> None:
        words = np.empty((len(forms), self._compiler.words), np.int32)
        address, width = words.ctypes.data, words.shape[1] * words.itemsize
        if len(forms) < SHARED_FROM:
            for place, form in enumerate(forms):
                form.matcher.unsafe_compute_mask_ptr(address + place * width, width)
        else:
            jobs = [(form.matcher, place) for place, form in enumerate(forms)]
            self._parallel().unsafe_compute_mask_ptr(jobs, address, width, len(forms))
        for form, allowed in zip(forms, words, strict=True):
            try:
                check(form.matcher)
                form.masks = [self._made(allowed)]
            except GrammarFault as fault:
                form.fault = str(fault)

    def _made(self, allowed: npt.NDArray[np.int32]) -> Mask:
        flags = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: self._vocabulary]
        if not flags.any():
            raise GrammarFault(DEAD_END)
        if not self._on_host:
            return Mask(allowed, None)
        # 1 → 0 → the bits of 0.0; 0 → -1, all bits → those of -inf.
        return Mask(allowed, ((flags.astype(np.int32) - 1) & _MINUS_INFINITY).view(np.float32))

    def _parallel(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor


def _guarded(forms: Sequence[Form], work: Callable[[], None]) -> None:
    """Run foreign code: any error there ends these rows and no others."""
    try:
        work()
    except GrammarFault as fault:
        message = str(fault)
    except Exception as error:  # noqa: BLE001
        message = f"{type(error).__name__}: {error}"
    else:
        return
    for form in forms:
        form.fault = form.fault or message


def check(matcher: Any) -> None:
    """Raise a matcher's error, if it has one."""
    if matcher.is_error():
        words = str(matcher.get_error()).split("\n")[0]
        if words.startswith("NoExtension"):
            words = DEAD_END
        raise GrammarFault(words[:300] or "the matcher gave up")


def expand(words: torch.Tensor) -> torch.Tensor:
    """Convert int32 [R, W], bit i of a row: token i is allowed, to bool [R, 32 W], True: banned."""
    import torch

    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).eq(0).flatten(1)
