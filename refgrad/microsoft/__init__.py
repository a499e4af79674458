"""ONNX Runtime's own operators (com.microsoft), a file per family.

The forward operators, as its optimizer and its training tools write them, have a body in ai.onnx operators (`@operator`), and a
rule where that is more than the derivative of the body. The operators of its gradients and its training steps have a form
(`@form`), which `refgrad.lower` writes in their place.
"""

from refgrad.tables.families import import_families

import_families(__name__, __path__)
