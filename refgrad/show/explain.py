"""The explanation of the derivative of an operator that `refgrad explain` prints."""

from __future__ import annotations

from dataclasses import dataclass

from refgrad.errors import UnknownNameError, did_you_mean
from refgrad.tables.kinks import KINKS
from refgrad.tables.operators import classify, operators
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES
from refgrad.tables.runtime_operators import runtime_operators
from refgrad.tables.schemas import find_schema


@dataclass(frozen=True)
class Explanation:
    """An operator's derivative: `verdict` is "rule", "zero", "none", "function" (through its body) or "missing"."""

    operator: str
    verdict: str
    text: str
    wrt: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kinks: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = (
            f"{self.operator}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}" if self.outputs else self.operator
        )
        lines = [named, f"    {self.text}"]
        if self.wrt:
            lines.append(f"    with respect to {', '.join(self.wrt)}")
        lines += (f"    at {kink}" for kink in self.kinks)
        return "\n".join(lines)


def explain(operator: str) -> Explanation:
    """Return the derivative of `operator`, such as "Gelu" or, with its domain, "com.microsoft.FastGelu".

    :raises UnknownNameError: refgrad knows no operator of that name.
    """
    domain, _, op_type = operator.rpartition(".")
    if domain == "ai.onnx":
        domain = ""
    key = domain, op_type
    known = {operator_row.operator for operator_row in operators()}
    title = f"{domain}.{op_type}" if domain else op_type
    if title not in known:
        elsewhere = (name for name in sorted(known) if name.rpartition(".")[2] == op_type)
        near = next(elsewhere, None)
        if operator.endswith(".onnx"):
            raise UnknownNameError(
                f"{operator!r} is a model, and no operator. refgrad.recipes.saliency explains a model; in the shell: refgrad "
                "recipe saliency MODEL."
            )
        hint = (
            f" Did you mean {near!r}?" if near else did_you_mean(operator, known) or " `refgrad ops` lists all of them."
        )
        raise UnknownNameError(f"There is no operator {operator!r}.{hint}")
    inputs, outputs = _names(key)
    if key in RULES:
        kinks = tuple(f"{kink.where}: {kink.reason}" for kink in KINKS if kink.operator == title)
        return Explanation(title, "rule", RULES[key].formula, RULES[key].wrt, inputs, outputs, kinks)
    if key in CONTROL_FLOW_RULES:
        return Explanation(title, "rule", CONTROL_FLOW_RULES[key].formula(), (), inputs, outputs)
    classified = classify(domain, op_type)
    texts = {
        "zero": "the derivative is zero: ",
        "none": "there is no derivative: ",
        "function": "through its function body: ",
        "missing": "there is no rule yet: ",
    }
    return Explanation(
        title, classified.derivative, texts.get(classified.derivative, "") + classified.text, (), inputs, outputs
    )


def _names(key: tuple[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the inputs and the outputs of an operator; none where only a reason is known of it."""
    schema, registered = find_schema(key[1], key[0]), runtime_operators().get(key)
    if schema is not None:
        return tuple(p.name for p in schema.inputs), tuple(p.name for p in schema.outputs)
    if registered is not None:
        return tuple(name for name, *_ in registered.inputs), tuple(name for name, *_ in registered.outputs)
    return (), ()
