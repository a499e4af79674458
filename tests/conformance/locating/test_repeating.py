"""Executors whose results differ from run to run, or depend on the run before: no node is blamed by repair then."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import refgrad
from refgrad.backends import Backend, get_backend
from refgrad.backends.base import Prepared, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import Watching
from refgrad.conformance.locating import repeating
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.locating.location import locate
from refgrad.conformance.locating.reducing import reduce
from refgrad.conformance.locating.repeating import run_steadily
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.problems.systems.apart import Apart
from refgrad.conformance.verdicts import REMEMBERS, VARIES
from refgrad.errors import BackendError, FeedError, WorkerError

pytestmark = pytest.mark.interpreter

MODEL = """
    <ir_version: 8, opset_import: ["": 18]>
    network (float[3, 4] x) => (float[3, 2] y)
    <float[4, 5] w1, float[5, 2] w2>
    { [first] h = MatMul(x, w1)  [act] a = Tanh(h)  [second] y = MatMul(a, w2) }
"""


def network():
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    del model.graph.initializer[:]
    for name, shape in (("w1", (4, 5)), ("w2", (5, 2))):
        value = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


class Altered(Backend):
    """The interpreter, whose nodes of one operator are altered by a function of the node, its inputs and its result."""

    name = "altered"

    def __init__(self, operator, alter):
        self.operator, self.alter = operator, alter

    def description(self):
        return "altered"

    def prepare(self, model, **options):
        alter = self.alter()  # a session has a memory of its own

        def watch(node, inputs, outer, compute):
            results = compute()
            if node.op_type != self.operator:
                return results
            return (np.asarray(alter(node, inputs, results[0]), results[0].dtype), *results[1:])

        return NumpyBackend().prepare(load_model(model), precision=Watching(watch))


class Session(Prepared):
    def __init__(self, prepared, run):
        self.inputs, self.outputs, self._run, self._prepared = prepared.inputs, prepared.outputs, run, prepared

    def run(self, feeds, outputs=None):
        return self._run(self._prepared.run(feeds, outputs))


class Remembering(Backend):
    """The interpreter, whose results pass a function of all results so far."""

    name = "remembering"

    def __init__(self, change):
        self.change = change

    def description(self):
        return "remembers"

    def prepare(self, model, **options):
        return Session(get_backend("numpy").prepare(model), self.change())


def racing():
    rng = np.random.default_rng()
    return lambda node, inputs, result: result * (1 + 0.1 * rng.random(result.shape))


def caching():
    held = {}
    return lambda node, inputs, result: held.setdefault(inputs[0].shape, result)


def uncleared():
    left = {}

    def add(node, inputs, result):
        left[node.output[0]] = result + 0.5 * left.get(node.output[0], 0)
        return left[node.output[0]]

    return add


def adding_up():
    total = {}

    def run(results):
        for name, value in results.items():
            total[name] = total.get(name, 0) + value
        return dict(total)

    return run


def stale():
    first = {}
    return lambda results: {name: first.setdefault(name, value) for name, value in results.items()}


def filling():
    """A cache of four places, whose last one is read when it is full."""
    runs = {}

    def last(node, inputs, result):
        seen = runs.setdefault(node.output[0], [])
        seen.append(result)
        return result if len(seen) < 5 else 1.5 * result

    return last


def warming_up():
    """A buffer that is added to from the fourth run on."""
    runs, total = [], {}

    def run(results):
        runs.append(results)
        for name, value in results.items():
            total[name] = value + (total.get(name, 0) if len(runs) > 3 else 0)
        return dict(total)

    return run


@pytest.mark.parametrize(
    "executor", [Altered("Tanh", filling), Remembering(warming_up)], ids=["a cache that fills", "sums after a warm-up"]
)
def test_a_fault_of_later_runs_is_seen(executor):
    found = compare(network(), Live("refgrad", executor), "refgrad@numpy")
    assert {tensor.a.verdict for tensor in found.tensors} == {REMEMBERS}
    assert found.a.unsteady.kind == REMEMBERS
    if isinstance(executor, Altered):
        assert found.a.unsteady.node == "act"


def test_runs_that_take_long_are_few(monkeypatch):
    runs = []

    def counting():
        return lambda results: runs.append(results) or results

    executor = Remembering(counting)
    assert run_steadily(executor, network(), {"x": np.ones((3, 4), np.float32)})[1] is None
    quick = len(runs)
    monkeypatch.setattr(repeating, "_SHORT", 0.0)
    runs.clear()
    assert run_steadily(executor, network(), {"x": np.ones((3, 4), np.float32)})[1] is None
    assert (quick, len(runs)) == (14, 6)


@pytest.mark.parametrize(
    ("operator", "alter", "kind", "node"),
    [
        ("MatMul", racing, VARIES, "first"),
        ("Tanh", racing, VARIES, "act"),
        ("Tanh", caching, REMEMBERS, "act"),
        ("MatMul", uncleared, REMEMBERS, "first"),
    ],
)
def test_the_first_node_that_differs_is_named_before_any_is_blamed(operator, alter, kind, node):
    model, executor = network(), Altered(operator, alter)
    found = compare(model, Live("refgrad", executor), "refgrad@numpy")
    assert not found.ok
    assert {tensor.a.verdict for tensor in found.tensors} == {kind}
    assert {tensor.b.verdict for tensor in found.tensors} == {"right"}
    assert (found.a.unsteady.kind, found.a.unsteady.node, found.a.unsteady.operator) == (kind, node, operator)
    assert found.a.kernels is None
    assert found.a.rules is None

    gradient = refgrad.gradient(model, ["x", "w1", "w2"], cotangent="ones")
    located = locate(gradient, {"x": np.ones((3, 4), np.float32)}, executor)
    assert (located.unsteady.node, located.culprits, located.groups) == (node, (), ())


def test_gradients_that_do_not_move_keep_their_verdict():
    executor = Altered("Gemm", racing)
    model = network()
    found = compare(model, Live("refgrad", executor), "refgrad@numpy", wrt=["x", "w1", "w2"])
    alone = compare(model, Live("refgrad", Altered("MatMul", lambda: last_alone())), "refgrad@numpy")
    assert {tensor.a.verdict for tensor in found.tensors if tensor.kind == "output"} == {"right"}
    assert {tensor.name for tensor in alone.tensors if tensor.a.verdict == VARIES} == {"y"}
    assert {tensor.a.verdict for tensor in alone.tensors if tensor.name != "y"} == {"right"}
    assert alone.a.unsteady.node == "second"


def last_alone():
    change = racing()
    return lambda node, inputs, result: change(node, inputs, result) if node.name == "second" else result


class Later(Backend):
    """The interpreter, whose runs after the first do something else."""

    name = "later"

    def __init__(self, act):
        self.act = act

    def description(self):
        return "later"

    def prepare(self, model, **options):
        counted = []

        def run(results):
            counted.append(1)
            return self.act(results) if len(counted) > 1 else results

        return Session(get_backend("numpy").prepare(model), run)


def busy(results):
    raise RuntimeError("busy")


@pytest.mark.parametrize("act", [busy, lambda results: {}, lambda results: None], ids=["raises", "lacks", "none"])
def test_a_later_run_that_fails_is_a_verdict(act):
    found = compare(network(), Live("refgrad", Later(act)), "refgrad@numpy")
    assert {tensor.a.verdict for tensor in found.tensors} == {REMEMBERS}
    assert {tensor.b.verdict for tensor in found.tensors} == {"right"}
    assert "a later one fails" in found.a.unsteady.note


@pytest.mark.parametrize("place", ["prepare", "run"])
def test_a_backend_that_raises_anything_is_a_side_that_fails(place):
    class Raising(Backend):
        name = "raising"

        def description(self):
            return "raises"

        def prepare(self, model, **options):
            if place == "prepare":
                raise ValueError("no such thing")
            return Session(get_backend("numpy").prepare(model), busy)

    found = compare(network(), Live("refgrad", Raising()), "refgrad@numpy")
    assert "raised" in found.a.failed
    assert {tensor.a.verdict for tensor in found.tensors} == {"missing"}


def test_a_backend_that_writes_into_its_inputs_fails():
    class Writing(Prepared):
        def __init__(self, prepared):
            self.inputs, self.outputs, self._prepared = prepared.inputs, prepared.outputs, prepared

        def run(self, feeds, outputs=None):
            results = self._prepared.run(feeds, outputs)
            feeds["x"][0] = 7
            return results

    class Mutating(Backend):
        name = "mutating"

        def description(self):
            return "mutates"

        def prepare(self, model, **options):
            return Writing(get_backend("numpy").prepare(model))

    found = compare(network(), Live("refgrad", Mutating()), "refgrad@numpy")
    assert "mutating wrote into what it was fed: 'x'" in found.a.failed


def test_what_differs_from_run_to_run_is_not_reduced():
    side = Live("refgrad", Altered("MatMul", racing))
    with pytest.raises(
        FeedError, match=r"Nothing can be reduced: altered is not the same in every run.*MatMul 'first'"
    ):
        reduce(network(), side, {"x": np.ones((3, 4), np.float32)})


@pytest.mark.parametrize(("change", "note"), [(adding_up, "not set to 0"), (stale, "results of other inputs")])
def test_a_session_that_remembers_is_no_fault_of_a_node(change, note):
    found = compare(network(), Live("refgrad", Remembering(change)), "refgrad@numpy")
    assert {tensor.a.verdict for tensor in found.tensors} == {REMEMBERS}
    assert found.a.unsteady.node == ""
    assert note in found.a.unsteady.note
    assert "the session as a whole" in str(found.a.unsteady)


def test_a_later_run_that_takes_too_long_is_no_verdict(monkeypatch):
    model, x = network(), np.ones((3, 4), np.float32)
    backend = Apart("onnx.reference", seconds=30)
    right = repeating.in_turn(backend, model, [{"x": x}])

    def slow(backend, model, feeds, fresh=False):
        if len(feeds) == 1:
            return right
        raise BackendError("it timed out") from WorkerError("timed out", "nothing came back after 60 s")

    monkeypatch.setattr(repeating, "in_turn", slow)
    assert run_steadily(backend, model, {"x": x}) == (right[0], None)
    backend.close()


def test_a_session_has_its_time_for_each_run():
    backend = Apart("onnx.reference", seconds=30)
    backend.in_turn(network(), [{"x": np.ones((3, 4), np.float32)}] * 3)
    assert backend._worker.seconds == 90
    backend.close()


@pytest.mark.parametrize("executor", ["ort-cpu", "onnx.reference"])
def test_a_steady_executor_is_not_suspected(executor):
    if executor == "ort-cpu":
        pytest.importorskip("onnxruntime")
    found = compare(network(), f"refgrad@{executor}", "refgrad@numpy")
    assert found.ok
    assert found.a.unsteady is None


def test_random_numbers_are_no_memory():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        noisy (float[4] x) => (float[4] y) { r = RandomNormalLike(x)  y = Mul(x, r) }
    """)
    executor = Remembering(lambda: lambda results: results)
    assert run_steadily(executor, model, {"x": np.ones(4, np.float32)})[1] is None


def test_a_wrong_node_is_still_blamed_where_every_run_is_the_same():
    executor = Altered("Tanh", lambda: lambda node, inputs, result: 1.1 * result)
    found = compare(network(), Live("refgrad", executor), "refgrad@numpy")
    assert found.a.unsteady is None
    assert [culprit.found.name for culprit in found.a.kernels.culprits] == ["act"]
