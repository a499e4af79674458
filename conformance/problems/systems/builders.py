"""Builders: who makes a gradient model of a problem. The runner calls each in a process of its own (`running.runner`).

A builder refuses a problem by raising one of its `refusals`; the message says why. Whatever else it raises is a crash: an
AssertionError or a KeyError says that the builder is wrong, not that it does not know an operator.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, helper, numpy_helper

import refgrad
from refgrad.backends.base import graph_inputs
from refgrad.backends.onnxruntime import DISTRIBUTIONS
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import with_defaults
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.executors import imported, installed, version_of_module
from refgrad.conformance.problems.systems.training_form import LOSS, as_it_trains, with_loss
from refgrad.derivatives import ortbuilder
from refgrad.errors import (
    AnswerError,
    BrokenRuleError,
    BuilderError,
    OptionError,
    RefgradError,
    choices,
    did_you_mean,
    message_of,
    of_type,
    raised,
)
from refgrad.model import native
from refgrad.notices import quiet
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import attribute_value, checkable, versions_of
from refgrad.rewrites.forms import FORMS
from refgrad.rewrites.lower import differentiable_inputs


class CrashError(Exception):
    """A builder raised an exception that is not one of its refusals."""


@dataclass(frozen=True)
class Builder:
    """`build` makes a gradient model, or raises. `missing` says what has to be installed, "" where it is.

    `version` names what it is a part of, with the version: "onnx-ad 0.3.0". `refusals` has the exceptions by which it refuses
    a problem, besides refgrad's own.
    """

    name: str
    about: str
    build: Callable[[Problem], Built]
    missing: Callable[[], str] = lambda: ""
    version: Callable[[], str] = lambda: installed(("refgrad",))
    refusals: Callable[[], tuple[type[Exception], ...]] = lambda: ()


def get_builder(name: str) -> Builder:
    """The builder of that name, or of the name "package.module:function": see `of_function`.

    :raises OptionError: there is none.
    """
    if name in BUILDERS:
        return BUILDERS[name]
    if ":" not in name:
        raise OptionError(
            f"There is no builder {name!r}.{did_you_mean(name, BUILDERS)} There are {choices(BUILDERS)}; one of your own is "
            "given as package.module:function."
        )
    function = imported(name, BUILDERS)
    if not callable(function):
        raise OptionError(f"{name!r} is {of_type(function)}. Give function(model, wrt, outputs) -> ModelProto.")
    return Builder(
        name,
        f"the function {name}",
        partial(of_function, function),
        version=lambda: version_of_module(name),
        refusals=partial(_refusals_of, function),
    )


def usable_builder(name: str) -> Builder:
    """The builder of that name, which is installed.

    :raises OptionError: there is none, or it is not installed.
    """
    builder = get_builder(name)
    if missing := builder.missing():
        raise OptionError(f"The builder {name!r} cannot be used here: {missing}")
    return builder


def version(name: str) -> str:
    """The distribution that a builder belongs to, with its version: "onnx-ad 0.3.0"; "" where there is none.

    :raises OptionError: there is no such builder.
    """
    return get_builder(name).version()


def build(name: str, problem: Problem) -> Built:
    """The gradient that the builder makes.

    :raises OptionError: there is no such builder.
    :raises BuilderError: it is not installed.
    :raises AnswerError: it returned an invalid model, or not the gradient.
    :raises Exception: whatever it raises. It refuses the problem by refgrad's errors and by its `refusals`.
    """
    builder = get_builder(name)
    if missing := builder.missing():
        raise BuilderError("missing", missing)
    built = builder.build(problem)
    _check(built, problem)
    return built


def attempt(name: str, problem: Problem) -> Built:
    """The gradient that the builder makes, or an error that says whether it refused: for the runner.

    :raises BuilderError: it refused.
    :raises AnswerError: it returned an invalid model, or not the gradient.
    :raises CrashError: it raised anything else, or a rule is broken.
    """
    refusals: tuple[type[Exception], ...] = (RefgradError, *get_builder(name).refusals())
    try:
        return build(name, problem)
    except (AnswerError, BuilderError, MemoryError):
        raise
    except BrokenRuleError as error:
        raise CrashError(_line(error)) from error
    except refusals as error:
        raise BuilderError("refused", _line(error)) from error
    except Exception as error:
        raise CrashError(f"it raised {raised(error)} ({_place(error)})") from error


def _line(error: Exception) -> str:
    return message_of(error) or type(error).__name__


def _place(error: Exception) -> str:
    """The file and the line where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def _check(built: Built, problem: Problem) -> None:
    graph = built.model.graph
    absent = set(built.cotangents.values()) - {value.name for value in graph.input}
    if absent:
        raise AnswerError(
            f"its model takes no cotangent {choices(sorted(absent))}; {choices(v.name for v in graph.input)} are its inputs"
        )
    absent = set(built.gradients.values()) - {value.name for value in graph.output}
    if absent:
        raise AnswerError(
            f"its model has no gradient {choices(sorted(absent))}; {choices(v.name for v in graph.output)} are its outputs"
        )
    unknown = {node.op_type for node in graph.node if not node.domain and not onnx.defs.has(node.op_type)}
    if strange := unknown - {op_type for _, op_type in FORMS} - {node.op_type for node in problem.model.graph.node}:
        raise AnswerError(f"its model is invalid: ai.onnx has no operator {choices(sorted(strange))}")
    if not unknown:  # onnx does not know the operators that ONNX Runtime keeps in the default domain
        try:
            native.check_model(checkable(built.model))
        except native.ValidationError as error:
            raise AnswerError(f"its model is invalid: {' '.join(str(error).split())}") from error


