"""The sources of cases: tables, onnx's node tests, known bugs, a folder of tests, a model of the user. And the choice of cases.

Every case that leaves here has a name of its own, which says its operator, opset and type and stays the same from run to
run: a journal, a report and a test can refer to it.
"""

from __future__ import annotations

import re
import reprlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, OptionalProto, SequenceProto, TensorProto, helper, numpy_helper

from refgrad.backends.base import ModelLike, check_feeds, graph_inputs, graph_outputs, load_model
from refgrad.conformance.case import Case
from refgrad.conformance.cases import built_in, covered, of_operators
from refgrad.conformance.judge.running.nodemodels import excluded, node_models
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.errors import (
    FeedError,
    InvalidModelError,
    OptionError,
    UnknownNameError,
    choices,
    closest,
    counted,
    did_you_mean,
)
from refgrad.model import native
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.values import array_in, read_value
from refgrad.protos.inputs import read_bytes
from refgrad.protos.traverse import graphs, versions_of
from refgrad.tables.operators import classify
from refgrad.tables.registry import NO_DERIVATIVE, ZERO
from refgrad.tables.schemas import find_schema, schemas

OLDEST = 7  # the oldest opset of ai.onnx that there are cases of
NEWEST = onnx.defs.onnx_opset_version()
DTYPES = ("float16", "bfloat16", "float32", "float64")
VALUES = ("smooth", "kink", "special")  # kinds of points, see `Case`
_OPSET = re.compile(r"-opset\d+")
_DTYPE = re.compile(rf"-({'|'.join(DTYPES)})$")
NEAR = 3  # names that are like a pattern
_VALUES = 8  # integers that a name spells out


# The sources


def tables(operators: Collection[str] | None = None) -> Iterator[Case]:
    """The cases of `cases/`, each problem once.

    :param operators: those that are asked for: the cases of another package's other operators may fail.
    :raises PluginError: the cases of another package fail.
    """
    cases = of_operators(operators)
    return _named_apart(
        [case.changed(name=_plain(case), provenance=case.provenance or _module(family)) for family, case in cases]
    )


def _module(family: str) -> str:
    """The module with the cases of a family; a family of another package is named by its module."""
    return f"refgrad.conformance.cases.{family}" if family in built_in() else family


def node_tests() -> Iterator[Case]:
    """The node tests of onnx whose values are all tensors, without those that have nothing to differentiate."""
    about = f"node test of onnx {onnx.__version__}"
    for test in node_models():
        if excluded(test) is None and test.of_tensors:
            case = Case(test.name, test.model, test.feeds, test.wrt, test.outputs, provenance=f"{about}: {test.name}")
            yield _titled(case, test.name)


def of_bugs() -> Iterator[Case]:
    """The models whose gradient some builder writes wrongly."""
    from refgrad.conformance.known.bugs.builders import builder_bugs

    return _named_apart([case.changed(name=_plain(case)) for case in (f.case for f in builder_bugs())])


