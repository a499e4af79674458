"""Low-rank adapters: x·W + x·A·B·(α / rank), where W stays as it is and A and B are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from refgrad.errors import OptionError, UnknownNameError, choices
from refgrad.protos.documents import parse_json, record_of, typed
from refgrad.protos.external import array_of, dtype_of
from refgrad.protos.malformed import explained
from refgrad.protos.reading import read
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import attribute_value, every_node, fresh, names_of, refill
from refgrad.ranges import RANGES, checked
from refgrad.reverse.requested import matching
from refgrad.transforms.weights import write_back

_KEY = "refgrad.adapters"  # metadata: which tensors adapt which weight


@explained
def lora(
    model: ModelProto | str | os.PathLike[str],
    weights: str | Sequence[str] = "*",
    rank: Any = 8,
    alpha: Any = None,
    seed: int = 0,
) -> ModelProto:
    """A copy of `model` with adapters beside weights of MatMul and Gemm. At first it computes what `model` computes.

    A weight w gets the initializers `w.lora_A` [in, rank], from N(0, 1/rank), and `w.lora_B` [rank, out], zeros. `step_model`
    trains them alone by default, `merge_adapters` adds them to the weights.

    :param weights: names or patterns (`*.attn.*`) of initializers [in, out] (of Gemm with transB [out, in]) that nothing else
        reads.
    :param rank: the size of the adapters.
    :param alpha: α of the factor α / rank; the rank by default.
    :param seed: of the random numbers of A.
    :raises UnknownNameError: a name or a pattern that is no such weight.
    :raises OptionError: the rank or α does not fit, or the model has adapters already.

    >>> import onnx.parser, refgrad
    >>> from refgrad.training import lora, merge_adapters
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 2] y) '
    ...     '<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }'
    ... )
    >>> adapted = lora(model, "w", rank=1)
    >>> [tensor.name for tensor in adapted.graph.initializer]
    ['w', 'w.lora_A', 'w.lora_B']
    >>> [tensor.name for tensor in merge_adapters(adapted).graph.initializer]
    ['w']
    """
    checked("rank", rank)
    checked("seed", seed)
    alpha = float(rank) if alpha is None else alpha
    if RANGES["alpha"].why_not(abs(alpha) if isinstance(alpha, int | float) else alpha) or isinstance(alpha, bool):
        raise OptionError(f"alpha is a number other than 0, not {alpha!r}.")
    source = read(model)
    if _adapters(source):
        raise OptionError("The model has adapters already. Merge them first: merge_adapters(model).")
    tensors = {tensor.name: tensor for tensor in source.graph.initializer}
    fed = {value.name for value in source.graph.input}
    layers: dict[str, list[NodeProto]] = {}
    for node in source.graph.node:
        tensor = tensors.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 else None
        if tensor is None or node.domain not in ("", "ai.onnx") or tensor.name in fed:
            continue
        if len(tensor.dims) == 2 and tensor.data_type in FLOATS:
            layers.setdefault(tensor.name, []).append(node)
    reads = Counter(name for node in every_node(source) for name in node.input)
    reads.update(value.name for value in source.graph.output)
    shared = {name for name, nodes in layers.items() if reads[name] != len(nodes)}
    layers = {name: nodes for name, nodes in layers.items() if name not in shared}
    given = [weights] if isinstance(weights, str) else list(weights)
    if also := [name for name in given if name in shared]:
        raise OptionError(
            f"{also[0]!r} has a reader that gets no adapter, such as an embedding that shares it, which merging would change. "
            "Leave it out."
        )
    if not layers:
        raise UnknownNameError("The model has no weight [in, out] that a MatMul or a Gemm reads second.")
    chosen = matching(given, list(layers), list(layers), "weights")
    if unknown := [name for name in chosen if name not in layers]:
        raise UnknownNameError(
            f"{unknown[0]!r} is no weight [in, out] that a MatMul or a Gemm reads second. There are: {choices(layers)}."
        )
    made = ModelProto()
    made.CopyFrom(source)
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    rng = np.random.default_rng(seed)
    kept: dict[str, dict[str, Any]] = {}
    behind: dict[str, list[NodeProto]] = {}  # by the first output of the layer
    renamed: dict[str, str] = {}
    for name in chosen:
        tensor = tensors[name]
        dtype = dtype_of(tensor)
        turned = {_setting(node, "transB", 0) == 1 for node in layers[name]}
        if len(turned) > 1:
            raise OptionError(f"{name!r} is read as it is and transposed. Leave it out.")
        [is_turned] = turned
        inner, outer = (int(d) for d in (reversed(tensor.dims) if is_turned else tensor.dims))
        a, b = (fresh(f"{name}.{end}", taken) for end in ("lora_A", "lora_B"))
        start = (rng.standard_normal((inner, rank)) / math.sqrt(rank)).astype(dtype)
        made.graph.initializer.append(numpy_helper.from_array(start, a))
        made.graph.initializer.append(numpy_helper.from_array(np.zeros((rank, outer), dtype), b))
        frozen, added = dict[str, str](), list[str]()
        kept[name] = {
            "A": a, "B": b, "factor": alpha / rank, "transposed": is_turned, "frozen": frozen, "added": added
        }  # fmt: skip
        for node in layers[name]:
            factor = alpha / rank * float(_setting(node, "alpha", 1.0))
            whole = node.output[0]
            own = renamed[whole] = fresh(f"{whole}.frozen", taken)
            steps = []
            x = node.input[0]
            if _setting(node, "transA", 0):
                steps.append(helper.make_node("Transpose", [x], [fresh(f"{whole}.turned", taken)], perm=[1, 0]))
                x = steps[-1].output[0]
            values = [fresh(f"{whole}.{end}", taken) for end in ("low", "high", "scale", "adapter")]
            number = numpy_helper.from_array(np.array(factor, dtype))
            steps += [
                helper.make_node("MatMul", [x, a], [values[0]]),
                helper.make_node("MatMul", [values[0], b], [values[1]]),
                helper.make_node("Constant", [], [values[2]], value=number),
                helper.make_node("Mul", [values[1], values[2]], [values[3]]),
                helper.make_node("Add", [own, values[3]], [whole]),
            ]
            for step in steps:
                step.name = step.output[0]
            frozen[own] = whole
            added += [step.output[0] for step in steps]
            behind[whole] = steps
    nodes = []
    for node in made.graph.node:
        whole = node.output[0] if node.output else ""
        if whole in behind:
            node.output[0] = renamed[whole]
        nodes += [node, *behind.get(whole, ())]
    refill(made.graph.node, nodes)
    made.metadata_props.add(key=_KEY, value=json.dumps(kept))
    return made


@explained
def merge_adapters(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """The model without its adapters: W + A·B·(α / rank) in the place of W.

    :raises OptionError: the model has no adapters.
    """
    source = read(model)
    kept = _adapters(source)
    if not kept:
        raise OptionError("The model has no adapters; refgrad.training.lora adds them.")
    tensors = {tensor.name: tensor for tensor in source.graph.initializer}
    merged = {}
    try:
        for name, one in kept.items():
            weight = array_of(tensors[name])
            added = array_of(tensors[one.A]).astype(np.float64) @ array_of(tensors[one.B]) * one.factor
            merged[name] = (weight + (added.T if one.transposed else added)).astype(weight.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(f"The adapters that the metadata of the model names are not there: {error}.") from error
    made = ModelProto()
    made.CopyFrom(source)
    frozen = {own: whole for one in kept.values() for own, whole in one.frozen.items()}
    added = {name for one in kept.values() for name in one.added}
    nodes = [node for node in made.graph.node if added.isdisjoint(node.output)]
    for node in nodes:
        node.output[:] = [frozen.get(name, name) for name in node.output]
    ends = {end for one in kept.values() for end in (one.A, one.B)}
    refill(made.graph.node, nodes)
    refill(made.graph.initializer, [tensor for tensor in made.graph.initializer if tensor.name not in ends])
    refill(made.metadata_props, [entry for entry in made.metadata_props if entry.key != _KEY])
    return write_back(made, merged)


def adapters_of(model: ModelProto) -> list[str]:
    """The names of the adapters' initializers; none where there are no adapters."""
    return [end for one in _adapters(model).values() for end in (one.A, one.B)]


class _Adapter(NamedTuple):
    """An adapter as the metadata describe it: its tensors, and the values and nodes that merging removes."""

    A: str
    B: str
    factor: float
    transposed: bool
    frozen: dict[str, str]
    added: tuple[str, ...]


def _adapters(model: ModelProto) -> dict[str, _Adapter]:
    """The adapters by weight. Metadata that do not fit are from another program, and are ignored."""
    found = next((entry.value for entry in model.metadata_props if entry.key == _KEY), "{}")
    try:
        kept = typed(parse_json(found), dict[str, Any], "it")
        return {name: record_of(_Adapter, one) for name, one in kept.items()}
    except ValueError:
        return {}


def _setting(node: NodeProto, name: str, default: Any) -> Any:
    return next((attribute_value(a) for a in node.attribute if a.name == name), default)
