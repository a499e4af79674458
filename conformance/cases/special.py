"""Cases of numbers that overflow or underflow, or are infinite or NaN, where the derivative still has a limit.

The limits are worked out by hand from the definition of each operator. A type that cannot hold a limit rounds it to
infinity or 0. There is no case where the limit depends on the direction of the approach. Each family has its rows in its
own module, in `SPECIAL`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases import files
from refgrad.tables.kinks import Point

NEWEST = 21  # the last opset that every runtime under test knows
TINY = 2.0**-134  # subnormal in float32


@dataclass(frozen=True)
class Special:
    """An operator at special numbers: the inputs in the order of the schema, and their gradients for `cotangent`.

    `limits` holds these gradients, None for an input that gets none. `cotangent` belongs to the first output.
    """

    operator: str
    what: str
    inputs: Point
    limits: Point
    cotangent: Any = 1.0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    opset: int = NEWEST


def gate(operator: str, **more: Any) -> Special:
    """x times a gate that is 0 far below and 1 far above."""
    return Special(
        operator, "far-out", ((-1e30, -1e15, -800.0, 800.0, 1e15, 1e30),), ((0.0,) * 3 + (1.0,) * 3,), **more
    )


@cache
def rows() -> tuple[Special, ...]:
    """The rows of every family; a module of cases may have them in `SPECIAL`."""
    modules = [importlib.import_module(file) for _, file in files()]
    return tuple(row for module in modules for row in getattr(module, "SPECIAL", ()))


def cases() -> Iterator[Case]:
    """Each row of every table (values="special")."""
    for special in rows():
        yield case(special)


def case(special: Special, dtype: Any = np.float32) -> Case:
    """The operator at the special numbers."""
    inputs = [array if (array := np.array(x)).dtype.kind in "bi" else array.astype(dtype) for x in special.inputs]
    name = "-".join([special.operator, special.what, *map(str, special.attributes.values())])
    made = node_case(
        special.operator, *inputs, domain=special.domain, opset=special.opset, name=name, **special.attributes
    )
    return made.changed(values="special")
