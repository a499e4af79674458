"""The training of onnxcustom, under the names of its modules."""

__max_supported_opset__ = 15  # ONNX Runtime reads it since version 1.10


def get_max_opset() -> int:
    """The opset in which the examples of onnxcustom write their models."""
    return __max_supported_opset__
