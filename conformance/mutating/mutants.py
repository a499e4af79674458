"""A test of the suite: rules and function bodies are broken on purpose, one place at a time, and the suite has to notice.

A mutant is a rule with one change. The change is in the adjoints that the rule returns (a factor, the sign, an order), or in
one emission: `op.Sub(a, b)` becomes `op.Sub(b, a)`. An emission is identified by its place in the source of the rule, or of a
lowering that the rule reaches. A change is only a mutant if it changes the gradient model of some case. A mutant is caught
where the judge says wrong, or where its gradient fails and the unbroken one does not; an inconclusive verdict does not count.

An operator without a rule is differentiated through its function body, and a mutant is a body with one change: in its results,
or in one emission. It is also caught where the body computes another result than the kernel of the operator, which the body
has no part in.
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.cases import every_case
from refgrad.conformance.judging import verdicts
from refgrad.conformance.judging.judge import Candidate, Trial
from refgrad.conformance.mutating.survivors import Equivalent, equivalents
from refgrad.conformance.oracles import Built, Evidence
from refgrad.conformance.questions.point import largest
from refgrad.conformance.questions.question import ask
from refgrad.conformance.running.runner import ORACLES, testify
from refgrad.conformance.systems.builders import build
from refgrad.errors import BrokenRuleError, OptionError, RefgradError, did_you_mean
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.forward.functions import call_functions
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.external import array_of
from refgrad.protos.inlining import inline_functions
from refgrad.protos.types import Type
from refgrad.protos.walk import reads_of
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.registry import RULES, ZERO

FAILS = "fails"  # the verdict on a broken gradient that cannot be built or run
WITH_REFGRAD = "wrong beside refgrad"
WRONG_RESULT = "wrong result"  # the verdict on a body that differs from the kernel
KERNEL = "kernel"  # its witness
COLUMNS = {
    "mutants": "in all",
    verdicts.WRONG: "the judge says wrong, although refgrad's own gradient, which it uses, is broken in the same way",
    WITH_REFGRAD: "it says wrong only with refgrad's unbroken gradient as a witness, as it has when it judges another builder",
    WRONG_RESULT: "the judge does not say wrong, but a function body computes another result than the operator's kernel",
    FAILS: "the gradient cannot be built or run",
    "survived": "no case tells the mutant from the rule or the body",
}
_SAME = 1e-9  # a float64 gradient that changes less than this, relative to its largest element, is the same
_PATIENCE = 3  # after so many cases that need the unbroken gradient to catch a mutant, stop looking for others
_ENDLESS = 2**31 - 1  # from here a bound means "to the end"


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one rule. `place` is the input whose adjoint is changed, or the emission with its source text."""

    operator: str
    place: str
    change: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.place}: {self.change}"

    @property
    def reason(self) -> str:
        """The reason why it may survive, or "" where none is known."""
        return "" if self.row is None else self.row.reason

    @property
    def row(self) -> Equivalent | None:
        """The row of the table of survivors that covers it."""
        return next((row for row in equivalents() if row.matches(self.operator, self.place, self.change)), None)


@dataclass(frozen=True)
class Outcome:
    """The fate of a mutant: the case that caught it, the verdict and its witnesses; "" and () if no case did.

    `alone`: it is caught although refgrad's own gradient, which the judge uses, is broken in the same way. Otherwise the judge
    needed the unbroken gradient as a witness, as it has when it judges another builder. `tried` counts the cases whose
    gradient model the mutant changes. `tested`: a test of the caller notices it, too.
    """

    mutant: Mutant
    case: str = ""
    verdict: str = ""
    witnesses: tuple[str, ...] = ()
    alone: bool = False
    tried: int = 0
    note: str = ""
    tested: bool = False

    @property
    def caught(self) -> bool:
        """True if any case caught it."""
        return bool(self.case)

    @property
    def column(self) -> str:
        """The entry of `COLUMNS` that counts it."""
        if not self.caught:
            return "survived"
        return self.verdict if self.alone else WITH_REFGRAD


# Changes of an emission


Emits = Emitter | FunctionEmitter  # of a rule, of a body


def _emit(op: Emits, *arguments: Any, **options: Any) -> Any:
    """Emit without another change."""
    kind = FunctionEmitter if isinstance(op, FunctionEmitter) else Emitter
    return kind.emit(op, *arguments, **options)  # type: ignore[arg-type]


@dataclass
class EmittedCall:
    """A call of `Emitter.emit` before it is made. `ranks` has the ranks of its operands, if a run has shown them."""

    op: Emits
    op_type: str
    domain: str
    inputs: list[Any]
    outputs: int
    attributes: dict[str, Any]
    optional_outputs: bool
    ranks: Sequence[int | None]

    def emit(self) -> Any:
        """Make the call without another change."""
        return _emit(
            self.op, self.op_type, self.domain, self.inputs, self.outputs, self.attributes, self.optional_outputs
        )

    def named(self, position: int) -> str:
        """A copy of an operand, under its own name."""
        value = self.inputs[position]
        if isinstance(value, int | float):
            value = self.op.const(value, like=next(v for v in self.inputs if isinstance(v, str)))
        value = value if isinstance(value, str) else self.op.const(value)
        return str(self.op.Identity(value)) if isinstance(self.op, FunctionEmitter) else self.op.copy(value)


