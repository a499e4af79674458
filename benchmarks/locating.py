"""Faults planted into the gradients of exported models: how many `refgrad compare` and `refgrad nan` locate, and how exactly.

    python benchmarks/locating.py FOLDER [-o reports/results/locating.json] [NAME ...]

FOLDER holds exports of examples/architectures.py, <name>.onnx. A fault is located where the nodes that are named are those
that it was planted into. Precision is the part of the named nodes that have a fault, recall the part of the faults that are
named. Faults of kernels are planted into the interpreter, those of rules into refgrad's gradient of a node.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import Backend, Prepared
from refgrad.backends.base import ModelLike, graph_inputs, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.nonfinite import nonfinite
from refgrad.conformance.judge.nan.watching import Watching, label_of
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.locating.verdicts import Comparison
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.verdicts import WRONG

Change = Callable[[NodeProto, tuple[Any, ...], tuple[Any, ...]], Any]


class Planted(Backend):
    """The interpreter, some of whose nodes compute something else."""

    name = "planted"

    def __init__(self, change: Change) -> None:
        self.change = change

    def description(self) -> str:
        """What it is."""
        return "the interpreter with a planted fault"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Plan the model with the fault in it."""

        def watch(node: NodeProto, inputs: tuple[Any, ...], outer: Any, compute: Any) -> tuple[Any, ...]:
            results = compute()
            wrong = self.change(node, inputs, results)
            if wrong is None:
                return results
            first = np.asarray(wrong, np.asarray(results[0]).dtype)
            return (first, *results[1:])

        return NumpyBackend().prepare(load_model(model), precision=Watching(watch))


