"""The role of an initializer, by the operators that read it: a parameter, a statistic, a mask, a shape.

An initializer is followed through what only rearranges it (Transpose, Reshape, Cast, quantization) and into the bodies and
functions that read it. Values are looked at where the graph alone does not tell: a mask is added like a bias.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from refgrad import traits
from refgrad.protos.reading import is_number
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import subgraphs

KINDS = {
    "parameter": "what is trained: the weight of a layer, its bias, an embedding",
    "unexplained": "floats that are not made of the state_dict: a table, or what the exporter computed of parameters",
    "statistic": "the running mean or variance of a BatchNormalization",
    "quantized": "a parameter as integers, which QDQ or a quantized operator reads",
    "quantization": "a scale or a zero point",
    "mask": "what hides elements: bools, 0 and 1, or 0 and a huge negative number",
    "scalar": "one number: an epsilon, an exponent, 1/√d",
    "shape": "integers of a shape, axes, pads or steps",
    "constant": "any other tensor that is not trained: a table of cosines, positions, indices, an initial state",
    "unused": "what no node reads",
}

_EVERY = tuple(range(16))
_PARAMETERS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "Einsum": _EVERY,
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "Gather": (0,),
    "FusedConv": (1, 2),
    "FusedGemm": (0, 1, 2),
    "FusedMatMul": (0, 1),
    "Attention": (1, 2),  # of com.microsoft
    "MultiHeadAttention": (3,),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "BiasGelu": (1,),
    "FastGelu": (1,),
    "MatMulNBits": (5,),
}
_NORMALIZATIONS = frozenset(("InstanceNormalization", "GroupNormalization", "LayerNormalization"))
_QUANTIZED = {
    "MatMulInteger": (0, 1),
    "ConvInteger": (1,),
    "QLinearConv": (3, 8),
    "QLinearMatMul": (0, 3),
    "MatMulNBits": (1,),
    "MatMulBnb4": (1,),
    "GatherBlockQuantized": (0,),
}
_QUANTIZATION = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "QLinearConv": (1, 2, 4, 5, 6, 7),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "MatMulInteger": (2, 3),
    "ConvInteger": (2, 3),
    "MatMulNBits": (2, 3),
    "MatMulBnb4": (2,),
    "GatherBlockQuantized": (2, 3),
}
_SETTINGS = {
    "LSTM": (4, 5, 6),
    "GRU": (4, 5),
    "RNN": (4, 5),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Clip": (1, 2),
    "Pad": (2,),
    "OneHot": (2,),
    "Dropout": (1, 2),
    "Range": (0, 1, 2),
    "Pow": (1,),
}
_SHAPES = {
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Pad": (1, 3),
    "Tile": (1,),
    "Split": (1,),
    "TopK": (1,),
    "ConstantOfShape": (0,),
    "Resize": (3,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "AffineGrid": (1,),
    "OneHot": (1,),
    "Trilu": (1,),
    "CumSum": (1,),
    "MaxUnpool": (2,),
}
# The first output is made of the first input.
_REARRANGING = (
    traits.RESHAPES
    | traits.PERMUTATIONS
    | traits.CASTS
    | {"DequantizeLinear", "Expand", "QuantizeLinear", "Slice", "Split", "Tile"}
)
_ELEMENTWISE = frozenset(("Add", "Sub", "Sum", "Mul", "Div", "Max", "Min", "Where", "Concat"))
_SUMS = frozenset(("Add", "Sub", "Sum"))
_WITH_BIAS = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose", "FusedMatMul", "Einsum", "MatMulInteger"))
_SMALL_INTEGERS = frozenset((TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4))
_LONGEST_PROGRESSION = 1 << 20  # elements of a table that is looked at
_HUGE = -1e4  # what a mask adds to a score; the largest of float16 is 65504
_GENERATED = re.compile(r"val_\d+|onnx::.*|.*_output_\d+|(const|constant|initializer)(_?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Read:
    """One place where a value is read: `op_type` at position `input`; the node is the one that has the name `node`."""

    op_type: str
    input: int
    node: str
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    added_to: str = field(default="", compare=False, repr=False)  # the operator that made what it is added to

    def __str__(self) -> str:
        return f"{self.op_type}:{self.input}"


@dataclass
class _Scope:
    """The values that a node sees: name -> its number, in the graph that the node lies in and in those around it."""

    numbers: dict[str, int]
    outer: _Scope | None = None

    def find(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.numbers:
                return scope.numbers[name]
            scope = scope.outer
        return None


class Reads:
    """Who reads the values of a model, through rearrangements, bodies and functions."""

    def __init__(self, model: ModelProto) -> None:
        self._count = 0
        self._reads: dict[int, list[Read]] = {}
        self._becomes: dict[int, list[int]] = {}  # the values that are the same tensor, rearranged or by another name
        self._maker: dict[int, str] = {}
        self._functions: dict[tuple[str, str, str], tuple[list[int], list[int]]] = {}
        insides = [_Scope({}) for _ in model.functions]
        for function, scope in zip(model.functions, insides, strict=True):
            formals = [self._number(scope, name) for name in function.input]
            results = [self._free() for _ in function.output]
            self._functions[function.domain, function.name, function.overload] = formals, results
        for function, scope in zip(model.functions, insides, strict=True):
            self._look_through(function.node, scope)
            self._join(map(scope.find, function.output), self._results_of(function))
        self._top = _Scope({})
        for name in (*(v.name for v in model.graph.input), *(t.name for t in model.graph.initializer)):
            self._number(self._top, name)
        self._look_through(model.graph.node, self._top)

    def of(self, name: str) -> tuple[Read, ...]:
        """Every place where the value `name` of the main graph is read, in the order in which they are found."""
        start = self._top.numbers.get(name)
        pending, seen, found = [] if start is None else [start], set[int](), dict[Read, None]()
        for value in pending:
            if value not in seen:
                seen.add(value)
                found.update(dict.fromkeys(self._reads.get(value, ())))
                pending += self._becomes.get(value, ())
        return tuple(found)

    def _free(self) -> int:
        self._count += 1
        return self._count

    def _number(self, scope: _Scope, name: str) -> int:
        return scope.numbers.setdefault(name, self._free())

    def _results_of(self, function: FunctionProto) -> list[int]:
        return self._functions[function.domain, function.name, function.overload][1]

    def _join(self, given: Iterable[int | None], taken: Iterable[int | None]) -> None:
        for one, other in zip(given, taken, strict=False):
            if one is not None and other is not None:
                self._becomes.setdefault(one, []).append(other)

    def _look_through(self, nodes: Iterable[NodeProto], scope: _Scope) -> None:
        for node in nodes:
            inputs = [scope.find(name) if name else None for name in node.input]
            bodies = [graph for attribute in node.attribute for graph in subgraphs(attribute)]
            results = [self._look_into(node, body, scope, inputs) for body in bodies]
            outputs = [self._number(scope, name) if name else None for name in node.output]
            for result in results:
                self._join(result, outputs)
            if bodies:
                continue
            called = self._functions.get((node.domain, node.op_type, node.overload))
            if called is not None:
                self._join(inputs, called[0])
                self._join(called[1], outputs)
            else:
                self._read(node, inputs, outputs)

    def _look_into(
        self, node: NodeProto, body: GraphProto, scope: _Scope, inputs: list[int | None]
    ) -> list[int | None]:
        """Look through a body, and return the values that become the outputs of its node."""
        inner = _Scope({}, scope)
        formals = [inner.numbers.setdefault(value.name, self._free()) for value in body.input]
        for tensor in body.initializer:
            self._number(inner, tensor.name)
        if node.op_type in ("Loop", "Scan", "SequenceMap"):
            self._join(inputs, formals)
        self._look_through(body.node, inner)
        results = [inner.find(value.name) for value in body.output]
        return results[1:] if node.op_type == "Loop" else results  # the first one of a Loop is its condition

    def _read(self, node: NodeProto, inputs: list[int | None], outputs: list[int | None]) -> None:
        makers = [self._maker.get(number, "") if number is not None else "" for number in inputs]
        passed = 0 if node.op_type in _REARRANGING else None
        for position, number in enumerate(inputs):
            if number is None:
                continue
            if position == passed:
                self._becomes.setdefault(number, []).extend(output for output in outputs if output is not None)
                continue
            other = next((maker for k, maker in enumerate(makers) if k != position and maker), "")
            read = Read(node.op_type, position, node.name, tuple(node.input), other)
            self._reads.setdefault(number, []).append(read)
        made = node.op_type if passed is None else makers[0] if makers else ""
        self._maker.update((output, made) for output in outputs if output is not None and made)


def role_of(tensor: TensorProto, reads: tuple[Read, ...], values: Callable[[], np.ndarray]) -> str:
    """The role of an initializer, a key of `KINDS`.

    :param reads: the places where it is read.
    :param values: returns its values; called where the graph does not tell what it is.
    """
    if not reads:
        return "unused"
    if _all_in(reads, _QUANTIZATION):
        return "quantization"
    if tensor.data_type not in FLOATS:
        return _role_of_others(tensor, reads)
    if is_number(tensor) or not _size(tensor):
        return "scalar" if _size(tensor) == 1 else "constant"
    if _all_in(reads, {"BatchNormalization": (3, 4)}):
        return "statistic"
    if is_of_layer(reads):
        generated = _GENERATED.fullmatch(tensor.name) and all(read.op_type in _NORMALIZATIONS for read in reads)
        if generated and _is_filled(values()):
            return "constant"  # the exporter's own ones and zeros, where the layer's weights are applied elsewhere
        angles = all(read.op_type in ("MatMul", "Einsum", "Gather") for read in reads)
        return "constant" if angles and _is_progression(values()) else "parameter"
    if _size(tensor) <= 1:
        is_bias = any(read.op_type in _SUMS and read.added_to in _WITH_BIAS for read in reads)
        return "parameter" if is_bias and tensor.dims else "scalar"
    if _all_in(reads, _SETTINGS) or _all_in(reads, _SHAPES):
        return "constant"
    return _role_of_values(values(), all(read.op_type in _ELEMENTWISE for read in reads))


def is_of_layer(reads: Iterable[Read]) -> bool:
    """True if a layer reads a tensor, where it reads its weights."""
    return any(read.input in _PARAMETERS.get(read.op_type, ()) for read in reads)


def _size(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


def _all_in(reads: Iterable[Read], table: Mapping[str, tuple[int, ...]]) -> bool:
    return all(read.input in table.get(read.op_type, ()) for read in reads)


def _role_of_others(tensor: TensorProto, reads: tuple[Read, ...]) -> str:
    """The role of a tensor without floats."""
    if tensor.data_type in _SMALL_INTEGERS:
        quantized = any(read.input in _PARAMETERS.get(read.op_type, ()) for read in reads)
        if quantized or any(read.input in _QUANTIZED.get(read.op_type, ()) for read in reads):
            return "quantized"
    if tensor.data_type == TensorProto.INT32 and any(read.op_type in ("QLinearConv", "Conv", "Gemm") for read in reads):
        return "quantized"  # a bias
    if _all_in(reads, _SHAPES) or all(read.op_type.startswith("Reduce") for read in reads):
        return "shape"
    if _size(tensor) == 1:
        return "scalar"
    return "mask" if tensor.data_type == TensorProto.BOOL else "constant"


def _role_of_values(values: np.ndarray, elementwise: bool) -> str:
    """The role of a float tensor of two elements or more that no layer reads."""
    wide = values.astype(np.float64)
    rank = sum(size > 1 for size in values.shape)
    lowest = wide.min()
    if lowest <= _HUGE and len(np.unique(wide)) == 2:
        return "mask"
    if _is_filled(wide) and (rank > 1 or not elementwise):
        return "constant"
    if rank > 1 and np.isin(wide, (0, 1)).all():
        return "mask"
    return "constant" if _is_progression(wide) else "parameter"


def _is_filled(values: np.ndarray) -> bool:
    """True if all values are equal."""
    return bool((values == values.flat[0]).all())


def _is_progression(values: np.ndarray) -> bool:
    """True if every row of values is an arithmetic or a geometric progression: positions, slopes, frequencies."""
    if values.size > _LONGEST_PROGRESSION:
        return False
    wide = np.squeeze(values.astype(np.float64))
    if not wide.ndim or wide.shape[-1] < 4 or not np.isfinite(wide).all() or _is_filled(wide):
        return False
    steps = np.diff(wide, axis=-1)
    even = np.abs(np.diff(steps, axis=-1)) <= 1e-5 * np.abs(wide).max()
    if even.all():
        return True
    if (wide == 0).any():
        return False
    ratios = wide[..., 1:] / wide[..., :-1]
    return bool((np.abs(np.diff(ratios, axis=-1)) <= 1e-4 * np.abs(ratios[..., 1:])).all())


def angle_tables(tables: Mapping[str, np.ndarray]) -> set[str]:
    """The names of those that are cosines and sines of the same angles: their squares add up to 1."""
    found = set[str]()
    squares: dict[tuple[int, ...], list[tuple[str, np.ndarray]]] = {}
    for name, values in tables.items():
        if values.size and np.abs(values).max() <= 1.001:
            squares.setdefault(values.shape, []).append((name, values.astype(np.float64) ** 2))
    for alike in squares.values():
        for k, (name, square) in enumerate(alike):
            for other, another in alike[k + 1 :]:
                if np.abs(square + another - 1).max() < 1e-3:
                    found |= {name, other}
    return found
