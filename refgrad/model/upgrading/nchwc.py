"""Models in the layout of a processor (com.microsoft.nchwc), read back into plain operators.

ONNX Runtime saves them at level ORT_ENABLE_ALL. The channels of tensors lie in blocks, as many at once as fit in a
register of the processor, and their number is rounded up to whole blocks. The filters of convolutions lie in the same way:
(O, I, ...) as (O/b, ..., b) where the input is an ordinary tensor or each channel has its own filter, else as
(O/b, I/b, ..., b, b). The plain model has every tensor as the specification of ai.onnx has it, without the added channels.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad import traits
from refgrad.errors import InvalidModelError
from refgrad.model import native
from refgrad.notices import notice
from refgrad.protos.domains import MICROSOFT, NCHWC
from refgrad.protos.traverse import (
    attribute_value,
    forget_domain,
    fresh,
    graphs,
    import_domain,
    names_of,
    refill,
    rename_values,
)
from refgrad.tables.runtime_operators import runtime_operators

_BLOCKS = (8, 16)  # channels: 8 with registers of 32 bytes, 16 with registers of 64 bytes and on ARM
_ALIGNED = 4  # reordered tensors have a multiple of this number of channels
# What ONNX Runtime lets stand between the operators of the layout: each element for itself, besides Concat.
_ELEMENTWISE = traits.ELEMENTWISE | {"QuickGelu"}
_INLINED = "_inlfunc_"
_EXPORT = "Save the model again with ORT_ENABLE_EXTENDED or less."


class _Channels:
    """The channels of the tensors that have the same ones: how many there are with those added, and without."""

    def __init__(self, padded: int) -> None:
        self.padded, self.known = padded, 0
        self.parent: _Channels | None = None

    def root(self) -> _Channels:
        root = self
        while root.parent is not None:
            root = root.parent
        return root

    def same_as(self, other: _Channels, where: str) -> None:
        """Take `other` for the same channels."""
        mine, others = self.root(), other.root()
        if mine is others:
            return
        mine.padded = mine.padded or others.padded
        others.padded = others.padded or mine.padded
        if mine.padded != others.padded:
            raise InvalidModelError(f"{where} joins {mine.padded} channels and {others.padded}. {_EXPORT}")
        if mine.known:
            others.say(mine.known, where)
        mine.parent = others

    def say(self, count: int, where: str) -> None:
        """Without those added there are `count`."""
        mine = self.root()
        if not 0 < count <= (mine.padded or count) or (mine.known and mine.known != count):
            raise InvalidModelError(
                f"{where} has {count} channels, where there are {mine.known or mine.padded}. {_EXPORT}"
            )
        mine.known = count

    def whole(self, where: str) -> int:
        """None was added, as blocks are joined whole: how many there are, or 0 where that is not known."""
        mine = self.root()
        if count := mine.padded or mine.known:
            mine.padded = count
            mine.say(count, where)
        return count


@dataclass
class _Filter:
    """A convolution's weights: how they lie, and whose channels their first two axes are."""

    node: str
    tensor: TensorProto
    bias: TensorProto | None
    blocked: bool  # the input is in blocks too
    made: _Channels
    read: _Channels | None  # None: its second axis is as it was
    plain: NodeProto
    alone: bool  # each channel has its own filter
    array: np.ndarray = field(default_factory=lambda: np.zeros(0))


def in_layout(model: ModelProto) -> bool:
    """True if the model has operators in the layout of a processor."""
    return any(opset.domain == NCHWC for opset in model.opset_import) and any(
        node.domain == NCHWC for graph in graphs(model.graph) for node in graph.node
    )


def filters(model: ModelProto) -> list[TensorProto]:
    """The initializers that are in the layout too: the filters of its convolutions, and their biases."""
    names = {name for n in model.graph.node if n.domain == NCHWC and n.op_type == "Conv" for name in n.input[1:3]}
    return [t for t in model.graph.initializer if t.name in names]