class Fusing(Backend):
    """The interpreter after a pass that fuses MatMul and Add, and rounds the product to float16."""

    name = "fusing"

    def description(self) -> str:
        """What it is."""
        return "the interpreter with a bad fusion"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Fuse where nobody else reads the product."""
        made = ModelProto()
        made.CopyFrom(load_model(model))
        graph = made.graph
        outputs = {value.name for value in graph.output}
        products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul"}
        nodes: list[NodeProto] = []
        for node in graph.node:
            product = next((name for name in node.input if name in products and name not in outputs), None)
            if node.op_type == "Add" and product is not None and node.name == FUSED:
                half, back = f"{product}_half", f"{product}_back"
                nodes.append(helper.make_node("Cast", [product], [half], to=TensorProto.FLOAT16))
                nodes.append(helper.make_node("Cast", [half], [back], to=TensorProto.FLOAT))
                moved = NodeProto()
                moved.CopyFrom(node)
                moved.input[:] = [back if name == product else name for name in node.input]
                nodes.append(moved)
            else:
                nodes.append(node)
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        return NumpyBackend().prepare(made)


FUSED = "node_linear_2"


@dataclass(frozen=True)
class Fault:
    """A planted fault: into which nodes of which model, what shows it, and what has to be named."""

    name: str
    model: str
    nodes: tuple[str, ...]
    kind: str  # kernel, rule, fusion, nan, kink
    change: Any = None


def _in_node(*changes: tuple[str, Callable[..., Any]]) -> Change:
    of = dict(changes)

    def change(node: NodeProto, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
        found = of.get(label_of(node))
        return None if found is None else found(*inputs, y=results[0])

    return change


def kernel(name: str, model: str, *planted: tuple[str, Callable[..., Any]]) -> Fault:
    """A fault of one or more kernels."""
    return Fault(name, model, tuple(node for node, _ in planted), "kernel", _in_node(*planted))


def rule(name: str, model: str, node: str, edit: Callable[[ModelProto, str], None], *others: str) -> Fault:
    """A fault of the rule of a node."""
    return Fault(name, model, (node, *others), "rule", edit)


def builder(edit: Callable[[ModelProto, str], None], node: str) -> Callable[[Problem], Built]:
    """refgrad with a wrong rule."""

    def build(problem: Problem) -> Built:
        made = refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents))
        edit(made, node)
        return Built.of(made)

    return build


def half(*inputs: Any, y: Any) -> Any:
    """A product of float16 numbers."""
    left, right = (x.astype(np.float16).astype(np.float32) for x in inputs[:2])
    return (left @ right).astype(np.float16)


def scaled(by: float) -> Callable[..., Any]:
    """A result times a number."""
    return lambda *inputs, y: by * y


def one_element(*inputs: Any, y: Any) -> Any:
    """A result with one wrong element, the largest."""
    made = np.array(y)
    made.flat[np.argmax(np.abs(made))] *= 1.5
    return made


def wrong_axis(x: Any, *others: Any, y: Any) -> Any:
    """A Softmax over the axis before the last."""
    e = np.exp(x - x.max())
    return e / e.sum(-2, keepdims=True)


def epsilon(x: Any, *others: Any, y: Any) -> Any:
    """A normalization with an epsilon of 1e-2."""
    spread = x.var(-1, keepdims=True)
    scale, *bias = others
    made = (x - x.mean(-1, keepdims=True)) / np.sqrt(spread + 1e-2) * scale
    return made + bias[0] if bias and bias[0] is not None else made


def shifted(*inputs: Any, y: Any) -> Any:
    """A result one place too far along the last axis."""
    return np.roll(y, 1, -1)


def flipped(*inputs: Any, y: Any) -> Any:
    """A result turned round along its first axis."""
    return np.flip(y, 0)


def _emitted(made: ModelProto, node: str, op_types: tuple[str, ...] = ()) -> NodeProto | None:
    """The last node that the rule of `node` emitted."""
    found = [one for one in made.graph.node if one.name.startswith(f"{node}_Grad/")]
    if op_types:
        found = [one for one in found if one.op_type in op_types]
    return found[-1] if found else None


def times(factor: float) -> Callable[[ModelProto, str], None]:
    """All that a rule returns times a number."""

    def edit(made: ModelProto, node: str) -> None:
        graph = made.graph
        own = [one for one in graph.node if one.name.startswith(f"{node}_Grad/")]
        names = {one.name for one in own}
        read = {name for one in graph.node if one.name not in names for name in one.input}
        read |= {value.name for value in graph.output}
        for k, one in enumerate(own):
            for place, output in enumerate(one.output):
                if output not in read or one.op_type in ("Shape", "Size"):
                    continue
                one.output[place] = f"{output}_right"
                number = f"{node}_planted_{k}_{place}"
                graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), number))
                at = next(k for k, other in enumerate(graph.node) if other.name == one.name)
                graph.node.insert(at + 1, helper.make_node("Mul", [one.output[place], number], [output], number))

    return edit


def swapped(made: ModelProto, node: str) -> None:
    """A Sub or Div of a rule with its operands in the other order; a sign where there is none."""
    found = _emitted(made, node, ("Sub", "Div"))
    if found is None:
        times(-1.0)(made, node)
    else:
        found.input[:] = [found.input[1], found.input[0]]


def transposed(made: ModelProto, node: str) -> None:
    """A Transpose of a rule, of a square matrix, left out."""
    found = _emitted(made, node, ("Transpose",))
    if found is not None:
        found.op_type = "Identity"
        del found.attribute[:]


def unsummed(made: ModelProto, node: str) -> None:
    """A sum over broadcast axes that takes the largest element in place of the sum."""
    found = _emitted(made, node, ("ReduceSum",))
    if found is not None:
        found.op_type = "ReduceMax"


def dropped(value: str, reader: str) -> Callable[[ModelProto, str], None]:
    """The sum of the cotangents of a value loses the term of one of its readers."""

    def edit(made: ModelProto, node: str) -> None:
        lost = {name for one in made.graph.node if one.name.startswith(f"{reader}_Grad/") for name in one.output}
        for one in made.graph.node:
            if one.name in (f"{value}_Grad/Sum_0", f"{value}_Grad/Add_0"):
                [kept] = set(one.input) - lost
                one.op_type = "Identity"
                one.input[:] = [kept]

    return edit


def at_kink(slope: float) -> Callable[[ModelProto, str], None]:
    """The rule of Abs with this slope at 0, where any from -1 to 1 is a derivative."""

    def edit(made: ModelProto, node: str) -> None:
        sign = _emitted(made, node, ("Sign",))
        if sign is None:
            return
        graph, name = made.graph, sign.output[0]
        sign.output[0] = f"{name}_rule"
        graph.initializer.append(numpy_helper.from_array(np.float32(slope), f"{name}_slope"))
        graph.initializer.append(numpy_helper.from_array(np.float32(1), f"{name}_one"))
        at = next(k for k, other in enumerate(graph.node) if other.name == sign.name) + 1
        for k, (op_type, reads, makes) in enumerate(
            (
                ("Abs", (f"{name}_rule",), f"{name}_apart"),
                ("Sub", (f"{name}_one", f"{name}_apart"), f"{name}_at"),
                ("Mul", (f"{name}_at", f"{name}_slope"), f"{name}_there"),
                ("Add", (f"{name}_rule", f"{name}_there"), name),
            )
        ):
            graph.node.insert(at + k, helper.make_node(op_type, reads, [makes], f"{name}_kink_{k}"))

    return edit


KERNELS = (
    kernel("a wrong axis", "bert", ("node_softmax_1", wrong_axis)),
    kernel("a wrong epsilon", "bert", ("node_layer_norm_4", epsilon)),
    kernel("float16 in a product", "bert", ("node_MatMul_106", half)),
    kernel("a factor of 1.001", "bert", ("node_gelu_2", scaled(1.001))),
    kernel("float16 in a backward product", "bert", ("node_MatMul_143_Grad/Gemm_2", half)),
    kernel("one wrong element", "bert", ("node_matmul_4", one_element)),
    kernel("a wrong Erf in the backward pass", "bert", ("node_gelu_1_Grad/Erf_1", scaled(1.001))),
    kernel("two Softmax", "bert", ("node_softmax_1", scaled(1.002)), ("node_softmax_3", scaled(1.0005))),
    kernel("a product and a norm", "bert", ("node_layer_norm_1", epsilon), ("node_MatMul_178", scaled(1.01))),
    kernel("a wrong LSTM", "lstm", ("node_LSTM_64", scaled(1.001))),
    kernel("a shifted Scan", "lstm", ("node_LSTM_125_Grad/Scan_67", shifted)),
    kernel("a strided convolution, backward", "convnext", ("node_conv2d_7_Grad/ConvTranspose_4", shifted)),
    kernel("a depthwise convolution, backward", "convnext", ("node_conv2d_8_Grad/Conv_2", scaled(0.999))),
    kernel("a wrong bias gradient", "convnext", ("node_conv2d_5_Grad/ReduceSum_0", flipped)),
    kernel("a wrong convolution", "unet", ("node_Conv_266", one_element)),
    kernel("a wrong pool", "unet", ("node_avg_pool2d_1", scaled(4 / 3))),
    kernel("a Resize half a pixel off", "unet", ("node_upsample_bilinear2d", shifted)),
    kernel("a lost bias", "unet", ("node_group_norm_3", lambda a, b, y: a)),
    kernel("a transposed convolution turned round", "unet", ("node_convolution", flipped)),
    kernel("a wrong maximum", "resnet18", ("node_max_pool2d", shifted)),
    kernel("a mean over too few", "resnet18", ("node_mean", scaled(64 / 63))),
    kernel("a wrong Exp", "mamba", ("node_exp_1", scaled(1.0005))),
    kernel("a wrong Gather", "mamba", ("node_select_5", flipped)),
)
RULES = (
    rule("a sign", "bert", "node_softmax_2", times(-1.0)),
    rule("a factor of 1.001", "bert", "node_gelu_1", times(1.001)),
    rule("swapped operands", "bert", "node_layer_norm_3", swapped),
    rule("a maximum in place of a sum", "unet", "node_group_norm_2", unsummed),
    rule("a bias that is not summed", "convnext", "node_conv2d_5", unsummed),
    rule("a transposed operand", "vit", "node_matmul_1", transposed),
    rule("a zero", "gpt2", "node_tanh_1", times(0.0)),
    rule("a factor of 2", "mamba", "node_Sqrt_52", times(2.0)),
    rule("a wrong pool", "unet", "node_avg_pool2d_1", times(0.25)),
    rule("a wrong Resize", "unet", "node_upsample_bilinear2d", times(1.01)),
    rule("a wrong LSTM", "lstm", "node_LSTM_64", times(1.01)),
    rule("a lost term of a sum", "vit", "node_add_5", dropped("add_5", "node_layer_norm_2"), "node_layer_norm_2"),
    rule("a lost term of a sum", "unet", "node_conv2d_9", dropped("conv2d_9", "node_Sigmoid_146"), "node_Sigmoid_146"),
)
KINKS = (("mlp", 1.0), ("mlp", 5.0), ("unet", -1.0), ("unet", 2.0))
FUSIONS = (Fault("a product that is rounded when it is fused", "segformer", (), "fusion"),)


# NaN, planted into the model itself: what is read by the node at a third of the way


def _with(model: ModelProto, nodes: list[NodeProto], constants: dict[str, Any], value: str, put: str) -> ModelProto:
    """The model with these nodes behind `value`; others read `put` in its place."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    own = {name for node in nodes for name in node.output}
    for node in graph.node:
        node.input[:] = [put if name == value else name for name in node.input]
    at = next(k for k, node in enumerate(graph.node) if value in node.output) + 1
    for node in reversed(nodes):
        graph.node.insert(at, node)
    graph.initializer.extend(numpy_helper.from_array(np.float32(v), name) for name, v in constants.items())
    assert put in own
    return made


