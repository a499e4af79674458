"""Every primitive in ai.onnx operators: the total table, on which the "onnx" dialect and every fallback rest."""

from refgrad.tables.dialects import Dialect, register_dialect
from refgrad.tables.families import import_families

register_dialect(Dialect("onnx", plain=True))

import_families(__name__, __path__)
