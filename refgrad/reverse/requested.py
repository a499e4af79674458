"""The inputs and outputs that `wrt` and `outputs` ask for, checked against the model."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from onnx import helper

from refgrad import traits
from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.model.graph import Graph
from refgrad.protos.domains import ML
from refgrad.protos.traverse import names_of, subgraphs
from refgrad.protos.types import FLOATS
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import RULES
from refgrad.tables.schemas import find_schema

_FEW = 3  # values that a message names
_WILDCARDS = frozenset("*?[")  # of fnmatch


def requested_outputs(graph: Graph, outputs: Sequence[str] | None) -> list[str]:
    """The outputs to differentiate; None asks for every float output.

    :raises OptionError: the argument is not a list of names, or is empty.
    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    floats = [name for name in graph.outputs if graph.element_type(name) in FLOATS]
    if outputs is None:
        if not floats:
            raise UnknownNameError(
                f"The model has no float output, and only floats have a derivative. Its outputs: {choices(graph.outputs)}."
                f"{_floats_before(graph)}{of_maps(graph)}"
            )
        return floats
    return _checked("outputs", outputs, graph, floats, "output")


def _floats_before(graph: Graph) -> str:
    """The end of a message: the last floats that the outputs are computed from, and advice."""
    wanted, found = set(graph.outputs), dict[str, None]()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            for name in node.reads:
                if name in graph.producer and graph.element_type(name) in FLOATS and name not in graph.containers:
                    found[name] = None
                else:
                    wanted.add(name)
    if not found:
        return " It computes no float from which they come."
    name = next(iter(found))
    return (
        f" They are computed from {choices(found, limit=_FEW)}. Make one of these an output, with "
        f"refgrad.select_model_inputs_outputs(model, [{name!r}])."
    )


def _floats_behind(graph: Graph, name: str) -> str:
    """The end of a message: the first floats that are computed from an input that is no float, and advice."""
    found = first_floats(graph, [name])
    if not found:
        return ""
    return (
        f" The first floats computed from it are {choices(found, limit=_FEW)}: make an input of one, with "
        f"refgrad.select_model_inputs_outputs(model, None, [{found[0]!r}], keep_inputs=True)."
    )


def first_floats(graph: Graph, names: Iterable[str]) -> list[str]:
    """The first floats that are computed from these integers, such as the rows of an embedding."""
    whole, found = set(names), dict[str, None]()
    for node in graph.nodes:
        if whole.isdisjoint(node.reads):
            continue
        for name in node.outputs:
            if graph.element_type(name) not in FLOATS:
                whole.add(name)
            elif node.key[1] not in traits.CASTS:
                found[name] = None
    return list(found)


def of_maps(graph: Graph) -> str:
    """The end of a message: the scores of a classifier that a ZipMap makes maps of, and advice. "" if there is no ZipMap."""
    maps = [node.inputs[0] for node in graph.nodes if node.key == (ML, "ZipMap")]
    if not maps:
        return ""
    return (
        f" ZipMap made maps of the numbers {choices(maps)}, and maps have no derivative. Export the model without it, in "
        "skl2onnx with to_onnx(..., options={'zipmap': False})."
    )


def requested_wrt(graph: Graph, wrt: Sequence[str] | None) -> list[str]:
    """The inputs and initializers to differentiate by; None asks for every float input and every weight.

    :raises OptionError: the argument is not a list of names, or is empty.
    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    known = [*graph.inputs, *(name for name in graph.initializers if name not in graph.inputs)]
    floats = [name for name in known if graph.element_type(name) in FLOATS]
    if wrt is None or _has_pattern(wrt, known):
        settings = _settings(graph)
        usual = [name for name in floats if name in graph.inputs or (graph.is_weight(name) and name not in settings)]
        if wrt is None:
            return usual
        wrt = matching(wrt, known, usual)
    return _checked("wrt", wrt, graph, floats, "input or initializer")


def _has_pattern(names: Any, known: Sequence[str]) -> bool:
    """True if some of the names are patterns: no input and no initializer is called so."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return False
    return any(_WILDCARDS.intersection(name) and name not in known for name in names)