N = helper.make_node
POISONS: dict[str, tuple[list[NodeProto], dict[str, float], str, str]] = {
    "log 0": ([N("Relu", ["V"], ["p1"], "p_relu"), N("Log", ["p1"], ["p2"], "p_log")], {}, "p_log", "log 0"),
    "0/0": ([N("Mul", ["V", "c0"], ["p1"], "p_mul"), N("Div", ["p1", "p1"], ["p2"], "p_div")], {"c0": 0}, "p_div", "0/0"),
    "inf - inf": (
        [
            N("Abs", ["V"], ["p0"], "p_abs"), N("Add", ["p0", "c9"], ["p3"], "p_add"), N("Exp", ["p3"], ["p1"], "p_exp"),
            N("Sub", ["p1", "p1"], ["p2"], "p_sub"),
        ],
        {"c9": 200}, "p_exp,p_sub", "overflow",
    ),
    "0 times infinity": (
        [N("Mul", ["V", "c0"], ["p1"], "p_zero"), N("Mul", ["p1", "ci"], ["p2"], "p_mul")],
        {"c0": 0, "ci": np.inf}, "p_mul", "0 · ∞",
    ),
    "a root of 0, backward": (
        [N("Mul", ["V", "c0"], ["p1"], "p_mul"), N("Sqrt", ["p1"], ["p2"], "p_sqrt")], {"c0": 0}, "p_sqrt", "division by 0",
    ),
    "a dead branch": (
        [
            N("Mul", ["V", "c0"], ["p1"], "p_mul"), N("Log", ["p1"], ["p3"], "p_log"),
            N("Greater", ["V", "ch"], ["p4"], "p_gt"), N("Where", ["p4", "p3", "V"], ["p2"], "p_where"),
        ],
        {"c0": 0, "ch": 1e30}, "p_log", "dead branch",
    ),
    "overflow": (
        [N("Mul", ["V", "cb"], ["p1"], "p_mul"), N("Mul", ["p1", "p1"], ["p2"], "p_square")],
        {"cb": 1e25}, "p_square", "overflow",
    ),
    "underflow": (
        [
            N("Mul", ["V", "cs"], ["p1"], "p_mul"), N("Mul", ["p1", "p1"], ["p3"], "p_square"),
            N("Reciprocal", ["p3"], ["p2"], "p_rec"),
        ],
        {"cs": 1e-25}, "p_rec", "underflow",
    ),
}  # fmt: skip
HOSTS = ("mlp", "bert", "convnext", "unet", "resnet18", "gpt2", "mamba", "lstm")


