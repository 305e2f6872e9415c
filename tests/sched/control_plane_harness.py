"""A worker without tensors, and a driver, that together check every plan the scheduler makes.

The worker keeps its own rows and tables, built from the plans alone. In place of keys and values
it stores, per (group, block, offset), the *identity* of a position: an interned number that
stands for (salt, adapter, all tokens and other inputs up to here). Before an entry attends, every
position that it can see must hold precisely the identity it should: a block shared wrongly, given
back too early, not written yet or of another tenant cannot pass.

The next token is a pure function of identity and choice, so that what a request should get can
be computed without any scheduling, and compared.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.base.drafted import Verified
from headrace.base.encodings import EncoderShape, EncodingName
from headrace.base.items import BeamRow
from headrace.base.outputs import Continuations, Output, Vector
from headrace.base.request import Request, SequenceDelta
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec, Task
from headrace.base.step import (
    NULL_BLOCK,
    GroupShape,
    PoolShape,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from headrace.base.tiers import KeyedBlock, OrderEnd
from headrace.kv import KvManager, Tiers
from headrace.sched import Limits, Resource, Scheduler, State, Work
from headrace.sched.admission import work_of
from headrace.sched.encodings import Encodings
from headrace.sched.price import MixedPrices

VOCAB = 50
EOS = 7
GARBAGE = -1

_identities: dict[tuple[object, object], int] = {}


def identity(before: object, token: int, spec: RequestSpec, place: int) -> int:
    """The number of the position `place`: `before` is the previous one's, or (salt, adapter). A
    placeholder stands for its place in an input and for that input's content."""
    seen: object = token
    for span in spec.inputs:
        if span.first <= place < span.first + span.length:
            seen = (token, span.kind, span.digest, place - span.first)
        elif not span.length and not place:
            seen = (seen, span.kind, span.digest)
    return _identities.setdefault((before, seen), len(_identities) + 1)


def next_token(at: int, choice: int) -> int:
    return random.Random(at * 131 + choice).randrange(VOCAB)


def continued(at: int, beam: BeamRow) -> Continuations:
    """The best continuations of a beam: each token's log-probability follows from what it is
    after."""
    legal = array("i", beam.legal).tolist()
    scored = sorted((-(beam.score + log_share(at, token)), token) for token in legal)
    return Continuations(
        [token for _, token in scored[: beam.most]], [-score for score, _ in scored[: beam.most]]
    )


def log_share(at: int, token: int) -> float:
    """A number of few values, so that many scores are equal."""
    return -random.Random(at * 131 + token).randrange(1, 9) / 4


def expected(request: Request, choice: int, max_context: int) -> tuple[list[int], str]:
    """Return the expected answer of a choice, whatever else runs: the same rules, written
    plainly."""
    spec = request.spec
    at: object = (request.cache_salt, spec.adapter)
    for place, token in enumerate(request.prompt):
        at = identity(at, token, spec, place)
    sampling, out = spec.sampling, []
    most = max_context - len(request.prompt)
    most = most if sampling.max_tokens is None else min(most, sampling.max_tokens)
    while True:
        token = next_token(at, choice)
        at = identity(at, token, spec, len(request.prompt) + len(out))
        out.append(token)
        if token in spec.stop_ids and len(out) >= sampling.min_tokens:
            return out, "stop"
        if len(out) >= most:
            return out, "length"


@dataclass
class Stay:
    """The worker's knowledge of a sequence in a row."""

    tokens: list[int]
    prompt_length: int
    choice: int
    spec: RequestSpec
    work: Work
    """Basis of the scheduler's plan: its atom, its stage, whether it keeps anything."""
    root: tuple[str, str | None]
    tables: list[list[int]]
    identities: list[int] = field(default_factory=list)
    computed: int | None = None
    ready: int = 0
    """Drafts for its next step."""
    slot: int | None = None

    def learn(self, token: int) -> None:
        before = self.identities[-1] if self.identities else self.root
        self.identities.append(identity(before, token, self.spec, len(self.tokens)))
        self.tokens.append(token)


@dataclass
class Flying:
    plan: StepPlan
    result: StepResult
    touched: set[tuple[int, int]] = field(default_factory=set)


