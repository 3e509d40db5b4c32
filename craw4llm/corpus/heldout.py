"""Which pages are held out: drawn by hash before any policy, so that neither the source's order nor its size plays a part."""

import hashlib


def is_heldout(name: str, fraction: float) -> bool:
    """Whether a page's canonical URL (or a host's name) is drawn: a hash of it, taken as a fraction of 2^64, is below `fraction`."""
    drawn = int.from_bytes(hashlib.blake2b(f"heldout:{name}".encode(), digest_size=8).digest(), "big")
    return drawn < fraction * 2.0**64
