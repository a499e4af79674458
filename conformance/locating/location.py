"""Find where the results of a model on an executor go wrong: which nodes, with the proof by repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend
from refgrad.conformance.known.bugs.matching import bugs_of
from refgrad.conformance.locating.repair import Errors, RepairTrial
from refgrad.conformance.locating.repeating import Unsteady, identity_model, run_steadily
from refgrad.conformance.locating.replay import Replay, Replayed, wrong_nodes
from refgrad.conformance.locating.sides import guarded
from refgrad.conformance.locating.windows import NodeGroup, groups, optimisation
from refgrad.conformance.problems.systems.executors import get_executor
from refgrad.model.checks.malformed import explained

_MOST = 12  # nodes that are tried at each turn
Progress = Callable[[str, int, int | None], None]  # the step, how far it is, and how far it goes, if that is known


@dataclass(frozen=True)
class Culprit:
    """A node that is wrong, and the largest error of the results once it and those before it in the list are repaired.

    `helped` is the result that this repair helps most, `was` its error before it, and `now` after it. `known` are the known
    bugs of the executor that this may be, in words. If one is a dispute about the specification, `disputed` says so.
    """

    found: Replayed
    left: float
    helped: str = ""
    was: float = 0.0
    now: float = 0.0
    known: str = ""
    disputed: str = ""


@dataclass(frozen=True)
class Located:
    """The nodes that make the results of a model on an executor wrong.

    `error` is the error of the result which is furthest off, relative to its largest element, and `rounding` the error that
    rounding explains there; `culprits` are the nodes that take it away, in the order of the model. `acquitted` are nodes
    that are wrong for themselves and whose repair changes nothing in the results. `failed` says why the executor does not run
    the model. `is_right` says whether the results are right as they are, except for rounding, and `unexplained` whether an
    error is left that no node has. `unjudged` are nodes that cannot be judged. `groups` are nodes that are wrong together
    alone, as where an executor fuses them, and `optimisation` says which pass it comes with. `unsteady` says that runs with
    the same inputs differ; then no node is blamed for what it did in one run. Before the end `is_whole` is false; `suspects`
    are nodes that are wrong for themselves, and whose repair has not been tried.
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
    is_whole: bool = True
    suspects: tuple[Replayed, ...] = ()

    @property
    def left(self) -> float:
        """The error of the results when every culprit is repaired."""
        lefts = [part.left for part in self.culprits] + [part.left for part in self.groups]
        return lefts[-1] if lefts else self.error

    def beside(self, other: Located, model: ModelProto) -> Located:
        """The findings in the gradient of a model, and those in the model itself in nodes that the gradient has not.

        The culprits are in the order of the model, and those in other nodes of the gradient come after.
        """
        known = {one.found.outputs for one in self.culprits}
        more = tuple(one for one in other.culprits if one.found.outputs not in known)
        places = {tuple(filter(None, node.output)): place for place, node in enumerate(model.graph.node)}
        after = len(places)
        culprits = sorted(
            self.culprits + more, key=lambda one: places.get(one.found.outputs, after + one.found.position)
        )
        groups = tuple(one for one in other.groups if one.nodes not in {mine.nodes for mine in self.groups})
        worst = max(self, other, key=lambda located: located.error)
        if self.is_right:
            return other
        return replace(
            self,
            error=worst.error,
            rounding=worst.rounding,
            culprits=tuple(culprits),
            groups=self.groups + groups,
            unexplained=self.unexplained or other.unexplained,
            optimisation=self.optimisation or other.optimisation,
            is_whole=self.is_whole and other.is_whole,
            suspects=self.suspects + other.suspects,
        )


