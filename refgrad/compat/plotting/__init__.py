"""The pictures of onnxcustom, under the names of its modules."""
