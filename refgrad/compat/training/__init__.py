"""The training of onnxcustom, under the names of its modules."""
