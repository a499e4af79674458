"""Every rule in float16 and bfloat16: the gradient has the model's type, and an error that the type's rounding explains."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checking import by_operator
from onnx import ModelProto, TensorProto, helper, numpy_helper

from refgrad.conformance.case import Case, is_float
from refgrad.conformance.cases.quantization import rounded
from refgrad.conformance.judge.check import check
from refgrad.conformance.verdicts import CRASHED, RIGHT, WRONG
from refgrad.protos.domains import NCHWC
from refgrad.tables.registry import BODY, RULES
from refgrad.tables.schemas import find_schema

pytestmark = pytest.mark.slow

TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FEW = 3  # cases of an operator, spread over its table


CASES = by_operator(lambda case: case.static and bool(case.dtype))


def retyped(case: Case, kind: int) -> Case | None:
    """The case with `kind` in place of float32, and its numbers rounded to it; None where the schema has no such type."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    schema = find_schema(case.node.op_type, case.node.domain, case.opset)
    read = {formal.type_str for formal in schema.inputs}
    allowed = {text for c in schema.type_constraints if c.type_param_str in read for text in c.allowed_type_strs}
    if f"tensor({TensorProto.DataType.Name(kind).lower()})" not in allowed:
        return None
    model = ModelProto()
    model.CopyFrom(case.model)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    feeds = {name: a.astype(dtype) if a.dtype == np.float32 else a for name, a in case.feeds.items()}
    return Case(case.name, model, feeds, case.wrt, case.outputs)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TYPES, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("key", sorted(CASES), ids=".".join)
def test_gradient_in_a_short_type(key: tuple[str, str], kind: int) -> None:
    cases = [case for case in CASES[key] if any(is_float(a) and a.size for a in case.feeds.values())]
    assert cases
    chosen = [retyped(case, kind) for case in cases[:: max(1, len(cases) // FEW)][:FEW]]
    found = [
        (case, check(case.model, case.feeds, wrt=case.wrt, outputs=case.outputs, backends=["numpy"], directions=1))
        for case in chosen
        if case is not None
    ]
    if not found:
        pytest.skip("the schema does not have this type")
    for case, result in found:
        for row in result.rows:
            assert row.verdict not in (WRONG, CRASHED), f"{case}: {row}"
    assert any(row.verdict == RIGHT for _, result in found for row in result.rows)


def test_every_derivative_has_a_case() -> None:
    of_integers = {(node.domain, node.op_type) for case in rounded() for node in case.model.graph.node}
    missing = (
        {key for key in {**RULES, **BODY} if key[0] != NCHWC} - CASES.keys() - of_integers
    )  # NCHWC is read as others
    deprecated = {key for key in missing if onnx.defs.has(*key[::-1]) and onnx.defs.get_schema(*key[::-1]).deprecated}
    assert missing - deprecated == set(), "add them to conformance/cases"  # test_opsets has the deprecated ones
