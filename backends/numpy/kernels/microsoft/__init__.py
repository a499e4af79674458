"""Kernels of ONNX Runtime's forward operators (com.microsoft), a file per family."""

from refgrad.tables.families import import_families

import_families(__name__, __path__)