def folder(path: str | Path) -> Iterator[Case]:
    """The cases in the layout of onnx's backend tests: `<name>/model.onnx` with `<name>/test_data_set_*/input_*.pb`.

    `path` is one such case, or a folder of them. There is a Case for each data set; external data lies beside its model.

    :raises FeedError: a case has no data, or data that does not fit the model.
    :raises InvalidModelError: a case has no model, or one that cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise FeedError(
            f"There is no folder {str(root)!r}. Give one with <name>/model.onnx and <name>/test_data_set_0."
        )
    alone = (root / "model.onnx").is_file()
    folders = [root] if alone else sorted(entry for entry in root.iterdir() if entry.is_dir())
    if not folders:
        raise FeedError(f"{str(root)!r} has no case in it: a folder with model.onnx and test_data_set_0.")
    for case in folders:
        yield from _data_sets(case)


@explained
def one_model(
    model: ModelLike,
    feeds: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    wrt: Iterable[str] | None = None,
    outputs: Iterable[str] | None = None,
) -> Case:
    """The case of one model, fed `feeds`, or random numbers drawn from `seed` as `refgrad check` draws them.

    :raises FeedError: the feeds do not fit the model, or an input cannot be drawn.
    :raises InvalidModelError: there is no such model.
    """
    proto = load_model(model, lift=True)
    inputs = graph_inputs(proto.graph)
    fed = random_feeds(inputs, seed=seed) if feeds is None else check_feeds(feeds, inputs)
    path = "" if isinstance(model, ModelProto) else str(model)
    case = Case(
        path,
        proto,
        fed,
        None if wrt is None else tuple(wrt),
        None if outputs is None else tuple(outputs),
        provenance=f"{path or 'a model'}, fed {'by the user' if feeds is not None else f'random numbers of seed {seed}'}",
    )
    return _titled(case, _safe(Path(path).stem if path else proto.graph.name or "model"))


def _data_sets(case: Path) -> Iterator[Case]:
    """A case for each folder of data."""
    model = load_model(case / "model.onnx", lift=True)
    sets = sorted(entry for entry in case.glob("test_data_set_*") if entry.is_dir())
    if not sets:
        raise FeedError(f"The case {str(case)!r} has no test_data_set_0, so it has nothing to feed its model.")
    for data in sets:
        for kind, wanted in (("input", graph_inputs(model.graph)), ("output", graph_outputs(model.graph))):
            if wanted and not any(data.glob(f"{kind}_*.pb")):
                raise FeedError(f"The case {str(case)!r} has no {kind}_0.pb in {data.name}.")
        data_case = Case(case.name, model, _read_inputs(data, model), provenance=str(data))
        yield _titled(data_case, _safe(case.name if len(sets) == 1 else f"{case.name}-{data.name}"))


def _read_inputs(data: Path, model: ModelProto) -> dict[str, Any]:
    """The content of `input_*.pb` by the inputs that their tensors name, or else in the order of the inputs."""
    inputs = graph_inputs(model.graph)
    kinds = {value.name: value.type.WhichOneof("value") for value in model.graph.input}
    count = len(list(data.glob("input_*.pb")))
    order = [value.name for value in inputs]
    if count < len(order):  # those with a default may be left out
        order = [value.name for value in inputs if not value.has_default]
    feeds: dict[str, Any] = {}
    for k in range(count):
        file = data / f"input_{k}.pb"
        if not file.is_file() or k >= len(order):
            raise FeedError(
                f"{str(data)!r} has {counted(count, 'file', 'files')} input_*.pb; its model takes {choices(order)}, from 0 on."
            )
        proto = read_value(read_bytes(file, FeedError), _PROTOS.get(kinds[order[k]] or "", TensorProto), file)
        name = proto.name if proto.name in kinds else order[k]
        if name in feeds:
            raise FeedError(f"{str(file)!r} holds the input {name!r} again. Give each input once.")
        feeds[name] = array_in(proto, file)
    try:
        return check_feeds(feeds, inputs)
    except FeedError as error:
        raise FeedError(f"The data in {str(data)!r} do not fit the model: {error}") from error


_PROTOS: Mapping[str, type[TensorProto | SequenceProto | OptionalProto]] = {
    "sequence_type": SequenceProto,
    "optional_type": OptionalProto,
}


# Names


def _safe(text: str) -> str:
    """`text` in letters, digits and `_.,=-`."""
    text = text.replace("->", "=").replace(": ", "=").replace(", ", ",")
    text = re.sub(r"\(\)|\[\]|\{\}", "none", text)
    return re.sub(r"[^A-Za-z0-9_.,=-]", "_", re.sub(r"[()\[\]{}'\"]", "", text))


def _plain(case: Case) -> str:
    """The name that a table gives, with the operator's domain, without what `_titled` adds."""
    name = _DTYPE.sub("", _OPSET.sub("", _safe(case.name)))
    operator = case.operator
    _, dot, op_type = operator.rpartition(".")
    return operator + name.removeprefix(op_type) if dot and name.startswith(op_type) else name


def _titled(case: Case, stem: str) -> Case:
    """The case under its full name: what it is, its opset, its type."""
    return case.changed(name="-".join(filter(None, (stem, f"opset{case.opset}", case.dtype))))


