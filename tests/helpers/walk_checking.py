"""Everything that holds of a walk, seen from the forward graph and from another run."""

from __future__ import annotations

import json

import numpy as np
import onnx

import refgrad
from refgrad.backends import get_backend
from refgrad.tables.registry import RULES
from refgrad.walks.records import Walk

# What NumPy broadcasts: each result has the common shape of the operands.
BROADCASTING = frozenset(["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mean", "Sum", "Where", "PRelu", "Mod"])


def numbers(value):
    return np.asarray(value).astype(np.float64)


def one_element(model, feeds, outputs=None):
    """The first element of the first float output, as `of` names it; None where it has none or is no tensor."""
    floats = [v.name for v in model.graph.output if v.type.tensor_type.elem_type in (1, 10, 11, 16)]
    output = next((name for name in (outputs or floats) if name in floats), None)
    value = None if output is None else get_backend("numpy").prepare(model).run(dict(feeds))[output]
    if not isinstance(value, np.ndarray) or not value.size:
        return None
    return f"{output}[{', '.join('0' for _ in value.shape)}]" if value.ndim else output


def check(found: Walk) -> None:
    """Everything that holds of a walk, seen from the forward graph and from another run."""
    output = found.of.partition("[")[0] if found.of not in {v.name for v in found.model.graph.output} else found.of
    made = refgrad.gradient(found.model, list(found.wrt), [output], keep_outputs=True)
    assert made.SerializeToString(deterministic=True) == found.gradient.SerializeToString(deterministic=True)
    [seed] = json.loads(next(p.value for p in made.metadata_props if p.key == "refgrad.cotangents")).values()
    again = (
        get_backend("numpy")
        .prepare(made)
        .run(
            {v.name: found.values[v.name] for v in made.graph.input if v.name in found.feeds or v.name == seed},
            trace=True,
        )
    )
    drawn = any(node.op_type.startswith(("Random", "Bernoulli", "Dropout")) for node in made.graph.node)
    inlined = bool(made.functions)  # then the run has values within functions, which the walk has not
    for name, value in again.items() if not drawn else ():
        if not inlined or name in found.values:
            same(found.values[name], value)
    gradients = json.loads(next(p.value for p in made.metadata_props if p.key == "refgrad.gradients"))
    assert {name: found.cotangents[name].value for name in found.wrt} == gradients
    check_sums(found)
    check_readers(found)
    check_broadcasts(found)
    check_aliases(found)
    check_nodes(found, made)


def same(left, right):
    if isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, np.ndarray):
        np.testing.assert_array_equal(left, right)


def check_sums(found: Walk) -> None:
    """The contributions that are shown add up to the cotangent that is shown."""
    for cotangent in found.cotangents.values():
        whole = found.values[cotangent.value]
        if isinstance(whole, list):
            continue
        if not cotangent.contributions:
            assert not whole.any()
            continue
        parts = [numbers(found.values[part.value]) for part in cotangent.contributions]
        rough = {"float16": 4e-3, "bfloat16": 4e-2}.get(whole.dtype.name, 2e-6)
        size = sum(np.abs(part) for part in parts)
        with np.errstate(all="ignore"):
            near = np.abs(sum(parts) - numbers(whole)) <= rough * size + 1e-30
            assert np.all(near | ~np.isfinite(size)), cotangent.of


def check_readers(found: Walk) -> None:
    """Each place where a node on the way reads a value that has a cotangent contributes to it once, and nothing else does."""
    expected = []
    for step in found.steps:
        rule = RULES.get((step.domain, step.operator))
        if rule is None:  # a node with graphs, or a call of a function
            continue
        places = {
            k
            for p, more in rule.bind(version(found, step.domain))[1]
            for k in range(p, len(step.inputs) if more else p + 1)
        }
        expected += [
            (name, step.number, k) for k, name in enumerate(step.inputs) if k in places and name in found.cotangents
        ]
    structured = {step.number for step in found.steps if (step.domain, step.operator) not in RULES}
    listed = [
        (part.of, part.step, part.position)
        for cotangent in found.cotangents.values()
        for part in cotangent.contributions
        if part.step is not None
    ]
    told = [(part.of, step.number, part.position) for step in found.steps for part in step.outgoing]
    assert sorted(told) == sorted(listed)
    plain_ones = [one for one in listed if one[1] not in structured]
    assert len(set(plain_ones)) == len(plain_ones)
    # a rule gives no cotangent where the derivative is zero for this form of the operator
    assert set(plain_ones) <= set(expected)
    for name, number, place in set(expected) - set(plain_ones):
        assert found.steps[number - 1].operator in ZERO_FORMS, (found.steps[number - 1].operator, name, place)
    seeds = [part for one in found.cotangents.values() for part in one.contributions if part.step is None]
    assert len(seeds) == 1


# Operators whose rule gives no cotangent of an input in some form: a Resize that crops nothing does not use its roi, and a
# BatchNormalization in training does not use the running statistics.
ZERO_FORMS = frozenset(("Resize", "BatchNormalization"))


def version(found: Walk, domain: str) -> int:
    return next(
        (o.version for o in found.gradient.opset_import if o.domain in ((domain,) if domain else ("", "ai.onnx"))), 1
    )


def check_broadcasts(found: Walk) -> None:
    """An operand that NumPy broadcasts is shown with the axes along which it was repeated; no other one is."""
    for step in found.steps:
        if step.domain or step.operator not in BROADCASTING:
            continue
        result = np.shape(found.values[step.outputs[0]])
        for part in step.outgoing:
            shape = np.shape(found.values[part.of])
            lead = len(result) - len(shape)
            repeated = [*range(lead), *(lead + k for k, n in enumerate(shape) if n == 1 and result[lead + k] != 1)]
            assert list(part.axes) == repeated, (step.operator, part)
            assert bool(part.before) == bool(part.summed) == bool(repeated)
            if repeated:
                before = numbers(found.values[part.before])
                assert before.shape == result
                total = numbers(found.values[part.summed])
                size = np.abs(before).sum(axis=part.axes).reshape(shape)
                near = np.abs(before.sum(axis=part.axes).reshape(shape) - total) <= 1e-2 * size + 1e-30
                assert np.all(near | ~np.isfinite(size))


def check_aliases(found: Walk) -> None:
    """What an Add, a Sub's first operand or an Identity passes on unchanged is shown as the cotangent of the result."""
    for cotangent in found.cotangents.values():
        if cotangent.alias:
            same(found.values[cotangent.value], found.values[found.cotangents[cotangent.alias].value])
    for step in found.steps:
        if step.domain or step.operator not in ("Add", "Identity", "Sum") or not step.incoming:
            continue
        for part in step.outgoing:
            if part.before:
                continue
            same(found.values[part.value], found.values[step.incoming[0].value])
            if part.value in {name for one in step.emitted for name in one.outputs}:
                continue  # only the run can tell that nothing has to be summed
            if len(found.cotangents[part.of].contributions) == 1:
                assert found.cotangents[part.of].alias, part


def check_nodes(found: Walk, made: onnx.ModelProto) -> None:
    """Every node of the gradient model is shown once, and so is what only the walk computes."""
    shown = [one.name for one in found.forward]
    shown += [one.name for step in found.steps for one in step.emitted]
    shown += [one.name for cotangent in found.cotangents.values() for one in cotangent.emitted]
    assert sorted(shown) == sorted(node.name for node in (*made.graph.node, *found.more))
