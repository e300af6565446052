"""A tiny random model and a character tokenizer for the evaluation's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import support_random
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvengine.evals.tasks._words import essay, prose

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>"
    "{% else %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(*, chat: bool = False, bos: bool = True) -> Any:
    """Byte pairs trained on a little prose: any text encodes and decodes unchanged."""
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([essay(prose(), 4000)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=special[2:]
    )
    made.chat_template = CHAT if chat else None
    return made


def tiny_model(seed: int = 0) -> Any:
    """Two layers, grouped heads, random weights."""
    support_random.seed(seed)
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def saved_model(folder: Path, *, chat: bool = False) -> Path:
    """A folder that `from_pretrained` loads."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
