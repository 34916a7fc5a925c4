"""Float8 recipe names: Megatron subclasses one on import."""


class DelayedScaling: ...


class Format: ...
