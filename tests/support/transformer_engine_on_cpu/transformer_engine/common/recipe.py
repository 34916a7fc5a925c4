"""Float8 recipes by name alone: Megatron subclasses one when it is imported."""


class DelayedScaling: ...


class Format: ...
