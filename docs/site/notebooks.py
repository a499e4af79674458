"""Execute the notebooks in docs/notebooks and write what their cells print and show into them.

python docs/site/notebooks.py            # all of them
python docs/site/notebooks.py NAME       # docs/notebooks/NAME.ipynb

Each runs in a folder of its own, which is empty at first. Jupyter runs them too; nothing here needs it. A value is shown by its
`_repr_html_` or `_repr_svg_`, else by its `repr`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
HTML, SVG, PLAIN = "text/html", "image/svg+xml", "text/plain"
_SHOWN = {HTML: "_repr_html_", SVG: "_repr_svg_"}
Notebook = dict[str, Any]


def names() -> list[str]:
    """Return the names of the notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Notebook:
    """Return a notebook as it is written."""
    notebook: Notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return notebook


def written(notebook: Notebook) -> str:
    """Return the text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def executed(notebook: Notebook) -> Notebook:
    """Return the notebook with the outputs of its cells, which run one after the other.

    :raises Exception: whatever a cell raises.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    before, modules = list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        sys.path.insert(0, folder)  # a cell may write a module
        try:
            cells = list(_run(notebook["cells"], scope))
        finally:
            sys.path[:] = before
            for module in set(sys.modules) - modules:
                if str(getattr(sys.modules[module], "__file__", "")).startswith(folder):
                    del sys.modules[module]
    return {**notebook, "cells": cells}


def _run(cells: list[dict[str, Any]], scope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            yield cell
            continue
        count += 1
        yield {**cell, "execution_count": count, "outputs": list(_outputs("".join(cell["source"]), scope, count))}


def _outputs(source: str, scope: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """What a cell prints, and the value of the expression that it ends with."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), scope)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())}
    if value is not None:
        data = {kind: _lines(getattr(value, method)()) for kind, method in _SHOWN.items() if hasattr(value, method)}
        data = data or {PLAIN: _lines(repr(value))}
        yield {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page(notebook: Notebook, name: str) -> tuple[str, Mapping[str, str]]:
    """Return a notebook as a page in Markdown, and its pictures in SVG by their paths from the page."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(_fenced(source, "python"))
        for output in cell["outputs"]:
            data = output.get("data", {PLAIN: output.get("text", [])})
            if SVG in data:
                path = f"pictures/{name}.{len(pictures)}.svg"
                pictures[path] = "".join(data[SVG])
                parts.append(f"![{_heading(parts)}]({path})")
            elif HTML in data:
                parts.append("".join(data[HTML]))
            else:
                parts.append(_fenced("".join(data[PLAIN])))
    return "\n\n".join(parts) + "\n", pictures


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _heading(parts: list[str]) -> str:
    """The last heading above, which says what a picture shows."""
    return next((line.lstrip("# ") for line in reversed("\n".join(parts).splitlines()) if re.match("#+ ", line)), "")


def main(arguments: list[str]) -> int:
    """Execute and write the notebooks of these names, all by default."""
    unknown = set(arguments) - set(names())
    if unknown:
        print(f"There is no notebook {', '.join(sorted(unknown))}. There are {', '.join(names())}.", file=sys.stderr)
        return 2
    for name in arguments or names():
        (FOLDER / f"{name}.ipynb").write_text(written(executed(read(name))), encoding="utf-8")
        print(f"docs/notebooks/{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
