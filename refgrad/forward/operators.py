"""`op.Mul(a, b)`: a method for every operator of ai.onnx. `operators.pyi`, which is generated, has their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from refgrad.forward.misuse import no_such_method
from refgrad.protos.domains import MICROSOFT

Argument = str | float | Sequence[int] | np.ndarray | np.generic | None


class Operators:
    """One method per operator: it adds a node of ai.onnx and returns the name of its output, or a tuple of names."""

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""
        raise NotImplementedError

    @property
    def node(self) -> str:
        """The name of the forward node that what is emitted belongs to."""
        raise NotImplementedError

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Any],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any:
        """Add a node."""
        raise NotImplementedError

    def com_microsoft(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node of ONNX Runtime's domain whose unused outputs may be left empty."""
        return self.emit(op_type, MICROSOFT, inputs, outputs, attributes, optional_outputs=True)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper() or not onnx.defs.has(op_type):
            raise no_such_method(self, op_type)

        def emit(op: Operators, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
            return op.emit(op_type, "", inputs, outputs, attributes)

        setattr(Operators, op_type, emit)  # on the class: it is looked up once
        return getattr(self, op_type)  # type: ignore[no-any-return]
