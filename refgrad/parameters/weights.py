"""Find the tensors that are weights and the tensors of a state_dict that they come from, and write new values back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from refgrad.errors import InvalidModelError, OptionError, UnknownNameError, abridged, choices, did_you_mean
from refgrad.markup import html_table
from refgrad.model.checks.malformed import explained
from refgrad.model.external import (
    ExternalData,
    ModelSource,
    array_of,
    dtype_of,
    is_external,
    place_of,
    refuse_mismatch,
    refuse_unknown_type,
    values_of,
)
from refgrad.model.places import kinds_of, places
from refgrad.model.reading import read
from refgrad.model.roles import KINDS, Read, is_of_layer
from refgrad.parameters.origins import Ambiguous, Layer, Source, find_sources, is_among, reductions
from refgrad.protos.types import FLOATS

_AXES = {"Conv": (0,), "ConvTranspose": (1,), "Gemm": (0, 1)}  # of the outputs of a layer in its weight
_STATISTICS = (".running_mean", ".running_var")
_Known: TypeAlias = tuple[np.dtype[Any], tuple[int, ...], bytes]  # type, shape and digest

_FEW = 3  # tensors of the state_dict that a row names


@dataclass(frozen=True)
class Weight:
    """A tensor of a model: its kind, its type and shape, the operators that read it, and its source.

    `kind` is a key of `refgrad.model.roles.KINDS`: "parameter", "unexplained", "statistic", "quantized", "quantization",
    "mask", "scalar", "shape", "constant" or "unused". `reads` are the operators that read it, with the position of the input:
    ("Gemm:1",). `source` says of which tensors of the state_dict it is made, None where it is of none.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    reads: tuple[str, ...]
    source: Source | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the state_dict of the tensors that it is made of."""
        return () if self.source is None else self.source.names

    @property
    def how(self) -> str:
        """How it is made of them: "equal", "transposed", "tied", "merged", "folded", ...; "" where it is of none."""
        return "" if self.source is None else self.source.how


class Weights(dict[str, Weight]):
    """The `Weight` of each initializer of a model, by name: the result of `weights`."""

    def __init__(self, weights_by_name: Mapping[str, Weight], state: Mapping[str, _Known] | None = None) -> None:
        super().__init__(weights_by_name)
        self._state = dict(state or {})

    @property
    def trainable(self) -> list[str]:
        """The names of the float parameters, in the order of the model."""
        return [name for name, weight in self.items() if weight.kind == "parameter"]

    @property
    def missing(self) -> list[str]:
        """The names of the state_dict's float tensors that no initializer is made of."""
        names = {name for weight in self.values() for name in weight.names}
        return [name for name, (dtype, *_) in self._state.items() if name not in names and _is_float(dtype)]

    def table(self, names: int | None = _FEW) -> list[dict[str, Any]]:
        """A row for each initializer.

        With a state_dict a row names the tensors that the initializer is made of, `names` of them; None names all.
        """
        rows = [
            {
                "initializer": weight.name,
                "kind": weight.kind,
                "type": f"{weight.dtype.lower()}{list(weight.shape)}",
                "read by": " ".join(weight.reads),
                "made of": abridged(weight.names, names),
                "how": weight.how,
            }
            for weight in self.values()
        ]
        if self._state:
            return rows
        return [{key: value for key, value in row.items() if key not in ("made of", "how")} for row in rows]

    def _repr_html_(self) -> str:
        """The table for a notebook, parameters first."""
        rows = sorted(self.table(), key=lambda row: list(KINDS).index(row["kind"]))
        missing = (
            [f"Tensors of the state_dict that no initializer is made from: {abridged(self.missing)}."]
            if self.missing
            else []
        )
        return html_table(rows, f"Initializers: {len(self)}, trainable: {len(self.trainable)}", missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Weights, (dict(self), self._state)


@explained
def weights(model: ModelProto | str | os.PathLike[str], state_dict: Mapping[str, Any] | None = None) -> Weights:
    """The kind of each initializer of the model: parameter, running statistic, mask, scalar, shape or other constant.

    It is told by the operators that read the initializer and at which input, through Transpose, Reshape, Cast and their like,
    through QuantizeLinear and DequantizeLinear, and within bodies and functions. Where that does not tell, values do: a mask
    is added as a bias is. Tensors of Constant nodes and of bodies count as initializers do, if they have an axis and are
    floats or integers of 4 or 8 bits. If two bodies have a tensor `w`, the second one is called `w_1`. Tensors in the
    functions of a model do not count.

    With `state_dict`, each float initializer gets its `source`: the tensors that it is made of, by name, by value and by
    transposition. `Weight.how` says what happened to them:

    - "equal" or "transposed" (and reshaped), ", tied" where several names share the tensor
    - "merged", "reordered" or "split": rows of tensors, such as the gates of an LSTM or q, k and v
    - "gathered": rows that are repeated, such as embeddings of constant positions. Training it trains each row apart
    - "folded": a layer's weight or bias with the BatchNormalization after it
    - "x + 1", "exp(x)", "-exp(x)", "weight_norm": computed by the exporter
    - "ambiguous": several tensors have its values, as fresh biases do

    An initializer that is made of the state_dict is a parameter or a statistic. One that no layer reads and that is not made
    of it is "unexplained": it may be a table, or computed of parameters by the exporter, as a norm or a sum is. A buffer of
    the state_dict counts as a parameter unless its name says that it is a running statistic.

    :param model: a model, or the path of one. It is not modified.
    :param state_dict: name -> array, or tensor of torch, of the module that was exported, with its buffers. Tensors of another
        float type than the initializers are compared after a cast.
    :raises InvalidModelError: the model or its external data cannot be read.
    :raises OptionError: the state_dict is no mapping of names to arrays, or nothing in the model comes from it.

    >>> import onnx.parser, refgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ... layer (float[N, 2] x) => (float[N, 2] y) <float[2, 2] kernel = {1, 2, 3, 4}, float[1] half = {0.5}>
    ... { p = MatMul(x, kernel) y = Mul(p, half) }''')
    >>> {name: weight.kind for name, weight in refgrad.weights(model).items()}
    {'kernel': 'parameter', 'half': 'scalar'}
    >>> found = refgrad.weights(model, {"layer.weight": np.array([[1, 3], [2, 4]], np.float32)})
    >>> found["kernel"].names, found["kernel"].how
    (('layer.weight',), 'transposed')
    """
    return weights_of(model, state_dict)


def weights_of(model: ModelSource, state_dict: Mapping[str, Any] | None = None) -> Weights:
    """`weights` of a model wherever its data lies."""
    source = read(model, lift=False)
    state = None if state_dict is None else _arrays_of("state_dict", state_dict)
    held = places(source)
    reads = {one.name: one.reads for one in held}
    with ExternalData(place_of(model)) as data:

        def values(tensor: TensorProto) -> np.ndarray:
            return _values(tensor, None if isinstance(model, ModelProto) else data)

        kinds = kinds_of(held, values)
        elementwise = {one.name for one in held if kinds[one.name] == "parameter" and not is_of_layer(one.reads)}
        sources: dict[str, Source] = {}
        floats: dict[str, np.ndarray] = {}
        if state is not None:
            floats = {one.name: values(one.tensor) for one in held if one.tensor.data_type in FLOATS}
            sources = _sources(floats, state, kinds, reads)
    numbers = reductions(state or {})
    weights_by_name = {}
    for name, tensor in ((one.name, one.tensor) for one in held):
        kind = kinds[name] if state is None else _kind(kinds[name], sources.get(name), name in elementwise)
        if kind == "scalar" and name in floats and name not in sources and is_among(floats[name], numbers):
            kind = "unexplained"
        refuse_unknown_type(tensor)
        dtype = TensorProto.DataType.Name(tensor.data_type)
        shown = tuple(dict.fromkeys(str(reader) if reader.op_type else "output" for reader in reads[name]))
        weights_by_name[name] = Weight(name, kind, dtype, tuple(tensor.dims), shown, sources.get(name))
    return Weights(weights_by_name, {name: _known(value) for name, value in (state or {}).items()})


@explained
def write_back(
    model: ModelProto | str | os.PathLike[str], values: Mapping[str, Any], weights: Weights | None = None
) -> ModelProto:
    """A copy of the model with these values of its weights, where they lie. The caller's model is not modified.

    The names are those that `refgrad.weights` has: of initializers, and of tensors in Constant nodes and bodies. With
    `weights`, the result of `refgrad.weights(model, state_dict)`, they may also belong to the state_dict: a tensor is then
    transposed, merged or folded as the exporter did it, and where a name is both, it is the state_dict's. Where a tensor is
    folded or merged with others, all of them have to be given. A whole state_dict may be given: its integers that the model
    does not have are left out. What did not change since leaves its initializer as it is.

    An initializer that is not made of the state_dict may have been computed of it, and would be out of date: where the
    state_dict changed, its own value has to be given too, the old one where it is a constant.

    :param model: a model, or the path of one. External data is referenced, not read: save the result in the folder of the
        model. A tensor with a new value lies in the model; its file is not touched.
    :param values: name -> array, or tensor of torch, with the type and the shape of the initializer or of the state_dict's
        tensor.
    :raises UnknownNameError: a name that neither the model nor the state_dict has.
    :raises OptionError: another type or shape, tensors that are missing beside those that are given, tied tensors with
        different values, or a value that has no place in the model.
    :raises InvalidModelError: the model cannot be read, or has not the initializers of `weights`.

    >>> import onnx.parser, refgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ... layer (float[N, 2] x) => (float[N, 1] y) <float[2, 1] kernel = {1, 2}> { y = MatMul(x, kernel) }''')
    >>> found = refgrad.weights(model, {"layer.weight": np.array([[1, 2]], np.float32)})
    >>> trained = refgrad.write_back(model, {"layer.weight": np.array([[3, 4]], np.float32)}, found)
    >>> refgrad.get_train_initializer(trained)["kernel"][0].tolist()
    [[3.0], [4.0]]
    """
    if weights is not None and not isinstance(weights, Weights):
        raise OptionError(f"weights is what refgrad.weights returned, not {type(weights).__name__}.")
    copy = ModelProto()
    copy.CopyFrom(read(model, lift=False))
    held = {one.name: one for one in places(copy)}
    tensors = {name: one.tensor for name, one in held.items()}
    expected = Weights({}) if weights is None else weights
    for name, weight in expected.items():
        if name not in tensors or tuple(tensors[name].dims) != weight.shape:
            raise InvalidModelError(
                f"The model has no initializer {name!r} of shape {list(weight.shape)}, so `weights` is of another model."
            )
    arrays = _arrays_of("values", values)
    state = expected._state
    of_state = {name: value for name, value in arrays.items() if name in state}
    for name, value in arrays.items():
        if name in of_state:
            _check(name, value, *state[name][:2], "tensor of the state_dict")
        elif name in tensors:
            dtype = dtype_of(tensors[name])
            _check(name, value, dtype, tuple(tensors[name].dims), "initializer")
        else:
            known = list(dict.fromkeys((*tensors, *state)))
            raise UnknownNameError(
                f"{name!r} in values is no initializer of the model{' and not in the state_dict' if state else ''}."
                f"{did_you_mean(name, known)} There are: {choices(known)}."
            )
    written = _of_state(of_state, expected, tensors)
    apart = [name for name, one in expected.items() if one.source is None and one.kind in ("parameter", "unexplained")]
    if written and (stale := [name for name in apart if name not in arrays]):
        raise OptionError(
            f"The initializers {choices(stale)} are not made from the state_dict. If the exporter computed them from "
            "parameters, export the model again. If they are constants, give their values too."
        )
    for name in written.keys() & (arrays.keys() - of_state.keys()):
        raise OptionError(
            f"values has the initializer {name!r} and also {choices(expected[name].names)}, from which it is made. Give only "
            "one of the two."
        )
    for name, value in ({name: value for name, value in arrays.items() if name not in of_state} | written).items():
        if not _has_value(held[name].tensor, value):
            held[name].put(_with_value(held[name].tensor, value))
    return copy


def _sources(
    floats: Mapping[str, np.ndarray],
    state: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
    reads: Mapping[str, tuple[Read, ...]],
) -> dict[str, Source]:
    """The sources of float initializers, type by type."""
    layers = [
        Layer(name, reader.inputs[2], axis)
        for name in floats
        for reader in reads[name]
        if reader.input == 1 and len(reader.inputs) > 2
        for axis in _AXES.get(reader.op_type, ())
    ]
    parameters = frozenset(name for name, kind in kinds.items() if kind in ("parameter", "statistic"))
    sources: dict[str, Source] = {}
    for dtype in dict.fromkeys(value.dtype for value in floats.values()):
        alike = {name: value for name, value in floats.items() if value.dtype == dtype}
        with np.errstate(over="ignore"):
            cast = {name: value.astype(dtype, copy=False) for name, value in state.items() if _is_float(value.dtype)}
        sources |= find_sources(alike, cast, layers, parameters)
    if state and floats and not sources:
        raise OptionError(
            f"No initializer of the model has the values of a tensor in the state_dict, which has {choices(state)}. "
            "Give the state_dict of the module at the time of the export."
        )
    return sources


def _kind(role: str, source: Source | None, elementwise: bool) -> str:
    """The kind of an initializer, by its role and its source, None where it has none."""
    if source is None:
        return "unexplained" if elementwise and role == "parameter" else role
    if role in ("scalar", "constant", "parameter") and not all(name.endswith(_STATISTICS) for name in source.names):
        return "parameter"
    return role


def _values(tensor: TensorProto, data: ExternalData | None) -> np.ndarray:
    refuse_mismatch(tensor)
    return array_of(tensor) if data is None else values_of(tensor, data)


def _arrays_of(argument: str, values: object) -> dict[str, np.ndarray]:
    """The arrays of a mapping of names to arrays or to tensors of torch, which is not imported."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise OptionError(f"{argument} is a mapping of names to arrays or tensors, not {type(values).__name__}.")
    return {name: _array(argument, name, value) for name, value in values.items()}


def _array(argument: str, name: str, value: Any) -> np.ndarray:
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # NumPy has no such type
                return np.asarray(value.float().numpy()).astype(ml_dtypes.bfloat16)
            value = value.numpy()
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"{name!r} in {argument} is no array: {error}.") from error
    if array.dtype.kind not in "biufc" and not _is_float(array.dtype):
        raise OptionError(f"{name!r} in {argument} is no array of numbers, but {type(value).__name__}.")
    return array


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _known(value: np.ndarray) -> _Known:
    return value.dtype, value.shape, hashlib.blake2b(value.tobytes(), digest_size=16).digest()


def _check(name: str, value: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> None:
    if value.dtype != dtype or value.shape != shape:
        raise OptionError(
            f"{name!r} in values is {value.dtype}{list(value.shape)}, and the {what} is {dtype}{list(shape)}. "
            "Give it this type and this shape."
        )


def _of_state(
    arrays: dict[str, np.ndarray], weights: Weights, tensors: Mapping[str, TensorProto]
) -> dict[str, np.ndarray]:
    """The new values of the initializers that a state_dict changes."""
    state = weights._state
    changed = {name for name, value in arrays.items() if _known(value) != state[name]}
    placed = set[str]()
    written = {}
    for name, weight in weights.items():
        placed.update(weight.names)
        if weight.source is None or changed.isdisjoint(weight.names):
            continue
        if isinstance(weight.source, Ambiguous):
            raise OptionError(
                f"It is not clear which of {choices(weight.names)} is the initializer {name!r}, or in which order: they had "
                f"equal values. Give the value of {name!r} itself, or a state_dict whose values differ."
            )
        if absent := [key for key in weight.names if key not in arrays and weight.how not in _TIED]:
            raise OptionError(
                f"The initializer {name!r} ({weight.how}) is made from {choices(weight.names)}: give {choices(absent)} too."
            )
        own = {key: arrays[key] for key in weight.names if key in arrays}
        if weight.how in _TIED:
            first, *others = own.values()
            if any(other.tobytes() != first.tobytes() for other in others):
                raise OptionError(
                    f"{choices(own)} have different values, but the model has one initializer for them, {name!r}. Give equal "
                    "values."
                )
            own = dict.fromkeys(weight.names, first)
        dtype = dtype_of(tensors[name])
        written[name] = weight.source.make({key: value.astype(dtype) for key, value in own.items()})
    if lost := [name for name in arrays if name in changed - placed and _is_float(state[name][0])]:
        raise OptionError(
            f"{choices(lost)} changed, but no initializer is made from it: the model does not use it, or the exporter computed "
            "something else from it. Export the model again."
        )
    return written


_TIED = ("equal, tied", "transposed, tied")


def _has_value(tensor: TensorProto, value: np.ndarray) -> bool:
    """True if a tensor in the model has this value, bit for bit. External data is not read: its value counts as new."""
    return not is_external(tensor) and array_of(tensor).tobytes() == value.tobytes()


def _with_value(tensor: TensorProto, value: np.ndarray) -> TensorProto:
    """The tensor with another value; it keeps its name, its text and its metadata."""
    stored = numpy_helper.from_array(np.ascontiguousarray(value).reshape(tuple(tensor.dims)), tensor.name)
    if tensor.HasField("doc_string"):
        stored.doc_string = tensor.doc_string
    stored.metadata_props.extend(tensor.metadata_props)
    stored.data_type = tensor.data_type
    return stored
