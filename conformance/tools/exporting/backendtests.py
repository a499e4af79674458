"""The backend tests that onnx ships, on the interpreter: which there are, and which of them nobody can decide."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from onnx.backend.test import BackendTest

from refgrad.backends.base import ModelLike
from refgrad.backends.onnx_backend import OnnxBackend, OnnxModel
from refgrad.derivatives.expansion import expand_gradients

KINDS = {  # what onnx calls them, and what it calls their classes; whole models are in tests/backends/test_numpy_models.py
    "node": "OnnxBackendNodeModelTest",
    "simple": "OnnxBackendSimpleModelTest",
    "pytorch-converted": "OnnxBackendPyTorchConvertedModelTest",
    "pytorch-operator": "OnnxBackendPyTorchOperatorModelTest",
}

# The expected values come from one generator; only the shape, the type and the possible values are compared.
RANDOM = frozenset(f"test_bernoulli{form}{body}" for form in ("", "_double", "_seed") for body in ("", "_expanded"))

_PICTURES = (
    *(f"{kind}_rgb" for kind in ("bmp", "jpeg2k", "jpeg", "png", "pnm", "tiff", "webp")),
    "jpeg_bgr",
    "jpeg_grayscale",
)
_NO_PILLOW = importlib.util.find_spec("PIL") is None


def _left_out() -> dict[str, str]:
    reasons = dict.fromkeys(RANDOM, "random numbers, which the specification leaves to the runtime")
    reasons["test_attention_4d_causal_fp16_expanded"] = (
        "two float16 elements differ: the expected ones come from a Softmax that adds up in float16, and are farther from the "
        "exact result than the computed ones"
    )
    if _NO_PILLOW:
        names = [f"test_image_decoder_decode_{picture}" for picture in _PICTURES]
        reasons |= dict.fromkeys(names, "pictures are decoded with Pillow, which is not installed")
    return reasons


LEFT_OUT: Mapping[str, str] = _left_out()


class _Expanding(OnnxBackend):
    """The interpreter, given the graphs of the derivatives that Gradient stands for: a backend has none of that operator."""

    @classmethod
    def prepare(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> OnnxModel:
        """`model` planned, its derivatives written out."""
        return super().prepare(expand_gradients(model), device, **kwargs)


class _Tests(BackendTest):
    """onnx's tests; elements of sequences are compared as outputs are, scalars among them, which have no length."""

    @classmethod
    def assert_similar_outputs(
        cls,
        ref_outputs: Sequence[Any],
        outputs: Sequence[Any],
        rtol: float,
        atol: float,
        model_dir: str | None = None,
    ) -> None:
        assert len(outputs) == len(ref_outputs), f"{len(outputs)} instead of {len(ref_outputs)}"
        for expected, got in zip(ref_outputs, outputs, strict=True):
            if isinstance(expected, list) and isinstance(got, list):
                cls.assert_similar_outputs(expected, got, rtol, atol, model_dir)
            else:
                super().assert_similar_outputs([expected], [got], rtol, atol, model_dir)


@cache
def backend_tests() -> Mapping[str, Mapping[str, Callable[[], None]]]:
    """Every test by kind and name; calling it raises AssertionError or unittest.SkipTest, or whatever the interpreter does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes expected values that are infinite
        classes = _Tests(_Expanding).test_cases
    found = {}
    for kind, title in KINDS.items():
        names = sorted(name for name in vars(classes[title]) if name.endswith("_cpu"))
        found[kind] = {name.removesuffix("_cpu"): getattr(classes[title](name), name) for name in names}
    return found
