"""RNN, GRU and LSTM: their gradients against float64 differences, ONNX Runtime and torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.recurrent import GATES, OPTIONAL, apart, cases, recurrent
from refgrad.derivatives import ortbuilder
from refgrad.errors import NoGradientError, RuleError
from refgrad.tables.dialects import DIALECTS

pytestmark = pytest.mark.slow

PLAIN = ("sequence_lens", "P")  # what ONNX Runtime's training kernels do not read
KERNELS = {"GRU": ("GRUTraining", "GRUGrad"), "LSTM": ("LSTMTraining", "LSTMGrad")}


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    for dialect in DIALECTS:
        assert_gradient(case, dialect)


@pytest.mark.parametrize("case", list(apart()), ids=str)
def test_gradient_agrees_with_differences_alone(case: Case) -> None:
    for dialect in DIALECTS:
        assert_gradient(case, dialect, runtime=False)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("op", GATES)
def test_every_float_type(op: str, kind: Any) -> None:
    for shapes in SHAPES:
        case = recurrent(op, (3, 2, 2, 2), opset=22, shapes=shapes, kind=kind)
        for dialect in DIALECTS:
            assert_gradient(case, dialect, runtime=False)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("absent", [("Y",), ("Y_h",), ("Y", "Y_h"), ("Y_c",), ("Y_h", "Y_c")], ids=",".join)
@pytest.mark.parametrize("plain", [True, False])
def test_results_that_the_node_does_not_return(op: str, absent: tuple[str, ...], plain: bool) -> None:
    """Y is what the gates come from: a node that does not return it does in the gradient."""
    case = recurrent(op, absent=PLAIN if plain else ("B",), direction="forward" if plain else "reverse")
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    [node] = model.graph.node
    node.output[:] = [name if name not in absent else "" for name in node.output]
    kept = [value for value in model.graph.output if value.name not in absent]
    if not kept:
        pytest.skip("nothing is returned")
    del model.graph.output[:]
    model.graph.output.extend(kept)
    for dialect in DIALECTS:
        assert_gradient(Case(str(case), model, case.feeds), dialect)


# What is planted: the operator, the primitive, what is done to its inputs, attributes and results; and a case that shows it.
def _results(change: Callable[[Any, list[Any]], list[Any]]) -> Callable[..., Any]:
    return lambda right, op, *inputs, **attributes: tuple(change(op, list(right(op, *inputs, **attributes))))


def _with(**changed: Any) -> Callable[..., Any]:
    return lambda right, op, *inputs, **attributes: right(op, *inputs, **(attributes | changed))


def _input(place: int, change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def wrong(right: Any, op: Any, *inputs: Any, **attributes: Any) -> Any:
        return right(op, *inputs[:place], change(op, inputs[place]), *inputs[place + 1 :], **attributes)

    return wrong


def _none(op: Any, value: Any) -> None:
    return None


SQUARE = (3, 2, 2, 3)
PLANTED: dict[str, tuple[str, Callable[..., Any], Case]] = {
    "RNN: another sign of dR": (
        "RNNGrad",
        _results(lambda op, d: [*d[:2], op.Neg(d[2]), *d[3:]]),
        recurrent("RNN"),
    ),
    "RNN: a transposed R": (
        "RNNGrad",
        _input(2, lambda op, R: op.Transpose(R, perm=[0, 2, 1])),
        recurrent("RNN", SQUARE),
    ),
    "RNN: no clip": ("RNNGrad", _with(clip=None), recurrent("RNN", (3, 2, 2, 2), clip=0.3)),
    "RNN: no lengths": ("RNNGrad", _input(4, _none), recurrent("RNN")),
    "RNN: another direction": ("RNNGrad", _with(direction="forward"), recurrent("RNN", direction="reverse")),
    "GRU: no lengths in the gates": ("GRUGates", _input(4, _none), recurrent("GRU", direction="reverse")),
    "GRU: no lengths": ("GRUGrad", _input(4, _none), recurrent("GRU")),
    "GRU: reset after the product": ("GRUGrad", _with(linear_before_reset=1), recurrent("GRU")),
    "GRU: reset before the product": (
        "GRUGates",
        _with(linear_before_reset=0),
        recurrent("GRU", linear_before_reset=1),
    ),
    "GRU: no initial state": ("GRUGrad", _input(5, _none), recurrent("GRU")),
    "GRU: no clip": ("GRUGrad", _with(clip=None), recurrent("GRU", (3, 2, 2, 2), clip=0.3)),
    "LSTM: no peepholes in the gates": ("LSTMGates", _input(7, _none), recurrent("LSTM")),
    "LSTM: no peepholes": ("LSTMGrad", _input(12, _none), recurrent("LSTM")),
    "LSTM: no coupled gates": ("LSTMGrad", _with(input_forget=0), recurrent("LSTM", input_forget=1)),
    "LSTM: no clip": ("LSTMGrad", _with(clip=None), recurrent("LSTM", (3, 2, 2, 2), clip=0.3)),
    "LSTM: no lengths": ("LSTMGrad", _input(3, _none), recurrent("LSTM")),
    "LSTM: no cotangent of Y_c": ("LSTMGrad", _input(11, _none), recurrent("LSTM")),
    "LSTM: 1.001 times dB": (
        "LSTMGrad",
        _results(lambda op, d: [*d[:3], op.Mul(d[3], 1.001), *d[4:]]),
        recurrent("LSTM"),
    ),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_a_planted_lowering_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    primitive, plant, case = PLANTED[wrong]
    right = DIALECTS["onnx"].lowerings[primitive]
    assert_gradient(case, runtime=False)
    monkeypatch.setitem(DIALECTS["onnx"].lowerings, primitive, lambda op, *i, **a: plant(right, op, *i, **a))
    with pytest.raises(AssertionError):
        assert_gradient(case, runtime=False)


# Dialect "ort": what the kernels of 1.19.2 are right for, and what it refuses or gets wrong.
TRAINED: tuple[tuple[bool, str, dict[str, Any]], ...] = (
    (True, "GRU", {"absent": PLAIN}),
    (True, "GRU", {"absent": OPTIONAL}),
    (True, "GRU", {"absent": PLAIN, "linear_before_reset": 1}),
    (True, "GRU", {"absent": PLAIN, "activations": ["Sigmoid", "Tanh"]}),
    (True, "LSTM", {"absent": PLAIN}),
    (True, "LSTM", {"absent": OPTIONAL}),
    (True, "LSTM", {"absent": PLAIN, "shapes": "symbolic"}),
    (True, "LSTM", {"absent": PLAIN, "shapes": "unknown"}),
    (True, "LSTM", {"absent": PLAIN, "activations": ["sigmoid", "tanh", "tanh"]}),
    (False, "GRU", {}),
    (False, "GRU", {"absent": PLAIN, "direction": "reverse"}),
    (False, "GRU", {"absent": PLAIN, "layout": 1}),
    (False, "GRU", {"absent": PLAIN, "clip": 3.0}),
    (False, "GRU", {"absent": PLAIN, "activations": ["Tanh", "Tanh"]}),
    (False, "GRU", {"absent": PLAIN, "kind": np.float64}),
    (False, "GRU", {"absent": PLAIN, "sizes": (3, 0, 2, 2)}),
    (False, "GRU", {"absent": PLAIN, "sizes": (0, 3, 2, 2)}),
    (False, "GRU", {"absent": PLAIN, "sizes": (3, 2, 0, 2)}),
    (False, "LSTM", {"absent": ("P",)}),
    (False, "LSTM", {"absent": ("sequence_lens",)}),
    (False, "LSTM", {"absent": PLAIN, "input_forget": 1}),
    (False, "LSTM", {"absent": PLAIN, "direction": "bidirectional"}),
)


@pytest.mark.parametrize(("trained", "op", "form"), TRAINED, ids=str)
def test_the_forward_node_becomes_its_training_form(trained: bool, op: str, form: dict[str, Any]) -> None:
    case = recurrent(op, **form)
    gradient = refgrad.gradient(case.model, dialect="ort", keep_outputs=True)
    operators = [node.op_type for node in gradient.graph.node]
    assert (KERNELS[op][0] in operators) == trained == (op not in operators)
    assert KERNELS[op][1] in operators or not trained
    assert operators.count("Scan") == 0 or not trained
    assert all(node.op_type == op or node.domain == "" for node in case.model.graph.node)  # the caller's is untouched
    if trained:
        [node] = [node for node in gradient.graph.node if node.op_type == KERNELS[op][0]]
        own = {"GRU": "linear_before_reset", "LSTM": "input_forget"}[op]
        assert {a.name for a in node.attribute} == {"direction", "hidden_size", own}
        assert any(o.domain == "com.microsoft" for o in gradient.opset_import)


@pytest.mark.parametrize("wanted", ["X", "W", "R", "B", "initial_h"])
@pytest.mark.parametrize("op", KERNELS)
def test_one_gradient_alone(op: str, wanted: str) -> None:
    """The training kernels end the process where the gradients of W and of R have no names."""
    case = recurrent(op, absent=PLAIN)
    for dialect in DIALECTS:
        assert_gradient(Case(f"{case} by {wanted}", case.model, case.feeds, (wanted,)), dialect)


@pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")
@pytest.mark.parametrize("absent", [PLAIN, OPTIONAL, ("B", *PLAIN)], ids=",".join)
@pytest.mark.parametrize(("op", "attributes"), [("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("LSTM", {})])
def test_the_graph_is_onnx_runtimes(op: str, attributes: dict[str, Any], absent: tuple[str, ...]) -> None:
    """The same training operators, between the same tensors, with the same attributes."""
    case = recurrent(op, absent=absent, **attributes)
    wrt = [value.name for value in case.model.graph.input]
    ours = refgrad.gradient(case.model, dialect="ort", cotangent="yield")
    theirs = ortbuilder.build_module(case.model, wrt, [])
    assert _training_nodes(ours, wrt) == _training_nodes(theirs, wrt)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("read", [False, True])
def test_a_training_form_is_the_operator_where_nobody_reads_the_rest(op: str, read: bool) -> None:
    """ONNX Runtime's optimizer makes it before it differentiates."""
    case = recurrent(op, absent=PLAIN)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    [node] = model.graph.node
    saved = ["CAll", "iofc"] if op == "LSTM" else ["zrh"]
    node.op_type, node.domain = KERNELS[op][0], "com.microsoft"
    node.output[:] = ["Y", *[""] * (len(node.output) - 1), *saved]
    node.attribute.append(onnx.helper.make_attribute("output_sequence", 1))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    del model.graph.output[1:]
    if read:
        model.graph.output.append(onnx.helper.make_tensor_value_info(saved[-1], onnx.TensorProto.FLOAT, [None] * 4))
        with pytest.raises(NoGradientError, match=f"{KERNELS[op][0]} has no rule"):
            refgrad.gradient(model)
        return
    plain = onnx.ModelProto()
    plain.CopyFrom(case.model)
    del plain.graph.output[1:]
    for dialect in DIALECTS:
        assert_gradient(Case(f"{case} in training", plain, case.feeds), dialect)
        rng = np.random.default_rng(3)
        feeds = {**case.feeds, "Y_grad": rng.standard_normal((4, 1, 3, 3)).astype(np.float32)}
        gradients = [refgrad.gradient(m, dialect=dialect) for m in (model, plain)]
        operators = [[n.op_type for n in gradient.graph.node] for gradient in gradients]
        assert operators[0] == operators[1]
        got, expected = (get_backend("numpy").prepare(gradient).run(feeds) for gradient in gradients)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value)
    assert model.graph.node[0].op_type == KERNELS[op][0]  # the caller's is untouched


