"""The cotangents of the weights of a loop: one product over the stacked steps, not a product and a sum in every step.

If step t computes Yₜ = Xₜ·W, the cotangent of W is Σₜ Xₜᵀ·dYₜ. This is one product of two matrices: the rows of all Xₜ, one
step after the other, and the rows of all dYₜ. So the backward node returns the dYₜ as a stack, and the product comes after it.
The cotangent of a bias that is added to Yₜ is the sum of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refgrad.builder.op import Emitter
from refgrad.model.graph import Graph, Node
from refgrad.reverse.bodies import Swept, is_random


@dataclass(frozen=True)
class Operand:
    """A matrix in a product: its name, and whether it is transposed before it is multiplied."""

    name: str
    is_transposed: bool = False


@dataclass(frozen=True)
class Contraction:
    """The contribution of `node` to the cotangent of `target`, which is the same in every step and read by the name `reads`.

    The cotangents of `rows` are stacked. For a product, `factor` is the operand that changes from step to step, and `target`
    stands on its right if `is_right`. For a bias, `factor` is None.
    """

    node: str
    reads: str
    target: Operand
    rows: str
    factor: Operand | None = None
    is_right: bool = True
    scale: float = 1.0

    def contribution(self, op: Emitter, cotangents: str, factors: str) -> str:
        """The contribution from the stacked cotangents of `rows` and the stacked values of `factor`."""
        size = op.static(self.target.name) or ()
        if self.factor is None:
            rows = op.Reshape(cotangents, [-1, size[-1]])
            ones = op.full(op.Concat([1], op.Shape(rows, end=1), axis=0), 1.0, like=rows)
            total = op.Gemm(ones, rows, beta=0.0)  # on the CPU faster than ReduceSum over the first axis
            total = total if len(size) == 2 else op.Reshape(total, list(size))
            return total if self.scale == 1 else op.Mul(total, self.scale)
        # Not MatMul: where a loop runs no steps, ONNX Runtime before 1.20 returns any number of MatMul, and refuses Gemm.
        swapped = self.target.is_transposed == self.is_right
        inner, outer = size[::-1] if swapped else size
        if self.factor.is_transposed == self.is_right:
            factors = _with_rows_last(op, factors)
        if not self.is_right:
            cotangents = _with_rows_last(op, cotangents)
        operands = op.Reshape(factors, [-1, inner]), op.Reshape(cotangents, [-1, outer])
        left, right = reversed(operands) if swapped else operands
        return op.Gemm(left, right, alpha=None if self.scale == 1 else self.scale, beta=0.0, transA=1)


def _with_rows_last(op: Emitter, stack: str) -> str:
    """A stack of matrices, each transposed. A stack of vectors is returned as it is."""
    rank = op.rank(stack) or 0
    return op.Transpose(stack, perm=[*range(rank - 2), rank - 1, rank - 2]) if rank > 2 else stack


class Contractions:
    """The contributions that are computed after a loop: `rows` are values whose cotangents it returns as stacks.

    `factors` are values of its forward steps that are read after it.
    """

    def __init__(self, op: Emitter, swept: Swept, invariants: Mapping[str, str]) -> None:
        """Find them in the body of a loop, and withhold them from the sweep over the body.

        :param op: the emitter of the graph around the loop.
        :param invariants: the values that the body reads and that are the same in every step, with their names outside.
        """
        found = {(c.node, c.reads): c for c in _Search(op, swept, invariants).found()}
        self._found = list(found.values())  # a bias behind a sum of two products is found twice
        self.rows = list(dict.fromkeys(c.rows for c in self._found))
        self.factors = list(dict.fromkeys(c.factor.name for c in self._found if c.factor is not None))
        swept.sweep.withheld = frozenset(found)

    def contributions(
        self, op: Emitter, cotangents: Mapping[str, str], factors: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Pairs of a name in the graph around the loop and a contribution to its cotangent.

        :param cotangents: the stacked cotangents of `rows`, in the order of the steps.
        :param factors: the stacked values of `factors`, in the same order.
        """
        for c in self._found:
            yield c.target.name, c.contribution(op, cotangents[c.rows], factors[c.factor.name] if c.factor else "")


