"""What the author of a rule for a custom operator imports.

A rule needs the operator's schema (`onnx.defs.register_schema`); its parameters are bound to the schema's names.

>>> import onnx.defs
>>> from refgrad.extend import rule
>>> F = onnx.defs.OpSchema.FormalParameter
>>> onnx.defs.register_schema(
...     onnx.defs.OpSchema(
...         "Square", "my.domain", 1, inputs=[F("x", "T")], outputs=[F("y", "T")],
...         type_constraints=[("T", ["tensor(float)", "tensor(double)"], "")],
...     )
... )
>>> @rule("Square", domain="my.domain")
... def square(op, d_y, x):
...     "dx = 2·x·dy"
...     return op.Mul(op.Mul(x, 2.0), d_y)
"""

from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import lowering, rule

__all__ = ["Emitter", "lowering", "rule"]