DRAFTERS: dict[str, Callable[[random.Random, int], int]] = {
    "right": lambda rng, count: count,
    "wrong": lambda rng, count: 0,
    "right for one": lambda rng, count: min(count, 1),
    "random": lambda rng, count: rng.randint(0, count),
}
"""Number of right drafts out of `count`."""


@dataclass
class Encoded:
    """The worker's knowledge of an encoding."""

    name: EncodingName
    content: bytes
    rows: int
    done: int = 0
    left: bool = False


class FakeWorker:
    def __init__(
        self,
        pool: PoolShape,
        rng: random.Random,
        drafts: int = 0,
        *,
        depth: int = 1,
        drafter: str = "random",
        encoder: EncoderShape | None = None,
    ) -> None:
        self.pool = pool
        self.drafts = drafts
        self.depth = depth
        self.right = DRAFTERS[drafter]
        self.rng = rng
        self.rows: dict[int, Stay] = {}
        self.store: dict[tuple[int, int, int], int] = {}
        self.salts: dict[int, tuple[str, str | None]] = {}
        self.works: dict[int, Work] = {}
        self.slots: dict[int, list[int]] = {}
        """Identities of a slot's last text."""
        self.encoder = encoder
        self.encodings: dict[int, Encoded] = {}
        self.tenants: dict[int, str] = {}
        self.fails_items = 0.0
        """Chance that an item fails alone."""

    def execute(self, plan: StepPlan, *, fails: bool = False, tainted: bool = False) -> Flying:
        """`fails`: writes garbage and reports an error. `tainted`: a step before it failed."""
        for row in plan.released:
            left = self.rows.pop(row)
            if left.slot is not None:
                self.slots[left.slot] = left.identities
        for admission in plan.admitted:
            assert admission.row not in self.rows, "the row is taken"
            root, known = self.salts[admission.sequence_id], self.works[admission.sequence_id]
            tables: list[list[int]] = [[] for _ in self.pool.groups]
            length, choice, spec = admission.prompt_length, admission.choice, admission.spec
            stay = Stay([], length, choice, spec, known, root, tables)
            for token in admission.tokens:
                stay.learn(token)
            self.rows[admission.row] = stay
            self.tenants[admission.row] = admission.tenant
        for write in plan.blocks:
            table = self.rows[write.row].tables[write.group]
            assert write.first <= len(table), "a hole in the table"
            assert write.blocks, "an empty delta"
            table[write.first : write.first + len(write.blocks)] = write.blocks
        for row, slot, tokens in plan.slots:
            stay = self.rows[row]
            assert slot in range(self.pool.slots[0].blocks)
            assert stay.slot is None, "one slot is enough"
            assert all(slot != other.slot for other in self.rows.values()), "the slot is taken"
            assert stay.identities[:tokens] == self.slots.get(slot, [])[:tokens]
            stay.slot = slot
        touched: set[tuple[int, int]] = set()
        for group, source, target in plan.copies:
            touched |= {(group, source), (group, target)}
            for at in range(self.pool.block_size):
                held = self.store.get((group, source, at), GARBAGE)
                self.store[group, target, at] = held
        failures = self._encode(plan)
        work = []
        verified: dict[int, Verified] = {}
        columns = list(zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True))
        columns = columns[: plan.texts]
        for entry, (row, start, count, samples) in enumerate(columns):
            stay = self.rows[row]
            if stay.computed is None:
                stay.computed = start
            # The plan's start is the truth. Only with drafts it is an upper bound, and what the
            # worker counted itself holds.
            begin, accepted, planned = start, 0, count
            if self.drafts:
                assert start >= stay.computed, "starts are upper bounds of what is computed"
                begin = stay.computed
            known = len(stay.tokens)
            if start + count > known:
                assert self.drafts, "the step reads a token that nobody has"
                # As many as were planned, of those that are ready.
                ready = min(count - 1, stay.ready)
                assert self.depth > 1 or count == 1 + ready, "drafts that nobody proposed"
                count = 1 + ready
                accepted = self.right(self.rng, ready)
                for _ in range(accepted):
                    stay.learn(next_token(stay.identities[-1], stay.choice))
                if ready:
                    verified[entry] = Verified("fake", ready, accepted)
            assert tainted or begin == stay.computed, "a gap, or work done twice"
            assert samples == (start + planned >= known)
            if not tainted:
                self._check_inputs(row, stay, begin, begin + count)
            if not stay.work.keeps:
                atom = stay.work.atom
                assert begin % atom == 0, "begins inside an atom"
                assert samples or count % atom == 0, "ends inside an atom"
                assert not any(stay.tables), "blocks for what keeps nothing"
                work.append((stay, begin, count, accepted, samples))
                continue
            work.append((stay, begin, count, accepted, samples))
            for at in range(begin, begin + count):
                right = at < len(stay.tokens) and not fails and not tainted
                for group, table in enumerate(stay.tables):
                    block = table[at // self.pool.block_size]
                    assert block != NULL_BLOCK, "a write to the null block"
                    touched.add((group, block))
                    key = (group, block, at % self.pool.block_size)
                    self.store[key] = stay.identities[at] if right else GARBAGE
            # A later plan's start may be an upper bound: so must its end be inside the table.
            for table in stay.tables:
                assert (start + planned - 1) // self.pool.block_size < len(table)
        result_tokens: list[list[int]] = []
        logprobs, prompt_logprobs, proposed = [], [], []
        outputs: dict[int, Output] = {}
        for stay, begin, count, accepted, samples in work:
            end = begin + (count if begin + count <= len(stay.tokens) else accepted + 1)
            if stay.work.keeps:
                self._attend(stay, begin, end, touched, check=not fails and not tainted)
            new: list[int] = []
            scores = []
            if stay.spec.sampling.prompt_logprobs is not None:
                scores = [
                    TokenLogprobs(-float(at), 1, [], [])
                    for at in range(max(begin, 1), min(end, stay.prompt_length))
                ]
            if samples and stay.spec.beam is not None:
                outputs[len(result_tokens)] = continued(stay.identities[-1], stay.spec.beam)
            elif samples and not stay.spec.generates:
                outputs[len(result_tokens)] = Vector([float(len(stay.tokens))])
            elif samples:
                new = stay.tokens[len(stay.tokens) - accepted :]
                # What rests on a step that failed is nonsense.
                new = [*new, VOCAB if tainted else next_token(stay.identities[-1], stay.choice)]
                stay.learn(new[-1])
            stay.computed = end
            stay.ready = self.rng.randint(0, self.drafts) if new and self.drafts else 0
            proposed.append(bytes(sorted(self.rng.choices(range(256), k=stay.ready))[::-1]))
            result_tokens.append(new)
            logprobs.append([TokenLogprobs(-1.0, token, [], []) for token in new])
            prompt_logprobs.append(scores)
        for _ in plan.rows[plan.texts :]:
            for column in (result_tokens, logprobs, prompt_logprobs):
                column.append([])
            proposed.append(b"")
        result = StepResult(plan.number, result_tokens, logprobs, prompt_logprobs, outputs)
        if self.encoder is not None:
            result.failures = failures
            for slot, count in list(zip(plan.rows, plan.counts, strict=True))[plan.texts :]:
                result.encoding += 1e-3 * self.encodings[slot].rows * count
            result.seconds = result.encoding + 1e-3 * plan.tokens
        if self.drafts:
            result.proposed, result.verified = proposed, verified or None
        if fails:
            result = StepResult(plan.number, [], error="the step failed")
        return Flying(plan, result, touched)

    def _encode(self, plan: StepPlan) -> dict[int, str]:
        """Compute the slices of the plan's last entry; return its failure, if it fails alone."""
        for slot in plan.dropped:
            del self.encodings[slot]
        assert not any(one.left for one in self.encodings.values()), "computed twice"
        for slot, name, source, units, *_ in plan.encodings:
            assert self.encoder is not None
            if self.encoder.slot:
                slots = self.encoder.bound // self.encoder.slot + self.depth
                assert slot < slots, "more slots than there are"
            for at, one in self.encodings.items():
                # Its readers left while it was in flight: the next plan gives its slot back.
                if at != slot and one.name == name and one.done == self.encoder.slices:
                    one.left = True
            self.encodings[slot] = Encoded(name, source.token, units)
        failures = {}
        for entry in range(plan.texts, len(plan.rows)):
            assert self.encoder is not None
            slot, start, count = plan.rows[entry], plan.starts[entry], plan.counts[entry]
            found = self.encodings[slot]
            if self.rng.random() < self.fails_items:
                failures[entry] = "the item failed"
            elif found.done == start:
                found.done += count
                assert plan.samples[entry] == (found.done == self.encoder.slices)
        return failures

    def _check_inputs(self, row: int, stay: Stay, begin: int, end: int) -> None:
        """Assert that the rows of encodings which a chunk stands for are there, and its own."""
        for span in stay.spec.inputs if self.encoder is not None else ():
            if not span.length or (begin < span.first + span.length and span.first < end):
                name = EncodingName(self.tenants[row], span.digest)
                same = [one for one in self.encodings.values() if one.name == name]
                (found,) = [one for one in same if not one.left]
                assert self.encoder is not None
                assert found.done == self.encoder.slices, "read before it is complete"
                assert found.content == repr(name).encode(), "of another tenant or content"
                assert not span.mutual or end >= span.end, "cut between tokens that see each other"

    def _attend(
        self, stay: Stay, begin: int, end: int, touched: set[tuple[int, int]], *, check: bool
    ) -> None:
        size = self.pool.block_size
        for group, (shape, table) in enumerate(zip(self.pool.groups, stay.tables, strict=True)):
            oldest = 0 if shape.window is None else max(0, begin - shape.window + 1)
            for at in range(oldest, end):
                block = table[at // size]
                assert block != NULL_BLOCK, "a visible position lies in the null block"
                touched.add((group, block))
                if check:
                    held = self.store.get((group, block, at % size))
                    assert held == stay.identities[at], f"position {at} of {stay} is not its own"


@dataclass
class FakeTier:
    """A `base.tiers.BlockStore` below the fake worker: orders are done when somebody says so, in
    any order, and reads may find a block gone or damaged. `kept` outlives an engine."""

    worker: FakeWorker
    rng: random.Random
    kept: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    fails: float = 0.0
    far: bool = False
    """A third of the blocks lies with the second of two tiers, and has to be asked for."""
    asked: set[tuple[int, bytes]] = field(default_factory=set)
    orders: list[tuple[str, int, list[KeyedBlock]]] = field(default_factory=list)
    done: list[OrderEnd] = field(default_factory=list)

    def known(self, group: int) -> set[bytes]:
        return {
            key
            for at, key in self.kept
            if at == group and (not self.place(at, key) or (at, key) in self.asked)
        }

    def place(self, group: int, key: bytes) -> int | None:
        if (group, key) not in self.kept:
            return None
        return int(key[0] % 3 == 0) if self.far else 0

    nearest, keeps = 0, True

    @property
    def asks(self) -> bool:
        return self.far

    def seek(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("seek", ticket, list(pieces)))

    def read(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("read", ticket, list(pieces)))

    def write(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("write", ticket, list(pieces)))

    def prepare(self, group: int, blocks: range) -> None:
        pass

    def compare(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self.orders.append(("compare", ticket, list(pieces)))

    def ended(self) -> list[OrderEnd]:
        done, self.done = self.done, []
        return done

    def kept_bytes(self) -> int:
        return len(self.kept)

    def forget(self) -> None:
        self.kept.clear()

    def work(self) -> None:
        """Do one of the orders under way."""
        kind, ticket, pieces = self.orders.pop(self.rng.randrange(len(self.orders)))
        size, store = self.worker.pool.block_size, self.worker.store
        good = []
        for piece in pieces:
            name = piece.group, piece.key
            if kind == "seek":
                self.asked.add(name)
                good.append(name in self.kept)
                continue
            here = [(piece.group, piece.block, at) for at in range(size)]
            if kind == "read":
                found = None if self.rng.random() < self.fails else self.kept.get(name)
                for place, value in zip(here, found or [GARBAGE] * size, strict=True):
                    store[place] = value
                good.append(found is not None)
            elif kind == "write":
                self.kept[name] = [store[place] for place in here]
                assert GARBAGE not in self.kept[name], "what is written is final"
                good.append(True)
            else:
                good.append(self.kept.get(name, []) in ([], [store[place] for place in here]))
        self.done.append(OrderEnd(ticket, kind, tuple(good), len(pieces), 0.001))  # type: ignore[arg-type]


class FakeCache:
    """The resource that the engine makes of tiers, without threads."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers

    def verify(self, request: Request) -> None: ...

    def prepare(self, work: Work) -> bool:
        if work.chain is None or not work.reads:
            return True
        return self.tiers.ready(work.id, work.chain, work.known)

    def free(self, work: Work) -> None:
        self.tiers.left(work.id)


class Driver:
    """Runs requests through a scheduler and the fake worker, checking after every call."""

    def __init__(
        self,
        limits: Limits,
        pool: PoolShape,
        *,
        seed: int = 0,
        prefix_cache: bool = True,
        resources: tuple[Resource, ...] = (),
        drafter: str = "random",
        kept: dict[tuple[int, bytes], list[int]] | None = None,
        encoder: EncoderShape | None = None,
    ) -> None:
        """`kept`: what a tier below the pool begins with; None: there is no tier. `encoder`: inputs
        are encoded by a part."""
        self.now = 0.0
        self.rng = random.Random(seed)
        self.kv = KvManager(pool, prefix_cache=prefix_cache)
        self.tier: FakeTier | None = None
        if kept is not None:
            worker = FakeWorker(
                pool,
                random.Random(seed + 1),
                limits.drafts,
                depth=limits.depth,
                drafter=drafter,
                encoder=encoder,
            )
            self.tier = FakeTier(worker, random.Random(seed + 2), kept, far=bool(seed % 2))
            # Nothing, as long as the load, or long.
            computing = lambda start, tokens: self.rng.choice([0.0, 1e-3, 1.0, 1.0])  # noqa: E731
            self.kv.tiers = Tiers(self.kv, self.tier, [1] * len(pool.groups), computing)
            resources = (*resources, FakeCache(self.kv.tiers))
        encodings = None
        if encoder is not None:
            prices = MixedPrices(lambda tokens: 1e-3 * tokens, lambda units: 1e-3 * units)
            encodings = Encodings(encoder, prices)
        self.scheduler = Scheduler(
            limits, self.kv, resources, clock=lambda: self.now, encodings=encodings
        )
        self.worker = (
            self.tier.worker
            if self.tier
            else FakeWorker(
                pool,
                random.Random(seed + 1),
                limits.drafts,
                depth=limits.depth,
                drafter=drafter,
                encoder=encoder,
            )
        )
        self.flying: deque[Flying] = deque()
        self.requests: dict[str, Request] = {}
        self.out: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], SequenceDelta] = {}
        self.prompt_scores: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.plans: list[StepPlan] = []
        self.deltas: list[SequenceDelta] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self._added(request)

    def add_once(self, request: Request, atom: int) -> None:
        """An input in atoms that keeps nothing."""
        scheduler = self.scheduler
        [work] = work_of(
            request,
            order=scheduler._order,
            now=self.now,
            limits=scheduler.limits,
            max_context=scheduler.max_context,
            kv=self.kv,
        )
        work.keeps, work.atom = False, atom
        scheduler.enter([work])
        self._added(request)

    def _added(self, request: Request) -> None:
        self.requests[request.id] = request
        self._known(request)

    def _known(self, request: Request) -> None:
        for work in self.scheduler._requests.get(request.id, ()):
            self.worker.salts[work.id] = (request.cache_salt, request.spec.adapter)
            self.worker.works[work.id] = work

    def read(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.finish, "news after the end"
            self.out.setdefault(key, []).extend(delta.tokens)
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.tokens)
            self.prompt_scores.setdefault(key, []).extend(delta.prompt_logprobs or [])
            if delta.finish is not None:
                self.finish[key] = delta
        self.deltas.extend(deltas)
        self.check()

    def abort(self, request_id: str) -> None:
        self.read(self.scheduler.abort(request_id))

    def submit(self, *, fails: bool = False) -> bool:
        plan = self.scheduler.schedule()
        self.now += 0.01
        self.check()
        if plan is None:
            return False
        plan.verify(budget=self.scheduler.limits.step_tokens, rows=self.scheduler.limits.rows)
        self.plans.append(plan)
        for request in self.requests.values():
            if request.spec.retrieval is not None:  # Its work comes bit by bit.
                self._known(request)
        if self.scheduler.limits.stages > 1:
            for before in self.flying:
                sampled = zip(before.plan.rows, before.plan.samples, strict=True)
                rows = {row for row, samples in sampled if samples}
                gone = set(plan.released)
                assert rows.isdisjoint(set(plan.rows) - gone), "a token that is still to come"
        tainted = any(flying.result.error for flying in self.flying)
        self.flying.append(self.worker.execute(plan, fails=fails, tainted=tainted))
        self.check()
        for request in self.requests.values():
            for sequence in self.scheduler._requests.get(request.id, ()):
                if sequence.table is not None and sequence.state is State.RUNNING:
                    tables = self.worker.rows[sequence.row].tables
                    assert tables == sequence.table.blocks, "the deltas do not add up"
        return True

    def receive(self) -> None:
        flying = self.flying.popleft()
        self.read(self.scheduler.update(flying.plan, flying.result))

    def step(self, *, fails: bool = False) -> bool:
        """Do as the engine's loop does: plan while there is room in flight, then take one
        result."""
        progress = False
        while len(self.flying) < self.scheduler.limits.depth and self.submit(fails=fails):
            progress = True
        if self.flying:
            self.receive()
            progress = True
        return progress

    def run(self, most: int = 20_000) -> None:
        """Until idle; a scheduler that stands still, or goes on for ever, is a failure."""
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            progress = self.step()
            if (
                self.tier is not None
                and self.tier.orders
                and (not progress or self.rng.random() < 0.3)
            ):
                self.tier.work()
                progress = True
            assert progress or (self.tier and self.tier.done), "there is work, but no progress"
        assert not self.scheduler.has_work, "never ends"
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        for flying in self.flying:
            for group, block in flying.touched:
                if block != NULL_BLOCK:
                    assert self.kv.pools[group].refs[block], "a step in flight uses a free block"

    def check_answers(self) -> None:
        """Every choice of every request ended once, with what it had to get."""
        most = self.scheduler.max_context
        for request in self.requests.values():
            for choice in range(request.spec.sampling.n):
                key = (request.id, choice)
                assert key in self.finish, f"{key} was lost"
                last = self.finish[key]
                if not request.spec.generates:
                    if last.finish == "stop":
                        assert last.output == Vector([float(len(request.prompt))])
                    continue
                tokens, finish = expected(request, choice, most)
                out = self.out[key]
                if last.finish in ("abort", "error"):
                    assert out == tokens[: len(out)]
                    continue
                assert (out, last.finish) == (tokens, finish)
                assert last.stop_token == (tokens[-1] if finish == "stop" else None)
                if request.spec.sampling.prompt_logprobs is not None and choice == 0:
                    scores = [score.logprob for score in self.prompt_scores[key]]
                    assert scores == [-float(at) for at in range(1, len(request.prompt))]


def pool_of(*groups: tuple[int | None, int], block_size: int = 4, slots: int = 0) -> PoolShape:
    """(window, blocks without the null block) of each group; slots of a part that drafts."""
    return PoolShape(
        block_size,
        tuple(
            GroupShape(f"group{i}", (i,), window, blocks + 1)
            for i, (window, blocks) in enumerate(groups)
        ),
        (GroupShape("draft", (0,), None, slots, span=64),) if slots else (),
    )


def driver(
    *groups: tuple[int | None, int],
    rows: int = 8,
    step_tokens: int = 64,
    max_context: int = 64,
    max_waiting: int = 100,
    policy: str = "fcfs",
    depth: int = 1,
    drafts: int = 0,
    drafter: str = "random",
    stages: int = 1,
    slots: int = 0,
    resources: tuple[Resource, ...] = (),
) -> Driver:
    limits = Limits(
        rows,
        step_tokens,
        max_context,
        max_waiting,
        policy,  # type: ignore[arg-type]
        max(depth, stages),
        drafts,
        stages=stages,
    )
    pool = pool_of(*(groups or ((None, 64),)), slots=slots)
    return Driver(limits, pool, resources=resources, drafter=drafter)


def request_of(
    id: str,
    prompt: list[int],
    *,
    max_tokens: int | None = 4,
    stop_ids: tuple[int, ...] = (),
    n: int = 1,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    task: Task = "tokens",
    adapter: str | None = None,
    inputs: tuple[InputSpan, ...] = (),
    **fields: object,
) -> Request:
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs
    )
    spec = RequestSpec(sampling, 0, stop_ids, task, adapter, inputs=inputs)
    return Request(id, list(prompt), spec, **fields)  # type: ignore[arg-type]


def shared_blocks(driver: Driver) -> Counter[int]:
    """Blocks of group 0 that lie in more than one table."""
    return Counter({b: refs for b, refs in enumerate(driver.kv.pools[0].refs) if refs > 1})
