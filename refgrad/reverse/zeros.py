"""The gradients that are 0 for all feeds, and the nodes that stop the derivative: right answers that are of no use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from onnx import TensorProto

from refgrad import traits
from refgrad.errors import choices
from refgrad.model.graph import Graph, Node
from refgrad.protos.domains import ML
from refgrad.reverse.path import ControlFlowRules, Path, find_path, joined
from refgrad.reverse.report import ZeroGradient
from refgrad.reverse.requested import first_floats
from refgrad.tables.registry import QUANTIZERS

_FEW = 3  # values that an advice names
_TREES = frozenset((ML, name) for name in ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"))
_SIZES = frozenset(("", name) for name in traits.OF_SIZES)
_OTHERS = "Choose other inputs or outputs: wrt=[...] or outputs=[...]."
_OF_TREES = (
    "Take differences over a distance that crosses thresholds of the trees, or train a smooth model on their results and "
    "differentiate that one."
)
_OF_NEIGHBOURS = "Nearest neighbours of scikit-learn have a derivative with weights='distance'."


def zeros(
    path: Path, wrt: Iterable[str], outputs: Sequence[str], quantization: str = "zero"
) -> tuple[ZeroGradient, ...]:
    """The names in `wrt` that no derivative reaches, those with the same reason together."""
    lost = [name for name in wrt if name not in path.needed]
    if not lost:
        return ()
    used = _used(path.graph, outputs)
    apart = tuple(name for name in lost if name not in used)
    stopped = [name for name in lost if name in used]
    zero_gradients = [ZeroGradient(apart, (), _OTHERS)] if apart else []
    return (
        (*zero_gradients, *_stopped(path.graph, stopped, outputs, used, quantization))
        if stopped
        else tuple(zero_gradients)
    )


def _used(graph: Graph, outputs: Iterable[str]) -> set[str]:
    """The values that the outputs are computed from in any way, except values of which only the sizes count."""
    used = set(outputs)
    for node in reversed(graph.nodes):
        if node.key not in _SIZES and not used.isdisjoint(node.outputs):
            used.update(node.reads)
    return used


def _stopped(
    graph: Graph, names: Sequence[str], outputs: Sequence[str], used: set[str], quantization: str
) -> list[ZeroGradient]:
    """The nodes at which the derivative by each name ends: they vary with it, and a result that is used does not."""
    alone = find_path(ControlFlowRules(graph, quantization), names, outputs)
    varied, sources = alone.varied, dict(zip(names, (1 << k for k in range(len(names))), strict=True))
    bits = dict(sources)  # of a value: the names that it varies with
    stops: list[tuple[Node, int, list[str]]] = []
    for node in graph.nodes:
        if varied.isdisjoint(node.reads) or used.isdisjoint(node.outputs):
            continue
        mine = 0
        for name in node.reads:
            mine |= bits.get(name, 0)
        for name in node.outputs:
            if name in varied:
                bits[name] = mine
        flat = [name for name in node.outputs if name in used and name not in varied]
        if flat:
            stops.append((node, mine, flat))
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, bit in sources.items():
        alike.setdefault(tuple(node.name for node, mine, _ in stops if mine & bit), []).append(name)
    zero_gradients = []
    for nodes, group in alike.items():
        here = [(node, flat) for node, _, flat in stops if node.name in nodes]
        verdicts = joined(alone.stop(node, flat) for node, flat in here)
        behind = [name for name in first_floats(graph, [name for _, flat in here for name in flat]) if name in used]
        advice = _advice([node for node, _ in here], varied, bits.keys() - sources.keys(), behind)
        zero_gradients.append(ZeroGradient(tuple(group), verdicts, advice))
    return zero_gradients


def _advice(nodes: Sequence[Node], varied: Collection[str], computed: Collection[str], behind: Collection[str]) -> str:
    """Advice for nodes that let no derivative through: differentiate the values that they read, if these are computed.

    Otherwise differentiate by the first floats behind them.
    """
    if any(node.key in _TREES for node in nodes):
        return _OF_TREES
    if any(TensorProto.INT8 in QUANTIZERS.get(node.key, ()) for node in nodes):
        return "Use quantization='straight-through' or quantization='clipped'."
    before = [name for node in nodes for name in node.reads if name in varied and name in computed]
    if not before and behind:
        name = next(iter(behind))
        return (
            f"Differentiate by {choices(behind, limit=_FEW)}, which the model computes from "
            f"{'its result' if len(nodes) == 1 else 'their results'}: "
            f"refgrad.select_model_inputs_outputs(model, None, [{name!r}], keep_inputs=True) makes an input of it."
        )
    if not before:
        return _OTHERS
    read = list(dict.fromkeys(before))
    single = len(read) == 1
    advice = (
        f"Differentiate what {'it reads' if single else 'they read'}, {choices(read, limit=_FEW)}: "
        f"refgrad.select_model_inputs_outputs(model, {read[:_FEW]!r}) makes an output of {'it' if single else 'them'}."
    )
    return f"{advice} {_OF_NEIGHBOURS}" if any(node.key == ("", "TopK") for node in nodes) else advice
