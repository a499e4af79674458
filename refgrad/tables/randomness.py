"""The operators that draw random numbers: another run of the node, or another executor, gives other results."""

from __future__ import annotations

from onnx import NodeProto

from refgrad import traits
from refgrad.protos.domains import MICROSOFT

# The operators that draw whenever they run, by domain and name.
ALWAYS = frozenset(
    {
        *(("", name) for name in traits.RANDOM - {"Dropout"}),
        (MICROSOFT, "BiasSoftmaxDropout"),
    }
)

# The operators that draw while they train: the position of the input that says whether they do. Without it they do not.
IN_TRAINING = {
    ("", "Dropout"): 2,
    (MICROSOFT, "BiasDropout"): 4,
    (MICROSOFT, "BitmaskBiasDropout"): 4,
    (MICROSOFT, "BitmaskDropout"): 2,
}

RANDOM = ALWAYS.union(IN_TRAINING)


def operator_of(node: NodeProto) -> tuple[str, str]:
    """The domain and the name of a node's operator; the domain of ONNX itself is ""."""
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def may_draw(node: NodeProto) -> bool:
    """True if a node may draw random numbers, its subgraphs aside."""
    return operator_of(node) in RANDOM
