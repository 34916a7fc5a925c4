"""Float8 is off."""

import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def reset() -> None: ...


def fp8_autocast(*args: object, **kwargs: object) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


fp8_model_init = fp8_autocast
