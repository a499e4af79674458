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
html_extra_path = ["_extra"]
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


def _plain(app, what, name, obj, options, lines):
    """A docstring as reStructuredText reads it: bars and stars in formulas are what they are."""
    lines[:] = [re.sub(r"(?<![`\\])([|*])(?!`)", r"\\\1", line) if "`" not in line else line for line in lines]


def setup(app):
    """Register what mends docstrings."""
    app.connect("autodoc-process-docstring", _plain)
