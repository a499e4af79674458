"""`refgrad.gradient`: normalise the model, find the path, sweep, assemble. `refgrad.preflight` stops at the path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

from onnx import ModelProto

from refgrad.links import Folders
from refgrad.model.checks.malformed import explained
from refgrad.reverse.assembly import names_in
from refgrad.reverse.memory import budget_of
from refgrad.reverse.ranks import of_known_ranks, refuse_shapeless
from refgrad.reverse.recording import RecordingEmitter
from refgrad.reverse.report import Report, refuse_zeros, say_useless
from refgrad.reverse.request import Request
from refgrad.reverse.writing import WrittenGradient, differentiate, plan_gradient
from refgrad.tables.conventions import DEFAULT, Conventions
from refgrad.worker import limited


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
    If an output has sizes of its own, `refgrad.way_to_outputs` has the forward nodes that tell them, for `refgrad.cost`.
    Initializers in `wrt` become inputs that keep their value as default, unless `weights` says otherwise. The gradient of a
    name that no output depends on is 0. A `ModelWarning` reports a gradient that is 0 for every feed: an operator on the way,
    which it names, passes no derivative on, or no output depends on a name in `wrt`.

    Models of an opset before 16 are converted to 16, those with sequences to 17. The caller's model is not modified.
    External data is referenced, not read: save the result in the folder of the model. An input without a shape gets the
    only number of axes, up to 5, with which the model can be differentiated.

    A local function that is called more than once stays a function, and so does its derivative: `f` becomes `f_fwd` where it
    has to return what the derivative reads, `f_grad` returns the cotangents of its inputs. Each is written once for all calls
    whose inputs have the same types and sizes, and of which the same is asked. Others are inlined; so are all before
    opset 17, where a rule has to know more of a shape that is an argument, with `recompute`, with `strong_zero`, in
    dialect "ort", and with another derivative of quantization than "zero".

    :param model: a model, or the path of one.
    :param wrt: inputs and initializers, float; by default every float input and every float initializer that an output
        depends on. A name with *, ? or [ that the model does not have is a pattern ("head.*", as in fnmatch), and stands for
        the names of the default that match it. `refgrad.weights(model).trainable` are the parameters alone.
    :param outputs: the float outputs to differentiate; by default every float output.
    :param dialect: "onnx" emits ai.onnx operators only. "ort" emits what ONNX Runtime's own builder does: its training
        operators wherever their kernels are right, and its names. There the cotangent of every tensor on the way is
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
    conventions = Conventions(kinks, quantization, strong_zero)
    repeated, budget = budget_of(recompute, memory)
    request = Request(
        wrt, outputs, conventions, dialect, cotangent, keep_outputs, repeated, budget=budget, weights=weights
    )
    return of_known_ranks(model, partial(_gradient, request=request))


@explained
def transposable(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
    conventions: Conventions,
) -> ModelProto:
    """The gradient with the outputs of the model, without guards. If it is transposed, its cotangents are arbitrary."""
    return _gradient(model, Request(wrt, outputs, conventions, keep_outputs=True, guarded=False))


@explained
def recorded(
    model: ModelProto, wrt: Sequence[str] | None, outputs: Sequence[str], conventions: Conventions = DEFAULT
) -> WrittenGradient:
    """`gradient(model, wrt, outputs, keep_outputs=True)`, with the record of its sweep. Nothing is said of useless gradients.

    :raises RefgradError: what `gradient` refuses.
    """
    return differentiate(model, Request(wrt, outputs, conventions, keep_outputs=True), RecordingEmitter)


@explained
def training_gradient(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str],
    output: str,
    cotangent: str,
    conventions: Conventions,
) -> ModelProto:
    """`gradient` of one output by the weights `wrt`, which are inputs. The outputs are kept.

    :raises NoGradientError: also if the gradient of every weight is 0 for all feeds: then no step would change a weight.
    """
    request = Request(
        wrt, [output], conventions, cotangent=cotangent, keep_outputs=True, weights="inputs", needs_gradient=True
    )
    return of_known_ranks(model, partial(_gradient, request=request))


def _gradient(model: ModelProto | str | os.PathLike[str], request: Request) -> ModelProto:
    if request.budget is None:
        written = differentiate(model, request)
    else:
        planning = import_module("refgrad.planning.budget")  # it knows executors, which no gradient needs
        written = planning.gradient_within_budget(request.budget, plan_gradient(model, request))
    adjoints = {adjoint: name for names in names_in(written.model) for name, adjoint in names.items()}
    refuse_shapeless((*written.model.graph.output, *written.model.graph.input), adjoints)
    if request.needs_gradient:
        refuse_zeros(written.planned.zeros, written.planned.wrt)
    say_useless((*written.planned.zeros, *written.planned.leaks), request.wrt is not None)
    return written.model


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
    request = Request(wrt, outputs, Conventions(quantization=quantization))
    return of_known_ranks(model, partial(_report, request=request))


def _report(model: ModelProto | str | os.PathLike[str], request: Request) -> Report:
    planned = plan_gradient(model, request)
    refuse_shapeless(planned.graph.inputs.values(), {})
    report = Report(tuple(planned.wrt), tuple(planned.outputs), planned.path.rows)
    return report if planned.is_blocked else replace(report, zeros=planned.zeros, leaks=planned.leaks)
