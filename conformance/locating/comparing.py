"""Two gradients of one model, from two systems or recorded: which tensors differ, who is wrong, where, and the proof.

The judge is refgrad's gradient in double on the interpreter, each disputed tensor of which is confirmed by central differences
first. A tensor of a side is right where rounding explains its distance from the judge's. What a side gets wrong is followed to
the node: to the rule, where the side's own gradient model is wrong in double too (`bisect`); to the kernel, where that model is
right and the executor is not (`locate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.backends.base import ModelLike, Value, check_feeds, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.locating.bisection import Bisected, bisect
from refgrad.conformance.locating.location import Located, locate
from refgrad.conformance.locating.recordings import Match, Matched, Recording, identity, match
from refgrad.conformance.locating.sides import Live, Side, in_precision, side_of
from refgrad.conformance.oracles.comparison import (
    AGREED,
    DISAGREED,
    EXACT,
    FLOAT64_BITS,
    INCONCLUSIVE,
    KINK,
    SENSITIVE,
    against_directions,
    outside_of_both,
)
from refgrad.conformance.oracles.differences import estimates
from refgrad.conformance.questions.evidence import Built, Directional
from refgrad.conformance.questions.feeds import SIZE, widened
from refgrad.conformance.questions.kinked import kinked, kinked_among, kinks_of
from refgrad.conformance.questions.point import (
    Point,
    Truth,
    by_name,
    fed_alone,
    in_float64,
    inputs_of,
    largest,
    limits,
    rounding,
    with_values,
)
from refgrad.conformance.questions.question import Question
from refgrad.conformance.questions.rounding import DRAWS, FEW_DRAWS, MANY_DRAWS, Drawn
from refgrad.conformance.systems.builders import CrashError
from refgrad.conformance.tracing.nonfinite import Birth, births
from refgrad.errors import BackendError, FeedError, OptionError, RefgradError, choices, raised
from refgrad.markup import BAD, html_table
from refgrad.protos.malformed import explained
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient as differentiate

RIGHT, WRONG, CONVENTION, UNDECIDED, MISSING = "right", "wrong", "a convention", "undecided", "missing"
OUTPUT, GRADIENT = "output", "gradient"
_COARSER = 4  # bits: what a kink near the point may move
_CONFIRMED = 4  # disputed tensors that differences are asked about
_MORE_DRAWS = (FEW_DRAWS, 2 * FEW_DRAWS, DRAWS)  # as many as it takes
_BEYOND = 10.0  # times what few draws of rounding explain, more of many elements: more draws will not explain it
_TOGETHER, _MANY = 3.0, 16  # the same of the norm of so many elements, where chance evens out
_NARROWER = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_TOLD_APART = 256  # elements that are told apart, which of them are at a kink
_LOOKED = 64  # elements that are looked at one by one, whether they are at a kink
_FEW = 1e-2  # of the norm: rounding that hides more hides the answer
_FEW_DRAWN = 2  # the explanation that has few draws of rounding in it
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Seen:
    """The verdict on a tensor of one side: right, wrong, a convention at a kink, undecided or missing, and the reason."""

    verdict: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor of a comparison.

    `kind` is "output" or "gradient"; `of` are the names in the model that it belongs to, and `how` a recorded one was found.
    `apart` is the largest distance between the sides, relative to the largest element of the judge's.
    """

    name: str
    kind: str
    of: tuple[str, ...]
    how: str
    a: Seen
    b: Seen
    apart: float | None = None

    @property
    def verdict(self) -> str:
        """The verdict on both sides together, in words."""
        both = self.a.verdict, self.b.verdict
        if both[0] == both[1]:
            return {RIGHT: "they agree", WRONG: "both are wrong"}.get(both[0], both[0])
        for name, verdict in zip("ab", both, strict=True):
            if verdict == WRONG:
                return f"{name} is wrong"
        return next(f"{name}: {verdict}" for name, verdict in zip("ab", both, strict=True) if verdict != RIGHT)

    @property
    def ok(self) -> bool:
        """True if both sides are right, or follow a convention at a kink."""
        return {self.a.verdict, self.b.verdict} <= {RIGHT, CONVENTION}