def _training_nodes(model: onnx.ModelProto, wrt: list[str]) -> list[Any]:
    """The nodes of com.microsoft with what they read and make, where the graph has given names to it."""
    results = {f"{name}_grad" for name in wrt}
    found = []
    for node in model.graph.node:
        if node.domain != "com.microsoft":
            continue
        named = {*wrt, *results, *(f"Y{part}{grad}" for part in ("", "_h", "_c") for grad in ("", "_grad"))}
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        reads = [name if name in named else bool(name) for name in node.input]
        makes = [name if name in named else "" for name in node.output]
        if node.op_type.endswith("Training"):
            makes = [name or "saved" for name in makes]
        while reads and not reads[-1]:
            reads.pop()
        while makes and not makes[-1]:
            makes.pop()
        found.append((node.op_type, reads, makes, attributes))
    return found


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activations": ["Sigmoid", "Gelu"]}, "An activation of node 'node' is 'Gelu'; there are 'Relu', 'Tanh'"),
        ({"activations": ["Sigmoid"]}, "Expected 2 activations for node 'node', got 1: 'Sigmoid'"),
        ({"activations": ["Sigmoid", "Affine"]}, "Affine, an activation of node 'node', has no default alpha"),
        (
            {"activations": ["Sigmoid", "ScaledTanh"], "activation_alpha": [2.0]},
            "ScaledTanh, an activation of node 'node', has no default beta: give it in activation_beta",
        ),
        ({"direction": "sideways"}, "Node 'node' has direction 'sideways'; there are 'forward', 'reverse'"),
    ],
)
def test_attributes_without_a_meaning_are_refused(attributes: dict[str, Any], message: str) -> None:
    case = recurrent("GRU", **attributes)
    for dialect in DIALECTS:
        with pytest.raises(RuleError, match=message):
            refgrad.gradient(case.model, dialect=dialect)


