"""A model as it comes in and goes out.

`normalise.py` takes its steps in order: read (`reading.py`, `external.py`), check (`checks/`), upgrade (`upgrading/`), inline
(`inlining/`), infer (`inference/`), and view the result as a `Graph` (`graph.py`). `writing.py` writes a model. `native.py` is
the one door to onnx's C++.
"""
