"""Emitted nodes: what they are, which of them are needed, and how they are written.

They are written in the wire format of protobuf (https://protobuf.dev/programming-guides/encoding): a field is a byte with its
number, the length of what it holds, and that. To set the fields of as many NodeProto one after the other takes three times as
long, which was a third of the time that a gradient takes to build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

from google.protobuf.message import Message
from onnx import GraphProto, NodeProto, StringStringEntryProto, ValueInfoProto

from refgrad.protos.walk import attribute_of, subgraphs


@dataclass(slots=True, eq=False)
class Settings:
    """The attributes of emitted nodes: one object for all nodes that have the same. `captured` is what their graphs read."""

    attributes: dict[str, Any]
    captured: tuple[str, ...]


NO_SETTINGS = Settings({}, ())


class Emitted(NamedTuple):
    """A node of the gradient graph before its values have their final names.

    `owner` are the rule that emitted it and the name of the forward node that it belongs to.
    """

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: Settings
    name: str
    owner: tuple[str, str]
    optional_outputs: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the node sets."""
        return self.settings.attributes


def needed_emitted(nodes: Sequence[Emitted], live: set[str]) -> list[Emitted]:
    """The emitted nodes that the values in `live` need, to which whatever they read is added."""
    kept = []
    for emitted in reversed(nodes):
        if live.isdisjoint(emitted.outputs):
            continue
        if emitted.optional_outputs:
            emitted = emitted._replace(outputs=tuple([name if name in live else "" for name in emitted.outputs]))
        live.update(emitted.inputs)
        if emitted.settings.captured:
            live.update(emitted.settings.captured)
        kept.append(emitted)
    kept.reverse()
    return kept


COTANGENT_OF = (
    "refgrad.cotangent_of"  # the key under which a value has the list of the primals that it is the cotangent of
)
_PLAIN = re.compile(r"[\w/.:-]*", re.ASCII).fullmatch  # names without a character that JSON escapes
NAMESPACE = "namespace"  # the key under which torch writes the module of a node, and viewers look for groups
_OF_A_LENGTH = 2  # the wire type of strings and messages


def _field(message: type[Message], name: str) -> bytes:
    return bytes((message.DESCRIPTOR.fields_by_name[name].number << 3 | _OF_A_LENGTH,))


_NODE, _VALUE_INFO = (_field(GraphProto, name) for name in ("node", "value_info"))
_VALUE_NAME, _VALUE_METADATA = (_field(ValueInfoProto, name) for name in ("name", "metadata_props"))
_INPUT, _OUTPUT, _NAME, _OPERATOR = (_field(NodeProto, name) for name in ("input", "output", "name", "op_type"))
_KEY, _CONTENT = (_field(StringStringEntryProto, name) for name in ("key", "value"))
_ATTRIBUTE, _DOMAIN, _METADATA = (_field(NodeProto, name) for name in ("attribute", "domain", "metadata_props"))


class Writer:
    """Adds nodes to a graph when it is left.

    What recurs is encoded once: values, operators, sets of attributes, and the metadata of one forward node's gradient.
    """

    def __init__(
        self, graph: GraphProto, rename: Mapping[str, str], namespace: Callable[[str], bytes] | None = None
    ) -> None:
        """Write into `graph`, values by the names that `rename` gives them.

        :param namespace: the entry for viewers of what belongs to a forward node; None writes none.
        """
        self._graph = graph
        self._rename = rename
        self._namespace = namespace
        self._parts: list[bytes] = []
        self._values: dict[str, bytes] = {}
        self._operators: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        self._attributes: dict[Settings, bytes] = {}
        self._owner = "", ""  # nodes of one owner mostly follow each other
        self._metadata = b""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._graph.MergeFromString(b"".join(self._parts))

    def add(self, node: Emitted) -> None:
        """Add the node with final names; `metadata_props` tell the rule and the forward node that it comes from."""
        op_type, domain, inputs, outputs, settings, node_name, owner, _ = node
        known = self._values
        written = b""
        for name in inputs:
            written += _INPUT + (known.get(name) or self._value(name))
        for name in outputs:
            written += _OUTPUT + (known.get(name) or self._value(name))
        kind, behind = self._operators.get((op_type, domain)) or self._operator(op_type, domain)
        written += _NAME + _text(node_name) + kind
        if settings.attributes:
            written += self._attributes.get(settings) or self._written(settings)
        written += behind + (self._metadata if owner is self._owner else self._description(owner))
        self._parts.append(_NODE + _length(len(written)) + written)

    def copy(self, nodes: Iterable[NodeProto]) -> None:
        """Add nodes as they are."""
        self._parts.extend(_NODE + _sized(node) for node in nodes)

    def _value(self, name: str) -> bytes:
        written = self._values[name] = _text(self._rename.get(name, name))
        return written

    def _operator(self, op_type: str, domain: str) -> tuple[bytes, bytes]:
        written = self._operators[op_type, domain] = _OPERATOR + _text(op_type), _DOMAIN + _text(domain)
        return written

    def _written(self, settings: Settings) -> bytes:
        attributes = [attribute_of(name, value) for name, value in settings.attributes.items()]
        if settings.captured:  # no name within a graph is among those that are renamed
            pending = [graph for attribute in attributes for graph in subgraphs(attribute)]
            while pending:
                for node in pending.pop().node:
                    node.input[:] = [self._rename.get(name, name) for name in node.input]
                    pending += [graph for inner in node.attribute for graph in subgraphs(inner)]
        written = self._attributes[settings] = b"".join(_ATTRIBUTE + _sized(attribute) for attribute in attributes)
        return written

    def _description(self, owner: tuple[str, str]) -> bytes:
        rule, node = self._owner = owner
        self._metadata = _entry("refgrad.rule", rule) + entry("refgrad.node", node)
        if self._namespace is not None:
            self._metadata += self._namespace(node)
        return self._metadata

    def declare(self, name: str, like: ValueInfoProto, primals: Sequence[str]) -> None:
        """Declare a value, by its name in the result, as another one is: of two names the last counts.

        :param primals: the values that it is the cotangent of.
        """
        if like.metadata_props:  # they are those of the other one
            like = ValueInfoProto(name=name, type=like.type)
        of = _COTANGENT_OF + _text(listed(primals))
        written = like.SerializeToString() + _VALUE_NAME + _text(name) + _VALUE_METADATA + _length(len(of)) + of
        self._parts.append(_VALUE_INFO + _length(len(written)) + written)


def write(graph: GraphProto, nodes: Iterable[Emitted], rename: Mapping[str, str] | None = None) -> None:
    """Add emitted nodes to a graph, values by the names that `rename` gives them."""
    with Writer(graph, rename or {}) as writer:
        for node in nodes:
            writer.add(node)


def listed(names: Sequence[str]) -> str:
    """A list of names as JSON."""
    if names and all(map(_PLAIN, names)):  # as mostly: json.dumps would take as long as all else of the value
        return '["' + '", "'.join(names) + '"]'
    return json.dumps(names)


@cache
def _entry(key: str, value: str) -> bytes:
    return entry(key, value)


def entry(key: str, value: str) -> bytes:
    """An entry of a node's metadata."""
    written = _KEY + _text(key) + _CONTENT + _text(value)
    return _METADATA + _length(len(written)) + written


@cache
def _length(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first; all but the last have the eighth bit set."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes((*groups, number))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _length(len(encoded)) + encoded


_COTANGENT_OF = _KEY + _text(COTANGENT_OF) + _CONTENT


def _sized(message: Message) -> bytes:
    written = message.SerializeToString()
    return _length(len(written)) + written
