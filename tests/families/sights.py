"""Tiny random models that see or hear, with images and sounds to see and hear.

The vocabulary ends with the tokens in whose place images and sounds stand. Images have 16 by 16 pixels, or two sizes where a
model takes several. Weights are drawn wide, as in `configs`; a seed is named where text by others repeats one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import support_random
import torch
import transformers
from families.configs import BASE, CHUNKED, EXPERTS, FULL, LATENTS, LINEAR, LINEAR_HEADS, MIX, VOCABULARY
from torch import Tensor

IMAGE, SOUND = VOCABULARY - 1, VOCABULARY - 2
WORDS = 40, VOCABULARY - 12  # ids between which text is drawn
VIEW: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "initializer_range": 0.15,
}  # fmt: skip
FINE = VIEW | {"patch_size": 4}
CLIP = {"model_type": "clip_vision_model", **VIEW, "projection_dim": 32}
SIGLIP = {"model_type": "siglip_vision_model", **VIEW, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", **VIEW, "image_size": 32}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 119, "vision_start_token_id": 117, "vision_end_token_id": 118}
QWEN = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "initializer_range": 0.15,
}  # fmt: skip
HYBRID = LINEAR_HEADS | {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2}
DEEP = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
GLM = TOKENS | {
    "image_start_token_id": 117,
    "image_end_token_id": 118,
    "video_start_token_id": 117,
    "video_end_token_id": 118,
}
EAR = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
    "max_source_positions": 16, "initializer_range": 0.15,
}  # fmt: skip

Seen = tuple[dict[str, Tensor], list[int]]
"""The arguments for some images or sounds, and how many tokens each takes."""


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(tokens: int, *shape: int, name: str = "pixel_values", **more: Any) -> Callable[[int, int], Seen]:
    """Images that are all alike in shape; `more`: what else is told of each."""

    def see(count: int, seed: int) -> Seen:
        told = {key: torch.tensor([x] * count) for key, x in more.items()}
        return {name: noise(count, *shape, seed=seed), **told}, [tokens] * count

    return see


def grids(*channels: int) -> Callable[[int, int], Seen]:
    """Images of 4 by 4, 4 by 8 and 8 by 4 patches in turns, four of which make a token."""

    def see(count: int, seed: int) -> Seen:
        grid = torch.tensor([[1, *((4, 4), (4, 8), (8, 4))[(i + seed) % 3]] for i in range(count)])
        patches = grid.prod(-1)
        return {"pixel_values": noise(int(patches.sum()), *channels, seed=seed), "image_grid_thw": grid}, (
            patches // 4).tolist()  # fmt: skip

    return see


def in_rows(count: int, seed: int) -> Seen:
    """A row's images along an axis of their own."""
    return {"pixel_values": noise(1, count, 3, 16, 16, seed=seed)}, [4] * count


def tiled(count: int, seed: int) -> Seen:
    """Images beside the text, in two tiles each; one token stands for all of it."""
    shape = {
        "aspect_ratio_ids": torch.full((1, count), 2),
        "aspect_ratio_mask": torch.ones(1, count, 2, dtype=torch.long),
    }
    return {"pixel_values": noise(1, count, 2, 3, 16, 16, seed=seed), **shape}, [1] * count


