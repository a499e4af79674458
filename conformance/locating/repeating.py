"""The same run again: an executor that gives other results for the same inputs, in one session or in a fresh one.

Races, buffers that are not cleared, caches and sums that go on from run to run show in no single run, and in each run another
node is wrong. So a side is run in one session with its inputs, with other inputs and with its own again, and in a fresh session
the other way round, before any node is called wrong. A cache that fills, or a sum that begins after a warm-up, shows late.
Where runs take little time, there are more of them.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.judge.nan.watching import label_of
from refgrad.conformance.locating.replay import distance
from refgrad.conformance.locating.sides import guarded
from refgrad.conformance.locating.values import ModelValues, described
from refgrad.conformance.problems.point import largest
from refgrad.conformance.problems.rounding import limits
from refgrad.conformance.problems.systems.apart import Apart
from refgrad.conformance.verdicts import REMEMBERS, TIMED_OUT, VARIES
from refgrad.errors import RefgradError, WorkerError
from refgrad.protos.traverse import nested
from refgrad.tables.randomness import may_draw, operator_of

_LIKE = 1e-2  # how far a result may be from the interpreter's that counts as the right one, relative
_SAME_SUM = 1e-3  # how far a sum of two results may be from a third one that counts as this sum, relative

_LATER = 8  # more runs with the same inputs
_SHORT = 0.3  # seconds that a session of three runs may take at most if there are more

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Unsteady:
    """Results of an executor that are not the same for the same inputs.

    `kind` is `VARIES` or `REMEMBERS`. `results` are the results that differ, each with the largest difference of two runs
    relative to its largest element. `node` is the first node whose results differ, "" if even an Identity's do; `output`, `at`
    and `values` are the element that differs most, in two runs. `note` says how they differ, if that is known.
    """

    kind: str
    results: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    operator: str = ""
    output: str = ""
    at: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if not self.node:
            where = "no single node does: the session as a whole"
        else:
            numbers = " and ".join(f"{value:.9g}" for value in self.values)
            element = f"{self.output!r} has {numbers} at {list(self.at)}"
            where = f"the first node that does is {self.operator} {self.node!r}: {element}"
        return "; ".join(filter(None, (f"it {self.kind}, for the same inputs", where, self.note)))


def run_steadily(
    backend: Backend, model: ModelProto, feeds: Mapping[str, Any]
) -> tuple[dict[str, Any], Unsteady | None]:
    """The results of a first run, and how later runs differ from it; None if they do not.

    A model that draws random numbers is run once: its results may differ. So is one on the interpreter, the judge of others.

    :raises RefgradError: the executor does not run the model.
    """
    is_judge = type(backend).__module__ == NumpyBackend.__module__
    if is_judge or any(map(may_draw, nested(model.graph.node))):
        return backend.prepare(model).run(copy.deepcopy(dict(feeds))), None
    [first] = in_turn(backend, model, [feeds])
    try:
        runs = _Runs.of(backend, model, feeds)
    except RefgradError as error:
        if isinstance(error.__cause__, WorkerError) and error.__cause__.verdict == TIMED_OUT:
            return first, None  # of so slow an executor no second run is known
        failing = dict.fromkeys(first, math.inf)
        return first, Unsteady(REMEMBERS, failing, note=f"a first run gives results, and a later one fails: {error}")
    kind = runs.kind()
    if not kind:
        return dict(runs.first), None
    moved, note = runs.moved, runs.note()
    node = _first_node(backend, model, feeds)
    if node is None:
        return dict(runs.first), Unsteady(kind, moved, note=note)
    return dict(runs.first), replace(node, kind=kind, results=moved, note=note)


@dataclass
class _Runs:
    """The results of a model in one session (own inputs, others, own), and in a fresh one (others, own).

    `later` has the results of a session with its own inputs alone. It is empty if runs take long.
    """

    backend: Backend
    model: ModelProto
    feeds: Mapping[str, Any]
    other: Mapping[str, Any]
    session: Sequence[Results]
    fresh: Sequence[Results]
    later: Sequence[Results] = ()

    @classmethod
    def of(cls, backend: Backend, model: ModelProto, feeds: Mapping[str, Any]) -> _Runs:
        """Run the model. If the executor does not take the other inputs, only its own are run.

        :raises RefgradError: the executor does not run the model.
        """
        other: Mapping[str, Any] = _others(feeds)
        start = time.monotonic()
        try:
            session = in_turn(backend, model, [feeds, other, feeds])
        except RefgradError:
            other = feeds
            session = in_turn(backend, model, [feeds, feeds, feeds])
        later = in_turn(backend, model, [feeds] * _LATER) if time.monotonic() - start <= _SHORT else []
        fresh = in_turn(backend, model, [other, feeds], fresh=True)
        return cls(backend, model, feeds, other, session, fresh, later)

    @property
    def first(self) -> Results:
        """The results of the first run of a session."""
        return self.session[0]

    @property
    def own(self) -> list[Results]:
        """The results for its own inputs; the first run is the first."""
        return [self.session[0], self.session[2], self.fresh[1], *self.later]

    @cached_property
    def moved(self) -> dict[str, float]:
        """The results that move, and how far."""
        pairs = [(self.first, run) for run in self.own[1:]] + [(self.session[1], self.fresh[0])]
        moved: dict[str, float] = {}
        for one, another in pairs:
            for name, value in one.items():
                apart = _apart(value, another.get(name))
                if apart > _room(value, self.model):
                    moved[name] = max(apart, moved.get(name, 0.0))
        if not moved and self._repeats:
            moved = dict.fromkeys(self.first, np.inf)
        return moved

    @cached_property
    def _repeats(self) -> bool:
        """True if the results for other inputs are those for its own, which are right, and should be others."""
        if not all(_apart(value, self.session[1].get(name)) == 0 for name, value in self.first.items()):
            return False
        try:
            due = [NumpyBackend().prepare(self.model).run(dict(feeds)) for feeds in (self.feeds, self.other)]
        except RefgradError:
            return False
        return all(_apart(value, due[0].get(name)) <= _LIKE for name, value in self.first.items()) and any(
            _apart(value, due[1][name]) > _LIKE for name, value in due[0].items()
        )

    def kind(self) -> str:
        """`REMEMBERS` if a note says how, or if sessions like the first ones have the same results; "" if nothing moves."""
        if not self.moved:
            return ""
        if self.note():
            return REMEMBERS
        again = in_turn(self.backend, self.model, [self.feeds, self.other, self.feeds], fresh=True)
        again += in_turn(self.backend, self.model, [self.feeds] * len(self.later)) if self.later else []
        same = all(
            _apart(value, run.get(name)) <= _room(value, self.model)
            for one, run in zip([*self.session, *self.later], again, strict=True)
            for name, value in one.items()
        )
        return REMEMBERS if same else VARIES

    def note(self) -> str:
        """How the results move, if a few words say it."""
        if self._repeats:
            return "it has the results of other inputs again"
        if self._add_up():
            return "each run adds its results to the last ones: a buffer is not set to 0"
        return ""

    def _add_up(self) -> bool:
        """True if each run of the session has added to the results of the run before."""
        first, second, third = self.session
        moved = [name for name in self.moved if is_float(first[name]) and np.any(first[name])]
        return bool(moved) and all(
            _apart(np.asarray(second[name]) - first[name], self.fresh[0][name]) < _SAME_SUM
            and _apart(np.asarray(third[name]) - second[name], first[name]) < _SAME_SUM
            for name in moved
        )


def in_turn(
    backend: Backend, model: ModelProto, feeds: Sequence[Mapping[str, Any]], fresh: bool = False
) -> list[dict[str, Any]]:
    """The results of runs of one session.

    :param fresh: in a process of its own, if the executor is run in one.
    :raises RefgradError: the executor does not run the model.
    """
    if isinstance(backend, Apart):
        if fresh:
            backend.close()
        return backend.in_turn(model, feeds)
    prepared = guarded(backend).prepare(model)
    return [copy.deepcopy(prepared.run(fed)) for fed in feeds]


def _others(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Other inputs of the same shapes and types: numbers in the opposite order, floats smaller too."""
    other = {}
    for name, value in feeds.items():
        array = value[::-1].copy() if isinstance(value, np.ndarray) and value.ndim > 1 else value
        other[name] = (array * np.asarray(0.75, array.dtype)).astype(array.dtype) if is_float(array) else array
    return other


