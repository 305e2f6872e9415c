"""FLOPs and bytes of every operator of a step: a price for each kind of node in the model's graph.

With ranks it is the graph of one of them (`base.sums`). Nodes of equal cost are grouped once per
model, ranks and question, so that a step costs a few dozen formulas. A sum and the norm right
after it are one operator, as backends run them; a test compares the list with the calls of real
steps. Letters: N tokens, B entries, R sampled rows, D hidden, H heads, G KV heads, E head size, V
vocabulary, I intermediate; b bytes of an activation. One multiply-add is two FLOPs. Bytes are the
least that must move: each operand once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..base.arch import ModelArch
from ..base.demand import demand
from ..base.graph import (
    RECURRENT,
    SAMPLED,
    TEXTS,
    ActivationSpec,
    AttentionSpec,
    BagsSpec,
    GivenSpec,
    Graph,
    LatentSpec,
    Node,
    NormSpec,
    Rows,
)
from ..base.joins import is_rms, norm_after
from ..base.layout import ONE, Layout
from ..base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from ..base.sums import summed
from ..models.registry import describe
from .attention import attention, bidirectional_attention, latent_attention
from .collectives import collectives
from .composition import Composition
from .counts import Case, Count, Kind, linear, vector
from .experts import moe
from .formats import BOUND_BITS, dtype_bytes, kv_token_bytes
from .weights import Which, numbers_of

JOINED = "norms"
"""Label of norms that are one operator with the sum before them; and of all in an encoder."""
ENTRIES = "/entries"
"""Suffix of the labels of nodes that a denoiser computes for each entry, or for its text, which is
priced as if it were the longest."""
LAST = "/last"
"""Suffix of the last layer's labels, if it is computed for fewer rows or has wider weights.

The last layer is counted for the sampled rows only, because other hidden states are rarely needed.
Steps of embeddings and of prompt log-probabilities compute it for every token; they take up to a
layer's time more than is counted.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of equal cost."""

    node: Node
    """One of the nodes, as a rank has it."""
    whole: Node
    """That node as the model has it."""
    label: str
    calls: int
    sampled: bool
    """Whether they are computed only for the rows that sample."""
    numbers: int
    """Number of weights that one layer has in this node's role."""
    layers: int
    """Layers that have such weights."""

    def is_wider(self, case: Case) -> bool:
        """Return whether these belong to a last layer whose weights differ in size from the
        others'."""
        if not self.node.weights:
            return False
        role = self.node.weights[0].purpose
        mean = case.weights.of(role, self.numbers, self.layers)
        return case.weights.last.get(role, mean) != mean

    @property
    def share(self) -> float:
        """This rank's share of the node's first weight."""
        mine, whole = self.node.weights[0], self.whole.weights[0]
        return mine.out * mine.width * mine.copies / (whole.out * whole.width * whole.copies)

    def weight_bytes(self, case: Case) -> float:
        """Return the bytes of those weights, of all ranks, in one of the nodes' layers.

        If only sampling rows are of the last layer, the other nodes are of the layers before it.
        """
        role = self.node.weights[0].purpose
        if case.arch.denoiser is not None:
            return case.weights.of(role, self.numbers, self.layers)
        which: Which = "last" if self.sampled else "all"
        if not self.sampled and self.calls == self.layers - 1:
            which = "others"
        return case.weights.of(role, self.numbers, self.layers, which)


def count_step(case: Case, step: Composition) -> list[Count]:
    """Count every operator of one step on one device, calls of equal cost together.

    With pipeline stages the list is the whole pipeline's: each device does 1 / pp of it.
    """
    counts = _by_group(case, step)
    if step.samples == step.tokens:
        counts = _merged(counts)
    return [*counts, *after_graph(case, step)]


