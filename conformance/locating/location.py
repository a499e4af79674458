"""Find where the results of a model on an executor go wrong: which nodes, with the proof by repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend
from refgrad.conformance.locating.repair import Errors, RepairTrial
from refgrad.conformance.locating.repeating import Unsteady, identity_model, run_steadily
from refgrad.conformance.locating.replay import Progress, Replay, Replayed, wrong_nodes
from refgrad.conformance.locating.sides import guarded
from refgrad.conformance.locating.windows import NodeGroup, groups, optimisation
from refgrad.conformance.problems.systems.executors import get_executor
from refgrad.model.checks.malformed import explained

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
    alone, as where an executor fuses them, and `optimisation` says which pass it comes with. `unsteady` says that runs with
    the same inputs differ; then no node is blamed for what it did in one run.
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
    unsteady: Unsteady | None = None

    @property
    def by_place(self) -> list[Culprit]:
        """The nodes that are wrong by themselves, in the order of the model."""
        return sorted(self.culprits, key=lambda one: one.found.position)

    @property
    def left(self) -> float:
        """The error of the results when every culprit is repaired."""
        lefts = [part.left for part in self.culprits] + [part.left for part in self.groups]
        return lefts[-1] if lefts else self.error

    def beside(self, other: Located) -> Located:
        """The findings in a gradient, and those in the model itself in nodes that the gradient has not."""
        known = {one.found.outputs for one in self.culprits}
        more = tuple(one for one in other.culprits if one.found.outputs not in known)
        groups = tuple(one for one in other.groups if one.nodes not in {mine.nodes for mine in self.groups})
        worst = max(self, other, key=lambda located: located.error)
        if self.is_right:
            return other
        return replace(
            self,
            error=worst.error,
            rounding=worst.rounding,
            culprits=self.culprits + more,
            groups=self.groups + groups,
            unexplained=self.unexplained or other.unexplained,
            optimisation=self.optimisation or other.optimisation,
        )


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
    backend = guarded(get_executor(executor) if isinstance(executor, str) else executor)
    replay = Replay(model, feeds)
    trial = RepairTrial(replay, backend)
    error, failed = trial.run(())
    if failed and (nothing := _runs_nothing(backend)):
        return Located(error.largest, 0.0, failed=nothing, is_right=False, unexplained=True)
    if not failed:
        _, unsteady = run_steadily(backend, model, feeds)
        if unsteady is not None:
            focus = error.worst
            allowed = error.allowed.get(focus, 0.0)
            return Located(error.largest, allowed, is_right=False, unexplained=True, unsteady=unsteady)
    replayed = replay.run(backend, progress)
    wrong = [node for node in replayed if not node.within and (node.is_wrong or node.inside)]
    wrong = [node for node in wrong_nodes(replayed) if node in wrong] + [node for node in wrong if not node.is_wrong]
    unjudged = tuple(node for node in replayed if node.why)
    judged = len(replayed) - len(unjudged)
    focus = error.worst
    rounding = error.allowed.get(focus, 0.0)
    if not failed and error.is_rounding:
        return Located(error.largest, rounding, (), tuple(wrong), failed, judged, unjudged)
    culprits, acquitted, left = _proved(trial, error, wrong)
    together: tuple[NodeGroup, ...] = ()
    passes = ""
    if not left.is_rounding:
        known = {node.found.position for node in culprits}
        together = tuple(node for node in groups(replay.model, feeds, backend) if known.isdisjoint(node.positions))
        passes = optimisation(replay.model, feeds, backend)
    explained = left.is_rounding or (bool(together) and together[-1].is_proved)
    return Located(
        error.largest, rounding, tuple(culprits), tuple(acquitted), failed, judged, unjudged, together, passes,
        is_right=False, unexplained=not explained,
    )  # fmt: skip


def _runs_nothing(backend: Backend) -> str:
    """Why an executor does not even run a model of one Identity; "" where it does."""
    model, feeds = identity_model()
    try:
        backend.prepare(model).run(feeds)
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
        tried = [(trial.run([*repaired, node])[0], node) for node in few]
        best, node = min(tried, key=lambda pair: pair[0].total)
        if best.total >= left.total and not np.isinf(left.total):
            if len(pending) > _MOST:
                acquitted.append(pending.pop(0))
                continue
            together = trial.run([*repaired, *pending])[0]  # neither helps without the others
            if together.total < left.total:
                culprits += [Culprit(node, together.at(focus)) for node in pending]
                pending, left = [], together
            break
        pending.remove(node)
        repaired.append(node)
        left = best
        culprits.append(Culprit(node, left.at(focus)))
    return culprits, acquitted + pending, left
