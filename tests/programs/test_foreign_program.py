"""A program that runs: the bits of bare ONNX Runtime, draws from the seed, limits, cancels, and
rows that go together only where that is proven."""

from __future__ import annotations

import resource
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from small_programs import (
    BOOL,
    FLOAT,
    INT64,
    double,
    endless,
    helper,
    model,
    node,
    onnx,
    port,
    stored,
)

from headrace.base.errors import (
    DoesNotFit,
    InvalidRequest,
    ModelFileError,
    RunStopped,
    UnsupportedModel,
)
from headrace.programs import ForeignProgram, ProgramLimits, confined, runner
from headrace.programs.drawn import rewritten
from headrace.programs.inspection import LIMITS, inspected_bytes
from headrace.programs.measured import RowsVerdict
from headrace.programs.onnx import description
from headrace.programs.rows import fitting

onnxruntime = pytest.importorskip("onnxruntime")
Array = np.ndarray[Any, Any]


def load(data: bytes, limits: ProgramLimits = LIMITS, *, trial: bool = False) -> ForeignProgram:
    return ForeignProgram(inspected_bytes(data, "m.onnx", limits), limits, trial=trial)


def bare(data: bytes, inputs: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def network(rows: str | int = "batch") -> bytes:
    """Convolution, norm, attention-like product, softmax."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.standard_normal((8, 3, 3, 3)).astype("f"),
        "b": draw.standard_normal(8).astype("f"),
        "m": draw.standard_normal((8, 16)).astype("f"),
    }
    return model(
        [
            node("Conv", "x w b", "c", pads=[1, 1, 1, 1]),
            node("Relu", "c", "r"),
            node("ReduceMean", "r", "p", axes=[2, 3], keepdims=0),
            node("MatMul", "p m", "q"),
            node("Softmax", "q", "y"),
        ],
        [port("x", [rows, 3, "h", "w"])],
        [port("y", [rows, 16])],
        [stored(name, value) for name, value in weights.items()],
    )


def test_the_bits_of_bare_onnx_runtime() -> None:
    data = network()
    program = load(data, trial=True)
    assert program.trial is not None
    assert program.trial.memory >= 0
    for shape in ((1, 3, 8, 8), (2, 3, 5, 9), (1, 3, 1, 1)):
        x = np.random.default_rng(1).standard_normal(shape).astype("f")
        assert program.run({"x": x})["y"].tobytes() == bare(data, {"x": x})[0].tobytes()


def test_many_shapes_keep_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a plan of memory for each shape and drops none; the bits are the same."""
    monkeypatch.setattr(runner, "MOST_SHAPES", 3)
    data = network()
    program = load(data)
    first = program._session
    for size in (2, 3, 4, 4, 5, 6, 7):
        x = np.random.default_rng(size).standard_normal((1, 3, size, size)).astype("f")
        assert program.run({"x": x})["y"].tobytes() == bare(data, {"x": x})[0].tobytes()
        assert (program._session is first) == (size <= 4)


def test_inputs_are_checked_by_name_type_and_shape() -> None:
    program = load(double("batch", 3))
    good = np.ones((2, 3), "f")
    for inputs, message in (
        ({}, "input 'x' is missing"),
        ({"x": good, "z": good}, "input 'z' is not known; the inputs are: x"),
        ({"x": good.astype("d")}, "input x is float64; it takes float32"),
        ({"x": [[1.0]]}, "input x is list; it takes float32"),
        ({"x": good[:, :2]}, r"shape \[2, 2\]; it takes x float32 \[batch, 3\]"),
        ({"x": good[0]}, r"shape \[3\]; it takes"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            program.run(inputs)  # type: ignore[arg-type]
    backwards = np.arange(12, dtype="f").reshape(4, 3)[::-2]
    assert (program.run({"x": backwards})["y"] == 2 * backwards).all()
    assert program.run({"x": np.ones((0, 3), "f")})["y"].shape == (0, 3)


def test_what_the_library_refuses_names_the_reason() -> None:
    data = model(
        [node("Gather", "t i", "y")], [port("t", [3]), port("i", ["n"], INT64)], [port("y", None)]
    )
    program = load(data)
    with pytest.raises(InvalidRequest, match="cannot run on these inputs: indices element out of"):
        program.run({"t": np.ones(3, "f"), "i": np.array([7])})
    with pytest.raises(ModelFileError, match=r"does not load: .*NoSuchOperator"):
        load(model([node("NoSuchOperator", "x", "y")], [port("x", [1])], [port("y", [1])]))


def loops(program: ForeignProgram) -> dict[str, Array]:
    return {"x": np.zeros(1, "f"), "go": np.array(True)}


def test_a_loop_without_end_has_a_time_limit() -> None:
    program = load(endless(), ProgramLimits(seconds=0.2))
    begun = time.monotonic()
    with pytest.raises(RunStopped, match=r"stopped after 0.2 s, its time limit") as stopped:
        program.run(loops(program))
    assert (stopped.value.code, stopped.value.status) == ("time", 504)
    assert time.monotonic() - begun >= 0.2
    with pytest.raises(RunStopped, match=r"after 0.05 s"):
        program.run(loops(program), seconds=0.05)
    assert program.run({"x": np.zeros(1, "f"), "go": np.array(False)})["y"].tolist() == [0.0]


def test_a_cancel_stops_the_run() -> None:
    program = load(endless())

    def cancel() -> None:
        while not program._running:
            time.sleep(0.001)
        program.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RunStopped, match="was cancelled") as stopped:
        program.run(loops(program))
    thread.join()
    assert stopped.value.code == "cancelled"
    program.cancel()  # Without a run it stops nothing.
    assert program.run({"x": np.zeros(1, "f"), "go": np.array(False)})["y"].tolist() == [0.0]


def constant(size: int) -> bytes:
    """x plus a constant that is computed while the session is made: `size`² floats."""
    return model(
        [
            node("Reshape", "w column", "c"),
            node("Reshape", "w row", "r"),
            node("Mul", "c r", "m"),
            node("ReduceSum", "m", "s", keepdims=0),
            node("Add", "x s", "y"),
        ],
        [port("x", [1])],
        [port("y", [1])],
        [
            stored("w", np.ones(size, "f")),
            stored("column", np.array([size, 1])),
            stored("row", np.array([1, size])),
        ],
    )


def test_large_constants_are_not_computed_while_it_loads() -> None:
    """ONNX Runtime computes them outside the arena, where nothing bounds them."""
    limits = ProgramLimits(memory=1 << 28)
    small = load(constant(100), limits)
    assert small.run({"x": np.zeros(1, "f")})["y"].tolist() == [10_000.0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = load(constant(20_000), limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17
    with pytest.raises(InvalidRequest, match=r"cannot run on these inputs: .*1600000000"):
        large.run({"x": np.zeros(1, "f")})


def test_the_first_load_has_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = stored("w", np.ones(1 << 22, "f"))
    data = model([node("Add", "x w", "y")], [port("x", [1])], [port("y", None)], [weights])
    assert load(data, trial=True).trial is not None
    monkeypatch.setattr(confined, "SPARE", -(3 << 24))
    with pytest.raises(DoesNotFit, match="needs more than 16,777,216 bytes to load"):
        load(data, ProgramLimits(memory=1 << 24), trial=True)


def test_a_value_beyond_the_arena_ends_the_run_alone() -> None:
    data = model(
        [node("ConstantOfShape", "s", "c"), node("ReduceSum", "c", "y", keepdims=0)],
        [port("s", [1], INT64)],
        [port("y", [])],
    )
    small, large = (
        load(data, ProgramLimits(memory=1 << 20)),
        load(data, ProgramLimits(memory=1 << 24)),
    )
    for program, count in ((small, 1 << 20), (large, 1 << 24), (large, 1 << 40)):
        with pytest.raises(InvalidRequest, match=r"cannot run on these inputs: .*bytes"):
            program.run({"s": np.array([count])})
        assert program.run({"s": np.array([5])})["y"] == 0
    assert large.run({"s": np.array([1 << 20])})["y"] == 0


def noisy(op: str, *, like: bool, opset: int = 17, **attributes: Any) -> bytes:
    """y = x + noise; the noise is of fixed shape, or like x."""
    draw = node(op, "x" if like else "", "noise", **attributes)
    return model(
        [draw, node("Add", "x noise", "y")],
        [port("x", ["n", "m"] if like else [3, 4])],
        [port("y", None)],
        opset=opset,
    )


RANDOM = {
    "normal": noisy("RandomNormal", like=False, shape=[3, 4], mean=5.0, scale=2.0),
    "uniform": noisy("RandomUniform", like=False, shape=[3, 4], low=-1.0, high=3.0),
    "normal like": noisy("RandomNormalLike", like=True, mean=5.0, scale=2.0, dtype=FLOAT),
    "uniform like": noisy("RandomUniformLike", like=True, low=-1.0, high=3.0),
    "old opset": noisy("RandomNormalLike", like=True, opset=11),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_nodes_draw_from_the_seed(name: str) -> None:
    program = load(RANDOM[name])
    x = np.zeros((3, 4), "f")
    first, again, other = (program.run({"x": x}, seed=seed)["y"] for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()
    assert len({*first.flat, *other.flat}) == 24
    data, _ = rewritten(program.inspection.data, program.inspection.described)
    assert not any(one.op.startswith("Random") for one in description(data).nodes)


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [("normal like", 5.0, 2.0), ("uniform like", 1.0, 4 / 12**0.5)],
)
def test_draws_have_their_distribution_and_grow_with_the_shape(
    name: str, mean: float, deviation: float
) -> None:
    """More draws than the first run is given: the run is repeated with enough, and a small shape
    has the first draws of a large one."""
    program = load(RANDOM[name])
    small = program.run({"x": np.zeros((3, 4), "f")}, seed=7)["y"]
    large = program.run({"x": np.zeros((100, 1000), "f")}, seed=7)["y"]
    assert len(np.unique(large)) > 95_000
    assert small.reshape(-1).tolist() == large.reshape(-1)[:12].tolist()
    assert large.mean() == pytest.approx(mean, abs=0.02)
    assert large.std() == pytest.approx(deviation, abs=0.02)
    assert small.tobytes() == program.run({"x": np.zeros((3, 4), "f")}, seed=7)["y"].tobytes()


def test_a_draw_may_be_an_output() -> None:
    data = model([node("RandomUniform", "", "y", shape=[5])], [port("x", [1])], [port("y", [5])])
    found = load(data).run({"x": np.zeros(1, "f")}, seed=1)["y"]
    assert len(np.unique(found)) == 5


def test_random_nodes_that_no_seed_reaches_are_refused() -> None:
    multinomial = model(
        [node("Multinomial", "x", "y", sample_size=2)],
        [port("x", [1, 3])],
        [port("y", None, onnx.TensorProto.INT32)],
    )
    bernoulli = model([node("Bernoulli", "x", "y")], [port("x", [3])], [port("y", None)])
    branch = helper.make_graph([node("RandomNormalLike", "x", "b")], "t", [], [port("b", None)])
    plain = helper.make_graph([node("Identity", "x", "b")], "e", [], [port("b", None)])
    inner = model(
        [helper.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=plain)],
        [port("x", [2]), port("go", [], BOOL)],
        [port("y", None)],
    )
    training = model(
        [node("Dropout", "x ratio on", "y")],
        [port("x", [8])],
        [port("y", [8])],
        [stored("ratio", np.float32(0.5)), stored("on", np.array(True))],
    )
    asked = model(
        [node("Dropout", "x ratio on", "y")],
        [port("x", [8]), port("on", [], BOOL)],
        [port("y", [8])],
        [stored("ratio", np.float32(0.5))],
    )
    for data, message in (
        (multinomial, "operator Multinomial 'Multinomial of y' draws numbers that no seed"),
        (bernoulli, "operator Bernoulli .* allowed: RandomNormal, RandomNormalLike"),
        (inner, "inside a branch, loop or function"),
        (noisy("RandomNormalLike", like=True, opset=10), "in opset 10; allowed: 11 and later"),
        (training, "Dropout .* in training mode"),
        (asked, "Dropout .* in training mode"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            load(data)
    still = model(
        [node("Dropout", "x ratio on", "y")],
        [port("x", [8])],
        [port("y", [8])],
        [stored("ratio", np.float32(0.5)), stored("on", np.array(False))],
    )
    assert load(still).run({"x": np.ones(8, "f")})["y"].tolist() == [1.0] * 8


def counter() -> bytes:
    """stateN = state + x, y = the sum's last column."""
    return model(
        [node("Add", "state x", "stateN"), node("ReduceSum", "stateN", "y", keepdims=1)],
        [port("x", ["batch", 1]), port("state", ["batch", 2])],
        [port("y", [1, 1]), port("stateN", ["batch", 2])],
    )


def test_states_go_from_run_to_run() -> None:
    program = load(counter())
    states = program.start()
    for step in (1, 2, 3):
        outputs, states = program.step({"x": np.ones((1, 1), "f")}, states)
        assert outputs.keys() == {"y"}
        assert outputs["y"].item() == 2 * step
    assert program.start(5)["state"].shape == (5, 2)


def mixing() -> bytes:
    """Each row minus the mean of all rows: a row is not the same in company."""
    return model(
        [node("ReduceMean", "x", "m", axes=[0], keepdims=1), node("Sub", "x m", "y")],
        [port("x", ["batch", 4])],
        [port("y", ["batch", 4])],
    )


def test_rows_go_together_only_where_it_is_proven() -> None:
    row = {"x": np.arange(4, dtype="f").reshape(1, 4)}
    verdict = load(mixing()).prove(row, 3)
    assert not verdict.together
    assert verdict.reason.startswith("output y differs by")
    verdict = load(counter()).prove(
        {"x": np.ones((1, 1), "f"), "state": np.array([[1, 2]], "f")}, 3
    )
    assert "output y has no dimension that counts rows" in verdict.reason
    assert (
        "each row has its own seed"
        in load(RANDOM["normal like"]).prove({"x": np.ones((1, 4), "f")}, 2).reason
    )
    fixed = load(double(1, 4)).prove(row, 2)
    assert fixed.reason == "every input has a fixed first dimension: one row"
    pool = model(
        [node("ReduceSum", "x", "y", keepdims=1)], [port("x", ["b", 4])], [port("y", ["n", 1])]
    )
    assert load(pool).prove(row, 2).reason == "output y is [1, 1] for 2 rows"


def test_rows_that_are_equal_and_cheaper_go_together() -> None:
    """Whether it is cheaper is measured, so here it is decided."""
    program = load(double("batch", 4))
    feeds = [{"x": np.full((1, 4), at, "f")} for at in range(3)]
    verdict = program.prove(feeds[1], 3)
    assert verdict.reason.startswith("equal")
    assert verdict.alone_ns > 0
    runs = count_runs(program)
    for together, expected in ((True, 1), (False, 3)):
        for key, one in list(program.verdicts.items()):
            program.verdicts[key] = RowsVerdict(together, one.reason)
        runs.clear()
        found = program.run_rows(feeds)
        assert len(runs) == expected
        assert [one["y"].tolist() for one in found] == [[[2.0 * at] * 4] for at in range(3)]
    runs.clear()
    program.run_rows(feeds[:2])  # Two were never tried.
    assert len(runs) == 2


def count_runs(program: ForeignProgram) -> list[int]:
    runs: list[int] = []
    kept = program.run

    def counted(*given: Any, **named: Any) -> Any:
        runs.append(1)
        return kept(*given, **named)

    program.run = counted  # type: ignore[method-assign]
    return runs


def test_inputs_that_rows_share_must_be_equal() -> None:
    data = model(
        [node("Mul", "x rate", "y")], [port("x", ["b", 4]), port("rate", [])], [port("y", ["b", 4])]
    )
    program = load(data)
    feeds = [
        {"x": np.full((1, 4), at, "f"), "rate": np.array(rate, "f")}
        for at, rate in ((1, 2), (2, 2), (3, 5))
    ]
    assert program.prove(feeds[0], 3).reason.startswith("equal")
    for key, one in list(program.verdicts.items()):
        program.verdicts[key] = RowsVerdict(True, one.reason)
    runs = count_runs(program)
    found = program.run_rows(feeds)
    assert len(runs) == 3
    assert [one["y"][0, 0] for one in found] == [2, 4, 15]


def test_a_price_is_that_of_the_smallest_bucket_that_covers() -> None:
    program = load(network())

    def shapes(*dims: int) -> Any:
        return program.shapes({"x": np.empty(dims, "f")})

    for size in (4, 16):
        program.warm({"x": np.ones((1, 3, size, size), "f")})
    small, large = (program.buckets[shapes(1, 3, size, size)] for size in (4, 16))
    assert program.price(shapes(1, 3, 4, 4)) == small
    assert program.price(shapes(1, 3, 4, 5)) == large
    assert program.price(shapes(1, 3, 3, 3)) == min(small, large)
    assert program.price(shapes(2, 3, 4, 4)) is None


def test_a_crash_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined.sys, "executable", "/bin/false")
    with pytest.raises(UnsupportedModel, match=r"ends the process that loads it, .*\(status 1\)"):
        load(double(1), trial=True)


def test_draws_of_runs_in_several_threads() -> None:
    """Another thread's longer run is not taken for one's own draws."""
    program = load(RANDOM["normal like"])
    other = load(RANDOM["normal like"])
    x = np.zeros((100, 100), "f")
    expected = other.run({"x": x}, seed=5)["y"].tobytes()
    kept = program._short

    def late(values: Any, feed: Any) -> bool:
        program._counts = dict.fromkeys(program._counts, 1 << 20)
        return kept(values, feed)

    program._short = late  # type: ignore[method-assign]
    assert program.run({"x": x}, seed=5)["y"].tobytes() == expected


def test_runs_in_several_threads_have_their_own_results() -> None:
    program = load(network())
    x = [np.random.default_rng(at).standard_normal((1, 3, 8, 8)).astype("f") for at in range(4)]
    expected = [program.run({"x": one})["y"].tobytes() for one in x]
    wrong: list[int] = []

    def work(at: int) -> None:
        wrong.extend(
            at for _ in range(20) if program.run({"x": x[at]})["y"].tobytes() != expected[at]
        )

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_proven_by_rows_that_are_alike() -> None:
    """A row minus the largest of all rows: alone, and among equal rows, it is zero."""
    for kind, dtype in ((FLOAT, "f"), (INT64, "i8"), (BOOL, "?")):
        numbers = [node("Cast", "x", "n", to=FLOAT), node("ReduceMax", "n", "m", axes=[0])]
        data = model(
            [*numbers, node("Sub", "n m", "y")],
            [port("x", ["batch", 1], kind)],
            [port("y", ["batch", 1])],
        )
        for value in (0, 1):
            verdict = load(data).prove({"x": np.full((1, 1), value, dtype)}, 4)
            assert not verdict.together, (kind, value)
            assert verdict.reason.startswith("output y differs by"), (kind, value)


def test_rows_without_values_prove_nothing() -> None:
    verdict = load(double("batch", "n")).prove({"x": np.zeros((1, 0), "f")}, 3)
    assert verdict.reason == "input x has one value in every row: nothing is proven"


def test_a_time_limit_of_no_number_is_the_programs_own() -> None:
    program = load(endless(), ProgramLimits(seconds=0.2))
    with pytest.raises(RunStopped, match=r"stopped after 0\.2 s"):
        program.run(loops(program), seconds=float("nan"))


def test_draws_take_little_more_than_their_own_memory() -> None:
    drawn = rewritten(*noisy_file(1 << 22))[1][0]
    tracemalloc.start()
    try:
        found = drawn.values(3, 0, 0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.nbytes == 1 << 24
    assert most < 2.5 * found.nbytes


def test_draws_are_the_same_in_pieces_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = rewritten(*noisy_file(1000))[1][0]
    whole = drawn.values(3, 0, 0)
    monkeypatch.setattr("headrace.programs.drawn.PIECE", 77)
    assert drawn.values(3, 0, 0).tobytes() == whole.tobytes()


def noisy_file(count: int) -> tuple[bytes, Any]:
    data = model([node("RandomNormal", "", "y", shape=[count])], [], [port("y", [count])])
    return data, description(data)


def test_an_input_may_begin_at_any_byte() -> None:
    """Binary tensors of a request are views of its body."""
    x = np.frombuffer(b"!" + np.arange(4, dtype="f").tobytes(), np.uint8)[1:].view("f")
    program = load(double(4))
    taken = fitting(program.inputs, {"x": x})["x"]
    assert taken.flags.aligned
    assert program.run({"x": x})["y"].tolist() == [0, 2, 4, 6]
