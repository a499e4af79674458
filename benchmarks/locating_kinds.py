"""Thirty kinds of faults in each of three models, half of them with a second fault: how exactly `refgrad compare` locates them.

    python benchmarks/locating_kinds.py FOLDER [-o reports/results/locating_kinds.json] [--seed 0] [NAME ...]

FOLDER holds exports of examples/architectures.py, <name>.onnx. The places are drawn: a fault goes into a node of which it
changes a result that is compared by more than 0.05 %, alone and beside the other fault. It is located if all of its nodes are
named; a node is healthy if no fault touches it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from locating import Planted, builder, flipped, half, names_of, one_element, scaled, shifted
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import Watching, label_of
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.locating.verdicts import Comparison
from refgrad.conformance.problems.point import Point
from refgrad.errors import BackendError

MODELS = ("vit", "unet", "mamba")
SHOWS = 5e-4  # the part of a tensor's largest element that a fault changes at least
Kernel = Callable[..., Any]  # of the inputs of a node and its result `y`: the wrong result


def zero(*inputs: Any, y: Any) -> Any:
    """Zeros."""
    return np.zeros_like(y)


def last_row(*inputs: Any, y: Any) -> Any:
    """A result whose last row nobody computed."""
    made = np.array(y)
    made.reshape(-1, made.shape[-1])[-1] = 0
    return made


def first_operand(*inputs: Any, y: Any) -> Any:
    """A sum without its second operand."""
    return np.broadcast_to(inputs[0], np.shape(y))


def exchanged(a: Any, b: Any, y: Any) -> Any:
    """A difference or a quotient in the other order."""
    return -y if np.any(y == 0) or np.allclose(y, a - b) else 1 / y


def epsilon(x: Any, *others: Any, y: Any) -> Any:
    """A normalization or a root with an epsilon that is 0.01 too large."""
    if not others:
        return np.sqrt(x + np.float32(0.01))
    return others[-1].reshape(-1)[0] + (y - others[-1].reshape(-1)[0]) * np.float32(0.995)


def too_few(x: Any, *others: Any, y: Any) -> Any:
    """A sum or a mean that counts one element too few."""
    return y * np.float32(1 - np.size(y) / np.size(x))


def in_steps(*inputs: Any, y: Any) -> Any:
    """A result in 8 bits."""
    step = np.abs(y).max() / 127
    return np.rint(y / step) * step


def in_bfloat16(*inputs: Any, y: Any) -> Any:
    """A result that is rounded to bfloat16."""
    return np.asarray(y).astype(ml_dtypes.bfloat16).astype(np.float32)


def inaccurate(*inputs: Any, y: Any) -> Any:
    """A function that is computed to three digits."""
    return y * (1 + 2e-3 * np.sin(50 * y))


def not_a_number(*inputs: Any, y: Any) -> Any:
    """A result with a NaN in the middle."""
    made = np.array(y)
    made.flat[made.size // 2] = np.nan
    return made


def race() -> Kernel:
    """A result that is a little off in every run, in another way."""
    random = np.random.default_rng()
    return lambda *inputs, y: y * (1 + 0.01 * random.standard_normal(np.shape(y))).astype(np.float32)


def memory() -> Kernel:
    """A result plus the result of the last run, if the shapes fit."""
    held: dict[str, Any] = {}

    def changed(*inputs: Any, y: Any) -> Any:
        before, held["y"] = held.get("y"), np.array(y)
        return y + before if before is not None and before.shape == np.shape(y) else np.array(y)

    return changed


PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
FUNCTIONS = ("Exp", "Log", "Tanh", "Erf", "Sigmoid", "Sqrt", "Softmax", "Softplus", "Gelu", "Softmax", "Reciprocal")
SUMS = ("ReduceSum", "ReduceMean", "GlobalAveragePool", "AveragePool")
NORMS = ("LayerNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization", "Sqrt")
KERNELS: dict[str, tuple[tuple[str, ...], Callable[[], Kernel]]] = {  # kind: the operators, () for any, and the change
    "a factor of 1.001": (PRODUCTS, lambda: scaled(1.001)),
    "products in float16": (("MatMul",), lambda: half),
    "one element": ((), lambda: one_element),
    "a shift along the last axis": ((), lambda: shifted),
    "reversed along the first axis": (PRODUCTS, lambda: flipped),
    "nothing but zeros": (("MatMul", "Gemm", "Mul", "Transpose", "Reshape"), lambda: zero),
    "the last row is not computed": (PRODUCTS, lambda: last_row),
    "an operand is lost": (("Add", "Sum"), lambda: first_operand),
    "operands in the other order": (("Sub", "Div"), lambda: exchanged),
    "a wrong epsilon": (NORMS, lambda: epsilon),
    "a sum of one element too few": (SUMS, lambda: too_few),
    "a result in 8 bits": (PRODUCTS, lambda: in_steps),
    "a result in bfloat16": ((), lambda: in_bfloat16),
    "a function to three digits": (FUNCTIONS, lambda: inaccurate),
    "a NaN": ((), lambda: not_a_number),
    "a race": ((), race),
    "a result that adds up over runs": (PRODUCTS, memory),
}
IDLE = ("Constant", "ConstantOfShape", "Identity")  # operators that compute nothing
UNSTEADY = ("a race", "a result that adds up over runs")


class Edited:
    """A gradient model that an edit changes, with the values of a run, for their types and shapes."""

    def __init__(self, model: ModelProto, values: Mapping[str, Any]) -> None:
        self.model, self.values = model, values

    def of(self, node: str, *op_types: str) -> list[NodeProto]:
        """The nodes of these operators that the rule of `node` emitted."""
        own = [one for one in self.model.graph.node if one.name.startswith(f"{node}_Grad/")]
        return [one for one in own if one.op_type in op_types] if op_types else own

    def behind(self, output: str, make: Callable[[str, str], list[NodeProto]]) -> None:
        """Others read what `make` computes from a value, instead of the value."""
        nodes = self.model.graph.node
        at, one = next((k, one) for k, one in enumerate(nodes) if output in one.output)
        place = list(one.output).index(output)
        one.output[place] = f"{output}_planted"
        for node in reversed(make(one.output[place], output)):
            nodes.insert(at + 1, node)

    def constant(self, value: Any) -> str:
        """The name of a new initializer."""
        name = f"planted_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def results(self, node: str) -> list[str]:
        """The float values of a rule that others read."""
        own = self.of(node)
        names = {one.name for one in own}
        read = {name for one in self.model.graph.node if one.name not in names for name in one.input}
        read |= {value.name for value in self.model.graph.output}
        made = [name for one in own for name in one.output if name in read]
        return [name for name in made if np.asarray(self.values.get(name, 0)).dtype == np.float32]


def factor(by: float) -> Callable[[Edited, str], bool]:
    """All that a rule returns times a number."""

    def edit(made: Edited, node: str) -> bool:
        for name in (found := made.results(node)):
            made.behind(name, lambda own, put: [helper.make_node("Mul", [own, made.constant(np.float32(by))], [put])])
        return bool(found)

    return edit


def in_half(made: Edited, node: str) -> bool:
    """All that a rule returns, rounded to float16."""
    for name in (found := made.results(node)):
        made.behind(
            name,
            lambda own, put: [
                helper.make_node("Cast", [own], [f"{put}_half"], to=TensorProto.FLOAT16),
                helper.make_node("Cast", [f"{put}_half"], [put], to=TensorProto.FLOAT),
            ],
        )
    return bool(found)


def wrong_element(made: Edited, node: str) -> bool:
    """The largest element of each result of a rule is doubled."""
    for name in (found := made.results(node)):
        value = np.asarray(made.values[name])
        by = np.ones(value.shape, np.float32)
        by.flat[int(np.argmax(np.abs(value)))] = 2
        made.behind(name, lambda own, put, by=by: [helper.make_node("Mul", [own, made.constant(by)], [put])])  # type: ignore[misc]
    return bool(found)


def other_order(made: Edited, node: str) -> bool:
    """A Sub or a Div of a rule has its operands in the other order."""
    if found := made.of(node, "Sub", "Div"):
        found[-1].input[:] = list(found[-1].input)[::-1]
    return bool(found)


def other_sum(op_type: str) -> Callable[[Edited, str], bool]:
    """A sum of a rule is another reduction."""

    def edit(made: Edited, node: str) -> bool:
        if found := made.of(node, "ReduceSum"):
            found[-1].op_type = op_type
        return bool(found)

    return edit


def not_transposed(made: Edited, node: str) -> bool:
    """A Transpose of a rule is left out, where the shape stays the same."""
    kept = [one for one in made.of(node, "Transpose") if _shape(made, one.input[0]) == _shape(made, one.output[0])]
    if kept:
        kept[-1].op_type = "Identity"
        del kept[-1].attribute[:]
    return bool(kept)


def without_factor(made: Edited, node: str) -> bool:
    """A product of a rule lacks its second factor."""
    kept = [one for one in made.of(node, "Mul") if _shape(made, one.input[0]) == _shape(made, one.output[0])]
    if kept:
        kept[-1].op_type = "Identity"
        del kept[-1].input[1:]
    return bool(kept)


def _shape(made: Edited, name: str) -> tuple[int, ...] | None:
    value = made.values.get(name)
    return None if value is None else np.shape(value)


def lost_term(made: Edited, value: str) -> bool:
    """The sum of the cotangents of a value has its first term alone."""
    if found := made.of(value, "Add", "Sum"):
        found[0].op_type = "Identity"
        del found[0].input[1:]
    return bool(found)


def double_term(made: Edited, value: str) -> bool:
    """The sum of the cotangents of a value has its first term in place of the second."""
    if found := made.of(value, "Add", "Sum"):
        found[0].input[1] = found[0].input[0]
    return bool(found)


RULES: dict[str, Callable[[Edited, str], bool]] = {  # kind: an edit of the nodes of a rule, False where it does not fit
    "the other sign": factor(-1),
    "a rule's factor of 1.001": factor(1.001),
    "a rule's factor of 2": factor(2),
    "a rule returns zeros": factor(0),
    "a rule's operands in the other order": other_order,
    "a maximum in place of a sum": other_sum("ReduceMax"),
    "a mean in place of a sum": other_sum("ReduceMean"),
    "a transposition is left out": not_transposed,
    "a factor is left out": without_factor,
    "a rule doubles one element": wrong_element,
    "a rule rounds to float16": in_half,
}
VALUES: dict[str, Callable[[Edited, str], bool]] = {  # the same for the sum of a value's cotangents
    "a contribution is lost": lost_term,
    "a contribution comes twice": double_term,
}
KINDS = (*KERNELS, *RULES, *VALUES)


@dataclass(frozen=True)
class Placed:
    """A fault in its place: a node of the gradient for a kernel, of the model for a rule, or a value.

    `beside` may be named too: the values that a node reads, or the nodes that make and read a value.
    """

    kind: str
    place: str
    beside: tuple[str, ...] = ()

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that may be named for it."""
        return frozenset({self.place, *self.beside})