@dataclass(frozen=True)
class Sided:
    """The findings about one side: why it has no gradient, its wrong rules, its wrong kernels, the origins of NaN."""

    label: str
    failed: str = ""
    rules: Bisected | None = None
    kernels: Located | None = None
    born: tuple[Birth, ...] = ()
    unmatched: Mapping[str, str] = field(default_factory=dict)
    matched: int = 0


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: every tensor, and each side. `judge` says who confirmed the judge's gradient."""

    tensors: tuple[Tensor, ...]
    a: Sided
    b: Sided
    feeds: str
    seed: int
    judge: str

    @property
    def ok(self) -> bool:
        """True if there is a gradient to compare, and both sides are right in every tensor."""
        is_any = any(tensor.kind == GRADIENT for tensor in self.tensors)
        return is_any and not self.a.failed and not self.b.failed and all(tensor.ok for tensor in self.tensors)

    def _repr_html_(self) -> str:
        """The tensors, those that differ first, and who is at fault, for a notebook."""
        rows = [
            {
                "tensor": one.name,
                "kind": one.kind,
                "a": one.a.verdict,
                "b": one.b.verdict,
                "apart": one.apart,
                "": one.verdict,
            }
            for one in sorted(self.tensors, key=lambda tensor: tensor.ok)
        ]
        notes = [f"{side.label}: {side.failed}" for side in (self.a, self.b) if side.failed]
        notes.append(f"Judge: {self.judge}. Feeds: {self.feeds}; seed {self.seed}.")
        title = f"{self.a.label} (a) and {self.b.label} (b): {'ok' if self.ok else 'DIFFERENT'}"
        return html_table(rows, title, notes, {WRONG: BAD})


@explained
def compare(
    model: ModelLike,
    a: str | Side | Mapping[str, Any],
    b: str | Side | Mapping[str, Any],
    feeds: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    cotangent: str | Mapping[str, Any] = "",
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two gradients of a model, and find the nodes at fault.

    :param a: a side: "builder@executor" or "builder@executor:precision"; tensors by name, or the path of a file or a folder of
        them; a `Live`. `b` as well.
    :param feeds: the inputs; by default those that a recording has, or random ones.
    :param wrt: the inputs and initializers to differentiate by; by default every float one, or those that a recording has.
    :param cotangent: "ones", "random" or arrays by output; by default what a recording has for the outputs, ones with a
        recording that has nothing, and random ones otherwise.
    :param search: look for the nodes at fault.
    :param progress: called with the step in progress, how far it is, and how far it goes.
    :raises OptionError: a side that is none. :raises FeedError: feeds that do not fit.
    :raises RefgradError: what `refgrad.gradient` refuses; a model that the interpreter does not run.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.conformance import compare
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { h = Tanh(x)  y = Mul(h, x) }'
    ... )
    >>> x = np.float32([1, 2])
    >>> recorded = {"x_grad": np.tanh(x) + x * (1 - np.tanh(x) ** 2)}
    >>> found = compare(model, "refgrad@numpy", recorded, {"x": x})
    >>> [(tensor.name, tensor.verdict) for tensor in found.tensors], found.ok
    ([('x', 'they agree')], True)
    """
    if isinstance(cotangent, str) and cotangent not in ("", "ones", "random"):
        raise OptionError(f"cotangent={cotangent!r} is not known. There are 'ones', 'random' and arrays by output.")
    proto = load_model(model)
    sides = [side.for_model(proto) if isinstance(side, Recording) else side for side in (side_of(a), side_of(b))]
    recorded = [side for side in sides if isinstance(side, Recording)]
    given = _feeds_of(proto, feeds, recorded)
    if given is not None:
        proto, given = with_values(proto, given)
    gradient = differentiate(proto, wrt, outputs)
    point = Point.choose(proto, gradient, given, seed, size, sizes)
    point = replace(point, cotangents=_cotangents(point, recorded, cotangent))
    judge = _Judge(point, gradient, seed)
    work = [_Work(side, judge, progress) for side in sides]
    try:
        for one in work:
            one.run()
        tensors = tuple(_tensors(judge, work, asked=wrt is not None))
        for one in work:
            one.forget()
        if search:
            for place, one in enumerate(work):
                one.search([tensor for tensor in tensors if _of(tensor, place).verdict in (WRONG, UNDECIDED)], place)
    finally:
        for side in sides:
            if isinstance(side, Live):
                side.close()
    return Comparison(tensors, work[0].told(), work[1].told(), point.described, seed, judge.said)


def _of(tensor: Tensor, place: int) -> Seen:
    return (tensor.a, tensor.b)[place]


def _feeds_of(
    model: ModelProto, feeds: Mapping[str, Any] | None, recorded: Sequence[Recording]
) -> dict[str, Any] | None:
    """The feeds that are given, or that a recording has."""
    if feeds is not None:
        return check_feeds(feeds, inputs_of(model))
    declared = {value.name: value for value in inputs_of(model) if not value.has_default}
    needed = list(declared)
    for recording in recorded:
        if needed and all(name in recording.values for name in needed):
            return check_feeds(
                {name: _narrowed(recording.values[name], declared[name]) for name in needed}, inputs_of(model)
            )
    if recorded:
        lacking = [name for name in needed if all(name not in one.values for one in recorded)]
        if lacking:
            raise FeedError(
                f"A recording belongs to certain inputs, and {choices(lacking)} are not in it. Give them: --feeds F.npz."
            )
    return None


def _narrowed(value: np.ndarray, declared: Value) -> np.ndarray:
    """A recorded input in the model's type: the recording may have been made in double."""
    if is_float(value) and declared.dtype is not None and np.dtype(declared.dtype) in _NARROWER:
        return value.astype(declared.dtype)
    return value