def _apart(one: Any, another: Any) -> float:
    """The largest difference of two results relative to the largest element: infinite for other shapes or other texts."""
    if isinstance(one, list) and isinstance(another, list) and len(one) == len(another):
        return max(map(_apart, one, another), default=0.0)
    if not isinstance(one, np.ndarray | np.generic) or not isinstance(another, np.ndarray | np.generic):
        return 0.0 if one is another or type(one) is type(another) else np.inf
    left, right = np.asarray(one), np.asarray(another)
    if left.shape != right.shape or left.dtype != right.dtype:
        return np.inf
    most = float(np.max(distance(left, right), initial=0.0))
    if not most or not is_float(left):
        return np.inf if most else 0.0
    wide = left.astype(np.float64)
    return most / (largest(wide[np.isfinite(wide)]) or 1.0)


def _room(value: Any, model: ModelProto) -> float:
    """How far two runs of a sound executor may be apart that adds numbers in another order, relative."""
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else None
    if array is None or not is_float(array):
        return 0.0
    return 16 * limits(array.dtype)[0] * math.sqrt(max(len(model.graph.node), 1))


def _first_node(backend: Backend, model: ModelProto, feeds: Mapping[str, Any]) -> Unsteady | None:
    """The first node whose results move; None if even an Identity's do, or if nothing moves once every value is an output."""
    try:
        if _Runs.of(backend, *identity_model()).moved:
            return None
        shown = _with_every_value(model, feeds)
        runs = _Runs.of(backend, shown, feeds).own
    except (RefgradError, LookupError):
        return None
    nodes = [node for node in shown.graph.node if any(output in runs[0] for output in node.output)]
    for factor in (1.0, 0.0):
        moving = {name: max((_apart(runs[0][name], run[name]), k) for k, run in enumerate(runs)) for name in runs[0]}
        moving = {name: pair for name, pair in moving.items() if pair[0] > factor * _room(runs[0][name], model)}
        first = next((node for node in nodes if any(name in moving for name in node.output)), None)
        if first is None:
            continue
        output = next(name for name in first.output if name in moving)
        one, another = np.asarray(runs[0][output]), np.asarray(runs[moving[output][1]][output])
        at = tuple(int(k) for k in np.unravel_index(int(np.argmax(distance(one, another))), one.shape))
        operator = ".".join(filter(None, operator_of(first)))
        values = (float(one[at]), float(another[at]))
        return Unsteady("", {}, label_of(first), operator, output, at, values)
    return None


def identity_model(like: ModelProto | None = None) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A model that computes nothing, and inputs for it; of the IR version and the opsets of another model, if one is given."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [value], [result])
    opsets = [helper.make_opsetid("", 13)] if like is None else list(like.opset_import)
    model = helper.make_model(graph, ir_version=8 if like is None else like.ir_version, opset_imports=opsets)
    return model, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def _with_every_value(model: ModelProto, feeds: Mapping[str, Any]) -> ModelProto:
    """The model with every tensor of its graph as an output.

    :raises RefgradError: the interpreter does not run the model.
    """
    values = ModelValues(model, feeds)
    shown = ModelProto()
    shown.CopyFrom(values.model)
    declared = {value.name for value in shown.graph.output}
    for name in (name for node in shown.graph.node for name in node.output if name and name not in declared):
        value = values.right(name)
        if isinstance(value, np.ndarray) and name not in values.constants:
            shown.graph.output.append(described(name, value))
    return shown
