"""`op.grad.SoftmaxGrad(...)`: the gradient primitives. `primitives.pyi`, which is generated, has their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refgrad.builder.misuse import no_such_primitive
from refgrad.tables.dialects import DIALECTS


class Primitives:
    """`op.grad.SoftmaxGrad(...)`: a gradient primitive, lowered for the dialect in use."""

    def __init__(self, op: Any) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known = DIALECTS["onnx"].lowerings
        if name not in known:
            raise no_such_primitive(self._op, name)

        def lower(grad: Primitives, *inputs: Any, **attributes: Any) -> Any:
            op = grad._op
            override = None if op.dialect.lowerings is known else op.dialect.lowerings.get(name)
            result = None if override is None else override(op, *inputs, **attributes)
            return known[name](op, *inputs, **attributes) if result is None else result

        setattr(Primitives, name, lower)  # on the class: it is looked up once
        return getattr(self, name)  # type: ignore[no-any-return]