def test_saved_gates_without_their_arguments_tell_few_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DIALECTS["onnx"].lowerings["GRUGates"]
    case = recurrent("GRU", activations=["Sigmoid", "Softsign"])
    monkeypatch.setitem(DIALECTS["onnx"].lowerings, "GRUGates", lambda op, *i, **a: (right(op, *i, **a)[0], None))
    with pytest.raises(RuleError, match="these tell the slopes of Sigmoid and Tanh without clip"):
        refgrad.gradient(case.model)
    assert_gradient(recurrent("GRU"), runtime=False)


def test_one_loop_per_direction_and_one_product_per_weight() -> None:
    """GRU needs no loop for its gates: Y holds the state before every step. The loops read three weights, and nothing else."""
    loops = {"RNN": 1, "GRU": 1, "LSTM": 2}
    for op, count in loops.items():
        for direction, directions in (("reverse", 1), ("bidirectional", 2)):
            gradient = refgrad.gradient(recurrent(op, direction=direction).model)
            scans = [node for node in gradient.graph.node if node.op_type == "Scan"]
            assert len(scans) == count * directions
            for scan in scans:
                [body] = [a.g for a in scan.attribute if a.name == "body"]
                assert not {"ReduceSum", "Transpose", "Gather", "Sigmoid" if op != "LSTM" else ""} & {
                    node.op_type for node in body.node
                }


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_what_is_in_the_padding_does_not_matter(op: str, direction: str) -> None:
    case = recurrent(op, direction=direction)
    gradient = refgrad.gradient(case.model)
    rng = np.random.default_rng(2)
    feeds = dict(case.feeds)
    for value in gradient.graph.input:
        if value.name not in feeds:
            Y = get_backend("numpy").prepare(case.model).run(case.feeds)[value.name.removesuffix("_grad")]
            feeds[value.name] = rng.standard_normal(Y.shape).astype(np.float32)
    padding = np.arange(4)[:, None] >= feeds["sequence_lens"]
    garbage = feeds | {"X": np.where(padding[:, :, None], np.float32(np.nan), feeds["X"])}
    expected, got = (get_backend("numpy").prepare(gradient).run(f) for f in (feeds, garbage))
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    assert not expected["X_grad"][padding].any()