Change = Callable[[EmittedCall], Any]  # emits something else; None where the change does not apply


def _swapped(first: int, second: int) -> Change:
    def change(it: EmittedCall) -> Any:
        it.inputs[first], it.inputs[second] = it.inputs[second], it.inputs[first]
        return it.emit()

    return change


def _kept(position: int) -> Change:
    return lambda it: it.named(position) if len(it.inputs) > position else None


def _branch(position: int) -> Change:
    def change(it: EmittedCall) -> Any:
        it.inputs[1] = it.inputs[2] = it.inputs[position]
        return it.emit() if any(isinstance(value, str) for value in it.inputs[1:]) else None

    return change


def _instead(op_type: str) -> Change:
    def change(it: EmittedCall) -> Any:
        it.op_type = op_type
        return it.emit()

    return change


def _other_axis(it: EmittedCall) -> Any:
    """The next axis, in an attribute or in a constant operand (of a reduction, Slice, Pad or Squeeze)."""
    rank = it.ranks[0] if it.ranks else None
    if rank is not None and it.op_type == "Unsqueeze" and (added := _constant(it, 1)) is not None:
        rank += added.size
    if rank is None or rank < 2:
        return None
    for name in ("axis", "axes"):
        if it.attributes.get(name) is not None:
            it.attributes[name] = ((np.asarray(it.attributes[name]) + 1) % rank).tolist()
            return it.emit()
    place = 3 if it.op_type in ("Slice", "Pad") else 1
    axes = _constant(it, place)
    if axes is None or axes.dtype != np.int64 or axes.size >= rank:
        return None
    it.inputs[place] = (axes + 1) % rank
    return it.emit()


def _rotated(it: EmittedCall) -> Any:
    perm = it.attributes.get("perm")
    if perm is None:
        return None
    it.attributes["perm"] = [*perm[1:], perm[0]]
    return it.emit()


def _flipped(name: str) -> Change:
    def change(it: EmittedCall) -> Any:
        it.attributes[name] = 1 - (it.attributes.get(name) or 0)
        return it.emit()

    return change


def _stepped(name: str, by: int) -> Change:
    """The first integer of an attribute, changed by `by`."""

    def change(it: EmittedCall) -> Any:
        values = it.attributes.get(name)
        least = 0 if name in ("pads", "output_padding") else 1
        if not values or values[0] + by < least:
            return None
        it.attributes[name] = [values[0] + by, *values[1:]]
        return it.emit()

    return change


def _moved(by: int, *positions: int) -> Change:
    """The first element of each of these operands, changed by `by`: bounds, steps, sizes of padding."""

    def change(it: EmittedCall) -> Any:
        for position in positions:
            value = it.inputs[position] if position < len(it.inputs) else None
            if value is None:
                return None
            known = _constant(it, position)
            if known is None:
                it.inputs[position] = it.op.Add(value, by)
            elif not known.size or abs(int(known.flat[0])) >= _ENDLESS or (known.flat[0] + by == 0 and position == 4):
                return None
            else:
                moved = known.copy()
                moved.flat[0] += by
                it.inputs[position] = moved
        return it.emit()

    return change


def _constant(it: EmittedCall, position: int) -> np.ndarray | None:
    """The array of an operand, if it is a known constant."""
    value = it.inputs[position] if position < len(it.inputs) else None
    if isinstance(it.op, FunctionEmitter) and isinstance(value, str):
        makers = (node for node in it.op.nodes if node.op_type == "Constant" and value in node.output)
        return next((array_of(node.attribute[0].t) for node in makers), None)
    if isinstance(value, str) or value is None:
        return it.op.constant(value) if isinstance(it.op, Emitter) else None
    kind = None if isinstance(value, np.ndarray) else np.int64
    return np.asarray(value, kind)


SWAPPED = {"swapped operands": _swapped(0, 1)}
TERMS = {"only the first operand": _kept(0), "only the second operand": _kept(1)}
AXIS: dict[str, Change] = {"next axis": _other_axis}
WINDOW = {
    f"{name} {by:+d}": _stepped(name, by) for name in ("kernel_shape", "pads", "strides", "dilations") for by in (1, -1)
}
DROPPED = {"dropped": _kept(0)}