def _stem(case: Case) -> str:
    """The name without what `_titled` added."""
    return _DTYPE.sub("", _OPSET.sub("", case.name))


def _content(case: Case) -> int:
    """A checksum that tells the problem of a case from the others of the same stem, whatever the opset."""
    model = ModelProto(graph=case.model.graph)
    checksum = zlib.crc32(model.SerializeToString(deterministic=True))
    feeds: Mapping[str, Any] = case.feeds  # a folder may have sequences
    for name, value in feeds.items():
        shown = value.tobytes() if isinstance(value, np.ndarray) and value.dtype != object else repr(value).encode()
        checksum = zlib.crc32(shown, zlib.crc32(f"{name}{getattr(value, 'shape', ())}".encode(), checksum))
    return zlib.crc32(repr((case.wrt, case.outputs)).encode(), checksum)


def _named_apart(cases: list[Case]) -> Iterator[Case]:
    """The cases without repeated problems. Cases of one name get their integers, then a number, added to the name."""
    times = Counter(case.name for case in cases)
    contents = [_content(case) if times[case.name] > 1 else 0 for case in cases]
    alike: defaultdict[str, set[int]] = defaultdict(set)
    for case, content in zip(cases, contents, strict=True):
        alike[case.name].add(content)
    numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
    seen = set()
    for case, content in zip(cases, contents, strict=True):
        stem = f"{case.name}{_integers(case)}" if len(alike[case.name]) > 1 else case.name
        number = numbers[stem].setdefault(content, len(numbers[stem]) + 1)
        titled = _titled(case, f"{stem}-{number}" if number > 1 else stem)
        if titled.name not in seen:
            seen.add(titled.name)
            yield titled


def _integers(case: Case) -> str:
    """The small integer inputs by value: `-axes=0,2`."""
    values: dict[str, Any] = {t.name: array_of(t) for t in case.model.graph.initializer} | dict(case.feeds)
    return "".join(
        f"-{name}={','.join(map(str, value.ravel().tolist())) or 'none'}"
        for name, value in values.items()
        if name != "one_row" and not name.endswith("_shape")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size <= _VALUES
    )


# Selection


def select(
    cases: Iterable[Case],
    operators: Iterable[str] | None = None,
    opset: str = "newest",
    dtype: str | None = None,
    names: str | None = None,
    values: str | None = None,
) -> Iterator[Case]:
    """The cases of the operators in the versions and types that are asked for, each under a name of its own.

    Opset numbers refer to ai.onnx; operators of other domains come in their newest version. A whole model stays as it is.

    :param operators: "Conv", "com.microsoft.Gelu"; "model" is every case of several operators. All by default.
    :param opset: "newest": each operator in its newest version; "21": in the version in force there; "13-28": in each
        version in force somewhere in that range; "all": in every one from opset 7 on.
    :param dtype: float types, separated by commas; by default each case has its own.
    :param names: a pattern (`*`, `?`, `[...]`) that the names have to match.
    :param values: "smooth", "kink" or "special", separated by commas; all by default.
    :raises UnknownNameError: one of the operators has no case.
    :raises OptionError: an opset, type or kind of values that does not exist.
    """
    low, high = opsets(opset)
    literal = re.split(r"[*?[]", names or "", maxsplit=1)[0]
    types = _listed(dtype, DTYPES, "float type")
    kinds = _listed(values, VALUES, "kind of values")
    if operators is not None:
        cases, wanted = list(cases), set(operators)
        known_operators = {case.operator for case in cases}
        for name in sorted(wanted - known_operators):
            known = sorted((known_operators | covered()) - {name})
            elsewhere = [other for other in known if other.endswith(f".{name}")]
            hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(name, known)
            reason = no_derivative(name)
            raise UnknownNameError(
                reason or f"There is no case of an operator {name!r}.{hint} There are {choices(known)}."
            )
        cases = [case for case in cases if case.operator in wanted]

    def chosen() -> Iterator[Case]:
        seen = set()
        for case in cases:
            if kinds and case.values not in kinds:
                continue
            stem = _stem(case)
            if not (stem.startswith(literal) or literal.startswith(stem)):
                continue  # whatever its opset and type, its name does not match
            for moved in _in_opsets(case, low, high):
                for variant in [moved] if not types else [in_dtype(moved, dtype_wanted) for dtype_wanted in types]:
                    if variant is None or variant.name in seen or not _fits(variant.name, names):
                        continue
                    seen.add(variant.name)
                    yield variant

    return chosen()


