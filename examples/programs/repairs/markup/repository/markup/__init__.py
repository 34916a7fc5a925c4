"""A subset of Markdown as HTML."""

from markup.blocks import to_html

__all__ = ["to_html"]