def _keep_outputs(graph: GraphProto, names: Mapping[str, str]) -> None:
    kept = [value for value in graph.output if value.name in names.values()]
    del graph.output[:]
    graph.output.extend(kept)


# refgrad


def _refgrad(dialect: str, problem: Problem) -> Built:
    with quiet():  # a derivative of zero is an answer
        return Built.of(refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents), dialect=dialect))


# ONNX Runtime: both builders in this process, which they can abort


def _missing_runtime() -> str:
    try:
        ortbuilder.require()
    except BuilderError as error:
        return str(error)
    return ""


def _raw(problem: Problem) -> Built:
    """GradientGraphBuilder, on Σ <cotangent, output>: it takes one output, a scalar.

    A BatchNormalization in inference stays as it is, and is refused.
    """
    # A broadcast product of empty tensors is more than it can do.
    plain = [name for name, cotangent in problem.cotangents.items() if not cotangent.size]
    model = with_loss(ortbuilder.readable(problem.model), problem.cotangents, plain)
    gradients = _reached(problem, model, [LOSS])
    with ortbuilder.Builders(in_process=True) as builders:
        made = builders.raw(as_it_trains(model, inference=False), gradients, LOSS)
    _keep_outputs(made.graph, gradients)
    cotangents = {name: f"{name}_weight" for name in problem.cotangents if name not in plain}
    return Built(made, cotangents, gradients, {f"{LOSS}_grad": np.ones((), np.float32)})


def _module(problem: Problem) -> Built:
    """OrtModuleGraphBuilder, as it prepares a module for training: what its YieldOp returns becomes the inputs."""
    model = ModelProto()
    model.CopyFrom(problem.model)
    _keep_outputs(model.graph, {name: name for name in problem.cotangents})
    gradients = _reached(problem, model, list(problem.cotangents))
    inputs = {value.name for value in model.graph.input}
    trained = [name for name in gradients if name not in inputs]
    with ortbuilder.Builders(in_process=True) as builders:
        made = builders.module(model, [name for name in gradients if name in inputs], trained)
    node = next(node for node in made.graph.node if (node.domain, node.op_type) == (MICROSOFT, "YieldOp"))
    made.graph.node.remove(node)
    yielded = differentiable_inputs(node.input, {a.name: attribute_value(a) for a in node.attribute})
    cotangents = dict(zip(yielded, node.output, strict=False))
    for output, name in cotangents.items():
        kind = helper.np_dtype_to_tensor_dtype(problem.cotangents[output].dtype)
        made.graph.input.append(helper.make_tensor_value_info(name, kind, None))
    made.graph.initializer.extend(t for t in problem.model.graph.initializer if t.name in trained)
    return Built(made, cotangents, gradients)


def _reached(problem: Problem, model: ModelProto, outputs: list[str]) -> dict[str, str]:
    """The names in `wrt` that the outputs depend on, and the name that both builders give the gradient of each."""
    needed = set().union(*(ortbuilder.depends_on(model, output) for output in outputs))
    gradients = {name: f"{name}_grad" for name in problem.wrt if name in needed}
    if not gradients:
        raise BuilderError("refused", f"no output depends on {choices(problem.wrt)}")
    return gradients


# onnx-ad


def _missing_onnx_ad() -> str:
    return "" if util.find_spec("onnx_ad") else "onnx-ad is not installed (pip install onnx-ad==0.3.0)"


def _refusals_of_onnx_ad() -> tuple[type[Exception], ...]:
    import onnx_ad

    return onnx_ad.UnsupportedOperator, onnx_ad.UnrollTooLarge, ValueError


