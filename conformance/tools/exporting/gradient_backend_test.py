"""The gradients of the suite as backend tests of onnx: for whoever has a backend class, and the harness for it."""

from __future__ import annotations

import unittest
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from onnx.backend.base import Backend
from onnx.backend.test.runner import Runner

from refgrad.conformance.case import Case
from refgrad.conformance.tools.exporting.expected import curated, expect
from refgrad.errors import UnconfirmedError

CATEGORY = "GradientModel"


class GradientBackendTest(Runner):
    """Like `onnx.backend.test.BackendTest`, with gradients of operators in place of the operators:

        backend_test = GradientBackendTest(MyBackend, __name__)
        backend_test.exclude("gridsample")
        globals().update(backend_test.test_cases)

    Each test runs a gradient model in plain ai.onnx operators and compares what comes out with values from float64 that two
    oracles or more confirm when the test is run. A case that they do not confirm is skipped, with the reason.

    :param backend: the class of a backend; it prepares models, supports devices and, if it says so, is compatible.
    :param parent_module: the module that the test classes say they are of.
    :param test_kwargs: keyword arguments of `backend.prepare` by the name of a test; `rtol` and `atol` among them replace the
        tolerances.
    :param cases: the cases by the name of their tests, all that are curated by default.
    """

    def __init__(
        self,
        backend: type[Backend],
        parent_module: str | None = None,
        test_kwargs: dict[str, dict[str, Any]] | None = None,
        cases: Mapping[str, Case] | None = None,
    ) -> None:
        # Not the constructor of Runner: it loads the tests of the operators.
        self.backend = backend
        self._parent_module = parent_module
        self._include_patterns, self._exclude_patterns, self._xfail_patterns = set(), set(), set()
        self._test_kwargs = test_kwargs or {}
        self._test_items = defaultdict(dict)
        for name, case in (curated() if cases is None else cases).items():
            self._add_test(CATEGORY, name, partial(self._run, case), [None], **self._test_kwargs.get(name, {}))

    def _run(self, case: Case, test: unittest.TestCase, device: str, **options: Any) -> None:
        try:
            expected = expect(case)
        except UnconfirmedError as error:
            raise unittest.SkipTest(str(error)) from error
        model = expected.model
        if not self.backend.is_compatible(model, device):
            raise unittest.SkipTest("Not compatible with backend")
        prepared = self.backend.prepare(model, device, **options)
        if prepared is None:
            raise AssertionError(f"{self.backend.__name__}.prepare returned None")
        self.assert_similar_outputs(
            list(expected.gradients.values()),
            [np.asarray(output) for output in prepared.run(list(expected.feeds.values()))],
            rtol=options.get("rtol", 0.0),
            atol=options.get("atol", expected.tolerance),
            model_dir=case.name,
        )
