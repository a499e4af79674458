"""A fault that no node has alone: the fewest nodes that are wrong together, and the pass of a runtime that makes them so.

To look at a value changes what a runtime fuses. So nodes are run in windows, of which only what others read comes out: all
nodes, halves, halves of halves. A window that is wrong whose halves are right is shrunk until no node can be left out. A
Constant is in each window whose nodes read it: an input in its place would change what a runtime folds, and its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.backends import Backend
from refgrad.backends.base import Prepared
from refgrad.conformance.judge.nan.watching import label_of
from refgrad.conformance.locating.repair import RepairTrial
from refgrad.conformance.locating.replay import Replay
from refgrad.conformance.locating.values import ModelValues
from refgrad.errors import RefgradError
from refgrad.protos.traverse import reads_of

_MOST = 400  # windows that are run
LEVELS = ("disabled", "basic", "extended", "all")
_PASSES_NAMED = """
    AttentionFusion BiasDropoutFusion BiasGeluFusion BiasSoftmaxFusion CastChainElimination CastElimination
    CommonSubexpressionElimination ConcatSliceElimination ConstantFolding ConstantSharing ConvActivationFusion
    ConvAddActivationFusion ConvAddFusion ConvBNFusion ConvMulFusion DivMulFusion DoubleQDQPairsRemover
    DynamicQuantizeMatMulFusion EliminateDropout EliminateIdentity EliminateSlice EmbedLayerNormFusion
    FastGeluFusion FuseReluClip GatherSliceToSplitFusion GatherToSliceFusion GatherToSplitFusion GeluApproximation
    GeluFusionL1 GeluFusionL2 GemmActivationFusion GemmSumFusion GemmTransposeFusion
    IdenticalChildrenConsolidation IsInfReduceSumFusion LayerNormFusion LayerNormFusionL1 LayerNormFusionL2
    Level1_RuleBasedTransformer Level2_RuleBasedTransformer MatMulActivationFusion MatMulAddFusion MatMulBNFusion
    MatMulIntegerToFloatFusion MatMulNBitsFusion MatMulScaleFusion MatmulTransposeFusion
    MatMul_BatchNormalization_Fusion MLFloat16ReplaceIdentity NchwcTransformer NhwcTransformer NoopElimination
    NotWhereFusion Pad_Fusion PreShapeNodeElimination PropagateCastOps QDQFinalCleanupTransformer
    QDQPropagationTransformer QDQSelectorActionTransformer QuickGeluFusion RemoveDuplicateCastTransformer
    ReshapeFusion RocmBlasAltImpl SimplifiedLayerNormFusion SkipLayerNormFusion SliceConcatToSpaceToDepthFusion
    TransposeOptimizer TransposeOptimizer_CPUExecutionProvider UnsqueezeElimination WhereDummyDq
"""
PASSES = tuple(_PASSES_NAMED.split())


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are wrong together and right one by one, and the largest error that the results have once they are repaired,
    with the groups before them.
    """

    positions: tuple[int, ...]
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    error: float
    left: float = 0.0
    is_proved: bool = False

    @property
    def labels(self) -> list[str]:
        """Each node with its operator."""
        return [f"{operator} {name!r}" for operator, name in zip(self.operators, self.nodes, strict=True)]

    def __str__(self) -> str:
        return f"{', '.join(self.labels)}: each is right alone, but together they are off by {self.error:.2g}"


Count = Callable[[int, int | None], None]


def groups(
    model: ModelProto,
    feeds: Mapping[str, Any],
    backend: Backend,
    known: Mapping[int, Mapping[str, np.ndarray]] = MappingProxyType({}),
    count: Count | None = None,
) -> tuple[NodeGroup, ...]:
    """The groups of nodes that an executor gets wrong together alone, in the order of the model.

    :param known: the right values of nodes that are wrong by themselves, by their position: they are in no group.
    :param count: called with the number of windows that were run, and None.
    :raises RefgradError: the interpreter does not run the model.
    """
    return tuple(_Search(ModelValues(model, feeds), backend, known, count).found())


