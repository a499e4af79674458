"""The ensembles of trees of ai.onnx.ml. All rows go down all trees together, one level at a time.

A forest is read from the attributes once per node. What trees compute is float, double where X is double.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.ml import (
    Array,
    Floats,
    Ints,
    Strings,
    as_rows,
    label_array,
    transformed,
    two_scores,
)
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import ML

MEMBER, LEAF = 6, 7
_COMPARE: tuple[Callable[[Array, Array], Any], ...] = (
    np.less_equal,
    np.less,
    np.greater_equal,
    np.greater,
    np.equal,
    np.not_equal,
)
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_POST_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_AT_ONCE = 2**20  # numbers that a step compares at once


class _Key:
    """A key for the attributes of a node: they are the same objects at every run."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._ids = tuple(map(id, values.values()))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._ids == other._ids


@dataclass(frozen=True)
class Forest:
    """The nodes of all trees: what each compares, where it leads; and the votes of the leaves.

    `votes` and `voted` have a row per leaf and a column per target: the weights, and whether there is one. `leaf` is the
    row of a node. `members` are the values of the sets, `member_codes` the pairs (set, value) in order; `value` of a node
    that tests a set is the number of the set.
    """

    roots: Array
    feature: Array
    mode: Array
    value: Array
    yes: Array
    no: Array
    missing: Array
    leaf: Array
    votes: Array
    voted: Array
    members: Array
    member_codes: Array

    def scores(self, x: Array, aggregate: str) -> Array:
        """(rows, targets): the votes of the leaves that each row of `x` ends in; 0 where there are none"""
        if aggregate not in _AGGREGATES:
            raise ValueError(f"aggregate_function={aggregate!r} is not known; there are {', '.join(_AGGREGATES)}")
        targets = self.votes.shape[1]
        result = np.zeros((len(x), targets), self.votes.dtype)
        step = max(1, _AT_ONCE // max(1, len(self.roots) * targets))
        for start in range(0, len(x), step):
            leaves = self.leaf[self._descend(x[start : start + step])]
            votes = self.votes[leaves]
            if aggregate in ("SUM", "AVERAGE"):
                result[start : start + step] = votes.sum(1)
                continue
            voted = self.voted[leaves]
            least = np.min if aggregate == "MIN" else np.max
            none = np.inf if aggregate == "MIN" else -np.inf
            best = least(votes, 1, where=voted, initial=none)
            result[start : start + step] = np.where(voted.any(1), best, 0)
        if aggregate == "AVERAGE":
            result /= result.dtype.type(len(self.roots))
        return result

    def _descend(self, x: Array) -> Array:
        """(rows, trees): the leaf where each row ends in each tree"""
        need(len(self.roots) * len(x) * 6 * 8)
        at = np.tile(self.roots, len(x))
        row = np.repeat(np.arange(len(x)), len(self.roots))
        inner = np.flatnonzero(self.mode[at] != LEAF)
        for _ in range(len(self.mode) + 1):
            if not len(inner):
                return at.reshape(len(x), -1)
            node = at[inner]
            at[inner] = np.where(self._holds(x[row[inner], self.feature[node]], node), self.yes[node], self.no[node])
            inner = inner[self.mode[at[inner]] != LEAF]
        raise ValueError("a branch leads back to a node above it")

    def _holds(self, x: Array, node: Array) -> Array:
        """True if the condition of each node holds; for NaN its `missing` decides"""
        modes = self.mode[node]
        holds = np.zeros(len(x), bool)
        for mode in np.flatnonzero(np.bincount(modes)):
            here = slice(None) if (modes == mode).all() else modes == mode
            test = self._is_member if mode == MEMBER else _COMPARE[mode]
            holds[here] = test(x[here], self.value[node[here]])
        return np.where(np.isnan(x), self.missing[node], holds)

    def _is_member(self, x: Array, which: Array) -> Array:
        rank = np.searchsorted(self.members, x).clip(0, len(self.members) - 1)
        codes = which.astype(np.int64) * len(self.members) + rank
        place = np.searchsorted(self.member_codes, codes).clip(0, len(self.member_codes) - 1)
        return np.asarray((self.members[rank] == x) & (self.member_codes[place] == codes))


@kernel("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(
    X: Array,
    *,
    aggregate_function: str,
    base_values: Floats = None,
    base_values_as_tensor: Array | None = None,
    n_targets: int | None = None,
    nodes_falsenodeids: Ints = None,
    nodes_featureids: Ints = None,
    nodes_hitrates: Floats = None,
    nodes_hitrates_as_tensor: Array | None = None,
    nodes_missing_value_tracks_true: Ints = None,
    nodes_modes: Strings = None,
    nodes_nodeids: Ints = None,
    nodes_treeids: Ints = None,
    nodes_truenodeids: Ints = None,
    nodes_values: Floats = None,
    nodes_values_as_tensor: Array | None = None,
    post_transform: str,
    target_ids: Ints = None,
    target_nodeids: Ints = None,
    target_treeids: Ints = None,
    target_weights: Floats = None,
    target_weights_as_tensor: Array | None = None,
    _wide: bool,
) -> Array:
    """post_transform of the aggregated votes + base_values"""
    kind = _kind(X, _wide)
    forest = _forest(
        _Key(
            {
                "treeids": nodes_treeids,
                "nodeids": nodes_nodeids,
                "featureids": nodes_featureids,
                "modes": nodes_modes,
                "values": _one_of(nodes_values, nodes_values_as_tensor),
                "truenodeids": nodes_truenodeids,
                "falsenodeids": nodes_falsenodeids,
                "missing": nodes_missing_value_tracks_true,
                "vote_treeids": target_treeids,
                "vote_nodeids": target_nodeids,
                "vote_ids": target_ids,
                "vote_weights": _one_of(target_weights, target_weights_as_tensor),
            }
        ),
        n_targets or max(target_ids or [0]) + 1,
        kind,
        aggregate_function,
    )
    scores = forest.scores(_comparable(X), aggregate_function)
    _add_base(scores, _one_of(base_values, base_values_as_tensor))
    return _as_result(transformed(scores, post_transform), _wide)


@kernel("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(
    X: Array,
    *,
    base_values: Floats = None,
    base_values_as_tensor: Array | None = None,
    class_ids: list[int],
    class_nodeids: Ints = None,
    class_treeids: Ints = None,
    class_weights: Floats = None,
    class_weights_as_tensor: Array | None = None,
    classlabels_int64s: Ints = None,
    classlabels_strings: Strings = None,
    nodes_falsenodeids: Ints = None,
    nodes_featureids: Ints = None,
    nodes_hitrates: Floats = None,
    nodes_hitrates_as_tensor: Array | None = None,
    nodes_missing_value_tracks_true: Ints = None,
    nodes_modes: Strings = None,
    nodes_nodeids: Ints = None,
    nodes_treeids: Ints = None,
    nodes_truenodeids: Ints = None,
    nodes_values: Floats = None,
    nodes_values_as_tensor: Array | None = None,
    post_transform: str,
    _wide: bool,
) -> tuple[Array, Array]:
    """The label of the largest sum of votes + base_values, and post_transform of the sums.

    Where all votes are for one of two classes, their sum s is the score of both, as in ONNX Runtime: the second class is the
    label from s > 1/2 on where no weight is negative, from s > 0 on elsewhere; and where the votes are for the first class,
    the scores are (1 − s, s) or (−s, s). A single class is the label where s > 0; elsewhere 0 or "" is.
    """
    labels, kind = label_array(classlabels_int64s, classlabels_strings), _kind(X, _wide)
    weights = _one_of(class_weights, class_weights_as_tensor)
    forest = _forest(
        _Key(
            {
                "treeids": nodes_treeids,
                "nodeids": nodes_nodeids,
                "featureids": nodes_featureids,
                "modes": nodes_modes,
                "values": _one_of(nodes_values, nodes_values_as_tensor),
                "truenodeids": nodes_truenodeids,
                "falsenodeids": nodes_falsenodeids,
                "missing": nodes_missing_value_tracks_true,
                "vote_treeids": class_treeids,
                "vote_nodeids": class_nodeids,
                "vote_ids": class_ids,
                "vote_weights": weights,
            }
        ),
        len(labels),
        kind,
        "SUM",
    )
    scores = forest.scores(_comparable(X), "SUM")
    one_score = len(labels) == 2 and len(set(class_ids)) == 1
    _add_base(scores, _one_of(base_values, base_values_as_tensor), single=one_score)
    if len(labels) == 1:
        none = "" if labels.dtype == object else 0
        label = np.where(scores[:, 0] > 0, labels[0], none).astype(labels.dtype)
        return label, _as_result(transformed(scores, post_transform), _wide)
    if not one_score:
        return labels[scores.argmax(1)], _as_result(transformed(scores, post_transform), _wide)
    positive = bool(np.min(np.asarray(weights)) >= 0)
    score = scores[:, class_ids[0], None]
    label = labels[(score[:, 0] > (0.5 if positive else 0)).astype(int)]
    if class_ids[0] == 0:
        return label, _as_result(two_scores(score, post_transform, 1 - score if positive else -score), _wide)
    return label, _as_result(transformed(scores, post_transform), _wide)


@kernel("TreeEnsemble", domain=ML, in_float32=True)
def tree_ensemble(
    X: Array,
    *,
    aggregate_function: int,
    leaf_targetids: list[int],
    leaf_weights: Array,
    membership_values: Array | None = None,
    n_targets: int | None = None,
    nodes_falseleafs: list[int],
    nodes_falsenodeids: list[int],
    nodes_featureids: list[int],
    nodes_hitrates: Array | None = None,
    nodes_missing_value_tracks_true: Ints = None,
    nodes_modes: Array,
    nodes_splits: Array,
    nodes_trueleafs: list[int],
    nodes_truenodeids: list[int],
    post_transform: int,
    tree_roots: list[int],
    _wide: bool,
) -> Array:
    """post_transform of the aggregated weights of the leaves, in the type of X"""
    for name, number, known in (("aggregate_function", aggregate_function, 4), ("post_transform", post_transform, 5)):
        if not 0 <= number < known:
            raise ValueError(f"{name}={number} is not known; there are 0 to {known - 1}")
    forest = _forest_5(
        _Key(
            {
                "roots": tree_roots,
                "featureids": nodes_featureids,
                "modes": nodes_modes,
                "splits": nodes_splits,
                "truenodeids": nodes_truenodeids,
                "trueleafs": nodes_trueleafs,
                "falsenodeids": nodes_falsenodeids,
                "falseleafs": nodes_falseleafs,
                "missing": nodes_missing_value_tracks_true,
                "targetids": leaf_targetids,
                "weights": leaf_weights,
                "members": membership_values,
            }
        ),
        n_targets or max(leaf_targetids) + 1,
        _kind(X, _wide),
    )
    return transformed(forest.scores(as_rows(X), _AGGREGATES[aggregate_function]), _POST_TRANSFORMS[post_transform])


def _kind(X: Array, wide: bool) -> np.dtype[Any]:
    """The type that votes are added in."""
    return np.dtype(np.float64 if wide or X.dtype == np.float64 else np.float32)


def _comparable(X: Array) -> Array:
    """Whole numbers are compared as doubles: exactly."""
    return as_rows(X if X.dtype.kind == "f" else X.astype(np.float64))


def _as_result(scores: Array, wide: bool) -> Array:
    return scores if wide else scores.astype(np.float32, copy=False)


def _one_of(floats: Floats, tensor: Array | None) -> Floats | Array:
    return tensor if tensor is not None and tensor.size else floats


def _add_base(scores: Array, base: Floats | Array, single: bool = False) -> None:
    """Add the base values, one per column; with `single` one may be for all."""
    if base is None or not len(base):
        return
    if len(base) != scores.shape[1] and not (single and len(base) == 1):
        raise ValueError(f"there are {len(base)} base values for {scores.shape[1]} scores")
    scores += np.asarray(base, scores.dtype)


@lru_cache(maxsize=32)
def _forest(key: _Key, targets: int, kind: np.dtype[Any], aggregate: str) -> Forest:
    """The trees of versions 1 to 4, whose nodes have the numbers (tree, node); the first node of a tree is its root."""
    given = key.values
    trees, nodes = np.array(given["treeids"], np.int64), np.array(given["nodeids"], np.int64)
    mode = _mode_numbers(given["modes"])
    if not len(trees) == len(nodes) == len(mode):
        raise ValueError(f"the attributes nodes_* have {len(trees)}, {len(nodes)} and {len(mode)} elements")
    index = _Index(trees, nodes)
    inner = mode != LEAF
    yes, no = np.zeros((2, len(mode)), np.intp)
    yes[inner] = index.of(trees[inner], np.array(given["truenodeids"], np.int64)[inner])
    no[inner] = index.of(trees[inner], np.array(given["falsenodeids"], np.int64)[inner])
    leaves = np.flatnonzero(~inner)
    leaf = np.zeros(len(mode), np.intp)
    leaf[leaves] = np.arange(len(leaves))
    voters = index.of(np.array(given["vote_treeids"], np.int64), np.array(given["vote_nodeids"], np.int64))
    counted = ~inner[voters]
    ids = np.array(given["vote_ids"], np.intp)
    if len(ids) and not 0 <= ids.min() <= ids.max() < targets:
        raise ValueError(f"the votes are for {ids.min()} to {ids.max()}, there are {targets} scores")
    votes, voted = _cast_votes(
        len(leaves),
        targets,
        leaf[voters[counted]],
        ids[counted],
        np.array(given["vote_weights"], kind)[counted],
        aggregate,
    )
    return Forest(
        roots=np.sort(np.unique(trees, return_index=True)[1]),
        feature=np.array(given["featureids"], np.intp),
        mode=mode,
        value=_thresholds(given["values"], len(mode)),
        yes=yes,
        no=no,
        missing=_missing(given["missing"], len(mode)),
        leaf=leaf,
        votes=votes,
        voted=voted,
        members=np.zeros(1),
        member_codes=np.zeros(1, np.int64),
    )


@lru_cache(maxsize=32)
def _forest_5(key: _Key, targets: int, kind: np.dtype[Any]) -> Forest:
    """The trees of version 5, which keeps the leaves apart from the nodes: here the leaves follow the nodes."""
    given = key.values
    modes, weights = given["modes"].astype(np.intp), given["weights"].astype(kind)
    inner, leaves = len(modes), len(weights)
    if modes.size and modes.max() > MEMBER:
        raise ValueError(f"nodes_modes has {modes.max()}; there are 0 to {MEMBER}")
    value = np.zeros(inner + leaves, kind)
    value[:inner] = given["splits"]
    members, codes = np.zeros(1, kind), np.zeros(1, np.int64)
    tests = np.flatnonzero(modes == MEMBER)
    if len(tests):
        listed = np.zeros(0, kind) if given["members"] is None else given["members"].astype(kind)
        ends = np.isnan(listed)
        number = np.cumsum(ends) - ends
        sets = number.max(initial=-1) + 1
        if sets != len(tests):
            raise ValueError(f"membership_values has {sets} sets for {len(tests)} nodes")
        value[tests] = np.arange(len(tests))
        members, rank = np.unique(listed[~ends], return_inverse=True)
        codes = np.sort(number[~ends] * len(members) + rank)
        if not len(members):
            members, codes = np.full(1, np.nan, kind), np.zeros(1, np.int64)
    children = [
        np.array(given[f"{side}nodeids"], np.intp) + np.where(np.array(given[f"{side}leafs"]) != 0, inner, 0)
        for side in ("true", "false")
    ]
    outside = [child for child in children if child.size and not 0 <= child.min() <= child.max() < inner + leaves]
    if outside:
        raise ValueError(f"a branch leads to node or leaf {outside[0].max()} of {inner} nodes and {leaves} leaves")
    fill = np.zeros(leaves, np.intp)
    ids = np.array(given["targetids"], np.intp)
    if len(ids) != leaves or not 0 <= ids.min() <= ids.max() < targets:
        raise ValueError(f"{leaves} leaves have the {len(ids)} targets {ids.min()} to {ids.max()}; there are {targets}")
    votes, voted = _cast_votes(leaves, targets, np.arange(leaves), ids, weights, "SUM")
    return Forest(
        roots=np.array(given["roots"], np.intp),
        feature=np.concatenate([np.array(given["featureids"], np.intp), fill]),
        mode=np.concatenate([modes, fill + LEAF]),
        value=value,
        yes=np.concatenate([children[0], fill]),
        no=np.concatenate([children[1], fill]),
        missing=np.concatenate([_missing(given["missing"], inner), fill.astype(bool)]),
        leaf=np.concatenate([np.zeros(inner, np.intp), np.arange(leaves)]),
        votes=votes,
        voted=voted,
        members=members,
        member_codes=codes,
    )


class _Index:
    """An index of the nodes: the place in the attributes of the node with a number in a tree."""

    def __init__(self, trees: Array, nodes: Array) -> None:
        self._trees, self._nodes = trees, nodes
        self._stride = int(nodes.max(initial=0)) + 1
        codes = trees * self._stride + nodes
        self._order = np.argsort(codes, kind="stable")
        self._codes = codes[self._order]

    def of(self, trees: Array, nodes: Array) -> Array:
        """The places. An error names a node that does not exist"""
        codes = trees * self._stride + nodes
        place = np.searchsorted(self._codes, codes).clip(0, max(len(self._codes) - 1, 0))
        lacking = np.flatnonzero((self._codes[place] != codes) | (nodes < 0) | (nodes >= self._stride))
        if len(lacking):
            raise ValueError(f"tree {trees[lacking[0]]} has no node {nodes[lacking[0]]}")
        return np.asarray(self._order[place])


def _mode_numbers(modes: Strings) -> Array:
    names, numbers = np.unique(np.array(modes or [], str), return_inverse=True)
    unknown = set(names.tolist()) - set(_MODES)
    if unknown:
        raise ValueError(f"the mode {min(unknown)!r} of a node is not known; there are {', '.join(_MODES)}")
    return np.array([_MODES.index(name) for name in names.tolist()], np.intp)[numbers]


def _thresholds(values: Floats | Array, nodes: int) -> Array:
    if values is None:
        return np.zeros(nodes, np.float32)
    return np.array(values, np.float32) if isinstance(values, list) else values


def _missing(tracks: Ints, nodes: int) -> Array:
    return np.array(tracks, bool) if tracks else np.zeros(nodes, bool)


def _cast_votes(
    leaves: int, targets: int, leaf: Array, target: Array, weights: Array, aggregate: str
) -> tuple[Array, Array]:
    """(leaves, targets): the votes, several of a leaf for one target put together, and where there are any"""
    voted = np.zeros((leaves, targets), bool)
    voted[leaf, target] = True
    together: dict[str, tuple[np.ufunc, float]] = {"MIN": (np.minimum, np.inf), "MAX": (np.maximum, -np.inf)}
    function, start = together.get(aggregate, (np.add, 0.0))
    votes = np.where(voted, weights.dtype.type(start), weights.dtype.type(0))
    function.at(votes, (leaf, target), weights)
    return votes, voted
