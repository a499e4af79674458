"""Dialect "ort" against ONNX Runtime's own builder: the same graph, or where it differs and why.

GradientGraphBuilder differentiates a scalar. So every case is given a loss, the sum of its float outputs weighed by fed
cotangents, and both builders differentiate that. Only the training wheel has the builder.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad import demo
from refgrad.backends import get_backend
from refgrad.conformance import cases
from refgrad.conformance.case import Case
from refgrad.conformance.departures import Departure, every_departure
from refgrad.conformance.differences import directional
from refgrad.conformance.feeds import widened
from refgrad.conformance.nodemodels import excluded, node_models
from refgrad.conformance.structure import EXCUSES, compare
from refgrad.errors import BuilderError, InvalidModelError, WorkerError
from refgrad.functions import LOWEST, MICROSOFT
from refgrad.graph import Graph, is_unnamed
from refgrad.ortbuilder import Builders, readable
from refgrad.protos import import_domain, versions_of
from refgrad.selection import select_model_inputs_outputs
from refgrad.worker import Worker

# The operators that ONNX Runtime 1.19.2 has a gradient for, but for those that serve several processes or foreign code.
REGISTERED = frozenset(
    """Abs Add AveragePool BatchNormalization BatchNormInternal BiasGelu Cast Clip Concat ConcatTraining Conv ConvTranspose Cos
    Div Dropout Erf Exp Expand FakeQuant FastGelu Flatten FlattenAndUnpad GRU GRUTraining Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool Identity LSTM LSTMTraining LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mul
    Neg Pad PadAndUnflatten Pow QuickGelu Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize
    ScaledSum ScatterElements ScatterND ShrunkenGather Sigmoid SimplifiedLayerNormalization Sin Slice Softmax
    SoftmaxCrossEntropy SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal SparseSoftmaxCrossEntropy Split Sqrt Squeeze
    Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where""".split()  # noqa: SIM905  (a list a screen long otherwise)
)
# How many outputs the builder wants of a node of these, which may leave out the last ones.
WHOLE = {
    "Dropout": 2,
    "LayerNormalization": 3,
    "SimplifiedLayerNormalization": 2,
    "SoftmaxCrossEntropyLoss": 2,
    "SoftmaxCrossEntropyLossInternal": 2,
}
# Operators of which it differentiates the first output alone, and that by so many of the first inputs.
PART = {
    "BatchNormalization": 3,
    "BatchNormInternal": 3,
    "LayerNormalization": 3,
    "SoftmaxCrossEntropyLoss": 1,
    "SoftmaxCrossEntropyLossInternal": 1,
}
PARTLY = frozenset(("Clip", "Dropout", "FakeQuant", "Pad", "Pow"))  # it has no gradient for some of their float inputs
LOSS = "weighed_loss"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TRAINING_OUTPUTS = {"GRU": 3, "LSTM": 5}  # how many outputs the training form of an operator has
EQUAL = 1e-6  # the difference of two results, relative to the largest element: rounding
FACTOR = 10  # how much farther from the float64 result a float32 one may be than another: more is no rounding
WRONG = 1e-5  # how far a float64 gradient is from differences, relative to its norm, that is none
SLIGHTLY, CLEARLY = 1e-5, 100  # the same of theirs: by more than rounding of floats, and so much farther than ours


@dataclass(frozen=True)
class Pair:
    """Two gradients of one case: functions of the same inputs with the same outputs. `model` is what they differentiate."""

    model: ModelProto
    ours: ModelProto
    theirs: ModelProto
    feeds: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """What came of one case.

    `verdict`: "isomorphic"; "isomorphic apart from ..." (names in `EXCUSES`); "different"; or "refused": the builder made no
    gradient, and `detail` is its message. `values`: "equal", "theirs fail", "theirs are wrong", "ours fail", "both fail",
    or "ours are wrong"; `proof` is what was measured.
    """

    operator: str
    case: str
    verdict: str
    detail: str = ""
    values: str = ""
    proof: str = ""
    same_names: bool = True
    same_operators: bool = True

    @property
    def kind(self) -> str:
        """The kind of departure that this is (`refgrad.conformance.departures.KINDS`), "" where it is none."""
        if self.verdict == "refused":
            return "refused"
        by_values = {"theirs fail": "fails", "both fail": "kernel", "ours fail": "kernel", "theirs are wrong": "wrong"}
        return by_values.get(self.values) or ("form" if self.verdict == "different" or not self.same_names else "")


def table() -> Iterator[tuple[str, Case]]:
    """Every case of a registered operator, under the operator's name, and each with one input differentiated at a time.

    A case whose node leaves out an output that the builder wants comes twice: as it is, and with it (`-whole`). A static case
    comes once more with a first size that is a symbol, the same in every input that has it (`-batch`), as in most models.
    One of an operator in `PART` comes with only what the builder differentiates (`-part`). GRU and LSTM come as they are
    only. The last are onnx's own node tests.
    """
    for module in pkgutil.iter_modules(cases.__path__):
        family = importlib.import_module(f"{cases.__name__}.{module.name}")
        for case in (*getattr(family, "cases", tuple)(), *getattr(family, "in_double", tuple)()):
            operator = _operator(case)
            if operator not in REGISTERED or versions_of(case.model)[""] < LOWEST:  # refgrad converts those first
                continue
            yield operator, case
            if operator in _TRAINING_OUTPUTS:  # it differentiates few forms of these, however they are put
                continue
            if len(case.node.output) < WHOLE.get(operator, 0):
                case = Case(f"{case.name}-whole", _whole(case.model), case.feeds, case.wrt, case.outputs)
                yield operator, case
            if case.static and (model := _batch(case.model)) is not None:
                yield operator, Case(f"{case.name}-batch", model, case.feeds, case.wrt, case.outputs)
            if operator in PART:
                yield operator, _part(case, operator)
            inputs = _floats(case.model) if case.wrt is None else case.wrt
            if len(inputs) > 1 and (case.static or operator in PARTLY):
                for name in inputs:
                    yield operator, Case(f"{case.name}-by-{name}", case.model, case.feeds, (name,), case.outputs)
    for test in node_models():
        if test.operator in REGISTERED and len(test.model.graph.node) == 1 and excluded(test) is None:
            [node] = test.model.graph.node
            if wrt := tuple(
                name for name in test.wrt if name in node.input
            ):  # it has no gradient for what nothing reads
                yield test.operator, Case(test.name, test.model, test.feeds, wrt, test.outputs)


def _operator(case: Case) -> str:
    return next((node.op_type for node in case.model.graph.node if node.name == "node"), "")


def _whole(model: ModelProto) -> ModelProto:
    """`model`, each node with as many outputs as the builder wants of it."""
    made = ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        node.output.extend(f"{node.name}_{k}" for k in range(len(node.output), WHOLE.get(node.op_type, 0)))
    return made


def _part(case: Case, operator: str) -> Case:
    """`case` by the inputs in `PART` and of the first output alone."""
    node = next(node for node in case.model.graph.node if node.op_type == operator)
    reads = node.input[: PART[operator]]
    wrt = tuple(value.name for value in case.model.graph.input if value.name in reads or f"{value.name}_" in reads)
    return Case(f"{case.name}-part", case.model, case.feeds, wrt, (case.model.graph.output[0].name,))


def _as_it_trains(model: ModelProto) -> ModelProto:
    """`model` with the operators that the builder knows, as ONNX Runtime's other tools write them before they call it."""
    made, known = ModelProto(), Graph(model)
    made.CopyFrom(model)
    for node in made.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":  # it has the operator in the domain of ai.onnx
            node.domain = ""
        elif node.op_type == "BatchNormalization":  # its module builder does so, with a node in inference too
            node.op_type, node.domain = "BatchNormInternal", MICROSOFT
            others = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend((*others, helper.make_attribute("training_mode", 1)))
            node.output.extend(f"{node.name}_{k}" for k in range(len(node.output), 5))
            import_domain(made, MICROSOFT)
        elif node.op_type in _TRAINING_OUTPUTS:
            whole = _TRAINING_OUTPUTS[node.op_type]
            node.op_type, node.domain = f"{node.op_type}Training", MICROSOFT
            for name in node.output:  # it infers nothing of the training form
                if name in known.types and name in known.shapes:
                    value = helper.make_tensor_value_info(name, known.types[name], known.shapes[name])
                    made.graph.value_info.append(value)
            outputs = [name or f"{node.name}_{k}" for k, name in enumerate(node.output)]
            del node.output[:]
            node.output.extend((*outputs, *(f"{node.name}_{k}" for k in range(len(outputs), whole))))
            import_domain(made, MICROSOFT)
    return made


