"""How many floating-point operations a node does, from the shapes of what it reads and writes.

A product and its addition count as two (Golub and Van Loan 2013, "Matrix Computations", section 1.1.15). Element by element
each operator counts as one operation, whatever it computes: the counts compare models, they do not predict a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from refgrad import traits
from refgrad.errors import InvalidModelError
from refgrad.planning.program import CostStep, CostTensor, fitting
from refgrad.protos.domains import MICROSOFT

# What only moves data, makes it of nothing, or says what it is.
MOVING = (
    (traits.MOVING | traits.CASTS | traits.CONTAINERS | traits.SIZES | traits.CONSTANTS)
    | frozenset(("BitCast", "Col2Im", "Dropout", "NonZero", "OneHot"))
    | frozenset(
        ("ConcatTraining", "ExpandDims", "Group", "PassThrough", "ShrunkenGather", "SliceGrad", "SplitTraining")
    )
    | frozenset(("UnfoldTensor", "View", "YieldOp", "ZeroGradient"))
)


def flops(step: CostStep) -> int:
    """The floating-point operations of a node without bodies. Unknown inputs count as nothing."""
    count = _COUNTS.get(step.op_type)
    if count is not None and step.domain in ("", MICROSOFT):
        try:
            with fitting(step):
                return count(step)
        except InvalidModelError as error:
            if isinstance(error.__cause__, IndexError | AttributeError | KeyError):
                return 0  # an input that the operator requires is missing or unknown
            raise
    if step.op_type in MOVING:
        return 0
    if step.op_type in traits.SCATTERS:  # they add what they move, where they say so
        updates = step.given[2] if len(step.given) > 2 else None
        return updates.size if updates is not None and step.attributes.get("reduction", "none") != "none" else 0
    return _largest(step)


def _largest(step: CostStep) -> int:
    return max((tensor.size for tensor in (*step.given, *step.made) if tensor is not None), default=0)


def _of(step: CostStep, position: int) -> CostTensor:
    tensor = step.given[position]
    if tensor is None:
        raise IndexError
    return tensor


def _result(step: CostStep) -> CostTensor:
    found = next((tensor for tensor in step.made if tensor is not None), None)
    if found is None:
        raise IndexError
    return found


def _has(step: CostStep, position: int) -> bool:
    return position < len(step.given) and step.given[position] is not None


def _matmul(step: CostStep) -> int:
    """2·K for each element of the product, K the length of the axis that is summed over."""
    a = _of(step, 0).shape
    depth = a[-1]
    if step.attributes.get("transA") and len(a) > 1:
        depth = a[0] if step.attributes.get("transBatchA") else a[-2]
    scaled = _result(step).size if step.attributes.get("alpha", 1.0) != 1 else 0
    return 2 * depth * _result(step).size + scaled


def _gemm(step: CostStep) -> int:
    a = _of(step, 0).shape
    made = _result(step).size
    depth = a[0] if step.attributes.get("transA") else a[1]
    scaled = made if step.attributes.get("alpha", 1.0) != 1 else 0
    added = made if _has(step, 2) else 0
    return 2 * depth * made + scaled + added


def _conv(step: CostStep) -> int:
    """2·C·K for each element of the result: C channels of a group and K elements of the kernel."""
    made = _result(step)
    bias = made.size if _has(step, 2) else 0
    return 2 * math.prod(_of(step, 1).shape[1:]) * made.size + bias


def _conv_transpose(step: CostStep) -> int:
    """2·M·K for each element of the input: M channels of a group of the result."""
    bias = _result(step).size if _has(step, 2) else 0
    return 2 * math.prod(_of(step, 1).shape[1:]) * _of(step, 0).size + bias


def _conv_grad(step: CostStep) -> int:
    """The operations of the convolution for each of the gradients of X and W, and a sum for the gradient of B."""
    each = 2 * math.prod(_of(step, 2).shape[1:]) * _of(step, 0).size
    wanted = [*(bool(name) for name in step.outputs), False, False, False]
    return each * (wanted[0] + wanted[1]) + wanted[2] * _of(step, 0).size


def _einsum(step: CostStep) -> int:
    """A product for each combination of indices, and a sum where there are fewer results: all operands at once."""
    equation = str(step.attributes["equation"]).replace(" ", "")
    sizes: dict[str, int] = {}
    rest = 1
    for term, tensor in zip(equation.partition("->")[0].split(","), step.given, strict=True):
        assert tensor is not None
        before, dots, after = term.partition("...")
        for label, size in (
            *zip(before, tensor.shape, strict=False),
            *zip(after[::-1], tensor.shape[::-1], strict=False),
        ):
            sizes[label] = max(size, sizes.get(label, 1))
        if dots:
            rest = max(rest, math.prod(tensor.shape[len(before) : len(tensor.shape) - len(after)]))
    combinations = rest * math.prod(sizes.values())
    sums = combinations > _result(step).size
    return combinations * (len(step.given) - 1 + sums)


def _attention(step: CostStep) -> int:
    """Two products with 2 operations per multiply-add, and 3 per score: scaling, and a softmax as one element-wise step."""
    q, k, v = (_of(step, n).shape for n in range(3))
    if len(q) == 4:
        batch, heads, length, head = q
        keys, value = k[2], v[3]
    else:
        heads = int(step.attributes.get("q_num_heads") or step.attributes.get("num_heads") or 1)
        batch, length, width = q
        head = width // heads
        keys, value = k[1], v[2] // int(step.attributes.get("kv_num_heads") or heads)
    if _has(step, 4) and len(_of(step, 4).shape) == 4:
        keys += _of(step, 4).shape[2]
    scores = batch * heads * length * keys
    return 2 * scores * (head + value) + 2 * scores + (scores if _has(step, 3) else 0)


def _recurrent(step: CostStep) -> int:
    """The products of all gates with the input and the state, and two operations per gate and element of the state."""
    x, w, r = _of(step, 0).shape, _of(step, 1).shape, _of(step, 2).shape
    directions, rows = w[:2]  # of all gates
    return x[0] * x[1] * directions * (2 * rows * (w[2] + r[2]) + 2 * rows)


def _pool(step: CostStep) -> int:
    """One for each element of each window."""
    window: Sequence[int] = step.attributes["kernel_shape"]
    return math.prod(window) * _result(step).size


def _sum(step: CostStep) -> int:
    return max(len(step.given) - 1, 1) * _result(step).size


def _determinant(step: CostStep) -> int:
    n = _of(step, 0).shape[-1]
    each: int = 2 * n * n * n // 3
    return each * (_of(step, 0).size // max(n * n, 1))


def _fourier(step: CostStep) -> int:
    """5·n·log₂ n for each transform (Cooley and Tukey 1965)."""
    made = _result(step)
    n = max(made.shape[-2] if len(made.shape) > 1 else made.size, 2)
    return round(5 * made.size // 2 * math.log2(n))


_COUNTS: dict[str, Callable[[CostStep], int]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "FusedMatMul": _matmul,
    "FusedMatMulActivation": _matmul,
    "TransposeMatMul": _matmul,
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "GemmFastGelu": _matmul,
    "Conv": _conv,
    "FusedConv": _conv,
    "ConvInteger": lambda step: 2 * math.prod(_of(step, 1).shape[1:]) * _result(step).size,
    "QLinearConv": lambda step: 2 * math.prod(_of(step, 3).shape[1:]) * _result(step).size,
    "QLinearMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul,
    "DynamicQuantizeMatMul": _matmul,
    "MatMulNBits": lambda step: 2 * int(step.attributes["K"]) * _result(step).size,
    "MatMulBnb4": lambda step: 2 * int(step.attributes["K"]) * _result(step).size,
    "ConvTranspose": _conv_transpose,
    "ConvGrad": _conv_grad,
    "Einsum": _einsum,
    "Attention": lambda step: _attention(step) if not step.domain else _largest(step),
    **dict.fromkeys(traits.RECURRENT | {"GRUTraining", "LSTMTraining"}, _recurrent),
    "AveragePool": _pool,
    "LpPool": _pool,
    "MaxPool": _pool,
    "Sum": _sum,
    "Max": _sum,
    "Min": _sum,
    "Mean": _sum,
    "Det": _determinant,
    "DFT": _fourier,
}
