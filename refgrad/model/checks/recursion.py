"""Refusals of functions that call themselves, or whose calls, written out, become too many nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from onnx import FunctionProto, ModelProto

from refgrad.errors import InvalidModelError, OptionError
from refgrad.protos.traverse import nested

LIMIT = "REFGRAD_MAX_NODES"  # the environment variable with the number of nodes that calls may become
_MOST = 250_000
_BYTES = 16 << 20  # calls may become that large in any case
_GROWTH = 32  # calls may become that many times as large as the model


def refuse_growth(model: ModelProto) -> None:
    """Refuse a model whose calls, written out, would be too many nodes or too many bytes. Each level of calls may double both.

    :raises InvalidModelError: the calls become too large; the error names the function with the largest body, and the number
        of nodes.
    :raises OptionError: the environment variable is no number.
    """
    if not model.functions:
        return
    given = os.environ.get(LIMIT, str(_MOST))
    if not given.isdecimal():
        raise OptionError(f"The environment variable {LIMIT} is {given!r}, which is no number of nodes.")
    limit = int(given)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    lengths: dict[tuple[str, str, str], int] = {}  # in bytes: names and texts are repeated as often as the nodes
    for first in functions:
        pending = [first]
        while pending:
            called = list(_calls(functions[pending[-1]]))
            if left := [key for key in dict.fromkeys(called) if key in functions and key not in sizes]:
                pending += left
            else:
                key = pending.pop()
                sizes[key] = sum(sizes.get(one, 1) for one in called)
                lengths[key] = functions[key].ByteSize() + sum(lengths.get(one, 0) for one in called)
    calls = [(node.domain, node.op_type, node.overload) for node in nested(model.graph.node)]
    count, length = sum(sizes.get(key, 1) for key in calls), sum(lengths.get(key, 0) for key in calls)
    if count > limit:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidModelError(
            f"Written out, the calls of functions would be {count} nodes, {sizes[largest]} for each call of function "
            f"{_called(largest)!r}; at most {limit} are made. Call fewer, or set the environment variable "
            f"{LIMIT} to a larger number."
        )
    if length > _BYTES and length > _GROWTH * model.ByteSize():
        raise InvalidModelError(
            f"Written out, the calls of functions would be {length >> 20} MiB of nodes, {length // model.ByteSize()} times "
            "the model: it has long names or texts in functions that are called often. Shorten them."
        )


def refuse_recursion(functions: Iterable[FunctionProto]) -> None:
    """Refuse functions that call themselves, directly or through others.

    :raises InvalidModelError: there is a cycle; the error names its functions in the order of their calls.
    """
    known = {(f.domain, f.name, f.overload): f for f in functions}
    left: set[tuple[str, str, str]] = set()
    for first in known:
        path = {first: _calls(known[first])}  # the functions that are being read, each called by the one before it
        while path and first not in left:
            last = next(reversed(path))
            called = next((key for key in path[last] if key in known and key not in left), None)
            if called is None:
                left.add(last)
                del path[last]
            elif called in path:
                keys = list(path)
                cycle = " -> ".join(map(_called, [*keys[keys.index(called) :], called]))
                raise InvalidModelError(
                    f"A function of the model calls itself: {cycle}. ONNX has no recursion: write a Loop, or the calls "
                    "out."
                )
            else:
                path[called] = _calls(known[called])


def _calls(function: FunctionProto) -> Iterator[tuple[str, str, str]]:
    return ((node.domain, node.op_type, node.overload) for node in nested(function.node))


def _called(key: tuple[str, str, str]) -> str:
    return ".".join(str(part) for part in key if part)  # a part that is not UTF-8 is bytes
