"""Names of `onnxcustom.utils.onnx_split`: a model as a chain of smaller models, for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto

from refgrad.errors import OptionError, OptionTypeError, choices
from refgrad.model.inlining.kept import Functions
from refgrad.model.reading import read
from refgrad.model.roles import SHAPES, formal_inputs
from refgrad.protos.traverse import reads_of
from refgrad.protos.types import nbytes
from refgrad.reverse.bodies import is_random
from refgrad.rewrites.selection import inferred, select_model_inputs_outputs
from refgrad.traits import SIZES

__all__ = ["OnnxSegment", "OnnxSplitting", "split_onnx"]

_COUNTS = ("ConstantOfShape", "Range")  # all their inputs are shapes or positions
_NODE_BYTES = 64  # of a node, beside its weights
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def split_onnx(
    onnx_model: ModelProto,
    n_parts: int | None = None,
    cut_points: Sequence[str] | None = None,
    verbose: int = 0,
    stats: bool = False,
    fLOG: Callable[..., None] | None = None,
    doc_string: bool = False,
) -> Any:
    """A model as a chain of models. Each gives the next one a single tensor, and small integers that shapes are made of.

    The first output of a model is the first input of the next one. A model also takes the inputs of `onnx_model` that it
    reads, and returns the outputs of `onnx_model` that it computes.

    :param n_parts: the number of models. Their sizes, the bytes of weights and a constant for each node, are similar.
    :param cut_points: instead of `n_parts`, the tensors that are passed on, among `OnnxSplitting(onnx_model).cutting_points`.
    :param verbose: 1 reports what is done to `fLOG`, which is `print` by default.
    :param stats: also return a dict: "split", "segments", "cutting_points", "split_points", "extremities", "shape_results".
    :param doc_string: describe each model in its `doc_string`.
    :raises OptionTypeError: an argument has another type.
    :raises OptionError: neither or both of `n_parts` and `cut_points` are given, or the model cannot be cut so.
    """
    if n_parts is not None and (isinstance(n_parts, bool) or not isinstance(n_parts, int)):
        raise OptionTypeError(f"n_parts is a number, not {n_parts!r}.")
    if cut_points is not None and (isinstance(cut_points, str) or not isinstance(cut_points, Sequence)):
        raise OptionTypeError(f"cut_points is a list of names, not {cut_points!r}.")
    if (n_parts is None) == (cut_points is None):
        raise OptionError("Give either n_parts or cut_points.")
    splitting = OnnxSplitting(onnx_model, verbose, doc_string, fLOG)
    ends = splitting.at(cut_points or ()) if n_parts is None else splitting.balanced(n_parts)
    parts = [splitting._make_onnx(begin, end)[0] for begin, end in pairwise(ends)]
    if not stats:
        return parts
    return parts, {
        "split": splitting,
        "segments": splitting.segments,
        "cutting_points": splitting.cutting_points,
        "split_points": [splitting.segments[end].begin for end in ends[1:-1]],
        "extremities": ends,
        "shape_results": splitting.shape_results,
    }


class OnnxSegment:
    """The nodes between two neighbouring cutting points, `begin` and `end`; None is an end of the model.

    `involved` are the results of the nodes. `shape_results` are the results that later segments read to make shapes.
    """

    def __init__(
        self, parent: OnnxSplitting, number: int, begin: str | None, end: str | None, involved: list[str]
    ) -> None:
        self.parent, self.number, self.begin, self.end, self.involved = parent, number, begin, end, involved
        self.shape_results = set(parent._passed_on(number, number + 1))

    @cached_property
    def size(self) -> int:
        """The bytes of the segment as a model."""
        return self.parent._make_onnx(self.number, self.number + 1)[0].ByteSize()

    def __repr__(self) -> str:
        """The ends and the number of results."""
        return f"{type(self).__name__}({self.number}, {self.begin!r}, {self.end!r}, {len(self.involved)} results)"


class OnnxSplitting:
    """The places where a model can be cut into a chain.

    `cutting_points` are the tensors that everything behind them depends on, except for the inputs of the model, constants
    and `shape_results`: integers that shapes are made of. `segments` are the nodes between them.

    :param onnx_model: a model. It is not modified.
    """

    def __init__(
        self,
        onnx_model: ModelProto,
        verbose: int = 0,
        doc_string: bool = False,
        fLOG: Callable[..., None] | None = None,
    ) -> None:
        source = read(onnx_model, weights=False)
        self.onnx_model = ModelProto()
        self.onnx_model.CopyFrom(source)
        self.verbose, self.doc_string, self.log = verbose, doc_string, fLOG or print
        graph = self.onnx_model.graph
        declared = {value.name for value in (*graph.value_info, *graph.output, *graph.input)}
        graph.value_info.extend(value for value in inferred(source) if value.name not in declared)
        self._inputs = [value.name for value in graph.input]
        self._outputs = [value.name for value in graph.output]
        self._reads = [list(dict.fromkeys(filter(None, reads_of(node)))) for node in graph.node]
        self._constants = self._constant_values()
        self._makers_of_constants = {
            name: k for k, node in enumerate(graph.node) for name in node.output if name in self._constants
        }
        self.shape_results = self._shape_values()
        self._of_data = [k for k, node in enumerate(graph.node) if not self._is_apart(node)]
        cuts = self._cuts()
        self.cutting_points = [name for name, _ in cuts]
        self._segment = self._segments_of_nodes([k for _, k in cuts])  # by the position of a node
        self.ends = ends = [None, *self.cutting_points, None]
        self.segments = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            nodes = [node for k, node in enumerate(graph.node) if self._segment.get(k) == number]
            involved = [name for node in nodes for name in node.output if name]
            self.segments.append(OnnxSegment(self, number, begin, end, involved))
        self._say(f"{len(graph.node)} nodes, {len(self.cutting_points)} cutting points")

    def _say(self, text: str) -> None:
        if self.verbose:
            self.log(f"[OnnxSplitting] {text}")

    # Kinds of values

    def _constant_values(self) -> set[str]:
        """The values that depend on initializers alone. A model that needs one computes it."""
        graph = self.onnx_model.graph
        constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        functions = Functions(self.onnx_model.functions)
        for node, reads in zip(graph.node, self._reads, strict=True):
            if constants.issuperset(reads) and not is_random(node, functions):
                constants.update(filter(None, node.output))
        return constants

    def _shape_values(self) -> set[str]:
        """The integers that shapes are made of, constants too: every one is a size, or is computed of sizes."""
        graph = self.onnx_model.graph
        declared = (*graph.input, *graph.value_info, *graph.output)
        integers = {value.name for value in declared if value.type.tensor_type.elem_type in _INTEGERS}
        integers.update(tensor.name for tensor in graph.initializer if tensor.data_type in _INTEGERS)
        sizes = integers.intersection((*self._inputs, *(tensor.name for tensor in graph.initializer)))
        for node, reads in zip(graph.node, self._reads, strict=True):
            if len(node.output) == 1 and (node.op_type in SIZES or sizes.issuperset(reads)):
                sizes.update(integers.intersection(node.output))
        results: set[str] = set()
        for node, reads in zip(reversed(graph.node), reversed(self._reads), strict=True):
            if results.isdisjoint(node.output):
                read = [
                    name
                    for name, formal in zip(node.input, formal_inputs(node), strict=False)
                    if formal in SHAPES or node.op_type in _COUNTS
                ]
            else:
                read = [] if node.op_type in SIZES else reads
            results.update(sizes.intersection(read).difference(self._inputs))
        return results

    def _is_apart(self, node: NodeProto) -> bool:
        """True if a node makes constants or a shape."""
        return all(not name or name in self._constants or name in self.shape_results for name in node.output)

    # Segments

    def _cuts(self) -> list[tuple[str, int]]:
        """The cutting points, each with the position of the last node before it: there only one value is still read."""
        graph = self.onnx_model.graph
        last_read = {name: k for k in self._of_data for name in self._reads[k]}
        cuts: list[tuple[str, int]] = []
        live: set[str] = set()
        for k in self._of_data[:-1]:
            made = set(filter(None, graph.node[k].output)) - self.shape_results
            live = {name for name in live | made if last_read.get(name, -1) > k}
            if len(live) == 1 and not live.intersection(name for name, _ in cuts):
                cuts.append((next(iter(live)), k))
        return cuts

    def _segments_of_nodes(self, ends: Sequence[int]) -> dict[int, int]:
        """The number of the segment of each node, except for nodes that make constants."""
        graph = self.onnx_model.graph
        of_data = set(self._of_data)
        of_nodes: dict[int, int] = {}
        of_values: dict[str, int] = {}  # the first segment that can read a value
        for k, node in enumerate(graph.node):
            if self._constants.issuperset(filter(None, node.output)):
                continue
            if k in of_data:
                number = sum(end < k for end in ends)
            else:
                number = max((of_values.get(name, 0) for name in self._reads[k]), default=0)
            of_nodes[k] = number
            for name in filter(None, node.output):
                of_values[name] = number + (name in self.cutting_points)
        return of_nodes

    def _read_within(self, begin: int, end: int) -> set[str]:
        """The values that the nodes of some segments read, and the nodes of the constants among them."""
        return self._read_by(k for k, number in self._segment.items() if begin <= number < end)[0]

    def _read_by(self, nodes: Iterable[int]) -> tuple[set[str], set[int]]:
        """The values that nodes read, together with the nodes of constants, which are returned too."""
        pending, constants, read = list(nodes), set[int](), set[str]()
        while pending:
            names = self._reads[pending.pop()]
            read.update(names)
            new = {self._makers_of_constants[name] for name in names if name in self._makers_of_constants} - constants
            constants |= new
            pending += new
        return read, constants

    def _made_within(self, begin: int, end: int) -> list[str]:
        """The values that the nodes of some segments make."""
        nodes = self.onnx_model.graph.node
        return [
            name for k, number in self._segment.items() if begin <= number < end for name in nodes[k].output if name
        ]

    def _passed_on(self, begin: int, end: int) -> list[str]:
        """The shape results of some segments that later ones read."""
        later = self._read_within(end, len(self.cutting_points) + 1)
        return [name for name in self._made_within(begin, end) if name in self.shape_results and name in later]

    def _make_onnx(self, begin: int, end: int) -> tuple[ModelProto, dict[str, list[str]]]:
        """The segments from `begin` to `end` - 1 as a model, and its inputs and outputs."""
        read, made = self._read_within(begin, end), self._made_within(begin, end)
        is_last = end == len(self.ends) - 1
        first, last = self.ends[begin], self.ends[end]
        earlier = self._made_within(0, begin)
        inputs = [] if first is None else [first]
        inputs += [name for name in self._inputs if name in read]
        inputs += [name for name in earlier if name in self.shape_results and name in read]
        outputs = [] if last is None else [last]
        outputs += self._passed_on(begin, end)
        own = {*made, *(self._outputs if is_last else ())} - set(earlier)
        outputs += [name for name in self._outputs if name in own]
        outputs = list(dict.fromkeys(outputs))
        part = select_model_inputs_outputs(self.onnx_model, outputs, list(dict.fromkeys(inputs)))
        if self.doc_string:
            part.doc_string = f"segments {begin} to {end - 1}: {len(part.graph.node)} nodes, {part.ByteSize()} bytes"
        return part, {"inputs": inputs, "outputs": outputs}

    # Parts

    def at(self, cut_points: Sequence[str]) -> list[int]:
        """The numbers of the segments with which the parts begin, and the number of segments.

        :raises OptionError: there is no such cutting point, or the names are not in the order of the model.
        """
        for name in cut_points:
            if name not in self.cutting_points:
                raise OptionError(f"The model cannot be cut at {name!r}. It can at: {choices(self.cutting_points)}.")
        places = [self.cutting_points.index(name) + 1 for name in cut_points]
        if not places or places != sorted(set(places)):
            raise OptionError(
                f"cut_points are different names in the order of the model: {choices(self.cutting_points)}."
            )
        return [0, *places, len(self.segments)]

    def balanced(self, n_parts: int) -> list[int]:
        """The same numbers for parts of similar sizes: the sum of their squares is the smallest.

        :raises OptionError: the model cannot be cut into so many parts.
        """
        if not 1 <= n_parts <= len(self.segments):
            raise OptionError(f"The model can be cut into 1 to {len(self.segments)} parts, not into {n_parts}.")
        sums = [0, *accumulate(self._sizes())]
        best = {end: (sums[end] ** 2, [0]) for end in range(1, len(sums))}  # the sum of squares, and where parts begin
        for number in range(1, n_parts):
            best = {
                end: min(
                    (best[begin][0] + (sums[end] - sums[begin]) ** 2, [*best[begin][1], begin])
                    for begin in range(number, end)
                )
                for end in range(number + 1, len(sums))
            }
        return [*best[len(self.segments)][1], len(self.segments)]

    def _sizes(self) -> list[int]:
        """The bytes of the weights of each segment, and `_NODE_BYTES` for each node."""
        graph = self.onnx_model.graph
        weights = {tensor.name: nbytes(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
        sizes = [0] * len(self.segments)
        for number in range(len(self.segments)):
            nodes = [k for k, segment in self._segment.items() if segment == number]
            read, constants = self._read_by(nodes)
            sizes[number] = len(nodes) * _NODE_BYTES
            sizes[number] += sum(graph.node[k].ByteSize() for k in constants) + sum(weights.get(n, 0) for n in read)
        return sizes

    def display_shape_node_result(self) -> str:
        """The nodes, one a line. |S marks integers that shapes are made of, |NS the nodes that make them."""

        def marked(names: Iterable[str]) -> str:
            return ", ".join(f"{name}|S" if name in self.shape_results else name for name in names)

        lines = []
        for node in self.onnx_model.graph.node:
            mark = "|NS" if self.shape_results.issuperset(node.output) else ""
            lines.append(f"{node.op_type}{mark}({marked(node.input)}) -> {marked(node.output)}")
        return "\n".join(lines)
