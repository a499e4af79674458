"""Find the origin of NaN and infinities: the node, the element, its operands, and advice.

The interpreter walks through the model, bodies included, and each node is computed by the executor. A NaN begins in an element
whose operands are no NaN, an infinity in one whose operands are finite. Each of these is followed to the results: an infinity
that a mask makes, and that a Softmax takes away again, is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from refgrad import interruption
from refgrad.backends import Backend
from refgrad.backends.base import ModelLike, check_feeds, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.judge.nan.causes import Cause, cause_of
from refgrad.conformance.judge.nan.curing import OPTION, cured
from refgrad.conformance.judge.nan.watching import (
    Compute,
    Watching,
    WatchingInDouble,
    bodies,
    constants_of,
    first_output,
    label_of,
)
from refgrad.conformance.problems.feeds import DOMAINS, SIZE
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.problems.point import inputs_of, with_values
from refgrad.conformance.problems.ranges import OutOfRange, changing
from refgrad.conformance.problems.systems.executors import get_executor
from refgrad.errors import BackendError, NoGradientError, RefgradError, counted
from refgrad.model.checks.malformed import explained
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.normalise import normalise
from refgrad.parameters.weights import weights
from refgrad.protos.traverse import nested
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient as differentiate
from refgrad.reverse.gradient import preflight
from refgrad.tables.randomness import may_draw, operator_of

_STACK = ("pkg.torch.onnx.stack_trace", "stack_trace")
_BACKWARD = "_Grad/"
_OPERANDS = 6  # that are shown
# What comes once the origins are known, in this order.
_STEPS = ("a run of the whole model", f"a run with {OPTION}", "values that leave their types")
Taint = frozenset[int]


@dataclass(frozen=True)
class Origin:
    """The origin of a NaN or an infinity.

    `at` is the first such element of `output`, `count` the number of these, `value` the element, and `operands` the numbers
    that it was computed from. `cause` and `remedy` are for people. `forward` is the node of the model whose derivative a node
    belongs to, "" for a node of the model itself; `within` and `step` say in which node's body, in which round. `of` are the
    origins of the operands that are not finite: positions in the list. `source` is the line of the program that was exported.
    """

    node: str
    operator: str
    output: str
    at: tuple[int, ...]
    value: float
    count: int
    operands: Mapping[str, float]
    cause: str
    remedy: str
    kind: str
    forward: str = ""
    within: str = ""
    step: int = 0
    of: tuple[int, ...] = ()
    source: str = ""

    @property
    def is_backward(self) -> bool:
        """True if it is a node of the gradient."""
        return bool(self.forward)

    def __str__(self) -> str:
        side = f", in the gradient of {self.forward!r}" if self.forward else ""
        body = f", in {self.within!r}, round {self.step}" if self.within else ""
        others = counted(self.count - 1, "more element becomes", "more elements become")
        more = f" ({others} NaN or infinite here)" if self.count > 1 else ""
        told = ", ".join(f"{name!r} = {value:.6g}" for name, value in self.operands.items())
        of = f", from {told}" if told else ""
        what = f"{self.output!r} is {self.value:.6g} at {list(self.at)}{of}"
        return f"{self.operator} {self.node!r}{side}{body}: {what}: {self.cause}{more}"


@dataclass(frozen=True)
class NonFinite:
    """The results that are not finite on an executor, and the origins of their numbers, the first one first.

    `elsewhere` says that the executor's own run and the walk, node by node, do not agree; `note` why a part was left out.
    `cure` says what a run with the option `strong_zero` gave, where a gradient is not finite. `ranges` are values that overflow
    or underflow their types and change results that are finite. If the search was stopped once the origins were known,
    `stopped` says why, and `untried` are the steps that are missing.
    """

    results: tuple[str, ...]
    origins: tuple[Origin, ...]
    elsewhere: str = ""
    note: str = ""
    cure: str = ""
    ranges: tuple[OutOfRange, ...] = ()
    stopped: str = ""
    untried: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[Origin, ...]:
        """The origins whose operands are finite: the others follow from them."""
        return tuple(origin for origin in self.origins if not origin.of)

    @property
    def ok(self) -> bool:
        """True if every result is finite, except for infinities that the model was given, and in range on the way."""
        return not self.origins and not self.elsewhere and not self.ranges


@explained
def nonfinite(
    model: ModelLike,
    feeds: Mapping[str, Any] | None = None,
    *,
    executor: str | Backend = "numpy",
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    forward: bool = False,
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> NonFinite:
    """The origins of NaN and infinities in a model's outputs and gradients.

    :param feeds: the inputs; random ones by default.
    :param executor: the name of an executor of the suite, or a backend.
    :param wrt: what to differentiate by; by default the float inputs and the parameters that `refgrad.weights` finds.
    :param forward: only look at the model, and at no gradient.
    :param progress: called with the step in progress, how far it is, and how far it goes, None if nobody knows.
    :raises RefgradError: a model that cannot be read, feeds that do not fit, an executor that does not exist.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.conformance import nonfinite
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { [root] y = Sqrt(x) }'
    ... )
    >>> [origin] = nonfinite(model, {"x": np.float32([4, 0])}).origins
    >>> origin.forward, origin.at, origin.kind
    ('root', (1,), 'division by 0')
    """
    backend = get_executor(executor) if isinstance(executor, str) else executor
    proto = load_model(model, lift=True)
    inputs = inputs_of(proto)
    if feeds is not None:
        proto, values = with_values(proto, check_feeds(feeds, inputs))
    else:
        prepared = NumpyBackend().prepare(proto)
        values = fitting_feeds(
            proto, prepared.run, _are_finite, seed=seed, size=size, sizes=sizes, domains=DOMAINS[:1]
        ).feeds
    note = ""
    watched = proto
    if not forward:
        try:
            watched = differentiate(proto, _asked(proto, values) if wrt is None else wrt, outputs, keep_outputs=True)
        except NoGradientError as error:
            note = f"The gradient is left out: {error}"
    seeds, gradients = names_in(watched) if watched is not proto else ({}, {})
    if seeds:
        results = NumpyBackend().prepare(proto).run(values)
        rng = np.random.default_rng([seed, 0])
        values |= {
            n: np.asarray(rng.standard_normal(results[o].shape)).astype(results[o].dtype) for o, n in seeds.items()
        }
    names = {value.name for value in watched.graph.input}
    fed = {name: value for name, value in values.items() if name in names}
    report = progress or (lambda *_: None)
    walk = _Walk(watched, fed, backend, proto, report=report)
    reaching, reached = walk.origins()
    found = NonFinite(tuple(reached), tuple(reaching), note=note)
    steps = list(_STEPS)
    try:
        report(steps[0], 0, None)
        whole, elsewhere = _whole(watched, walk.feeds, backend, reached)
        found = replace(found, results=tuple(whole), elsewhere=elsewhere)
        steps.pop(0)
        report(steps[0], 0, None)
        if any(name in gradients.values() for name in whole):
            found = replace(found, cure=cured(proto, watched, fed, backend, list(gradients), outputs))
        steps.pop(0)
        report(steps[0], 0, None)
        found = replace(found, ranges=changing(watched, walk.feeds, {origin.node for origin in reaching}))
    except interruption.STOPS as stop:
        interruption.finish()
        return replace(found, stopped=interruption.why(stop), untried=tuple(steps))
    return found


def _are_finite(results: Mapping[str, Any]) -> bool:
    floats = [value for value in results.values() if isinstance(value, np.ndarray) and is_float(value)]
    return all(np.isfinite(value).all() for value in floats)


def _asked(model: ModelProto, feeds: Mapping[str, Any]) -> list[str] | None:
    """The float inputs and the parameters: the derivative by a constant, such as an exponent, need not exist."""
    constants = {name for name, weight in weights(model).items() if weight.kind != "parameter"}
    names = [name for name in preflight(model).wrt if name not in constants or name in feeds]
    return names or None


def origins(
    model: ModelProto,
    feeds: Mapping[str, Any],
    backend: Backend,
    source: ModelProto | None = None,
    in_double: bool = False,
    results: Collection[str] | None = None,
) -> tuple[Origin, ...]:
    """The origins in a model, such as a gradient, that reach its results; none where the interpreter does not run it.

    :param source: the model whose gradient it is.
    :param in_double: in double on the interpreter, in place of the types of the model.
    :param results: the names of the results that matter, by default all.
    """
    try:
        return tuple(_Walk(model, feeds, backend, source or model, in_double).origins(results)[0])
    except RefgradError:
        return ()


def _whole(
    model: ModelProto, feeds: Mapping[str, Any], backend: Backend, reached: Iterable[str]
) -> tuple[list[str], str]:
    """The results that are not finite in an untouched run, and a note if this contradicts the walk."""
    try:
        results = backend.prepare(model).run(feeds)
    except RefgradError as error:
        return list(reached), f"the executor does not run the whole model: {error}"
    names = [name for name, value in results.items() if not _finite(value)]
    only = sorted(set(names) - set(reached))
    if only:
        return names, (
            f"{', '.join(only)}: not finite where the executor runs the whole model, and finite where it runs its nodes one by "
            "one: what it fuses or reorders makes it"
        )
    return names, ""


class _Walk:
    """A run, node by node, that remembers the values that are not finite and where they come from."""

    def __init__(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any],
        backend: Backend,
        source: ModelProto,
        in_double: bool = False,
        report: Callable[[str, int, int | None], None] = lambda *_: None,
    ) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(model)
        if self.model.functions:
            self.model = inline_functions(self.model)
        self.feeds = dict(feeds)
        self._backend, self._in_double, self._report = backend, in_double, report
        self._seen = 0
        self._is_interpreter = isinstance(backend, NumpyBackend)
        self._forward = {label_of(node): node for node in nested(_named(source).graph.node)}
        self._nodes = {first_output(node): node for node in nested(self.model.graph.node)}
        self._main = {first_output(node) for node in self.model.graph.node}
        self._inner = {first_output(node) for body in bodies(self.model) for node in body.node}
        self._constants = constants_of(self.model)
        self._taints: dict[str, Taint] = {}
        self._found: list[Origin] = []
        self._inside: list[int] = []  # the origins in the bodies of the node that runs
        self._rounds: dict[str, int] = {}

    def origins(self, wanted: Collection[str] | None = None) -> tuple[list[Origin], list[str]]:
        """The origins that reach the results, or those that are wanted, and the results that they reach."""
        for name, value in self.feeds.items():
            if not _finite(value):
                self._taints[name] = frozenset()
        watching = WatchingInDouble(self._look) if self._in_double else Watching(self._look)
        prepared = NumpyBackend().prepare(self.model, precision=watching)
        results = prepared.run(self.feeds)
        reached: set[int] = set()
        bad = []
        for name, value in results.items():
            if not _finite(value) and (wanted is None or name in wanted):
                bad.append(name)
                reached |= self._taints.get(name, frozenset())
        while more := {operand for k in reached for operand in self._found[k].of} - reached:
            reached |= more
        kept = sorted(reached)
        places = {old: new for new, old in enumerate(kept)}
        kept_origins = [
            replace(self._found[k], of=tuple(places[operand] for operand in self._found[k].of if operand in places))
            for k in kept
        ]
        return self._told_in_double(kept_origins), bad

    def _look(
        self, node: NodeProto, inputs: tuple[Any, ...], outer: Mapping[str, Any], compute: Compute
    ) -> tuple[Any, ...]:
        key = first_output(node)
        is_main, is_inner = key in self._main, key in self._inner
        if is_main:
            self._inside, self._rounds = [], {}
            self._seen += 1
            self._report("nodes", self._seen, len(self._main))
        has_body = any(attribute.HasField("g") for attribute in node.attribute)
        results = compute()
        if not is_main and not is_inner:
            return results
        if not self._is_interpreter and not has_body and not may_draw(node):
            results = self._on_executor(node, inputs, results)
        step = self._rounds[key] = self._rounds.get(key, 0) + 1
        known = {name: value for name, value in zip(node.input, inputs, strict=False) if name} | dict(outer)
        if has_body:
            taint = frozenset(self._inside) | self._taint_of(known)
            for name, value in zip(node.output, results, strict=False):
                if name and not _finite(value):
                    self._taints[name] = taint
        else:
            self._note_origins(node, known, results, not is_main, step - 1)
        if is_main and has_body:
            for k in self._inside:
                self._found[k] = replace(self._found[k], within=label_of(node))
        return results

    def _taint_of(self, values: Mapping[str, Any]) -> Taint:
        return frozenset().union(*(self._taints.get(name, frozenset()) for name, v in values.items() if not _finite(v)))

    def _note_origins(
        self, node: NodeProto, values: Mapping[str, Any], results: Sequence[Any], is_inner: bool, step: int
    ) -> None:
        taint: Taint | None = None
        for name, value in zip(node.output, results, strict=False):
            if not name or _finite(value):
                continue
            if taint is None:
                taint = self._taint_of(values)
            cause = cause_of(node, values, np.asarray(value), self.model)
            own: set[int] = set()
            if cause is not None:
                own.add(len(self._found))
                if is_inner:  # the node that it is in is named once that has run
                    self._inside.append(len(self._found))
                self._found.append(self._origin(node, name, np.asarray(value), cause, step, taint))
            self._taints[name] = frozenset(own) | taint

    def _origin(self, node: NodeProto, output: str, value: np.ndarray, cause: Cause, step: int, taint: Taint) -> Origin:
        domain, op_type = operator_of(node)
        label = label_of(node)
        forward = label.rpartition(_BACKWARD)[0].partition(_BACKWARD)[0] if _BACKWARD in label else ""
        origin = self._forward.get(forward, node) if forward else node
        kind, text, remedy = cause.kind, cause.text, cause.remedy
        if forward and kind in ("0 · ∞", "0/0") and (where := self._dead_branch(origin)):
            kind = "a dead branch"
            text = f"{text}; {where!r} does not take this branch, so its cotangent is 0"
            remedy = f"{OPTION}, or a harmless value in the branch before this operator, by a Where on its input"
        return Origin(
            label, f"{domain}.{op_type}" if domain else op_type, output, cause.at, float(value[cause.at]), cause.count,
            dict(list(cause.operands.items())[:_OPERANDS]), text, remedy, kind, forward, "", step,
            tuple(sorted(taint)), _source_of(origin),
        )  # fmt: skip

    def _dead_branch(self, node: NodeProto) -> str:
        """The Where that reads what the node makes, perhaps by way of other nodes; "" where there is none."""
        names, seen = set(node.output), 0
        for other in self._forward.values():
            if names.isdisjoint(other.input):
                continue
            if other.op_type == "Where":
                return label_of(other)
            seen += 1
            names |= set(other.output)
        return ""

    def _on_executor(self, node: NodeProto, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of the executor; the interpreter's if the executor does not run the node alone."""
        values = {name: np.asarray(v) for name, v in zip(node.input, inputs, strict=False) if name and v is not None}
        outputs = [(name, r) for name, r in zip(node.output, results, strict=False) if name]
        if not all(isinstance(r, np.ndarray | np.generic) for _, r in outputs):
            return results
        one_node_model = ModelProto(ir_version=self.model.ir_version)
        one_node_model.opset_import.extend(self.model.opset_import)
        one_node_model.graph.name = "node"
        one_node_model.graph.node.append(node)
        try:
            for name, value in values.items():
                if name in self._constants:
                    one_node_model.graph.initializer.append(numpy_helper.from_array(value, name))
                else:
                    one_node_model.graph.input.append(_described(name, value))
            one_node_model.graph.output.extend(_described(name, np.asarray(r), shape=False) for name, r in outputs)
            fed = {name: value for name, value in values.items() if name not in self._constants}
            computed = self._backend.prepare(one_node_model).run(fed)
        except (BackendError, RefgradError, KeyError, TypeError):
            return results
        return tuple(
            np.asarray(computed[n]) if n in computed else r for n, r in zip(node.output, results, strict=False)
        )

    def _told_in_double(self, listed: list[Origin]) -> list[Origin]:
        """The origins, with the same operands in double: an operand that is 0 here and not in double has underflowed."""
        names = {name for origin in listed for name in (*origin.operands, origin.output) if not origin.within}
        if not names:
            return listed
        try:
            prepared = NumpyBackend().prepare(self.model, precision="float64")
            known = [name for name in names if name not in self._constants and name not in self.feeds]
            wide = prepared.run(self.feeds, known) if known else {}
        except RefgradError:
            return listed
        return [self._explained_by(origin, wide) for origin in listed]

    def _explained_by(self, origin: Origin, wide: Mapping[str, Any]) -> Origin:
        due = wide.get(origin.output)
        if (
            origin.within
            or not isinstance(due, np.ndarray)
            or due.ndim < len(origin.at)
            or not np.isfinite(due[origin.at])
        ):
            return origin
        for name, value in origin.operands.items():
            array = wide.get(name)
            if value == 0 and isinstance(array, np.ndarray) and array.size:
                held = array[_under(origin.at, array.shape)] if array.ndim <= len(origin.at) else array.reshape(-1)[0]
                if held != 0:
                    return replace(
                        origin,
                        kind="underflow",
                        cause=f"{origin.cause}; {name!r} is {held:.3g} in double and 0 here: it underflows",
                        remedy="scale, work with logarithms, or compute this part in a wider type",
                    )
        return replace(origin, cause=f"{origin.cause}; in double it is {float(due[origin.at]):.6g}")


def _named(model: ModelProto) -> ModelProto:
    """`model` with the names of nodes that its gradient has; itself if it has none."""
    try:
        return normalise(model).model
    except RefgradError:
        return model


def _under(at: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element of an operand that an element of the result is made of, by broadcasting."""
    return tuple(k if size > 1 else 0 for k, size in zip(at[len(at) - len(shape) :], shape, strict=True))


def _source_of(node: NodeProto) -> str:
    """The line of the program that torch's exporter wrote down for a node."""
    for entry in node.metadata_props:
        if entry.key in _STACK and entry.value.strip():
            lines = [line.strip() for line in entry.value.strip().splitlines()]
            places = [k for k, line in enumerate(lines) if line.startswith("File ")]
            return " ".join(lines[places[-1] : places[-1] + 2]) if places else lines[-1]
    return ""


def _finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if not isinstance(value, np.ndarray | np.generic):
        return True
    array = np.asarray(value)
    if array.dtype.kind in "iubOUSM":
        return True
    return bool(np.isfinite(array.astype(np.float64) if array.dtype.kind not in "fc" else array).all())


def _described(name: str, value: np.ndarray, shape: bool = True) -> Any:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape if shape else None
    )
