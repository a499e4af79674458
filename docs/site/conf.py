"""The settings of Sphinx for the site. docs/site/assemble.py copies this file beside the pages."""

import re

project = "refgrad"
author = "the authors of refgrad"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
html_theme = "furo"
html_title = "refgrad"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "",
    "footer_icons": [],
    "light_css_variables": {
        "font-stack": "system-ui,sans-serif",
        "font-stack--monospace": "ui-monospace,Menlo,Consolas,monospace",
    },
}
pygments_style = "default"
pygments_dark_style = "github-dark"
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
default_role = "literal"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "jax", "safetensors", "flatbuffers"]
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # listings that only look like a language


_SPAN = re.compile(r"(`+[^`]*`+)")


def _plain(app, what, name, obj, options, lines):
    """Mend a docstring for reStructuredText: bars and stars in formulas are what they are, and an indented block is code."""
    mended, code, session = [], None, False
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            session = False
        elif code is not None and indent < code:
            code = None
        session = session or line.lstrip().startswith(">>>")
        if session or code is not None:
            mended.append(line)
            continue
        mended.append("".join(p if p.startswith("`") else re.sub(r"([|*])", r"\\\1", p) for p in _SPAN.split(line)))
        following = lines[place + 1 : place + 3]
        deeper = len(following) == 2 and not following[0].strip() and following[1].startswith(" " * (indent + 4))
        if deeper and line.endswith((":", ".")) and not following[1].lstrip().startswith(("- ", ":", ">>>")):
            mended[-1] += ":" if line.endswith(":") else " ::"
            code = indent + 4
    lines[:] = mended


def setup(app):
    """Register what mends docstrings."""
    app.connect("autodoc-process-docstring", _plain)
