"""Build the bundled models' tokenizer: lossless on any text, numbers and UUIDs in fixed chunks."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvengine.evals.train.text import NOISE, haystack_sentences, words

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPACE = "\u0120"  # how the byte-level alphabet writes a space
_GROUPS = (8, 4, 4, 4, 12)


def _uuid_pattern() -> str:
    """Two hex digits at an even place of a UUID; the first pair takes a space before it along."""
    pairs = []
    for group, size in enumerate(_GROUPS):
        before = "".join(f"[0-9a-f]{{{n}}}-" for n in _GROUPS[:group])
        after = "".join(f"-[0-9a-f]{{{n}}}" for n in _GROUPS[group + 1 :])
        for at in range(0, size, 2):
            behind = before + (f"[0-9a-f]{{{at}}}" if at else "")
            ahead = (f"[0-9a-f]{{{size - at - 2}}}" if at + 2 < size else "") + after
            look = f"(?<={behind})" if behind else " ?(?<![0-9a-f])"
            pairs.append(f"{look}[0-9a-f]{{2}}(?={ahead})" if ahead else f"{look}[0-9a-f]{{2}}")
    return "|".join(pairs)


def pretokens() -> pre_tokenizers.PreTokenizer:
    """UUID pairs, words, groups of three digits, short runs of signs: each may take one space before it along."""
    pattern = _uuid_pattern() + r"| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,3}|\s"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def chunks() -> list[str]:
    """Digit groups of one to three and pairs of hex digits, each with and without a space before it."""
    digits = [f"{n:0{size}d}" for size in (1, 2, 3) for n in range(10**size)]
    pairs = [f"{n:02x}" for n in range(256)]
    return list(dict.fromkeys([*digits, *pairs, *(SPACE + piece for piece in (*digits, *pairs))]))


def frames() -> list[str]:
    """Words of the task sentences that the learnt pieces may split."""
    spaced = "One One A Some What magic number numbers uuid uuids hidden memorize Make VAR Question Answer chain track "
    spaced += "mentioned provided text are is in the for memorize quiz afterwards following assigned value words"
    bare = "One A Some What Below Read Memorize Find VAR Question Answer ... .... (s)".split()
    return [*bare, *(SPACE + word for word in spaced.split()), SPACE + "="]


def keywords() -> list[str]:
    """Words of the keys as the tasks write them, each one piece, as the large vocabularies of real models have it."""
    return [*(SPACE + word for word in words("adjective") if word.isalpha()), *filter(str.isalpha, words("noun"))]


def corpus(seed: int = 0) -> list[str]:
    """What the word pieces are learnt from: keys as the tasks write them, and prose."""
    source = random.Random(seed)
    adjectives, nouns = words("adjective"), words("noun")
    keys = [f" {source.choice(adjectives)}-{noun}" for noun in nouns for _ in range(3)]
    lists = [f" {word}" for kind in ("adjective", "noun", "verb") for word in words(kind)]
    return [*keys, *lists, *(" " + sentence for sentence in haystack_sentences()), *[NOISE] * 50]


def build(pieces: int = 5120, seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `pieces` learnt pieces, with every digit group and hex pair as one token.

    Returns a tokenizer that adds one BOS token. `decode(encode(text)) == BOS + text` for any text; without special tokens
    the text alone comes back, if it names none of them or is encoded with `split_special_tokens=True`.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pretokens()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=pieces + 256, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    learner.train_from_iterator(_letters(corpus(seed)), trainer)
    state = json.loads(learner.to_str())["model"]
    learnt = sorted(state["vocab"], key=state["vocab"].__getitem__)
    order = [PAD, BOS, EOS, *learnt, *frames(), *chunks(), *keywords()]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(order))}
    merges = [tuple(pair) for pair in state["merges"]]
    # ignore_merges: a chunk of the split that is in the vocabulary is one token without a merge leading to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pretokens()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _letters(texts: list[str]) -> list[str]:
    """The texts without digits, so that no piece is spent on a number."""
    return ["".join(letter for letter in text if not letter.isdigit()) for text in texts]


def save(folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Build and write the tokenizer files into `folder`."""
    tokenizer = build(seed=seed)
    tokenizer.save_pretrained(folder)
    return tokenizer
