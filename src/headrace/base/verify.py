"""Specification of the step graph: backends may run every graph that `verify` accepts.

There are two levels, as tinygrad has them: graphs as they are described, cut or with chosen rows;
and graphs with nodes joined for a backend. Every kind of node has a form, which follows from its
spec and from the widths that are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

from .errors import EngineFault
from .exchange import ExchangeSpec, ReduceSpec
from .graph import (
    KINDS,
    RECURRENT,
    SAMPLED,
    TEXTS,
    TOKENS,
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    BagsSpec,
    Dtype,
    EmbedSpec,
    ExpertsSpec,
    GivenSpec,
    Graph,
    GroupNormSpec,
    LatentSpec,
    LinearSpec,
    Node,
    NormSpec,
    PartSpec,
    PictureConvSpec,
    Role,
    RouteSpec,
    Rows,
    ScaleSpec,
    ScatterSpec,
    WeightRef,
    WindowSpec,
)
from .joins import JOINED, AroundSpec, CodesSpec
from .recurrent import ConvSpec, DeltaSpec, SsmSpec

Shape = tuple[Role, int, int, int]
"""A weight: (role, copies, outputs, columns); a vector has no columns."""


class Form(NamedTuple):
    """Operands that a node must have."""

    reads: Sequence[int]
    """Columns of its inputs."""
    makes: Sequence[int]
    """Columns of its outputs."""
    weights: Sequence[Sequence[Shape]] = ((),)
    """Alternatives."""
    reads_types: Sequence[Dtype] = ()
    makes_types: Sequence[Dtype] = ()
    """Types; (): all are `act`."""


def verify(graph: Graph, *, joined: bool = False) -> None:
    """Raise `EngineFault`, naming node and rule, unless this is a graph that backends may run.
    `joined`: with the kinds of `kernels.fuse`."""
    kinds = KINDS | JOINED if joined else KINDS
    made, written = set(graph.inputs), set[int]()
    for index, node in enumerate(graph.nodes):
        at = f"node {index} ({node.kind})"
        _check(node.kind in kinds, f"{at}: no such kind")
        _check(made.issuperset(node.reads), f"{at} reads what nobody has made")
        _check(made.isdisjoint(node.out), f"{at} makes a value again")
        for rule in chain(_rows(node), _operands(node), _numbers(node), _order(node, written)):
            _check(False, f"{at} {rule}")
        made.update(node.out)
    outputs = graph.outputs.values()
    for index, node in enumerate(graph.nodes):
        for place, value in enumerate(node.out):
            # A node with an effect, or a sum that a join has made as well.
            writes = node.kind == "write" and not getattr(node.spec, "bidirectional", False)
            spare = writes or node.kind in RECURRENT or place > 0
            read = spare or graph.readers(value) or value in outputs
            _check(bool(read), f"node {index} ({node.kind}) makes a value that nobody reads")
        if isinstance(node.spec, CodesSpec):
            readers = [graph.nodes[each].weights[:1] for each in graph.readers(node.out[0])]
            right = readers == [(node.spec.consumer,)]
            _check(right, f"node {index} ({node.kind}) writes codes for another product")
    for value in graph.inputs:
        _check(bool(graph.readers(value)), "an input is a value that nobody reads")
    for name, value in graph.outputs.items():
        _check(value in made, f"the output {name} is never made")
    _verify_weights(graph)


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise EngineFault(f"the model's graph is wrong: {why}")


def _verify_weights(graph: Graph) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    stacks: dict[tuple[str, Role], tuple[str, ...]] = {}
    for node in graph.nodes:
        for ref in node.weights:
            for name, rows in zip(ref.names, ref.rows, strict=True):
                shape = rows, ref.width, ref.copies
                _check(shapes.setdefault(name, shape) == shape, f"{name} has two shapes")
                stack = stacks.setdefault((name, ref.role), ref.names)
                _check(stack == ref.names, f"{name} is part of two weights of one role")


def _rows(node: Node) -> Iterator[str]:
    rows = {value.rows for value in (*node.reads, *node.out)}
    if node.kind == "modulate" or (node.kind == "norm" and len(node.reads) > 1):
        many, made = 1 if node.kind == "norm" else len(node.reads) - 1, node.out[0].rows
        each = [value.rows for value in node.reads]
        sampled = [SAMPLED] * (len(each) - many)
        if made.name != TOKENS.name or each != [*[made] * many, *sampled]:
            yield "reads rows of N by rows of R"
    elif (own := _own_rows(node)) is not None:
        if rows != {own}:
            yield "is of sampled rows" if own == SAMPLED else "is of texts"
    elif node.kind == "select":
        if [value.rows for value in (*node.reads, *node.out)] != [TOKENS, SAMPLED]:
            yield "goes from N to R"
    elif node.kind == "conv":
        if isinstance(node.spec, PictureConvSpec) and not _convolved(node, node.spec):
            yield "makes another number of rows"
    elif node.kind == "attend" and len(node.reads) > 1:
        made = node.out[0].rows
        wanted = [made, TEXTS] if made.name == TOKENS.name else []
        if [value.rows for value in node.reads] != wanted:
            yield "goes from N over T to N"
    elif node.kind == "window":
        if isinstance(node.spec, WindowSpec) and not _windows(node, node.spec):
            yield "makes another number of rows"
    elif node.kind in ("embed", "receive", "write", "scatter", *RECURRENT):
        if rows != {TOKENS}:
            yield "is of all tokens"
    elif len(rows) != 1:
        yield "mixes numbers of rows"


def _own_rows(node: Node) -> Rows | None:
    """Return the rows of numbers that a step has, if these are not its tokens'."""
    spec = node.spec
    if isinstance(spec, GivenSpec) and spec.of == "texts":
        return TEXTS
    labels = isinstance(spec, EmbedSpec) and spec.index == "labels"
    return SAMPLED if labels or (isinstance(spec, GivenSpec) and spec.of == "times") else None


