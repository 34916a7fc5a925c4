"""Text templates with values, filters, conditions and loops."""

from templates.nodes import TemplateError
from templates.parser import Template

__all__ = ["Template", "TemplateError"]