def test_only_the_last_state_is_differentiated() -> None:
    """A cotangent that is not there costs nothing in the loop."""
    case = recurrent("LSTM", absent=OPTIONAL)
    whole, last = (
        next(n for n in reversed(refgrad.gradient(case.model, outputs=o).graph.node) if n.op_type == "Scan")
        for o in (["Y", "Y_h"], ["Y_h"])
    )
    assert len(last.input) == len(whole.input) - 1


TORCH_MODELS = [
    (kind, options)
    for kind in ("LSTM", "GRU", "RNN")
    for options in ({}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False})
]


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "options"), TORCH_MODELS, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_as_torch_exports_it(kind: str, options: dict[str, Any], dialect: str) -> None:
    """nn.LSTM, nn.GRU and nn.RNN through torch's exporter: the gradients are autograd's."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(torch.nn, kind)(3, 4, **options)

        def forward(self, x: Any) -> Any:
            return self.layers(x)[0]

    network, x = Network().eval(), torch.randn(5, 2, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about its own future
        model = torch.onnx.export(
            network, (x.detach(),), input_names=["x"], output_names=["y"], dynamo=True
        ).model_proto
    result = network(x)
    cotangent = torch.randn(result.shape)
    [expected] = torch.autograd.grad(result, [x], cotangent)
    gradient = refgrad.gradient(model, wrt=["x"], dialect=dialect)
    feeds = {"x": x.detach().numpy(), "y_grad": cotangent.numpy()}
    plain = dialect == "onnx" or all(node.domain == "" for node in gradient.graph.node)
    for backend in ["numpy", *(["ort-cpu"] if plain and "ort-cpu" in available() else [])]:
        [got] = get_backend(backend).prepare(gradient).run(feeds).values()
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-5)
