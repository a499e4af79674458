"""The annotations of a function as types: they say which parameters are optional, and of which kind an attribute is."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

from onnx import GraphProto, TensorProto
from onnx.defs import OpSchema

_KINDS: Mapping[Any, OpSchema.AttrType] = {
    int: OpSchema.AttrType.INT,
    bool: OpSchema.AttrType.INT,
    float: OpSchema.AttrType.FLOAT,
    str: OpSchema.AttrType.STRING,
    TensorProto: OpSchema.AttrType.TENSOR,
    GraphProto: OpSchema.AttrType.GRAPH,
}
_LISTS: Mapping[Any, OpSchema.AttrType] = {
    int: OpSchema.AttrType.INTS,
    float: OpSchema.AttrType.FLOATS,
    str: OpSchema.AttrType.STRINGS,
}

KINDS = (  # as messages name them
    *(kind.__name__ for kind in _KINDS),
    *(f"{many}[{kind.__name__}]" for kind in _LISTS for many in ("list", "Sequence")),
)


_USUAL = {"GraphProto": GraphProto, "Optional": Optional, "Sequence": Sequence, "TensorProto": TensorProto}


class _Names(dict[str, Any]):
    """Names that only a type checker imports: those that say the kind of an attribute, and others, for any type."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self._known = known

    def __missing__(self, name: str) -> Any:
        if name in self._known or hasattr(builtins, name):
            raise KeyError(name)  # Python finds it itself
        return _USUAL.get(name, Any)


@lru_cache(maxsize=8)  # a decorator asks twice
def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters that have an annotation, by name. An annotation without a meaning stands for any type."""
    plain = inspect.unwrap(function)
    known = getattr(plain, "__globals__", {})
    return {name: _read(text, known) for name, text in getattr(plain, "__annotations__", {}).items()}


def _read(annotation: Any, known: dict[str, Any]) -> Any:
    alone = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(alone, known, _Names(known))["it"]
    except Exception:
        return Any


def is_optional(hint: Any) -> bool:
    """True if None is among the values of a type: `str | None`, `Optional[str]`."""
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def attribute_kind(hint: Any) -> OpSchema.AttrType | None:
    """The kind of an attribute of that type, or of that type and None; None if no attribute has such values."""
    if is_optional(hint):
        others = [one for one in get_args(hint) if one is not type(None)]
        return attribute_kind(others[0]) if len(others) == 1 else None
    if get_origin(hint) in (list, Sequence):
        return _LISTS.get(get_args(hint)[0])
    try:
        return _KINDS.get(hint)
    except TypeError:  # it cannot be hashed
        return None
