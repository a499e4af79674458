"""`refgrad.cost`: what a run of a model costs, node by node and in sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from refgrad.errors import OptionError, choices
from refgrad.markup import html_table
from refgrad.model.checks.malformed import explained
from refgrad.model.reading import read
from refgrad.planning import interpreter, onnxruntime
from refgrad.planning.flops import flops
from refgrad.planning.program import CostStep, Program, program, refuse_unknown
from refgrad.sizes import readable

RUNTIMES: dict[str, Callable[[Program], interpreter.InterpreterUsage | onnxruntime.Usage]] = {
    "numpy": interpreter.usage,
    "onnxruntime": onnxruntime.usage,
}


@dataclass(frozen=True)
class NodeCost:
    """The cost of a node: its operations, the bytes that it reads and writes, and the bytes that are alive while it computes.

    `alive` is 0 where the runtime does not run the node: it computes it once, when it loads the model.
    """

    name: str
    operator: str
    flops: int
    read: int
    written: int
    alive: int


@dataclass(frozen=True)
class Cost:
    """The cost of a run of a model on a runtime: its nodes in their order, the peak, and the bytes beside it.

    `peak` has all that a run makes, the results too, without `weights` and `feeds`.
    """

    runtime: str
    nodes: tuple[NodeCost, ...]
    peak: int
    weights: int
    feeds: int
    results: int

    @property
    def flops(self) -> int:
        """The floating-point operations of all nodes."""
        return sum(node.flops for node in self.nodes)

    @property
    def read(self) -> int:
        """The bytes that all nodes read."""
        return sum(node.read for node in self.nodes)

    @property
    def written(self) -> int:
        """The bytes that all nodes write."""
        return sum(node.written for node in self.nodes)

    def table(self) -> list[dict[str, Any]]:
        """A row per node, in their order."""
        return [
            {
                "node": node.name,
                "operator": node.operator,
                "FLOPs": node.flops,
                "read": readable(node.read),
                "written": readable(node.written),
                "alive": readable(node.alive),
            }
            for node in self.nodes
        ]

    def sums(self) -> dict[str, str]:
        """The sums in words."""
        return {
            "FLOPs": f"{self.flops:,}",
            "read": readable(self.read),
            "written": readable(self.written),
            f"peak on {self.runtime}": readable(self.peak),
            "weights": readable(self.weights),
            "feeds": readable(self.feeds),
            "results": readable(self.results),
        }

    def _repr_html_(self) -> str:
        """The table for a notebook, and the sums."""
        return html_table(self.table(), "Cost", [f"{what}: {text}" for what, text in self.sums().items()])


@explained
def cost(
    model: ModelProto | str | os.PathLike[str], sizes: Mapping[str, int] | None = None, *, runtime: str = "numpy"
) -> Cost:
    """The cost of a run of `model`, from shapes alone: operations, bytes read and written, and the peak of memory.

    Nothing is run. Each node counts what its operator does:

    - 2 for each multiply-add of MatMul, Gemm, Conv, ConvTranspose, Einsum, Attention, RNN, GRU, LSTM, FusedMatMul and their
      like; a bias, a scale and the two scalings of scores count as element-wise;
    - a pooling 1 for each element of each window, a sum of n tensors n − 1 for each element;
    - 0 for what only moves data: Reshape, Transpose, Gather, Concat, Cast, Shape and others;
    - 1 for each element of the largest operand or result of any other operator, a reduction or Softmax too.

    A node reads its distinct inputs and writes its results, also where a runtime makes a view. Scan is its body times its
    steps, so is Loop where the number is a constant and nothing ends it earlier; If is its dearer branch; a call of a local
    function is the nodes of its body.

    The memory is for a run in the order of the nodes. On "numpy", the interpreter, it has the views, the results written into
    dead inputs, and what kernels take for themselves. On "onnxruntime" it is the first run on the CPU: its order of nodes, its
    reuse of memory, the common fusions of products, what recurrences take for themselves, and its arena, which keeps what was
    freed. Not in it are what other kernels take for themselves, and rarer fusions. Later runs take a block that is planned in
    the first one, beside that (`SessionOptions.enable_mem_pattern`). Python's own objects, some ten KiB, are not in either.
    docs/benchmarks.md compares both with what was measured.

    :param model: a model, or the path of one. It is not modified, weights are not read.
    :param sizes: numbers for the symbols of dimensions: {"N": 32}; "x[0]" is the first axis of the input x, and "*" every other
        dimension without a number.
    :param runtime: "numpy" or "onnxruntime".
    :raises InvalidModelError: the model cannot be read, or a shape is known in a run alone: it depends on values that are fed.
    :raises OptionError: a symbol without a number, a size that is none, an input that is no tensor, an unknown runtime.
    :raises UnknownNameError: a symbol in `sizes` that no input has.

    >>> import onnx.parser, refgrad
    >>> layer = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ... layer (float[N, 3] x, float[3, 4] w) => (float[N, 4] y) { p = MatMul(x, w)  y = Tanh(p) }''')
    >>> found = refgrad.cost(layer, {"N": 1000})
    >>> [(node.operator, node.flops) for node in found.nodes]
    [('MatMul', 24000), ('Tanh', 4000)]
    >>> found.read, found.written, found.feeds
    (28048, 32000, 12048)
    """
    if runtime not in RUNTIMES:
        raise OptionError(f"There is no runtime {runtime!r}; there are {choices(RUNTIMES)}.")
    found = program(read(model, weights=False), sizes)
    refuse_unknown(found)
    used = RUNTIMES[runtime](found)
    nodes = tuple(_of(step, alive) for step, alive in zip(found.steps, used.alive, strict=True))
    feeds = sum(
        tensor.nbytes for name, tensor in found.inputs.items() if tensor is not None and name not in found.weights
    )
    weights = sum(tensor.nbytes for tensor in found.weights.values())
    return Cost(runtime, nodes, used.peak, weights, feeds, found.nbytes(tuple(dict.fromkeys(found.outputs))))


def operations(found: Program) -> int:
    """The floating-point operations of a program."""
    return sum(_totals(step)[0] for step in found.steps)


def _of(step: CostStep, alive: int) -> NodeCost:
    operator = f"{step.domain}.{step.op_type}" if step.domain else step.op_type
    return NodeCost(step.name, operator, *_totals(step), alive)


def _totals(step: CostStep) -> tuple[int, int, int]:
    """Operations, bytes read and bytes written."""
    if not step.bodies:
        distinct = dict(zip(step.inputs, step.given, strict=True))
        taken = sum(tensor.nbytes for name, tensor in distinct.items() if name and tensor is not None)
        return flops(step), taken, sum(tensor.nbytes for tensor in step.made if tensor is not None)
    each = []
    for body in step.bodies:
        within = [_totals(inner) for inner in body.steps]
        each.append(tuple(sum(column) for column in zip(*within, strict=True)) if within else (0, 0, 0))
    dearest = max(each)
    times = step.trips or 0
    return dearest[0] * times, dearest[1] * times, dearest[2] * times
