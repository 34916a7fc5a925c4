"""Check `mrl convert`: GGUF files give back their model, mixtures start as the dense model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from mrl.cli import main
from mrl.prepare import tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = torch.arange(2, 50).reshape(2, 24) * 5 % 320


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def dense(request, tmp_path_factory):
    """A folder of a small dense model with a tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    tied = request.param == "llama"
    config = transformers.AutoConfig.for_model(request.param, **SIZES, head_dim=16, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "two and two are four, three and two are five"}))
    tokenizer.write_bpe([rows], folder, vocab_size=300)
    rows.unlink()
    return folder


def log_probs(folder):
    """Log-probabilities [2, 24, vocabulary] of TOKENS, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits.log_softmax(-1)


def convert(source, out, *words):
    assert main(["convert", str(source), "--out", str(out), *words]) == 0


@pytest.mark.parametrize("per_token", [2, 3])
def test_a_mixture_of_experts_begins_as_the_dense_model(dense, tmp_path, per_token):
    convert(dense, tmp_path / "moe", "--experts", "4", "--per-token", str(per_token))
    assert (log_probs(tmp_path / "moe") - log_probs(dense)).abs().max() < 1e-5
    assert (tmp_path / "moe/tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "moe/config.json").read_text())
    assert config["num_experts_per_tok"] == per_token
    assert (
        config["model_type"]
        == {"llama": "mixtral", "qwen3": "qwen3_moe"}[
            json.loads((dense / "config.json").read_text())["model_type"]
        ]
    )


def test_noise_and_router_have_the_deviation_and_the_seed_that_were_asked_for(dense, tmp_path):
    options = ("--experts", "8", "--noise", "0.1", "--router-std", "0.5", "--seed")
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        convert(dense, tmp_path / name, *options, seed)
    one, again, other = (stored(tmp_path / name) for name in ("one", "again", "other"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    routers = [name for name in one if name.endswith(("mlp.gate.weight", "moe.gate.weight"))]
    assert len(routers) == 3
    assert torch.cat([one[name].flatten() for name in routers]).std() == pytest.approx(0.5, rel=0.1)
    assert not any(torch.equal(one[name], other[name]) for name in routers)
    up = next(
        name for name in one if ".0." in name and "experts.5" in name and ("up_proj" in name or "w3" in name)
    )
    original = stored(dense)["model.layers.0.mlp.up_proj.weight"]
    assert (one[up] - original).std().item() == pytest.approx(0.1 * original.std().item(), rel=0.05)
    assert not torch.equal(one[up], one[up.replace("experts.5", "experts.6")])


def stored(folder):
    """All tensors of a folder, by name."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--experts", "1"), "--experts 1 must be at least 2"),
        (("--experts", "4", "--per-token", "5"), "--per-token 5 must be 1 to 4"),
        ((), "only converted with --experts"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_no_folder(dense, tmp_path, capsys, words, message):
    assert main(["convert", str(dense), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_mixture_is_not_upcycled_again(dense, tmp_path, capsys):
    convert(dense, tmp_path / "moe", "--experts", "2")
    assert main(["convert", str(tmp_path / "moe"), "--out", str(tmp_path / "out"), "--experts", "4"]) == 2
    assert "only ['llama', 'qwen3'] can become a mixture of experts" in capsys.readouterr().err


def test_a_gguf_file_gives_the_model_and_the_tokenizer_that_it_was_written_from(dense, tmp_path):
    """The file is in float32 and has queries and keys in the order of llama.cpp."""
    file = tmp_path / "model.gguf"
    write_gguf(file, dense)
    convert(file, tmp_path / "folder")
    assert (log_probs(tmp_path / "folder") - log_probs(dense)).abs().max() < 1e-6
    before, after = (transformers.AutoTokenizer.from_pretrained(f) for f in (dense, tmp_path / "folder"))
    text = "three and two\n are 5, naïve"
    assert before.encode(text) == after.encode(text)
    assert (after.eos_token, after.chat_template) == (before.eos_token, "{{ messages }}")
    convert(file, tmp_path / "moe", "--experts", "2")
    assert (log_probs(tmp_path / "moe") - log_probs(dense)).abs().max() < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.gguf", "moe"]


def test_a_damaged_gguf_file_is_named(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    assert main(["convert", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "model.gguf cannot be read as a model" in capsys.readouterr().err


NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, folder: Path) -> None:
    """Write a folder as llama.cpp's convert_hf_to_gguf.py does, unquantised."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    kind, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name("small")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    written = json.loads((folder / "tokenizer.json").read_text())["model"]
    words = sorted(written["vocab"], key=written["vocab"].get)
    words += [f"<unused{i}>" for i in range(config["vocab_size"] - len(words))]
    control = {tokenizer.PAD, tokenizer.END}
    kinds = [gguf.TokenType.CONTROL if word in control else gguf.TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in written["merges"]])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in stored(folder).items():
        parts = name.removesuffix(".weight").removeprefix("model.").split(".")
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        place = ".".join(parts[2:] if layer else parts)
        values = tensor.numpy()
        if kind == "llama" and place in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads if place == "self_attn.q_proj" else kv_heads
            halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(f"{layer}{NAMES[place]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
