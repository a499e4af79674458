"""Names of `onnxcustom.utils.onnx_function`: losses, penalties and updates as graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.defs import onnx_opset_version

from refgrad.builder.nodes import NodeBuilder, constant_tensor
from refgrad.compat import get_max_opset
from refgrad.errors import OptionError, choices
from refgrad.model import native
from refgrad.protos.traverse import names_of, refill, rename_values
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import note
from refgrad.reverse.gradient import gradient
from refgrad.rewrites.losses import add_loss_output, penalty_loss_onnx

__all__ = ["function_onnx_graph", "get_supported_functions"]

_LOWEST_OPSET = 13


def function_onnx_graph(
    name: str, target_opset: int | None = None, dtype: Any = np.float32, weight_name: str | None = None, **kwargs: Any
) -> ModelProto:
    """The graph of a function; `get_supported_functions` lists them.

    In losses X1 are the expected values and X2 the predictions, [N, C]. A loss is summed over all elements. A derivative is by
    X2; here it has the sign of ∂/∂X2 also for the absolute error, for which onnxcustom has the opposite sign. A graph with a
    derivative has at least opset 16.

    :param target_opset: the opset, 13 or newer; by default `refgrad.compat.get_max_opset()`.
    :param dtype: the NumPy type of the inputs, a float.
    :param weight_name: the name of an input for the weights of samples, [N], with the default 1. Other graphs ignore it.
    :param kwargs: the further arguments of a function, as in `get_supported_functions`.
    :raises OptionError: there is no such function, type or opset, or the function does not take an argument.
    """
    if name not in _FUNCTIONS:
        raise OptionError(f"There is no function {name!r}; there are {choices(_FUNCTIONS)}.")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    if kind not in FLOATS:
        raise OptionError(f"dtype is a float, not {np.dtype(dtype).name}.")
    opset = get_max_opset() if target_opset is None else target_opset
    if not _LOWEST_OPSET <= opset <= onnx_opset_version():
        raise OptionError(f"target_opset={opset}; there are {_LOWEST_OPSET} to {onnx_opset_version()}.")
    style, function = _Style(opset, kind, weight_name), _FUNCTIONS[name][1]
    try:
        inspect.signature(function).bind(style, **kwargs)
    except TypeError as error:
        raise OptionError(f"The function {name!r} does not take these arguments: {error}.") from error
    return function(style, **kwargs)


def value_and_gradient(model: ModelProto, output: str, name: str) -> ModelProto:
    """The model of an output, which is one number, and of its gradient by an input, in this order."""
    made = gradient(model, [name], [output], cotangent="ones", keep_outputs=True)
    outputs = {value.name: value for value in made.graph.output}
    refill(made.graph.output, [outputs[output], outputs[f"{name}_grad"]])
    return made


def get_supported_functions() -> dict[str, str]:
    """The formula of each function of `function_onnx_graph`, by name, with its further arguments in brackets."""
    return {name: text for name, (text, _) in _FUNCTIONS.items()}


@dataclass(frozen=True)
class _Style:
    """The opset, the type of the inputs, and the name of the weights of samples."""

    opset: int
    kind: int
    weight: str | None

    @property
    def dtype(self) -> np.dtype:
        """The NumPy type."""
        return helper.tensor_dtype_to_np_dtype(self.kind)

    def parse(self, text: str) -> ModelProto:
        """The model of a graph in onnx's syntax, in which @ stands for the type."""
        version = helper.find_min_ir_version_for([helper.make_opsetid("", self.opset)])
        typed = text.replace("@", TensorProto.DataType.Name(self.kind).lower())
        return native.parse_model(f'<ir_version: {version}, opset_import: ["": {self.opset}]> {typed}')


def _text(text: str) -> Callable[[_Style], ModelProto]:
    def graph(style: _Style) -> ModelProto:
        return style.parse(text)

    return graph


# Losses


