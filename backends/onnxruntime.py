"""The backends "ort-cpu" and "ort-cuda": ONNX Runtime, whichever of its distributions is installed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper
from onnx.serialization import registry

from refgrad.backends.base import (
    Backend,
    Local,
    ModelLike,
    Prepared,
    Recurrence,
    check_feeds,
    check_outputs,
    graph_inputs,
    graph_outputs,
    load_model,
)
from refgrad.errors import BackendError, InvalidModelError, OptionError, RefgradError, choices
from refgrad.links import Folders, with_data_in
from refgrad.model import native
from refgrad.model.checks.malformed import explained
from refgrad.model.checks.recursion import refuse_growth, refuse_recursion
from refgrad.model.external import ModelSource, Opened, bytes_in_files, links_leave, loaded, without_links
from refgrad.model.reading import is_large, skeleton_of
from refgrad.protos.messages import is_too_large
from refgrad.protos.traverse import every_node

_MOST_SHAPES = 8  # of which memory is kept
DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-training-cpu", "onnxruntime-training")
_LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# Several releases get these passes wrong behind a DequantizeLinear, all but the first without a zero point: docs/executors.md.
_WRONG_PASSES = ("QDQPropagationTransformer", "TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider")
SLEEPING = {"session.intra_op.allow_spinning": "0"}  # between runs threads leave the processor to others
# Without this entry a product with a dequantized constant rounds the other factor to 8 bits: docs/executors.md.
_EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}
# For a product ONNX Runtime keeps a copy of the weight in another layout, which is faster with few rows. Of weights that are
# mapped from their files and have more bytes than this there are no copies.
_LEAN = {"session.disable_prepacking": "1"}
_LARGE = 1 << 26
_DATA_FOLDER, _KNOWS_DATA_FOLDER = "session.model_external_initializers_file_folder_path", (1, 21)
_FATAL_SEVERITY = 4  # errors are raised: they are not written to stderr as well


class CpuBackend(Backend):
    """ONNX Runtime on its CPU execution provider."""

    name = "ort-cpu"
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    provider_options: Mapping[str, str] = {}  # of the first provider

    @classmethod
    def unavailable(cls) -> str | None:
        """Why ONNX Runtime cannot be used here."""
        if util.find_spec("onnxruntime") is None:
            return "onnxruntime is not installed (pip install onnxruntime)"
        try:
            importlib.import_module("onnxruntime")
        except ImportError as error:
            return f"onnxruntime is installed but cannot be imported ({error}); install one of {', '.join(DISTRIBUTIONS)} anew"
        return None

    def description(self) -> str:
        """Distribution, version and devices."""
        import onnxruntime

        owners = [name for name in DISTRIBUTIONS if _version(name) is not None]
        distribution = " and ".join(f"{name} {_version(name)}" for name in owners) or (
            f"onnxruntime {onnxruntime.__version__}"
        )
        return f"{distribution} on {self._device()}"

    @with_data_in
    @explained
    def prepare(
        self,
        model: ModelSource,
        threads: int | None = None,
        optimization: str = "all",
        without: Collection[str] | None = None,
        config: Mapping[str, str] | None = None,
        provider_options: Mapping[str, str] | None = None,
        data_folders: Folders | None = None,
        **options: Any,
    ) -> Prepared:
        """Open a session. `threads` limits the threads used inside an operator (default: ONNX Runtime's choice).

        `optimization` is the level of graph optimisations: disabled, basic, extended or all. `without` names passes that are
        left out, such as "MatMulAddFusion". By default these are passes that several releases get wrong if a node is
        DequantizeLinear; without=() leaves out none. `config` has entries of the session's configuration: with
        {"session.intra_op.allow_spinning": "0"} its threads sleep between two runs. `provider_options` has options of the
        execution provider: {"use_tf32": "1"} lets CUDA round the factors of products to 10 bits, which is faster.
        Links to external data may lead into `data_folders`.

        Raises InvalidModelError, BackendError (an operator without a kernel, an opset that is too new), OptionError.
        """
        if options:
            raise OptionError(
                f"Executor {self.name!r} has no option {sorted(options)}. Its options are threads, optimization, without, "
                "config, provider_options and data_folders."
            )
        if optimization not in _LEVELS:
            raise OptionError(f"optimization={optimization!r} is not known. There are {choices(_LEVELS)}.")
        settings, of_provider = dict(config or {}), {**self.provider_options, **(provider_options or {})}
        for name, entries in (("config", settings), ("provider_options", of_provider)):
            if not all(isinstance(text, str) for entry in entries.items() for text in entry):
                raise OptionError(
                    f"{name}={entries!r}: every name and every value must be a string, as in onnxruntime."
                )
        passes = None if without is None else tuple(without)
        return _Session(self, model, threads, optimization, passes, settings, of_provider)

    def prepare_opened(self, model: Opened, **options: Any) -> Prepared:
        """Open a session that maps the weights of `model` from their files. Of large ones it makes no copies in another layout.

        Raises what `prepare` raises.
        """
        return self.prepare(model, **options)

    def _device(self) -> str:
        return "CPU"


class CudaBackend(CpuBackend):
    """ONNX Runtime on its CUDA execution provider: inputs and outputs are bound to device memory."""

    name = "ort-cuda"
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    provider_options: Mapping[str, str] = {"use_tf32": "0"}  # TF32, which it takes by itself, has 11 bits

    @classmethod
    def unavailable(cls) -> str | None:
        """Return the reason why CUDA cannot be used here. A listed provider may still fail to load, so one node is run."""
        return super().unavailable() or _cuda_unavailable()

    def _device(self) -> str:
        return "CUDA device 0"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _cuda_unavailable() -> str | None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this build of onnxruntime has no CUDA provider (pip install onnxruntime-gpu)"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"], name="identity")],
        "probe",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_SEVERITY
    if hasattr(onnxruntime, "preload_dlls"):  # it finds the libraries that pip installed, and prints what it misses
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    try:
        providers = list(CudaBackend.providers)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    except Exception as error:
        # Missing libraries surface as RuntimeError, ImportError or a class of onnxruntime's, depending on the version.
        return f"the CUDA provider does not load: {error}"
    if "CUDAExecutionProvider" not in session.get_providers():
        return "the CUDA provider does not load; check the driver and the CUDA and cuDNN libraries of this build"
    return None


def _wrong_passes(model: ModelProto) -> tuple[str, ...]:
    """The passes of the optimizer that a model with DequantizeLinear does not bear."""
    zero_points = [any(node.input[2:]) for node in every_node(model) if node.op_type == "DequantizeLinear"]
    if not zero_points:
        return ()
    return _WRONG_PASSES[:1] if all(zero_points) else _WRONG_PASSES


class _Session(Local):
    def __init__(
        self,
        backend: CpuBackend,
        model: ModelSource,
        threads: int | None,
        optimization: str = "all",
        without: tuple[str, ...] | None = None,
        config: Mapping[str, str] | None = None,
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        import onnxruntime

        proto = model.proto if isinstance(model, Opened) else load_model(model, external_data=False)
        refuse_recursion(proto.functions)  # ONNX Runtime writes calls out, however many nodes that makes
        refuse_growth(proto)
        try:
            # It infers as onnx does: on some models that never ends, and on some it ends the process.
            if native.MEASURING & native.refuse_unfit(proto):
                large = {tensor.name: tensor for tensor in proto.graph.initializer if is_large(tensor)}
                native.refuse_negative_sizes(skeleton_of(proto, large))
        except InvalidModelError as error:
            raise BackendError(str(error)) from error
        self.inputs = graph_inputs(proto.graph)
        self.outputs = graph_outputs(proto.graph)
        self._backend = backend
        # What allocates has a logger of the whole process, which writes control characters, too.
        onnxruntime.set_default_logger_severity(_FATAL_SEVERITY)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL_SEVERITY
        # What was checked, whatever the name of the file says.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        is_lean = isinstance(model, Opened) and bytes_in_files(proto) > _LARGE
        for entry in {**_EXACT, **(_LEAN if is_lean else {}), **(config or {})}.items():
            options.add_session_config_entry(*entry)
        if threads is not None:
            options.intra_op_num_threads = threads
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[optimization])
        first, *others = backend.providers
        providers = [(first, dict(provider_options)) if provider_options else first, *others]
        if without is None:
            without = _wrong_passes(proto)
        left_out = {"disabled_optimizers": list(without)} if without else {}
        # ONNX Runtime follows no link out of the folder of the model.
        source: str | bytes
        if isinstance(model, Opened):
            if _finds_data():
                made, folder = without_links(model)
                options.add_session_config_entry(_DATA_FOLDER, folder)
                source = _serialized(made)
            else:
                source = _serialized(loaded(model))
        elif _is_binary(model) and not links_leave(proto, model):
            source = os.fspath(model)
        else:
            source = _serialized(load_model(model))
        try:
            self._session = onnxruntime.InferenceSession(source, options, providers=providers, **left_out)
        except Exception as error:
            # onnxruntime's exception classes are private and differ between its versions.
            raise BackendError(_explain(error, backend)) from error
        self._on_cuda = "CUDAExecutionProvider" in self._session.get_providers()
        self._device = "cuda" if self._on_cuda else "cpu"

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        asked = check_outputs(outputs, self.outputs)
        checked = check_feeds(feeds, self.inputs)
        try:
            results = self._run(asked, checked)
        except Exception as error:
            raise BackendError(_explain(error, self._backend)) from error
        return dict(zip(asked, results, strict=True))

    def held(self, value: Any) -> Any:
        """An OrtValue in the memory of the array or tensor; an array is copied to the device if that is not the CPU.

        It is an OrtValue of the binding, as in `run_held`: Python's wrapper around one costs as much as a small node.
        If it does not own the memory, it comes in a tuple with the owner.
        """
        from onnxruntime.capi import _pybind_state as binding

        if isinstance(value, np.ndarray) or not hasattr(binding.OrtValue, "from_dlpack"):  # an older release
            owner = _ort_value(value if isinstance(value, np.ndarray) else np.from_dlpack(value), self._device)
            return owner._ortvalue, owner
        return binding.OrtValue.from_dlpack(value.__dlpack__())

    def run_held(self, names: Sequence[str], values: Sequence[Any], outputs: Sequence[str]) -> Sequence[Any]:
        """Compute the outputs from OrtValues, as OrtValues on the device of the session."""
        from onnxruntime.capi import _pybind_state as binding

        feeds, results = binding.OrtValueVector(), binding.OrtValueVector()
        for value in values:
            feeds.push_back(value[0] if type(value) is tuple else value)
        options, place = self._defaults
        try:
            self._session._sess.run_with_ortvaluevector(options, names, feeds, outputs, results, [place] * len(outputs))
        except Exception as error:  # its classes are private
            raise BackendError(_explain(error, self._backend)) from error
        found: Sequence[Any] = results
        return found

    @cached_property
    def _defaults(self) -> tuple[Any, Any]:
        """The options of a run, and where its results lie."""
        import onnxruntime

        return onnxruntime.RunOptions(), onnxruntime.OrtDevice.make(self._device, 0)._get_c_device()

    def lent(self, values: Sequence[Any], take: Callable[[Any], Any]) -> list[Any]:
        """Call `take` with a DLPack capsule of each value, or an array if this release has none, and return the results."""
        from onnxruntime.capi import _pybind_state as binding

        if not hasattr(binding.OrtValue, "to_dlpack"):
            return [take(_to_numpy(value)) for value in values]
        if isinstance(values, list):
            return [take(value.to_dlpack()) for value in values]
        taken: list[Any] = values.to_dlpacks(take)  # type: ignore[attr-defined]  # all results of a run, at once
        return taken

    def recurrence(self, following: Mapping[str, str], values: Mapping[str, Any]) -> Recurrence:
        """Run the model again and again, with results fed to the next run: they stay on the device."""
        described = {value.name: value for value in (*self.inputs, *self.outputs)}
        changed = [described[name] for pair in following.items() for name in pair]
        if all(value.kind == "tensor" and not _is_extended(value.dtype) for value in changed):
            return _Bound(self, following, values)
        return super().recurrence(following, values)

    def _run(self, asked: tuple[str, ...], feeds: dict[str, Any]) -> list[Any]:
        tensors_only = all(value.kind == "tensor" for value in (*self.inputs, *self.outputs))
        if self._on_cuda and tensors_only:
            return self._run_bound(asked, feeds)
        extended = any(_is_extended(value.dtype) for value in (*self.inputs, *self.outputs))
        if extended and tensors_only:
            values = {name: _ort_value(feed, "cpu") for name, feed in feeds.items()}
            return [_to_numpy(value) for value in self._session.run_with_ort_values(list(asked), values)]
        results: list[Any] = self._session.run(list(asked), feeds)
        return results

    def _run_bound(self, asked: tuple[str, ...], feeds: dict[str, Any]) -> list[Any]:
        binding = self._session.io_binding()
        for name, feed in feeds.items():
            binding.bind_ortvalue_input(name, _ort_value(feed, "cuda"))
        dtypes = {value.name: value.dtype for value in self.outputs}
        for name in asked:
            # Strings live on the host; the bits of bfloat16 and float8 are read there.
            on_host = _is_extended(dtypes[name]) or dtypes[name] == np.dtype(object)
            binding.bind_output(name, "cpu" if on_host else "cuda")
        self._session.run_with_iobinding(binding)
        return [_to_numpy(value) for value in binding.get_outputs()]


class _Memory(NamedTuple):
    """The feeds from outside: the arrays that share the memory of the values, the values, and both bindings."""

    shared: dict[str, np.ndarray]
    values: dict[str, Any]
    bindings: list[Any]


class _Bound(Recurrence):
    """Two sets of memory take turns in being read and written: nothing that is fed back is copied.

    Memory for feeds from outside is kept for the last combinations of shapes.
    """

    def __init__(self, session: _Session, following: Mapping[str, str], values: Mapping[str, Any]) -> None:
        super().__init__(session, following, values)
        self._owner, self._device = session, session._device
        fed = check_feeds(values, [value for value in session.inputs if value.name in following])
        self._sets = [
            {name: _ort_value(np.array(array), self._device) for name, array in fed.items()} for _ in range(2)
        ]
        self._fed = [value for value in session.inputs if value.name not in following]
        self._turn = 0
        # Scalars keep the memory of these arrays; the results beside them are made anew in each run, and come last.
        self._scalars = {
            value.name: np.zeros((), value.dtype)
            for value in session.outputs
            if value.name in self._others and value.kind == "tensor" and value.shape == ()
            if value.dtype is not None and value.dtype.kind in "biuf" and not _is_extended(value.dtype)
        }
        self._others = [name for name in self._others if name not in self._scalars]
        self._bindings: dict[tuple[Any, ...], _Memory] = {}
        del self._values

    def step(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        feeds = {name: np.asarray(feed) for name, feed in feeds.items()}
        key = tuple([(name, array.shape, array.dtype) for name, array in feeds.items()])
        found = self._bindings.get(key)
        try:
            if found is None:
                if len(self._bindings) == _MOST_SHAPES:
                    del self._bindings[next(iter(self._bindings))]
                found = self._bindings[key] = self._bound(feeds)
            else:
                for name, array in feeds.items():
                    if name in found.shared:
                        found.shared[name][...] = array
                    else:
                        found.values[name].update_inplace(
                            array if array.flags.c_contiguous else np.ascontiguousarray(array)
                        )
            binding = found.bindings[self._turn]
            self._owner._session.run_with_iobinding(binding)
        except RefgradError:
            raise
        except Exception as error:
            raise BackendError(_explain(error, self._owner._backend)) from error
        self._turn = 1 - self._turn
        made: dict[str, Any] = {name: array.copy() for name, array in self._scalars.items()}
        if self._others:
            results = binding.get_outputs()[-len(self._others) :]
            made |= {name: _to_numpy(value) for name, value in zip(self._others, results, strict=True)}
        return made

    def _bound(self, feeds: Mapping[str, Any]) -> _Memory:
        checked = check_feeds(feeds, self._fed)
        held = {name: np.array(array, order="C") for name, array in checked.items()}
        memory = {name: _ort_value(array, self._device) for name, array in held.items()}
        # On the CPU a value of numbers has the memory of the array that it is made of.
        shared = {
            n: a
            for n, a in held.items()
            if self._device == "cpu" and a.dtype.kind in "biuf" and not _is_extended(a.dtype)
        }
        bindings = []
        for read, written in (self._sets, reversed(self._sets)):
            binding = self._owner._session.io_binding()
            for name, value in (*memory.items(), *read.items()):
                binding.bind_ortvalue_input(name, value)
            for name, output in self._following.items():
                binding.bind_ortvalue_output(output, written[name])
            for name, array in self._scalars.items():
                binding.bind_ortvalue_output(name, _ort_value(array, "cpu"))
            for name in self._others:
                binding.bind_output(name, "cpu")
            bindings.append(binding)
        return _Memory(shared, memory, bindings)

    def undo(self) -> None:
        """The other memory still has them."""
        self._turn = 1 - self._turn

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(_to_numpy(value)) for name, value in self._sets[self._turn].items()}


def _is_extended(dtype: np.dtype[Any] | None) -> bool:
    """True if `dtype` is a type of ml_dtypes, which onnxruntime does not know by name."""
    return dtype is not None and dtype.type.__module__ == "ml_dtypes"


def _ort_value(array: np.ndarray, device: str) -> Any:
    from onnxruntime import OrtValue

    if array.dtype == object:
        device = "cpu"
    if not _is_extended(array.dtype):
        return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape), device, 0)
    if not hasattr(OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        raise TypeError(f"this version cannot be fed {array.dtype}; feed float32 and start the model with a Cast")
    if _bits(array.dtype) < 8:
        raise TypeError(f"several elements of {array.dtype} share a byte, which cannot be fed; make it an initializer")
    bits = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, helper.np_dtype_to_tensor_dtype(array.dtype))


def _to_numpy(value: Any) -> Any:
    dtype = helper.tensor_dtype_to_np_dtype(value.element_type())
    if not _is_extended(dtype):
        return value.numpy()
    count, width = int(np.prod(value.shape(), dtype=np.int64)), _bits(dtype)
    data = ctypes.string_at(value.data_ptr(), -(-count * width // 8)) if count else b""
    if width < 8:  # the first element lies in the lowest bits
        packed = np.frombuffer(data, np.uint8)[:, None] >> np.arange(0, 8, width, dtype=np.uint8)
        unpacked = (packed.ravel()[:count] & (2**width - 1)).astype(np.uint8)
        data = unpacked.tobytes()
    return np.frombuffer(bytearray(data), dtype).reshape(value.shape())


def _bits(dtype: np.dtype[Any]) -> int:
    info = ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo
    return int(info(dtype).bits)


def _finds_data() -> bool:
    """True if this release can be told the folder of external data. An older one would look into the current folder."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= _KNOWS_DATA_FOLDER


def _is_binary(model: ModelLike) -> TypeGuard[str | os.PathLike[str]]:
    """True if `model` is a file that ONNX Runtime reads as onnx does. A file of text could be another model in binary."""
    if isinstance(model, onnx.ModelProto):
        return False
    return registry.get_format_from_file_extension(Path(model).suffix) in (None, "protobuf")


def _serialized(model: onnx.ModelProto) -> bytes:
    if is_too_large(model):
        raise BackendError(
            "The model is over 2 GB and cannot be handed over in memory. Save it with external data "
            "(onnx.save(..., save_as_external_data=True)) and prepare it by path. ONNX Runtime does not follow links out "
            "of the folder of the model. If the data are links, put the model into the folder of its data."
        )
    return bytes(model.SerializeToString())


def _explain(error: Exception, backend: CpuBackend) -> str:
    """Add to onnxruntime's message the operator that it is about, and what to do."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", str(error)).strip()
    return f"{backend.name} failed: {text}. {_advice(text)}"


def _advice(text: str) -> str:
    if "IR version" in text:
        return "Lower model.ir_version, or install a newer onnxruntime."
    if "opset" in text and ("under development" in text or "official support" in text):
        return "Convert the model down with onnx.version_converter, or install a newer onnxruntime."
    if re.search("NOT_IMPLEMENTED|not a registered function/op|NotImplemented|No Op registered", text):
        return (
            "This build has no kernel for that operator and type. Use the executor 'numpy', "
            "or a model in ai.onnx operators (dialect 'onnx')."
        )
    return "Check the model with onnx.checker; the executor 'numpy' names the first node that fails."
