"""A step that is repeated along the first axis of its inputs, for the bodies of ONNX Runtime's recurrent operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import ValueInfoProto, helper

from refgrad.forward.function_emitter import FunctionEmitter

Step = Callable[[FunctionEmitter, Sequence[str], Sequence[str]], tuple[Sequence[str], Sequence[str]]]


def scan(
    op: FunctionEmitter,
    states: Sequence[tuple[str, int]],
    rows: Sequence[tuple[str, int]],
    step: Step,
    *,
    backward: bool = False,
) -> tuple[list[str], list[str]]:
    """The states after the last step, and what the steps return stacked along a new first axis.

    :param states: those before the first step, with their ranks: ONNX Runtime asks for them.
    :param rows: each step reads one element along the first axis of each; at least one, with their ranks.
    :param step: a function of an emitter, the states and the elements; it returns the next states and what is stacked. It
        may read what `op` has emitted.
    :param backward: begin with the last elements. What is stacked has the order of `rows` either way.
    """
    inner = FunctionEmitter(op.opset, op.rule, op.node, f"{op._prefix}_{len(op.nodes)}_step")
    inner.types.update(op.types)
    formal: list[str] = []
    for value, rank in (*states, *((value, rank - 1) for value, rank in rows)):
        formal.append(f"{inner.prefix}_in_{len(formal)}")
        inner.types[formal[-1]] = op.type(value), rank
    after, stacked = step(inner, formal[: len(states)], formal[len(states) :])
    results = [inner.Identity(value) for value in (*after, *stacked)]
    attributes = {
        "body": helper.make_graph(inner.nodes, "step", _declared(inner, formal), _declared(inner, results)),
        "num_scan_inputs": len(rows),
        "scan_input_directions": [int(backward)] * len(rows),
        "scan_output_directions": [int(backward)] * len(stacked) or None,
    }
    made = op.emit("Scan", "", [value for value, _ in (*states, *rows)], len(results), attributes)
    made = [made] if len(results) == 1 else list(made)
    for name, value in zip(made, results, strict=True):
        op.types[name] = inner.type(value), None
    return made[: len(states)], made[len(states) :]


def ranked(op: FunctionEmitter, value: str, rank: int) -> str:
    """`value`, whose rank anyone can tell: ONNX Runtime asks for it where a step reads the value."""
    return value if op.rank(value) == rank else str(op.Reshape(value, [0] * rank))


def _declared(op: FunctionEmitter, names: Sequence[str]) -> list[ValueInfoProto]:
    """The values of a step with what is known of them."""
    known = [(name, op.type(name), op.rank(name)) for name in names]
    return [
        helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank) for name, kind, rank in known
    ]