def _loss(style: _Style, score: str, operator: str = "Identity", **settings: Any) -> ModelProto:
    """The sum of the losses, called loss, of X1 and the operator of X2."""
    prediction = style.parse(f"loss (@[N, C] X2) => (@[N, C] predicted) {{ predicted = {operator}(X2) }}")
    made = add_loss_output(prediction, score, label_name="X1", weight_name=style.weight, **settings)
    x2, x1, *weights = made.graph.input
    for value in weights:  # its default, one weight, is for any number of samples
        value.type.tensor_type.shape.dim[0].Clear()
    refill(made.graph.input, [x1, x2, *weights])
    refill(made.graph.output, [made.graph.output[0]])
    return made


def _finished(model: ModelProto, style: _Style, outputs: Mapping[str, str]) -> ModelProto:
    """A model with new names for its outputs, and the default of the weights of samples."""
    for node in model.graph.node:
        rename_values(node, outputs)
    for value in model.graph.output:
        value.name = outputs.get(value.name, value.name)
    if style.weight is not None:
        model.graph.initializer.append(numpy_helper.from_array(np.ones(1, style.dtype), style.weight))
    return model


def _value(style: _Style, score: str, **settings: Any) -> ModelProto:
    return _finished(_loss(style, score, **settings), style, {"loss": "Y"})


def _derivative(style: _Style, score: str, **settings: Any) -> ModelProto:
    made = gradient(_loss(style, score, **settings), ["X2"], ["loss"], cotangent="ones")
    note(made, made)
    return _finished(made, style, {"X2_grad": "Y"})


def _both(style: _Style, score: str, **settings: Any) -> ModelProto:
    made = value_and_gradient(_loss(style, score, **settings), "loss", "X2")
    note(made, made)
    return _finished(made, style, {"loss": "Y", "X2_grad": "Z"})


def _log_loss(style: _Style, eps: float = 1e-5) -> ModelProto:
    made = _loss(style, "log", "Sigmoid", eps=eps, label_type="int64")
    builder = NodeBuilder(names_of(made.graph))
    label = builder.add("Cast", ["X1"], "label", to=style.kind)
    slope = builder.add("Sub", ["predicted", label], "slope")
    if style.weight is not None:
        shape = builder.initializer(constant_tensor(np.array([-1, 1])), "column_shape")
        slope = builder.add("Mul", [slope, builder.add("Reshape", [style.weight, shape], "column")], "slope")
    builder.put_into(made.graph)
    made.graph.output.append(helper.make_tensor_value_info(slope, style.kind, ["N", "C"]))
    return _finished(made, style, {"loss": "Y", slope: "Z"})


# Penalties

_SLOPE = "sign = Sign(X) slope1 = Mul(sign, l1) slope2 = Mul(X, twice_l2)"


def _penalty(style: _Style, l1_weight: float = 0.5, l2_weight: float = 0.5) -> ModelProto:
    made = style.parse(f"penalty (@[] X) => (@[1] Y, @[] Z) {{ {_SLOPE} Z = Add(slope1, slope2) }}")
    return _with_sum(_with_slope(made, style, l1_weight, l2_weight), style, ["X"], l1_weight, l2_weight)


def _update(style: _Style, l1: float = 0.5, l2: float = 0.5) -> ModelProto:
    text = f"update (@[] X) => (@[] Y) {{ {_SLOPE} slope = Add(slope1, slope2) Y = Sub(X, slope) }}"
    return _with_slope(style.parse(text), style, l1, l2)


def _penalties(style: _Style, n_tensors: int = 1, l1_weight: float = 0.5, l2_weight: float = 0.5) -> ModelProto:
    names = [f"W{k}" for k in range(n_tensors)]
    inputs = ", ".join(f"@[] {name}" for name in ("loss", *names))
    made = style.parse(
        f"penalties ({inputs}) => (@[1] Y) {{ one = Constant <value_ints = [1]> () total = Reshape(loss, one) }}"
    )
    return _with_sum(made, style, names, l1_weight, l2_weight, "total")


