"""The release of ONNX Runtime that the interpreter is compared with: others lack operators, or compute other things."""

import pytest

from refgrad.conformance.findings.finding import ORT, VERSIONS, installed

RUNTIME = installed().get(ORT) == VERSIONS[ORT]
WITHOUT = f"onnxruntime {VERSIONS[ORT]} is not installed"
needs_runtime = pytest.mark.skipif(not RUNTIME, reason=WITHOUT)
