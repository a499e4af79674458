"""The type and the shape of an output of an operator, as far as the inputs tell them before it is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto, helper

UNKNOWN_SHAPE = "refgrad.unknown_shape"  # a vector of unknown length: as a shape it says nothing


@dataclass(frozen=True)
class Result:
    """The known type and shape of an output; `cast` is the attribute that may change its element type."""

    cast: str = ""

    def stand_ins(self, inputs: Mapping[str, str], place: str, output: str, to: int = 0) -> list[NodeProto]:
        """Nodes of ai.onnx that make an `output` of that type and shape; none where a value that tells it is absent.

        :param inputs: the values that the node reads, by the operator's names for them.
        :param place: the value that it reads in the place that the output has among the outputs.
        :param to: the element type that the attribute `cast` gives; 0 where it does not.
        """
        made = self._nodes(inputs, place, f"{output}/other" if to else output)
        if made and to:
            made.append(helper.make_node("Cast", [f"{output}/other"], [output], to=to))
        return made

    def _nodes(self, inputs: Mapping[str, str], place: str, output: str) -> list[NodeProto]:
        raise NotImplementedError


@dataclass(frozen=True)
class _Like(Result):
    name: str = ""

    def _nodes(self, inputs: Mapping[str, str], place: str, output: str) -> list[NodeProto]:
        value = inputs.get(self.name, "") if self.name else place
        return [helper.make_node("Identity", [value], [output])] if value else []


@dataclass(frozen=True)
class _Typed(Result):
    name: str = ""

    def _nodes(self, inputs: Mapping[str, str], place: str, output: str) -> list[NodeProto]:
        value = inputs.get(self.name, "")
        return [helper.make_node("Reshape", [value, UNKNOWN_SHAPE], [output])] if value else []


@dataclass(frozen=True)
class _Shaped(Result):
    shape: str = ""
    name: str = ""

    def _nodes(self, inputs: Mapping[str, str], place: str, output: str) -> list[NodeProto]:
        shape, value, zeros = inputs.get(self.shape, ""), inputs.get(self.name, ""), f"{output}/some"
        if not shape or not value:
            return []
        return [
            helper.make_node("ConstantOfShape", [shape], [zeros]),
            helper.make_node("CastLike", [zeros, value], [output]),
        ]


@dataclass(frozen=True)
class _Elements(Result):
    kind: int = 0

    def _nodes(self, inputs: Mapping[str, str], place: str, output: str) -> list[NodeProto]:
        some = f"{output}/some"
        return [
            helper.make_node("Reshape", [UNKNOWN_SHAPE, UNKNOWN_SHAPE], [some]),
            helper.make_node("Cast", [some], [output], to=self.kind),
        ]


def like(name: str, cast: str = "") -> Result:
    """The type and the shape of an input."""
    return _Like(cast, name)


def typed(name: str, cast: str = "") -> Result:
    """The element type of an input; nothing is known of the shape."""
    return _Typed(cast, name)


def shaped(shape: str, name: str) -> Result:
    """The shape that the input `shape` holds, and the element type of the input `name`."""
    return _Shaped("", shape, name)


def elements(kind: int) -> Result:
    """The given element type; nothing is known of the shape."""
    return _Elements("", kind)


PASSED = _Like()  # the type and the shape of the input in the same place
