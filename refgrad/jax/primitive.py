"""The JAX primitive that runs a program, and its rules: shapes, tangents, transposition, batches, lowering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from refgrad.errors import NoGradientError
from refgrad.jax.programs import Derivative, Program

_run = Primitive("refgrad_run")
_run.multiple_results = True


def run(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a program, under any transformation of JAX."""
    results: list[Any] = _run.bind(*arrays, program=program)
    return results


def _at_once(*arrays: Any, program: Program) -> Any:
    """Compile the call, and run it: what JAX does outside of jit."""
    if not hasattr(program, "compiled"):  # the program owns it, so that both end together
        program.compiled = jax.jit(lambda *traced: run(program, traced))
    return program.compiled(*arrays)


def _abstract(*inputs: Any, program: Program) -> list[Any]:
    shapes = program.shapes([value.shape for value in inputs])
    return [
        jax.core.ShapedArray(shape, jax.dtypes.canonicalize_dtype(slot.dtype))
        for shape, slot in zip(shapes, program.outputs, strict=True)
    ]


def _tangents(primals: Sequence[Any], tangents: Sequence[Any], *, program: Program) -> tuple[list[Any], list[Any]]:
    """The product with the Jacobian is a program of its own, so it is differentiated by this rule, too."""
    outputs = run(program, primals)
    moved: list[Any] = [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]
    moving = [k for k, tangent in enumerate(tangents) if not _is_zero(tangent)]
    floats = [k for k, slot in enumerate(program.outputs) if slot.is_float]
    if not moving or not floats:
        return outputs, moved
    for k in moving:
        if not program.inputs[k].is_float:
            raise NoGradientError(
                f"Input {program.names[0][k]!r} is {program.inputs[k].dtype}, and derivatives are of float16, bfloat16, "
                "float32 and float64. Do not differentiate by it."
            )
    seeds = [tangents[k] for k in moving]
    if isinstance(program, Derivative) and moving[0] >= program.linear:
        part = program.part([k - program.linear for k in moving])
        found = run(part, [*primals[: program.linear], *seeds])
    else:
        found = run(program.derivative(True, tuple(moving), tuple(floats)), [*primals, *seeds])
    for k, tangent in zip(floats, found, strict=True):
        moved[k] = tangent
    return outputs, moved


def _transposed(cotangents: Sequence[Any], *arguments: Any, program: Program) -> list[Any]:
    seeds = [k for k, argument in enumerate(arguments) if ad.is_undefined_primal(argument)]
    if not isinstance(program, Derivative) or seeds != list(range(program.linear, len(arguments))):
        raise NoGradientError(
            "Only a derivative can be transposed, in all of its tangents or cotangents at once. Use jax.vjp or jax.grad."
        )
    given = [k for k, cotangent in enumerate(cotangents) if not _is_zero(cotangent)]
    found: list[Any] = [ad.Zero(argument.aval) for argument in arguments[program.linear :]]
    if given:
        back = program.transposed(given)
        found = run(back, [*arguments[: program.linear], *(cotangents[k] for k in given)])
    return [None] * program.linear + found


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _batched(arguments: Sequence[Any], axes: Sequence[Any], *, program: Program) -> tuple[list[Any], list[int]]:
    batched = [k for k, axis in enumerate(axes) if axis is not None]
    size = arguments[batched[0]].shape[axes[batched[0]]]
    if _is_by_sample(program, batched):
        axis = program.settings.batch_axis
        rows = [
            jnp.moveaxis(argument, axes[k], axis)
            if k in batched
            else jnp.broadcast_to(jnp.expand_dims(argument, axis), _inserted(argument.shape, axis, size))
            if program.inputs[k].has_samples
            else argument
            for k, argument in enumerate(arguments)
        ]
        count = next(rows[k].shape[axis + 1] for k in batched)
        merged = [
            row.reshape(*row.shape[:axis], size * count, *row.shape[axis + 2 :]) if slot.has_samples else row
            for row, slot in zip(rows, program.inputs, strict=True)
        ]
        results = run(program, merged)
        return [result.reshape(*result.shape[:axis], size, count, *result.shape[axis + 1 :]) for result in results], [
            axis
        ] * len(results)

    def one(varying: Sequence[Any]) -> list[Any]:
        values = dict(zip(batched, varying, strict=True))
        return run(program, [values.get(k, argument) for k, argument in enumerate(arguments)])

    results = jax.lax.map(one, [jnp.moveaxis(arguments[k], axes[k], 0) for k in batched])
    return results, [0] * len(results)


def _is_by_sample(program: Program, batched: Sequence[int]) -> bool:
    """Whether every row of every output depends on rows of inputs alone: the gradient of a weight is a sum over samples."""
    return all(program.inputs[k].has_samples for k in batched) and all(slot.has_samples for slot in program.outputs)


def _inserted(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


def _lowered(context: Any, *operands: Any, program: Program) -> Any:
    """A call of Python by XLA: the arrays are those of XLA, not copies."""
    program.prepare()
    promised = [(tuple(value.shape), value.dtype) for value in context.avals_out]
    results, _, _ = mlir.emit_python_callback(
        context,
        partial(program.run, promised),
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=False,
        returns_token=False,
    )
    return results


_run.def_impl(_at_once)
_run.def_abstract_eval(_abstract)
ad.primitive_jvps[_run] = _tangents
ad.primitive_transposes[_run] = _transposed
batching.primitive_batchers[_run] = _batched
mlir.register_lowering(_run, _lowered, cacheable=False)
