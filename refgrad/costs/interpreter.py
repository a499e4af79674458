"""The memory of a run on the interpreter in NumPy: views, results in the memory of an input, and the needs of kernels.

It follows `backends/numpy/plan.py` step by step, with layouts in place of arrays: a value lives until the last node that reads
it, a view keeps the array that it looks into, and a Reshape copies where the elements do not lie in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from refgrad.costs.layout import MemoryLayout, contiguous, merged
from refgrad.costs.program import CostStep, CostTensor, Program, fitting
from refgrad.protos.walk import positions_needed

# Operators whose kernels may return a view of an input, or the input itself.
VIEWING = frozenset(
    (
        *("Attention", "BitCast", "Cast", "CastLike", "Dropout", "Einsum", "Expand", "Flatten", "Identity"),
        *("If", "Loop", "Optional", "OptionalGetElement", "Reshape", "Scan", "SequenceAt", "SequenceConstruct"),
        *("SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap", "Slice", "Split"),
        *("SplitToSequence", "Squeeze", "Transpose", "Unsqueeze"),
    )
)
# Operators whose kernels write into an input that nobody reads afterwards.
REUSING = frozenset(
    (
        *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization"),
        *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil", "Clip", "Cos", "Cosh", "Div", "Erf"),
        *("Exp", "Floor", "Gelu", "LayerNormalization", "Log", "LogSoftmax", "Max", "Min", "Mul", "Neg", "Not"),
        *(
            "Or",
            "Reciprocal",
            "Relu",
            "Round",
            "ScatterElements",
            "ScatterND",
            "Sign",
            "Sin",
            "Sinh",
            "Softmax",
            "Sqrt",
        ),
        *("Sub", "Sum", "Tan", "Tanh", "Where", "Xor"),
    )
)
OBJECT = 128  # bytes of an array without its elements
_FOLDED = 2**20  # bytes: a folded result is at most as large as this, or as its inputs
_VIEWED = 4  # a view that outlives an array this many times its size is copied
_COPIED = 256  # elements: Expand copies that many sooner than it views them
_WORKSPACE = 2**21  # bytes that a block of a convolution works with
_COLUMNS = 256  # of a block at least
_BLOCK = 16384  # elements of a block of Erf and Gelu
SMALL = 1024  # elements: a result of no more takes new memory
_FOREIGN = 0  # the memory of what the run does not own


@dataclass(frozen=True, slots=True)
class Array:
    """A value of a run: whose memory it has, and how it lies there."""

    memory: int
    layout: MemoryLayout
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.layout.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class InterpreterUsage:
    """The bytes alive while each node of a run computes, 0 for one that does not run; the peak; the bytes of the results."""

    alive: tuple[int, ...]
    peak: int
    held: int


def usage(program: Program) -> InterpreterUsage:
    """The bytes that a run holds beside weights and feeds, node by node."""
    return _Run(program).usage()


class _Run:
    def __init__(self, program: Program) -> None:
        self._program = program
        folded = _folded(program)
        kept = [k for k in range(len(program.steps)) if k not in folded]
        needed = positions_needed(
            [(program.steps[k].reads, program.steps[k].outputs) for k in kept], set(program.outputs)
        )
        self._order = [kept[k] for k in needed]
        self._own = {name for k in self._order for name in program.steps[k].outputs if name}
        self._end: dict[str, int] = {}
        for index, k in enumerate(self._order):
            step = program.steps[k]
            self._end |= dict.fromkeys((*step.outputs, *step.reads), index)
        self._end |= dict.fromkeys(program.outputs, len(self._order))
        self._arrays: dict[str, Array] = {}
        self._sizes: dict[int, int] = {_FOREIGN: 0}
        self._holders: dict[int, int] = {}
        self._alive = 0
        self._mark_memory()

    def usage(self) -> InterpreterUsage:
        steps = self._program.steps
        alive = [0] * len(steps)
        for index, k in enumerate(self._order):
            alive[k] = self._run(index, steps[k])
        copied = sum(
            self._array(name).nbytes
            for name in dict.fromkeys(self._program.outputs)
            if name in self._own and self._array(name).memory == _FOREIGN
        )
        return InterpreterUsage(tuple(alive), max([*alive, self._alive + copied], default=0), self._alive)

    def _mark_memory(self) -> None:
        """Note the values that may share memory, as the plan sees it: it does not know which views turn out to be copies."""
        self._parts: dict[str, frozenset[int]] = {}
        foreign, number = frozenset((_FOREIGN,)), 0
        for k in self._order:
            step = self._program.steps[k]
            shared = frozenset().union(*(self._parts.get(name, foreign) for name in step.reads)) or foreign
            if step.bodies or step.domain:
                shared |= foreign
            for name in step.outputs:
                number += 1
                self._parts[name] = shared if _views(step) else frozenset((number,))
        self._last: dict[int, int] = {}
        for name, parts in self._parts.items():
            for part in parts:
                self._last[part] = max(self._last.get(part, 0), self._end.get(name, 0))

    def _is_free(self, step: CostStep, name: str, index: int) -> bool:
        parts = self._parts.get(name)
        if not name or parts is None or len(parts) != 1:
            return False
        (part,) = parts
        reads = (*step.inputs, *(read for read in step.reads if read not in step.inputs))
        held = [p for read in reads for p in self._parts.get(read, ())]
        return part != _FOREIGN and self._last[part] == index and held.count(part) == 1

    def _array(self, name: str) -> Array:
        if name not in self._arrays:  # it is fed, a weight, a constant, or a value around a body
            tensor = self._program.types.get(name)
            self._arrays[name] = Array(
                _FOREIGN, contiguous(tensor.shape if tensor else ()), tensor.itemsize if tensor else 0
            )
        return self._arrays[name]

    def _new(self, tensor: CostTensor | None, layout: MemoryLayout | None = None) -> Array:
        """A new array, which is not held yet."""
        number = len(self._sizes)
        shape = tensor.shape if tensor else ()
        self._sizes[number] = tensor.nbytes if tensor else 0
        return Array(number, layout or contiguous(shape), tensor.itemsize if tensor else 0)

    def _hold(self, array: Array) -> None:
        self._holders[array.memory] = self._holders.get(array.memory, 0) + 1
        if self._holders[array.memory] == 1:
            self._alive += self._sizes[array.memory]
        self._alive += OBJECT

    def _drop(self, array: Array) -> None:
        self._holders[array.memory] -= 1
        if not self._holders[array.memory]:
            self._alive -= self._sizes[array.memory]
        self._alive -= OBJECT

    def _run(self, index: int, step: CostStep) -> int:
        """Take the step; the most bytes that are alive meanwhile."""
        before = self._alive
        inputs = [self._array(name) if name else None for name in step.inputs]
        with fitting(step):
            results, scratch = self._results(index, step, inputs)
        for name, array in zip(step.outputs, results, strict=True):
            if name:
                self._arrays[name] = array
            self._hold(array)
        most = max(self._alive, before + scratch)
        if _views(step):
            for name in filter(None, step.outputs):
                outlives = any(self._end[x] < self._end[name] for x in step.reads if x in self._own)
                array = self._arrays[name]
                if outlives and self._sizes[array.memory] > _VIEWED * array.nbytes:
                    copy = self._new(self._program.types.get(name))
                    self._hold(copy)
                    most = max(most, self._alive)
                    self._drop(array)
                    self._arrays[name] = copy
        for name, array in zip(step.outputs, results, strict=True):
            if not name:
                self._drop(array)
        for name in dict.fromkeys((*step.reads, *step.outputs)):
            if name in self._own and self._end.get(name) == index:
                self._drop(self._arrays[name])
        return most

    def _results(self, index: int, step: CostStep, inputs: Sequence[Array | None]) -> tuple[list[Array], int]:
        """The arrays that a step makes, and the bytes that it takes at its peak beside the bytes that are alive before it."""
        if step.bodies:
            return _of_bodies(self, step)
        if not step.domain and step.op_type in _VIEWS:
            viewed = _VIEWS[step.op_type](self, step, inputs)
            return viewed, sum(self._sizes[array.memory] for array in viewed if array.memory not in self._holders)
        made = [self._new(tensor) for tensor in step.made]
        if not made:
            return [], 0
        if step.op_type in _ELEMENTWISE:
            made[0] = Array(made[0].memory, _order_of(step, inputs), made[0].itemsize)
        taken = None
        if not step.domain and step.op_type in REUSING:
            taken = self._taken(step, index, inputs)
        if taken is not None:
            made[0] = taken
        fresh = sum(self._sizes[array.memory] for array in made if array is not taken)
        return made, fresh + scratch(step, inputs, taken is not None)

    def _taken(self, step: CostStep, index: int, inputs: Sequence[Array | None]) -> Array | None:
        """The input into which the result is written."""
        if step.op_type in ("Max", "Min", "Sum") and len(inputs) != 2:
            return None
        result = step.made[0]
        if result is not None and result.size <= SMALL:
            return None
        first = 1 if step.op_type == "Where" else 0
        only = len(inputs) if step.op_type in _SYMMETRIC else first + 1
        if step.op_type == "Gelu" and step.attributes.get("approximate") == "tanh":
            return None
        if step.op_type == "BatchNormalization" and step.attributes.get("training_mode"):
            return None
        for place in range(first, only):
            array, name = inputs[place], step.inputs[place]
            if array is None or result is None or array.itemsize != result.itemsize or not array.layout.shape:
                continue
            tensor = self._program.types.get(name)
            same = tensor is not None and tensor.kind == result.kind and tensor.shape == result.shape
            if step.op_type in ("Erf", "Gelu") and not _is_in_one_piece(array.layout):
                continue
            if step.op_type in ("ScatterElements", "ScatterND") and not array.layout.is_contiguous:
                continue
            if same and self._is_free(step, name, index) and array.memory != _FOREIGN:
                return array
        return None

    def view(self, array: Array, layout: MemoryLayout | None, tensor: CostTensor | None) -> Array:
        """A view of an array; a copy where there is no layout."""
        if layout is None or tensor is None:
            return self._new(tensor)
        return Array(array.memory, layout, array.itemsize)


def _views(step: CostStep) -> bool:
    if step.domain:
        return step.domain not in ("com.microsoft",)
    return step.op_type in VIEWING


def _folded(program: Program) -> set[int]:
    """The steps that are computed once, before all runs: they depend on constants alone, and make little."""
    fixed, found = set(program.constants), set()
    for k, step in enumerate(program.steps):
        if step.op_type == "Constant" and not step.domain:
            fixed.update(step.outputs)
            found.add(k)
            continue
        if not step.inputs or step.bodies or step.is_random or not fixed.issuperset(step.reads):
            continue
        room = max(_FOLDED, sum(tensor.nbytes for tensor in step.given if tensor is not None))
        if all(tensor is not None for tensor, name in zip(step.made, step.outputs, strict=True) if name) and (
            sum(tensor.nbytes for tensor in step.made if tensor is not None) <= room
        ):
            fixed.update(name for name in step.outputs if name)
            found.add(k)
    return found


# Views


def _same(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    assert inputs[0] is not None
    return [inputs[0]]


def _cast(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    before, after = step.given[0], step.made[0]
    if before is not None and after is not None and before.kind == after.kind:
        return _same(run, step, inputs)
    assert inputs[0] is not None
    return [run._new(after, merged(after.shape, [inputs[0].layout]) if after else None)]


def _reshape(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    array, made = inputs[0], step.made[0]
    assert array is not None
    return [run.view(array, array.layout.reshaped(made.shape) if made else None, made)]


def _squeeze(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    return _reshape(run, step, inputs)


def _transpose(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    array = inputs[0]
    assert array is not None
    perm = step.attributes.get("perm") or range(len(array.layout.shape))[::-1]
    return [run.view(array, array.layout.transposed(perm), step.made[0])]


def _expand(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    array, made = inputs[0], step.made[0]
    assert array is not None
    if made is None or (made.shape != array.layout.shape and made.size <= _COPIED):
        return [run._new(made)]
    return [run.view(array, array.layout.broadcast(made.shape), made)]


def _slice(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    array, made = inputs[0], step.made[0]
    assert array is not None
    if made is None:
        return [run._new(made)]
    strides = list(array.layout.strides)
    steps, axes = step.constants.get(4), step.constants.get(3)
    if steps is not None:
        over = range(steps.size) if axes is None else axes.tolist()
        for axis, by in zip(over, steps.tolist(), strict=False):
            strides[axis] *= by
    return [run.view(array, MemoryLayout(made.shape, tuple(strides)), made)]


def _split(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    array = inputs[0]
    assert array is not None
    return [
        run.view(array, MemoryLayout(made.shape, array.layout.strides) if made else None, made) for made in step.made
    ]


def _dropout(run: _Run, step: CostStep, inputs: Sequence[Array | None]) -> list[Array]:
    trains = step.constants.get(2)
    trained = len(step.inputs) > 2 and step.inputs[2] and (trains is None or bool(trains.item()))
    first = run._new(step.made[0]) if trained else _same(run, step, inputs)[0]
    return [first, *(run._new(tensor) for tensor in step.made[1:])]


_VIEWS: Mapping[str, Callable[[_Run, CostStep, Sequence[Array | None]], list[Array]]] = {
    "Identity": _same,
    "Cast": _cast,
    "CastLike": _cast,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _squeeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Slice": _slice,
    "Split": _split,
    "Dropout": _dropout,
}


# Bodies


def _of_bodies(run: _Run, step: CostStep) -> tuple[list[Array], int]:
    """The arrays that a node with bodies makes, and its peak: the peak of a body beside what the rounds before have left."""
    within = [usage(body) for body in step.bodies]
    made = [run._new(tensor) for tensor in step.made]
    total = sum(run._sizes[array.memory] for array in made)
    deepest = max(found.peak for found in within)
    if step.op_type == "If":
        return made, max(deepest, total)
    body = step.bodies[0]
    left = within[0].held  # states and rows of the round before are still there
    if step.op_type == "Scan":
        states = len(step.inputs) - int(step.attributes["num_scan_inputs"])
        rows = sum(tensor.nbytes for tensor in step.made[states:] if tensor is not None)
        return made, rows + deepest + (left if (step.trips or 0) > 1 else 0)
    states = len(step.inputs) - 2
    rows = sum(tensor.nbytes for tensor in step.made[states:] if tensor is not None)
    ends = [body.types[name].nbytes for name in body.outputs[1 : 1 + states] if name in body.types]
    return made, max(rows + sum(ends) + deepest, 2 * rows + sum(ends))


# Kernels

_SYMMETRIC = frozenset(
    (
        *("Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Max", "Min", "Mul", "Or", "Sub"),
        *("Sum", "Xor"),
    )
)
_ELEMENTWISE = REUSING | frozenset(
    (
        *("Pow", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "Sigmoid", "Softplus"),
        *("Softsign", "HardSigmoid", "HardSwish", "LeakyRelu", "Elu", "Selu", "Celu", "Swish", "Mish", "IsNaN"),
        *("IsInf", "Mean"),
    )
) - {"ScatterElements", "ScatterND", "Where"}


def _order_of(step: CostStep, inputs: Sequence[Array | None]) -> MemoryLayout:
    """NumPy lays a result out as its operands lie."""
    result = step.made[0]
    shape = result.shape if result else ()
    if step.op_type in ("Erf", "Gelu") and not (inputs[0] is not None and _is_in_one_piece(inputs[0].layout)):
        return contiguous(shape)
    if step.op_type in ("LayerNormalization", "BatchNormalization", "Clip"):
        inputs = inputs[:1]
    return merged(shape, [array.layout for array in inputs if array is not None])


def scratch(step: CostStep, inputs: Sequence[Array | None], is_taken: bool) -> int:
    """The bytes that a kernel takes at its peak beside its inputs and its results."""
    if step.domain:
        return 0
    size = step.made[0].nbytes if step.made and step.made[0] is not None else 0
    if step.op_type in _WORK:
        return _WORK[step.op_type](step, inputs, size)
    return 0


def _copies(arrays: Iterable[Array | None]) -> int:
    """Operands that BLAS cannot read as they lie."""
    return sum(array.nbytes for array in arrays if array is not None and not _is_for_blas(array.layout))


def _is_in_one_piece(layout: MemoryLayout) -> bool:
    """True if an array is contiguous in the order of its axes, or in the reverse."""
    return layout.is_contiguous or layout.transposed(range(len(layout.shape))[::-1]).is_contiguous


def _is_for_blas(layout: MemoryLayout) -> bool:
    if len(layout.shape) < 2 or layout.is_contiguous:
        return True
    (rows, columns), (down, right) = layout.shape[-2:], layout.strides[-2:]
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _product(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    a, b = inputs[0], inputs[1]
    if a is None or b is None:
        return 0
    if len(b.layout.shape) == 2 and len(a.layout.shape) > 2:
        rows = a.layout.reshaped((math.prod(a.layout.shape[:-1]), a.layout.shape[-1]))
        return (0 if rows is not None else a.nbytes) + _copies((b,))
    return _copies((a, b))


def _softmax(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    tensor = step.given[0]
    axis = int(step.attributes.get("axis", -1))
    is_there = tensor is not None and -len(tensor.shape) <= axis < len(tensor.shape)  # onnx does not check an older one
    return size // tensor.shape[axis] if tensor is not None and is_there and tensor.shape[axis] else 0


def _blocks(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """Three rows of doubles and one of places for a block of elements, see `backends/numpy/kernels/erf.py`."""
    tensor = step.made[0]
    copied = size if inputs[0] is not None and not _is_in_one_piece(inputs[0].layout) else 0
    return copied + (8 * 4 * min(tensor.size, _BLOCK) if tensor is not None else 0)


def _gelu(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """The approximation by tanh takes an array beside the result."""
    return size if step.attributes.get("approximate") == "tanh" else _blocks(step, inputs, size)


def _convolution(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """A block of columns, see `backends/numpy/kernels/windows.py`."""
    x, w, y = step.given[0], step.given[1], step.made[0]
    if x is None or w is None or y is None or not y.size or not x.size:
        return 0
    transposed = step.op_type == "ConvTranspose"
    over, seen = (y, x) if transposed else (x, y)  # windows lie over the first, one per element of the second
    group = int(step.attributes.get("group", 1))
    kernel, windows = math.prod(w.shape[2:]), math.prod(seen.shape[2:])
    images, channels = over.shape[0], over.shape[1] // group
    rows = seen.shape[1] // group
    tensors = images * group * (channels * math.prod(over.shape[2:]) + rows * windows)
    whole = _WORKSPACE // x.itemsize
    room = min(whole, max(whole * 5 // 8, tensors))
    length = max(room // (kernel * channels), min(_COLUMNS, room // kernel), 1)
    together = min(images, max(length // windows, 1))
    count = 1
    for size_of_axis in reversed(seen.shape[2:]):
        count *= min(size_of_axis, max(length // count, 1))
    columns = together * count * kernel
    some = min(channels, max(room // columns, 1))
    groups = min(group, max(room // (columns * channels), 1))
    steps = step.attributes.get("strides") or [1] * (len(w.shape) - 2)
    holes = step.attributes.get("dilations") or [1] * (len(w.shape) - 2)
    is_short = seen.shape[-1] * (channels + rows) < 10 * channels * kernel
    along = _pace(w.shape[-1], holes[-1]) > _pace(seen.shape[-1] * together, steps[-1])
    merged = together > 1 and (is_short or along)
    if kernel == 1 and not merged and all(by == 1 for by in steps):
        return 0  # what the windows see is a view
    block = columns * some * groups
    apart = together * count * rows * groups if merged else 0
    axes = zip(seen.shape[2:], steps, w.shape[2:], holes, strict=True)
    reach = math.prod((o - 1) * by + (k - 1) * d + 1 for o, by, k, d in axes) * count // max(windows, 1)
    padded = together * groups * some * reach if kernel > 1 else 0
    return int((block + max(apart, padded)) * x.itemsize)


def _pace(elements: int, step: int) -> int:
    return elements if step == 1 else min(elements, 8)


def _power(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """A whole exponent other than 2 takes the absolute value first."""
    exponent = step.constants.get(1)
    if exponent is None or exponent.size != 1 or exponent.item() == 2:
        return 0
    return size if exponent.item() in (0.5, int(exponent.item())) else 0


def _scattered(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """The flat positions of the indices, twice while they are added up; and of all elements where rows are combined."""
    indices, updates = step.given[1], step.given[2] if len(step.given) > 2 else None
    if indices is None or not indices.shape:
        return 0
    tuples = indices.size // max(indices.shape[-1], 1) if step.op_type.endswith("ND") else indices.size
    combined = step.attributes.get("reduction", "none") != "none" and updates is not None and updates.size > tuples
    return 8 * (tuples + updates.size if combined and updates is not None else 2 * tuples)


def _recurrent(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """The bytes of the gates of all steps, and of the cells of an LSTM."""
    x, w, r = step.given[0], step.given[1], step.given[2]
    if x is None or w is None or r is None:
        return 0
    width = w.shape[1] + (r.shape[2] if step.op_type == "LSTM" else 0)
    return w.shape[0] * x.shape[0] * x.shape[1] * width * x.itemsize


def _squares(step: CostStep, inputs: Sequence[Array | None], size: int) -> int:
    """BLAS sums the squares of float and double without writing them down; there are four numbers for each sum."""
    x = step.given[0]
    if x is None or x.itemsize < 4:
        return size
    axis = step.attributes.get("axis", -1)
    return 4 * math.prod(x.shape[: axis if axis >= 0 else len(x.shape) + axis]) * x.itemsize


_WORK: Mapping[str, Callable[[CostStep, Sequence[Array | None], int], int]] = {
    "MatMul": _product,
    "Gemm": lambda step, inputs, size: _copies(inputs[:2]),
    "Softmax": _softmax,
    "LogSoftmax": lambda step, inputs, size: size + _softmax(step, inputs, size),
    "LayerNormalization": _squares,
    "RMSNormalization": _squares,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Pow": _power,
    "GatherElements": _scattered,
    "ScatterElements": _scattered,
    "ScatterND": _scattered,
    "RNN": _recurrent,
    "GRU": _recurrent,
    "LSTM": _recurrent,
    "Erf": _blocks,
    "Gelu": _gelu,
    "Softplus": lambda step, inputs, size: size,
    "ReduceSumSquare": lambda step, inputs, size: step.given[0].nbytes if step.given[0] else 0,
    "ReduceL2": lambda step, inputs, size: step.given[0].nbytes if step.given[0] else 0,
    "ReduceL1": lambda step, inputs, size: step.given[0].nbytes if step.given[0] else 0,
}
