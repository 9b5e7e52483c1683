"""Configurations of models that people train, as their config.json states them; nothing is downloaded."""

from __future__ import annotations

from typing import Any

_QWEN = {"vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 40960}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_QWEN},
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "Qwen3-30B-A3B": {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **_QWEN},
        **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    },
    "Gemma-3-27B": {
        **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208},
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024},
        **{"query_pre_attn_scalar": 168, "max_position_embeddings": 131072},
    },
    "DeepSeek-V2-Lite": {
        **{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400},
        **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "first_k_dense_replace": 1},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088},
        **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128},
        **{"num_local_experts": 32, "num_experts_per_tok": 4},
    },
    "Llama-3.1-8B": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    },
}

# What each is planned for: enough devices to hold it with AdamW in mixed precision.
CLUSTERS = {"Qwen3-30B-A3B": "4x8xH100-80GB", "Gemma-3-27B": "4x8xH100-80GB", "gpt-oss-20b": "4x8xH100-80GB"}
CLUSTER = "8xH100-80GB"
