"""The memory of a run on ONNX Runtime's CPU provider: its order of nodes, its reuse of memory, and its arena.

It follows what ONNX Runtime does before and in its first run:

- constants are folded, and what only depends on static shapes;
- a Gelu that is written out with Tanh is one node (`FastGeluFusion`), a MatMul and the Add of a row behind it are a Gemm
  (`MatMulAddFusion`), and what a Transpose exchanges is a part of the product that reads it (`GemmTransposeFusion`);
- the nodes are taken in the order of a depth-first search backwards from the ends of the graph (`Graph::ReverseDFSFrom`);
- some results are aliases of an input, others may take the memory of an input that is read last
  (`KernelDefBuilder::Alias`, `MayInplace`), and others the memory of a dead value of the same type and shape (`AllocPlanner`);
- an arena hands out memory (`BFCArena`): the smallest free chunk that fits, split where half of it would be left over. It keeps
  freed chunks, so the resident memory is all that was ever written to.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np

from refgrad import traits
from refgrad.planning.program import CostStep, CostTensor, Program, fitting
from refgrad.protos.domains import MICROSOFT

_ALIASES = traits.RESHAPES | {"Dropout"}
# The result may be written into the first input. ONNX Runtime computes HardSwish, Mish and Swish in several nodes.
_FIRST = (traits.ACTIVATIONS - {"Gelu", "HardSwish", "Mish", "PRelu", "Swish"}) | (
    {"Cast", "Clip", "LogSoftmax", "ScatterElements", "ScatterND", "Softmax", "Trilu"}
)
_PRODUCTS = frozenset(("MatMul", "FusedMatMul"))
_GELU, _GEMM, _X, _NUMBER = "FastGelu", "fused Gemm", "x", "number"
# 0.5·x·(1 + tanh(c·(x + d·x³))), the operands of a product and of a sum in any order
_CUBED = ("Mul", ("Pow", _X, _NUMBER), _NUMBER)
_FAST_GELU = ("Mul", ("Mul", _X, _NUMBER), ("Add", ("Tanh", ("Mul", ("Add", _X, _CUBED), _NUMBER)), _NUMBER))
_FOREIGN = ""  # the memory of feeds, weights and constants
_LEAST = 256  # bytes of a chunk
_FIRST_REGION = 2**20  # bytes
_LARGEST_REST = 2**27  # bytes that may be left over in a chunk
_PAGE = 4096
_NOTHING = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes that are alive while each node computes, and those that the process gains until the results are there."""

    alive: tuple[int, ...]
    peak: int


def usage(program: Program) -> Usage:
    """The bytes that a first run holds beside weights and feeds."""
    arena = _Arena()
    alive, _ = _run(program, arena)
    return Usage(alive, arena.resident)


def _run(program: Program, arena: _Arena) -> tuple[tuple[int, ...], list[int]]:
    """Run a graph. Return the bytes that are alive at each step, and the chunks of its results, which are still held."""
    program, within = _with_gelu(program)
    program, more = _with_gemm(program)
    within |= more
    order = _order(program, _folded(program) | within)
    plan = _plan(program, order)
    alive = [0] * len(program.steps)
    chunks: dict[str, int] = {}
    for index, k in enumerate(order):
        step = program.steps[k]
        most = 0
        for name in plan.allocated.get(index, ()):
            chunks[name] = arena.allocate(program.types[name].nbytes if name in program.types else 0)
        if step.bodies:
            most = _bodies(step, arena)
        with fitting(step):
            scratch = _scratch(step)
        own = arena.allocate(scratch)
        alive[k] = max(arena.held, most)
        arena.free(own)
        for name in plan.freed.get(index, ()):
            if name in chunks:
                arena.free(chunks.pop(name))
    return tuple(alive), list(chunks.values())


def _scratch(step: CostStep) -> int:
    """The bytes that a recurrence takes for itself: the products of all steps with the weights of its gates."""
    if step.domain or step.op_type not in traits.RECURRENT:
        return 0
    x, weights = step.given[:2]
    if x is None or weights is None:
        return 0
    return math.prod(x.shape[:2]) * math.prod(weights.shape[:2]) * x.itemsize


def _bodies(step: CostStep, arena: _Arena) -> int:
    """Two rounds of a body are as good as all: the arena hands out the same memory again."""
    most = 0
    if step.op_type == "If":
        for body in step.bodies:
            alive, left = _run(body, arena)
            most = max([most, *alive])
            for chunk in left:
                arena.free(chunk)
        return most
    (body, *_) = step.bodies
    kept: list[int] = []
    for _ in range(min(step.trips or 1, 3)):
        alive, left = _run(body, arena)
        most = max([most, *alive])
        for chunk in kept:
            arena.free(chunk)
        kept = left
    for chunk in kept:
        arena.free(chunk)
    return most