_ALONG = (
    *("Concat", "Split", "Softmax", "LogSoftmax", "GatherElements", "ScatterElements", "ArgMax", "ArgMin", "TopK"),
    *("Squeeze", "Unsqueeze", "ReduceProd", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "OneHot", "Flatten"),
)
CHANGES: dict[str, dict[str, Change]] = {
    "Sub": SWAPPED | TERMS,
    "Div": SWAPPED | TERMS,
    "Pow": SWAPPED | TERMS,
    "MatMul": SWAPPED,
    "Add": TERMS,
    "Mul": TERMS,
    "Sum": TERMS,
    "Where": {
        "swapped branches": _swapped(1, 2),
        "only the first branch": _branch(1),
        "only the second branch": _branch(2),
    },
    **dict.fromkeys(("Neg", "Not", "Abs", "Sign", "Floor", "Ceil", "Sqrt", "Exp", "Log", "Reciprocal"), DROPPED),
    "Transpose": {"dropped": _kept(0), "rotated perm": _rotated},
    "ReduceSum": AXIS | {"ReduceMean": _instead("ReduceMean"), "ReduceMax": _instead("ReduceMax")},
    "ReduceMean": AXIS | {"ReduceSum": _instead("ReduceSum")},
    "ReduceMax": AXIS | {"ReduceMin": _instead("ReduceMin")},
    "ReduceMin": AXIS | {"ReduceMax": _instead("ReduceMax")},
    "Max": {"Min": _instead("Min")},
    "Min": {"Max": _instead("Max")},
    "And": {"Or": _instead("Or")},
    "Or": {"And": _instead("And")},
    "Greater": {"GreaterOrEqual": _instead("GreaterOrEqual"), "Less": _instead("Less")},
    "GreaterOrEqual": {"Greater": _instead("Greater"), "LessOrEqual": _instead("LessOrEqual")},
    "Less": {"LessOrEqual": _instead("LessOrEqual"), "Greater": _instead("Greater")},
    "LessOrEqual": {"Less": _instead("Less"), "GreaterOrEqual": _instead("GreaterOrEqual")},
    "CumSum": AXIS | {f"{name} flipped": _flipped(name) for name in ("exclusive", "reverse")},
    "Gemm": SWAPPED | {f"{name} flipped": _flipped(name) for name in ("transA", "transB")},
    "Trilu": {"upper flipped": lambda it: _upper(it)},
    "Slice": AXIS
    | {
        "starts +1": _moved(1, 1),
        "ends -1": _moved(-1, 2),
        "window +1": _moved(1, 1, 2),
        "window -1": _moved(-1, 1, 2),
        "steps +1": _moved(1, 4),
    },
    "Pad": AXIS | {"pads +1": _moved(1, 1), "pads -1": _moved(-1, 1)},
    "Range": {"start +1": _moved(1, 0), "limit -1": _moved(-1, 1), "both +1": _moved(1, 0, 1)},
    "Gather": AXIS | {"indices +1": _moved(1, 1)},
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), WINDOW),
    **dict.fromkeys(_ALONG, AXIS),
}


def _upper(it: EmittedCall) -> Any:
    it.attributes["upper"] = 1 - it.attributes.get("upper", 1)
    return it.emit()


def _scaled(it: EmittedCall) -> Any:
    """A constant of floats, 1% larger."""
    value = array_of(it.attributes["value"])
    if it.attributes["value"].data_type not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return None
    it.attributes["value"] = numpy_helper.from_array(np.asarray(1.01 * value, value.dtype))
    return it.emit()


def _with(changes: dict[str, Change], *op_types: str) -> dict[str, dict[str, Change]]:
    return {op_type: CHANGES.get(op_type, {}) | changes for op_type in op_types}


# Further changes in a body: it has the operator's own arithmetic and its constants.
BODY_CHANGES = CHANGES | {
    **_with({"Sub": _instead("Sub")}, "Add"),
    **_with({"Add": _instead("Add")}, "Sub"),
    **_with({"Div": _instead("Div")}, "Mul"),
    **_with({"Mul": _instead("Mul")}, "Div"),
    **_with({"Greater": _instead("Greater")}, "Equal"),
    **_with(DROPPED, "Tanh", "Sigmoid", "Erf", "Relu", "Softplus", "Clip", "Round", "Cos", "Sin"),
    **_with({"1% larger": _scaled}, "Constant"),
}


# Changes of the result of a rule


def _flat(op: Emits, value: str, rearranged: Callable[[str], str]) -> str:
    """`value` with its elements rearranged as one row."""
    return str(op.Reshape(rearranged(op.Reshape(value, [-1])), op.Shape(value), allowzero=1))


def _rolled(op: Emits, value: str) -> str:
    return _flat(op, value, lambda row: op.Concat(op.Slice(row, [-1], [_ENDLESS]), op.Slice(row, [0], [-1]), axis=0))


def _reversed(op: Emits, value: str) -> str:
    return _flat(op, value, lambda row: op.Slice(row, [-1], [-_ENDLESS], [0], [-1]))


# By name: the function, and the number of axes along which a gradient needs two elements for the function to change it.
RETURNED: dict[str, tuple[Callable[[Any, str], str | None], int]] = {
    "1% too large": (lambda op, value: op.Mul(value, 1.01), 0),
    "twice as large": (lambda op, value: op.Mul(value, 2.0), 0),
    "other sign": (lambda op, value: op.Neg(value), 0),
    "zero": (lambda op, value: None, 0),
    "transposed": (lambda op, value: op.Reshape(op.Transpose(value), op.Shape(value), allowzero=1), 2),
    "reversed": (_reversed, 1),
    "rolled by one": (_rolled, 1),
}
EXCHANGED = "exchanged with the next"