def rows_of(case: Case, step: Composition, group: Group) -> tuple[int, str]:
    """Return (rows of a group's nodes, mark of its label)."""
    if case.arch.denoiser is not None and group.node.out[0].rows == TEXTS:
        return step.samples * case.arch.denoiser.texts, ENTRIES
    if not group.sampled:
        return group.node.out[0].rows.of(step.tokens), ""
    if case.arch.denoiser is not None:
        return step.samples, ENTRIES
    apart = step.samples < step.tokens or group.is_wider(case)
    return step.samples, LAST if apart else ""


def _by_group(case: Case, step: Composition) -> list[Count]:
    counts: list[Count] = []
    for group in groups(case.arch, bool(step.samples), case.layout):
        rows, mark = rows_of(case, step, group)
        found = PRICES[group.node.kind](case, step, group, rows, mark)
        if found is not None:
            counts.append(found)
    return counts


def split_groups(case: Case, *, samples: bool) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Return the groups whose counts depend on the sequences' lengths (`attend`), and all others,
    whose counts depend on tokens and samples."""
    found = groups(case.arch, samples, case.layout)
    attending = tuple(group for group in found if group.node.kind == "attend")
    return attending, tuple(group for group in found if group.node.kind != "attend")


@lru_cache(maxsize=128)
def groups(arch: ModelArch, samples: bool, layout: Layout = ONE) -> tuple[Group, ...]:
    """Group the nodes of a step with (`samples`) or without sampled rows, as one rank has them."""
    described = describe(arch)
    if "logits" in described.outputs:
        graph = demand(described, "sampled" if samples else "none", logits=samples)
        marked = [(node, node.out[0].rows == SAMPLED) for node in graph.nodes]
    else:
        graph = described
        body = len(demand(graph, "every").nodes)
        # After the step a head takes the inputs' first tokens.
        marked = [
            (node, index >= body or node.out[0].rows == SAMPLED)
            for index, node in enumerate(graph.nodes)
        ]
    found: dict[tuple[str, str, object, bool, tuple[int, ...], Rows], list[tuple[Node, Node]]] = {}
    rest = iter(marked)
    for node in summed(graph, layout.tp, spread=layout.ep, sent=layout.dp > 1).nodes:
        label: str | None = "ranks"
        whole, sampled = node, node.out[0].rows == SAMPLED
        if node.kind not in MEETINGS:
            whole, sampled = next(rest)
            label = _label(graph, whole, sampled=sampled)
        if label is not None:
            widths = tuple(value.width for value in (*whole.reads, *whole.out))
            key = whole.kind, label, _attended(whole), sampled, widths, whole.out[0].rows
            found.setdefault(key, []).append((node, whole))
    made = []
    for (_, label, _, sampled, _, _), nodes in found.items():
        node, whole = nodes[0]
        role = whole.weights[0].purpose if whole.weights else ""
        numbers, layers = numbers_of(arch, role) if role else (0, 0)
        made.append(Group(node, whole, label, len(nodes), sampled, numbers, layers))
    return tuple(made)


def _attended(node: Node) -> object:
    """Return the part of its spec that distinguishes an attention from others of the same model."""
    spec = node.spec
    if node.kind != "attend" or not isinstance(spec, AttentionSpec):
        return None
    return spec.window, spec.across


def _label(graph: Graph, node: Node, *, sampled: bool) -> str | None:
    """Name a node's purpose; None if it is part of another one, or a view."""
    if node.kind == "norm":
        return _label_norm(graph, node)
    if node.kind == "add":
        after = norm_after(graph, graph.maker(node.out[0]))
        joined = after >= 0 and is_rms(graph.nodes[after])
        mixed = graph.nodes[graph.maker(node.reads[0])].kind == "experts"
        return None if joined else "shared" if mixed else "sums"
    if node.kind == "linear":
        return product_label(node)
    if node.kind == "select":
        maker = graph.nodes[graph.maker(node.reads[0])]
        return "sampled/attention" if maker.kind == "attend" else "sampled"
    if isinstance(node.spec, BagsSpec | GivenSpec):
        return "tables" if node.weights else "numbers"
    if node.kind == "embed":
        tables = sum(each.kind == "embed" for each in graph.nodes)
        return "tables" if tables > 1 else "embed"
    if node.kind == "write":
        return "write" if isinstance(node.spec, AttentionSpec) else None
    if node.kind == "gated":
        maker = graph.nodes[graph.maker(node.reads[0])]
        return "shared_gated" if maker.weights[0].purpose == "shared" else "gated"
    if node.kind == "activate":
        return "pooled" if node.spec == ActivationSpec("tanh") else "inner"
    if node.kind == "conv":
        return "convolutions"
    if node.kind in ("modulate", "multiply", "group_norm", "beside", *RECURRENT):
        return node.kind
    if node.kind == "experts":
        return "experts" if node.weights[0].copies > 1 else "shared_experts"
    return "attention" if node.kind == "attend" else None


