"""Models of ONNX Runtime's attentions with shared keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.microsoft.cases import drawer
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.schemas import find_schema

NUMPY = get_backend("numpy")
NAMES = (
    *(
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
    ),
    *(
        "position_ids",
        "attention_bias",
        "head_sink",
        "k_scale",
        "v_scale",
        "q_norm_weight",
        "k_norm_weight",
        "query_seqlens",
    ),
)


def prompt(batch: int = 2, length: int = 3, past: int = 0, size: int = 8, **given: Any) -> dict[str, Any]:
    """Inputs of a GroupQueryAttention after `past` tokens, those of `given` in their place (None: left out), and attributes."""
    draw = drawer()
    inputs: dict[str, Any] = {
        "query": draw(batch, length, 4 * size),
        "key": draw(batch, length, 2 * size),
        "value": draw(batch, length, 2 * size),
        "seqlens_k": np.full(batch, past + length - 1, np.int32),
        "total_sequence_length": np.array(past + length, np.int32),
    }
    if past:
        inputs |= {name: draw(batch, 2, past, size) for name in ("past_key", "past_value")}
    return inputs | {"num_heads": 4, "kv_num_heads": 2} | given


def grouped(given: dict[str, Any], outputs: int = 3, *, static: bool = True) -> Case:
    """The model and its feeds."""
    feeds = {name: given[name] for name in NAMES if given.get(name) is not None}
    names = [name if name in feeds else "" for name in NAMES]
    attributes = {name: value for name, value in given.items() if name not in NAMES}
    results = ["output", "present_key", "present_value", "output_qk"][:outputs]
    node = helper.make_node("GroupQueryAttention", names, results, "bad", domain=MICROSOFT, **attributes)
    values = [declared(name, x.dtype, x.shape if static else [None] * x.ndim) for name, x in feeds.items()]
    cache = feeds.get("past_key", feeds["query"]).dtype
    kinds = [feeds["query"].dtype, cache, cache, feeds["query"].dtype]
    made = [
        declared(name, kind, [None] * (3 if name == "output" else 4))
        for name, kind in zip(results, kinds, strict=False)
    ]
    graph = helper.make_graph([node], "g", values, made)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return Case("grouped", helper.make_model(graph, opset_imports=imports, ir_version=10), feeds)


def declared(name: str, kind: np.dtype[Any], shape: Sequence[int | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), shape)


def floats(*shape: int) -> np.ndarray:
    return drawer(1)(*shape)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def node_model(
    op_type: str, given: dict[str, Any], outputs: dict[str, int]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node whose inputs and attributes are `given` (None: left out), and its feeds. `outputs`: their ranks."""
    schema = find_schema(op_type, MICROSOFT)
    feeds = {p.name: given[p.name] for p in schema.inputs if given.get(p.name) is not None}
    names = [p.name if p.name in feeds else "" for p in schema.inputs]
    known = {p.name for p in schema.inputs}
    attributes = {name: value for name, value in given.items() if name not in known}
    node = helper.make_node(op_type, names, list(outputs), "bad", domain=MICROSOFT, **attributes)
    made = [declared(name, np.dtype(np.float32), [None] * rank) for name, rank in outputs.items()]
    graph = helper.make_graph([node], "g", [declared(n, x.dtype, x.shape) for n, x in feeds.items()], made)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds
