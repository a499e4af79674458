"""Low-rank adapters: x·W + x·A·B·(α / rank), where W stays as it is and A and B are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.errors import OptionError, UnknownNameError, choices
from refgrad.model.checks.malformed import explained
from refgrad.model.external import (
    PLACE_OF_DATA,
    ExternalData,
    Opened,
    array_of,
    dtype_of,
    is_external,
    place_of,
    refuse_external,
)
from refgrad.model.places import places
from refgrad.model.reading import opened, read
from refgrad.notices import notice
from refgrad.parameters.weights import write_back
from refgrad.protos.documents import parse_json, record_of, typed
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import attribute_value, every_node, fresh, names_of, refill
from refgrad.protos.types import FLOATS
from refgrad.ranges import RANGES, checked
from refgrad.reverse.requested import matching
from refgrad.training.arguments import listed

_BLOCK = 1 << 18  # elements of a weight that are added to at a time
_KEY = "refgrad.adapters"  # metadata: which tensors adapt which weight


@explained
def lora(
    model: ModelProto | str | os.PathLike[str],
    weights: str | Sequence[str] = "*",
    rank: Any = 8,
    alpha: Any = None,
    seed: int = 0,
) -> ModelProto:
    """A copy of `model` with adapters beside weights of products and quantized tables. At first it computes the same.

    A weight w gets the initializers `w.lora_A` [in, rank], from N(0, 1/rank), and `w.lora_B` [rank, out], zeros. `step_model`
    trains them alone by default, `merge_adapters` adds them to the weights.

    Beside a quantized weight the adapters are in the type that it is dequantized to, and the weight stays as it is: one behind
    DequantizeLinear, of MatMulNBits, or of GatherBlockQuantized, whose rows are then a weight [rows, out]. See Dettmers et al.,
    "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).

    :param weights: names or patterns (`*.attn.*`) of weights [in, out] (of Gemm with transB [out, in]) that nothing else reads,
        in initializers or Constant nodes. A layer may read them through Identity, Cast, Transpose and DequantizeLinear.
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
    factor = _factor(alpha, rank)
    source = read(model, lift=False)
    if _adapters(source):
        raise OptionError("The model has adapters already. Merge them first: merge_adapters(model).")
    chosen = _chosen(source, listed(weights, "weights"))
    adapted = ModelProto()
    adapted.CopyFrom(source)
    if small := [weight for weight in chosen if rank > min(weight.dims)]:
        several, names = len(small) > 1, choices(weight.name for weight in small)
        need = (
            "need: the adapters have more numbers than the weights"
            if several
            else "needs: the adapter has more numbers than the weight"
        )
        themselves = "these weights themselves" if several else "the weight itself"
        other = "" if any(weight.is_quantized for weight in small) else f", or train {themselves}"
        notice(
            f"rank={rank} is more than the weight{'s' if several else ''} {names} {need}. Take a smaller rank{other}."
        )
    taken = names_of(adapted.graph) | {node.name for node in adapted.graph.node}
    rng = np.random.default_rng(seed)
    adapters: dict[str, _Adapter] = {}
    branches: dict[str, list[NodeProto]] = {}  # by the result of the layer
    for weight in chosen:
        a, b = _initializers(weight, rank, rng, taken)
        adapted.graph.initializer.extend([a, b])
        beside = {layer.output[0]: _branch(layer, a, b, factor, taken) for layer in weight.layers}
        frozen = {nodes[-1].input[0]: whole for whole, nodes in beside.items()}
        added = tuple(node.output[0] for nodes in beside.values() for node in nodes)
        adapters[weight.name] = _Adapter(a.name, b.name, factor, weight.transposed, frozen, added, weight.is_quantized)
        branches |= beside
    _insert(adapted.graph, branches)
    _write_down(adapted, adapters)
    return adapted