def matching(names: Sequence[str], known: Sequence[str], usual: Sequence[str], what: str = "wrt") -> list[str]:
    """The names, and those that a pattern matches in its place, each once.

    :param known: the names that the model has, which are no patterns.
    :param usual: those that a pattern may match.
    :param what: the argument that has the names.
    :raises UnknownNameError: a pattern matches nothing.
    """
    matches: list[str] = []
    plain = {name for name in names if not _has_pattern([name], known)}
    for name in names:
        if name in plain:
            matches.append(name)
            continue
        matched = [known_name for known_name in usual if fnmatchcase(known_name, name)]
        if not matched:
            raise UnknownNameError(
                f"The pattern {name!r} in {what} matches no float input and no float initializer of the model. "
                f"It has: {choices(usual)}."
            )
        matches += [known_name for known_name in matched if known_name not in matches and known_name not in plain]
    return matches


def _settings(graph: Graph) -> set[str]:
    """The values that nodes read only as settings of their operators: the scales of Resize are floats, but no weights."""
    settings: set[str] = set()
    others: set[str] = set()
    for node in graph.nodes:
        known = RULES.get(node.key) or DEFINITIONS.get(node.key)
        if known is None or not known.settings:
            others.update(node.reads)
            continue
        schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
        for parameter, name in zip(schema.inputs, node.inputs, strict=False):
            (settings if parameter.name in known.settings else others).add(name)
    return settings - others


def _checked(argument: str, names: object, graph: Graph, floats: list[str], kind: str) -> list[str]:
    if isinstance(names, str):
        raise OptionError(f"{argument} is a list of names, not a string: [{names!r}].")
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise OptionError(
            f"{argument} is a list of names (strings), not {reprlib.repr(names)}; the model has: {choices(floats)}."
        )
    if not names:
        raise OptionError(f"{argument} is empty; the model has: {choices(floats)}.")
    boundary = {*graph.outputs} if argument == "outputs" else {*graph.inputs, *graph.initializers}
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UnknownNameError(f"{argument} has {name!r} twice.")
        if name in floats:
            continue
        if name in boundary:
            kinds = kind.replace(" or ", "s or ") + "s"
            has = f"the float {kinds} {choices(floats)}" if floats else f"no float {kinds}"
            raise UnknownNameError(
                f"{name!r} in {argument} {_what(graph, name)}: only floats have a derivative. The model has {has}."
                f"{of_maps(graph) if argument == 'outputs' else _floats_behind(graph, name)}"
            )
        raise UnknownNameError(
            f"{name!r} in {argument} is not {'a float' if argument == 'wrt' else 'an'} {kind} of the model"
            f"{place_of(graph, name, argument)}.{'' if name in graph.producer else did_you_mean(name, floats)} "
            f"There are: {choices(floats)}."
        )
    return list(names)


def place_of(graph: Graph, name: str, argument: str) -> str:
    """The end of a sentence: the place of a value that is neither an input nor an output of the model, and advice."""
    if name in graph.producer:
        advice = (
            f"Make it an output first: refgrad.select_model_inputs_outputs(model, [{name!r}])"
            if argument == "outputs"
            else f"Make it an input first: refgrad.select_model_inputs_outputs(model, None, [{name!r}], keep_inputs=True)"
        )
        return f"; it is an intermediate result of node {graph.producer[name].name!r}. {advice}"
    for node in graph.nodes:
        bodies = (body for attribute in node.proto.attribute for body in subgraphs(attribute))
        if any(name in names_of(body) for body in bodies):
            return f", but a value in the body of node {node.name!r}"
    return ""


def _what(graph: Graph, name: str) -> str:
    kind = graph.element_type(name)
    if not kind:
        return "is no tensor"
    has = "holds tensors of type " if name in graph.containers else "has type "
    return has + helper.tensor_dtype_to_string(kind).removeprefix("TensorProto.").lower()