def _fits(name: str, pattern: str | None) -> bool:
    """True if a case of this name is asked for. A name matches itself, even if it looks like a pattern."""
    return pattern is None or name == pattern or fnmatchcase(name, pattern)


def near(
    pattern: str, opset: str = "newest", dtype: str | None = None, values: str | None = None
) -> tuple[str, list[str]]:
    """The operator that a pattern begins with, or the closest one, and the names of its cases that are most like the pattern.

    Only the cases of that operator are made. ("", []) if no operator is close. `select` explains the other arguments.
    """
    beginning = re.split(r"[-*?[]", pattern.removeprefix("ai.onnx."), maxsplit=1)[0]
    operator = closest(beginning, covered())
    if not operator:
        return "", []
    own = list(tables([operator]))
    names = [case.name for case in select(own, None, opset, dtype, None, values)] or [case.name for case in own]
    rest = pattern.removeprefix("ai.onnx.").removeprefix(beginning)
    wanted = re.sub(r"[*?\[\]]", "", f"{operator}{rest}").lower()

    def likeness(name: str) -> tuple[int, float]:
        common = next((k for k, (a, b) in enumerate(zip(wanted, name.lower(), strict=False)) if a != b), len(wanted))
        return common, SequenceMatcher(None, wanted, name.lower()).ratio()

    return operator, sorted(names, key=likeness, reverse=True)[:NEAR]


def no_derivative(operator: str) -> str:
    """A sentence that says that an operator has no case for it has no derivative to test; "" for any other name."""
    domain, _, op_type = operator.rpartition(".")
    found = classify(domain, op_type) if (domain, op_type) in {*ZERO, *NO_DERIVATIVE} else None
    if found is None:
        return ""
    why = "its derivative is 0" if found.derivative == "zero" else "it has no derivative"
    return f"{operator!r} has no cases, because {why}: {found.text}."


def opsets(opset: str, shown: str = "opset=") -> tuple[int, int]:
    """The first and the last opset of `select`; the first is 0 for the newest version of each operator.

    :param shown: the name of the argument in an error.
    :raises OptionError: it is not an opset.
    """
    if opset in ("newest", "all"):
        return (0 if opset == "newest" else OLDEST), NEWEST
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", opset)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= NEWEST:
        raise OptionError(
            f"{shown}{reprlib.repr(opset)} is not an opset. Give 'newest', 'all', one opset as '21', or a range as "
            f"'13-{NEWEST}'; onnx {onnx.__version__} has 1 to {NEWEST}."
        )
    return low, high


def _listed(text: str | None, valid: tuple[str, ...], what: str) -> list[str]:
    listed = [] if text is None else [entry.strip() for entry in text.split(",")]
    for entry in listed:
        if entry not in valid:
            raise OptionError(f"There is no {what} {entry!r}.{did_you_mean(entry, valid)} There are {choices(valid)}.")
    return listed


def _in_opsets(case: Case, low: int, high: int) -> Iterator[Case]:
    """The case in each version of its operator that is in force somewhere from `low` to `high`, as far as it is legal there."""
    domain, _, op_type = case.operator.rpartition(".")
    versions = _versions().get((domain, op_type))
    if versions is None:  # a whole model, or an operator that nobody knows
        if low <= case.opset <= high or domain:
            yield case
        return
    if domain or low == 0:
        versions, low, high = versions[-1:], 0, NEWEST
    for since, last in versions:
        first, end = max(since, low), min(last, high)
        if first <= end:
            moved = at_opset(case, min(max(case.opset, first), end))
            if first <= moved.opset <= end:
                yield moved


