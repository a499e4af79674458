"""ONNX Runtime's own operators (com.microsoft): a plug-in, which refgrad brings (`refgrad.tables.plugins`).

The forward operators, as its optimizer and its training tools write them, have a body in ai.onnx operators (`@body`), and a
rule where that is more than the derivative of the body. The operators of its gradients and its training steps have a form
(`@form`), which `refgrad.lower` writes in their place. Kernels, cases and strategies lie in folders beside the bodies; each has
a file per family.
"""

from refgrad import extend
from refgrad.microsoft import bodies
from refgrad.tables.families import import_families

import_families(bodies.__name__, bodies.__path__)
extend.families(__name__)