def _windows(node: Node, spec: WindowSpec) -> bool:
    """Return whether a window's row count follows from its input's, tested for a few counts."""
    (x,), (out,) = node.reads, node.out
    few = range(16, 24)
    same = x.rows.name == out.rows.name
    return same and all(spec.rows(x.rows.of(n)) == out.rows.of(n) for n in few)


def _convolved(node: Node, spec: PictureConvSpec) -> bool:
    """Return whether a convolution's rows follow from those that it reads."""
    (x,), (out,) = node.reads, node.out
    read = spec.lines * spec.columns
    made = prod(spec.made)
    ratio = out.rows.times * x.rows.over * read, x.rows.times * out.rows.over * made
    return x.rows.name == out.rows.name and ratio[0] == ratio[1]


def _order(node: Node, written: set[int]) -> Iterator[str]:
    """Yield violations of the order in which layers write and attend."""
    spec = node.spec
    if not isinstance(spec, AttentionSpec | LatentSpec):
        return
    elsewhere = isinstance(spec, AttentionSpec) and spec.kept == 0
    if node.kind == "write" and not elsewhere:
        if spec.layer in written:
            yield f"writes layer {spec.layer} twice"
        written.add(spec.layer)
    elif node.kind == "attend" and not _elsewhere(spec) and spec.layer not in written:
        yield f"attends to layer {spec.layer}, which is not written yet"
    elif node.kind == "attend" and spec.kind == "cross" and spec.layer in written:
        yield f"attends across to layer {spec.layer}, which its own tokens write"


def _elsewhere(spec: AttentionSpec | LatentSpec) -> bool:
    """Return whether attention needs no `write` in its graph."""
    return spec.kind in ("bidirectional", "cross")


def _operands(node: Node) -> Iterator[str]:
    """Yield differences from the form of its kind."""
    form = _form(node)
    if form is None:
        yield f"has a spec of {type(node.spec).__name__}, which is another kind's"
        return
    for verb, values, columns, types in (
        ("reads", node.reads, form.reads, form.reads_types),
        ("makes", node.out, form.makes, form.makes_types),
    ):
        found = [value.width for value in values]
        if found != [*columns]:
            yield f"{verb} {found} columns, not {[*columns]}"
        kinds = [value.dtype for value in values]
        if kinds != ([*types] or ["act"] * len(values)):
            yield f"{verb} {', '.join(kinds)}, not {', '.join(types) or 'act'}"
    weights = [_shape(ref) for ref in node.weights]
    if weights not in [[*each] for each in form.weights]:
        wanted = " or ".join(str([*each]) for each in form.weights)
        yield f"has weights {weights} (role, copies, outputs, columns), not {wanted}"


def _shape(ref: WeightRef) -> Shape:
    # The kernel of a convolution [C, width] is `width` vectors.
    return ref.role, ref.copies, ref.out, ref.width


def _vectors(*sizes: int, copies: int = 1) -> list[Shape]:
    return [("vector", copies, size, 0) for size in sizes]