def _batch(model: ModelProto) -> ModelProto | None:
    """`model` with the first size of its first input a symbol, wherever an input begins with it; None where there is none.

    A vector of integers is more likely to hold sizes or axes than one of them per element of a batch.
    """
    made = ModelProto()
    made.CopyFrom(model)
    tensors = [value.type.tensor_type for value in made.graph.input]
    if not tensors or not tensors[0].shape.dim or not (size := tensors[0].shape.dim[0].dim_value):
        return None
    for tensor in tensors:
        dims = tensor.shape.dim
        if dims and dims[0].dim_value == size and (len(dims) > 1 or tensor.elem_type in _FLOATS):
            dims[0].dim_param = "N"
    return made


def _floats(model: ModelProto) -> tuple[str, ...]:
    return tuple(value.name for value in model.graph.input if value.type.tensor_type.elem_type in _FLOATS)


def with_loss(model: ModelProto, outputs: Collection[str] | None = None, plain: Collection[str] = ()) -> ModelProto:
    """`model` with one output, `weighed_loss`: the sum of the given outputs (all that are float), each weighed as it is fed.

    The cotangent of `y` is the input `y_weight`; an output in `plain` is only summed. The builder takes a loss in float
    alone, and no node whose last input is an empty name.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for node in graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()
    for value in graph.output:  # what is declared of an output may name other sizes than those that it has
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    known = Graph(made)
    terms = []
    for value in model.graph.output:
        if value.type.tensor_type.elem_type not in _FLOATS or (outputs is not None and value.name not in outputs):
            continue
        kind, shape = value.type.tensor_type.elem_type, known.shapes.get(value.name)
        summed, term = value.name, f"{value.name}_term"
        if value.name not in plain:
            dims = None if shape is None else [None if is_unnamed(dim) else dim for dim in shape]
            graph.input.append(helper.make_tensor_value_info(f"{value.name}_weight", kind, dims))
            summed = f"{term}s"
            graph.node.append(helper.make_node("Mul", [value.name, f"{value.name}_weight"], [summed], name=summed))
        graph.node.append(helper.make_node("ReduceSum", [summed], [term], name=term, keepdims=0))
        if kind != TensorProto.FLOAT:
            node = helper.make_node("Cast", [term], [f"{term}_cast"], name=f"{term}_cast", to=TensorProto.FLOAT)
            graph.node.append(node)
            term = node.output[0]
        terms.append(term)
    total = terms[0]
    for k, term in enumerate(terms[1:]):
        graph.node.append(helper.make_node("Add", [total, term], [f"total_{k}"], name=f"total_{k}"))
        total = f"total_{k}"
    graph.node.append(helper.make_node("Identity", [total], [LOSS], name=LOSS))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))
    return made


def build(case: Case, builders: Builders) -> Pair:
    """Both gradients of the loss of `case`, and feeds: those of the case, random cotangents, and 1 for the loss.

    :raises BuilderError: ONNX Runtime's builder made none.
    """
    source = readable(case.model)
    results = get_backend("numpy").prepare(source).run(case.feeds)
    # A broadcast product of empty tensors is more than both builders can do (see the departures of Mul).
    model = with_loss(source, case.outputs, [name for name, y in results.items() if not y.size])
    known = Graph(model)
    wrt = [name for name in (_floats(case.model) if case.wrt is None else case.wrt) if name in known.types]
    # The gradient of FakeQuant is what refgrad has with "clipped": ONNX Runtime has no other.
    ours = refgrad.gradient(model, wrt=wrt, outputs=[LOSS], dialect="ort", quantization="clipped")
    theirs = builders.raw(_as_it_trains(model), wrt, LOSS)
    made = {f"{name}_grad" for name in wrt}
    kept = [value for value in theirs.graph.output if value.name in made]
    del theirs.graph.output[:]
    theirs.graph.output.extend(kept)
    return Pair(model, ours, theirs, _feeds(case, model, results))


def _feeds(case: Case, model: ModelProto, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    feeds = dict(case.feeds)
    for value in model.graph.input:
        if value.name not in feeds:
            y = results[value.name.removesuffix("_weight")]
            feeds[value.name] = rng.standard_normal(y.shape).astype(y.dtype)
    return feeds | {f"{LOSS}_grad": np.ones((), np.float32)}


def measure(
    operator: str, case: Case, builders: Builders, runner: Worker | None = None, kept: Kept | None = None
) -> Row:
    """Compare the two builders on one case; with a `runner`, what their graphs compute on ONNX Runtime as well.

    Two gradients that compute the same are added to `kept`.
    """
    row = partial(Row, operator, case.name)
    try:
        pair = build(case, builders)
        found = compare(pair.ours, pair.theirs)
    except BuilderError as error:
        return row("refused", f"{error.verdict}: {error}")
    except InvalidModelError as error:
        return row("refused", f"its graph is broken: {error}")
    verdict = "isomorphic"
    if not found:
        excuses = [[excuse] for excuse in EXCUSES] + [list(EXCUSES)]
        granted = next((names for names in excuses if compare(pair.ours, pair.theirs, names)), None)
        verdict = "different" if granted is None else f"isomorphic apart from {' and '.join(granted)}"
    detail = str(compare(pair.ours, pair.theirs, EXCUSES)) if verdict == "different" else ""
    values, proof, results = ("", "", {}) if runner is None else compare_values(pair, runner)
    if kept is not None and values == "equal":
        kept.add(case.name, pair, results)
    return row(verdict, detail, values, proof, found.same_names, found.same_operators)


def compare_values(pair: Pair, runner: Worker) -> tuple[str, str, dict[str, np.ndarray]]:
    """Whether both gradients compute the same on ONNX Runtime, and who is right where they do not; and what ours computes."""
    results, failures = [], {}
    for whose, model in (("ours", pair.ours), ("theirs", pair.theirs)):
        try:
            results.append(runner.call(run, model.SerializeToString(), dict(pair.feeds)))
        except WorkerError as error:
            failures[whose] = f"{error.verdict}: {error}"
    if failures:
        whose = "both" if len(failures) == 2 else next(iter(failures))
        return f"{whose} fail", failures.get("theirs") or failures["ours"], {}
    if _farthest(results[1], results[0]) <= EQUAL:
        return "equal", f"{_farthest(results[1], results[0]):.1e}", results[0]
    exact = get_backend("numpy").prepare(pair.ours, precision="float64").run(widened(pair.feeds))
    graph, ours, theirs = _off(pair, exact), _farthest(results[0], exact), _farthest(results[1], exact)
    proof = f"off from float64 by {ours:.1e} (ours) and {theirs:.1e} (theirs); float64 is off from differences by {graph:.1e}"
    if graph > WRONG or ours > FACTOR * max(theirs, EQUAL):
        return "ours are wrong", proof, {}
    return "theirs are wrong" if theirs > FACTOR * max(ours, EQUAL) else "equal", proof, results[0]


def run(model: bytes, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model on ONNX Runtime."""
    return get_backend("ort-cpu").prepare(onnx.load_from_string(model)).run(feeds)