def run_nan(folder: Path, host: str, poison: str) -> dict[str, Any]:
    """A poison in a model: is its node named, with its cause?"""
    model = onnx.load(folder / f"{host}.onnx")
    nodes, constants, expected, word = POISONS[poison]
    floats = {
        v.name for v in onnx.shape_inference.infer_shapes(model).graph.value_info if v.type.tensor_type.elem_type == 1
    }
    inside = [name for node in model.graph.node for name in node.output if name in floats]
    value = inside[len(inside) // 3]
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [value if name == "V" else name for name in node.input]
        copies.append(copy)
    poisoned = _with(model, copies, constants, value, "p2")
    for node in poisoned.graph.node:  # what the poison itself reads stays
        if node.name.startswith("p_"):
            original = next(one for one in copies if one.name == node.name)
            node.input[:] = original.input
    start = time.perf_counter()
    found = nonfinite(poisoned)
    named = [origin.forward or origin.node for origin in found.roots]
    kinds = " ".join(f"{origin.kind} {origin.cause}" for origin in found.origins)
    right = [name for name in dict.fromkeys(named) if name in expected.split(",")]
    return {
        "fault": f"NaN: {poison}", "model": host, "planted": expected, "named": sorted(set(named)), "cause": word in kinds,
        "right": len(set(named)) <= 2 and bool(right) and set(named) <= set(expected.split(",")) and word in kinds,
        "seconds": round(time.perf_counter() - start, 1), "built": None,
    }  # fmt: skip


def run_kink(folder: Path, host: str, slope: float) -> dict[str, Any]:
    """|x - c| added to an input, half of whose elements are c: a slope from -1 to 1 there is no fault, any other is one."""
    model = onnx.load(folder / f"{host}.onnx")
    inputs = graph_inputs(model.graph)
    feeds = random_feeds(inputs, seed=0)
    name = next(value.name for value in inputs if np.asarray(feeds[value.name]).dtype == np.float32)
    centre = np.array(feeds[name])
    centre.reshape(-1)[1::2] += 1
    for node in model.graph.node:
        node.input[:] = ["p_sum" if one == name else one for one in node.input]
    model.graph.initializer.append(numpy_helper.from_array(centre, "p_centre"))
    for node in (
        helper.make_node("Add", [name, "p_size"], ["p_sum"], "p_add"),
        helper.make_node("Abs", ["p_off"], ["p_size"], "p_abs"),
        helper.make_node("Sub", [name, "p_centre"], ["p_off"], "p_sub"),
    ):
        model.graph.node.insert(0, node)
    start = time.perf_counter()
    found = compare(model, "refgrad@numpy", Live(builder(at_kink(slope), "p_abs"), "numpy"), feeds, wrt=[name])
    is_fault, named = abs(slope) > 1, names_of(found)
    [tensor] = [one for one in found.tensors if one.name == name]
    return {
        "fault": f"kink: a slope of {slope:g} at 0, " + ("which is none" if is_fault else "a convention"), "model": host,
        "planted": "p_abs" if is_fault else "", "named": named, "cause": tensor.b.verdict,
        "right": (named == ["p_abs"] and tensor.b.verdict == WRONG) if is_fault else (found.ok and not named),
        "seconds": round(time.perf_counter() - start, 1), "built": found.b.rules.built if found.b.rules else None,
    }  # fmt: skip


def run_fault(folder: Path, fault: Fault) -> dict[str, Any]:
    """A planted fault: are its nodes named, and nothing else?"""
    model = onnx.load(folder / f"{fault.model}.onnx")
    start = time.perf_counter()
    expected = set(fault.nodes)
    if fault.kind == "kernel":
        other: Any = Live("refgrad", Planted(fault.change))
    elif fault.kind == "fusion":
        other = Live("refgrad", Fusing())
        add = next(node for node in model.graph.node if node.op_type == "Add" and node.name == FUSED)
        expected = {add.name, *(n.name for n in model.graph.node if n.op_type == "MatMul" and n.output[0] in add.input)}
    else:
        right = refgrad.gradient(model)
        changed = refgrad.gradient(model)
        fault.change(changed, fault.nodes[0])
        if changed == right:
            raise LookupError(f"the rule of {fault.nodes[0]} has nothing that this fault changes")
        other = Live(builder(fault.change, fault.nodes[0]), "numpy")
    found = compare(model, "refgrad@numpy", other)
    named = set(names_of(found))
    rules = found.b.rules
    return {
        "fault": f"{fault.kind}: {fault.name}", "model": fault.model, "planted": ", ".join(sorted(expected)),
        "named": sorted(named), "cause": bool(rules.faults if fault.kind == "rule" and rules else found.b.kernels),
        "right": expected <= named and len(named) <= max(2, len(expected)) and not found.a.rules and not found.ok,
        "seconds": round(time.perf_counter() - start, 1), "built": None if rules is None else rules.built,
        "left": None if found.b.kernels is None else found.b.kernels.left,
    }  # fmt: skip


def names_of(found: Comparison) -> list[str]:
    """The nodes that a comparison blames on the second side."""
    rules = [name for fault in found.b.rules.faults for name in fault.nodes] if found.b.rules else []
    kernels = [one.found.name for one in found.b.kernels.culprits] if found.b.kernels else []
    together = [name for group in found.b.kernels.groups for name in group.nodes] if found.b.kernels else []
    return rules + kernels + together


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the documentation."""
    return {
        "fault": row["fault"],
        "model": row.get("model", ""),
        "in": row["planted"].replace(",", ", ").replace(",  ", ", "),
        "named": ", ".join(row["named"]) or "nothing",
        "located": "yes" if row["right"] else "no",
        "gradients built": row.get("built") or "",
        "s": row.get("seconds", ""),
    }


def main() -> None:
    """Run the faults, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_intermixed_args()
    rows = []
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"{f.kind}: {f.name} {f.model}", lambda f=f: run_fault(given.folder, f))  # type: ignore[misc]
        for f in (*KERNELS, *RULES, *FUSIONS)
    ]
    jobs += [
        (f"nan: {poison} {host}", lambda h=host, p=poison: run_nan(given.folder, h, p))  # type: ignore[misc]
        for host, poison in zip(HOSTS, POISONS, strict=True)
    ]
    jobs += [
        (f"kink: {slope} {host}", lambda h=host, k=slope: run_kink(given.folder, h, k))  # type: ignore[misc]
        for host, slope in KINKS
    ]
    for name, job in jobs:
        if given.names and not any(one in name for one in given.names):
            continue
        try:
            row = job()
        except Exception as error:
            row = {
                "fault": name,
                "right": False,
                "named": [],
                "planted": "",
                "error": f"{type(error).__name__}: {error}",
            }
        rows.append(row)
        print("ok " if row["right"] else "BAD", json.dumps(row, ensure_ascii=False), flush=True)
    planted = sum(len([one for one in row["planted"].split(",") if one]) for row in rows)
    named = sum(len(row["named"]) for row in rows)
    hits = sum(len(set(row["named"]) & {one.strip() for one in row["planted"].split(",")}) for row in rows)
    print(
        f"{sum(row['right'] for row in rows)} of {len(rows)} faults; precision {hits}/{named}, recall {hits}/{planted}"
    )
    if given.output:
        shown = [_shown(row) for row in rows]
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in shown)
        given.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
