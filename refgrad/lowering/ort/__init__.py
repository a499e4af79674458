"""The primitives that ONNX Runtime has a kernel for, each with the condition under which that kernel is right.

A lowering that returns None leaves the case to the ai.onnx one.
"""

from refgrad.tables.dialects import Dialect, register_dialect
from refgrad.tables.families import import_families

register_dialect(Dialect("ort", yields=True, follows_onnxruntime=True))

import_families(__name__, __path__)
