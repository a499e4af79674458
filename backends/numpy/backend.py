"""The backend "numpy": an interpreter of ONNX graphs in plain NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx

from refgrad.backends.base import (
    Backend,
    Local,
    check_feeds,
    check_outputs,
    graph_inputs,
    graph_outputs,
    load_model,
)
from refgrad.backends.numpy.binding import Scope
from refgrad.backends.numpy.memory import WATCH, Progress, Watch
from refgrad.backends.numpy.plan import plan_function, plan_graph
from refgrad.backends.numpy.precision import Declared, Float64, Rounded
from refgrad.errors import OptionError
from refgrad.links import Folders, with_data_in
from refgrad.model.checks.malformed import explained
from refgrad.model.external import ExternalData, ModelSource, Opened, place_of
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.reading import read
from refgrad.protos.memory import allowed, at_most

_PRECISIONS = {None: Declared, "float64": Float64}


class NumpyBackend(Backend):
    """Runs models in the types they declare, or in double with `precision="float64"`."""

    name = "numpy"

    def description(self) -> str:
        """A text with the versions of NumPy and onnx."""
        return f"NumPy {np.__version__}, onnx {onnx.__version__} on CPU"

    @with_data_in
    @explained
    def prepare(
        self,
        model: ModelSource,
        precision: str | Declared | None = None,
        bits: int | None = None,
        max_memory: int | None = None,
        data_folders: Folders | None = None,
        **options: Any,
    ) -> NumpyModel:
        """Plan `model` for runs.

        With `precision="float64"`, every narrower float is double: constants, casts, feeds and outputs. With `bits` as well,
        each result is rounded to that many significant bits (float32 has 24). `precision` may also be a `Declared` of
        `refgrad.backends.numpy.precision`, which chooses the precision of each node.

        With `max_memory`, a run stops before it holds more than that many bytes at once, weights and feeds included. The
        error names the node that needs the memory. The working memory of a kernel is counted if it may be more than a few
        times the size of the kernel's inputs and outputs.

        Links to external data may lead into `data_folders`.

        Raises InvalidModelError, BackendError (an operator without a kernel), OptionError.
        """
        if options:
            raise OptionError(
                f"Executor 'numpy' has no option {sorted(options)}. Its options are precision, bits, max_memory and "
                "data_folders."
            )
        if isinstance(precision, Declared):
            chosen = precision
        elif precision in _PRECISIONS:
            chosen = _PRECISIONS[precision]()
        else:
            raise OptionError(f"precision={precision!r} is not known. Give None (the model's types) or 'float64'.")
        if bits is not None and (precision != "float64" or not 2 <= bits <= 53):
            raise OptionError(f"bits={bits} needs precision='float64' and a number from 2 to 53.")
        if max_memory is not None and not _is_size(max_memory):
            raise OptionError(
                f"max_memory={max_memory!r} is not a number of bytes above 0. Give one, or None for no limit."
            )
        with at_most(max_memory), ExternalData(place_of(model)) as data:
            is_opened = isinstance(model, Opened)
            proto = read(model if isinstance(model, Opened) else load_model(model), sort=False)
            if proto.functions:
                proto = _inlined(proto)
            precision = chosen if bits is None else Rounded(bits)
            return NumpyModel(proto, precision, allowed(), data if is_opened else None)

    def prepare_opened(self, model: Opened, **options: Any) -> NumpyModel:
        """Plan `model` for runs. Its weights are mapped into memory: they stay in their files.

        Raises what `prepare` raises.
        """
        return self.prepare(model, **options)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return inline_functions(copy)


class NumpyModel(Local):
    """A planned model."""

    def __init__(
        self,
        model: onnx.ModelProto,
        precision: Declared,
        max_memory: int | None = None,
        data: ExternalData | None = None,
    ) -> None:
        opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
        self.inputs = tuple(precision.value(value) for value in graph_inputs(model.graph))
        self.outputs = tuple(precision.value(value) for value in graph_outputs(model.graph))
        self._precision = precision
        self._max_memory = max_memory
        scope = Scope(opsets, precision, plan_graph, plan_function, limit=max_memory)
        self._plan = plan_graph(model.graph, scope, nested=False, data=data)

    @np.errstate(all="ignore")
    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: Iterable[str] | None = None,
        trace: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Compute the outputs, or the values of the graph named in `outputs`. Only nodes that these values depend on are run.

        With `trace` the result has every value of the graph except the initializers. It does not have the values within
        subgraphs and function bodies. `progress(done, total, label)` is called before each node.
        """
        asked = self._plan.outputs if outputs is None else check_outputs(outputs, self.outputs, self._plan.names)
        checked = check_feeds(feeds, self.inputs, widen=self._precision.widens)
        values = {name: _read_only(feed) for name, feed in checked.items()}
        if self._max_memory is None:
            results = self._plan.run(values, asked, trace, progress)
        else:
            token = WATCH.set(Watch(self._max_memory, [*self._plan.constants.values(), *values.values()]))
            try:
                results = self._plan.run(values, asked, trace, progress)
            finally:
                WATCH.reset(token)
        return {name: _owned(value) for name, value in results.items()}


def _read_only(feed: Any) -> Any:
    if isinstance(feed, list | tuple):
        return [_read_only(item) for item in feed]
    if not isinstance(feed, np.ndarray):
        return feed
    view = feed.view()
    view.setflags(write=False)
    return view


def _owned(value: Any) -> Any:
    """A result with memory of its own: `value`, or a copy if `value` is a view of a feed or of a constant (both read-only)."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy("C" if 0 in value.strides else "K")
    if isinstance(value, list):
        return [_owned(item) for item in value]
    return np.asarray(value) if isinstance(value, np.generic) else value
