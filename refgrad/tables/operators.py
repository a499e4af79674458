"""The derivative of every operator of ONNX: a rule, its function body, zero, or none, and why."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from refgrad.tables import plugins
from refgrad.tables.registry import BODY, CONTROL_FLOW_RULES, NO_DERIVATIVE, RULES, ZERO, in_one_line
from refgrad.tables.runtime_operators import runtime_operators
from refgrad.tables.schemas import schemas

# Where a schema's own differentiability tag is not followed: "Operator.parameter" and why.
_PARAMETER = "the result is differentiable in it, and it may be computed or trained"
TAGS = {
    "AffineGrid.theta": "the grid is linear in it",
    "CausalConvWithState.past_state": "the result is linear in it, and it is what an earlier call computed",
    "Clip.min": _PARAMETER,
    "Clip.max": _PARAMETER,
    "DFT.input": "the transform is linear in it",
    "Dropout.ratio": "the output is 1/(1 − ratio) times what the mask keeps",
    "GridSample.grid": "the result is differentiable in it wherever it interpolates",
    "Hardmax.input": "the result is 0 or 1: its derivative is zero wherever it exists",
    **dict.fromkeys(
        (
            *("MatMulInteger.A", "MatMulInteger.B", "QLinearMatMul.a", "QLinearMatMul.a_scale"),
            *("QLinearMatMul.b", "QLinearMatMul.b_scale", "QLinearMatMul.y_scale"),
        ),
        "with quantization='straight-through' or 'clipped' rounding has a derivative",
    ),
    "LinearAttention.past_state": "the result is linear in it, and it is what an earlier call computed",
    **dict.fromkeys(
        ("GRU.initial_h", "LSTM.initial_c", "LSTM.initial_h", "RNN.initial_h"),
        "it is what an earlier call computed, or trained",
    ),
    "Mod.B": "A mod B = A − B·⌊A/B⌋ is differentiable in B wherever it is in A",
    "NegativeLogLikelihoodLoss.weight": _PARAMETER,
    "OneHot.values": _PARAMETER,
    "Pad.constant_value": _PARAMETER,
    **dict.fromkeys(
        ("Resize.roi", "Resize.scales"),
        "the result is differentiable in the points that it moves, wherever it interpolates",
    ),
    "STFT.signal": "the transform is linear in it",
    "STFT.window": "the transform is linear in it",
    "Unique.X": "Y is made of elements of X",
    "SoftmaxCrossEntropyLoss.weights": _PARAMETER,
}


@dataclass(frozen=True)
class Operator:
    """An operator and its derivative: "rule", "function" (through its body), "zero", "none" or "missing"."""

    operator: str
    derivative: str
    text: str  # the formula, or the reason


def classify(domain: str, op_type: str) -> Operator:
    """The derivative of one operator that has a schema, a rule, or a reason why it has none."""
    key = domain, op_type
    title = f"{domain}.{op_type}" if domain else op_type
    if key in RULES or key in CONTROL_FLOW_RULES:
        formula = RULES[key].formula if key in RULES else CONTROL_FLOW_RULES[key].formula()
        return Operator(title, "rule", in_one_line(formula))
    if key in ZERO:
        return Operator(title, "zero", ZERO[key])
    if key in NO_DERIVATIVE:
        return Operator(title, "none", NO_DERIVATIVE[key])
    if key in BODY:
        return Operator(title, "function", BODY[key])
    return Operator(title, "missing", "nobody has written its rule: give one with refgrad.extend.rule")


def operators() -> tuple[Operator, ...]:
    """Every operator with a schema, a rule or a reason why it has none, and those that ONNX Runtime registers, by name."""
    plugins.load()
    named = {(schema.domain, schema.name) for schema in schemas()}
    keys = named.union(RULES, ZERO, NO_DERIVATIVE, BODY, runtime_operators())
    return tuple(sorted((classify(*key) for key in keys), key=lambda o: (o.operator.count("."), o.operator)))


def against_tags() -> dict[str, str]:
    """The contradictions between the classification and the schema's own differentiability tags: "Operator.parameter" and how.

    A tag says of an input or output that it is differentiable, or that it is not; many say nothing.
    """
    category = onnx.defs.OpSchema.DifferentiationCategory
    found = {}
    for schema in onnx.defs.get_all_schemas():
        key = schema.domain, schema.name
        for parameter in schema.inputs:
            tag, name = parameter.differentiation_category, f"{schema.name}.{parameter.name}"
            moved = key in RULES and parameter.name in RULES[key].wrt
            if tag == category.Differentiable and key in RULES and not moved:
                found[name] = "tagged as differentiable, and the rule has no cotangent for it"
            elif tag == category.Differentiable and (key in ZERO or key in NO_DERIVATIVE):
                found[name] = "tagged as differentiable, and the derivative is said to be zero or not to exist"
            elif tag == category.NonDifferentiable and moved:
                found[name] = "tagged as not differentiable, and the rule has a cotangent for it"
    return found
