"""Find where the results of a model on an executor go wrong: which nodes, with the proof by repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.backends import Backend
from refgrad.conformance.locating.repair import Errors, RepairTrial
from refgrad.conformance.locating.replay import Progress, Replay, Replayed, wrong_nodes
from refgrad.conformance.locating.windows import NodeGroup, groups, optimisation
from refgrad.conformance.systems.executors import get_executor
from refgrad.protos.malformed import explained

_MOST = 12  # nodes that are tried at each turn


@dataclass(frozen=True)
class Culprit:
    """A node that is wrong, and the error of the results once it and those before it in the list are repaired."""

    found: Replayed
    left: float


@dataclass(frozen=True)
class Located:
    """The nodes that make the results of a model on an executor wrong.

    `error` is the error of the result which is furthest off, relative to its largest element, and `rounding` the error that
    rounding explains there; `culprits` are the nodes that take it away, in the order of their shares. `acquitted` are nodes
    that are wrong for themselves and whose repair changes nothing in the results. `failed` says why the executor does not run
    the model. `is_right` says whether the results are right as they are, except for rounding, and `unexplained` whether an
    error is left that no node has. `unjudged` are nodes that cannot be judged. `groups` are nodes that are wrong together
    alone, as where an executor fuses them, and `optimisation` says which pass it comes with.
    """

    error: float
    rounding: float
    culprits: tuple[Culprit, ...] = ()
    acquitted: tuple[Replayed, ...] = ()
    failed: str = ""
    judged: int = 0
    unjudged: tuple[Replayed, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    optimisation: str = ""
    is_right: bool = True
    unexplained: bool = False

    @property
    def left(self) -> float:
        """The error of the results when every culprit is repaired."""
        lefts = [one.left for one in self.culprits] + [one.left for one in self.groups]
        return lefts[-1] if lefts else self.error


@explained
def locate(
    model: ModelProto, feeds: Mapping[str, Any], executor: Backend | str, progress: Progress | None = None
) -> Located:
    """Find the nodes whose results an executor gets wrong, and prove it by repair.

    Each node runs alone on the executor, fed with what the interpreter has there. Its error is held against what rounding
    explains for its numbers. Nodes that are wrong are then repaired, one after the other: the right value takes the place of
    theirs in the whole model, until the results are right except for rounding.
    Nodes in bodies of Loop, Scan and If are looked at in their rounds 1, 2, 4, 8 and so on, and repaired with the node that
    they are in. Nodes that draw random numbers, or read or make sequences, are not judged.

    :param model: a model, such as a gradient; it is not modified.
    :param feeds: the values of its inputs, by name.
    :param executor: the name of an executor of the suite, "package.module:Class", or a backend.
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
    backend = get_executor(executor) if isinstance(executor, str) else executor
    replay = Replay(model, feeds)
    trial = RepairTrial(replay, backend)
    error, failed = trial.run(())
    if failed and (nothing := _runs_nothing(backend)):
        return Located(error.largest, 0.0, failed=nothing, is_right=False, unexplained=True)
    found = replay.run(backend, progress)
    wrong = [one for one in found if not one.within and (one.is_wrong or one.inside)]
    wrong = [one for one in wrong_nodes(found) if one in wrong] + [one for one in wrong if not one.is_wrong]
    unjudged = tuple(one for one in found if one.why)
    judged = len(found) - len(unjudged)
    focus = error.worst
    rounding = error.allowed.get(focus, 0.0)
    if not failed and error.is_rounding:
        return Located(error.largest, rounding, (), tuple(wrong), failed, judged, unjudged)
    culprits, acquitted, left = _proved(trial, error, wrong)
    together: tuple[NodeGroup, ...] = ()
    passes = ""
    if not left.is_rounding:
        known = {one.found.position for one in culprits}
        together = tuple(one for one in groups(replay.model, feeds, backend) if known.isdisjoint(one.positions))
        passes = optimisation(replay.model, feeds, backend)
    explained = left.is_rounding or (bool(together) and together[-1].is_proved)
    return Located(
        error.largest, rounding, tuple(culprits), tuple(acquitted), failed, judged, unjudged, together, passes,
        is_right=False, unexplained=not explained,
    )  # fmt: skip


def _runs_nothing(backend: Backend) -> str:
    """Why an executor does not even run a model of one Identity; "" where it does."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [value], [result])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    try:
        backend.prepare(model).run({"x": np.ones(1, np.float32)})
    except Exception as error:
        return f"it does not run a model of one Identity either: {error}"
    return ""


def _proved(
    trial: RepairTrial, error: Errors, wrong: Sequence[Replayed]
) -> tuple[list[Culprit], list[Replayed], Errors]:
    """Repair the nodes one after the other, the one that helps most first: the culprits, the others, and the errors left."""
    focus = error.worst
    culprits: list[Culprit] = []
    repaired: list[Replayed] = []
    left, pending, acquitted = error, list(wrong), list[Replayed]()
    while pending and not left.is_rounding:
        few = pending if len(pending) <= _MOST else pending[:1]  # of many, the one that is furthest off
        tried = [(trial.run([*repaired, one])[0], one) for one in few]
        best, one = min(tried, key=lambda pair: pair[0].total)
        if best.total >= left.total and not np.isinf(left.total):
            if len(pending) > _MOST:
                acquitted.append(pending.pop(0))
                continue
            together = trial.run([*repaired, *pending])[0]  # neither helps without the others
            if together.total < left.total:
                culprits += [Culprit(one, together.at(focus)) for one in pending]
                pending, left = [], together
            break
        pending.remove(one)
        repaired.append(one)
        left = best
        culprits.append(Culprit(one, left.at(focus)))
    return culprits, acquitted + pending, left
