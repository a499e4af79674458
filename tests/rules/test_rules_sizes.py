"""Every rule on inputs of known rank whose sizes have no name: all of them, as ONNX Runtime asks at run time, or the batch."""

from __future__ import annotations

import pytest
from checking import assert_gradient, by_operator
from onnx import ModelProto

from refgrad.conformance.case import Case

pytestmark = pytest.mark.slow

FEW = 3  # cases of an operator with an unknown batch


def repeats(case: Case) -> bool:
    """True if an Einsum repeats an axis of size 1 along its letter: no specification says so, and only known sizes tell."""
    if case.operator != "Einsum":
        return False
    terms = case.node.attribute[0].s.decode().partition("->")[0].split(",")
    sizes: dict[str, set[int]] = {}
    for term, array in zip(terms, case.feeds.values(), strict=True):
        for letter, size in zip(reversed(term.replace(" ", "")), reversed(array.shape), strict=False):
            sizes.setdefault(letter, set()).add(size)
    return any(len(found) > 1 for letter, found in sizes.items() if letter != ".")


CASES = by_operator(lambda case: case.static and case.dtype and not repeats(case))


def forgotten(case: Case, axes: int | None) -> Case:
    """The case with inputs that declare no size of their first `axes` axes, of all where that is None."""
    model = ModelProto()
    model.CopyFrom(case.model)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim[:axes]:
            dim.Clear()
    return Case(case.name, model, case.feeds, case.wrt, case.outputs)


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(CASES), ids=".".join)
def test_sizes_without_a_name(key: tuple[str, str]) -> None:
    for case in CASES[key]:
        assert_gradient(forgotten(case, None), "ort", directions=1, runtime=False)


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(CASES), ids=".".join)
def test_a_batch_of_unknown_size(key: tuple[str, str]) -> None:
    for case in CASES[key][:: max(1, len(CASES[key]) // FEW)]:
        assert_gradient(forgotten(case, 1), "ort", directions=1, runtime=False)