@dataclass
class Host:
    """A model with its gradient, and the results of a run without faults."""

    model: ModelProto
    gradient: ModelProto
    point: Point
    feeds: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    right: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelProto) -> Host:
        """Run the gradient by everything, and keep all values."""
        gradient = refgrad.gradient(model)
        point = Point.choose(model, gradient, None, 0, 4, None)
        made = cls(model, gradient, point, {**point.feeds, **point.cotangents})

        def watch(node: NodeProto, inputs: tuple[Any, ...], outer: Any, compute: Any) -> tuple[Any, ...]:
            results: tuple[Any, ...] = compute()
            made.nodes.append(node)
            made.values |= dict(zip(node.output, map(np.array, results), strict=False))
            return results

        made.right = NumpyBackend().prepare(gradient, precision=Watching(watch)).run(made.feeds)
        made.values |= made.right
        return made

    def candidates(self, kind: str) -> Iterator[Placed]:
        """All places of a kind."""
        if kind in KERNELS:
            op_types, _ = KERNELS[kind]
            for node in self.nodes:
                first = np.asarray(self.values.get(node.output[0], 0))
                is_tensor = first.dtype == np.float32 and first.ndim and first.size > 3
                is_one = node.op_type in op_types if op_types else node.op_type not in IDLE
                if is_tensor and is_one:
                    yield Placed(kind, label_of(node))
        elif kind in RULES:
            for node in self.model.graph.node:
                if node.name:  # a wrong rule makes the cotangents of the node's inputs wrong
                    yield Placed(kind, node.name, tuple(node.input))
        else:
            for node in self.model.graph.node:
                for name in node.output:
                    readers = tuple(one.name for one in self.model.graph.node if name in one.input)
                    if len(readers) > 1:
                        yield Placed(kind, name, (node.name, *readers))

    def edited(self, faults: list[Placed]) -> ModelProto | None:
        """The gradient with the faults of rules in it; None if one does not fit."""
        made = ModelProto()
        made.CopyFrom(self.gradient)
        changed = Edited(made, self.values)
        return (
            made
            if all(RULES.get(one.kind, VALUES.get(one.kind, _fits))(changed, one.place) for one in faults)
            else None
        )

    def run(self, faults: list[Placed]) -> dict[str, Any] | None:
        """The results of a run with the faults; of the second run, for an executor with a memory."""
        made = self.edited(faults)
        if made is None:
            return None
        prepared = executor(faults).prepare(made)
        try:
            if any(one.kind in UNSTEADY for one in faults):
                prepared.run(self.feeds)
            return prepared.run(self.feeds)
        except BackendError:  # the change does not fit the node
            return None

    def shows(self, found: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
        """True if two runs differ visibly in a tensor that is compared."""
        if found is None or other is None:
            return False
        for name, right in self.right.items():
            size = max(float(np.abs(right[np.isfinite(right)]).max(initial=0)), 1e-3)
            one, two = found[name].astype(np.float64), other[name].astype(np.float64)
            apart = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0, np.abs(one - two)).max(initial=0)
            if np.isnan(apart) or apart > SHOWS * size:
                return True
        return False

    def draw(self, kind: str, random: np.random.Generator, beside: Placed | None = None) -> Placed:
        """A place of this kind where it shows, alone and beside another fault."""
        places = list(self.candidates(kind))
        for k in random.permutation(len(places)):
            place = places[k]
            if beside and (place.nodes & beside.nodes or place.place in beside.place or beside.place in place.place):
                continue
            alone = self.run([place])
            if not self.shows(alone, self.right):
                continue
            if beside:
                both, other = self.run([beside, place]), self.run([beside])
                if not (self.shows(both, alone) and self.shows(both, other)):
                    continue
            return place
        raise LookupError(f"There is no place for {kind!r}.")