def _cotangents(point: Point, recorded: Sequence[Recording], kind: str | Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The cotangents, in the model's types: those given or recorded, ones or random ones."""
    given = [kind] if isinstance(kind, Mapping) else [] if kind else [one.gradients for one in recorded]
    made = {}
    for output, name in point.seeds_of.items():
        value = point.cotangents[name]
        held = next((np.asarray(one[output]) for one in given if output in one), None)
        if held is not None:
            if held.shape != value.shape:
                which = "" if isinstance(kind, Mapping) else "recorded "
                raise FeedError(
                    f"The {which}cotangent of {output!r} has the shape {held.shape}, and {value.shape} is due."
                )
            value = held.astype(value.dtype)
        elif kind == "ones" or (recorded and not kind):
            value = np.ones_like(value)
        made[name] = value
    return made


class _Judge:
    """refgrad in double, and what differences say of it."""

    def __init__(self, point: Point, gradient: ModelProto, seed: int) -> None:
        self.point, self.gradient, self.seed = point, gradient, seed
        feeds = point.wide | point.seeds
        results = in_float64(fed_alone(gradient, feeds)).run(feeds)
        self.truth = Truth(point, gradient, by_name(results, point.names))
        self.outputs = {name: np.asarray(value) for name, value in point.forward.run(point.wide).items()}
        self._confirmed: dict[str, str] = {}
        self._kinked: dict[str, np.ndarray | None] = {}
        self.has_kinks = bool(kinks_of(point.model))

    @property
    def said(self) -> str:
        """A text about the judge: refgrad in double, and what differences confirm or contradict of the disputed tensors."""
        if not self._confirmed:
            return "refgrad in double"
        bad = sorted(name for name, verdict in self._confirmed.items() if verdict == DISAGREED)
        if bad:
            return f"refgrad in double; central differences contradict it in {choices(bad)}"
        agreed = sum(verdict == AGREED for verdict in self._confirmed.values())
        return f"refgrad in double; central differences confirm {agreed} of {len(self._confirmed)} disputed tensors"

    def forget(self) -> None:
        """Give back the gradients and what rounding makes of them."""
        self.truth = replace(self.truth, gradients={}, _moved={}, _spread={}, _apart=None)
        self.outputs, self._kinked = {}, {}

    def confirmed(self, name: str) -> str:
        """The verdict of central differences on the judge's own gradient."""
        if name not in self._confirmed and len(self._confirmed) >= _CONFIRMED:
            return AGREED
        if name not in self._confirmed:
            point = self.point
            rng = np.random.default_rng([self.seed, 1])
            mask = self.kinked(name)
            still = {} if mask is None else {name: mask}
            said = estimates(point.evaluate, point.wide, [name], point.cotangent_of, rng, directions=1, still=still)
            found = [one for one in said if isinstance(one, Directional)]
            got = self.truth.gradients[name]
            if mask is not None:
                got = np.where(mask, 0.0, got)
            self._confirmed[name] = (
                against_directions(self.truth, name, got, found, EXACT, exact=True).verdict if found else INCONCLUSIVE
            )
        return self._confirmed[name]

    def kinked(self, name: str) -> np.ndarray | None:
        """A mask of the elements of an input that are at a kink; None if there are none."""
        if not self.has_kinks:
            return None
        if name not in self._kinked:
            point = self.point
            found = kinked(point.model, point.forward, point.wide, [name], list(point.seeds_of))
            self._kinked[name] = found.get(name)
        return self._kinked[name]

    def at_kinks(self, name: str, where: np.ndarray) -> np.ndarray:
        """A mask of the elements in `where` that are at a kink. If too many, some stand for all, by chance."""
        nowhere = np.zeros(where.shape, bool)
        if not self.has_kinks or where.shape != self.point.wide[name].shape:
            return nowhere
        point = self.point
        few = np.count_nonzero(where) <= _TOLD_APART
        for looked in (where, self._looked(where)) if few else (self._looked(where),):
            try:
                found = kinked_among(point.model, point.forward, point.wide, name, list(point.seeds_of), looked)
            except (BackendError, ValueError):  # the model does not run beside the point
                return nowhere
            if found is not None:
                return where if np.array_equal(found, looked) else found
        return nowhere

    def outside(self, name: str, got: np.ndarray, tolerance: float, where: np.ndarray) -> str:
        """A text about an element at a kink that is not between the derivatives of both sides; "" if all are.

        If there are too many, it looks at the ones that are furthest off, and at others by chance.
        """
        rng = np.random.default_rng([self.seed, 4])
        off = np.where(where, np.abs(got - self.truth.gradients[name]), -1.0)
        furthest = np.zeros(where.shape, bool)
        furthest.flat[np.argsort(-off, axis=None, kind="stable")[:_LOOKED]] = True
        return outside_of_both(self.truth, name, got, tolerance, rng, (furthest | self._looked(where)) & where)

    def _looked(self, where: np.ndarray) -> np.ndarray:
        looked = np.zeros(where.shape, bool)
        looked.flat[np.random.default_rng([self.seed, 5]).permutation(np.flatnonzero(where))[:_LOOKED]] = True
        return looked

    def explanations(self, match: Match, tolerance: float, bits: int) -> Iterator[tuple[np.ndarray, str]]:
        """The explained error of each element, with more and more explanations, each with a note for the reader."""
        truth, names = self.truth, match.names
        size = max((largest(truth.gradients[name]) for name in names), default=0.0)
        floor = max(limits(self.point.dtype(name))[1] * truth.gradients[name].size ** 0.5 for name in names)
        room = np.full(match.shape, max(tolerance * size, floor))
        yield room, ""
        room = room + match.made_of({name: SENSITIVE * np.abs(truth.moved(name, bits)) for name in names}, sizes=True)
        yield room, ""
        wider = room
        for draws in _MORE_DRAWS:
            wider = room + match.made_of({n: SENSITIVE * truth.spread(n, bits, draws) for n in names}, sizes=True)
            yield wider, ""
        if self.has_kinks:
            wider = wider + match.made_of({n: truth.spread(n, bits - _COARSER) for n in names}, sizes=True)
            yield wider, "a kink is near: rounding moves single elements far"
            many = {n: SENSITIVE * truth.spread(n, bits, MANY_DRAWS) for n in names}
            wider = np.maximum(wider, room + match.made_of(many, sizes=True))
            yield wider, "a kink is near: rounding moves single elements far"
        for draws in _MORE_DRAWS:
            apart = {n: SENSITIVE * truth.spread_apart(n, bits, draws) for n in names}
            yield wider + match.made_of(apart, sizes=True), ""

    def is_noise(self, match: Match, size: float) -> bool:
        """True if the gradient in double is no more than its own rounding."""
        truth, names = self.truth, match.names
        moved = match.made_of({name: np.abs(truth.moved(name, FLOAT64_BITS)) for name in names}, sizes=True)
        if size <= SENSITIVE * largest(moved):
            return True
        for draws in _MORE_DRAWS:
            spread = {name: truth.spread(name, FLOAT64_BITS, draws) for name in names}
            most = SENSITIVE * largest(match.made_of(spread, sizes=True))
            if size <= most or size > _BEYOND * most:
                return size <= most
        return False


class _Work:
    """One side at work."""

    def __init__(self, side: Side, judge: _Judge, progress: Progress | None) -> None:
        self.side, self.judge, self._progress = side, judge, progress
        self.failed = ""
        self.outputs: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.matched = Matched({}, {})
        self.truth_of_side: _Judge = judge
        self.wrong_in_double: list[str] = []
        self._built: Built | None = None
        self._feeds: dict[str, Any] = {}
        self._bisected: Bisected | None = None
        self._located: Located | None = None
        self._born: tuple[Birth, ...] = ()

    # What it has

    def run(self) -> None:
        """Get the tensors of the side."""
        if isinstance(self.side, Recording):
            self.outputs = {n: v for n, v in self.side.values.items() if n in self.judge.outputs}
            outputs = self.judge.outputs.keys() - self.judge.truth.gradients.keys()
            held = {n: v for n, v in self.side.gradients.items() if n not in outputs}
            self.gradients = held
            recording = Recording(self.side.label, self.side.values, held)
            self.matched = match(self.judge.point.model, recording, self.judge.truth.gradients)
            return
        try:
            self._run(self.side)
        except OptionError:  # what was asked for, and no fault
            raise
        except (CrashError, RefgradError) as error:
            self.failed = str(error)
        except Exception as error:  # a builder that is a function raises anything
            self.failed = f"it raised {raised(error)}"

    def _run(self, side: Live) -> None:
        judge = self.judge
        point = judge.point
        self.matched = Matched({n: identity(n, v.shape) for n, v in judge.truth.gradients.items()}, {})
        model, feeds = in_precision(point.model, point.feeds, side.recast)
        if model is not point.model:
            self.truth_of_side = judge = _recast(judge, model, feeds)
            point = judge.point
        question = Question("model", model, tuple(point.names), feeds, _by_output(point), judge.seed)
        self._tell("build", 0, 1)
        self._built = built = side.build(question)
        self._feeds = built.feeds(feeds, question.cotangents)
        in_double = built.named(NumpyBackend().prepare(built.model, precision="float64").run(widened(self._feeds)))
        self.wrong_in_double = [
            name for name, value in judge.truth.gradients.items() if not _is_exact(judge, name, in_double.get(name))
        ]
        self._tell("run", 0, 1)
        made = built.named(side.backend.prepare(built.model).run(self._feeds))
        zero = {name: np.zeros_like(point.wide[name]) for name in point.names if name not in built.gradients}
        self.gradients = made | zero
        self.outputs = {n: np.asarray(v) for n, v in side.backend.prepare(model).run(feeds).items()}

    # What it is worth

    def seen(self, name: str, theirs: np.ndarray | None, match: Match) -> Seen:
        """The verdict on a gradient."""
        judge = self.truth_of_side
        if theirs is None:
            return Seen(MISSING, self.failed or "it has no such tensor")
        due = match.made_of(judge.truth.gradients)
        if theirs.shape != due.shape:
            is_recorded = isinstance(self.side, Recording)  # many leave out axes of size 1
            if not is_recorded or np.squeeze(theirs).shape != np.squeeze(due).shape:
                return Seen(WRONG, f"it has the shape {list(theirs.shape)}, and {list(due.shape)} is due")
            theirs = theirs.reshape(due.shape)
        open_ = ~np.isfinite(due)
        bad = ~np.isfinite(theirs.astype(np.float64)) & ~open_
        if bad.any():
            return Seen(WRONG, f"{np.count_nonzero(bad)} of {bad.size} elements are not finite, and are in double")
        seen = self._judged(np.where(open_, 0, theirs), np.where(open_, 0.0, due), match, open_)
        if open_.any():
            said = f"{np.count_nonzero(open_)} of {open_.size} elements are not finite in double: they are not judged"
            return replace(seen, reason=f"{seen.reason}; {said}" if seen.reason else said)
        return seen

    def _judged(self, theirs: np.ndarray, due: np.ndarray, match: Match, open_: np.ndarray) -> Seen:
        judge = self.truth_of_side
        wide = theirs.astype(np.float64)
        error, size = np.abs(wide - due), largest(due)
        bits = max(min(1 - round(float(np.log2(limits(theirs.dtype)[0]))), judge.truth.bits), 2)
        tolerance = max(rounding(len(judge.gradient.graph.node), judge.point), 16 * limits(theirs.dtype)[0])
        explained, plain, note = np.zeros(0), np.zeros(0), ""
        for level, (room, why) in enumerate(judge.explanations(match, tolerance, bits)):
            explained, note = np.where(open_, 0.0, room), why
            if np.all((error <= explained) & np.isfinite(explained)):
                break
            if level < _FEW_DRAWN:
                plain = explained
            elif self._is_exactly_wrong(match) or (not judge.has_kinks and _is_far(error - plain, explained - plain)):
                return self._disputed(wide, due, error, explained, match, tolerance)
        else:
            return self._disputed(wide, due, error, explained, match, tolerance)
        most = float(error.max(initial=0.0))
        numbers = most / size if size else 0.0, largest(explained) / size if size else tolerance
        if self._is_exactly_wrong(match):
            return Seen(
                WRONG, "rounding could hide it, but in double this side's own gradient model is wrong", *numbers
            )
        if size <= largest(explained) and judge.is_noise(match, size):
            return Seen(RIGHT, "it is zero up to rounding", *numbers)
        hidden = largest(explained) > _FEW * size and float(np.linalg.norm(error)) > _FEW * float(np.linalg.norm(due))
        if hidden:
            return Seen(UNDECIDED, note or "rounding hides more than 1 % of it", *numbers)
        return Seen(RIGHT, "", *numbers)

    def _is_exactly_wrong(self, match: Match) -> bool:
        return isinstance(self.side, Live) and any(name in self.wrong_in_double for name in match.names)

    def _disputed(
        self,
        wide: np.ndarray,
        due: np.ndarray,
        error: np.ndarray,
        explained: np.ndarray,
        match: Match,
        tolerance: float,
    ) -> Seen:
        """An error that rounding does not explain: a fault, a kink's convention in some elements, or nobody can tell."""
        judge, size = self.truth_of_side, largest(due)
        beyond = ~((error <= explained) & np.isfinite(explained))
        with np.errstate(all="ignore"):
            worst = np.unravel_index(int(np.argmax(np.where(beyond, error / explained, -1.0))), error.shape)
        place = [int(k) for k in worst]
        numbers = (
            float(error[worst] / size) if size else float("inf"),
            float(explained[worst] / size) if size else tolerance,
        )
        off = f"{np.count_nonzero(beyond)} of {beyond.size} elements are off"
        said = f"{off}; {place} is {wide[worst]:.6g}, and {due[worst]:.6g} is due"
        if not size:
            said = f"it is {wide[worst]:.3g} at {place}, and 0 is due"
        if len(match.names) == 1 and judge.has_kinks and due.shape == judge.point.wide[match.names[0]].shape:
            name = match.names[0]
            mask = judge.at_kinks(name, beyond)
            if mask.any():
                apart = judge.outside(name, wide, tolerance, mask)
                if not (beyond & ~mask).any() and not apart:
                    count = np.count_nonzero(beyond)
                    part = f"; {_LOOKED} of them were looked at" if count > _LOOKED else ""
                    told = f"{count} elements are at a kink, between both derivatives{part}"
                    return Seen(CONVENTION, told, *numbers)
                if apart and not (beyond & ~mask).any():
                    return Seen(WRONG, f"at a kink, but outside of the derivatives of both sides: {apart}", *numbers)
                said += f"; {np.count_nonzero(mask)} elements at a kink are not counted" if not apart else f"; {apart}"
        verdicts = {judge.confirmed(name) for name in match.names if name in judge.point.wide}
        if DISAGREED in verdicts:
            return Seen(UNDECIDED, f"{said}; but central differences contradict the judge's gradient too", *numbers)
        if verdicts == {KINK}:
            return Seen(UNDECIDED, f"{said}; the point is at a kink", *numbers)
        if computed := self.matched.computed:
            why = "the exporter computed of weights, which get no gradient through them here"
            return Seen(
                UNDECIDED, f"{said}; there are initializers that perhaps {why}: {choices(computed, 3)}", *numbers
            )
        return Seen(WRONG, said, *numbers)

    def forget(self) -> None:
        """Give back what the verdicts needed: the search needs memory too."""
        self.outputs, self.gradients = {}, {}
        self.truth_of_side.forget()
        self.judge.forget()

    # Where it goes wrong

    def search(self, disputed: Sequence[Tensor], place: int) -> None:
        """Look for the rules and kernels at fault."""
        side, judge = self.side, self.truth_of_side
        if not isinstance(side, Live) or not (disputed or self.failed):
            return
        point = judge.point
        if self._built is None or self.wrong_in_double:
            self._tell("rules", 0, 1)
            name = str(side).partition("@")[0]
            self._bisected = bisect(point.model, point.feeds, side.build, judge.seed, name, self.wrong_in_double)
        if self._built is None:
            return
        wrong = [tensor for tensor in disputed if not set(tensor.of) <= set(self.wrong_in_double)]
        if wrong or not self.wrong_in_double or self.failed:
            model = self._built.model
            feeds = self._feeds
            if self.failed or any(tensor.kind == GRADIENT for tensor in wrong) or not wrong:
                self._located = locate(model, feeds, side.backend, lambda k, n: self._tell("kernels", k, n))
            if wrong and (self._located is None or self._located.is_right) and any(t.kind == OUTPUT for t in wrong):
                self._located = locate(point.model, point.feeds, side.backend, lambda k, n: self._tell("kernels", k, n))
        if any("not finite" in _of(tensor, place).reason for tensor in disputed):
            self._born = births(self._built.model, self._feeds, side.backend, point.model)

    def told(self) -> Sided:
        """The findings about this side."""
        return Sided(
            str(self.side), self.failed, self._bisected, self._located, self._born, self.matched.left, len(self.matched.found)
        )  # fmt: skip

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(f"{self.side}: {what}", done, total)


def _is_far(error: np.ndarray, drawn: np.ndarray) -> bool:
    """True if more draws of rounding will not explain an error: an element is far off, or all of them together are.

    :param error: the part of it that is not explained without them.
    """
    left = np.maximum(error, 0.0)
    together = left.size >= _MANY and np.linalg.norm(left) > _TOGETHER * np.linalg.norm(drawn)
    return bool(together or np.any(left > max(_BEYOND, left.size**0.5) * drawn))


def _by_output(point: Point) -> dict[str, np.ndarray]:
    return {output: point.cotangents[name] for output, name in point.seeds_of.items()}


def _is_exact(judge: _Judge, name: str, found: np.ndarray | None) -> bool:
    """True if a gradient computed in double is right."""
    due = judge.truth.gradients[name]
    got = np.zeros_like(due) if found is None else np.asarray(found, np.float64)
    if got.shape != due.shape:
        return False
    with np.errstate(all="ignore"):
        error = np.where((got == due) | (np.isnan(got) & np.isnan(due)), 0.0, np.abs(got - due))
    size = largest(due[np.isfinite(due)])
    if bool(np.all(error <= EXACT * max(size, largest(got[np.isfinite(got)])))):
        return True
    room = EXACT * size + SENSITIVE * np.abs(judge.truth.moved(name, FLOAT64_BITS))
    for draws in _MORE_DRAWS:
        allowed = room + SENSITIVE * judge.truth.spread(name, FLOAT64_BITS, draws)
        if np.all(error <= allowed):
            return True
        if _is_far(error - room, allowed - room):
            break
    beyond = ~(error <= allowed)
    if not np.array_equal(judge.at_kinks(name, beyond), beyond):
        return False
    return not judge.outside(name, got, EXACT, beyond)


def _recast(judge: _Judge, model: ModelProto, feeds: Mapping[str, Any]) -> _Judge:
    """The judge of the model in another float type: weights and feeds are those that the type can hold."""
    point = judge.point
    gradient = differentiate(model, list(point.names), list(point.seeds_of))
    there = Point.choose(model, gradient, feeds, judge.seed, SIZE, None)
    seeds_of, _ = names_in(gradient)
    kinds = {value.name: value.type.tensor_type.elem_type for value in gradient.graph.input}
    cotangents = {
        seeds_of[output]: value.astype(helper.tensor_dtype_to_np_dtype(kinds[seeds_of[output]] or TensorProto.FLOAT))
        for output, value in _by_output(point).items()
    }
    return _Judge(replace(there, cotangents=cotangents), gradient, judge.seed)


# The rows


def _tensors(judge: _Judge, work: Sequence[_Work], asked: bool) -> Iterator[Tensor]:
    """Every tensor that both sides have, or that one of them is asked for and has not."""
    recordings = [one for one in work if isinstance(one.side, Recording)]
    floats = {v.name for v in judge.point.model.graph.output if v.type.tensor_type.elem_type in FLOATS}
    for name in (name for name in judge.point.seeds_of if name in floats):
        held = [one.outputs.get(name) for one in work]
        if any(value is None for value in held):
            continue
        seen_a, seen_b = (_output(one, name) for one in work)
        yield Tensor(name, OUTPUT, (name,), "name", seen_a, seen_b, _apart(held, judge.outputs[name]))
    if not recordings:
        for name in judge.truth.gradients:
            yield _row(judge, work, identity(name, judge.truth.gradients[name].shape))
        return
    first = recordings[0]
    for name in first.gradients:
        if name in first.matched.found:
            yield _row(judge, work, first.matched.found[name])
    for name in first.gradients:
        if name in judge.truth.gradients and name in first.matched.left:
            unsaid = Seen(UNDECIDED, first.matched.left[name])
            match = identity(name, judge.truth.gradients[name].shape)
            seen = [unsaid if one is first else one.seen(name, one.gradients.get(name), match) for one in work]
            yield Tensor(name, GRADIENT, (name,), "", seen[0], seen[1])
    if asked:
        for name in sorted(first.matched.of(judge.truth.gradients)):
            yield _row(judge, work, identity(name, judge.truth.gradients[name].shape))


def _row(judge: _Judge, work: Sequence[_Work], match: Match) -> Tensor:
    held = []
    for one in work:
        if isinstance(one.side, Recording):
            held.append(one.gradients.get(match.recorded))
        elif all(name in one.gradients for name in match.names):
            wrong = [n for n in match.names if one.gradients[n].shape != judge.truth.gradients[n].shape]
            held.append(one.gradients[wrong[0]] if wrong else match.made_of(one.gradients))
        else:
            held.append(None)
    seen = [one.seen(match.recorded, value, match) for one, value in zip(work, held, strict=True)]
    apart = _apart(held, match.made_of(judge.truth.gradients))
    return Tensor(match.recorded, GRADIENT, match.names, match.how, seen[0], seen[1], apart)


def _apart(held: Sequence[np.ndarray | None], due: np.ndarray) -> float | None:
    """The largest difference of the two, relative to the largest finite element of `due`; None if their sizes differ."""
    first, second = held
    if first is None or second is None or first.size != second.size or not first.size:
        return None
    with np.errstate(all="ignore"):
        left, right = first.astype(np.float64).reshape(-1), second.astype(np.float64).reshape(-1)
        off = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    most = float(np.max(np.where(np.isnan(off), np.inf, off), initial=0.0))
    return most / (largest(due[np.isfinite(due)]) or 1.0)


def _output(work: _Work, name: str) -> Seen:
    """The verdict on a result of the model itself."""
    judge = work.truth_of_side
    point, found, due = judge.point, work.outputs[name], judge.outputs[name]
    if found.shape != due.shape:
        return Seen(WRONG, f"it has the shape {list(found.shape)}, and {list(due.shape)} is due")
    with np.errstate(all="ignore"):
        wide = found.astype(np.float64)
        error = np.where((wide == due) | (np.isnan(wide) & np.isnan(due)), 0.0, np.abs(wide - due))
    error = np.where(np.isnan(error), np.inf, error)
    size = largest(due[np.isfinite(due)])
    tolerance = max(rounding(len(point.model.graph.node), point), 16 * limits(found.dtype)[0])
    allowed = np.full(due.shape, tolerance * size)
    if not np.all(error <= allowed):
        plain = allowed
        for spread in _spreads(judge, name):
            allowed = plain + SENSITIVE * spread
            if np.all(error <= allowed) or _is_far(error - plain, allowed - plain):
                break
    worst = np.unravel_index(int(np.argmax(error / np.maximum(allowed, 1e-300))), error.shape) if error.size else ()
    numbers = (float(error[worst] / (size or 1)), float(allowed[worst] / (size or 1))) if error.size else (0.0, 0.0)
    if np.all(error <= allowed):
        return Seen(RIGHT, "", *numbers)
    place = [int(k) for k in worst]
    return Seen(WRONG, f"{place} is {float(wide[worst]):.6g}, and {float(due[worst]):.6g} is due", *numbers)


def _spreads(judge: _Judge, name: str) -> Iterator[np.ndarray]:
    """How far rounding moves a result of the model, by ever more draws."""
    point = judge.point
    model = point.model
    fed = {key: value for key, value in point.wide.items() if key in point.feeds}
    drawn = Drawn(model, fed, {name: name}, {name: judge.outputs[name]}, judge.truth.bits)
    for draws in _MORE_DRAWS:
        drawn.until(draws)
        yield drawn.spread(name)