def _label_norm(graph: Graph, node: Node) -> str | None:
    spec = node.spec
    assert isinstance(spec, NormSpec)
    if spec.kind == "layer":
        return "norms"
    maker = graph.nodes[graph.maker(node.reads[0])]
    if norm_after(graph, graph.maker(node.reads[0])) == graph.maker(node.out[0]):
        return JOINED
    if maker.kind == "embed":
        return "input"
    # Norms of latents are a thousandth of the products next to them, and priced with those.
    return "post" if maker.kind == "linear" and _widens(maker) else None


def _widens(product: Node) -> bool:
    """Return whether its result is added to the residual."""
    return product.weights[0].purpose in ("output", "down")


def product_label(node: Node) -> str:
    """Name a product's purpose: qkv, output, gate_up, down, head …"""
    ref = node.weights[0]
    role, stem = ref.purpose, ref.names[0].split(".")[-2]
    if role == "shared":
        return "shared_down" if stem == "down_proj" else "shared_gate_up"
    if role == "qkv" and len(ref.names) == 1:
        return stem.split("_proj")[0]
    if stem == "shared_expert_gate":
        return stem
    return "pooler" if ref.names[0].startswith("pooler.") else role


def _merged(counts: list[Count]) -> list[Count]:
    """Merge calls of equal cost: rows of all tokens and of sampled ones, if all sample."""
    found: dict[Count, int] = {}
    for count in counts:
        one = replace(count, calls=0)
        found[one] = found.get(one, 0) + count.calls
    return [replace(count, calls=calls) for count, calls in found.items()]


def after_graph(case: Case, step: Composition) -> Iterator[Count]:
    """Yield the operators after the graph, and collectives that are none of its nodes."""
    arch = case.arch
    outputs = describe(arch).outputs
    if arch.task in ("rank", "picture"):
        return
    if "labels" in outputs:
        yield vector(case, "select", "first", 1, step.samples * arch.hidden, 0, 1, 1)
    elif "logits" not in outputs:
        yield vector(case, "pool", "inputs", 1, step.tokens * arch.hidden, 1, 1, 0)
    elif step.samples:
        size = step.samples * arch.vocab_size
        yield Count("sample", "greedy", 1, "vector", flops=size, read_bytes=size * 4)
    yield from collectives(case, step.tokens)