def _form(node: Node) -> Form | None:
    """Return the form of a node; None if its spec is not of its kind."""
    x, y = (each[0].width if each else 0 for each in (node.reads, node.out))
    kept: Sequence[Dtype] = [value.dtype for value in node.reads]
    first = _shape(node.weights[0]) if node.weights else ("linear", 1, 0, 0)
    role, _, out, width = first
    match node.kind, node.spec:
        case "embed", EmbedSpec():
            return Form([], [y], [[("embed", 1, out, y)]])
        case "embed", BagsSpec(bags, numbers):
            read = [value.width for value in node.reads[:1]]
            joined = sum(read) + numbers + sum(ref.width for ref in node.weights)
            tables: list[Shape] = [("bag", 1, ref.out, ref.width) for ref in node.weights]
            return Form(read, [joined], [tables[: len(bags)]])
        case "embed", GivenSpec():
            return Form([], [y])
        case "receive", None:
            return Form([], [y])
        case "modulate", None:
            return Form([x] * len(node.reads), [x])
        case "beside", None:
            return Form(
                [value.width for value in node.reads], [sum(one.width for one in node.reads)]
            )
        case "norm", NormSpec("layer") if len(node.reads) > 1:
            return Form([x] * 3, [x])
        case "norm", NormSpec(kind):
            return Form([x], [x], [_vectors(x), _vectors(*[x] * (1 if kind == "rms" else 2))])
        case "conv", PictureConvSpec():
            size = node.spec.side**2 * x
            return Form([x], [y], [[("linear", 1, y, size), *_vectors(y)]])
        case "group_norm", GroupNormSpec():
            return Form([x], [x], [_vectors(x, x)])
        case "add", None | AddSpec():
            return Form([x, x], [x])
        case "scale", ScaleSpec():
            return Form([x], [x], [[], _vectors(1)])
        case "linear", LinearSpec():
            made: Dtype = "f32" if role == "logits" else "act"
            matrix: Shape = "logits" if role == "logits" else "linear", 1, out, width
            return Form([width], [out], [[matrix], [matrix, *_vectors(out)]], (), [made])
        case "write" | "attend", AttentionSpec():
            return _attention(node.kind, node.spec)
        case "write" | "attend" | "absorb" | "unpack", LatentSpec():
            return _latent(node.kind, node.spec)
        case "gated", ActivationSpec():
            return Form([2 * y], [y])
        case "activate", ActivationSpec():
            return Form([x], [x])
        case "multiply", ActivationSpec():
            return Form([x, x], [x])
        case "route", RouteSpec(active):
            gains = _vectors(*[x] * node.spec.gained)
            made_types: Sequence[Dtype] = ["i32", "f32"]
            return Form([x], [active] * 2, [gains, [*_vectors(x), *gains]], (), made_types)
        case "experts", ExpertsSpec():
            return _experts(node, node.spec)
        case "short_conv", ConvSpec():
            kernel: list[Shape] = [("vector", 1, y, node.spec.taps)]
            reads = [3 * y if node.spec.gated else y]
            return Form(reads, [y], [kernel, [*kernel, *_vectors(y)]])
        case "delta_rule", DeltaSpec():
            heads, values = node.spec.value_heads, node.spec.values
            vectors = _vectors(heads, heads, node.spec.value_size)
            return Form([node.spec.mixed, values, heads, heads], [values], [vectors])
        case "ssm", SsmSpec():
            heads, values = node.spec.value_heads, node.spec.values
            vectors = _vectors(heads, heads, heads, values)
            return Form([node.spec.mixed, values, heads], [values], [vectors])
        case "part", PartSpec():
            return Form([x], [y], [[]], kept, kept)
        case "window", WindowSpec(columns):
            return Form([x], [x * columns])
        case "scatter", ScatterSpec():
            return Form([x], [x])
        case "select", None:
            return Form([x], [x], [[]], kept, kept)
        case "reduce", ReduceSpec():
            return Form([x], [x])
        case "exchange", ExchangeSpec(bounds):
            return Form([node.spec.mine[1]], [bounds[-1]], [[]], kept, kept)
    return _joined_form(node)


def _joined_form(node: Node) -> Form | None:
    x, y = (each[0].width if each else 0 for each in (node.reads, node.out))
    out, width = _shape(node.weights[0])[2:] if node.weights else (0, 0)
    several = len(node.reads) > 1
    codes: Sequence[Dtype] = ["codes", "f32"]
    match node.kind, node.spec:
        case "around", AroundSpec(gate=gate):
            matrix: Shape = "linear", 1, y if gate is None else 2 * y, x
            return Form([x, y] if several else [x], [y], [[matrix]])
        case "add_norm", NormSpec():
            return Form([x, x], [x, x], [_vectors(x)])
        case "norm_codes", CodesSpec(NormSpec()):
            made: Sequence[Dtype] = [*codes, "act"] if several else codes
            makes = [x, 0, x] if several else [x, 0]
            return Form([x] * (1 + several), makes, [_vectors(x)], (), made)
        case "gated_codes", CodesSpec(ActivationSpec()):
            return Form([2 * y], [y, 0], [[]], (), codes)
        case "linear_codes", LinearSpec():
            product: list[Shape] = [("linear", 1, out, width)]
            return Form([width, 0], [out], [product, [*product, *_vectors(out)]], codes)
    return None