@explained
def locate(
    model: ModelProto,
    feeds: Mapping[str, Any],
    executor: Backend | str,
    progress: Progress | None = None,
    so_far: Callable[[Located], None] | None = None,
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
    :param progress: called with the step in progress, how far it is, and how far it goes, None if nobody knows.
    :param so_far: called with what is known after each step.
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
    report = progress or quietly
    replay = Replay(model, feeds)
    report("the model as a whole", 0, None)
    trial = RepairTrial(replay, backend)
    error, failed = trial.run(())
    if np.isinf(error.largest) and (nothing := _runs_nothing(backend, replay.model)):
        return Located(error.largest, 0.0, failed=nothing, is_right=False, unexplained=True)
    rounding = error.allowed.get(error.worst, 0.0)
    if not failed:
        report("running it again", 0, None)
        _, unsteady = run_steadily(backend, model, feeds)
        if unsteady is not None:
            return Located(error.largest, rounding, is_right=False, unexplained=True, unsteady=unsteady)
    is_right = not failed and error.is_rounding
    known = Located(error.largest, rounding, failed=failed, is_right=False, unexplained=not is_right, is_whole=False)

    def tell(**more: Any) -> None:
        nonlocal known
        known = replace(known, **more)
        if so_far is not None:
            so_far(known)

    def see(node: Replayed) -> None:
        report("kernels one by one", node.position + 1, len(replay.nodes))
        suspects = (*known.suspects, node) if node.is_wrong or node.inside else known.suspects
        tell(judged=known.judged + (not node.why), suspects=suspects)

    replayed = replay.run(backend, see)
    wrong = [node for node in replayed if not node.within and (node.is_wrong or node.inside)]
    unjudged = tuple(node for node in replayed if node.why)
    judged = len(replayed) - len(unjudged)
    if is_right:
        return Located(error.largest, rounding, (), tuple(wrong), failed, judged, unjudged)
    tell(judged=judged, unjudged=unjudged, suspects=tuple(wrong))
    wrong = [node for node in wrong_nodes(replayed) if node in wrong] + [node for node in wrong if not node.is_wrong]
    culprits: list[Culprit] = []
    errors = error
    for culprit, left_over in _proved(trial, error, wrong, report):
        culprits.append(culprit)
        errors = left_over
        proved = {one.found.position for one in culprits}
        left = tuple(node for node in known.suspects if node.position not in proved)
        tell(culprits=_in_order(culprits), suspects=left)
    culprits += _hidden(trial, errors, known.suspects)
    ordered = _in_order(culprits)
    if list(ordered) != culprits:
        ordered, errors = _proved_in_order(trial, error, ordered)
        proved = {one.found.position for one in ordered}
        tell(culprits=ordered, suspects=tuple(node for node in known.suspects if node.position not in proved))
    together: tuple[NodeGroup, ...] = ()
    passes = ""
    if not errors.is_rounding:
        right = {one.found.position: replay.repairs[one.found.position] for one in ordered}
        together = groups(replay.model, feeds, backend, right, partial(report, "windows of nodes"))
        tell(groups=together)
        passes = optimisation(replay.model, feeds, backend, partial(report, "optimisations"))
    explained = errors.is_rounding or (bool(together) and together[-1].is_proved)
    ordered = tuple(_with_known_bugs(one, replay, backend.name) for one in ordered)
    return Located(
        error.largest, rounding, ordered, known.suspects, failed, judged, unjudged, together, passes,
        is_right=False, unexplained=not explained,
    )  # fmt: skip


def computes_right(model: ModelProto, feeds: Mapping[str, Any], backend: Backend) -> bool:
    """True if an executor runs a model, and rounding explains the distance of its results from those in double."""
    errors, failed = RepairTrial(Replay(model, feeds), guarded(backend)).run(())
    return not failed and errors.is_rounding


def quietly(what: str, done: int, total: int | None) -> None:
    """Nobody asks for the progress."""


def _runs_nothing(backend: Backend, model: ModelProto) -> str:
    """Why an executor does not run a model of one Identity, or makes arrays of other shapes and types; "" if it does.

    It is asked for a plain one, and for one of the IR version and the opsets of `model`.
    """
    for like, which in ((None, ""), (model, f" with the IR version {model.ir_version} and the opsets of the model")):
        identity, feeds = identity_model(like)
        try:
            results = backend.prepare(identity).run(feeds)
        except Exception as error:
            return f"it does not run a model of one Identity{which} either: {error}"
        (name,), due = results, feeds["x"]
        got = np.asarray(results[name])
        told = f"it is not right for a model of one Identity{which} either: its result has"
        if got.shape != due.shape:
            return f"{told} the shape {list(got.shape)} instead of {list(due.shape)}"
        if got.dtype != due.dtype:
            return f"{told} the type {got.dtype} instead of {due.dtype}"
    return ""


def _proved(
    trial: RepairTrial, error: Errors, wrong: Sequence[Replayed], report: Progress
) -> Iterator[tuple[Culprit, Errors]]:
    """Repair the nodes one after the other, the one that helps most first: the culprits among them, and the errors left."""
    repaired: list[Replayed] = []
    left, pending = error, list(wrong)
    failing = [node for node in pending if node.failed]
    if failing and not error.worst:  # there are no results before all of them are repaired
        repaired, pending = failing, [node for node in pending if not node.failed]
        left, _ = trial.run(repaired)
        yield from ((_repaired(node, error, left), left) for node in failing)
    while pending and not left.is_rounding:
        report("repairing nodes", len(wrong) - len(pending), len(wrong))
        few = pending if len(pending) <= _MOST else pending[:1]  # of many, the one that is furthest off
        tried = [(trial.run([*repaired, node])[0], node) for node in few]
        best, node = min(tried, key=lambda pair: pair[0].total)
        if best.total >= left.total and not np.isinf(left.total):
            if len(pending) > _MOST:
                pending.pop(0)
                continue
            together = trial.run([*repaired, *pending])[0]  # neither helps without the others
            if together.total < left.total:
                yield from ((_repaired(node, left, together), together) for node in pending)
            return
        pending.remove(node)
        repaired.append(node)
        yield _repaired(node, left, best), best
        left = best


def _repaired(node: Replayed, before: Errors, after: Errors) -> Culprit:
    """A node that is wrong, with the result that its repair helps most."""
    gains = {name: before.of[name] - error for name, error in after.of.items() if name in before.of}
    gains = {name: gain / after.allowed_of(name) for name, gain in gains.items() if np.isfinite(gain) and gain > 0}
    if not gains:
        return Culprit(node, after.largest)
    helped = max(gains, key=lambda name: gains[name])
    return Culprit(node, after.largest, helped, before.of[helped], after.of[helped])


def _hidden(trial: RepairTrial, left: Errors, suspects: Sequence[Replayed]) -> list[Culprit]:
    """Nodes that make the results wrong on their own: the right value of a later culprit hides what they do."""
    wrong = [node for node in suspects if node.is_wrong and not node.failed]
    return [Culprit(node, left.largest) for node in wrong if trial.has_influence(node)]


def _proved_in_order(
    trial: RepairTrial, error: Errors, culprits: Sequence[Culprit]
) -> tuple[tuple[Culprit, ...], Errors]:
    """The culprits in this order, each with the error that is left after its repair, and the errors left in the end."""
    ordered: list[Culprit] = []
    errors = error
    for one in culprits:
        before, errors = errors, trial.run([*(culprit.found for culprit in ordered), one.found])[0]
        ordered.append(_repaired(one.found, before, errors))
    return tuple(ordered), errors


def _with_known_bugs(culprit: Culprit, replay: Replay, executor: str) -> Culprit:
    found = culprit.found
    bugs = bugs_of(executor, replay.nodes[found.position], replay.model, bool(found.failed))
    known, disputed = (list(dict.fromkeys(texts)) for texts in ((b.fault for b in bugs), (b.disputed for b in bugs)))
    return replace(culprit, known="; ".join(known), disputed="; ".join(filter(None, disputed)))


def _in_order(culprits: Sequence[Culprit]) -> tuple[Culprit, ...]:
    return tuple(sorted(culprits, key=lambda culprit: culprit.found.position))