def _folded(program: Program) -> set[int]:
    """The steps that are computed when the model is loaded."""
    fixed, found = {*program.constants, *program.values}, set()
    for k, step in enumerate(program.steps):
        known = all(name in program.values for name in step.outputs if name)
        pure = not step.is_random and not step.bodies
        if (
            (pure and known)
            or (step.op_type == "Constant" and not step.domain)
            or (pure and step.inputs and fixed.issuperset(step.reads))
        ):
            fixed.update(name for name in step.outputs if name)
            found.add(k)
    return found


def _with_gelu(program: Program) -> tuple[Program, set[int]]:
    """The program with one step for a Gelu that is written out with Tanh, and the steps that are within it."""
    steps, within = list(program.steps), set[int]()
    maker = {name: k for k, step in enumerate(steps) for name in step.outputs if name}
    reads = Counter((*(name for step in steps for name in step.inputs), *program.outputs))

    def matched(name: str, pattern: Any, x: str) -> tuple[str, set[int]] | None:
        """The name that x stands for, and the steps that make `name` of it by `pattern`; None where they do not match."""
        if pattern == _NUMBER:
            return (x, set()) if name in program.values else None
        if pattern == _X:
            return (name, set()) if x in ("", name) and name not in program.values else None
        k = maker.get(name, -1)
        if k < 0 or steps[k].key != ("", pattern[0]):
            return None
        orders = permutations(pattern[1:], len(steps[k].inputs))
        return next(filter(None, (matched_all(steps[k].inputs, order, x, {k}) for order in orders)), None)

    def matched_all(names: Sequence[str], patterns: Any, x: str, made_by: set[int]) -> tuple[str, set[int]] | None:
        for name, pattern in zip(names, patterns, strict=True):
            found = matched(name, pattern, x)
            if found is None:
                return None
            x, made_by = found[0], made_by | found[1]
        return x, made_by

    for last, step in enumerate(program.steps):
        found = matched(step.outputs[0], _FAST_GELU, "") if step.key == ("", "Mul") else None
        inside = found[1] - {last} if found else set()
        if found and all(reads[steps[k].outputs[0]] == 1 for k in inside):
            within |= inside
            x, given = (found[0],), (program.types.get(found[0]),)
            fused = replace(step, domain=MICROSOFT, op_type=_GELU, inputs=x, reads=x, given=given, constants={})
            steps[last] = fused
    return replace(program, steps=tuple(steps)), within


def _with_gemm(program: Program) -> tuple[Program, set[int]]:
    """The program with one step for each product that ONNX Runtime makes a Gemm of, and the steps that are within them.

    These are a MatMul with a matrix and the Add of a row behind it, and a Gemm of two and the Transpose behind it.
    """
    steps, within = list(program.steps), set[int]()
    maker = {name: k for k, step in enumerate(steps) for name in step.outputs if name}
    reads = Counter((*(name for step in steps for name in step.reads), *program.outputs))
    for last, step in enumerate(program.steps):
        for place, name in enumerate(step.inputs if step.key in (("", "Add"), ("", "Transpose")) else ()):
            k = maker.get(name, -1)
            if k < 0 or reads[name] > 1:
                continue
            product, others = steps[k], [n for other, n in enumerate(step.inputs) if other != place]
            rows = [shape for other, shape in enumerate(step.given) if other != place]
            if not (_adds_row(product, rows) if others else product.key == ("", "Gemm") and len(product.inputs) == 2):
                continue
            inputs = (*product.inputs, *others)
            steps[last] = replace(
                step, op_type=_GEMM, inputs=inputs, reads=inputs, given=(*product.given, *rows), constants={}
            )
            within.add(k)
            break
    return replace(program, steps=tuple(steps)), within


def _adds_row(product: CostStep, rows: Sequence[CostTensor | None]) -> bool:
    """True if one row is added to every row of a product with a matrix."""
    left, right = product.given if product.key == ("", "MatMul") else (None, None)
    if left is None or right is None or rows[0] is None or len(left.shape) < 2 or len(right.shape) != 2:
        return False
    return rows[0].shape in (right.shape[1:], (1, *right.shape[1:]))