def _factor(alpha: Any, rank: int) -> float:
    """α / rank, where α is the rank by default.

    :raises OptionError: α is not a number other than 0.
    """
    alpha = float(rank) if alpha is None else alpha
    if RANGES["alpha"].why_not(abs(alpha) if isinstance(alpha, int | float) else alpha) or isinstance(alpha, bool):
        raise OptionError(f"alpha is a number other than 0, not {alpha!r}.")
    factor: float = alpha / rank
    return factor


class _Adapted(NamedTuple):
    """A weight with the layers that read it, directly or through Identity, Cast, Transpose and DequantizeLinear.

    `dims` is its shape. A packed weight counts in the shape of its numbers. `kind` is the element type that the layers compute
    in. `transposed` is True if they read it as [out, in].
    """

    name: str
    dims: tuple[int, ...]
    kind: int
    transposed: bool
    is_quantized: bool
    layers: list[NodeProto]


def _chosen(model: ModelProto, names: list[str]) -> list[_Adapted]:
    """The weights for these names and patterns.

    :raises UnknownNameError: a name or a pattern that is no weight of a layer.
    :raises OptionError: a name of a weight that has other readers too.
    """
    layers, shared = _layers(model)
    if not names:
        raise OptionError(f"weights=[] names no weight that gets adapters. There are: {choices(layers)}.")
    if also := [name for name in names if name in shared]:
        raise OptionError(f"{also[0]!r} {shared[also[0]]}. Leave it out.")
    if not layers:
        raise UnknownNameError(
            "The model has no weight that can have adapters: of a MatMul, Gemm, MatMulNBits or GatherBlockQuantized."
        )
    chosen = list(dict.fromkeys(matching(names, list(layers), list(layers), "weights")))
    if unknown := [name for name in chosen if name not in layers]:
        raise UnknownNameError(
            f"{unknown[0]!r} is not a weight that can have adapters: of a MatMul, Gemm, MatMulNBits or GatherBlockQuantized. "
            f"There are: {choices(layers)}."
        )
    return [layers[name] for name in chosen]


def _layers(model: ModelProto) -> tuple[dict[str, _Adapted], dict[str, str]]:
    """The weights of layers that can be adapted, by name, and why others cannot.

    A weight has two axes, or is packed, and is no input. It is an initializer or in a Constant.
    """
    fed = {value.name for value in model.graph.input}
    held = {one.name: one.tensor for one in places(model) if one.body is None and one.name not in fed}
    shapes = {n: tuple(t.dims) for n, t in held.items() if len(t.dims) == 2}
    made_of = {n: (n, held[n].data_type, False) for n in shapes}  # value: its weight, its type, if it is turned
    links, found = Counter[str](), dict[str, list[tuple[NodeProto, int, bool]]]()
    for node in model.graph.node:
        if packed := _packed(node, held):
            weight, shapes[weight], kind = packed
            made_of.setdefault(weight, (weight, held[weight].data_type, False))
            found.setdefault(weight, []).append((node, kind, False))
        elif node.domain not in ("", "ai.onnx"):
            continue
        elif node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 and node.input[1] in made_of:
            weight, kind, turned = made_of[node.input[1]]
            if kind in FLOATS:
                found.setdefault(weight, []).append((node, kind, turned ^ (_setting(node, "transB", 0) == 1)))
        elif node.input and node.input[0] in made_of and (way := _rearranged(node, held, *made_of[node.input[0]])):
            made_of[node.output[0]] = way
            links[way[0]] += 1
    reads = Counter(name for node in every_node(model) for name in node.input)
    reads.update(value.name for value in model.graph.output)
    uses = Counter[str]()
    for value, (weight, *_) in made_of.items():
        uses[weight] += reads[value]
    adapted, shared = dict[str, _Adapted](), dict[str, str]()
    for weight, layers in found.items():
        if uses[weight] != len(layers) + links[weight]:
            shared[weight] = (
                "has a reader that gets no adapter, such as an embedding that shares it, which merging would change"
            )
        elif len({turned for *_, turned in layers}) > 1:
            shared[weight] = "is read as it is and transposed"
        elif len({kind for _, kind, _ in layers}) > 1:
            shared[weight] = "is read in several types"
        else:
            [(_, kind, turned), *_] = layers
            is_quantized = held[weight].data_type not in FLOATS
            adapted[weight] = _Adapted(
                weight, shapes[weight], kind, turned, is_quantized, [node for node, *_ in layers]
            )
    return adapted, shared


