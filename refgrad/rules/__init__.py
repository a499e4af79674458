"""The rules, one short function per operator, a file per family. Importing this package registers everything there is."""

from refgrad import microsoft  # noqa: F401
from refgrad.lowering import onnx, ort  # noqa: F401
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.families import import_families
from refgrad.tables.registry import BODY, RULES

import_families(__name__, __path__)
BODY.update({key: known.meaning for key, known in DEFINITIONS.items() if key not in RULES})
