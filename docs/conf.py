"""Sphinx: Markdown pages, and an API page for each package made from its docstrings."""

import os
import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docutils import nodes
from docutils.statemachine import StringList
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.autosummary import AutoLink
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

import jaxscale
from docs import api_pages


def copy_notebooks(source, target):
    """Sphinx reads only what lies beside it."""
    target.mkdir(exist_ok=True)
    for path in source.glob("*.ipynb"):
        copy, text = target / path.name, path.read_text().replace("../docs/", "../../")
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


project = "jaxscale"
author = "The jaxscale authors"
copyright = "2026, the jaxscale authors"
version = release = jaxscale.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_title = f"jaxscale {release}"
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the search is in the sidebar
}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# `make docs` runs the notebooks, once for each text; `make notebooks` elsewhere.
nb_execution_mode = os.environ.get("JAXSCALE_NOTEBOOKS", "off")
nb_execution_timeout = 600
nb_execution_raise_on_error = True

html_math_renderer = "mathml"  # browsers draw it themselves, without a network
default_role = "name"
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Types stand in the code: a colon in the docstring of a field is only a colon.
GoogleDocstring._consume_inline_attribute = lambda self: ("", self._consume_to_end())
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Words of the field by which the search finds a page first, beside those of its title.
SEARCH_WORDS = {
    "bytetransformer": ["sequence packing", "padding"],
    "bytetransformer-kernel": ["FlashAttention", "Flash Attention"],
    "checkpoints": ["checkpoint"],
    "data": ["packing"],
    "flux": ["GEMM", "matmul"],
    "hosts": ["multi-node", "multinode", "Slurm", "Kubernetes", "MPI"],
    "install": ["driver", "CUDA"],
    "kernels": ["GEMM", "varlen", "varlen attention"],
    "megascale": ["pretraining"],
    "serving": ["OpenAI", "OpenAI-compatible server", "server"],
    "supervision": ["fault tolerance", "supervisor"],
    "training": ["gradient accumulation", "mixed precision", "throughput"],
    "training-step": ["activation checkpointing", "remat", "optimizer state"],
    "benchmarks": ["baseline", "benchmark"],
}

api_pages.write(HERE / "generated")
copy_notebooks(HERE.parent / "examples", HERE / "generated" / "examples")


class Name(AutoLink):
    """Single backticks in docstrings: a link where the name is an object, else code."""

    def run(self):
        found, messages = super().run()
        as_code = [
            nodes.literal(self.rawtext, node.astext())
            if isinstance(node, nodes.emphasis)
            else node
            for node in found
        ]
        return as_code, messages


class Names(SphinxDirective):
    """A table of public names, written in Markdown, with their one-line summaries."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self):
        lines = [f"| {self.arguments[0]} | |", "|---|---|"]
        for name in " ".join(self.content).split():
            full = api_pages.full_name(name)
            link = f"{{py:obj}}`{name} <{full}>`"
            lines.append(f"| {link} | {api_pages.summary(full)} |")
        container = nodes.container(classes=["names"])
        source = self.get_source_info()[0]
        self.state.nested_parse(StringList(lines, source), 0, container)
        return [container]


def visit_math(self, node):
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(
        f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>'
    )
    raise nodes.SkipNode


def show_factories(app, what, name, obj, options, arguments, result):
    """Sphinx cannot parse how Python shows a default that a function makes."""
    return (arguments or "").replace("<factory>", "...") or arguments, result


def add_search_words(app, doctree):
    """As main entries of the index, which the search puts before all else."""
    words = SEARCH_WORDS.get(app.env.current_document.docname, ())
    entries = [("single", word, "", "main", None) for word in words]
    if entries:
        doctree.append(addnodes.index(entries=entries, inline=False))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", add_search_words)
    app.connect("autodoc-process-signature", show_factories)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.add_role("name", Name())
    app.add_directive("names", Names)
