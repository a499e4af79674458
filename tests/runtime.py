"""The releases of ONNX Runtime that the interpreter is compared with: others lack operators, or compute other things."""

import pytest

from refgrad.conformance.findings.finding import ORT, RELEASES, installed

RUNTIME = installed().get(ORT) in RELEASES[ORT]
WITHOUT = f"onnxruntime {' or '.join(RELEASES[ORT])} is not installed"
needs_runtime = pytest.mark.skipif(not RUNTIME, reason=WITHOUT)
