"""The backend tests of onnx: their names from a file, as onnx computes for seconds before it has them, and the tests by name.

The file is of one release of onnx. `python tests/helpers/onnx_tests.py` writes it; of another release onnx is asked.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAMES = Path(__file__).parents[1] / "data" / "onnx_tests.json"


@cache
def loaded() -> Mapping[str, Any]:
    """The node tests of onnx by name."""
    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {test.name: test for test in loader.load_model_tests(kind="node")}


@cache
def names() -> Mapping[str, Any]:
    """What `collected` returns, from the file where it is of this release of onnx."""
    found: dict[str, Any] = json.loads(NAMES.read_text())
    return found if found["onnx"] == version("onnx") else collected()


def collected() -> dict[str, Any]:
    """The names of all backend tests by kind, and of the node tests with a derivative.

    "judged" has those whose gradient is judged, "structured" those with structures among these, "excluded" the others;
    "alone" the operators of node tests of one node, as in numpy_nodes.
    """
    from numpy_nodes import alone, node_tests

    from refgrad.conformance.case import qualified
    from refgrad.conformance.judge.running.nodemodels import excluded, node_models
    from refgrad.conformance.tools.exporting.backendtests import backend_tests

    models = {test.name: test for test in node_models()}
    judged = [name for name, test in models.items() if excluded(test) is None]
    return {
        "onnx": version("onnx"),
        "backend": {kind: list(tests) for kind, tests in backend_tests().items()},
        "judged": judged,
        "structured": [name for name in judged if models[name].structured],
        "excluded": [name for name in models if name not in judged],
        "alone": sorted({qualified(case.node) for case in map(alone, *zip(*node_tests(), strict=True)) if case}),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    NAMES.write_text(json.dumps(collected(), indent=1) + "\n")
