"""The documentation site: `make docs` (Sphinx, MyST, furo). A link that leads nowhere is an error.

Its pages are those of the repository; docs/README.md is the front page and gives the order.
The browser draws Mermaid pictures by a script that the site ships: it opens from disk and needs no network.
"""

import hashlib
import html
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math.latex2mathml import tex2mathml

project = "mrl"
extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md", "examples/README.md"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "mrl"
html_copy_source = False
html_show_sourcelink = False
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
nitpicky = True


GENERATED = ("settings", "metrics")
"""Pages that `make docs` makes from the code (mrl/pages.py); without them the site has no part "Lists"."""
SCRIPT = "mermaid.min.js"
SCRIPT_DIGEST = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""SHA-256 of dist/mermaid.min.js in npm's mermaid 11.16.0, which the package artoo-mermaid contains."""
THEME = "matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'default'"
START = f"mermaid.initialize({{startOnLoad: true, theme: {THEME}}})"


class Picture(Directive):
    """A fence of Mermaid's text."""

    has_content = True

    def run(self):
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def setup(app):
    """Adds the table of contents to the front page, and pictures to pages that have them."""
    app.connect("source-read", _with_contents)
    app.add_directive("mermaid", Picture)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("html-page-context", _with_script)
    app.connect("build-finished", _copy_script)


def _with_script(app, pagename, templatename, context, doctree):
    if 'class="mermaid"' in context.get("body", ""):
        app.add_js_file(SCRIPT)
        app.add_js_file(None, body=START)


def _copy_script(app, error):
    if error is None and app.builder.format == "html":
        script = Path(distribution("artoo-mermaid").locate_file(f"artoo_mermaid/assets/{SCRIPT}"))
        if hashlib.sha256(script.read_bytes()).hexdigest() != SCRIPT_DIGEST:
            raise ValueError(f"{script} is not the file that was looked at: compare it with npm's")
        shutil.copy(script, Path(app.outdir) / "_static" / SCRIPT)


def _formula(translator, node):
    """As MathML, which browsers draw themselves."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def _with_contents(app, name, source):
    """Add each heading's links to the table of contents, then the pages made from the code."""
    if name != root_doc:
        return
    parts = {
        heading: dict.fromkeys(re.findall(r"\]\(([^):#]+)\.md\)", text))
        for heading, text in re.findall(r"^## (.+)\n([^#]+)", source[0], re.M)
    }
    generated = (page for page in GENERATED if (Path(app.srcdir) / "docs" / f"{page}.md").exists())
    parts["Lists"] = dict.fromkeys(generated)
    for heading, pages in parts.items():
        entries = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{entries}\n```\n"
