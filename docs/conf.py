"""The documentation site: `make docs` (Sphinx, MyST, furo). A link that leads nowhere is an error.

The pages are what lies in the repository; docs/README.md is the front page, and its headings and links are the site's order.
"""

import re

project = "mrl"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
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
nitpicky = True


def setup(app):
    """Adds the table of contents to the front page."""
    app.connect("source-read", _with_contents)


def _with_contents(app, name, source):
    """Each heading's links, in order, as a part of the table of contents."""
    if name == root_doc:
        for heading, text in re.findall(r"^## (.+)\n([^#]+)", source[0], re.M):
            pages = dict.fromkeys(re.findall(r"\]\(([^):#]+)\.md\)", text))
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{entries}\n```\n"
