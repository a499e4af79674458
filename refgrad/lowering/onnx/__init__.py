"""Every primitive in ai.onnx operators: the total table, on which the "onnx" dialect and every fallback rest."""

from refgrad.tables.families import import_families

import_families(__name__, __path__)