class _Search:
    def __init__(
        self,
        values: ModelValues,
        backend: Backend,
        known: Mapping[int, Mapping[str, np.ndarray]],
        count: Count | None,
    ) -> None:
        self._values, self._backend, self._known, self._count = values, backend, known, count
        self._all = list(values.model.graph.node)
        self._constants = [k for k, node in enumerate(self._all) if node.op_type == "Constant"]
        self._places = [k for k in range(len(self._all)) if k not in known and k not in self._constants]
        self._outputs = {value.name for value in values.model.graph.output}
        self._readers: dict[str, set[int]] = {}
        for k, node in enumerate(self._all):
            for name in reads_of(node):
                self._readers.setdefault(name, set()).add(k)
        self._runs = 0

    def found(self) -> list[NodeGroup]:
        """The groups of a first search, and of more searches without the nodes that are known by then."""
        made: list[tuple[list[int], float]] = []
        places = self._places
        while windows := self._within(places):
            made = sorted([*made, *map(self._shrunk, windows)])
            places = [k for k in places if all(k not in positions for positions, _ in made)]
        if not made:
            return []
        trial = RepairTrial(Replay(self._values.model, self._values.feeds), self._backend)
        told = []
        repaired: dict[int, Mapping[str, np.ndarray]] = dict(self._known)
        for positions, error in made:
            right = {k: self._right(self._all[k]) for k in positions}
            if all(isinstance(value, np.ndarray) for values in right.values() for value in values.values()):
                repaired |= right
            left, _ = trial.with_values(repaired)
            nodes = [self._all[k] for k in positions]
            told.append(
                NodeGroup(
                    tuple(positions),
                    tuple(map(label_of, nodes)),
                    tuple(node.op_type for node in nodes),
                    error,
                    left.largest,
                    left.is_rounding,
                )
            )
        return told

    def _right(self, node: NodeProto) -> dict[str, np.ndarray]:
        return {name: self._values.right(name) for name in node.output if name}

    def _within(self, window: list[int]) -> list[list[int]]:
        if self._error(window) is None:
            return []
        if len(window) <= 2:
            return [window]
        middle = len(window) // 2
        halves = self._within(window[:middle]) + self._within(window[middle:])
        return halves or [window]

    def _shrunk(self, window: list[int]) -> tuple[list[int], float]:
        """The window without the nodes that it does not need, tried in ever smaller parts."""
        error, step = self._error(window) or 0.0, max(len(window) // 2, 1)
        while step and len(window) > 1:
            at = 0
            while at < len(window) and len(window) > 1:
                smaller = window[:at] + window[at + step :]
                less = self._error(smaller) if smaller else None
                if less is None:
                    at += step
                else:
                    window, error = smaller, less
            step //= 2
        return window, error

    def _error(self, window: Collection[int]) -> float | None:
        """How far off the results of a window are; None where they are right, or cannot be told."""
        self._runs += 1
        if self._runs > _MOST:
            return None
        if self._count is not None:
            self._count(self._runs, None)
        try:
            model, feeds = self._model(sorted(window))
            trial = RepairTrial(Replay(model, feeds), self._backend)
        except (RefgradError, LookupError):
            return None
        errors, _ = trial.run(())
        return None if errors.is_rounding else errors.largest

    def _model(self, window: Iterable[int]) -> tuple[ModelProto, dict[str, Any]]:
        inside = set(window)
        inside |= {k for k in self._constants if inside & self._readers.get(self._all[k].output[0], set())}
        nodes = [self._all[k] for k in sorted(inside)]
        read = {name for name, readers in self._readers.items() if readers - inside}
        made, feeds = self._values.part(nodes, self._outputs | read)
        if not made.graph.output:
            raise LookupError("nobody reads what it makes")
        return made, feeds


class _Optimized(Backend):
    """An executor with its graph optimisations set."""

    def __init__(self, backend: Backend, **options: Any) -> None:
        self.name, self._backend, self._options = backend.name, backend, options

    def description(self) -> str:
        return self._backend.description()

    def prepare(self, model: Any, **options: Any) -> Prepared:
        return self._backend.prepare(model, **self._options)


def optimisation(model: ModelProto, feeds: Mapping[str, Any], backend: Backend, count: Count | None = None) -> str:
    """The level and the pass of ONNX Runtime's graph optimisations that an error comes with; "" if it comes with none.

    :param count: called with the number of passes that were tried, and how many there are.
    """
    if not backend.name.startswith("ort-"):
        return ""
    replay = Replay(model, feeds)
    tried = itertools.count()

    def is_wrong(**options: Any) -> bool:
        if count is not None:
            count(next(tried), len(LEVELS) + len(PASSES))
        trial = RepairTrial(replay, _Optimized(backend, **options))
        errors, failed = trial.run(())
        return bool(failed) or not errors.is_rounding

    try:
        wrong = [level for level in LEVELS if is_wrong(optimization=level)]
        if not wrong or wrong[0] == LEVELS[0]:
            return ""
        named = [one for one in PASSES if not is_wrong(optimization=wrong[0], without=[one])]
    except RefgradError:
        return ""
    told = f"the fault begins at the optimisation level {wrong[0]!r}"
    return f"{told}, and is gone without the pass {' or '.join(named)}" if named else told