class _Search:
    """The search for products of a weight and for biases behind them."""

    def __init__(self, op: Emitter, swept: Swept, invariants: Mapping[str, str]) -> None:
        self._op, self._swept, self._path = op, swept, swept.sweep.path
        self._graph: Graph = swept.graph
        self._targets: dict[str, Operand] = {}  # by name in the body
        for name, outer in invariants.items():
            size = op.static(outer)
            if name in self._path.needed and size and all(size) and len(size) <= 2:
                self._targets[name] = Operand(outer)

    def found(self) -> Iterator[Contraction]:
        if not self._targets:
            return
        self._follow()
        changing = self._changing()
        for node in self._path.active:
            if node.key == ("", "MatMul"):
                yield from self._of_product(node, changing, (False, False), 1.0)
            elif node.key == ("", "Gemm"):
                flags = bool(node.attributes.get("transA", 0)), bool(node.attributes.get("transB", 0))
                yield from self._of_product(node, changing, flags, float(node.attributes.get("alpha", 1.0)))

    def _follow(self) -> None:
        """Add the copies and the transposes of the targets."""
        for node in self._graph.nodes:
            if node.key not in (("", "Identity"), ("", "Transpose")) or node.inputs[0] not in self._targets:
                continue
            source = self._targets[node.inputs[0]]
            rank = len(self._op.static(source.name) or ())
            perm = list(node.attributes.get("perm") or reversed(range(rank)))
            turned = node.op_type == "Transpose" and perm != [*range(rank)]
            self._targets[node.outputs[0]] = Operand(source.name, source.is_transposed != turned)

    def _changing(self) -> set[str]:
        """The values that may change from step to step."""
        changing = set(self._swept.body.inputs).difference(self._targets)
        for node in self._graph.nodes:
            if not changing.isdisjoint(node.reads) or is_random(node.proto, self._graph.functions):
                changing.update(node.outputs)
        return changing

    def _of_product(
        self, node: Node, changing: set[str], flags: tuple[bool, bool], scale: float
    ) -> Iterator[Contraction]:
        """The contributions to the weight of a product, and to the biases that are added to it."""
        for place, name in enumerate(node.inputs[:2]):
            target, other = self._targets.get(name), node.inputs[1 - place]
            if target is None or len(self._op.static(target.name) or ()) != 2 or node.inputs.count(name) != 1:
                continue
            result = node.outputs[0]
            if other not in changing or not (self._is_stackable(other) and self._is_stackable(result)):
                continue
            rows, biases = self._sums(node, changing)
            turned = Operand(target.name, target.is_transposed != flags[place])
            factor = Operand(other, flags[1 - place])
            yield Contraction(node.name, name, turned, rows, factor, place == 1, scale)
            yield from biases

    def _sums(self, product: Node, changing: set[str]) -> tuple[str, list[Contraction]]:
        """The last sum whose cotangent is also the cotangent of the product, and the biases on the way to it."""
        node, rows = product, product.outputs[0]
        added = [(product, name) for name in product.inputs[2:] if name and product.attributes.get("beta", 1.0)]
        while rows not in self._swept.body.outputs:
            readers = self._graph.readers(rows)
            if len(readers) != 1 or readers[0].key != ("", "Add") or readers[0].inputs.count(rows) != 1:
                break
            node = readers[0]
            total = node.outputs[0]
            if total not in self._path.needed or self._shape(total) != self._shape(rows):
                break
            added += [(node, name) for name in node.inputs if name != rows]
            rows = total
        width = (self._shape(rows) or (None,))[-1]
        biases = []
        for node, name in added:
            target = self._targets.get(name)
            if target is None or target.is_transposed:
                continue
            size = self._op.static(target.name) or ()
            if size[-1] == width and len(size) <= len(self._shape(rows) or ()) and all(d == 1 for d in size[:-1]):
                scale = float(node.attributes.get("beta", 1.0)) if node is product else 1.0
                biases.append(Contraction(node.name, name, target, rows, scale=scale))
        return rows, biases

    def _shape(self, name: str) -> tuple[int | str | None, ...] | None:
        return self._swept.op.shape(name)

    def _is_stackable(self, name: str) -> bool:
        return bool(self._shape(name)) and self._swept.is_stackable(name)
