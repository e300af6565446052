"""What a stored chunk is called: a hash of everything its numbers depend on.

The root is a hash over the model, the tokenizer, RoPE, the policy (with the codec level), the chunk size and the
tenant's salt; each chunk's key continues the key before it with its own tokens. So equal keys mean equal KV, two
prompts share keys exactly as far as they share tokens, and without the salt nobody can name another tenant's chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from kvengine.offload.cachegen import Identity
from kvengine.offload.cachegen.codec import MAX_CHUNK

FORMAT = 1
MAX_SALT = 128
KEY = re.compile(r"[0-9a-f]{64}")


def root(identity: Identity, policy: str, *, chunk: int, salt: str = "") -> bytes:
    """Hash of what all chunks of a prompt have in common. Raises ValueError for a salt that is no text or over 128
    characters, or a chunk of more tokens than the codec takes, or none."""
    if type(chunk) is not int or not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"a chunk has 1 to {MAX_CHUNK} tokens, {chunk!r} were asked for")
    if not isinstance(salt, str):
        raise ValueError(f"a salt is text of at most {MAX_SALT} characters, not {type(salt).__name__}")
    if len(salt) > MAX_SALT:
        raise ValueError(f"a salt has at most {MAX_SALT} characters, this one {len(salt)}")
    facts = {"format": FORMAT, "identity": identity.as_json(), "policy": policy, "chunk": chunk, "salt": salt}
    return sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def chain(tokens: Sequence[int], start: bytes, chunk: int) -> list[str]:
    """Keys of all whole chunks of a prompt, first to last.

    >>> start = root(Identity(model="m"), "full", chunk=2)
    >>> a, b = chain([1, 2, 3, 4, 5], start, 2), chain([1, 2, 9, 4], start, 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    """
    if chunk < 1:
        raise ValueError(f"a chunk has at least 1 token, {chunk} were asked for")
    ids = np.asarray(tokens, dtype="<i8")
    keys, link = [], start
    for at in range(0, len(ids) - chunk + 1, chunk):
        link = sha256(link + ids[at : at + chunk].tobytes()).digest()
        keys.append(link.hex())
    return keys


def check(key: str) -> str:
    """The key itself. Raises ValueError unless it is 64 hexadecimal digits, as `chain` makes them."""
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key: 64 lower-case hexadecimal digits are expected")
    return key