def _farthest(results: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> float:
    return max((_distance(results[name], value) for name, value in truth.items()), default=0.0)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two arrays, relative to the largest element; infinite where the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    far = float(np.max(np.abs(a - b))) / max(float(np.max(np.abs(b))), sys.float_info.min)
    return math.inf if math.isnan(far) else far


def _off(pair: Pair, gradients: Mapping[str, np.ndarray]) -> float:
    """How far gradients are from float64 differences along a random direction, relative to their norm."""
    forward = get_backend("numpy").prepare(pair.model, precision="float64")
    feeds = {name: value for name, value in widened(pair.feeds).items() if name != f"{LOSS}_grad"}
    rng = np.random.default_rng(0)
    worst = 0.0
    for name, gradient in gradients.items():
        source = name.removesuffix("_grad")
        if gradient.shape != feeds[source].shape:
            return math.inf
        direction = {source: rng.standard_normal(gradient.shape)}
        expected = directional(lambda x: forward.run(x), feeds, direction, {LOSS: np.ones(())})
        got = float(np.sum(gradient * direction[source]))
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        size = max(norm, abs(expected.value), sys.float_info.min)
        error = (abs(got - expected.value) - expected.error) / size
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def survey(operator: str, folder: Path | None = None) -> list[Row]:
    """Measure every case of a registered operator.

    The cases whose gradients are equal are written to `folder`/`operator`.npz (see `Kept`). What draws at random is not: no
    two runtimes draw the same.
    """
    kept = None if folder is None or operator == "Dropout" else Kept()
    with Builders() as builders, Worker() as runner:
        rows = [measure(operator, case, builders, runner, kept) for name, case in table() if name == operator]
    if kept is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        kept.save(folder / f"{operator}.npz")
    return rows


def reason(row: Row) -> Departure | None:
    """The departure that explains `row`; None where nothing does, or nothing has to."""
    return next((d for d in every_departure() if d.covers(row.operator, row.kind, row.case)), None)


def unexplained(rows: Iterable[Row]) -> list[Row]:
    """The rows that depart from ONNX Runtime's graph, or from its names, without a reason, and those where refgrad is wrong."""
    return [row for row in rows if row.values == "ours are wrong" or (row.kind and reason(row) is None)]


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """By operator, how many cases came out how: the verdict where there is no departure, else its kind.

    "right" are the cases where the builder is, and refgrad too; "same operators" and "same names" count those.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        right = row.kind in ("", "form")
        column = found.setdefault(row.operator, Counter())
        column["cases"] += 1
        column[row.kind or row.verdict] += 1
        column["right"] += right
        column["same operators"] += right and row.same_operators
        column["same names"] += right and row.same_names
    return {operator: dict(sorted(column.items())) for operator, column in sorted(found.items())}


def grounds(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Every departure that explains a row: how many, of which operators, and one of them with what was measured."""
    found: dict[Departure, list[Row]] = {}
    for row in rows:
        departure = reason(row) if row.kind else None
        if departure is not None:
            found.setdefault(departure, []).append(row)
    return [
        {
            "kind": departure.kind,
            "reason": departure.reason,
            "cases": dict(Counter(row.operator for row in explained)),
            "example": explained[0].case,
            "detail": explained[0].detail,
            "proof": explained[0].proof,
        }
        for departure in every_departure()
        if (explained := found.get(departure))
    ]


@dataclass(frozen=True)
class WholeModel:
    """What came of one model: how many nodes the graphs have, ours and theirs, and the rest as of a case."""

    name: str
    builder: str
    nodes: tuple[int, int]
    row: Row


def whole_models(folder: Path | None = None) -> dict[str, Case]:
    """The notebook's regression, an MLP of scikit-learn's, and of `folder` a ResNet-18, an LSTM and a GRU of torch's exporter.

    Each as the module builder optimises it before it differentiates: fused, with operators in their training form, and with
    what is trained among the inputs.
    """
    neural_network, skl2onnx = (importlib.import_module(name) for name in ("sklearn.neural_network", "skl2onnx"))
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    regressor = neural_network.MLPRegressor(hidden_layer_sizes=(5, 3), max_iter=2000, random_state=0).fit(
        x, x[:, :1].sum(axis=1)
    )
    found = {
        "regression": (demo.regression(loss=False), {"x": demo.feeds()["x"]}),
        "regression, the loss alone": (
            select_model_inputs_outputs(demo.regression(), ["loss"]),
            {name: demo.feeds()[name] for name in ("x", "label")},
        ),
        "MLP of scikit-learn": (skl2onnx.to_onnx(regressor, x[:1], target_opset=18), {"X": x[:5]}),
    }
    exported = {} if folder is None else {name: folder / f"{name}.onnx" for name in ("resnet18", "lstm", "gru")}
    for name, path in exported.items():
        feeds = np.load(path.with_suffix(".npz"))
        found[name] = (
            onnx.load(path),
            {key.removeprefix("feed/"): feeds[key] for key in feeds if key.startswith("feed/")},
        )
    with Builders() as builders:
        return {name: _optimized(name, model, feeds, builders) for name, (model, feeds) in found.items()}


def _optimized(name: str, model: ModelProto, feeds: Mapping[str, np.ndarray], builders: Builders) -> Case:
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type in _FLOATS}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":  # its statistics are not trained
            for statistic in node.input[3:5]:
                weights.pop(statistic, None)
    inputs = [name for name in _floats(model) if name not in weights]
    forward = builders.optimized(model, inputs, weights)
    used = {name for node in forward.graph.node for name in node.input}
    weights = {name: value for name, value in weights.items() if name in used}
    return Case(name, forward, {**feeds, **weights}, (*inputs, *weights))