def _order(program: Program, folded: set[int]) -> list[int]:
    """The order in which nodes are taken: depth first from the last leaf, the latest input first."""
    steps = program.steps
    maker = {name: k for k, step in enumerate(steps) if k not in folded for name in step.outputs if name}
    feeds = [sorted({maker[name] for name in step.reads if name in maker}) for step in steps]
    wanted, pending = set(), [maker[name] for name in program.outputs if name in maker]
    while pending:
        k = pending.pop()
        if k not in wanted:
            wanted.add(k)
            pending += feeds[k]
    read = {other for k in wanted for other in feeds[k]}
    readers = _readers(steps[k] for k in wanted)
    fused = {name for k in wanted for name in steps[k].outputs if _is_fused(steps[k], readers)}
    new = {  # they have the largest numbers
        k: steps[k].op_type in (_GELU, _GEMM) or not fused.isdisjoint(steps[k].inputs) for k in wanted
    }
    rank = {k: (new[k], k) for k in wanted}
    stack = [(k, False) for k in sorted(wanted - read, key=rank.__getitem__)]
    visited: set[int] = set()
    order = []
    while stack:
        k, leaves = stack.pop()
        if leaves:
            order.append(k)
        elif k not in visited:
            visited.add(k)
            stack.append((k, True))
            stack += [(other, False) for other in sorted(feeds[k], key=rank.__getitem__) if other not in visited]
    return order


@dataclass(slots=True)
class _Plan:
    """The values that get memory of their own at each step, and those whose memory is given back after it."""

    allocated: dict[int, list[str]] = field(default_factory=dict)
    freed: dict[int, list[str]] = field(default_factory=dict)


def _plan(program: Program, order: Sequence[int]) -> _Plan:
    steps, types = program.steps, program.types
    uses: dict[str, int] = {}
    readers = _readers(steps[k] for k in order)
    makers = {name: steps[k].op_type for k in order for name in steps[k].outputs if name}
    for k in order:
        for name in steps[k].reads:
            uses[name] = uses.get(name, 0) + max(steps[k].inputs.count(name), 1)
    for name in program.outputs:
        uses[name] = uses.get(name, 0) + 1
    results = set(program.outputs)
    buffer: dict[str, str] = {}  # the value whose memory a value has
    counts: dict[str, int] = {_FOREIGN: 0}  # reads of that memory that are still to come
    last: dict[str, int] = {}
    free: list[str] = []
    plan = _Plan()
    for index, k in enumerate(order):
        step = steps[k]
        for place, name in enumerate(step.outputs):
            if not name:
                continue
            found = None if name in results else _reused(step, place, buffer, counts, program, readers, makers)
            if found is None and name not in results and not step.bodies:
                found = next((other for other in free if _alike(types.get(other), types.get(name))), None)
                if found is not None:
                    free.remove(found)
            if found is None:
                buffer[name] = name
                counts[name] = 0
                plan.allocated.setdefault(index, []).append(name)
            else:
                buffer[name] = found
            counts[buffer[name]] += uses.get(name, 0)
            last[buffer[name]] = index
            if not uses.get(name):
                _release(buffer[name], counts, free)
        for name in step.reads:
            if name in buffer:
                counts[buffer[name]] -= max(step.inputs.count(name), 1)
                last[buffer[name]] = index
                _release(buffer[name], counts, free)
    last.pop(_FOREIGN, None)
    for name, index in last.items():
        if counts[name] <= 0:
            plan.freed.setdefault(index, []).append(name)
    return plan


def _release(name: str, counts: Mapping[str, int], free: list[str]) -> None:
    if counts[name] == 0 and name != _FOREIGN and name not in free:
        free.insert(0, name)


def _reused(
    step: CostStep,
    place: int,
    buffer: Mapping[str, str],
    counts: Mapping[str, int],
    program: Program,
    readers: Mapping[str, Sequence[str]],
    makers: Mapping[str, str],
) -> str | None:
    """The memory of an input that a result takes."""
    if place or not step.inputs or step.domain:
        return None
    first = buffer.get(step.inputs[0])
    if step.op_type in _ALIASES:
        return _FOREIGN if first is None else first
    types, result = program.types, program.types.get(step.outputs[0])
    if _is_fused(step, readers):
        return _FOREIGN if first is None else first
    if _scales_product(step, program.values, readers, makers) and first and counts[first] == 1:
        return first
    for name in step.inputs[:2] if step.op_type == "Add" else step.inputs[:1]:
        memory = buffer.get(name)
        is_last = memory and counts[memory] == 1 and _alike(types.get(name), result)
        is_fused = step.op_type == "Add" or _is_folded_normalization(step, program)
        if is_last and is_fused and makers.get(name) == "Conv":
            return memory
    if step.op_type in _FIRST and first and counts[first] == 1 and _alike(types.get(step.inputs[0]), result):
        return first
    return None


def _readers(steps: Iterable[CostStep]) -> dict[str, list[str]]:
    """The operators that read a value."""
    found: dict[str, list[str]] = {}
    for step in steps:
        for name in step.reads:
            found.setdefault(name, []).append(step.op_type)
    return found


