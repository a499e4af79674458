"""The rules, one short function per operator, a file per family. Importing this package registers all rules of ai.onnx."""

from refgrad.lowering import onnx, ort  # noqa: F401
from refgrad.tables.families import import_families

import_families(__name__, __path__)