def plain_layout(model: ModelProto, array_of: Callable[[TensorProto], np.ndarray]) -> ModelProto:
    """A copy of `model` in plain operators. Filters and biases keep their names.

    :param array_of: reads an initializer.
    :raises InvalidModelError: its tensors do not fit the layout, or an operator reads them that the layout does not know.
    """
    return _Reading(model, array_of).plain()


class _Reading:
    def __init__(self, model: ModelProto, array_of: Callable[[TensorProto], np.ndarray]) -> None:
        self._model = model
        self._array_of = array_of
        self._tensors = {t.name: t for t in model.graph.initializer}
        self._channels: dict[str, _Channels] = {}  # of the values in the layout
        self._filters: list[_Filter] = []
        self._reordered: list[_Channels] = []  # of the tensors that a ReorderInput put into the layout
        self._declared: dict[str, int] = {}  # ordinary tensors of rank 4: how many channels they have

    def plain(self) -> ModelProto:
        if any(n.domain == NCHWC and n.op_type == "ReorderInput" for n in self._model.graph.node):
            self._declared = self._declarations()
        nodes = [self._node(node) for node in self._model.graph.node]
        for graph in graphs(self._model.graph):
            if graph is not self._model.graph and any(n.domain == NCHWC for n in graph.node):
                raise InvalidModelError(f"A subgraph is in the layout of a processor ({NCHWC}). {_EXPORT}")
        for value in self._model.graph.output:
            if value.name in self._channels:
                raise InvalidModelError(
                    f"The output {value.name!r} is in the layout of a processor ({NCHWC}). {_EXPORT}"
                )
        block = self._block()
        for blocked_filter in self._filters:
            blocked_filter.array = self._unblocked(blocked_filter, block)
        self._count()
        converted = ModelProto()
        converted.CopyFrom(self._without_filters())
        refill(converted.graph.node, (new for several in nodes for new in several))
        refill(converted.graph.value_info, (v for v in converted.graph.value_info if v.name not in self._channels))
        converted.graph.initializer.extend(self._initializers())
        forget_domain(converted, NCHWC)
        if any(node.domain == MICROSOFT for node in converted.graph.node):
            import_domain(converted, MICROSOFT)
        _rename_inlined(converted)
        return converted

    # The nodes

    def _node(self, node: NodeProto) -> Iterable[NodeProto]:
        if node.domain == NCHWC:
            return list(self._of_layout(node))
        inside = [name for name in node.input if name in self._channels]
        if not inside:
            return [node]
        where = _shown(node)
        if node.op_type == "Concat" and node.domain == "" and len(inside) == len(node.input):
            if _attribute(node, "axis", 1) not in (1, -3):
                raise InvalidModelError(f"{where} does not join channels. {_EXPORT}")
            counts = [self._channels[name].whole(where) for name in inside]
            self._channels[node.output[0]] = total = _Channels(sum(counts) if all(counts) else 0)
            total.whole(where)
            return [node]
        others = [name for name in node.input if name and name not in self._channels]
        if node.op_type not in _ELEMENTWISE or not all(self._is_number(name) for name in others):
            raise InvalidModelError(
                f"{where} reads {inside[0]!r}, which is in the layout of a processor ({NCHWC}), and may mix its channels. "
                f"{_EXPORT}"
            )
        first = self._channels[inside[0]]
        for name in inside[1:]:
            first.same_as(self._channels[name], where)
        self._channels.update(dict.fromkeys(filter(None, node.output), first))
        return [node]

    def _of_layout(self, node: NodeProto) -> Iterator[NodeProto]:
        where, output = _shown(node), node.output[0]
        last = _attribute(node, "channels_last", 0)
        if node.op_type == "ReorderInput":
            source = node.input[0]
            if source in self._channels:
                raise InvalidModelError(f"{where} reorders what is in the layout already. {_EXPORT}")
            self._channels[output] = channels = _Channels(0)  # as many as those that read it say
            if source in self._declared:
                channels.say(self._declared[source], f"{source!r}")
            self._reordered.append(channels)
            yield _moved(node, [0, 3, 1, 2] if last else None)
        elif node.op_type == "ReorderOutput":
            self._inside(node, 0).say(_attribute(node, "channels", 0), where)
            yield _moved(node, [0, 2, 3, 1] if last else None)
        elif node.op_type == "Conv":
            yield self._conv(node)
        elif node.op_type in traits.POOLS and (NCHWC, node.op_type) in runtime_operators():
            self._channels[output] = self._inside(node, 0)
            plain_node = NodeProto()
            plain_node.CopyFrom(node)
            plain_node.domain = ""
            yield plain_node
        elif node.op_type == "Upsample":
            self._channels[output] = self._inside(node, 0)
            yield from _resize(node)
        else:
            raise InvalidModelError(f"{where}: {NCHWC} has no operator {node.op_type} that is known. {_EXPORT}")

    def _conv(self, node: NodeProto) -> NodeProto:
        where = _shown(node)
        weights = self._initializer(node, 1)
        bias = self._initializer(node, 2) if len(node.input) > 2 and node.input[2] else None
        if len(weights.dims) != 4:
            raise InvalidModelError(
                f"{where} has filters {weights.name!r} of shape {list(weights.dims)}, not of rank 4. {_EXPORT}"
            )
        count, each = weights.dims[:2]
        if bias is not None and list(bias.dims) != [count]:
            raise InvalidModelError(f"{where} has {count} filters and a bias of shape {list(bias.dims)}. {_EXPORT}")
        group = _attribute(node, "group", 1)
        channels, read, alone = _Channels(count), None, False
        blocked = node.input[0] in self._channels
        if blocked and group > 1 and group == count and each == 1:
            channels, blocked, alone = self._inside(node, 0, count), False, True
        elif blocked:
            taken = self._inside(node, 0, each * group)
            if group > 1:  # whole blocks
                taken.say(taken.root().padded, where)
                channels.say(count, where)
            else:
                read = taken
        elif group > 1:
            channels.say(count, where)
        self._channels[node.output[0]] = channels
        if len(node.input) > 3 and node.input[3]:
            channels.same_as(self._inside(node, 3), where)
        copy = NodeProto()
        copy.CopyFrom(node)
        fused = (len(node.input) > 3 and node.input[3]) or _attribute(node, "activation", "")
        copy.op_type, copy.domain = ("FusedConv", MICROSOFT) if fused else ("Conv", "")
        if all(a.name != "kernel_shape" for a in copy.attribute):
            copy.attribute.append(helper.make_attribute("kernel_shape", list(weights.dims[2:])))
        self._filters.append(_Filter(where, weights, bias, blocked, channels, read, copy, alone))
        return copy

    def _inside(self, node: NodeProto, position: int, padded: int = 0) -> _Channels:
        """The channels of an input that is in the layout; with those added there are `padded`, where that is known."""
        channels = self._channels.get(node.input[position])
        if channels is None:
            raise InvalidModelError(
                f"{_shown(node)} reads {node.input[position]!r}, which is not in the layout. {_EXPORT}"
            )
        root = channels.root()
        root.padded = root.padded or padded
        if padded and root.padded != padded:
            raise InvalidModelError(f"{_shown(node)} reads {padded} channels, where there are {root.padded}. {_EXPORT}")
        return root

    def _initializer(self, node: NodeProto, position: int) -> TensorProto:
        tensor = self._tensors.get(node.input[position])
        if tensor is None:
            raise InvalidModelError(
                f"{_shown(node)} has filters {node.input[position]!r} that are no initializer. {_EXPORT}"
            )
        return tensor

    def _is_number(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and math.prod(tensor.dims) == 1

    # The filters

    def _block(self) -> int:
        """How many channels a block has: what the shapes of the model leave open is as on this machine."""
        possible = [block for block in _BLOCKS if all(_fits(blocked_filter, block) for blocked_filter in self._filters)]
        roots = {id(root): root for root in (c.root() for c in self._channels.values())}.values()
        possible = [
            block
            for block in possible
            if all(not r.known or r.padded == -(-r.known // block) * block for r in roots if r.padded)
        ]
        if not possible:
            raise InvalidModelError(f"The filters of the model do not fit any layout in blocks of {_BLOCKS}. {_EXPORT}")
        if len(possible) == 1 or not self._filters:
            return possible[0]
        here = _of_this_machine()
        if here not in possible:
            raise InvalidModelError(f"The model does not say in which layout it is: in blocks of {possible}. {_EXPORT}")
        notice(
            f"The model is in the layout of a processor ({NCHWC}) and does not say in which. It is read as ONNX Runtime reads "
            f"it on this machine: in blocks of {here} channels. {_EXPORT}"
        )
        return here

    def _unblocked(self, blocked_filter: _Filter, block: int) -> np.ndarray:
        array = self._array_of(blocked_filter.tensor)
        count, each, height, width = array.shape
        if blocked_filter.blocked:
            parts = array.reshape(count // block, each // block, height, width, block, block)
            return parts.transpose(0, 5, 1, 4, 2, 3).reshape(array.shape)
        return array.reshape(count // block, each, height, width, block).transpose(0, 4, 1, 2, 3).reshape(array.shape)

    def _count(self) -> None:
        """Find the channels without those added: as the model says, else those before the ones that are 0 everywhere."""
        aligned = {id(channels.root()) for channels in self._reordered}
        last: dict[int, int] = {}
        for blocked_filter in self._filters:
            rows = blocked_filter.array.any((1, 2, 3))
            if blocked_filter.bias is not None:
                rows = rows | self._array_of(blocked_filter.bias).astype(bool)
            used = [(blocked_filter.made, rows)]
            if blocked_filter.read is not None:
                used.append((blocked_filter.read, blocked_filter.array.any((0, 2, 3))))
            for channels, nonzero in used:
                root = id(channels.root())
                last[root] = max(last.get(root, 1), int(np.flatnonzero(nonzero)[-1]) + 1 if nonzero.any() else 1)
        for blocked_filter in self._filters:
            for either in (blocked_filter.made, blocked_filter.read):
                if either is not None and not (these := either.root()).known:
                    step = _ALIGNED if id(these) in aligned else 1
                    these.known = min(these.padded, -(-last[id(these)] // step) * step)
        for blocked_filter in self._filters:
            for attribute in blocked_filter.plain.attribute:
                if blocked_filter.alone and attribute.name == "group":
                    attribute.i = blocked_filter.made.root().known

    def _declarations(self) -> dict[str, int]:
        """The channels of the ordinary tensors of rank 4, as far as the model declares them, or they follow from that."""
        blocked = self._blocked()
        stub = ModelProto(ir_version=self._model.ir_version, opset_import=self._model.opset_import)
        graph = stub.graph
        graph.name = "graph"
        graph.node.extend(self._model.graph.node)
        graph.input.extend(self._model.graph.input)
        graph.value_info.extend(v for v in self._model.graph.value_info if v.name not in blocked)
        typed = {v.name for v in (*graph.value_info, *graph.input)}
        graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
            for t in self._tensors.values()
            if t.name not in typed
        )
        for node in self._model.graph.node:
            if node.domain == NCHWC and node.op_type == "ReorderOutput" and node.output[0] not in typed:
                sizes = [None, _attribute(node, "channels", 0), None, None]
                sizes = [sizes[k] for k in (0, 2, 3, 1)] if _attribute(node, "channels_last", 0) else sizes
                graph.value_info.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, sizes))
        inferred = native.infer_shapes(stub).graph
        last = {
            node.input[0]
            for node in self._model.graph.node
            if node.op_type == "ReorderInput" and _attribute(node, "channels_last", 0)
        }
        channels = {}
        for value in (*inferred.input, *inferred.value_info):
            dims = value.type.tensor_type.shape.dim
            if len(dims) == 4:
                channels[value.name] = dims[3 if value.name in last else 1].dim_value
        return {name: count for name, count in channels.items() if count and name not in blocked}

    def _blocked(self) -> set[str]:
        """The values in the layout."""
        names: set[str] = set()
        for node in self._model.graph.node:
            if node.op_type != "ReorderOutput" if node.domain == NCHWC else not names.isdisjoint(node.input):
                names.update(node.output)
        return names

    # The model

    def _without_filters(self) -> ModelProto:
        names = {
            t.name
            for blocked_filter in self._filters
            for t in (blocked_filter.tensor, blocked_filter.bias)
            if t is not None
        }
        skeleton = ModelProto()
        for part, value in self._model.ListFields():
            if part.name != "graph":
                _put(skeleton, part.name, value)
        for part, value in self._model.graph.ListFields():
            if part.name == "initializer":
                skeleton.graph.initializer.extend(t for t in value if t.name not in names)
            elif part.name != "node":
                _put(skeleton.graph, part.name, value)
        return skeleton

    def _initializers(self) -> Iterator[TensorProto]:
        arrays: dict[str, np.ndarray] = {}

        def add(tensor: TensorProto, array: np.ndarray) -> Iterator[TensorProto]:
            if tensor.name not in arrays:
                arrays[tensor.name] = array
                yield numpy_helper.from_array(np.ascontiguousarray(array), tensor.name)
            elif not np.array_equal(arrays[tensor.name], array):
                raise InvalidModelError(f"Two convolutions read the filters {tensor.name!r} in two ways. {_EXPORT}")

        for blocked_filter in self._filters:
            count = blocked_filter.made.root().known
            each = blocked_filter.array.shape[1] if blocked_filter.read is None else blocked_filter.read.root().known
            yield from add(blocked_filter.tensor, blocked_filter.array[:count, :each])
            if blocked_filter.bias is not None:
                yield from add(blocked_filter.bias, self._array_of(blocked_filter.bias)[:count])


def _put(message: ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    if isinstance(value, str | int):
        setattr(message, name, value)
    else:
        getattr(message, name).extend(value)


def _fits(blocked_filter: _Filter, block: int) -> bool:
    count, each = blocked_filter.tensor.dims[:2]
    if count % block:
        return False
    if blocked_filter.blocked:
        return bool(each % block == 0)
    return each < block


def _of_this_machine() -> int:
    """The block of channels of ONNX Runtime on this processor, 0 where that is not known."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 16
    core = getattr(np, "_core", None)  # NumPy asks the processor what it has, and tells by no public name
    features = getattr(getattr(core, "_multiarray_umath", None), "__cpu_features__", {})
    return 0 if "AVX512F" not in features else 16 if features["AVX512F"] else 8


def _moved(node: NodeProto, order: list[int] | None) -> NodeProto:
    if order is None:
        return helper.make_node("Identity", node.input, node.output, node.name)
    return helper.make_node("Transpose", node.input, node.output, node.name, perm=order)


def _resize(node: NodeProto) -> Iterator[NodeProto]:
    scales = np.array(_attribute(node, "scales", [1, 1, 1, 1]), np.float32)
    name = f"{node.output[0]}_scales"
    yield helper.make_node("Constant", [], [name], value=numpy_helper.from_array(scales))
    yield helper.make_node(
        "Resize",
        [node.input[0], "", name],
        node.output,
        node.name,
        mode=_attribute(node, "mode", "nearest"),
        coordinate_transformation_mode=_attribute(node, "coordinate_transformation_mode", "asymmetric"),
        nearest_mode="floor",
    )


def _rename_inlined(model: ModelProto) -> None:
    """Rename what ONNX Runtime named as it inlined functions: it gives the names again to the next that it inlines."""
    taken = names_of(model.graph)
    renamed = {name for node in model.graph.node for name in node.output if name.startswith(_INLINED)}
    names = {name: fresh(name.removeprefix(_INLINED), taken) for name in sorted(renamed)}
    for node in model.graph.node:
        rename_values(node, names)
    for value in (*model.graph.value_info, *model.graph.output):
        value.name = names.get(value.name, value.name)


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((attribute_value(a) for a in node.attribute if a.name == name), default)


def _shown(node: NodeProto) -> str:
    return f"Node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