def _fits(made: Edited, node: str) -> bool:
    return True  # the fault of a kernel changes no model


def executor(faults: list[Placed]) -> Planted:
    """The interpreter with the faults of kernels in it."""
    changes = {one.place: KERNELS[one.kind][1]() for one in faults if one.kind in KERNELS}

    def change(node: NodeProto, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
        found = changes.get(label_of(node))
        return None if found is None else found(*inputs, y=results[0])

    return Planted(change)


def side_of(host: Host, faults: list[Placed]) -> Live:
    """The side of a comparison that has the faults."""

    def edit(made: ModelProto, node: str) -> None:
        changed = Edited(made, host.values)
        for one in faults:
            RULES.get(one.kind, VALUES.get(one.kind, _fits))(changed, one.place)

    return Live(builder(edit, "") if any(one.kind not in KERNELS for one in faults) else "refgrad", executor(faults))


def named_by(found: Comparison) -> set[str]:
    """The nodes, and the values, that a comparison blames on the second side."""
    faults = found.b.rules.faults if found.b.rules else ()
    values = {fault.value for fault in faults if fault.value}
    makers = {
        fault.nodes[0] for fault in faults if fault.value and len(fault.nodes) > 1
    }  # they say where the value is from
    unsteady = {found.b.unsteady.node} if found.b.unsteady and found.b.unsteady.node else set()
    return {*(set(names_of(found)) - makers), *values, *unsteady, *(one.node for one in found.b.origins)}


def measure(name: str, host: Host, kind: str, pair: bool, random: np.random.Generator) -> dict[str, Any]:
    """Plant a fault, or two, and compare."""
    faults = [host.draw(kind, random)]
    if pair:
        steady = [one for one in KINDS if one not in (kind, *UNSTEADY, "a NaN")]
        for other in random.permutation(steady):
            try:
                faults.append(host.draw(str(other), random, faults[0]))
            except LookupError:
                continue
            break
    start = time.perf_counter()
    found = compare(host.model, "refgrad@numpy", side_of(host, faults))
    named = named_by(found)
    touched = {node for one in faults for node in one.nodes}
    return {
        "faults": " and ".join(one.kind for one in faults),
        "model": name,
        "in": ", ".join(one.place for one in faults),
        "named": ", ".join(sorted(named)) or "nothing",
        "located": sum(one.place in named for one in faults),
        "planted": len(faults),
        "healthy": len(named - touched),
        "accused": len(named),
        "s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Plant all, print each row, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only kinds or models with such a word in them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_intermixed_args()
    rows = []
    for m, name in enumerate(MODELS):
        host = None
        for k, kind in enumerate(KINDS):
            if given.names and not any(word in f"{kind} {name}" for word in given.names):
                continue
            host = host or Host.of(onnx.load(given.folder / f"{name}.onnx"))
            pair = (k + m) % 2 == 1 and kind not in UNSTEADY
            try:
                row = measure(name, host, kind, pair, np.random.default_rng([given.seed, m, k]))
            except LookupError as error:
                print("---", name, error, flush=True)
                continue
            rows.append(row)
            print(
                "ok " if row["located"] == row["planted"] and not row["healthy"] else "BAD", json.dumps(row), flush=True
            )
    planted, located = sum(row["planted"] for row in rows), sum(row["located"] for row in rows)
    print(
        f"{len(rows)} runs, {sum(row['planted'] > 1 for row in rows)} with two faults; located {located} of {planted}; "
        f"healthy nodes accused: {sum(row['healthy'] for row in rows)} of {sum(row['accused'] for row in rows)}"
    )
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
