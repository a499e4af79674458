"""Names of `onnxcustom.utils.print_helper`."""

from __future__ import annotations

from typing import Any

__all__ = ["str_ortvalue"]

_LONG, _ENDS = 10, 5  # of a value with more elements, the first and the last are shown


def str_ortvalue(ov: Any) -> str:
    """Device, type, shape and elements of an OrtValue in one line."""
    array = ov.numpy()
    values = array.ravel().tolist()
    if len(values) > _LONG:
        values[_ENDS:-_ENDS] = ["..."]
    return f"device={ov.device_name().capitalize()} dtype={array.dtype!r} shape={array.shape!r} value={values!r}"
