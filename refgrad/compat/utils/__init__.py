"""The helpers of onnxcustom, under the names of its modules."""
