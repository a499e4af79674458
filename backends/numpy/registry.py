"""The table of kernels, and how a node's attributes become a kernel's arguments.

A kernel is a function. Its positional parameters are the operator's inputs (None for one that is left out), its
keyword-only parameters the operator's attributes by name. A default in the signature counts where the schema has none. A
name that Python keeps for itself ends in an underscore (`lambda_`).

Some parameters are not attributes: `_wanted` (for each output, whether the node names it), `_opset` (the version of the
node's domain), `_output_grids` (the declared sizes of the outputs after their first two axes), `_output_types` (their
declared dtypes), `_outer` (what the node's subgraphs read from outside), `_wide` (whether floats are computed in double,
whatever is declared) and `_free` (for each input, whether nobody reads it afterwards, so that its memory may be
overwritten; see `reuse`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from refgrad.backends.base import describe
from refgrad.errors import BackendError, RuleError, choices
from refgrad.model.external import array_of
from refgrad.tables import extensions, plugins
from refgrad.tables.definitions import DEFINITIONS, Definition, UnsupportedFormError
from refgrad.tables.families import import_families
from refgrad.tables.once import once, place, qualified
from refgrad.tables.signatures import SIGNATURES

KernelFunction = TypeVar("KernelFunction", bound=Callable[..., Any])
Call = Callable[..., Any]  # returns the output, or a tuple of several

_SPECIAL = frozenset({"_wanted", "_opset", "_output_grids", "_output_types", "_outer", "_wide", "_free"})
_WITHOUT_MEANING = frozenset({"consumed_inputs"})  # before opset 6: what could be overwritten
_OURS = __name__.partition(".")[0] + "."
_VALUES = (np.ndarray, np.generic, list, type(None))  # tensors, sequences, and optionals that are empty
SIXTEEN_BIT = frozenset((np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)))


@dataclass(frozen=True, slots=True)
class Kernel:
    """The function that computes an operator from version `since` of its domain on.

    `fresh`: the results never share memory with the inputs, so they may be overwritten once they are dead. `abstract` finds
    the memory that the function takes, on arrays without data.
    """

    function: Callable[..., Any]
    domain: str
    op_type: str
    since: int
    in_float32: bool
    fresh: bool
    keywords: Mapping[str, Any]
    passed: Mapping[str, Any]  # those that the function takes as `**`
    abstract: Callable[..., Any] | None = None

    @property
    def is_ours(self) -> bool:
        """True if the function belongs to refgrad, not to another package."""
        return self.function.__module__.startswith(_OURS)

    @property
    def attributes(self) -> set[str]:
        """The attributes that the function takes."""
        return {_attribute(name) for name in self.keywords if name not in _SPECIAL}

    def requires(self, attribute: str) -> bool:
        """True if the function has no default for that attribute."""
        return self.keywords.get(attribute) is inspect.Parameter.empty

    @property
    def required(self) -> int:
        """The number of inputs that cannot be left out."""
        parameters = inspect.signature(self.function).parameters.values()
        return sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)

    @property
    def shape_input(self) -> int | None:
        """The position of the input that holds the shape of the result, called `shape` or `output_shape`; None without one."""
        names = inspect.signature(self.function).parameters
        return next((place for place, name in enumerate(names) if name in ("shape", "output_shape")), None)

    def arguments(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments that stand for `attributes`."""
        given = {name: attributes[_attribute(name)] for name in self.keywords if _attribute(name) in attributes}
        return {**self.passed, **given}

    def bind(
        self,
        node: onnx.NodeProto,
        opset: int,
        attributes: Mapping[str, Any],
        values: Mapping[str, onnx.ValueInfoProto],
    ) -> Call:
        """Bind the attributes of `node`: the result takes the inputs and returns the output, or a tuple of several."""
        unknown = {a.name for a in node.attribute} - self.attributes - _WITHOUT_MEANING
        if unknown:
            raise ValueError(f"attribute {sorted(unknown)} is not supported")
        bound = self.arguments(attributes)
        unset = [
            name for name, value in self.keywords.items() if value is inspect.Parameter.empty and name not in bound
        ]
        if missing := sorted(_attribute(name) for name in unset if name not in _SPECIAL):
            raise ValueError(f"attribute {missing} is required")
        if "_wanted" in self.keywords:
            bound["_wanted"] = tuple(map(bool, node.output))
        if "_opset" in self.keywords:
            bound["_opset"] = opset
        if "_output_grids" in self.keywords:
            bound["_output_grids"] = tuple(_grid(name, values) for name in node.output)
        if "_output_types" in self.keywords:
            bound["_output_types"] = tuple(describe(values[n]).dtype if n in values else None for n in node.output)
        function = partial(self.function, **bound) if bound else self.function
        call = _through_float32(function) if self.in_float32 else function
        return call if self.is_ours else self._checked(call, node)

    def _checked(self, call: Call, node: onnx.NodeProto) -> Call:
        """A kernel of another package, whose results are looked at.

        Where the rule's signature is the schema, it says how many there are and of which types.
        """
        signature = SIGNATURES.get((self.domain, self.op_type))
        outputs = [p.name for p in signature.schema.outputs] if signature is not None else []

        def checked(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            results = in_tuple(call(*inputs, **options))
            if signature is None:
                for result in results:
                    if not isinstance(result, _VALUES):
                        raise self._misfit(node, f"{_described(result)}; expected an array for each output")
                return results
            if not signature.schema.min_output <= len(results) <= len(outputs):
                raise self._misfit(node, f"{len(results)} results; expected {len(outputs)}: {choices(outputs)}")
            for at, result in enumerate(results):
                if not isinstance(result, np.ndarray | np.generic):
                    raise self._misfit(node, f"{_described(result)}; expected an array for each output")
                like = next((inputs[k] for k in signature.floats if k < len(inputs) and inputs[k] is not None), None)
                due = helper.tensor_dtype_to_np_dtype(signature.types[at]) if signature.types[at] else None
                if due is None and like is not None:
                    due = like.dtype
                if due is not None and result.dtype != due and not (signature.types[at] and _are_floats(due, result)):
                    raise self._misfit(node, f"{result.dtype.name} for its output {outputs[at]!r}, which is {due.name}")
            return results

        return checked

    def _misfit(self, node: onnx.NodeProto, what: str) -> BackendError:
        name = node.name or next(filter(None, node.output), "")
        return BackendError(
            f"The kernel of {qualified(self.domain, self.op_type)}, {place(self.function)}, returned {what} (node {name!r})."
        )


def _described(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _are_floats(due: np.dtype[Any], result: np.ndarray | np.generic) -> bool:
    """True if both are floats: a fixed type is wider where the model is computed in double."""
    return due.kind == result.dtype.kind == "f"


def _attribute(name: str) -> str:
    """The attribute that a keyword of a kernel stands for: `lambda_` is lambda, which Python keeps for itself."""
    return name.rstrip("_")


SMALL = 1024  # elements: new memory for them is there sooner than the question whether an input's is free


def reuse(free: tuple[bool, ...], dtype: np.dtype[Any], *inputs: np.ndarray) -> np.ndarray | None:
    """Return an input whose memory an elementwise result of `dtype` may take: a free one as large as the result. Or None.

    None for a small result too.
    """
    for x, is_free in zip(inputs, free, strict=False):
        if is_free and x.size > SMALL and x.dtype == dtype:
            shape = x.shape
            for y in inputs:
                if y.shape != shape and not broadcasts(y.shape, shape):
                    break
            else:
                return x
    return None


def reuse_first(x: np.ndarray, *_: Any, _free: tuple[bool, ...] = (), **__: Any) -> np.ndarray | None:
    """Return the first input where its memory is free for a result of its type and as large."""
    return reuse(_free[:1], x.dtype, x)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """True if an operand of `shape` broadcasts to the shape `to` and does not enlarge it."""
    if shape == to:
        return True
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


_kernels: dict[tuple[str, str], list[Kernel]] = {}
_turn = threading.RLock()
_begun = False  # the modules of kernels are imported, or are being imported by the thread whose turn it is


def kernel(
    *op_types: str,
    domain: str = "",
    since: int = 1,
    in_float32: bool = False,
    fresh: bool = False,
    attributes: Mapping[str, Any] | None = None,
    abstract: Callable[..., Any] | None = None,
    view: bool = False,
    replace: bool = False,
) -> Callable[[KernelFunction], KernelFunction]:
    """Register a function as the kernel of `op_types` from version `since` on.

    With `in_float32`, 16-bit floats are computed in float32 and rounded once, at the end, as runtimes do. With `fresh`, the
    results are new arrays (or an input that `_free` gave away), never a view of an input. `attributes` are those that the
    function takes as `**`, with their defaults; the others are its keyword-only parameters. With `replace` it takes the
    place of the kernel that an operator has from the same version on; without it a second one is refused.

    `abstract` says what memory the function takes: it is called as the function is, with an `AbstractArray` for each input
    whose value is not known before the run, and for the first one. It returns the results, None for a new array of the
    inferred type, and calls `memory.need` for what the function takes besides. Without it the results are new, or the first
    of them is the input that `reuse` finds. With `view` the function itself runs on such arrays.

    :raises RuleError: an operator has a kernel from that version on, and `replace` is false.
    """

    def register(function: KernelFunction) -> KernelFunction:
        parameters = inspect.signature(function).parameters.values()
        passed = attributes or {}
        keywords = {**{p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}, **passed}
        for op_type in op_types:
            versions = _kernels.setdefault((domain, op_type), [])
            before = next((k for k in versions if k.since == since), None)
            kind = f"kernel from version {since} on"
            once(kind, qualified(domain, op_type), before and before.function, function, replace)
            if before is not None:
                versions.remove(before)
            without_data = function if view else abstract
            versions.append(Kernel(function, domain, op_type, since, in_float32, fresh, keywords, passed, without_data))
            versions.sort(key=lambda k: k.since)
        return function

    return register


def kernel_of_body(
    *op_types: str, domain: str = "", **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the kernel of operators with a body (`refgrad.extend.body`), which has their signature.

    The function takes the `Arguments` of a node. Its keyword-only parameters are no attributes: `_wanted` and its like. The
    decorator returns a kernel that takes inputs and attributes, for others to call. It takes the options of `kernel`.

    :raises RuleError: an operator has no body, or has a kernel already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = []
        for op_type in op_types:
            known = DEFINITIONS.get((domain, op_type))
            if known is None:
                raise RuleError(f"{qualified(domain, op_type)} has no body: use @kernel, or register its body first.")
            calls.append(kernel(op_type, domain=domain, **options)(_by_arguments(known, function)))
        return calls[0]

    return register


class _Arrays:
    """The shapes and values of the inputs of a kernel, for the check of its operator."""

    def shape(self, value: np.ndarray) -> tuple[int, ...]:
        return value.shape

    def rank(self, value: np.ndarray) -> int:
        return value.ndim

    def type(self, value: np.ndarray) -> int:
        return int(helper.np_dtype_to_tensor_dtype(value.dtype))

    def constant(self, value: np.ndarray | None) -> np.ndarray | None:
        return value


_ARRAYS = _Arrays()


def _by_arguments(known: Definition, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes `Arguments`, as one that takes inputs and attributes as other kernels do."""
    special = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @wraps(function)
    def call(*inputs: Any, **attributes: Any) -> Any:
        try:
            args = known.arguments(_ARRAYS, inputs, attributes)
        except UnsupportedFormError as error:
            raise ValueError(str(error)) from error
        return function(args, **{p.name: attributes[p.name] for p in special})

    parameters = sorted((*known.signature.parameters, *special), key=lambda p: p.kind)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `inspect.signature` reads
    return call


def find(domain: str, op_type: str, opset: int) -> Kernel | None:
    """Return the kernel of that operator at that version of its domain; None without one."""
    plugins.load()
    return next((k for k in reversed(_all().get((domain, op_type), [])) if k.since <= opset), None)


def kernels() -> list[Kernel]:
    """List every kernel."""
    plugins.load()
    return [k for versions in _all().values() for k in versions]


def _all() -> dict[tuple[str, str], list[Kernel]]:
    global _begun
    with _turn:
        if not _begun:
            _begun = True
            package = import_module("refgrad.backends.numpy.kernels")
            import_families(package.__name__, package.__path__)
            for _, module in extensions.modules("kernels"):
                import_module(module)
    return _kernels


def _grid(name: str, values: Mapping[str, onnx.ValueInfoProto]) -> tuple[int, ...]:
    """Return the declared sizes of an output after its first two axes, batch and channels, which the inputs tell."""
    declared = describe(values[name]).shape if name in values else None
    if declared is None or not all(isinstance(dim, int) for dim in declared[2:]):
        raise ValueError(
            f"its inputs do not say how large {name!r} is; declare the static shape of {name!r} in value_info"
        )
    return tuple(dim for dim in declared[2:] if isinstance(dim, int))


def in_tuple(results: Any) -> tuple[Any, ...]:
    """The outputs of a call: a kernel of one output returns it alone."""
    return results if isinstance(results, tuple) else (results,)


def _through_float32(function: Callable[..., Any]) -> Call:
    def call(*inputs: Any, **options: Any) -> Any:
        for x in inputs:
            if getattr(x, "itemsize", 0) == 2 and x.dtype in SIXTEEN_BIT:
                break
        else:
            return function(*inputs, **options)
        narrow = x.dtype
        wide = [x.astype(np.float32) if getattr(x, "dtype", None) in SIXTEEN_BIT else x for x in inputs]
        results = in_tuple(function(*wide, **options))
        return tuple([y.astype(narrow) if getattr(y, "dtype", None) == np.float32 else y for y in results])

    return call


def decode(attribute: onnx.AttributeProto) -> Any:
    """Return the value of an attribute in Python: str for strings, arrays for tensors, protos for graphs and types."""
    value = onnx.helper.get_attribute_value(attribute)
    match attribute.type:
        case onnx.AttributeProto.STRING:
            return value.decode()
        case onnx.AttributeProto.STRINGS:
            return [item.decode() for item in value]
        case onnx.AttributeProto.TENSOR:
            return array_of(value)
        case onnx.AttributeProto.TENSORS:
            return [array_of(item) for item in value]
        case onnx.AttributeProto.INTS | onnx.AttributeProto.FLOATS:
            return list(value)
        case onnx.AttributeProto.TYPE_PROTO:
            apart = onnx.TypeProto()  # a copy: a part of the model would keep the whole model in memory
            apart.CopyFrom(value)
            return apart
    return value


def default_attributes(schema: onnx.defs.OpSchema) -> dict[str, onnx.AttributeProto]:
    """Return the attributes for which `schema` gives a default."""
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: value for name, value in defaults.items() if value.type != onnx.AttributeProto.UNDEFINED}
