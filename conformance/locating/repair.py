"""The proof that a node is to blame: with the right value in the place of its own the results are right, but for rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends import Backend, get_backend
from refgrad.conformance.locating.replay import Progress, Replay, Replayed, wrong_nodes
from refgrad.errors import RefgradError
from refgrad.protos.walk import refill

_MOST = 12  # nodes that are tried at each turn
_ROUNDINGS = 16.0  # how much further off than the interpreter results may be that count as right
_PART = 1e-4  # of the largest element of all results: a result that is smaller throughout counts as so large
_FLOOR = 1e-6  # of the largest element: results that are closer than this are right in float32


@dataclass(frozen=True)
class Culprit:
    """A node that is wrong, and the error of the results once it and those before it in the list are repaired."""

    found: Replayed
    left: float


@dataclass(frozen=True)
class Located:
    """Where the results of a model on an executor come from that are wrong.

    `error` is the largest one of the results, relative to the largest element of each; `culprits` are the nodes that take it
    away, in the order of their shares; `rounding` is what the interpreter loses in the same types. `acquitted` are nodes that
    are wrong for themselves and whose repair changes nothing in the results. `failed` says why the executor does not run the
    model, `unexplained` whether an error is left that no node has.
    """

    error: float
    rounding: float
    culprits: tuple[Culprit, ...] = ()
    acquitted: tuple[Replayed, ...] = ()
    failed: str = ""
    judged: int = 0
    unjudged: tuple[Replayed, ...] = ()

    @property
    def left(self) -> float:
        """The error of the results when every culprit is repaired."""
        return self.culprits[-1].left if self.culprits else self.error

    @property
    def is_right(self) -> bool:
        """Whether the results are right but for rounding, as they are."""
        return not self.failed and _is_rounding(self.error, self.rounding)

    @property
    def unexplained(self) -> bool:
        """Whether an error is left after every repair."""
        return not _is_rounding(self.left, self.rounding)


def locate(
    model: ModelProto, feeds: Mapping[str, Any], executor: Backend | str, progress: Progress | None = None
) -> Located:
    """Find the nodes whose results an executor gets wrong, and prove it by repair.

    Each node runs alone on the executor, fed with what is right: the interpreter's values in double, rounded to the types of
    the model. Its error is held against what rounding explains for its numbers. Nodes that are wrong are then repaired, one
    after the other: the right value takes the place of theirs in the whole model, until the results are right but for rounding.
    The body of a control-flow node is a part of it; nodes that draw random numbers, or read or make sequences, are not judged.

    :param model: a model, such as a gradient; it is not modified.
    :param feeds: the values of its inputs, by name.
    :param executor: the name of a backend, or a backend.
    :param progress: called with how many nodes are done, and how many there are.
    :raises InvalidModelError: the model cannot be read.
    :raises FeedError: the feeds do not fit the model.
    :raises BackendError: the interpreter does not run the model, or the executor cannot be used.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.conformance import locate
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { h = Tanh(x)  y = Mul(h, x) }'
    ... )
    >>> found = locate(model, {"x": np.float32([1, 2])}, "numpy")
    >>> found.is_right, found.judged, found.culprits
    (True, 2, ())
    """
    backend = get_backend(executor) if isinstance(executor, str) else executor
    replay = Replay(model, feeds)
    rounding = _errors(replay, get_backend("numpy").prepare(replay.model).run(feeds))
    found = list(replay.run(backend, progress))
    wrong = wrong_nodes(found)
    unjudged = tuple(one for one in found if one.why)
    judged = len(found) - len(unjudged)
    error, failed = _run(replay, feeds, backend, ())
    if not wrong or (not failed and error.is_rounding(rounding)):
        return Located(error.largest, rounding.largest, (), tuple(wrong), failed, judged, unjudged)
    culprits: list[Culprit] = []
    repaired: list[Replayed] = []
    left, pending = error, list(wrong)
    while pending and not left.is_rounding(rounding):
        tried = [(_run(replay, feeds, backend, [*repaired, one])[0], one) for one in pending[:_MOST]]
        best, one = min(tried, key=lambda pair: pair[0].total)
        if best.total >= left.total and not np.isinf(left.total):
            together = _run(replay, feeds, backend, [*repaired, *pending])[0]  # neither helps without the others
            if together.total < left.total:
                culprits += [Culprit(one, together.largest) for one in pending]
                pending = []
            break
        pending.remove(one)
        repaired.append(one)
        left = best
        culprits.append(Culprit(one, left.largest))
    return Located(error.largest, rounding.largest, tuple(culprits), tuple(pending), failed, judged, unjudged)


def repaired_model(replay: Replay, blamed: Sequence[Replayed]) -> tuple[ModelProto, dict[str, Any]]:
    """The model without these nodes, whose outputs are inputs; and what is right for them."""
    made = ModelProto()
    made.CopyFrom(replay.model)
    gone = {one.position for one in blamed}
    values = {name: replay.right(name) for one in blamed for name in one.outputs}
    refill(made.graph.node, [node for k, node in enumerate(replay.nodes) if k not in gone])
    outputs = {value.name for value in made.graph.output}
    for name, value in values.items():
        given = name
        if name in outputs:  # an output is not an input too
            given = f"{name}/repaired"
            made.graph.node.append(helper.make_node("Identity", [given], [name], given))
            for node in made.graph.node[:-1]:
                node.input[:] = [given if read == name else read for read in node.input]
        made.graph.input.append(
            helper.make_tensor_value_info(given, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        )
    fed = {(f"{name}/repaired" if name in outputs else name): value for name, value in values.items()}
    return made, fed


@dataclass(frozen=True)
class _Errors:
    """The error of each result, relative to its largest element."""

    of: Mapping[str, float]

    @property
    def largest(self) -> float:
        return max(self.of.values(), default=0.0)

    @property
    def total(self) -> float:
        return float(sum(self.of.values()))

    def is_rounding(self, rounding: _Errors) -> bool:
        return _is_rounding(self.largest, rounding.largest)


def _run(replay: Replay, feeds: Mapping[str, Any], backend: Backend, blamed: Sequence[Replayed]) -> tuple[_Errors, str]:
    """The errors of the results with some nodes repaired, and why there are none."""
    model, values = repaired_model(replay, blamed)
    try:
        return _errors(replay, backend.prepare(model).run({**feeds, **values})), ""
    except RefgradError as error:
        return _Errors({"": math.inf}), str(error)


def _errors(replay: Replay, results: Mapping[str, Any]) -> _Errors:
    """The largest error of each result, relative to its largest element; none counts as smaller than a part of all others."""
    exact = {
        name: due for name in results if isinstance(due := replay.exact(name), np.ndarray) and due.dtype.kind in "fiub"
    }
    sizes = {name: _size(due) for name, due in exact.items()}
    smallest = _PART * max(sizes.values(), default=0.0)
    found = {}
    for name, due in exact.items():
        value = np.asarray(results[name])
        if value.shape != due.shape:
            found[name] = math.inf
            continue
        with np.errstate(all="ignore"):
            right, wide = due.astype(np.float64), value.astype(np.float64)
            same = (right == wide) | (np.isnan(right) & np.isnan(wide))
            error = np.where(same, 0.0, np.abs(wide - right))
        largest = float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))
        found[name] = largest / (max(sizes[name], smallest) or 1.0)
    return _Errors(found)


def _size(value: np.ndarray) -> float:
    wide = np.abs(value.astype(np.float64))
    return float(np.max(wide, where=np.isfinite(wide), initial=0.0))


def _is_rounding(error: float, rounding: float) -> bool:
    return bool(error <= max(_ROUNDINGS * rounding, _FLOOR))
