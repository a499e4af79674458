"""A model as SVG: a row for each node of the forward pass, and beside it the nodes of its derivative.

Rows cost the same whatever the graph is: a picture of thousands of nodes takes a second. Layers that repeat are drawn once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto

from refgrad.escaping import html
from refgrad.model.checks.malformed import explained
from refgrad.model.reading import read
from refgrad.protos.traverse import subgraphs
from refgrad.show.folding import Fold, folds
from refgrad.show.lanes import lanes
from refgrad.show.text import attributes, dimension, kind_of, operator, shown, type_of

_CHARACTER, _LINE, _PAD, _GAP, _ROW, _INDENT = 6.65, 13, 6, 16, 20, 22  # pixels
_LONG = 44  # characters of a line
_FEW = 3  # lines of attributes, or of constants
_INPUTS = 12  # more are named in the nodes that read them
_STYLE = """
text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}
.o{font-weight:bold}.q{fill:#57606a}.h{font:bold 13px ui-sans-serif,system-ui,sans-serif}
.f rect{fill:#dceaff;stroke:#2f6fb7}.b rect{fill:#ffe6d1;stroke:#c2681c}
.i rect{fill:#fff;stroke:#2f6fb7;stroke-dasharray:4 2}
.s rect{fill:#fff;stroke:#c2681c;stroke-dasharray:4 2}.r rect{fill:#e3f6e3;stroke:#2c8a3d}
path{fill:none;stroke:#2f6fb7;stroke-width:1.1}.c{stroke:#9aa4af;stroke-dasharray:3 3}.e{stroke:#c2681c}
.m rect{fill:#ffd9d9;stroke:#b3261e;stroke-width:3}
.k{fill:none;stroke:#8250df;stroke-width:1.5;stroke-dasharray:7 4}.kt{fill:#8250df;font-weight:bold}
"""


@dataclass(eq=False)
class _Box:
    """Lines in a frame: the first is the operator, or "" for a value."""

    kind: str  # f(orward), b(ackward), i(nput), s(eed: a cotangent), r(esult)
    title: str
    lines: list[tuple[str, str]]  # a text, and the remark behind it
    x: float = 0.0
    y: float = 0.0
    row: int = 0
    is_marked: bool = False

    @property
    def width(self) -> float:
        longest = max([len(self.title), *(len(_cut(a)) + len(b) for a, b in self.lines)])
        return longest * _CHARACTER + 2 * _PAD

    @property
    def height(self) -> float:
        return (bool(self.title) + len(self.lines)) * _LINE + 2 * _PAD


@dataclass(eq=False)
class _Row:
    """A node of the forward pass, or an input, and the nodes of its derivative in their order."""

    forward: _Box | None = None
    backward: list[_Box] = field(default_factory=list)
    results: list[_Box] = field(default_factory=list)
    lane: int = 0

    @property
    def boxes(self) -> list[_Box]:
        """All of them, from the left."""
        return ([self.forward] if self.forward else []) + self.backward + self.results


class Svg(str):
    """A picture as SVG. It is a text; a notebook shows the picture."""

    def _repr_svg_(self) -> str:
        return str(self)


@explained
def to_svg(model: ModelProto | str | os.PathLike[str]) -> Svg:
    """Return `model` as SVG, for browsers and notebooks: nothing else is needed, and it takes seconds for thousands of nodes.

    Each node of the forward pass (blue) has a row, in the order of the model. Beside it stand the nodes of its derivative
    (orange): a gradient goes down on the left and up on the right. To which node an operator belongs is in its metadata.
    Arrows are values; dashed ones are values of the forward pass that the derivative reads. A box shows the operator, its
    attributes, the constants that it reads, and its results with their types. Layers that repeat are drawn once, with their
    number. Local functions and the graphs of nodes follow below.

    :param model: a model, or the path of one. It is not checked, and its external data is not read.
    :raises InvalidModelError: the model cannot be read.

    >>> import onnx.parser, refgrad
    >>> picture = refgrad.to_svg(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Exp(x) }'
    ... ))
    >>> picture[:36], "Exp" in picture
    ('<svg xmlns="http://www.w3.org/2000/s', True)
    """
    return Svg(drawn(read(model, weights=False, sort=False)))


def drawn(model: ModelProto, marked: Collection[str] = (), mark: str = "", label: str = "") -> str:
    """Return a model as SVG, with a red frame and a word at the nodes that make the values `marked`.

    :param mark: the word, such as "at fault".
    :param label: a text that says what the picture shows, for readers who do not see it.
    """
    parts: list[str] = []
    x = y = 12.0
    is_gradient = any(_is_backward(node) for node in model.graph.node)
    if is_gradient:
        parts += _legend(x, y)
        y += 36
    width, pending = 300.0, [_Section("", model.graph, marked, mark)]
    pending += [_Section(f"function {_function(f)}", f) for f in model.functions]
    while pending:
        section = pending.pop(0)
        elements, wide, y = section.drawn(x, y)
        parts += elements
        width = max(width, wide)
        pending[:0] = section.inner
    role = f' role="img" aria-label="{html(label)}"' if label else ""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 12:.0f} {y:.0f}" width="{width + 12:.0f}" '
        f'height="{y:.0f}"{role}><style>{_STYLE}</style><defs>{_arrow("f", "#2f6fb7")}{_arrow("b", "#c2681c")}'
        f'{_arrow("c", "#9aa4af")}</defs><rect width="100%" height="100%" fill="#fff"/>'
    )
    return Svg("\n".join([head, *parts, "</svg>"]))


class _Section:
    """One graph of the picture: the model's, a function's, or a graph of a node."""

    def __init__(
        self, title: str, graph: GraphProto | FunctionProto, marked: Collection[str] = (), mark: str = ""
    ) -> None:
        self.title, self.graph, self._marked, self._mark = title, graph, frozenset(marked), mark
        self.inner: list[_Section] = []
        self._types: dict[str, str] = {}
        self._maker: dict[str, _Box] = {}  # of a value
        self._rows: list[_Row] = []
        self._drawn: list[tuple[NodeProto, _Box]] = []
        self._row_of: dict[str, _Row] = {}  # of a node, or of a value
        self._arrows: list[tuple[_Box, _Box]] = []
        self._folds: list[tuple[Fold, list[_Row]]] = []
        self._constants: dict[str, str] = {}
        self._outside = _captured(graph) if title else set()
        self._read(graph)

    def _read(self, graph: GraphProto | FunctionProto) -> None:
        inputs: list[str]
        if isinstance(graph, GraphProto):
            for value in (*graph.value_info, *graph.input, *graph.output):
                self._types[value.name] = _type(value)
            self._constants = {
                t.name: f"{kind_of(t.data_type)}[{','.join(map(str, t.dims))}]" for t in graph.initializer
            }
            inputs = [v.name for v in graph.input if v.name not in self._constants]
            outputs = [v.name for v in graph.output]
        else:
            inputs, outputs = list(graph.input), list(graph.output)
        if len(inputs) > _INPUTS:
            self._constants.update((name, self._types.get(name, "")) for name in inputs[_INPUTS:])
            inputs = inputs[:_INPUTS]
        forward = [node for node in graph.node if not _is_backward(node)]
        backward = [node for node in graph.node if _is_backward(node)]
        read_forward = {name for node in forward for name in node.input}
        seeds = [name for name in inputs if name not in read_forward and backward]
        for name in inputs:
            if name not in seeds:
                self._rows.append(self._value_row(name, "i"))
        hidden = self._forward(forward)
        last = _Row()
        left_out = self._backward(backward, last, hidden)
        for name in seeds:
            box = self._value_box(name, "s")
            last.backward.insert(0, box)
            self._maker[name] = box
        if last.backward or last.results:
            self._rows.append(last)
        for node, box in self._drawn:
            for maker in dict.fromkeys(self._maker.get(name) for name in node.input if name):
                if maker is not None and maker is not box:
                    self._arrows.append((maker, box))
        for name in outputs:
            maker = self._maker.get(name)
            box = self._value_box(name, "r")
            row = self._row_of.get(name) or last
            if name in left_out or (maker is None and name in hidden):
                continue
            if row is last and last not in self._rows:
                self._rows.append(last)
            row.results.append(box)
            if maker is not None:
                self._arrows.append((maker, box))

    def _value_box(self, name: str, kind: str) -> _Box:
        return _Box(kind, "", [(shown(name), self._said(name))])

    def _value_row(self, name: str, kind: str) -> _Row:
        row = _Row(self._value_box(name, kind))
        assert row.forward is not None
        self._maker[name], self._row_of[name] = row.forward, row
        return row

    def _said(self, name: str) -> str:
        kind = self._types.get(name) or self._constants.get(name, "")
        return f" {kind}" if kind else ""

    def _forward(self, nodes: Sequence[NodeProto]) -> set[str]:
        """Add a row for each node that is shown; the names of the values and nodes that are not."""
        place = {name: k for k, node in enumerate(nodes) for name in node.output if name}
        reads = [[place.get(name, -1) for name in node.input] for node in nodes]
        found = [] if self._marked else folds([_alike(node) for node in nodes], reads)  # a mark is on one of the copies
        stands_for = list(range(len(nodes)))
        for fold in found:
            for k in range(fold.start, fold.start + fold.length * fold.copies):
                stands_for[k] = fold.shown[(k - fold.start) % fold.length]
        hidden: set[str] = set()
        rows: dict[int, _Row] = {}
        for k, node in enumerate(nodes):
            if stands_for[k] == k:
                row = rows[k] = _Row(self._node_box(node, "f"))
                self._rows.append(row)
                self._row_of[node.name] = row
        apart: set[str] = set()  # the constants of nodes that are not shown
        for k, node in enumerate(nodes):
            row = rows[stands_for[k]]
            assert row.forward is not None
            for name in filter(None, node.output):
                self._maker[name], self._row_of[name] = row.forward, row
            if stands_for[k] != k:
                hidden.update((node.name, *node.output))
                apart.update(name for name in node.input if name in self._constants)
                self._row_of.setdefault(node.name, row)
                for name in node.input:  # what enters the first copy from outside
                    maker = self._maker.get(name)
                    if name not in hidden and maker is not None and place.get(name, -1) < k:
                        self._arrows.append((maker, row.forward))
        self._folds = [(fold, [rows[k] for k in fold.shown]) for fold in found]
        kept = {name for k, node in enumerate(nodes) if stands_for[k] == k for name in node.input}
        return hidden | (apart - kept)

    def _backward(self, nodes: Sequence[NodeProto], last: _Row, hidden: set[str]) -> set[str]:
        """Put each node behind the forward node that it belongs to. Return the results of nodes in hidden layers."""
        left: list[tuple[NodeProto, tuple[str, str, int]]] = []
        shown_by: dict[tuple[int, str, int], _Box] = {}  # by row, operator and number: what stands for those left out
        numbers: dict[tuple[str, str], int] = {}
        for node in nodes:
            owner = next((prop.value for prop in node.metadata_props if prop.key == "refgrad.node"), "")
            number = numbers[owner, node.op_type] = numbers.get((owner, node.op_type), -1) + 1
            if owner in hidden:
                hidden.update(name for name in node.output if name)
                left.append((node, (owner, node.op_type, number)))
                continue
            row = self._row_of.get(owner)
            if row is None and owner and owner != "cotangent":
                read = next((self._row_of[name] for name in node.input if name in self._row_of), None)
                row = read if read is not None else last
            row = last if row is None else row
            box = self._node_box(node, "b")
            row.backward.append(box)
            shown_by.setdefault((id(row), node.op_type, number), box)
            for name in filter(None, node.output):
                self._maker[name], self._row_of[name] = box, row
        for node, (owner, op_type, number) in left:
            row = self._row_of.get(owner)
            alike = None if row is None else shown_by.get((id(row), op_type, number))
            if alike is not None:
                self._maker.update((name, alike) for name in node.output if name)
        return {name for node, _ in left for name in node.output}

    def _node_box(self, node: NodeProto, kind: str) -> _Box:
        graphs = [(attribute.name, graph) for attribute in node.attribute for graph in subgraphs(attribute)]
        lines = [(text, "") for text in attributes(node, ["(below)"] * len(graphs))]
        lines = lines[:_FEW] + ([(f"and {len(lines) - _FEW} more", "")] if len(lines) > _FEW else [])
        constants = [name for name in dict.fromkeys(node.input) if name in self._constants]
        lines += [(shown(name), self._said(name)) for name in constants[:_FEW]]
        if len(constants) > _FEW:
            lines.append((f"and {len(constants) - _FEW} more", ""))
        lines += [(shown(name), " from outside") for name in dict.fromkeys(node.input) if name in self._outside]
        lines += [(shown(name), self._said(name)) for name in node.output if name]
        is_marked = not self._marked.isdisjoint(node.output)
        title = f"{operator(node)}: {self._mark}" if is_marked and self._mark else operator(node)
        box = _Box(kind, title, lines, is_marked=is_marked)
        self._drawn.append((node, box))
        for attribute, graph in graphs:
            self.inner.append(_Section(f"{shown(attribute)} of {shown(node.name or node.op_type)}", graph))
        return box

    # Places

    def drawn(self, x: float, y: float) -> tuple[list[str], float, float]:
        """The elements of the section from (x, y) on, how far it reaches to the right, and where it ends."""
        parts: list[str] = []
        if self.title:
            parts.append(f'<text class="h" x="{x}" y="{y + 16:.0f}">{html(_cut(self.title, 100))}</text>')
            y += 28
        self._lanes()
        left = x + 34
        forward_width = max((row.lane * _INDENT + row.forward.width for row in self._rows if row.forward), default=0.0)
        right = left + forward_width + (60 if forward_width else 0)
        wide = right
        first = {id(rows[0]) for _, rows in self._folds}
        for number, row in enumerate(self._rows):
            boxes = row.boxes
            y += 2 * _LINE if id(row) in first else 0
            at = right
            for box in boxes:
                box.y, box.row = y, number
                if box is row.forward:
                    box.x = left + row.lane * _INDENT
                elif box.kind == "r" and row.forward is not None and not row.backward:
                    box.x = at = row.forward.x + row.forward.width + 24
                    at += box.width + _GAP
                else:
                    box.x, at = at, at + box.width + _GAP
            wide = max(wide, *(box.x + box.width for box in boxes)) if boxes else wide
            y += max((box.height for box in boxes), default=0.0) + _ROW
        for fold, rows in self._folds:
            parts += self._frame(fold, rows, x + 14, wide + 4)
        parts += [self._arrow(a, b) for a, b in dict.fromkeys(self._arrows) if not self._is_loop(a, b)]
        parts += [
            _drawn(box)
            for row in self._rows
            for box in ([row.forward] if row.forward else []) + row.backward + row.results
        ]
        return parts, wide + 8, y + 14

    def _lanes(self) -> None:
        """Give parallel branches columns."""
        rows = [row for row in self._rows if row.forward is not None]
        place = {id(row.forward): k for k, row in enumerate(rows)}
        reads: list[list[int]] = [[] for _ in rows]
        held = set()
        for maker, reader in self._arrows:
            if id(reader) in place:
                reads[place[id(reader)]].append(place.get(id(maker), -1))
            elif id(maker) in place:
                held.add(place[id(maker)])
        for row, lane in zip(rows, lanes(reads, held), strict=True):
            row.lane = lane

    def _is_loop(self, a: _Box, b: _Box) -> bool:
        """True if an arrow leads from one copy of a layer to the next, of which one is drawn."""
        back = a.row >= b.row if b.kind == "f" else a.kind == "b" and a.row < b.row
        return back and any(rows[0].boxes[0].row <= min(a.row, b.row) and max(a.row, b.row) <= rows[-1].boxes[0].row
                            for _, rows in self._folds)  # fmt: skip

    def _frame(self, fold: Fold, rows: Sequence[_Row], x: float, wide: float) -> list[str]:
        boxes = [box for row in rows for box in row.boxes]
        top, bottom = min(box.y for box in boxes), max(box.y + box.height for box in boxes)
        text = f"{fold.copies} times" + (", with derivatives" if any(row.backward for row in rows) else "")
        return [
            f'<rect class="k" x="{x:.0f}" y="{top - 24:.0f}" width="{wide - x:.0f}" height="{bottom - top + 32:.0f}" rx="8"/>',
            f'<text class="kt" x="{x + 10:.0f}" y="{top - 10:.0f}">{text}</text>',
        ]

    def _arrow(self, a: _Box, b: _Box) -> str:
        kind = (
            "c"
            if a.kind in "fi" and b.kind == "b" and a.row <= b.row
            else "e"
            if a.kind == "b" or b.kind == "b"
            else ""
        )
        mark = {"c": "c", "e": "b", "": "f"}[kind]
        if a.row == b.row:
            x1, y1, x2, y2 = a.x + a.width, a.y + a.height / 2, b.x, b.y + b.height / 2
            if x2 < x1:
                x1, y1, x2, y2 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y + b.height
                path = f"M{x1:.0f} {y1:.0f}Q{(x1 + x2) / 2:.0f} {max(y1, y2) + 18:.0f} {x2:.0f} {y2:.0f}"
            else:
                path = f"M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"
                is_next = (a.kind in "fi" and not kind) or b is self._rows[b.row].boxes[1]
                if x2 - x1 > 2 * _GAP and not is_next:  # past others
                    x1, y1, x2, y2 = a.x + a.width - 14, a.y, b.x + 14, b.y
                    path = (
                        f"M{x1:.0f} {y1:.0f}C{x1 + 10:.0f} {y1 - 15:.0f} {x2 - 10:.0f} {y2 - 15:.0f} {x2:.0f} {y2:.0f}"
                    )
        elif kind == "" and b.row > a.row + 1:  # past other rows: to the left of them
            out = min(a.x, b.x) - min(26, 6 + 2 * (b.row - a.row))
            y1, y2 = a.y + a.height / 2, b.y + b.height / 2
            path = f"M{a.x:.0f} {y1:.0f}C{out:.0f} {y1:.0f} {out:.0f} {y2:.0f} {b.x:.0f} {y2:.0f}"
        else:
            down = b.row > a.row
            x1, y1 = (a.x + min(a.width, 60) / 2, a.y + (a.height if down else 0))
            x2, y2 = (b.x + min(b.width, 60) / 2, b.y + (0 if down else b.height))
            middle = (y1 + y2) / 2
            path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
        return f'<path class="{kind}" d="{path}" marker-end="url(#{mark})"/>'


def _captured(graph: GraphProto | FunctionProto) -> set[str]:
    """The values that the nodes of a body read from outside of it."""
    if isinstance(graph, FunctionProto):
        given = list(graph.input)
    else:
        given = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
        given += [sparse.values.name for sparse in graph.sparse_initializer]
    own = {*given, *(name for node in graph.node for name in node.output), ""}
    return {name for node in graph.node for name in node.input if name not in own}


def _drawn(box: _Box) -> str:
    y = box.y + _PAD - 3
    kinds = f"{box.kind} m" if box.is_marked else box.kind
    full = "\n".join(html(line) for line in (box.title, *(f"{a}{b}" for a, b in box.lines)) if line)
    parts = [
        f'<g class="{kinds}"><title>{full}</title><rect x="{box.x:.0f}" y="{box.y:.0f}" '
        f'width="{box.width:.0f}" height="{box.height:.0f}" rx="4"/>'
    ]
    for number, (text, kind) in enumerate(([(box.title, "")] if box.title else []) + box.lines):
        y += _LINE
        style = ' class="o"' if box.title and number == 0 else ""
        more = f'<tspan class="q">{html(kind)}</tspan>' if kind else ""
        parts.append(
            f'<text{style} x="{box.x + _PAD:.0f}" y="{y:.0f}" xml:space="preserve">{html(_cut(text))}{more}</text>'
        )
    return "".join((*parts, "</g>"))


def _legend(x: float, y: float) -> list[str]:
    boxes = [_Box(kind, "", [(text, "")], x, y) for kind, text in (("f", "forward"), ("b", "backward"))]
    boxes[1].x = boxes[0].x + boxes[0].width + _GAP
    return [_drawn(box) for box in boxes]


def _arrow(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" style="fill:{color};stroke:none"/></marker>'
    )


def _is_backward(node: NodeProto) -> bool:
    """True if a node was emitted by the last gradient that was taken."""
    found = {prop.key: prop.value for prop in node.metadata_props} if node.metadata_props else {}
    if "namespace" in found:
        return found["namespace"].partition("/")[0] == "backward" and "refgrad.rule" in found
    return "refgrad.rule" in found


def _alike(node: NodeProto) -> tuple[str, ...]:
    """A key of a node, which is equal for nodes that compute the same of other values."""
    graphs = ["(graph)"] * sum(len(list(subgraphs(one))) for one in node.attribute)
    return node.domain, node.op_type, str(len(node.input)), str(len(node.output)), *attributes(node, graphs)


def _function(function: FunctionProto) -> str:
    return shown(f"{function.domain}.{function.name}" if function.domain else function.name)


def _type(value: ValueInfoProto) -> str:
    kind: TypeProto = value.type
    if not kind.HasField("tensor_type"):
        return str(type_of(kind)) if kind.WhichOneof("value") else ""
    tensor = kind.tensor_type
    sizes = (
        f"[{','.join(shown(str(dimension(dim, '?'))) for dim in tensor.shape.dim)}]" if tensor.HasField("shape") else ""
    )
    return f"{kind_of(tensor.elem_type)}{sizes}"


def _cut(text: str, longest: int = _LONG) -> str:
    """A text with its middle left out where it is long."""
    return text if len(text) <= longest else f"{text[: longest // 2 - 1]}…{text[-(longest // 2 - 1) :]}"