def product(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price a product, see `counts.linear`."""
    whole, label = group.whole.weights[0], group.label
    mark = "" if whole.purpose == "head" else mark
    size, vocabulary = whole.out * whole.width, whole.role == "logits"
    bytes_ = group.weight_bytes(case)
    every = bytes_ if group.numbers == size else size * (bytes_ / group.numbers)
    given = group.node.weights[0], whole, rows, group.calls, every * group.share
    found = linear(case, f"{label}{mark}", *given, out_bytes=4 if vocabulary else None)
    bits = bytes_ * 8 / size
    if not vocabulary or bits not in BOUND_BITS:
        return found
    return replace(found, spared_bytes=found.weight_bytes * (1 - BOUND_BITS[bits] / bits))


def embed(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price N rows read from a table (D · bits / 8 each), N · D · b written; N · D FLOPs."""
    spec = group.node.spec
    if isinstance(spec, BagsSpec):
        return _bags(case, spec, group, rows)
    if isinstance(spec, GivenSpec):
        size = rows * group.node.out[0].width
        return vector(case, "embed", f"{group.label}{mark}", group.calls, size, 0, 1, 1)
    hidden = group.node.out[0].width
    row = group.weight_bytes(case) / (group.numbers / hidden)
    return Count(
        "embed",
        group.label,
        group.calls,
        "vector",
        flops=rows * hidden,
        weight_bytes=rows * row,
        read_bytes=rows * 8,
        write_bytes=rows * hidden * dtype_bytes(case.dtype),
    )


def _bags(case: Case, spec: BagsSpec, group: Group, rows: int) -> Count:
    """Price bags as long as they may be: of each id a row of its table, 8 bytes, and 2 FLOPs per
    number; x read, all columns written."""
    ids = rows * sum(bag.most for bag in spec.bags)
    refs, b = group.node.weights, dtype_bytes(case.dtype)
    width = refs[0].width if refs else 0
    number = group.weight_bytes(case) / group.numbers if refs else 0
    read = sum(value.width for value in group.node.reads) + spec.numbers
    return Count(
        "embed",
        "tables" if refs else "numbers",
        group.calls,
        "vector",
        flops=2 * ids * width,
        weight_bytes=ids * width * number,
        read_bytes=8 * ids + rows * read * b,
        write_bytes=rows * group.node.out[0].width * b,
    )


def norm(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price 4 FLOPs per number (square, sum, scale, weight), 8 of a layer norm; N · D read and
    written. Gains and shifts of an adaptive norm stay in a cache.

    With the sum before it 5; two arrays of N · D read, two written.
    """
    spec = group.node.spec
    assert isinstance(spec, NormSpec)
    flops, arrays = (8, 1) if spec.kind == "layer" else (5, 2) if group.label == JOINED else (4, 1)
    size = rows * group.node.out[0].width
    return vector(case, "norm", f"{group.label}{mark}", group.calls, size, flops, arrays, arrays)


def add(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price one FLOP per number; two arrays read, one written."""
    size = rows * group.node.out[0].width
    return vector(case, "add", f"{group.label}{mark}", group.calls, size, 1, 2, 1)


def modulate(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price two FLOPs per number; two arrays read, one written. Factors stay in a cache."""
    size = rows * group.node.out[0].width
    return vector(case, "modulate", f"{group.label}{mark}", group.calls, size, 2, 2, 1)


def copied(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price a copy, read and written once; a norm of groups reads twice and has 8 FLOPs each."""
    kind, size = group.node.kind, rows * group.node.out[0].width
    more = (8, 2, 1) if kind == "group_norm" else (0, 1, 1)
    return vector(case, kind, f"{group.label}{mark}", group.calls, size, *more)


def gated(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price about 6 FLOPs per result (exponential counted as 4); 2 · N · I read, N · I written."""
    size = rows * group.node.out[0].width
    return vector(case, "gated", f"{group.label}{mark}", group.calls, size, 6, 2, 1)


def activate(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price about 8 FLOPs per number; read and written once."""
    size = rows * group.node.out[0].width
    label = group.label if group.label == "pooled" else f"{group.label}{mark}"
    return vector(case, "activate", label, group.calls, size, 8, 1, 1)


def multiply(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price about 5 FLOPs per number; two arrays read, one written."""
    size = rows * group.node.out[0].width
    return vector(case, "multiply", f"multiply{mark}", group.calls, size, 5, 2, 1)


def recurrent(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price a convolution or a recurrence.

    A convolution has N · C · K multiply-adds, with kernel size K, over C · K inputs of each entry.
    A recurrence has 4 FLOPs per number of a state for each token, the delta rule 2 more. A state is
    read and written once for each entry.
    """
    spec, b = group.node.spec, dtype_bytes(case.dtype)
    ins, out = sum(value.width for value in group.node.reads), group.node.out[0].width
    if isinstance(spec, ConvSpec):
        flops, kept = 2.0 * out * spec.taps, 4.0 * out * spec.taps
    else:
        assert isinstance(spec, DeltaSpec | SsmSpec)
        state = float(spec.values * spec.key_size)
        flops, kept = state * (6 if isinstance(spec, DeltaSpec) else 4), 8 * state
    return Count(
        group.node.kind,
        group.label,
        group.calls,
        "vector",
        flops=rows * flops,
        read_bytes=rows * ins * b,
        write_bytes=rows * out * b,
        kv_bytes=step.entries * kept,
    )


def select(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count | None:
    """Price R · width read and written; None if all rows sample."""
    if step.samples == step.tokens:
        return None
    width = group.node.out[0].width
    return vector(case, "select", group.label, group.calls, step.samples * width, 0, 1, 1)


def write(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price 6 FLOPs per rotated pair, 4 per number of a q/k norm; qkv read, q and the KV written.

    N · (H + 2G) · E · b read; N · H · E · b and N · `kv_token_bytes` written.
    """
    spec, b = group.node.spec, dtype_bytes(case.dtype)
    assert isinstance(spec, AttentionSpec)
    kept = 0
    if spec.kept and not spec.bidirectional:
        kept = kv_token_bytes(spec, case.kv_dtype)
    rotated = rows * (spec.heads + (spec.kv_heads if spec.kept else 0)) * spec.size
    return Count(
        "write",
        "write",
        group.calls,
        "vector",
        flops=rotated * (3 + (4 if group.node.weights else 0)),
        read_bytes=rows * spec.stacked * b,
        write_bytes=rows * spec.queries * b,
        kv_bytes=rows * kept,
    )


def attend(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price attention by its kind."""
    spec = group.node.spec
    if isinstance(spec, LatentSpec):
        bytes_ = group.weight_bytes(case)
        return latent_attention(case, spec, step, group.calls, group.numbers, bytes_)
    assert isinstance(spec, AttentionSpec)
    if spec.bidirectional:
        return bidirectional_attention(case, spec, step, group.calls, rows)
    return attention(case, step, spec, group.calls)


def experts(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price experts, see `experts.moe`; an expert for every row costs the same as two products."""
    ref, whole = group.node.weights[0], group.whole.weights[0]
    bytes_ = group.weight_bytes(case) * group.share
    if ref.copies > 1:
        return moe(case, rows, group.calls, bytes_, ref.out // 2, mark)
    both = [one._replace(rows=(3 * one.out // 2,), cut=()) for one in (ref, whole)]
    return linear(case, f"{group.label}{mark}", both[0], both[1], rows, group.calls, bytes_)


def meeting(case: Case, step: Composition, group: Group, rows: int, mark: str) -> Count:
    """Price a collective of tp ranks on N · D · b: an all-reduce, or an all-gather."""
    name = "all_reduce" if group.node.kind == "reduce" else "all_gather"
    size = rows * group.node.out[0].width * dtype_bytes(case.dtype)
    kind: Kind = "network"
    given = f"{group.label}{mark}", group.calls, kind
    return Count(name, *given, flops=0, read_bytes=size, ranks=case.layout.tp)


MEETINGS = ("reduce", "exchange")
"""Kinds of nodes at which ranks meet."""


Price = Callable[[Case, Composition, Group, int, str], Count | None]
PRICES: Mapping[str, Price] = {
    "activate": activate,
    "add": add,
    "attend": attend,
    "beside": copied,
    "conv": product,
    "embed": embed,
    "experts": experts,
    "gated": gated,
    "group_norm": copied,
    "linear": product,
    "modulate": modulate,
    "multiply": multiply,
    "norm": norm,
    "select": select,
    "write": write,
    **dict.fromkeys(RECURRENT, recurrent),
    **dict.fromkeys(MEETINGS, meeting),
}
"""By kind of node: (case, step, group, rows, mark of the last layer) → work of all its calls."""
BY_STEP = ("attend", "select", *RECURRENT)
"""Kinds whose work depends on more of a step than their rows."""
