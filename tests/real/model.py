"""Writes a two-layer Llama that needs no weights, and a random LoRA adapter for it.

Usage: model.py TOKENIZER_JSON MODEL_FOLDER ADAPTER_FOLDER

The tokenizer is a byte-level BPE of 8,192 entries, so every string has tokens and nearly every sampled id has text.
The context of 32,768 is what lets one server be the long pool and another, started with less, refuse by length.
"""

import json
import pathlib
import shutil
import sys

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 128, 256, 2, 4, 2, 32, 8192, 32768
RANK = 8
# One turn per message between markers that the tokenizer knows as single tokens.
TEMPLATE = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_model(tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
    )
    write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    )


def write_adapter(folder):
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(8)
    shapes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    tensors = {}
    for layer in range(LAYERS):
        for name, out in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, HIDDEN, dtype=torch.bfloat16) * 0.05
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK, dtype=torch.bfloat16) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    write(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": RANK,
            "lora_alpha": RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(shapes),
        },
    )


if __name__ == "__main__":
    write_model(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    write_adapter(pathlib.Path(sys.argv[3]))