def sized(count: int, seed: int) -> Seen:
    """Images of two sizes, in memory for the larger."""
    sizes = torch.tensor([(32, 32), (16, 32)])[torch.arange(count) % 2]
    return {"pixel_values": noise(count, 3, 32, 32, seed=seed), "image_sizes": sizes}, (sizes // 16).prod(-1).tolist()


@dataclass(frozen=True)
class Sight:
    """How to build one model, and what to show it.

    model: the class in transformers
    options: of its configuration
    see: some images for one row, by a seed
    kinds: the arguments that tell of each token whether it is an image's, if it wants them
    token: stands for what is seen
    axes: whether positions have three axes, so that what turns keys is refused
    whole: whether an image's tokens see each other, so that prefill methods are refused
    again: whether a policy may read such a prompt a second time
    """

    model: str
    options: dict[str, Any]
    see: Callable[[int, int], Seen]
    kinds: tuple[str, ...] = ()
    token: int = IMAGE
    axes: bool = False
    whole: bool = False
    again: bool = True
    seed: int = 0


def text(kind: str | None = None, *without: str, **options: Any) -> dict[str, Any]:
    """The configuration of a text model."""
    found = BASE | options | ({} if kind is None else {"model_type": kind})
    return {key: x for key, x in found.items() if key not in without}


KINDS = ("mm_token_type_ids",)
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": MIX}
ANYRES = {"image_token_index": IMAGE, "image_grid_pinpoints": [[16, 16], [16, 32]]}

SIGHTS: dict[str, Sight] = {
    "qwen2_vl": Sight(
        "Qwen2VLForConditionalGeneration",
        {"text_config": text(**AXES), "vision_config": QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, **TOKENS},
        grids(96), KINDS, axes=True,
    ),
    "qwen2_5_vl": Sight(
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": text(**AXES), "vision_config": QWEN | {"window_size": 16, "fullatt_block_indexes": [1]}, **TOKENS},
        grids(96), KINDS, axes=True,
    ),
    "qwen3_vl": Sight(
        "Qwen3VLForConditionalGeneration",
        {"text_config": text(**AXES), "vision_config": QWEN | DEEP, **TOKENS},
        grids(96), KINDS, axes=True, again=False,
    ),
    "glm4v": Sight(
        "Glm4vForConditionalGeneration",
        {"text_config": text(rope_parameters=AXES["rope_parameters"] | {"partial_rotary_factor": 1.0}),
         "vision_config": QWEN | {"image_size": 16}, **GLM},
        grids(96), KINDS, axes=True,
    ),
    "llava_onevision": Sight(
        "LlavaOnevisionForConditionalGeneration",
        {"text_config": text("qwen2"), "vision_config": SIGLIP, "video_token_index": 119, **ANYRES},
        same(10, 2, 3, 16, 16, image_sizes=(16, 16)),
    ),
    "internvl": Sight(
        "InternVLForConditionalGeneration",
        {"text_config": text("qwen2"), "vision_config": FINE | {"image_size": [16, 16], "patch_size": [4, 4]},
         "image_token_id": IMAGE, "image_seq_length": 4},
        same(4, 3, 16, 16),
    ),
    "gemma3": Sight(
        "Gemma3ForConditionalGeneration",
        {"text_config": text(**WINDOWS, query_pre_attn_scalar=16), "vision_config": SIGLIP, "image_token_id": IMAGE,
         "mm_tokens_per_image": 4},
        same(4, 3, 16, 16), ("token_type_ids",), whole=True, seed=2,
    ),
    "llama4": Sight(
        "Llama4ForConditionalGeneration",
        {"text_config": text(num_hidden_layers=4, layer_types=[CHUNKED, FULL] * 2, no_rope_layers=[1, 0] * 2,
                             attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=96, interleave_moe_layer_step=2),
         "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
                           "vision_output_dim": 32, "image_size": 16, "patch_size": 4, "projector_input_dim": 32,
                           "projector_output_dim": 32}, "image_token_index": IMAGE},
        same(4, 3, 16, 16),
    ),
    "mistral3": Sight(
        "Mistral3ForConditionalGeneration",
        {"text_config": text("mistral", sliding_window=None), "vision_config": PIXTRAL, "image_token_index": IMAGE}, sized,
    ),
    "idefics3": Sight(
        "Idefics3ForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": FINE, "scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0},
        in_rows,
    ),
    "smolvlm": Sight(
        "SmolVLMForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": FINE, "scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0},
        in_rows,
    ),
    "mllama": Sight(
        "MllamaForConditionalGeneration",
        {"text_config": text(None, "head_dim", cross_attention_layers=[1]), "image_token_index": IMAGE,
         "vision_config": VIEW | {"num_global_layers": 1, "vision_output_dim": 64, "max_num_tiles": 2,
                                  "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]]}},
        tiled, ("cross_attention_mask",), again=False, seed=1,
    ),
    "qwen2_audio": Sight(
        "Qwen2AudioForConditionalGeneration",
        {"text_config": text("qwen2"), "audio_config": {"model_type": "qwen2_audio_encoder", **EAR}, "audio_token_index": SOUND},
        same(8, 8, 32, name="input_features", feature_attention_mask=[1] * 32), token=SOUND,
    ),
    "qwen3_vl_moe": Sight(
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": text(**AXES, **EXPERTS), "vision_config": QWEN | DEEP, **TOKENS},
        grids(96), KINDS, axes=True, again=False,
    ),
    "qwen3_5": Sight(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": text(**HYBRID), "vision_config": QWEN | {"num_position_embeddings": 16}, **TOKENS},
        grids(96), KINDS, axes=True,
    ),
    "llava": Sight(
        "LlavaForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": CLIP, "image_token_index": IMAGE, "vision_feature_layer": -1},
        same(4, 3, 16, 16),
    ),
    "llava_next": Sight(
        "LlavaNextForConditionalGeneration",
        {"text_config": text("llama"), "vision_config": CLIP, "vision_feature_layer": -1, **ANYRES},
        same(10, 2, 3, 16, 16, image_sizes=(16, 16)),
    ),
    "cohere2_vision": Sight(
        "Cohere2VisionForConditionalGeneration",
        {"text_config": text("cohere2", **WINDOWS), "vision_config": SIGLIP | {"patch_size": 4}, "image_token_id": IMAGE,
         "alignment_intermediate_size": 64},
        same(4, 3, 16, 16),
    ),
    "kimi_k25": Sight(
        "Kimi_K25ForConditionalGeneration",
        {"text_config": text("deepseek_v3", "head_dim", **LATENTS, num_key_value_heads=4),
         "vision_config": {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2,
                           "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32},
         "projection_hidden_size": 32, "image_token_id": IMAGE, "video_token_id": 119},
        grids(3, 4, 4),
    ),
    "granite_speech": Sight(  # another of the parts attends in a way that cannot be switched
        "GraniteSpeechForConditionalGeneration",
        {"text_config": text("granite"), "audio_token_index": SOUND, "has_lora_adapter": False, "downsample_rate": 2,
         "window_size": 4, "initializer_range": 0.15,
         "encoder_config": {"input_dim": 8, "num_layers": 1, "hidden_dim": 32, "num_heads": 2, "dim_head": 16, "output_dim": 8,
                            "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3},
         "projector_config": VIEW | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "vocab_size": 8}},
        same(8, 16, 8, name="input_features", input_features_mask=[True] * 8), token=SOUND, seed=1,
    ),
    "voxtral": Sight(
        "VoxtralForConditionalGeneration",
        {"text_config": text("llama"), "audio_token_id": SOUND,
         "audio_config": {"model_type": "voxtral_encoder", "num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 128,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "max_source_positions": 16}},
        same(4, 8, 32, name="input_features"), token=SOUND, seed=1,
    ),
}  # fmt: skip
USUAL = [*SIGHTS][:13]


def parameters() -> list[Any]:
    """Every model as a parameter of a test: those that most people use run always, the others are slow."""
    return [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in SIGHTS]


def build(name: str) -> Any:
    """The tiny model, in float32 and evaluation mode; greedy text always has the length that was asked for."""
    sight = SIGHTS[name]
    if (found := getattr(transformers, sight.model, None)) is None:
        pytest.skip(f"this transformers has no {sight.model}")
    support_random.seed(sight.seed)
    model = found(found.config_class(**sight.options)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():  # some begin as zeros, by which nothing would be seen
            if not weight.any():
                weight.normal_(std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def words(count: int, seed: int) -> Tensor:
    return torch.randint(*WORDS, (count,), generator=torch.Generator().manual_seed(seed))


def shown(name: str, images: Sequence[int], seed: int = 1) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A batch with so many images in each row, padded on the left; and each row by itself."""
    sight, rows, views = SIGHTS[name], [], []
    for row, count in enumerate(images):
        view, tokens = sight.see(count, 10 * seed + row)
        parts = [words(4 + row, 100 * seed + row)]
        for i, taken in enumerate(tokens):
            parts += [torch.full((taken,), sight.token), words(4 + row, 100 * seed + 10 * i + row)]
        rows.append(torch.cat(parts))
        views.append(view)
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    alone = [told(name, row[None], torch.ones_like(row)[None]) | view for row, view in zip(rows, views, strict=True)]
    return told(name, ids, mask) | beside(views), alone


def told(name: str, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """A text as the model is given it."""
    kinds = {kind: (ids == IMAGE).long() for kind in SIGHTS[name].kinds}
    if name == "mllama":  # which images a token sees, both tiles of them: those before it
        begun = kinds["cross_attention_mask"].cumsum(1)[..., None] > torch.arange(int((ids == IMAGE).sum(1).max()))
        kinds = {"cross_attention_mask": begun[..., None].expand(-1, -1, -1, 2).long()}
    return {"input_ids": ids, "attention_mask": mask, **kinds}


def beside(views: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What rows see, together; where images have an axis of their own in a row, rows with fewer get empty ones."""
    found = {}
    for key in views[0]:
        parts = [view[key] for view in views]
        most = max(part.shape[1] for part in parts)
        if len(parts[0]) == 1 and key != "image_grid_thw":
            parts = [torch.nn.functional.pad(x, (0,) * (2 * x.ndim - 3) + (most - x.shape[1],)) for x in parts]
        found[key] = torch.cat(parts)
    return found
