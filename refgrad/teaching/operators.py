"""The operators of the course: a schema, a kernel and an independent forward each, and no derivative."""

from __future__ import annotations

import onnx
from onnx import helper
from onnx.defs import OpSchema

from refgrad.extend import forward, kernel
from refgrad.tables.schemas import find_schema
from refgrad.teaching.chapter import DOMAIN, Chapter

_FLOATS = ["tensor(float)", "tensor(double)"]


def register(chapter: Chapter) -> None:
    """Make the operator of a chapter known to onnx, to the interpreter and to the oracles. A second time does nothing.

    With a schema, refgrad refuses a rule whose parameters are not the operator's, and says what they are.
    """
    if find_schema(chapter.operator, DOMAIN) is not None:
        return
    parameter = OpSchema.FormalParameter
    inputs = [parameter(n, "T" if n in chapter.floats else "tensor(bool)") for n in chapter.inputs]
    attributes = [OpSchema.Attribute(n, helper.make_attribute(n, value)) for n, value in chapter.attributes.items()]
    schema = OpSchema(
        chapter.operator,
        DOMAIN,
        1,
        chapter.formula,
        inputs=inputs,
        outputs=[parameter(chapter.output, "T")],
        type_constraints=[("T", _FLOATS, "float or double")],
        attributes=attributes,
    )
    onnx.defs.register_schema(schema)
    kernel(chapter.operator, domain=DOMAIN)(chapter.kernel)
    forward(chapter.operator, domain=DOMAIN, analytic=True)(chapter.forward)