@cache
def _versions() -> dict[tuple[str, str], list[tuple[int, int]]]:
    """The first and the last opset of each version of each operator that is not deprecated, by domain and name."""
    every = defaultdict(list)
    for schema in (*onnx.defs.get_all_schemas_with_history(), *schemas()):
        every[schema.domain, schema.name].append((schema.since_version, schema.deprecated))
    versions = {}
    for key, entries in every.items():
        entries = sorted(set(entries))
        ends = [since - 1 for since, _ in entries[1:]] + [NEWEST]
        versions[key] = [(since, end) for (since, gone), end in zip(entries, ends, strict=True) if not gone]
    return versions


# Other versions and types


def at_opset(case: Case, version: int) -> Case:
    """The case with another version of its operator's domain; itself where its nodes are not legal there."""
    domain, _, op_type = case.operator.rpartition(".")
    if case.opset == version or not _stays(op_type, domain, case.opset, version):
        return case
    model = ModelProto()
    model.CopyFrom(case.model)
    for imported in model.opset_import:
        if imported.domain in ((domain,) if domain else ("", "ai.onnx")):
            imported.version = version
    if not _legal(model):
        return case
    return _titled(replace(case, model=model), _stem(case))


@cache
def _stays(op_type: str, domain: str, old: int, new: int) -> bool:
    """True if another version of an operator has the inputs of one in their places: Resize got `roi` before `scales`."""
    if find_schema(op_type, domain) is None:
        return True
    try:
        before, after = ([p.name for p in find_schema(op_type, domain, version).inputs] for version in (old, new))
    except onnx.defs.SchemaError:  # there was none then
        return False
    return all(name not in after or after.index(name) == k for k, name in enumerate(before))