def _with_slope(model: ModelProto, style: _Style, l1: float, l2: float) -> ModelProto:
    """The model with the numbers that `_SLOPE` reads."""
    for name, number in (("l1", l1), ("twice_l2", 2 * l2)):
        tensor = constant_tensor(np.array(number, style.dtype))
        tensor.name = name
        model.graph.initializer.append(tensor)
    return model


def _with_sum(model: ModelProto, style: _Style, names: list[str], l1: float, l2: float, *terms: str) -> ModelProto:
    """The model with Y, the sum of the penalties of `names` and of other terms [1]."""
    taken = names_of(model.graph)
    totals = [*terms]
    for name in names:
        constants, nodes = penalty_loss_onnx(name, style.dtype, l1, l2, taken)
        model.graph.initializer.extend(constants)
        model.graph.node.extend(nodes)
        totals.append(nodes[-1].output[0])
    model.graph.node.add(op_type="Sum", input=totals, output=["Y"])
    return model


_AXPYW = "axpyw (@[] X1, @[] X2, @[] G, @[1] alpha, @[1] beta) => (@[] Y, @[] Z) { moved = Mul(X1, alpha) kept = Mul(G, beta)"
_FUNCTIONS: dict[str, tuple[str, Callable[..., ModelProto]]] = {
    "copy": ("Y = X", _text("copy (@[] X) => (@[] Y) { Y = Identity(X) }")),
    "zero": (
        "Y = 0, in the shape of X",
        _text("zero (@[] X) => (@[] Y) { shape = Shape(X) Y = ConstantOfShape <value = @[1] {0}> (shape) }"),
    ),
    "axpy": (
        "Y = alpha·X1 + X2",
        _text("axpy (@[] X1, @[] X2, @[1] alpha) => (@[] Y) { moved = Mul(X1, alpha) Y = Add(moved, X2) }"),
    ),
    "axpyw": (
        "Z = alpha·X1 + beta·G, Y = X2 + Z",
        _text(f"{_AXPYW} Z = Add(moved, kept) Y = Add(Z, X2) }}"),
    ),
    "axpyw2": (
        "Z = alpha·X1 + beta·G, Y = X2 + alpha·X1 + beta·Z",
        _text(f"{_AXPYW} Z = Add(moved, kept) ahead = Mul(Z, beta) both = Add(moved, ahead) Y = Add(both, X2) }}"),
    ),
    "linear_regression": (
        "Y = X @ A + B",
        _text("line (@[N, K] X, @[K, C] A, @[] B) => (@[N, C] Y) { product = MatMul(X, A) Y = Add(product, B) }"),
    ),
    "grad_sigmoid_neg_log_loss_error": (
        "Y = −Σ (1 − X1)·log(1 − p) + X1·log(p), p = Sigmoid(X2) within [eps, 1 − eps]; Z = Sigmoid(X2) − X1 (eps)",
        _log_loss,
    ),
    "grad_penalty_elastic_error": (
        "Y = Σ l1_weight·|X| + l2_weight·X², Z = ∂Y/∂X (l1_weight, l2_weight)",
        _penalty,
    ),
    "n_penalty_elastic_error": (
        "Y = loss + Σ l1_weight·|W| + l2_weight·W², for W0, W1, ... (n_tensors, l1_weight, l2_weight)",
        _penalties,
    ),
    "update_penalty_elastic_error": ("Y = X − l1·sign(X) − 2·l2·X (l1, l2)", _update),
}
for _name, _score, _formula in (
    ("square_error", "squared_error", "(X1 − X2)²"),
    ("absolute_error", "absolute_error", "|X1 − X2|"),
    ("elastic_error", "elastic", "l1_weight·|X1 − X2| + l2_weight·(X1 − X2)² (l1_weight, l2_weight)"),
):
    _FUNCTIONS |= {
        _name: (f"Y = Σ {_formula}", partial(_value, score=_score)),
        f"grad_{_name}": (f"Y = ∂/∂X2 Σ {_formula}", partial(_derivative, score=_score)),
        f"grad_loss_{_name}": (f"Y, Z = loss, ∂loss/∂X2, where loss = Σ {_formula}", partial(_both, score=_score)),
    }
