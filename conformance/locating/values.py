"""What is right for every value of a model: that of the interpreter in double, rounded to the value's type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.tracing.watching import constants_of
from refgrad.protos.external import array_of
from refgrad.protos.inlining import inline_functions


class Values:
    """The values of a model at some feeds, those in bodies not counted.

    :param model: a model, which is not modified. Functions are written out in `self.model`.
    :param feeds: the values of its inputs, by name.
    :raises InvalidModelError: the model cannot be read.
    :raises FeedError: the feeds do not fit the model.
    :raises BackendError: the interpreter does not run it.
    """

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(model)
        if self.model.functions:
            self.model = inline_functions(self.model)
        self.feeds = dict(feeds)
        self.constants = constants_of(self.model) - set(feeds)
        interpreter = NumpyBackend()
        held = {tensor.name: array_of(tensor) for tensor in self.model.graph.initializer}
        self._declared = {**held, **interpreter.prepare(self.model).run(feeds, trace=True), **feeds}
        self._wide = {**held, **interpreter.prepare(self.model, precision="float64").run(feeds, trace=True)}

    def right(self, name: str) -> Any:
        """What is right for a value, in its type."""
        due, like = self._wide.get(name), self._declared.get(name)
        if not isinstance(due, np.ndarray) or not isinstance(like, np.ndarray):
            return like
        return due.astype(like.dtype) if due.dtype != like.dtype else due
