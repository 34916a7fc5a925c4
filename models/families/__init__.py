"""Register model families by config.json's model_type. To add one, add a file here and list it in _ALL."""

from __future__ import annotations

from mrl.errors import ConfigError
from mrl.models.families.deepseek_v3 import DeepseekV3, KimiK25
from mrl.models.families.glm4_moe import Glm4Moe, Glm4MoeLite
from mrl.models.families.gpt_oss import GptOss
from mrl.models.families.llama import Llama, Mistral
from mrl.models.families.minimax_m2 import MiniMaxM2
from mrl.models.families.ministral3 import Ministral3
from mrl.models.families.mixtral import Mixtral
from mrl.models.families.olmoe import Olmoe
from mrl.models.families.phi3 import Phi3
from mrl.models.families.qwen2 import Qwen2, Qwen2Moe
from mrl.models.families.qwen3 import Qwen3, Qwen3Moe, Qwen3VL, Qwen3VLMoe
from mrl.models.families.qwen3_5 import Qwen35, Qwen35Moe
from mrl.models.families.qwen3_next import Qwen3Next
from mrl.models.families.seed_oss import SeedOss
from mrl.models.families.smollm3 import SmolLM3
from mrl.models.families.unsupported_models import reason
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig
from mrl.models.read_keys import unread_keys

_ALL: tuple[Family, ...] = (
    Qwen2(),
    Qwen2Moe(),
    Qwen3(),
    Qwen3Moe(),
    Qwen3VL(),
    Qwen3VLMoe(),
    Qwen3Next(),
    Qwen35(),
    Qwen35Moe(),
    Llama(),
    Mistral(),
    Ministral3(),
    Mixtral(),
    DeepseekV3(),
    KimiK25(),
    Glm4Moe(),
    Glm4MoeLite(),
    Olmoe(),
    MiniMaxM2(),
    GptOss(),
    Phi3(),
    SeedOss(),
    SmolLM3(),
)
FAMILIES: dict[str, Family] = {
    name: family for family in _ALL for name in (family.model_type, *family.aliases)
}


def family_of(hf: HfConfig) -> Family:
    """Return the family of a config.json by its model_type. Raises ConfigError with the reason if unknown."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} in config.json is not supported{reason(hf)}; use one of "
            f"{sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def require_trainable(hf: HfConfig) -> None:
    """Raise ConfigError for an unknown family, and for values or keys that training does not implement."""
    family = family_of(hf)
    if problems := family.unsupported(hf):
        raise ConfigError(
            f"config.json has {', '.join(problems)}, which training does not implement for {hf['model_type']}"
        )
    if others := [f"{key} = {hf[key]!r}" for key in unread_keys(family, hf)]:
        raise ConfigError(
            f"config.json has {', '.join(others)}, which are unknown for {hf['model_type']} and may change "
            "the computation; remove those that do not"
        )