def _scales_product(
    step: CostStep, values: Mapping[str, np.ndarray], readers: Mapping[str, Sequence[str]], makers: Mapping[str, str]
) -> bool:
    """True if a Mul or Div by a constant number becomes a part of a product before or behind it."""
    if step.op_type not in ("Mul", "Div") or values.get(step.inputs[1], _NOTHING).size != 1:
        return False
    behind = readers.get(step.outputs[0], ())
    before = len(readers.get(step.inputs[0], ())) == 1 and makers.get(step.inputs[0]) in _PRODUCTS
    return before or (len(behind) == 1 and behind[0] in _PRODUCTS)


def _is_folded_normalization(step: CostStep, program: Program) -> bool:
    """True if a BatchNormalization becomes a part of the weights of the convolution before it."""
    return step.op_type == "BatchNormalization" and program.constants.issuperset(step.inputs[1:])


def _is_fused(step: CostStep, readers: Mapping[str, Sequence[str]]) -> bool:
    """True if a Transpose becomes a part of the products that read it."""
    if step.op_type != "Transpose" or step.domain:
        return False
    tensor = step.given[0]
    rank = len(tensor.shape) if tensor is not None else 0
    perm = list(step.attributes.get("perm") or reversed(range(rank)))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return rank > 1 and perm == swapped and set(readers.get(step.outputs[0], ())) <= _PRODUCTS | {_GEMM}


def _alike(one: CostTensor | None, other: CostTensor | None) -> bool:
    return one is not None and other is not None and one.itemsize == other.itemsize and one.shape == other.shape


class _Arena:
    """ONNX Runtime's arena: regions that double in size, cut into chunks."""

    def __init__(self) -> None:
        self.held = 0
        self._next = _FIRST_REGION
        self._regions: list[int] = []  # where each begins; they do not touch
        self._end = 0
        self._sizes: dict[int, int] = {}  # chunks by address
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._is_free: dict[int, bool] = {}
        self._free: list[tuple[int, int]] = []  # size and address
        self._written: list[tuple[int, int]] = []
        self._asked: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """The address of a chunk for so many bytes."""
        if not size:
            return -1
        rounded = -(-size // _LEAST) * _LEAST
        place = bisect_left(self._free, (rounded, -1))
        if place == len(self._free):
            self._extend(rounded)
            place = bisect_left(self._free, (rounded, -1))
        whole, at = self._free.pop(place)
        if whole >= 2 * rounded or whole - rounded >= _LARGEST_REST:
            self._split(at, rounded)
        self._is_free[at] = False
        self._asked[at] = rounded
        self.held += rounded
        self._write(at, at + size)
        return at

    def free(self, at: int) -> None:
        """Give a chunk back; free neighbours become one."""
        if at < 0:
            return
        self.held -= self._asked.pop(at)
        size = self._sizes[at]
        after = self._after.get(at)
        if after is not None and self._is_free[after]:
            self._take(after)
            size += self._sizes[after]
            self._join(at, after)
        before = self._before.get(at)
        if before is not None and self._is_free[before]:
            self._take(before)
            size += self._sizes[before]
            self._join(before, at)
            at = before
        self._sizes[at] = size
        self._is_free[at] = True
        insort(self._free, (size, at))

    @property
    def resident(self) -> int:
        """The bytes of all pages that were written to."""
        total, reached = 0, -1
        for start, end in sorted((start // _PAGE, -(-end // _PAGE)) for start, end in self._written):
            total += max(end - max(start, reached), 0)
            reached = max(reached, end)
        return total * _PAGE

    def _write(self, start: int, end: int) -> None:
        self._written.append((start, end))
        if len(self._written) > 4096:
            merged: list[tuple[int, int]] = []
            for one, two in sorted(self._written):
                if merged and one <= merged[-1][1]:
                    merged[-1] = merged[-1][0], max(two, merged[-1][1])
                else:
                    merged.append((one, two))
            self._written = merged

    def _extend(self, size: int) -> None:
        grown = False
        while self._next < size:
            self._next *= 2
            grown = True
        at = self._end
        self._end += self._next + _PAGE
        self._sizes[at] = self._next
        self._is_free[at] = True
        insort(self._free, (self._next, at))
        if not grown:
            self._next *= 2

    def _split(self, at: int, size: int) -> None:
        rest = at + size
        self._sizes[rest] = self._sizes[at] - size
        self._sizes[at] = size
        after = self._after.get(at)
        if after is not None:
            self._after[rest], self._before[after] = after, rest
        self._after[at], self._before[rest] = rest, at
        self._is_free[rest] = True
        insort(self._free, (self._sizes[rest], rest))

    def _take(self, at: int) -> None:
        self._free.remove((self._sizes[at], at))

    def _join(self, first: int, second: int) -> None:
        after = self._after.pop(second, None)
        self._before.pop(second, None)
        if after is None:
            self._after.pop(first, None)
        else:
            self._after[first], self._before[after] = after, first
        self._is_free.pop(second)
