"""A runtime in an environment of its own, as benchmarks/pairs.py runs it: here in this one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter


def test_a_runtime_elsewhere_runs_a_model(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from elsewhere import Elsewhere

    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    runtime = Elsewhere("onnx.reference", Path(sys.executable))
    assert runtime.name == f"onnx.reference {onnx.__version__}"
    fed = np.array([1.0, -2.0], np.float32)
    with contextlib.closing(runtime):
        assert np.array_equal(runtime.prepare(model).run({"x": fed})["y"], -fed)
    with pytest.raises(BackendError, match="there is no runtime 'nowhere'"):
        Elsewhere("nowhere", Path(sys.executable))