def measure_model(case: Case, builders: Builders, runner: Worker) -> Iterator[WholeModel]:
    """Compare one of `whole_models` with both builders: the raw one on its loss, the module one with YieldOp."""
    row = measure(case.name, case, builders, runner)
    pair = build(case, builders)
    yield WholeModel(case.name, "GradientGraphBuilder", _sizes(pair.ours, pair.theirs), row)
    wrt = case.wrt or ()
    ours = refgrad.gradient(case.model, wrt, dialect="ort", cotangent="yield")
    theirs = builders.module(case.model, wrt, [])
    found = compare(ours, theirs)
    verdict, detail = ("isomorphic", "") if found else ("different", str(found))
    same = found.same_names, found.same_operators
    row = replace(row, verdict=verdict, detail=detail, same_names=same[0], same_operators=same[1])
    yield WholeModel(case.name, "OrtModuleGraphBuilder", _sizes(ours, theirs), row)


def _sizes(ours: ModelProto, theirs: ModelProto) -> tuple[int, int]:
    return len(ours.graph.node), len(theirs.graph.node)


@dataclass(frozen=True)
class Saved:
    """A case whose two gradients are equal: both, what they were fed, and what they computed."""

    case: str
    ours: ModelProto
    theirs: ModelProto
    feeds: Mapping[str, np.ndarray]
    results: Mapping[str, np.ndarray]


