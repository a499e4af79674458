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
from onnx.defs import OpSchema

from refgrad import traits
from refgrad.protos.metadata import is_number
from refgrad.protos.traverse import subgraphs
from refgrad.protos.types import FLOATS
from refgrad.tables.schemas import find_schema

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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The roles of inputs, by their names in the schema.
_WEIGHTS = _words("W w R P weight weights bias scale Scale slope gamma beta")
_WEIGHTS |= _words("word_embedding position_embedding segment_embedding")
_FACTORS = _words("A B C Inputs")  # in the following layers; other operators have operands of these names
_LAYERS = traits.PRODUCTS | {"BiasGelu", "FusedGemm", "FusedMatMul"}
# Their inputs of these names are data: weights of classes, a mask, gates.
_WITHOUT_WEIGHTS = traits.LOSSES | {"BiasSoftmax", "GatedDeltaNet", "LinearAttention"}
_QUANTIZATION = re.compile(r"(\w|input|weight)_(scale|zero_point)|scales|zero_points|absmax")
_SETTINGS = _words("initial_c initial_h roi scales values")  # those that may have several elements
SHAPES = _words("axes axis block_shape crop_size depth dft_length ends frame_length frame_step image_shape k K")
SHAPES |= _words("output_shape pads repeats shape size sizes split starts steps")
_NORMALIZATIONS = frozenset(("InstanceNormalization", "GroupNormalization", "LayerNormalization"))
# The first output is made of the first input.
_REARRANGING = (
    traits.RESHAPES
    | traits.PERMUTATIONS
    | traits.CASTS
    | (traits.QUANTIZERS - {"DynamicQuantizeLinear"})  # it returns a scale and a zero point, too
    | {"Expand", "Slice", "Split", "Tile"}
)
_ELEMENTWISE = traits.ARITHMETIC | {"Concat", "Where"}
_WITH_BIAS = traits.PRODUCTS | traits.INTEGER_PRODUCTS | {"FusedMatMul"}
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
    formals: tuple[str, ...] = field(default=(), compare=False, repr=False)  # the names of all inputs in the schema

    def __str__(self) -> str:
        return f"{self.op_type}:{self.input}"

    @property
    def formal(self) -> str:
        """The name of the input in the schema of the operator, "" without one."""
        return self.formals[self.input] if self.input < len(self.formals) else ""

    @property
    def is_weight(self) -> bool:
        """True if a layer reads its weights here."""
        if self.op_type in _WITHOUT_WEIGHTS:
            return False
        if self.op_type == "Gather":  # of an embedding
            return self.input == 0
        is_bias = self.formal == "B" and not _WEIGHTS.isdisjoint(self.formals)
        return is_bias or self.formal in (_WEIGHTS | _FACTORS if self.op_type in _LAYERS else _WEIGHTS)

    @property
    def is_quantization(self) -> bool:
        """True if the operator reads a scale or a zero point of numbers here."""
        return self.op_type not in traits.RESAMPLING and _QUANTIZATION.fullmatch(self.formal) is not None

    @property
    def is_quantized(self) -> bool:
        """True if the operator reads scales or zero points beside numbers."""
        return self.op_type not in traits.RESAMPLING and any(map(_QUANTIZATION.fullmatch, self.formals))


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
        self._scopes: list[tuple[GraphProto, _Scope]] = []
        insides = [_Scope({}) for _ in model.functions]
        for function, scope in zip(model.functions, insides, strict=True):
            formals = [self._number(scope, name) for name in function.input]
            results = [self._free() for _ in function.output]
            self._functions[function.domain, function.name, function.overload] = formals, results
        for function, scope in zip(model.functions, insides, strict=True):
            self._look_through(function.node, scope)
            self._join(map(scope.find, function.output), self._results_of(function))
        self._top = _Scope({})
        self._scopes = [(model.graph, self._top)]
        for name in (*(v.name for v in model.graph.input), *(t.name for t in model.graph.initializer)):
            self._number(self._top, name)
        self._look_through(model.graph.node, self._top)

    @property
    def graphs(self) -> list[GraphProto]:
        """The main graph and every body in it, an outer one before those in it."""
        return [graph for graph, _ in self._scopes]

    def of(self, name: str, graph: int = 0) -> tuple[Read, ...]:
        """Every place where a value is read, in the order in which they are found: `name` in `graphs[graph]`."""
        start = self._scopes[graph][1].numbers.get(name)
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
        self._scopes.append((body, inner))
        formals = [inner.numbers.setdefault(value.name, self._free()) for value in body.input]
        for tensor in body.initializer:
            self._number(inner, tensor.name)
        if node.op_type in traits.CONTROL_FLOW and node.op_type != "If":
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
            read = Read(node.op_type, position, node.name, tuple(node.input), other, formal_inputs(node))
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
    if all(read.is_quantization for read in reads):
        return "quantization"
    if tensor.data_type not in FLOATS:
        return _role_of_others(tensor, reads)
    if is_number(tensor) or not _size(tensor):
        return "scalar" if _size(tensor) == 1 else "constant"
    if all(read.formal in ("input_mean", "input_var") for read in reads):
        return "statistic"
    if is_of_layer(reads):
        generated = _GENERATED.fullmatch(tensor.name) and all(read.op_type in _NORMALIZATIONS for read in reads)
        if generated and _is_filled(values()):
            return "constant"  # the exporter's own ones and zeros, where the layer's weights are applied elsewhere
        angles = all(read.op_type in ("MatMul", "Einsum", "Gather") for read in reads)
        is_short = _size(tensor) <= _LONGEST_PROGRESSION  # a larger one is not read
        return "constant" if angles and is_short and _is_progression(values()) else "parameter"
    if _size(tensor) <= 1:
        is_bias = any(read.op_type in traits.SUMS and read.added_to in _WITH_BIAS for read in reads)
        return "parameter" if is_bias and tensor.dims else "scalar"
    if all(read.formal in _SETTINGS or str(read) == "Pow:1" for read in reads):
        return "constant"
    return _role_of_values(values(), all(read.op_type in _ELEMENTWISE for read in reads))


def is_of_layer(reads: Iterable[Read]) -> bool:
    """True if a layer reads a tensor, where it reads its weights."""
    return any(read.is_weight for read in reads)


def _size(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


def formal_inputs(node: NodeProto) -> tuple[str, ...]:
    """The name of each input in the schema. An operator without one is taken for the operator of ai.onnx with this name."""
    schema = find_schema(node.op_type, node.domain) or find_schema(node.op_type, "")
    if schema is None or not schema.inputs:
        return ()
    names = tuple(formal.name for formal in schema.inputs)
    is_variadic = schema.inputs[-1].option == OpSchema.FormalParameterOption.Variadic
    return names + names[-1:] * (len(node.input) - len(names)) if is_variadic else names


def _role_of_others(tensor: TensorProto, reads: tuple[Read, ...]) -> str:
    """The role of a tensor without floats."""
    if tensor.data_type in _SMALL_INTEGERS and any(read.is_weight or read.is_quantized for read in reads):
        return "quantized"
    if tensor.data_type == TensorProto.INT32 and any(read.is_weight and read.input > 1 for read in reads):
        return "quantized"  # a bias
    if all(read.formal in SHAPES or read.op_type == "ConstantOfShape" for read in reads):
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
