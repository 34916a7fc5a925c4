"""Which model is trained."""

from pydantic import Field

from mrl.config.section import Section


class ModelSection(Section):
    """The policy's starting point."""

    path: str
    """Folder in Hugging Face format (config.json, tokenizer, safetensors); the family is read from its model_type."""
    reference_path: str | None = None
    """Folder of the reference policy; the starting point itself when absent."""
    max_length: int = Field(default=512, ge=2)
    """Longest prompt plus response, in tokens."""
