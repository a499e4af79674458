"""The special points of every operator with a rule, or the reason why it has none.

A number is a scalar, a tuple an array; whole numbers are int64. A point lies where a formula divides by 0, takes a root or a
logarithm of 0, compares equal values, or multiplies by 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, pi
from typing import Any

import numpy as np
from onnx import helper

from refgrad.conformance.case import Case, node_case


@dataclass(frozen=True)
class SpecialPoint:
    """An operator at a point: the inputs in the order of the schema, None for one that is left out.

    `where` is the name of the point, and `row` the row of the table of kinks that says what was chosen there. `sampled`: its
    derivatives are interpolated, see `planes.Sampled`. `squared`: the model returns the square of the operator's output, which
    may have derivatives that the operator itself lacks.
    """

    operator: str
    where: str
    inputs: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    sampled: bool = False
    squared: bool = False

    def case(self) -> Case:
        """The point as a case."""
        domain, _, op_type = self.operator.rpartition(".")
        inputs = [None if x is None else np.array(x) for x in self.inputs]
        name = f"{self.operator} at {self.where}"
        settings = {
            "name": name,
            "opset": 1 if domain else NEWEST.get(op_type, OPSET),
            "domain": domain,
            **self.settings,
        }
        if self.operator in NO_DOUBLE:
            inputs = [x if x is None or x.dtype.kind != "f" else x.astype(np.float32) for x in inputs]
        made = replace(node_case(op_type, *inputs, **settings), values="special")
        if self.squared:
            [output] = made.model.graph.output
            made.model.graph.node.append(helper.make_node("Mul", [output.name, output.name], ["square"]))
            output.name = "square"
        return made


OPSET = 22
NO_DOUBLE = ("Celu",)  # operators of float32 alone
NEWEST = {
    "RMSNormalization": 23,
    "Attention": 23,
    "RotaryEmbedding": 23,
    "Swish": 24,
    "TensorScatter": 24,
    "SwiGLU": 28,
}


def at(
    operator: str,
    where: str,
    *inputs: Any,
    row: str = "",
    sampled: bool = False,
    squared: bool = False,
    **settings: Any,
) -> SpecialPoint:
    """A row of the table."""
    return SpecialPoint(operator, where, inputs, settings, row or where, sampled, squared)


def _single(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _each(operators: str, where: str, *inputs: Any, **settings: Any) -> tuple[SpecialPoint, ...]:
    return tuple(at(operator, where, *inputs, **settings) for operator in operators.split())


POINTS: tuple[SpecialPoint, ...] = (
    # Functions of one number.
    *_each("Abs Relu Elu Selu Celu Softplus Softsign Sign Sigmoid Tanh Erf Gelu Mish HardSwish Swish", "x = 0", 0.0),
    *_each("Exp Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Atanh Neg Identity Sqrt Log Reciprocal", "x = 0", 0.0),
    *_each("Elu Celu LeakyRelu", "x = 0, α = 1/2", 0.0, alpha=0.5, row="x = 0"),
    *_each("Sigmoid Tanh Softplus Softsign Elu Selu Celu Gelu Mish HardSwish Swish Erf", "x = ±40", (-40.0, 40.0)),
    *_each("LeakyRelu", "x = 0", 0.0),
    *_each("Gelu", "x = 0, by tanh", 0.0, approximate="tanh"),
    *_each("Swish", "x = 0, α = 0", 0.0, alpha=0.0),
    at("Elu", "x = 0, α = 0", 0.0, alpha=0.0, row="x = 0"),
    at("Selu", "x = 0, γ·α = γ", 0.0, alpha=1.0, gamma=2.0, row="x = 0, γ·α = γ"),
    at("Abs", "one of two is 0", (0.0, 2.0), row="x = 0"),
    at("Relu", "one of two is 0", (0.0, 2.0), row="x = 0"),
    at("Sqrt", "one of two is 0", (0.0, 4.0), row="x = 0"),
    at("HardSwish", "x = −3", -3.0, row="|x| = 3"),
    at("HardSwish", "x = 3", 3.0, row="|x| = 3"),
    at("HardSigmoid", "x = −2", -2.0, alpha=0.25, row="the ends of the slope"),
    at("HardSigmoid", "x = 2", 2.0, alpha=0.25, row="the ends of the slope"),
    at("HardSigmoid", "α = 0", 0.5, alpha=0.0),
    at("ThresholdedRelu", "x = α", 1.0, alpha=1.0),
    at("ThresholdedRelu", "x = α = 0", 0.0, alpha=0.0, row="x = α"),
    at("Shrink", "x = −λ", -0.5, lambd=0.5, bias=0.5, row="|x| = λ"),
    at("Shrink", "x = λ", 0.5, lambd=0.5, bias=0.5, row="|x| = λ"),
    at("Shrink", "x = λ, no bias", 0.5, lambd=0.5, row="|x| = λ"),
    at("Shrink", "λ = 0, x = 0", 0.0, lambd=0.0, row="|x| = λ"),
    at("Shrink", "x = 0", 0.0, lambd=0.5),
    *_each("Floor Ceil", "x is whole", 1.0),
    *_each("Floor Ceil Round", "x between", 1.25),
    at("Round", "x is halfway", 0.5),
    *_each("Asin Acos Atanh", "x = 1", 1.0, row="|x| = 1"),
    *_each("Asin Acos Atanh", "x = −1", -1.0, row="|x| = 1"),
    at("Acosh", "x = 1", 1.0),
    *_each("Sin Cos Tan", "x = π", pi),
    *_each("Sin Cos", "x = π/2", pi / 2),
    # Powers, quotients, products.
    at("Pow", "x = 0, y = 0", 0.0, 0.0, row="x = 0"),
    at("Pow", "x = 0, y = 1", 0.0, 1.0, row="x = 0"),
    at("Pow", "x = 0, y = 2", 0.0, 2.0, row="x = 0"),
    at("Pow", "x = 0, y = 3", 0.0, 3.0, row="x = 0"),
    at("Pow", "x = 0, y = 4", 0.0, 4.0, row="x = 0"),
    at("Pow", "x = 0, y = 1/2", 0.0, 0.5, row="x = 0"),
    at("Pow", "x = 0, y = 3/2", 0.0, 1.5, row="x = 0"),
    at("Pow", "x = 0, y = 5/2", 0.0, 2.5, row="x = 0"),
    at("Pow", "x = 0, y = 7/2", 0.0, 3.5, row="x = 0"),
    at("Pow", "x = 0, y = −1", 0.0, -1.0, row="x = 0"),
    at("Pow", "y = 0", 23.0, 0.0),
    at("Pow", "y = 1", 23.0, 1.0),
    at("Pow", "y = 2", 3.0, 2.0),
    at("Pow", "y = 3", 3.0, 3.0),
    at("Pow", "y = −1", 3.0, -1.0),
    at("Pow", "x = 1, y = 0", 1.0, 0.0),
    at("Pow", "x = 1", 1.0, 2.5),
    at("Pow", "x < 0, y = 0", -2.0, 0.0, row="x < 0, y whole"),
    at("Pow", "x < 0, y = 1", -2.0, 1.0, row="x < 0, y whole"),
    at("Pow", "x < 0, y whole", -2.0, 2.0),
    at("Pow", "x < 0, y = 3", -2.0, 3.0, row="x < 0, y whole"),
    at("Pow", "x < 0, y = −1", -2.0, -1.0, row="x < 0, y whole"),
    at("Pow", "y = 0 for one of two", (2.0, 3.0), (0.0, 2.0)),
    at("Pow", "y = 0, shared by x", (2.0, 0.0, 3.0), 0.0, row="x = 0"),
    at("Pow", "y = 2, shared by x", (2.0, 0.0, -3.0), 2.0, row="x < 0, y whole"),
    *(
        at("Pow", f"x = 0, y constant {y:g}", 0.0, float(y), constant=("Y",), row="x = 0")
        for y in (0, 1, 2, 3, 0.5, 1.5, 2.5, -1)
    ),
    *(at("Pow", f"x < 0, y constant {y:g}", -2.0, float(y), constant=("Y",)) for y in (0, 1, 2, 3, -1, -2)),
    at("Pow", "x constant 0, y = 2", 0.0, 2.0, constant=("X",), row="x = 0"),
    at("Pow", "x constant 2, y = 0", 2.0, 0.0, constant=("X",)),
    at("Pow", "x constant 1, y = 0", 1.0, 0.0, constant=("X",)),
    at("Pow", "y an integer 0", (0.0, 2.0), (0, 0), row="x = 0"),
    at("Pow", "y an integer", (0.0, 0.0, 0.0, -2.0), (1, 2, 3, 3)),
    at("Div", "a = 0", 0.0, 2.0),
    at("Div", "b = 0", 2.0, 0.0),
    at("Div", "a = b = 0", 0.0, 0.0),
    at("Div", "a = b", 2.0, 2.0),
    at("Mul", "a = 0", 0.0, 2.0),
    at("Mul", "a = b = 0", 0.0, 0.0),
    at("Mod", "x = 2·y", 2.0, 1.0, fmod=1),
    at("Mod", "x = 0", 0.0, 1.5, fmod=1, row="x = 2·y"),
    at("Mod", "x between", 2.5, 1.0, fmod=1),
    at("Mod", "x between, x < 0", -2.5, 1.0, fmod=1),
    # Ties.
    *_each("Max Min", "x = y", 1.0, 1.0),
    *_each("Max Min", "x = y = z", 1.0, 1.0, 1.0, row="x = y"),
    *_each("Max Min", "two of three", 1.0, 2.0, 1.0, row="x = y"),
    *_each("Max Min", "x > y", 2.0, 1.0),
    *_each("Add Sub Sum Mean", "x = y", 1.0, 1.0),
    at("Clip", "x = min", -1.0, -1.0, 1.0, row="x = min, x = max"),
    at("Clip", "x = max", 1.0, -1.0, 1.0, row="x = min, x = max"),
    at("Clip", "x = min = max", 1.0, 1.0, 1.0, row="x = min, x = max"),
    at("Clip", "min = max", 0.0, 1.0, 1.0, row="x = min, x = max"),
    at("Clip", "min > max", 0.0, 1.0, -1.0),
    at("Clip", "x < min", -2.0, -1.0, 1.0),
    at("Clip", "x between", 0.0, -1.0, 1.0),
    at("Clip", "x = min, no max", -1.0, -1.0, row="x = min, x = max"),
    at("PRelu", "x = 0", 0.0, 0.25),
    at("PRelu", "x = 0, slope 0", 0.0, 0.0, row="x = 0"),
    at("PRelu", "x = 0, slope 1", 0.0, 1.0, row="x = 0"),
    at("PRelu", "slope 0", -2.0, 0.0),
    at("Where", "the same on both sides", (True, False), (1.0, 1.0), (1.0, 1.0)),
    at("Where", "0 on both sides", (True, False), (0.0, 0.0), (0.0, 0.0)),
    at("ReduceMax", "all three equal", (1.0, 1.0, 1.0), row="two elements are the largest"),
    at("ReduceMin", "all three equal", (1.0, 1.0, 1.0), row="two elements are the smallest"),
    at("ReduceMax", "two elements are the largest", (1.0, 1.0, 0.0)),
    at("ReduceMin", "two elements are the smallest", (1.0, 1.0, 2.0)),
    *_each("ReduceMax ReduceMin", "no tie", (1.0, 2.0, 4.0)),
    # Reductions.
    at("ReduceL1", "an element is 0", (0.0, 1.0)),
    at("ReduceL1", "every element is 0", (0.0, 0.0), row="an element is 0"),
    at("ReduceL2", "the norm is 0", (0.0, 0.0)),
    at("ReduceL2", "an element is 0", (0.0, 1.0)),
    at("ReduceL2", "one of two rows is 0", ((0.0, 0.0), (3.0, 4.0)), (1,), row="the norm is 0"),
    at("ReduceL2", "a single element is 0", (0.0,), row="the norm is 0"),
    at("ReduceSumSquare", "every element is 0", (0.0, 0.0)),
    at("ReduceSum", "every element is 0", (0.0, 0.0)),
    at("ReduceMean", "every element is 0", (0.0, 0.0)),
    at("ReduceLogSum", "the sum is 0", (0.0, 0.0)),
    at("ReduceLogSum", "the sum is 0 by cancellation", (1.0, -1.0)),
    at("ReduceLogSum", "an element is 0", (0.0, 2.0)),
    at("ReduceLogSumExp", "every element is 0", (0.0, 0.0)),
    at("ReduceLogSumExp", "one element is −∞", (-inf, 1.0)),
    at("ReduceLogSumExp", "every element is −∞", (-inf, -inf)),
    at("ReduceLogSumExp", "equal elements", (2.0, 2.0, 2.0)),
    *(at("ReduceProd", f"{n} zeros", (0.0,) * n + (2.0, 3.0)) for n in range(5)),
    at("ReduceProd", "one element, 0", (0.0,)),
    at("ReduceProd", "rows with 0 to 2 zeros", ((1.0, 2.0, 3.0), (0.0, 2.0, 3.0), (0.0, 0.0, 3.0)), (1,)),
    *(at("CumProd", f"{n} zeros", (2.0,) + (0.0,) * n + (3.0,), 0, opset=26) for n in range(4)),
    at("CumProd", "two zeros, exclusive", (0.0, 2.0, 0.0, 3.0), 0, opset=26, exclusive=1),
    at("CumProd", "two zeros, from the end", (0.0, 2.0, 0.0, 3.0), 0, opset=26, reverse=1),
    at("CumSum", "every element is 0", (0.0, 0.0), 0),
    # Softmax, norms, normalizations.
    *_each("Softmax LogSoftmax", "equal elements", (2.0, 2.0, 2.0)),
    *_each("Softmax LogSoftmax", "one element", ((1.0,), (0.0,))),
    *_each("Softmax LogSoftmax", "one element far away", (0.0, 1.0, -300.0)),
    *(at("LpNormalization", f"x = 0, p = {p}", (0.0, 0.0), p=p, row="x = 0") for p in (1, 2)),
    *(
        at("LpNormalization", f"an element is 0, p = {p}", (0.0, 1.0), p=p, row=f"p = {p}, an element is 0")
        for p in (1, 2)
    ),
    at("LpNormalization", "one element, p = 2", ((3.0,), (-2.0,)), p=2),
    at("LpNormalization", "one of two rows is 0", ((0.0, 0.0), (3.0, 4.0)), p=2, row="x = 0"),
    *(at("GlobalLpPool", f"x = 0, p = {p}", (((0.0, 0.0),),), p=p, row="x = 0") for p in (1, 2, 3, 4)),
    *(
        at("GlobalLpPool", f"an element is 0, p = {p}", (((0.0, 2.0, -1.0),),), p=p, row=f"p = {p}, an element is 0")
        for p in (1, 2, 3, 4)
    ),
    *(
        at("LpPool", f"a window is 0, p = {p}", (((0.0, 0.0, 0.0),),), kernel_shape=[3], p=p, row="a window is 0")
        for p in (1, 2, 3, 4)
    ),
    *(
        at(
            "LpPool",
            f"an element is 0, p = {p}",
            (((0.0, 2.0, -1.0),),),
            kernel_shape=[2],
            p=p,
            row=f"p = {p}, an element is 0",
        )
        for p in (1, 2, 3, 4)
    ),
    at("LayerNormalization", "a constant row", ((2.0, 2.0, 2.0),), (1.0, 0.0, 2.0), (0.0, 1.0, 0.0)),
    at(
        "LayerNormalization",
        "a constant row, ε = 0.5",
        ((2.0, 2.0, 2.0),),
        (1.0, 0.0, 2.0),
        (0.0, 1.0, 0.0),
        epsilon=0.5,
    ),
    at("LayerNormalization", "a constant row, ε = 0", ((2.0, 2.0, 2.0),), (1.0, 0.0, 2.0), epsilon=0.0),
    at("LayerNormalization", "one element", ((2.0,), (3.0,)), (1.5,), epsilon=0.5),
    at("RMSNormalization", "a row is 0", ((0.0, 0.0),), (1.0, 2.0), epsilon=0.5),
    at("RMSNormalization", "a row is 0, ε = 0", ((0.0, 0.0),), (1.0, 2.0), epsilon=0.0),
    at("RMSNormalization", "an element is 0, ε = 0", ((0.0, 3.0),), (0.0, 2.0), epsilon=0.0),
    at("InstanceNormalization", "a constant channel", (((2.0, 2.0),),), (1.5,), (0.5,), epsilon=0.5),
    at("InstanceNormalization", "a constant channel, ε = 0", (((2.0, 2.0),),), (1.5,), (0.5,), epsilon=0.0),
    at(
        "GroupNormalization", "a constant group", (((2.0,), (2.0,)),), (1.5, 0.0), (0.5, 1.0), epsilon=0.5, num_groups=1
    ),
    at(
        "GroupNormalization",
        "a constant group, ε = 0",
        (((2.0,), (2.0,)),),
        (1.5, 0.0),
        (0.5, 1.0),
        epsilon=0.0,
        num_groups=1,
    ),
    at("BatchNormalization", "the variance is 0", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (0.0,), epsilon=0.5),
    at("BatchNormalization", "the variance is 0, ε = 0", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (0.0,), epsilon=0.0),
    at("BatchNormalization", "x is the mean", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (2.0,)),
    at(
        "BatchNormalization",
        "trained on a constant channel",
        (((2.0, 2.0),),),
        (1.5,),
        (0.5,),
        (1.0,),
        (2.0,),
        epsilon=0.5,
        training_mode=1,
        outputs=3,
    ),
    at("MeanVarianceNormalization", "a constant channel", (((2.0, 2.0),), ((2.0, 2.0),)), axes=[0, 2]),
    at("LRN", "x = 0", (((0.0,), (0.0,), (1.0,)),), size=3, alpha=0.75),
    at("LRN", "x = 0, bias = 0", (((0.0,), (0.0,)),), size=3, alpha=0.75, bias=0.0),
    at("LRN", "β = 0", (((0.0,), (1.0,)),), size=3, beta=0.0),
    at("LRN", "β = 1", (((0.0,), (1.0,)),), size=3, beta=1.0),
    # Windows and choices.
    at("MaxPool", "two elements of a window are the largest", (((1.0, 1.0, 0.0),),), kernel_shape=[3]),
    at("MaxPool", "no tie", (((1.0, 3.0, 0.0),),), kernel_shape=[2]),
    at("GlobalMaxPool", "two elements of a channel are the largest", (((1.0, 0.0, 1.0),),)),
    at("AveragePool", "x = 0", (((0.0, 0.0, 0.0),),), kernel_shape=[2]),
    at("GlobalAveragePool", "x = 0", (((0.0, 0.0),),)),
    at("TopK", "two elements are the largest", (1.0, 1.0, 0.0), (1,), outputs=2),
    at("TopK", "both of two that are equal", (1.0, 1.0, 0.0), (2,), outputs=2, row="two elements are the largest"),
    *(
        at(
            "ScatterElements",
            f"updates and data are equal, {r}",
            (1.0, 5.0),
            (0, 0),
            (1.0, 1.0),
            reduction=r,
            row="updates and data are the largest",
        )
        for r in ("max", "min", "add")
    ),
    *(at("ScatterElements", f"zeros, {r}", (0.0, 5.0), (0, 0), (0.0, 2.0), reduction=r) for r in ("mul",)),
    at("ScatterElements", "a zero, mul", (2.0, 5.0), (0, 0), (0.0, 3.0), reduction="mul"),
    *(
        at(
            "ScatterND",
            f"updates and data are equal, {r}",
            (1.0, 5.0),
            ((0,), (0,)),
            (1.0, 1.0),
            reduction=r,
            row="updates and data are the smallest",
        )
        for r in ("max", "min", "add")
    ),
    at("ScatterND", "zeros, mul", (0.0, 5.0), ((0,), (0,)), (0.0, 2.0), reduction="mul"),
    at("ScatterND", "three zeros, mul", (0.0, 5.0), ((0,), (0,)), (0.0, 0.0), reduction="mul"),
    # Matrices.
    at("Det", "rank 1 of 2", ((1.0, 2.0), (2.0, 4.0))),
    at("Det", "the zero matrix", ((0.0, 0.0), (0.0, 0.0))),
    at("Det", "rank 2 of 3", ((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (1.0, 0.0, 1.0))),
    at("Det", "rank 1 of 3", ((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (3.0, 6.0, 9.0))),
    at("Det", "the zero matrix of 3", ((0.0,) * 3,) * 3),
    at("Det", "regular", ((1.0, 2.0), (3.0, 4.0))),
    at("com.microsoft.Inverse", "regular with zeros", ((1.0, 0.0), (0.0, 2.0))),
    *_each("MatMul", "zeros", ((0.0, 0.0),), ((0.0,), (0.0,))),
    at("Gemm", "zeros", ((0.0, 0.0),), ((0.0,), (0.0,)), ((0.0,),)),
    at("Einsum", "zeros", (0.0, 0.0), (0.0, 0.0), equation="i,i->"),
    at("Einsum", "three factors, zeros", (0.0, 1.0), (0.0, 0.0), (0.0, 2.0), equation="i,i,i->"),
    at("Conv", "zeros", (((0.0, 0.0),),), (((0.0,),),), (0.0,)),
    at("ConvTranspose", "zeros", (((0.0, 0.0),),), (((0.0,),),), (0.0,)),
    # Losses.
    at("SoftmaxCrossEntropyLoss", "equal scores", ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0)), (0, 2)),
    at("SoftmaxCrossEntropyLoss", "one of two is ignored", ((2.0, 2.0), (0.0, 0.0)), (0, 1), ignore_index=1),
    at("SoftmaxCrossEntropyLoss", "weights, one 0", ((2.0, 2.0), (0.0, 0.0)), (0, 1), (0.0, 2.0)),
    at("SoftmaxCrossEntropyLoss", "with log_prob", ((2.0, 2.0), (0.0, 0.0)), (0, 1), outputs=2),
    *(
        at("SoftmaxCrossEntropyLoss", f"reduction {r}", ((2.0, 2.0), (0.0, 1.0)), (0, 1), reduction=r)
        for r in ("sum", "none")
    ),
    at("NegativeLogLikelihoodLoss", "zeros", ((0.0, 0.0), (0.0, 0.0)), (0, 1)),
    at("NegativeLogLikelihoodLoss", "weights, one 0", ((0.0, 0.0), (0.0, 0.0)), (0, 1), (0.0, 2.0)),
    # Activations of ONNX Runtime.
    *_each("com.microsoft.Gelu com.microsoft.FastGelu com.microsoft.QuickGelu", "x = 0", 0.0),
    at("com.microsoft.BiasGelu", "x = −bias", (1.0,), (-1.0,)),
    at("com.microsoft.FastGelu", "x = −bias", (1.0,), (-1.0,)),
    at("SwiGLU", "gate 0", (0.0, 2.0), (3.0, 0.0)),
    # Sampling.
    at("GridSample", "a point lies on a pixel", ((((1.0, 2.0, 4.0),),),), ((((0.0, 0.0),),),)),
    at(
        "GridSample",
        "a point lies on the border",
        ((((1.0, 2.0, 4.0),),),),
        ((((-1.0, 0.0), (1.0, 0.0)),),),
        padding_mode="border",
        align_corners=1,
    ),
    at("GridSample", "a point lies between pixels", ((((1.0, 2.0, 4.0),),),), ((((0.25, 0.125),),),)),
    # Attention and recurrences.
    at(
        "Attention",
        "zeros",
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
    ),
    at(
        "Attention",
        "softcap, zeros",
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        (((0.0,), (1.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
        softcap=2.0,
    ),
    at(
        "Attention",
        "causal",
        (((0.0,), (1.0,)),),
        (((0.0,), (1.0,)),),
        (((0.0,), (1.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
        is_causal=1,
    ),
    at("RNN", "zeros", (((0.0,),),), (((0.0,),),), (((0.0,),),), hidden_size=1, outputs=2),
    at("GRU", "zeros", (((0.0,),),), (((0.0,),) * 3,), (((0.0,),) * 3,), hidden_size=1, outputs=2),
    at("LSTM", "zeros", (((0.0,),),), (((0.0,),) * 4,), (((0.0,),) * 4,), hidden_size=1, outputs=3),
    # Pieces of polynomials.
    at(
        "GridSample",
        "cubic, a point lies on a pixel",
        ((((1.0, 2.0, 4.0, 3.0, 1.0),) * 2,),),
        ((((0.0, 0.25),),),),
        mode="cubic",
        sampled=True,
    ),
    at(
        "GridSample",
        "reflected at the border",
        ((((1.0, 2.0, 4.0),) * 2,),),
        ((((1.0, 0.25),),),),
        padding_mode="reflection",
        align_corners=1,
        sampled=True,
    ),
    at(
        "GridSample",
        "the nearest pixel",
        ((((1.0, 2.0, 4.0),) * 2,),),
        ((((0.25, 0.25),),),),
        mode="nearest",
        sampled=True,
    ),
    at(
        "RoiAlign",
        "a roi of no size",
        ((((0.0, 2.0, 4.0),) * 3,),),
        ((1.0, 1.0, 1.0, 1.0),),
        (0,),
        output_height=1,
        output_width=1,
        sampled=True,
    ),
    at(
        "RoiAlign",
        "a point lies on a pixel",
        ((((0.0, 2.0, 7.0),) * 3,),),
        ((0.0, 0.0, 2.0, 2.0),),
        (0,),
        output_height=1,
        output_width=1,
        sampling_ratio=1,
        coordinate_transformation_mode="output_half_pixel",
        sampled=True,
    ),
    at(
        "MaxRoiPool",
        "two pixels of a bin are the largest",
        ((((1.0, 0.0, 1.0),),),),
        ((0.0, 0.0, 0.0, 2.0, 0.0),),
        pooled_shape=[1, 1],
        sampled=True,
        wrt=("X",),
    ),
    at(
        "DeformConv",
        "the offset is 0",
        ((((1.0, 2.0, 4.0),) * 3,),),
        ((((2.0,),),),),
        ((((0.0,) * 3,) * 3,) * 2,),
        sampled=True,
    ),
    at(
        "DeformConv",
        "the offset is 1/4",
        ((((1.0, 2.0, 4.0),) * 3,),),
        ((((2.0,),),),),
        ((((0.25,) * 3,) * 3,) * 2,),
        sampled=True,
    ),
    at(
        "Resize",
        "a point lies on an element",
        ((1.0, 2.0, 4.0),),
        None,
        _single(1, 1),
        mode="linear",
        sampled=True,
        wrt=("X",),
    ),
    at(
        "Resize", "zeros, cubic", ((0.0, 0.0, 0.0, 0.0),), None, _single(1, 1.5), mode="cubic", sampled=True, wrt=("X",)
    ),
    # Squares of norms: what the norm lacks, its square has.
    at("ReduceL2", "the square, the norm is 0", (0.0, 0.0), squared=True),
    at("GlobalLpPool", "the square, x = 0, p = 2", (((0.0, 0.0),),), squared=True),
    at("LpPool", "the square, a window is 0, p = 2", (((0.0, 0.0, 0.0),),), kernel_shape=[3], squared=True),
)

# Operators that move, copy, scale or add elements, or multiply inputs: they are polynomials of low degree everywhere. Their
# point is their first small case with every float 0.
AT_ZERO: tuple[str, ...] = tuple(
    (
        "AffineGrid Cast CastLike CausalConvWithState CenterCropPad Col2Im Compress Concat ConcatFromSequence DFT "
        "DepthToSpace DequantizeLinear Dropout Expand Flatten Gather GatherElements GatherND LinearAttention MaxUnpool OneHot "
        "Optional OptionalGetElement Pad Reshape ReverseSequence RotaryEmbedding STFT SequenceAt SequenceConstruct "
        "SequenceErase SequenceInsert Slice SpaceToDepth Split SplitToSequence Squeeze TensorScatter Tile Transpose Trilu "
        "Unsqueeze com.microsoft.ConcatTraining com.microsoft.DequantizeLinear com.microsoft.MatMulBnb4 "
        "com.microsoft.MatMulInteger16 com.microsoft.MatMulNBits com.microsoft.MulInteger com.microsoft.ReduceSumInteger "
        "com.microsoft.ShrunkenGather com.microsoft.TorchEmbedding com.microsoft.Trilu"
    ).split()
)

_WHOLE = "its result is whole numbers, so no derivative passes; a straight-through one is asked for by name"
_SHAPE = "the shape of its result changes beside the points that are special"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(("QuantizeLinear", "com.microsoft.QuantizeLinear", "com.microsoft.FakeQuant"), _WHOLE),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"), _WHOLE),
    **dict.fromkeys(("Unique", "Range"), _SHAPE),
}