def _has(shape: tuple[int, ...] | None, axes: int) -> bool:
    """True if a gradient of this shape has two elements along at least `axes` axes; true where the shape is unknown."""
    return shape is None or sum(size > 1 for size in shape) >= axes


# A rule with one change


@dataclass(frozen=True, order=True)
class Site:
    """An emission: its place in the source, the operator, and the text of the call."""

    file: str
    function: str
    position: tuple[int, int]
    op_type: str
    text: str = field(compare=False)

    @property
    def place(self) -> str:
        """The place as a reader finds it: module, function and call."""
        module = Path(self.file).with_suffix("")
        made = "" if f".{self.op_type}(" in self.text else f" [{self.op_type}]"
        return f"{'/'.join(module.parts[-2:])}.{self.function}: {self.text}{made}"


_SUM = "BroadcastGradient"  # the primitive that the sweep adds
_EMITTERS = {__file__} | {
    sys.modules[cls.__module__].__file__ for cls in {*Emitter.__mro__, *FunctionEmitter.__mro__} - {object}
}


def _site(frame: FrameType | None, op_type: str) -> Site:
    """The place of the current emission: the innermost call outside of the emitter and of this module."""
    while frame is not None and frame.f_code.co_filename in _EMITTERS:
        frame = frame.f_back
    assert frame is not None
    return _place(frame.f_code, frame.f_lasti, op_type)


@cache
def _place(code: CodeType, instruction: int, op_type: str) -> Site:
    line, end, column, end_column = list(code.co_positions())[instruction // 2]
    text = ""
    if line is not None and end is not None:
        lines = [linecache.getline(code.co_filename, number) for number in range(line, end + 1)]
        lines[-1] = lines[-1].encode()[:end_column].decode()
        lines[0] = lines[0].encode()[column:].decode()
        text = _one_line("".join(lines))
    return Site(code.co_filename, code.co_qualname, (line or 0, column or 0), op_type, text)


def _one_line(text: str) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(text).strip(), mode="eval"))
    except SyntaxError:  # the text is only a part of an expression
        return " ".join(text.split())