def _attention(kind: str, spec: AttentionSpec) -> Form:
    if kind == "write":
        norms = [spec.size] * 2
        if spec.whole_norm:
            norms = [spec.queries, spec.kv_heads * spec.size]
        norms = norms[:1] if spec.kept == 0 else norms
        made = spec.stacked if spec.bidirectional else spec.queries
        return Form([spec.stacked], [made], [[], _vectors(*norms)])
    if spec.bidirectional:
        reads = [spec.queries, 2 * spec.queries] if spec.across else [spec.stacked]
        return Form(reads, [spec.queries], [_vectors(*[spec.heads * 2 * spec.reach][: spec.reach])])
    return Form([spec.queries], [spec.queries], [[], _vectors(spec.heads)])


def _latent(kind: str, spec: LatentSpec) -> Form:
    heads, rank, values = spec.heads, spec.rank, spec.heads * spec.value_size
    packing: Shape = "heads", heads, rank, spec.plain_size
    unpacking: Shape = "heads", heads, spec.value_size, rank
    parts = [spec.queries, rank, spec.rope_size]
    if kind == "write":
        return Form(parts, [spec.queries])
    if kind == "attend":
        return Form([spec.queries], [values], [[packing, unpacking]])
    if kind == "absorb":
        return Form(parts, [(heads + 1) * spec.size], [[packing]])
    return Form([heads * spec.size], [values], [[unpacking]])


def _experts(node: Node, spec: ExpertsSpec) -> Form:
    x, y = (each[0].width if each else 0 for each in (node.reads, node.out))
    active = node.reads[1].width if len(node.reads) > 1 else 0
    copies, inner = (node.weights[1].copies, node.weights[1].width) if node.weights[1:] else (0, 0)
    up: Shape = "moe", copies, 2 * (spec.inner.mine[1] if spec.inner else inner), x
    down: Shape = "moe", copies, y, inner
    biases = _vectors(up[2], y, copies=copies)
    weights = [up, down], [up, down, *biases]
    return Form([x, active, active], [y], weights, ["act", "i32", "f32"])


def _numbers(node: Node) -> Iterator[str]:
    """Yield faults in the numbers of its spec."""
    match node.kind, node.spec:
        case "route", RouteSpec() if node.reads[0].width % node.spec.groups:
            yield f"has {node.reads[0].width} experts, which are no {node.spec.groups} equal groups"
        case "part", PartSpec(first) if (
            first < 0 or first + node.out[0].width > node.reads[0].width
        ):
            yield f"has columns from {first}, which are not all there"
        case "window", WindowSpec(width, stride, before) if not (
            width >= 1 and stride >= 1 and 0 <= before < width
        ):
            yield f"has a window of {width} rows every {stride} with {before} before the first"
        case "around", AroundSpec():
            yield from _around(node, node.spec)
        case "add_norm", NormSpec(kind) if kind != "rms":
            yield "joins an RMS norm alone"
        case "norm_codes", CodesSpec(NormSpec(kind)) if kind != "rms":
            yield "joins an RMS norm alone"
        case "linear_codes", LinearSpec() if node.spec != LinearSpec():
            yield "neither caps nor scales"


def _around(node: Node, spec: AroundSpec) -> Iterator[str]:
    (x, *residual), out = node.reads, node.weights[0].out
    if (spec.norm is None) != (spec.gain is None):
        yield "has a norm without its gain, or a gain without its norm"
    elif spec.norm is not None and spec.gain is not None:
        if spec.norm.kind != "rms":
            yield "joins an RMS norm alone"
        if _shape(spec.gain) != _vectors(x.width)[0]:
            yield f"has a gain of {_shape(spec.gain)}, not {_vectors(x.width)[0]}"
    if spec.bias is not None and _shape(spec.bias) != _vectors(out)[0]:
        yield f"has a bias of {_shape(spec.bias)}, not {_vectors(out)[0]}"
    if spec.gate is not None and (residual or spec.bias is not None):
        yield "joins a gate alone, without bias and residual"
