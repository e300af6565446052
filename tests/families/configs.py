"""Tiny random models of many families: the smallest shapes in which what is special about each still happens.

Weights are drawn wide, so that greedy text varies and depends on the whole context; with the usual narrow ones a random
model repeats one token, and two caches agree whatever they hold. Windows are 8 tokens, shorter than all prompts here.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import support_random
import torch
import transformers

VOCABULARY = 128

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # greedy text always has the length that was asked for
}
SLIDING, FULL, CHUNKED, LINEAR = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
MIX = [SLIDING, FULL, SLIDING, FULL]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
NOT_GROUPED = ("num_key_value_heads", "head_dim")  # families older than grouped queries
OLD_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", *NOT_GROUPED)


@dataclass(frozen=True)
class Family:
    """How to build one model.

    model: the class in transformers
    options: what differs from BASE
    without: what of BASE its configuration does not know, or must not be told
    caches: what its layers keep: "plain" keys and values, a "window" of them, "latent" (MLA), "shared" between layers,
        "linear" (a state), "both" a state and plain ones, "chunked" windows
    attention: the implementation that is right for it, where the default is not
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    caches: tuple[str, ...] = ("plain",)
    attention: str | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "llama_mha": Family("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama_mqa": Family("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"sliding_window": None}),
    "mistral_window": Family("MistralForCausalLM", {"sliding_window": 8}, caches=("window",)),
    "ministral": Family("MinistralForCausalLM", {"sliding_window": 8}, caches=("window",)),
    "mixtral": Family("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    "phi": Family("PhiForCausalLM"),
    "phi3": Family("Phi3ForCausalLM", {"sliding_window": None}),
    "phi3_window": Family("Phi3ForCausalLM", {"sliding_window": 8}, caches=("window",)),
    "gemma": Family("GemmaForCausalLM"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX, "query_pre_attn_scalar": 16},
        caches=("plain", "window"),
        attention="eager",  # the default of older versions ignores the cap on scores
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX, "query_pre_attn_scalar": 16},
        caches=("plain", "window"),
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": MIX,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
        caches=("plain", "window", "shared"),
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": MIX,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 32,
        },
        caches=("plain", "window", "shared"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": MIX,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        caches=("plain", "window"),
    ),
    "glm": Family("GlmForCausalLM"),
    "glm4": Family("Glm4ForCausalLM"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "cohere": Family("CohereForCausalLM"),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX},
        caches=("plain", "window"),
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", EXPERTS),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        EXPERTS
        | LINEAR_HEADS
        | {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2, "shared_expert_intermediate_size": 32},
        caches=("plain", "linear"),
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        LINEAR_HEADS | {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2},
        caches=("plain", "linear"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", LATENTS | {"num_key_value_heads": 4}, without=("head_dim",), caches=("latent",)
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", LATENTS | {"num_key_value_heads": 4}, without=("head_dim",), caches=("latent",)
    ),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        {k: v for k, v in LATENTS.items() if k.startswith(("kv_", "q_", "qk_", "v_", "n_routed"))}
        | {"num_layers": 2, "num_key_value_heads": 4, "head_dim": 8, "moe_topk": 2, "zero_expert_num": 2}
        | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
        without=("num_hidden_layers", "intermediate_size"),
        caches=("latent",),
    ),
    "dots3_note": Family(  # ranks of latents differ between its windows and its other layers
        "Dots3NoteForCausalLM",
        LATENTS
        | {"num_hidden_layers": 4, "layer_types": MIX, "use_dsa": False, "sliding_window": 8, "head_dim": 24}
        | {"num_key_value_heads": 4, "shared_experts_intermediate_size": 32, "swa_num_attention_heads": 4}
        | {"swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 32, "swa_head_dim": 24}
        | {"swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 12},
        caches=("latent", "window"),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": [CHUNKED, FULL] * 2,
            "no_rope_layers": [1, 0] * 2,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
        caches=("plain", "chunked"),
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", without=NOT_GROUPED),
    "gpt2": Family("GPT2LMHeadModel", OLD, without=OLD_NAMES),
    "opt": Family("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.15}, without=NOT_GROUPED),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX},
        caches=("plain", "window"),
    ),
    "olmoe": Family("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": Family("GraniteForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 0]}),
    "starcoder2": Family("Starcoder2ForCausalLM", {"sliding_window": None}),
    "stablelm": Family("StableLmForCausalLM"),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX, "sliding_window_pattern": None},
        caches=("plain", "window"),
    ),
    "nemotron": Family("NemotronForCausalLM"),
    "seed_oss": Family("SeedOssForCausalLM"),
    "hrm_text": Family(
        "HrmTextForCausalLM", {"num_hidden_layers": 1, "prefix_lm": False}, without=("num_key_value_heads",)
    ),
    "hunyuan": Family("HunYuanDenseV1ForCausalLM"),
    "ernie4_5": Family("Ernie4_5ForCausalLM"),
    "apertus": Family("ApertusForCausalLM", {"max_position_embeddings": 16384}),
    "arcee": Family("ArceeForCausalLM"),
    "lara_mini": Family(
        "LaraMiniForCausalLM",
        EXPERTS
        | LINEAR_HEADS
        | {"num_hidden_layers": 3, "layer_types": [LINEAR, SLIDING, FULL], "sliding_window": 8}
        | {"shared_expert_intermediate_size": 32},
        caches=("plain", "window", "linear"),
    ),
    "codegen": Family("CodeGenForCausalLM", OLD | {"rotary_dim": 8}, without=OLD_NAMES),
    "gptj": Family("GPTJForCausalLM", OLD | {"rotary_dim": 8}, without=OLD_NAMES),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        {k: v for k, v in LATENTS.items() if k.startswith(("kv_", "q_", "qk_", "v_"))} | {"num_key_value_heads": 4},
        without=("head_dim",),
        caches=("latent",),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2, "block_multiple_of": 32},
        caches=("plain", "linear"),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
        caches=("both",),
    ),
    "zamba2": Family(
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
        without=("head_dim",),
        caches=("both", "linear"),
    ),
    "zaya": Family(
        "ZayaForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "sliding_window": 8,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "router_hidden_size": 32,
        },
        caches=("window", "both"),
    ),
    "inkling": Family(
        "InklingForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "sliding_window_size": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "d_rel": 4,
            "rel_extent": 32,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "logits_mup_width_multiplier": 1.0,
        },
        caches=("window", "linear"),
    ),
    "phimoe": Family("PhimoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, without=("head_dim",)),
    "jamba": Family(
        "JambaForCausalLM",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
        without=("head_dim",),
        caches=("plain", "linear"),
    ),
    "bamba": Family(
        "BambaForCausalLM",
        {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 16, "mamba_d_head": 8}
        | {"mamba_d_state": 8, "mamba_chunk_size": 16},
        without=("head_dim",),
        caches=("plain", "linear"),
    ),
}


EVERYDAY = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral_window",
    "phi3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "glm4",
    "deepseek_v3",
)


def parameters() -> list[Any]:
    """Every family as a parameter of a test: those that most people use run always, the others are slow."""
    return [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.slow]) for name in FAMILIES]


def exists(name: str) -> bool:
    """Whether the installed transformers has this family, with an attention that can be switched."""
    found = getattr(transformers, FAMILIES[name].model, None)
    return found is not None and bool(found._can_set_attn_implementation())


def build(name: str, seed: int = 0) -> Any:
    """The tiny model of a family: random weights by `seed`, float32, in evaluation mode."""
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    options = {key: value for key, value in BASE.items() if key not in family.without} | family.options
    if family.attention is not None:
        options["attn_implementation"] = family.attention
    support_random.seed(seed)
    return model_class(model_class.config_class(**options)).float().eval()


def padded_batch(length: int = 20, seed: int = 1) -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left: input_ids and attention_mask [3, length]."""
    ids = torch.randint(2, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(seed))
    padding = torch.tensor([[0], [5], [length // 2 + 1]])
    mask = (torch.arange(length) >= padding).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
