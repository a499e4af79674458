"""The JAX primitive that runs a program, and its rules: shapes, tangents, transposition, batches, lowering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from refgrad.errors import NoGradientError, OptionError
from refgrad.jax.programs import Derivative, JaxProgram

_run = Primitive("refgrad_run")
_run.multiple_results = True


def run(program: JaxProgram, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a program, under any transformation of JAX."""
    results: list[Any] = _run.bind(*_alike(arrays), program=program)
    return results


def _alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, all of them varying over the same axes of `jax.shard_map`.

    The transpose of the cast adds up the gradients of the devices that read one array.
    """
    varying = [_axes(jax.typeof(array)) for array in arrays]
    every = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(sorted(every - axes)), to="varying") if axes != every else array
        for array, axes in zip(arrays, varying, strict=True)
    ]


def _axes(value: Any) -> frozenset[Any]:
    """The axes of `jax.shard_map` over which a value differs from device to device; none with check_vma=False."""
    axes: frozenset[Any] = value.manual_axis_type.varying
    return axes


def _at_once(*arrays: Any, program: JaxProgram) -> Any:
    """Compile the call, and run it: what JAX does outside of jit."""
    if program.compiled is None:  # the program owns it, so that both end together
        program.compiled = jax.jit(lambda *traced: run(program, traced))
    return program.compiled(*arrays)


def _abstract(*inputs: Any, program: JaxProgram) -> list[Any]:
    shapes = program.shapes([value.shape for value in inputs])
    return [
        _shaped(shape, jax.dtypes.canonicalize_dtype(slot.dtype), inputs)
        for shape, slot in zip(shapes, program.outputs, strict=True)
    ]


def _shaped(shape: tuple[int, ...], dtype: np.dtype[Any], inputs: Sequence[Any]) -> Any:
    """The type of a result, which varies over the same axes of `jax.shard_map` as the inputs."""
    if not inputs or not _axes(inputs[0]):
        return jax.core.ShapedArray(shape, dtype)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(inputs[0].sharding.mesh, spec)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=inputs[0].manual_axis_type)


def _tangents(primals: Sequence[Any], tangents: Sequence[Any], *, program: JaxProgram) -> tuple[list[Any], list[Any]]:
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


def _transposed(cotangents: Sequence[Any], *arguments: Any, program: JaxProgram) -> list[Any]:
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


def _batched(arguments: Sequence[Any], axes: Sequence[Any], *, program: JaxProgram) -> tuple[list[Any], list[int]]:
    batched = [k for k, axis in enumerate(axes) if axis is not None]
    axis = program.settings.batch_axis
    if axis is not None and _is_by_sample(program, batched):
        return _merged(arguments, axes, axis, program), [axis] * len(program.outputs)

    def one(varying: Sequence[Any]) -> list[Any]:
        values = dict(zip(batched, varying, strict=True))
        return run(program, [values.get(k, argument) for k, argument in enumerate(arguments)])

    results = jax.lax.map(one, [jnp.moveaxis(arguments[k], axes[k], 0) for k in batched])
    return results, [0] * len(results)


def _is_by_sample(program: JaxProgram, batched: Sequence[int]) -> bool:
    """True if every row of every output depends on rows of inputs alone: the gradient of a weight is a sum over samples."""
    return all(program.inputs[k].has_samples for k in batched) and all(slot.has_samples for slot in program.outputs)


def _merged(arguments: Sequence[Any], axes: Sequence[Any], axis: int, program: JaxProgram) -> list[Any]:
    """The results of one run on the samples of all elements, which lie along `axis`, the first element's samples first."""
    size = next(argument.shape[k] for argument, k in zip(arguments, axes, strict=True) if k is not None)

    def split(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (*shape[:axis], size, count, *shape[axis + 1 :])

    merged, counts = [], set()
    for argument, batched, slot in zip(arguments, axes, program.inputs, strict=True):
        rows = argument
        if batched is not None:
            rows = jnp.moveaxis(argument, batched, axis)
        elif slot.has_samples:
            rows = jnp.broadcast_to(jnp.expand_dims(argument, axis), split(argument.shape, argument.shape[axis]))
        if slot.has_samples:
            counts.add(rows.shape[axis + 1])
            rows = rows.reshape(*rows.shape[:axis], size * rows.shape[axis + 1], *rows.shape[axis + 2 :])
        merged.append(rows)
    if len(counts) > 1:
        raise OptionError(
            f"batch_axis={axis}: the inputs have {', '.join(map(str, sorted(counts)))} samples. Give all the same number, or "
            "leave batch_axis out."
        )
    [count] = counts
    results = run(program, merged)
    for result in results:
        if result.shape[axis] != size * count:
            raise OptionError(
                f"batch_axis={axis}: of {size * count} samples the model makes {result.shape[axis]} rows of an output. It "
                "does not treat samples apart: leave batch_axis out."
            )
    return [result.reshape(split(result.shape, count)) for result in results]


def _called(*inputs: Any, program: JaxProgram) -> list[Any]:
    """The call of the executor. Each 64-bit number passes as two of 32 bits.

    JAX's 64-bit mode may belong to one thread, as in `with jax.enable_x64()`; in the thread of the call JAX would halve them.
    """
    outputs = _abstract(*map(jax.typeof, inputs), program=program)
    found = _call.bind(*inputs, program=program)
    return [
        jax.lax.bitcast_convert_type(array, value.dtype) if _is_wide(value.dtype) else array
        for array, value in zip(found, outputs, strict=True)
    ]


def _halved(*inputs: Any, program: JaxProgram) -> list[Any]:
    return [
        _shaped((*value.shape, 2), np.dtype(np.uint32), inputs) if _is_wide(value.dtype) else value
        for value in _abstract(*inputs, program=program)
    ]


def _is_wide(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 8


def _lowered(context: Any, *operands: Any, program: JaxProgram) -> Any:
    """A call of Python by XLA, which copies arguments and results. `jax.pure_callback` is six times slower for small ones."""
    program.prepare()
    promised = [(tuple(value.shape), value.dtype) for value in _abstract(*context.avals_in, program=program)]

    def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        results = program.run(promised, *arrays)
        return tuple([array[..., None].view(np.uint32) if _is_wide(array.dtype) else array for array in results])

    results, _, _ = mlir.emit_python_callback(
        context,
        call,
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=False,
        returns_token=False,
    )
    return results


_call = Primitive("refgrad_call")
_call.multiple_results = True
_call.def_abstract_eval(_halved)
mlir.register_lowering(_call, _lowered, cacheable=False)

_run.def_impl(_at_once)
_run.def_abstract_eval(_abstract)
ad.primitive_jvps[_run] = _tangents
ad.primitive_transposes[_run] = _transposed
batching.primitive_batchers[_run] = _batched
mlir.register_lowering(_run, mlir.lower_fun(_called, multiple_results=True), cacheable=False)
