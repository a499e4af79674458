"""Names of `onnxcustom.utils.onnx_helper`."""

from refgrad.rewrites.selection import onnx_rename_names, onnx_rename_weights, select_model_inputs_outputs

__all__ = ["onnx_rename_names", "onnx_rename_weights", "select_model_inputs_outputs"]
