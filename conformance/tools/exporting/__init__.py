"""The suite for others: as files, as tests of onnx.backend, as tests of pytest."""