class Kept:
    """Cases whose two gradients are equal, as a file for runtimes without training operators, which run both lowered."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._count = 0

    def add(self, case: str, pair: Pair, results: Mapping[str, np.ndarray]) -> None:
        """Keep one more."""
        models = {"ours": pair.ours, "theirs": pair.theirs}
        parts = {name: np.frombuffer(model.SerializeToString(), np.uint8) for name, model in models.items()}
        parts["case"] = np.array(case)
        parts |= {f"feeds|{name}": value for name, value in pair.feeds.items()}
        parts |= {f"results|{name}": value for name, value in results.items()}
        self._arrays |= {f"{self._count}|{name}": value for name, value in parts.items()}
        self._count += 1

    def save(self, path: Path) -> None:
        """Write what was kept."""
        np.savez_compressed(path, allow_pickle=False, **self._arrays)

    @staticmethod
    def load(path: Path) -> Iterator[Saved]:
        """What `save` wrote."""
        entries: dict[str, dict[str, np.ndarray]] = {}
        for key, array in np.load(path).items():
            number, _, name = key.partition("|")
            entries.setdefault(number, {})[name] = array
        for parts in entries.values():
            ours, theirs = (onnx.load_from_string(parts[whose].tobytes()) for whose in ("ours", "theirs"))
            feeds, results = (
                {name.removeprefix(kind): array for name, array in parts.items() if name.startswith(kind)}
                for kind in ("feeds|", "results|")
            )
            yield Saved(str(parts["case"]), ours, theirs, feeds, results)