def _packed(node: NodeProto, held: Mapping[str, TensorProto]) -> tuple[str, tuple[int, int], int] | None:
    """The packed weight of a layer of ONNX Runtime: its name, its shape [in, out], the type of the layer. None without one."""
    if node.domain != MICROSOFT or len(node.input) < 3 or node.input[2] not in held:
        return None
    kind = held[node.input[2]].data_type
    if node.op_type == "MatMulNBits" and node.input[1] in held:
        return node.input[1], (_setting(node, "K", 0), _setting(node, "N", 0)), kind
    if node.op_type == "GatherBlockQuantized" and node.input[0] in held:
        table = held[node.input[0]]
        if len(table.dims) == 2 and _setting(node, "gather_axis", 0) in (0, -2):
            bits = _setting(node, "bits", 4) if table.data_type == TensorProto.UINT8 else 8
            return node.input[0], (table.dims[0], table.dims[1] * 8 // bits), kind
    return None


def _rearranged(
    node: NodeProto, held: Mapping[str, TensorProto], weight: str, kind: int, turned: bool
) -> tuple[str, int, bool] | None:
    """The weight, the type, and whether it is turned, of the result of a node that reads a weight. None for other results."""
    match node.op_type:
        case "Identity":
            return weight, kind, turned
        case "DequantizeLinear" if kind not in FLOATS and node.input[1] in held:
            return weight, _setting(node, "output_dtype", 0) or held[node.input[1]].data_type, turned
        case "Cast" if kind in FLOATS and _setting(node, "to", 0) in FLOATS:
            return weight, _setting(node, "to", 0), turned
        case "Transpose":
            return weight, kind, turned ^ (list(_setting(node, "perm", [1, 0])) == [1, 0])
        case _:
            return None


def _initializers(
    weight: _Adapted, rank: int, rng: np.random.Generator, taken: set[str]
) -> tuple[TensorProto, TensorProto]:
    """A [in, rank] from N(0, 1/rank) and B [rank, out] of zeros, in the type that the layers read."""
    dtype = helper.tensor_dtype_to_np_dtype(weight.kind)
    inner, outer = (int(d) for d in (reversed(weight.dims) if weight.transposed else weight.dims))
    a, b = (fresh(f"{weight.name}.{end}", taken) for end in ("lora_A", "lora_B"))
    start = (rng.standard_normal((inner, rank)) / math.sqrt(rank)).astype(dtype)
    return numpy_helper.from_array(start, a), numpy_helper.from_array(np.zeros((rank, outer), dtype), b)


def _branch(layer: NodeProto, a: TensorProto, b: TensorProto, factor: float, taken: set[str]) -> list[NodeProto]:
    """The nodes of x·A·B·factor, for a Gemm also times its alpha. The last one adds it to the frozen result of the layer."""
    whole, x = layer.output[0], layer.input[0]
    builder = NodeBuilder(taken)
    frozen = builder.fresh(f"{whole}.frozen")
    if _setting(layer, "transA", 0):
        x = builder.add("Transpose", [x], f"{whole}.turned", perm=[1, 0])
    if layer.op_type == "GatherBlockQuantized":
        low = builder.add("Gather", [a.name, layer.input[1]], f"{whole}.low")
    else:
        low = builder.add("MatMul", [x, a.name], f"{whole}.low")
    high = builder.add("MatMul", [low, b.name], f"{whole}.high")
    number = np.array(factor * float(_setting(layer, "alpha", 1.0)), dtype_of(a))
    scale = builder.add("Constant", [], f"{whole}.scale", value=numpy_helper.from_array(number))
    adapter = builder.add("Mul", [high, scale], f"{whole}.adapter")
    builder.add_as("Add", [frozen, adapter], whole)
    return builder.take()


def _insert(graph: GraphProto, branches: dict[str, list[NodeProto]]) -> None:
    """Put the branches behind their layers, in place. A layer computes the frozen result then, which the last node reads."""
    nodes = []
    for node in graph.node:
        branch = branches.get(node.output[0], []) if node.output else []
        if branch:
            node.output[0] = branch[-1].input[0]
        nodes += [node, *branch]
    refill(graph.node, nodes)


@explained
def merge_adapters(
    model: ModelProto | str | os.PathLike[str], data_beside: str | os.PathLike[str] | None = None
) -> ModelProto:
    """The model without its adapters: W + A·B·(α / rank) in the place of W. Beside a quantized weight they stay.

    A weight W that lies in a file is read, and the result holds the sum. Other external data is referenced, not read: save the
    result in the folder of the model.

    :param data_beside: the path of a model beside which the external data of `model` lies, if `model` is in memory.
    :raises OptionError: the model has no adapters.
    """
    source = opened(model, data_beside)
    made, merged = without_adapters(read(source, lift=False))
    tensors = {one.name: one.tensor for one in places(made)}
    with ExternalData(place_of(source)) as data:

        def rows(tensor: TensorProto) -> Callable[[slice], np.ndarray]:
            if isinstance(source, Opened) and is_external(tensor):
                return partial(data.array, tensor)
            refuse_external(tensor, PLACE_OF_DATA)
            return array_of(tensor).__getitem__

        sums = {name: np.concatenate([*one.sums(rows(tensors[name]))]) for name, one in merged.items()}
    return write_back(made, sums)


@dataclass(frozen=True)
class Merging:
    """The sum of a weight and its adapter."""

    left: np.ndarray  # A, or Bᵀ if the layers read the transposed weight
    right: np.ndarray
    factor: float

    def sums(self, weight: Callable[[slice], np.ndarray]) -> Iterator[np.ndarray]:
        """W + A·B·factor, some rows after the others. `weight` returns rows of W."""
        right = self.right.astype(np.float64)
        count = max(1, _BLOCK // max(1, right.shape[1]))
        for start in range(0, max(1, len(self.left)), count):
            part = slice(start, min(start + count, len(self.left)))
            held = weight(part)
            yield (held + self.left[part].astype(np.float64) @ right * self.factor).astype(held.dtype)


def without_adapters(source: ModelProto) -> tuple[ModelProto, dict[str, Merging]]:
    """A copy of the model without its adapters, and the sum to form for each adapted weight.

    A quantized weight cannot hold the sum, so its adapters stay.

    :raises OptionError: the model has no adapters.
    """
    kept = _adapters(source)
    if not kept:
        raise OptionError("The model has no adapters; refgrad.training.lora adds them.")
    if staying := {name: one for name, one in kept.items() if one.quantized}:
        notice(f"The adapters of {choices(staying, limit=3)} stay: a quantized weight cannot hold the sum.")
    kept = {name: one for name, one in kept.items() if name not in staying}
    tensors = {one.name: one.tensor for one in places(source)}
    merged = {}
    for name, one in kept.items():
        if missing := next((each for each in (name, one.A, one.B) if each not in tensors), ""):
            raise OptionError(f"The adapters that the metadata of the model names are not there: {missing!r}.")
        left, right = array_of(tensors[one.A]), array_of(tensors[one.B])
        if one.transposed:
            left, right = right.T, left.T
        due, got = list(tensors[name].dims), [*left.shape[:1], *right.shape[1:]]
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0] or due != got:
            raise OptionError(
                f"The adapters {one.A!r} and {one.B!r} that the metadata of the model names do not fit {name!r}."
            )
        merged[name] = Merging(left, right, one.factor)
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
    if staying:
        _write_down(made, staying)
    return made, merged


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
    quantized: bool = False


def _write_down(model: ModelProto, adapters: Mapping[str, _Adapter]) -> None:
    """Put a description of the adapters into the metadata."""
    kept = {name: adapter._asdict() for name, adapter in adapters.items()}
    model.metadata_props.add(key=_KEY, value=json.dumps(kept))


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
