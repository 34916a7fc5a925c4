"""Own model: a Hugging Face folder with random weights; use a published folder (Qwen3, Mixtral) the same way.

python examples/reversed_words/make_model.py FOLDER
"""

import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


def main(folder: str) -> None:
    names = ["<pad>", "<end>", *"abcdef>"]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(names), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        norm_topk_prob=True, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    print(f"{folder}: {len(names)} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