def _onnx_ad(problem: Problem) -> Built:
    """onnx_ad.reverse, which takes any number of cotangents at once, along a last axis: it gets one.

    An initializer that is asked for must be an input without a default: onnx-ad takes one with a default for a constant.
    """
    import onnx_ad

    source = ModelProto()
    source.CopyFrom(with_defaults(problem.model, problem.wrt))
    defaults = [t for t in source.graph.initializer if t.name in problem.wrt]
    for tensor in defaults:
        source.graph.initializer.remove(tensor)
    outputs = list(problem.cotangents)
    made: ModelProto = onnx_ad.reverse(source, list(problem.wrt), outputs, layout="onnx")
    graph = made.graph
    graph.initializer.extend(defaults)
    # Its own inputs and outputs come after the model's, in the order in which they were asked for.
    taken, returned = list(graph.input[len(source.graph.input) :]), list(graph.output[len(source.graph.output) :])
    del graph.input[len(source.graph.input) :], graph.output[:]
    cotangents = {name: f"refgrad/{name}_grad" for name in outputs}
    gradients = {name: f"refgrad/{name}_grad" for name in problem.wrt}
    nodes = []
    for value, name in zip(taken, cotangents.values(), strict=True):
        nodes.append(_on_last_axis("Unsqueeze", name, value.name, made))
        graph.input.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, None))
    nodes += graph.node
    for value, name in zip(returned, gradients.values(), strict=True):
        nodes.append(_on_last_axis("Squeeze", value.name, name, made))
        graph.output.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, None))
    del graph.node[:]
    graph.node.extend(nodes)
    return Built(made, cotangents, gradients)


def _on_last_axis(op_type: str, source: str, target: str, model: ModelProto) -> onnx.NodeProto:
    if versions_of(model)[""] < 13:
        return helper.make_node(op_type, [source], [target], name=f"refgrad/{target}", axes=[-1])
    last = "refgrad/last_axis"
    if all(tensor.name != last for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), last))
    return helper.make_node(op_type, [source, last], [target], name=f"refgrad/{target}")


# What people bring


def of_function(function: Callable[[ModelProto, list[str], list[str]], Any], problem: Problem) -> Built:
    """The gradient that `function(model, wrt, outputs)` returns: a model with an input `<output>_grad` for each output, and an
    output `<name>_grad` for each name in `wrt`. It need not take the inputs and cotangents that it does not use.

    The function refuses a problem by raising NotImplementedError, ValueError, an error of refgrad, or one of the classes in
    its attribute `refusals`, if it has one. Any other exception is a crash.

    :raises AnswerError: it does not take these three, did not return a model, or the model has an unknown input.
    :raises Exception: whatever the function raises.
    """
    given = ModelProto()
    given.CopyFrom(problem.model)
    asked = given, list(problem.wrt), list(problem.cotangents)
    if refused := _why_not_called(function, asked):
        raise AnswerError(f"it cannot be called as function(model, wrt, outputs): {refused}")
    made = function(*asked)
    if not isinstance(made, ModelProto):
        raise AnswerError(
            f"it returned {of_type(made)} instead of a ModelProto. Return a model with an input <output>_grad for each output, "
            "and an output <name>_grad for each name in wrt"
        )
    inputs = graph_inputs(made.graph)
    cotangents = {name: f"{name}_grad" for name in problem.cotangents}
    known = {*(value.name for value in problem.model.graph.input), *problem.wrt, *cotangents.values()}
    if unknown := [value.name for value in inputs if value.name not in known and not value.has_default]:
        raise AnswerError(f"its model takes {choices(unknown)}; it may take {choices(sorted(known))}")
    taken = {value.name for value in inputs}
    return Built(
        made,
        {output: name for output, name in cotangents.items() if name in taken},
        {name: f"{name}_grad" for name in problem.wrt},
    )


def _why_not_called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Why a function does not take these arguments; "" if it does, or if Python does not know."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


def _refusals_of(function: Any) -> tuple[type[Exception], ...]:
    return NotImplementedError, ValueError, *getattr(function, "refusals", ())


BUILDERS = {
    builder.name: builder
    for builder in (
        Builder("refgrad", "refgrad in plain ai.onnx operators", partial(_refgrad, "onnx")),
        Builder("refgrad:ort", "refgrad with the training operators of ONNX Runtime", partial(_refgrad, "ort")),
        Builder(
            "onnxruntime:raw",
            "ONNX Runtime's GradientGraphBuilder",
            _raw,
            _missing_runtime,
            partial(installed, DISTRIBUTIONS),
        ),
        Builder(
            "onnxruntime:module",
            "ONNX Runtime's OrtModuleGraphBuilder, which optimises the model first",
            _module,
            _missing_runtime,
            partial(installed, DISTRIBUTIONS),
        ),
        Builder(
            "onnx-ad",
            "onnx-ad in reverse mode",
            _onnx_ad,
            _missing_onnx_ad,
            partial(installed, ("onnx-ad",)),
            _refusals_of_onnx_ad,
        ),
    )
}
