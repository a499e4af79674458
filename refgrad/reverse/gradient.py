"""`refgrad.gradient`: normalise the model, find the path, sweep, assemble. `refgrad.preflight` stops at the path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TypeVar

from onnx import ModelProto, ValueInfoProto

from refgrad.errors import InvalidModelError, NoGradientError, OptionError, RefgradError, RuleError, choices
from refgrad.forward.graph import Graph
from refgrad.forward.normalise import normalise
from refgrad.forward.shapeless import of_each_rank
from refgrad.links import Folders
from refgrad.notices import notice, quiet
from refgrad.protos.malformed import explained
from refgrad.protos.reading import read
from refgrad.protos.walk import lacks_shape, names_of, nested, subgraphs
from refgrad.reverse.assembly import assemble, names_in
from refgrad.reverse.budget import budget_of, within
from refgrad.reverse.emit import Emitter
from refgrad.reverse.leaks import leaks
from refgrad.reverse.path import Path, prepare
from refgrad.reverse.recompute import cut, segments, with_bodies
from refgrad.reverse.record import RecordingEmitter, SweepRecord
from refgrad.reverse.refusal import refuse
from refgrad.reverse.report import Report, UselessGradient
from refgrad.reverse.rows import in_rows
from refgrad.reverse.strong_zero import with_strong_zeros
from refgrad.reverse.sweep import Gradients, sweep
from refgrad.reverse.values import Values
from refgrad.reverse.zeros import zeros
from refgrad.tables.conventions import DEFAULT, QUANTIZATION, Conventions
from refgrad.tables.dialects import DIALECTS, get_dialect
from refgrad.worker import limited

COTANGENTS = ("input", "ones", "yield")
WEIGHTS = ("overridable", "constants", "inputs")
_ANY_RANK = ContextVar("any_rank", default=False)
_T = TypeVar("_T")


class _ShapelessError(InvalidModelError):
    """A gradient has an input or an output without a shape."""


@limited
@explained
def gradient(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    dialect: str = "onnx",
    cotangent: str = "input",
    keep_outputs: bool = False,
    kinks: str = "refgrad",
    quantization: str = "zero",
    strong_zero: bool = False,
    recompute: bool | Sequence[str] = False,
    memory: str | None = None,
    weights: str = "overridable",
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
) -> ModelProto:
    """The model that computes the gradient of `model` by reverse-mode differentiation.

    The result has the model's inputs, one input `<output>_grad` per differentiated output, and one output `<name>_grad` per
    name in `wrt`, in that order, each with the shape and type of `<name>`. A sequence has a sequence of gradients, one per
    element. An optional has the gradient of its content, and an empty optional has an empty gradient. A name that is taken
    becomes the next free one (`x_grad_1`); the metadata `refgrad.gradients` and `refgrad.cotangents` (JSON) map the names.
    Initializers in `wrt` become inputs that keep their value as default, unless `weights` says otherwise. The gradient of a
    name that no output depends on is 0. A `ModelWarning` reports a gradient that is 0 for every feed: an operator on the way,
    which it names, passes no derivative on, or no output depends on a name in `wrt`.

    Models of an opset before 16 are converted to 16, those with sequences to 17. The caller's model is not modified.
    External data is referenced, not read: save the result in the folder of the model. An input without a shape gets the
    only number of axes, up to 5, with which the model can be differentiated.

    A local function that is called more than once stays a function, and so does its derivative: `f` becomes `f_fwd` where it
    has to return what the derivative reads, `f_grad` returns the adjoints of its inputs. Each is written once for all calls
    whose inputs have the same types and sizes, and of which the same is asked. Others are inlined; so are all before
    opset 17, where a rule has to know more of a shape that is an argument, with `recompute`, with `strong_zero`, in
    dialect "ort", and with another derivative of quantization than "zero".

    :param model: a model, or the path of one.
    :param wrt: inputs and initializers, float; by default every float input and every float initializer that an output
        depends on. A name with *, ? or [ that the model does not have is a pattern ("head.*", as in fnmatch), and stands for
        the names of the default that match it. `refgrad.weights(model).trainable` are the parameters alone.
    :param outputs: the float outputs to differentiate; by default every float output.
    :param dialect: "onnx" emits ai.onnx operators only. "ort" emits what ONNX Runtime's own builder does: its training
        operators wherever their kernels are right, and its names. There the adjoint of every tensor on the way is
        `<tensor>_grad`, the sum of the contributions `<tensor>_grad_0`, `<tensor>_grad_1`, ... (docs/parity.md).
    :param cotangent: "input": the cotangents are graph inputs; "ones": they are 1 everywhere, inside the graph; "yield":
        they come from com.microsoft.YieldOp (dialect "ort" only).
    :param keep_outputs: also return the outputs of the model, after the gradients.
    :param kinks: whose choice is taken where a derivative does not exist: "refgrad", "torch" or "onnxruntime" (docs/kinks.md).
    :param quantization: the derivative of quantization, by QuantizeLinear and its like or by Cast to a float of 8 bits or
        fewer: "zero", as it is; "straight-through", as if nothing were rounded or clipped; "clipped", the same, but zero
        where the value lay outside the range of the type. Round and Cast to an integer have the derivative zero in any case.
    :param strong_zero: True: an element whose cotangent is exactly 0 contributes 0 to the gradient. False: it may contribute
        0·∞ = NaN, for example behind a Where that hides the root of a negative number. With True, atan2 and sinc as
        exporters write them also get the derivatives of these functions (docs/nan_in_a_gradient.md).
    :param recompute: which forward nodes the backward pass computes again instead of keeping their values: the gradient is
        the same, takes less memory and more time. True: all of them, in segments of about √n nodes that end where few bytes
        cross. A list: names of nodes or patterns of them ("/layers.3/*"), a segment per entry; a node belongs to the first
        entry that it matches. A value that nodes outside of its segment read is kept. Nodes that draw random numbers, and nodes
        that depend on initializers alone, are never repeated. A chosen If, Loop or Scan on the way of the derivative stores its
        states alone, and its body is computed again step by step. Attention to 512 rows or more is taken in blocks of rows, so
        that its scores are never there all at once (the rounding may differ).
    :param memory: a memory budget for a run: "2 GiB", "800 MB", or "2 GiB for N=32" if dimensions have no sizes. refgrad
        recomputes as little as the budget allows, on the interpreter and in the first run on ONNX Runtime. The gradients
        that a run returns are counted, weights and feeds are not; `refgrad.cost` says how memory is predicted. It takes the
        place of `recompute`.
    :param weights: what becomes of the initializers in `wrt`. "overridable": inputs that keep their value as default, so that
        a training loop may feed others; ONNX Runtime warns of each, and cannot prepack it. "constants": initializers and no
        inputs, as are all others, which is quiet and faster where the values do not change. "inputs": inputs without a default,
        which have to be fed.
    :param max_memory: the number of bytes that this may take, in addition to the libraries. With it or `max_seconds`
        everything is done in another process, which may crash: for models from strangers (docs/security.md).
    :param max_seconds: the time that this may take, including the start of that process (about a second).
    :param data_folders: folders that links to external data may lead into (docs/security.md).
    :raises InvalidModelError: the model cannot be read, or onnx refuses it, or an input without a shape may have several
        numbers of axes.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is there twice, or is no float, or an entry of
        `recompute` that no node matches.
    :raises NoGradientError: an operator between `wrt` and `outputs` has no rule or no derivative.
    :raises OptionError: an unknown dialect, cotangent, kinks, quantization or weights, "yield" outside dialect "ort", a
        `strong_zero` that is no bool, or is True in dialect "ort", or a `recompute` that is neither a bool nor a list of
        names; a `memory` that is no budget, that no choice of nodes keeps, or for a model of unknown sizes; or both.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> grad = refgrad.gradient(square)
    >>> [value.name for value in grad.graph.input], [value.name for value in grad.graph.output]
    (['x', 'y_grad'], ['x_grad'])
    >>> [node.op_type for node in grad.graph.node]
    ['Mul', 'Add']
    """
    make = partial(
        _made,
        wrt=wrt,
        outputs=outputs,
        conventions=Conventions(kinks, quantization, strong_zero),
        dialect=dialect,
        cotangent=cotangent,
        keep_outputs=keep_outputs,
        recompute=recompute,
        memory=memory,
        weights=weights,
    )
    return _of_known_ranks(model, make)


@explained
def transposable(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
    conventions: Conventions,
) -> ModelProto:
    """The gradient with the outputs of the model, without guards. If it is transposed, its cotangents are arbitrary."""
    return _made(model, wrt, outputs, conventions, keep_outputs=True, guarded=False)


def _of_known_ranks(
    model: ModelProto | str | os.PathLike[str], make: Callable[[ModelProto | str | os.PathLike[str]], _T]
) -> _T:
    """`make(model)`, with the number of axes of inputs without a shape where one alone can be differentiated.

    :raises InvalidModelError: several can, or none.
    """
    try:
        return make(model)
    except _ShapelessError as error:
        found = []
        for declared in of_each_rank(read(model)):
            with suppress(RefgradError), quiet():
                found.append(make(declared))
        if len(found) == 1:
            return found[0]
        raise InvalidModelError(str(error)) from None


def _made(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
    conventions: Conventions,
    *,
    dialect: str = "onnx",
    cotangent: str = "input",
    keep_outputs: bool,
    recompute: bool | Sequence[str] = False,
    memory: str | None = None,
    weights: str = "overridable",
    guarded: bool = True,
) -> ModelProto:
    quantization, strong_zero = conventions.quantization, conventions.strong_zero
    _check_options(
        ("cotangent", cotangent, COTANGENTS),
        ("choice of weights", weights, WEIGHTS),
    )
    writes, plain = get_dialect(dialect), DIALECTS["onnx"]
    if strong_zero and not writes.plain:
        raise OptionError(
            f"strong_zero=True cannot guard the operators of dialect={dialect!r}, which multiply inside their kernels: "
            "use dialect='onnx'."
        )
    if cotangent == "yield" and not writes.yields:
        others = " or ".join(f"dialect={one.name!r}" for one in DIALECTS.values() if one.yields)
        raise OptionError(f"cotangent='yield' emits com.microsoft.YieldOp, which only {others} has: use {others}.")

    recompute, limit = budget_of(recompute, memory)

    def differentiated(
        graph: Graph, given: Sequence[frozenset[str]] | None = None, plainly: bool = False
    ) -> tuple[ModelProto, tuple[UselessGradient, ...]]:
        sources, targets, path = prepare(graph, wrt, outputs, quantization)
        if path.blocked or path.blocked_within:
            raise refuse(path)
        found = _useless(path, graph, sources, targets, quantization)
        chosen = segments(path.graph, recompute) if given is None else given
        split = in_rows(path.graph, chosen) if chosen else None
        if split is not None:
            in_blocks, chosen = split
            sources, targets, path = prepare(in_blocks, wrt, outputs, quantization)
        op = Emitter(
            Values(path.graph, path.adjoint_types, inputs=frozenset(sources)),
            plain if plainly else writes,
            taken_names(path.graph),
            conventions=conventions,
            needed=path.needed,
            repeated=with_bodies(path, chosen),
        )
        seeds = "input" if plainly and cotangent == "yield" else cotangent
        swept = sweep(path, op, sources, targets, seeds)
        made = assemble(swept, chosen, keep_outputs, weights)
        if strong_zero and guarded:
            with_strong_zeros(made, swept.seeds)
        return made, found

    keep = writes.plain and quantization == "zero" and not recompute and limit is None and not strong_zero
    graph = normalise(model, keep=keep, removable=strong_zero)
    made = None
    if graph.functions:  # only a rule can tell whether it knows enough of a value in a function
        with suppress(NoGradientError, RuleError):
            made, found = differentiated(graph)
        if made is None:
            graph = normalise(model)  # at its calls more is known, as a shape may be an argument
    if made is None and limit is not None:
        chosen, (made, found) = within(limit, partial(cut, graph), partial(differentiated, graph, plainly=True))
        if writes is not plain:  # the plan is of plain operators, whose shapes are known
            made, found = differentiated(graph, chosen)
    elif made is None:
        made, found = differentiated(graph)
    adjoints = {adjoint: name for names in names_in(made) for name, adjoint in names.items()}
    _refuse_shapeless((*made.graph.output, *made.graph.input), adjoints)
    say_useless(found, wrt is not None)
    return made


@contextmanager
def of_any_rank() -> Iterator[None]:
    """Let `gradient` accept inputs of unknown rank in the block, for a result that is run or becomes part of a model."""
    token = _ANY_RANK.set(True)
    try:
        yield
    finally:
        _ANY_RANK.reset(token)


def _refuse_shapeless(values: Iterable[ValueInfoProto], adjoints: Mapping[str, str]) -> None:
    """Refuse a gradient with an input or an output without a shape: onnx.checker refuses that model.

    :param adjoints: the value that each cotangent and gradient belongs to.
    :raises InvalidModelError: naming the value whose shape has to be declared.
    """
    for value in filter(lacks_shape, () if _ANY_RANK.get() else values):
        raise _ShapelessError(
            f"{adjoints.get(value.name, value.name)!r} declares no shape, and onnx.checker refuses a gradient with an input "
            "or output that has none. Declare its axes, by names where the sizes are not known. If its rank varies, make one "
            "model per rank."
        )


@explained
def recorded(
    model: ModelProto, wrt: Sequence[str] | None, outputs: Sequence[str], conventions: Conventions = DEFAULT
) -> tuple[ModelProto, Gradients, tuple[UselessGradient, ...]]:
    """`gradient(model, wrt, outputs, keep_outputs=True)`, the sweep that wrote it, with its record, and the useless gradients.

    :raises RefgradError: what `gradient` refuses.
    """

    def differentiated(graph: Graph) -> tuple[ModelProto, Gradients, tuple[UselessGradient, ...]]:
        sources, targets, path = prepare(graph, wrt, outputs, conventions.quantization)
        if path.blocked or path.blocked_within:
            raise refuse(path)
        op = RecordingEmitter(
            Values(path.graph, path.adjoint_types, inputs=frozenset(sources)),
            DIALECTS["onnx"],
            taken_names(path.graph),
            conventions=conventions,
            needed=path.needed,
        )
        op.record = SweepRecord()
        swept = sweep(path, op, sources, targets, "input", op.record)
        made = assemble(swept, (), keep_outputs=True)
        if conventions.strong_zero:
            with_strong_zeros(made, swept.seeds)
        return made, swept, _useless(path, graph, sources, targets, conventions.quantization)

    strong_zero = conventions.strong_zero
    graph = normalise(model, keep=conventions.quantization == "zero" and not strong_zero, removable=strong_zero)
    if graph.functions:
        with suppress(NoGradientError, RuleError):
            return differentiated(graph)
        graph = normalise(model)
    return differentiated(graph)


def _useless(
    path: Path, graph: Graph, wrt: Sequence[str], outputs: Sequence[str], quantization: str
) -> tuple[UselessGradient, ...]:
    return *zeros(path, wrt, outputs, quantization), *leaks(path, graph, wrt, outputs, quantization)


def say_useless(found: Sequence[UselessGradient], named: bool) -> None:
    """Warn of useless gradients. Warn of a name that no output depends on only if the caller `named` it."""
    for one in found:
        if one.stops or named:
            notice(str(one))


@limited
@explained
def preflight(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    quantization: str = "zero",
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
) -> Report:
    """Every operator that the derivative meets: it has a rule, its derivative is zero, or it is refused with a reason.

    The arguments have the meaning that they have in `gradient`. No graph is built.

    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is there twice, or is no float.
    :raises OptionError: an unknown quantization.
    :raises WorkerError: that process met a limit, or crashed.
    """
    _check_options(("quantization", quantization, QUANTIZATION))
    return _of_known_ranks(model, partial(_looked_at, wrt=wrt, outputs=outputs, quantization=quantization))


def _looked_at(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
    quantization: str,
) -> Report:
    graph = normalise(model, keep=quantization == "zero")
    _refuse_shapeless(graph.inputs.values(), {})
    sources, targets, path = prepare(graph, wrt, outputs, quantization)
    if graph.functions and (path.blocked or path.blocked_within):
        sources, targets, path = prepare(normalise(model), wrt, outputs, quantization)
    report = Report(tuple(sources), tuple(targets), path.rows)
    if path.blocked or path.blocked_within:
        return report
    return replace(
        report,
        zeros=zeros(path, sources, targets, quantization),
        leaks=leaks(path, graph, sources, targets, quantization),
    )


def _check_options(*options: tuple[str, str, Sequence[str]]) -> None:
    for option, value, known in options:
        if value not in known:
            raise OptionError(f"There is no {option} {value!r}; there are {choices(known)}.")


def taken_names(graph: Graph) -> set[str]:
    """Every name that the model uses, of values and of nodes, subgraphs included."""
    taken = {*graph.inputs, *graph.initializers, *graph.outputs, *graph.producer}
    taken.update(tensor.values.name for tensor in graph.model.graph.sparse_initializer)
    for node in graph.nodes:
        taken.add(node.name)
        taken.update(node.reads)
        for inner in (
            (sub for attribute in node.proto.attribute for sub in subgraphs(attribute)) if node.attributes else ()
        ):
            taken |= names_of(inner)
            taken.update(proto.name for proto in nested(inner.node))
    return taken
