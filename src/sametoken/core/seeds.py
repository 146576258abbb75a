"""Seeds of the completions of one request."""

from __future__ import annotations

import hashlib

from sametoken.core.sampling_params import MAX_SEED


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion ``index``, in 0..2^63-1; completion 0 keeps ``seed`` itself.

    A hash and not ``seed + index``: requests with neighbouring seeds must not share noise.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