def _legal(model: ModelProto) -> bool:
    """True if onnx's checker takes the model, and every node the types that it is given."""
    try:
        native.check_model(model, full_check=True)
    except (native.ValidationError, native.InferenceError, InvalidModelError):
        return False
    versions = versions_of(model)
    types = {t.name: t.data_type for t in model.graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    for node in model.graph.node:
        schema = find_schema(node.op_type, node.domain, versions.get(node.domain, 1))
        variables = {}
        for name, variable, allowed in _inputs(node, schema):
            if types.get(name) and allowed and _spelt(types[name]) not in allowed:
                return False
            variables[variable] = types.get(name, 0)
        for name, variable in _outputs(node, schema):
            types.setdefault(name, variables.get(variable, 0))
    return True


def _inputs(node: NodeProto, schema: Any) -> Iterator[tuple[str, str, set[str]]]:
    """Each input of a node: its name, the type variable, and the types that it may have. Nothing without a schema."""
    if schema is None or not schema.inputs:
        return
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for k, name in enumerate(node.input):
        if name:
            variable = schema.inputs[min(k, len(schema.inputs) - 1)].type_str
            yield name, variable, constraints.get(variable, {variable})


def _outputs(node: NodeProto, schema: Any) -> Iterator[tuple[str, str]]:
    """Each output of a node: its name and the type variable. Nothing without a schema."""
    if schema is not None and schema.outputs:
        for k, name in enumerate(node.output):
            yield name, schema.outputs[min(k, len(schema.outputs) - 1)].type_str


def _spelt(kind: int) -> str:
    """An element type as schemas spell it: `tensor(float)`."""
    return f"tensor({TensorProto.DataType.Name(kind).lower()})"


def in_dtype(case: Case, dtype: str, exact: bool = True) -> Case | None:
    """The case with every tensor of its float type in another; None where there is none or it would be another problem.

    What an operator wants in one type alone (the scales of Resize) stays in that. It is another problem where a finite
    number overflows or becomes 0. Not `exact`, small numbers become 0 and large ones the largest of the type, as tools do
    that convert a model.
    """
    if case.dtype == dtype:
        return case
    if not case.dtype:
        return None
    old, new = (helper.np_dtype_to_tensor_dtype(_numpy(name)) for name in (case.dtype, dtype))
    model = ModelProto()
    model.CopyFrom(case.model)
    fixed = _fixed(model, new)
    tensors = {t.name: t for t in model.graph.initializer if t.data_type == old and t.name not in fixed}
    values = {v.name: v for v in model.graph.input if v.type.tensor_type.elem_type == old and v.name not in fixed}
    feeds = dict(case.feeds)
    for name in [name for name in feeds if name in values]:
        array = _cast(feeds[name], dtype, exact)
        if array is None:
            return None
        feeds[name] = array
    for name, tensor in tensors.items():
        array = _cast(array_of(tensor), dtype, exact)
        if array is None:
            return None
        tensor.CopyFrom(numpy_helper.from_array(array, name))
    for value in values.values():
        value.type.tensor_type.elem_type = new
    for graph in graphs(model.graph):
        for node in graph.node:
            if fixed.isdisjoint(node.output):
                _retype(node, old, new, dtype)
    if not _infer_outputs(model) or not _legal(model):
        return None
    changed = replace(case, model=model, feeds=feeds)
    return _titled(changed, _stem(case)) if changed.dtype == dtype else None


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _cast(array: np.ndarray, dtype: str, exact: bool = True) -> np.ndarray | None:
    """The array in another float type; None where a number leaves its range, which is clipped where it need not be `exact`."""
    with np.errstate(over="ignore"):
        cast = array.astype(_numpy(dtype))
    if not exact:
        most = ml_dtypes.finfo(_numpy(dtype)).max  # type: ignore[no-untyped-call]
        return np.where(np.isfinite(array) & ~np.isfinite(cast), np.copysign(most, cast), cast).astype(_numpy(dtype))
    wide, narrow = array.astype(np.float64), cast.astype(np.float64)
    same = np.array_equal(np.isfinite(wide), np.isfinite(narrow)) and np.array_equal(wide == 0, narrow == 0)
    return cast if same else None


def _fixed(model: ModelProto, new: int) -> set[str]:
    """The values that cannot have the type `new`: a node that reads them, or a value computed from them, does not take it."""
    versions, fixed = versions_of(model), set()
    for graph in graphs(model.graph):
        for node in reversed(graph.node):
            schema = find_schema(node.op_type, node.domain, versions.get(node.domain, 1))
            bound = {variable for name, variable in _outputs(node, schema) if name in fixed}
            for name, variable, allowed in _inputs(node, schema):
                if variable in bound or _spelt(new) not in allowed:
                    fixed.add(name)
    return fixed


def _retype(node: NodeProto, old: int, new: int, dtype: str) -> None:
    """Replace the old type by the new one in the attributes that give the type of a node's result."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i == old:
            attribute.i = new
        elif attribute.HasField("t") and attribute.t.data_type == old:
            array = array_of(attribute.t).astype(_numpy(dtype))
            attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))


def _infer_outputs(model: ModelProto) -> bool:
    """Declare the outputs in the types that they have now; whether each is known."""
    del model.graph.value_info[:]
    shapes = [value.type.tensor_type.shape for value in model.graph.output]
    bare = ModelProto()
    bare.CopyFrom(model)
    for value in bare.graph.output:
        value.type.Clear()
    versions = versions_of(model)
    types = {t.name: t.data_type for t in bare.graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in bare.graph.input}
    for node in bare.graph.node:
        schema = find_schema(node.op_type, node.domain, versions.get(node.domain, 1))
        ours = not onnx.defs.has(node.op_type, node.domain)
        if ours or (schema is not None and schema.has_context_dependent_function):  # onnx cannot tell what it gives
            known = native.infer_shapes(bare).graph.value_info
            types |= {v.name: v.type.tensor_type.elem_type for v in known}
            variables = {variable: types.get(name, 0) for name, variable, _ in _inputs(node, schema)}
            for name, variable in _outputs(node, schema):
                if not ours and (types.get(name) or variable not in variables):
                    continue
                types[name] = variables.get(variable, 0)
                bare.graph.value_info.append(helper.make_tensor_value_info(name, types[name], None))
    for value in native.infer_shapes(bare).graph.output:
        types[value.name] = value.type.tensor_type.elem_type or types.get(value.name, 0)
    for value, shape in zip(model.graph.output, shapes, strict=True):
        kept = type(shape)()
        kept.CopyFrom(shape)
        value.type.tensor_type.elem_type = types.get(value.name, 0)
        value.type.tensor_type.shape.CopyFrom(kept)
    return all(value.type.tensor_type.elem_type for value in model.graph.output)
