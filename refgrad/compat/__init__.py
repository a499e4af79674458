"""The names of onnxcustom and experimental_experiment: `onnxcustom.X` is `refgrad.compat.X`."""