@dataclass
class _Breaking:
    """A run of rules with at most one change. `emitted` has the names of the results of every site, in order."""

    change: tuple[Site, Change] | None = None
    ranks: Mapping[Site, Sequence[Sequence[int | None]]] = field(default_factory=dict)
    emitted: dict[Site, list[str]] = field(default_factory=lambda: defaultdict(list))
    busy: bool = False
    body: FunctionEmitter | None = None  # the last one that was emitted

    def emit(self, op: Emits, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        op_type = arguments[0]
        if self.busy or op_type not in (CHANGES if isinstance(op, Emitter) else BODY_CHANGES):
            return _emit(op, *arguments, **options)
        site = _site(sys._getframe(1), op_type)
        made: Any = None
        if self.change is not None and site == self.change[0]:
            made = self._changed(op, site, arguments, options)
        if made is None:
            made = _emit(op, *arguments, **options)
        self.emitted[site].append(made if isinstance(made, str) else made[0])
        return made

    def _changed(self, op: Emits, site: Site, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        op_type, domain, inputs, outputs, attributes, *rest = arguments
        seen, count = self.ranks.get(site, ()), len(self.emitted[site])
        optional = bool(options.get("optional_outputs", rest and rest[0]))
        ranks = seen[count] if count < len(seen) else ()
        it = EmittedCall(op, op_type, domain, list(inputs), outputs, dict(attributes), optional, ranks)
        self.busy = True
        before = len(op.nodes) if isinstance(op, FunctionEmitter) else 0
        try:
            assert self.change is not None
            made = self.change[1](it)
            if made is None and isinstance(op, FunctionEmitter):
                del op.nodes[before:]
            return made
        finally:
            self.busy = False


@contextmanager
def broken(
    key: tuple[str, str],
    breaking: _Breaking,
    returned: Callable[[Any, dict[str, str | None]], dict[str, str | None]] | None = None,
) -> Iterator[None]:
    """Inside this context, the rule of an operator runs through `breaking`, and `returned` may change its adjoints.

    The sum over broadcast axes, which the sweep adds to a rule, runs through `breaking` too. Of an operator without a rule it
    is the body that does, and `returned` may change its results.
    """
    with _broken_rule(key, breaking, returned) if key in RULES else _broken_body(key, breaking, returned):
        yield


@contextmanager
def _broken_body(key: tuple[str, str], breaking: _Breaking, returned: Any) -> Iterator[None]:
    known = DEFINITIONS[key]
    names = [output.name for output in known.schema.outputs]

    def function(op: FunctionEmitter, *arguments: Any, **keywords: Any) -> Any:
        breaking.emitted.clear()  # a body is emitted again when more is known of its inputs
        breaking.body = op
        with _watched(op, breaking):
            result = known.function(op, *arguments, **keywords)
        if returned is None:
            return result
        return _rebuilt(result, returned(op, dict(_entries(names, result))))

    DEFINITIONS[key] = replace(known, function=function)
    try:
        yield
    finally:
        DEFINITIONS[key] = known


@contextmanager
def _broken_rule(key: tuple[str, str], breaking: _Breaking, returned: Any) -> Iterator[None]:
    rule = RULES[key]

    def function(op: Emitter, *arguments: Any, **keywords: Any) -> Any:
        with _watched(op, breaking):
            result = rule.function(op, *arguments, **keywords)
        if returned is None:
            return result
        entries = dict(_entries(rule.wrt, result))
        return _rebuilt(result, returned(op, entries))

    sums = [one.lowerings for one in DIALECTS.values() if _SUM in one.lowerings] if rule.broadcast else []
    right = [table[_SUM] for table in sums]
    RULES[key] = replace(rule, function=function)
    for table, lower in zip(sums, right, strict=True):
        table[_SUM] = _watching(lower, breaking)
    try:
        yield
    finally:
        RULES[key] = rule
        for table, lower in zip(sums, right, strict=True):
            table[_SUM] = lower


@contextmanager
def _watched(op: Emits, breaking: _Breaking) -> Iterator[None]:
    def emit(*arguments: Any, **options: Any) -> Any:
        return breaking.emit(op, arguments, options)

    def scan(step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def watched(inner: FunctionEmitter, *inputs: Any) -> Any:
            with _watched(inner, breaking):
                return step(inner, *inputs)

        return FunctionEmitter.scan(op, watched, *arguments, **options)  # type: ignore[arg-type]

    before = dict(vars(op))
    vars(op)["emit"] = emit
    if isinstance(op, FunctionEmitter):
        vars(op)["scan"] = scan
    try:
        yield
    finally:
        for name in ("emit", "scan"):
            vars(op).pop(name, None)
            if name in before:
                vars(op)[name] = before[name]


def _watching(lower: Callable[..., Any], breaking: _Breaking) -> Callable[..., Any]:
    """A lowering whose emissions go through `breaking`."""

    def watched(op: Emitter, *inputs: Any) -> Any:
        with _watched(op, breaking):
            return lower(op, *inputs)

    return watched


def _entries(wrt: Sequence[str], result: Any) -> Iterator[tuple[str, str | None]]:
    """The adjoints that a rule returned, by input; the adjoints of a variadic input are numbered."""
    for name, adjoint in zip(wrt, result if isinstance(result, tuple) else (result,), strict=False):
        if isinstance(adjoint, list | tuple):
            yield from ((f"{name}_{k}", one) for k, one in enumerate(adjoint))
        else:
            yield name, adjoint


def _rebuilt(result: Any, entries: Mapping[str, str | None]) -> Any:
    """The adjoints in the form in which the rule returned them."""
    values = iter(entries.values())

    def one(adjoint: Any) -> Any:
        return [next(values) for _ in adjoint] if isinstance(adjoint, list | tuple) else next(values)

    return tuple(map(one, result)) if isinstance(result, tuple) else one(result)


# The survey


def survey(
    operators: Sequence[str] | None = None,
    seed: int = 0,
    tests: Sequence[Callable[[Case], None]] = (),
    progress: Callable[[int, int, str], None] | None = None,
    every: int = 1,
) -> list[Outcome]:
    """The outcome of every mutant of the rules and bodies of these operators, by default of all.

    :param operators: names like "Conv" or "com.microsoft.Gelu".
    :param tests: tests of a case, for which mutants that are caught are planted again: `Outcome.tested` has the result.
    :param progress: called with the number of operators that are done, the number of all, and a text about the next.
    :param every: take one of so many mutants of an operator, at least one.
    :raises OptionError: an operator has neither a rule nor a body.
    """
    known = ruled() | defined()
    for name in operators or ():
        if name not in known:
            raise OptionError(f"There is no rule for {name!r}, and no body.{did_you_mean(name, known)}")
    outcomes: list[Outcome] = []
    listed = list(operators or known)
    for done, name in enumerate(listed):
        if progress is not None:
            caught = sum(one.caught for one in outcomes)
            progress(done, len(listed), f"{name}; {caught} of {len(outcomes)} mutants caught")
        outcomes += _Operator(name, known[name], seed, tests).outcomes(every)
    return outcomes


def ruled() -> dict[str, tuple[str, str]]:
    """The operators that have a rule: the name with the domain, and the key of the rule in `RULES`."""
    return {f"{domain}.{name}" if domain else name: (domain, name) for domain, name in sorted(RULES)}


def defined() -> dict[str, tuple[str, str]]:
    """The operators of ONNX Runtime that are differentiated through their body: the name, and the key in `DEFINITIONS`."""
    keys = sorted(DEFINITIONS.keys() - RULES.keys() - ZERO.keys())
    return {f"{domain}.{name}": (domain, name) for domain, name in keys if domain == MICROSOFT}


def family(key: tuple[str, str]) -> str:
    """The name of the module with the body of an operator of `defined`: "activation"."""
    return DEFINITIONS[key].function.__module__.rpartition(".")[2]


def summary(outcomes: Sequence[Outcome], operators: Sequence[str] = ()) -> dict[str, Any]:
    """The outcomes counted by operator and by oracle, and every survivor, for JSON.

    :param operators: those that were surveyed; of some there may be no mutant.
    """
    counts = {name: Counter(dict.fromkeys(COLUMNS, 0)) for name in operators}
    for one in outcomes:
        count = counts.setdefault(one.mutant.operator, Counter(dict.fromkeys(COLUMNS, 0)))
        count["mutants"] += 1
        count[one.column] += 1
    witnesses = Counter(witness for one in outcomes for witness in one.witnesses)
    survivors = [asdict(one.mutant) for one in outcomes if not one.caught]
    return {"operators": counts, "witnesses": dict(sorted(witnesses.items())), "survivors": survivors}


@dataclass
class _Subject:
    """A case with the gradient of the unbroken rule: its model, its values, its emissions, and the adjoints returned."""

    case: Case
    key: tuple[str, str]
    seed: int
    catches: int = 0

    def __post_init__(self) -> None:
        """Make the question of the case, and answer it with the unbroken rule.

        :raises RefgradError: the case has no question, or the gradient cannot be built or run.
        """
        self.question = ask(self.case, self.seed)
        watched, entries = _Breaking(), set[str]()

        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            entries.update(name for name, adjoint in adjoints.items() if adjoint is not None)
            return adjoints

        with broken(self.key, watched, returned):
            built = build("refgrad", self.question)
        self.form = _form(built.model.graph, {})
        values = self._run(built, trace=True)
        self.gradients = built.named(values)
        nodes = {node.name: node for node in built.model.graph.node}
        shown = self.gradients
        if self.of_body:
            assert watched.body is not None
            self.body_form = _form(self.through_the_body().graph, {})
            values = self._trace_of_the_body(watched.body)
            nodes = {name: node for node in watched.body.nodes for name in node.output}
            given = (self.results.get(name) for name in self.case.node.output)
            shown = {name: value for name, value in zip(self.outputs, given, strict=False) if value is not None}
            entries = {name for name in entries if is_float(shown.get(name))}

        def ranks(result: str) -> list[int | None]:
            node = nodes.get(result) or nodes.get(result.removesuffix("_0"))
            operands = () if node is None else node.input
            return [np.ndim(values[name]) if name in values else None for name in operands]

        self.entries = {name: np.shape(shown[name]) if name in shown else None for name in entries}
        self.ranks = {site: [ranks(result) for result in results] for site, results in watched.emitted.items()}

    @property
    def of_body(self) -> bool:
        """True if the mutants break a body, not a rule."""
        return self.key not in RULES

    @property
    def outputs(self) -> list[str]:
        """The operator's outputs, by their names in its schema."""
        return [output.name for output in DEFINITIONS[self.key].schema.outputs]

    @cached_property
    def results(self) -> Mapping[str, Any]:
        """The values that the kernels compute: every value of the model."""
        weights = {t.name: array_of(t) for t in self.case.model.graph.initializer}
        prepared = NumpyBackend().prepare(self.case.model)
        return {**weights, **self.case.feeds, **prepared.run(self.case.feeds, trace=True)}

    def through_the_body(self) -> ModelProto:
        """The model of the case with the body in the place of the operator."""
        model = ModelProto()
        model.CopyFrom(self.case.model)
        types: dict[str, Type] = {
            name: (helper.np_dtype_to_tensor_dtype(value.dtype), value.ndim)
            for name, value in self.results.items()
            if isinstance(value, np.ndarray)
        }
        call_functions(model, types)
        model = inline_functions(model)
        needed = {value.name for value in model.graph.output}
        kept = []
        for node in reversed(model.graph.node):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(reads_of(node))
        del model.graph.node[:]
        model.graph.node.extend(reversed(kept))
        return model

    def _trace_of_the_body(self, body: FunctionEmitter) -> Mapping[str, Any]:
        """Every value that the nodes of the body compute in the case."""
        fed = {f"in_{k}": np.asarray(self.results[name]) for k, name in enumerate(self.case.node.input) if name}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in fed.items()
        ]
        last = [onnx.ValueInfoProto(name=name) for name in body.nodes[-1].output]
        graph = helper.make_graph(body.nodes, "body", inputs, last)
        model = helper.make_model(graph, opset_imports=self.case.model.opset_import)
        return {**fed, **NumpyBackend().prepare(model).run(fed, trace=True)}

    def wrong_result(self, model: ModelProto) -> str:
        """A text about the first output of `model` that differs from the kernel's, or "", as in the tests of the bodies."""
        got = NumpyBackend().prepare(model).run(self.case.feeds)
        for value in model.graph.output:
            wanted = self.results[value.name]
            slack = 8 * float(np.finfo(wanted.dtype).eps) if wanted.dtype.kind == "f" else 0
            if got[value.name].shape != wanted.shape or not np.allclose(
                got[value.name], wanted, rtol=slack, atol=slack, equal_nan=True
            ):
                return f"{value.name} differs"
        return ""

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence of the oracles about the question."""
        said: list[Evidence] = []
        for oracle in ORACLES:
            with suppress(Exception):  # an oracle that fails is silent, as in a run of the suite
                said += testify(oracle, self.question)
        return tuple(said)

    @cached_property
    def trial(self) -> Trial:
        """The judge, with the unbroken gradient."""
        return Trial(self.question, self.evidence)

    @cached_property
    def sound(self) -> bool:
        """True if the judge accepts the unbroken gradient."""
        nodes = len(self.form[0])
        return self.trial.verdict(Candidate("refgrad", "numpy", nodes, self.gradients)).verdict != verdicts.WRONG

    def _run(self, built: Built, trace: bool = False) -> Mapping[str, Any]:
        prepared = NumpyBackend().prepare(built.model, precision="float64")
        return prepared.run(built.feeds(self.question.at, self.question.wide_cotangents), trace=trace)

    @np.errstate(all="ignore")
    def try_on(self, breaking: Callable[[], Any]) -> Outcome | None:
        """The outcome of the mutant that `breaking` makes, not named yet; None where the gradient model stays the same."""
        wrong = ""
        with breaking():
            try:
                if self.of_body:
                    model = self.through_the_body()
                    if _form(model.graph, {}) == self.body_form:
                        return None
                built = build("refgrad", self.question)
                if not self.of_body and _form(built.model.graph, {}) == self.form:
                    return None
                gradients = built.named(self._run(built))
                wrong = self.wrong_result(model) if self.of_body else ""
            except Exception as error:  # a broken rule may raise anything
                return Outcome(_NOBODY, self.case.name, FAILS, (), True, note=" ".join(str(error).split())[:200])
        found = self._judged(gradients, len(built.model.graph.node), breaking)
        if wrong and not found.caught:
            return Outcome(_NOBODY, self.case.name, WRONG_RESULT, (KERNEL,), True, note=wrong)
        return found

    def _judged(self, gradients: Mapping[str, Any], nodes: int, breaking: Callable[[], Any]) -> Outcome:
        """The judge's verdict on the gradients of a mutant."""
        if all(_same(gradients.get(name), gradient) for name, gradient in self.gradients.items()):
            return Outcome(_NOBODY)
        candidate = Candidate("mutant", "numpy", nodes, gradients)
        evidence, trial = self.evidence, self.trial
        with breaking():
            row = Trial(self.question, evidence).verdict(candidate)
        alone = row.verdict == verdicts.WRONG
        if not alone:
            row = trial.verdict(candidate)
        if row.verdict != verdicts.WRONG or not self.sound:
            return Outcome(_NOBODY, note=f"{self.case.name}: {row.verdict}: {row.note}")
        return Outcome(_NOBODY, self.case.name, row.verdict, row.witnesses, alone, note=row.note)


_NOBODY = Mutant("", "", "")


def _form(graph: GraphProto, outside: Mapping[str, Any]) -> Any:
    """The computation of a graph, whatever its values are called: the names also count emissions that were not used."""
    names = dict(outside)
    names |= {value.name: ("input", len(names), k) for k, value in enumerate(graph.input)}
    names |= {tensor.name: (tensor.data_type, *tensor.dims, tensor.raw_data) for tensor in graph.initializer}
    nodes = []
    for k, node in enumerate(graph.node):
        attributes = [_form(a.g, names) if a.HasField("g") else a.SerializeToString() for a in node.attribute]
        nodes.append((node.op_type, node.domain, [names.get(name, name) for name in node.input], attributes))
        names |= {name: (len(outside), k, place) for place, name in enumerate(node.output)}
    return nodes, [names[value.name] for value in graph.output]


def _same(got: np.ndarray | None, wanted: np.ndarray) -> bool:
    if got is None or got.shape != wanted.shape:
        return False
    slack = _SAME * largest(wanted[np.isfinite(wanted)])
    return bool(np.allclose(got, wanted, rtol=0, atol=slack, equal_nan=True))


def mutants_of(
    key: tuple[str, str], case: Case, seed: int = 0
) -> Iterator[tuple[Mutant, Callable[[], AbstractContextManager[None]]]]:
    """Each mutant of a rule, and what breaks the rule in this way while its context lasts. They are found in one case.

    The place of a mutant is an input, "the adjoint of x", or an operator that the rule emits. Some leave the gradient as it is.

    :param key: of the rule in `RULES`, its domain and name.
    :raises RefgradError: the unbroken rule does not answer the case.
    """
    subject = _Subject(case, key, seed)
    for entry, shape in sorted(subject.entries.items()):
        for change, (function, axes) in RETURNED.items():
            if _has(shape, axes):
                mutant = Mutant(case.operator, f"the adjoint of {entry}", change)
                yield mutant, partial(broken, key, _Breaking(), partial(_with_one, entry, function))
    for site, ranks in sorted(subject.ranks.items()):
        for change, emission in CHANGES[site.op_type].items():
            yield Mutant(case.operator, site.op_type, change), partial(_broken_anew, key, site, emission, {site: ranks})


def _with_one(
    entry: str, function: Callable[[Any, str], str | None], op: Any, adjoints: dict[str, str | None]
) -> dict[str, str | None]:
    adjoint = adjoints.get(entry)
    return adjoints if adjoint is None else adjoints | {entry: function(op, adjoint)}


def _broken_anew(
    key: tuple[str, str], site: Site, change: Change, ranks: Mapping[Site, Sequence[Sequence[int | None]]]
) -> AbstractContextManager[None]:
    """The context of a changed emission. What a run has emitted is of that run alone."""
    return broken(key, _Breaking((site, change), ranks))


@np.errstate(all="ignore")
def _passes(test: Callable[[Case], None], case: Case, context: AbstractContextManager[None]) -> bool:
    with context:
        try:
            test(case)
        except Exception:  # a broken rule may raise anything
            return False
    return True


class _Operator:
    """The mutants of one rule or body and the cases that try them; those that have caught most are tried first."""

    def __init__(
        self, operator: str, key: tuple[str, str], seed: int, tests: Sequence[Callable[[Case], None]] = ()
    ) -> None:
        self.operator, self.key, self.tests = operator, key, tests
        self.sound: dict[tuple[Any, str], bool] = {}  # by test and case: whether it passes with the unbroken rule
        self.subjects = []
        for case in every_case():
            if case.operator == operator and case.values == "smooth":
                try:
                    self.subjects.append(_Subject(case, key, seed))
                except BrokenRuleError:  # the rule is not broken yet: it is this program
                    raise
                except RefgradError:  # without the unbroken gradient there is nothing to compare mutants with
                    continue

    def outcomes(self, every: int = 1) -> Iterator[Outcome]:
        """The outcome of each mutant, or of one of so many, in the order of the source."""
        listed = list(self._mutants())
        for mutant in listed[len(listed) // 2 % every :: every]:
            yield from self._try(*mutant)

    def _mutants(self) -> Iterator[tuple[Mutant, Sequence[_Subject], Callable[[_Subject], Any]]]:
        """Each mutant with the cases that may catch it and the way to break the rule or the body."""
        entries = sorted({name for subject in self.subjects for name in subject.entries})
        for k, entry in enumerate(entries):
            for change in RETURNED:
                if change == "zero" and self.key not in RULES:
                    continue  # a body that lacks a result does not apply
                yield Mutant(self.operator, entry, change), *self._returning(entry, change)
            if k + 1 < len(entries):
                yield Mutant(self.operator, entry, EXCHANGED), *self._exchanging(*entries[k : k + 2])
        seen = Counter[str]()
        for site in sorted({site for subject in self.subjects for site in subject.ranks}):
            seen[site.place] += 1
            place = site.place if seen[site.place] == 1 else f"{site.place} ({seen[site.place]})"
            changes = CHANGES if self.key in RULES else BODY_CHANGES
            for change, emission in changes[site.op_type].items():
                yield Mutant(self.operator, place, change), *self._emitting(site, emission)

    def _try(
        self, mutant: Mutant, concerned: Sequence[_Subject], breaking: Callable[[_Subject], Any]
    ) -> Iterator[Outcome]:
        """The outcome, or nothing where the change does not make a mutant."""
        tried, second, note = 0, [], ""
        for subject in sorted(concerned, key=lambda one: -one.catches):
            found = subject.try_on(partial(breaking, subject))
            if found is None:
                continue
            tried += 1
            if found.alone:
                subject.catches += 1
                tested = self._tested(subject, [one for one in concerned if one is not subject], breaking)
                yield replace(found, mutant=mutant, tried=tried, tested=tested)
                return
            if found.caught:
                second.append(found)
                if len(second) == _PATIENCE:
                    break
            note = note or found.note
        if second:
            tested = self._tested(concerned[0], concerned[1:], breaking)
            yield replace(second[0], mutant=mutant, tried=tried, tested=tested)
        elif tried:
            yield Outcome(mutant, tried=tried, note=note)

    def _tested(self, first: _Subject, others: Sequence[_Subject], breaking: Callable[[_Subject], Any]) -> bool:
        """True if a test of the caller fails for a mutant in one of the cases, and passes without it."""
        for test in self.tests:
            for subject in (first, *others):
                key = test, subject.case.name
                if key not in self.sound:
                    self.sound[key] = _passes(test, subject.case, nullcontext())
                if self.sound[key] and not _passes(test, subject.case, breaking(subject)):
                    return True
        return False

    def _returning(self, entry: str, change: str) -> Any:
        function, axes = RETURNED[change]

        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            adjoint = adjoints.get(entry)
            return adjoints if adjoint is None else adjoints | {entry: function(op, adjoint)}

        concerned = [one for one in self.subjects if entry in one.entries and _has(one.entries[entry], axes)]
        return concerned, lambda subject: broken(self.key, _Breaking(), returned)

    def _exchanging(self, one: str, other: str) -> Any:
        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            if one not in adjoints or other not in adjoints:
                return adjoints
            return adjoints | {one: adjoints[other], other: adjoints[one]}

        concerned = [subject for subject in self.subjects if {one, other} <= subject.entries.keys()]
        return concerned, lambda subject: broken(self.key, _Breaking(), returned)

    def _emitting(self, site: Site, change: Change) -> Any:
        concerned = [subject for subject in self.subjects if site in subject.ranks]
        return concerned, lambda subject: broken(self.key, _Breaking((site, change), subject.ranks))
