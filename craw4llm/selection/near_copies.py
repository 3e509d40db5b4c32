"""Near-copies among texts, by MinHash and locality-sensitive hashing (datasketch).

    copies = NearCopies(Similarity())
    copies.of(signature(text, similarity))     -> the key of the most similar text added so far, or None
    copies.add(7, signature(text, similarity))

Two texts are near-copies when the estimated Jaccard similarity of their sets of `shingle_words`-word runs is at least `threshold`. A text
of fewer words is one run. The estimate's standard error is at most 0.5 / sqrt(permutations): 0.044 with 128. Signatures depend on the text
alone; ties go to the lowest key, so the outcome depends on the order in which texts are added and on nothing else.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from craw4llm.selection.words import grams, words

if TYPE_CHECKING:
    from datasketch import MinHash  # imported where it is used: it brings Redis and SciPy, a second that `craw4llm plan` need not wait

_SCHEME = "affine64"  # datasketch's name for permutations h -> a * h + b modulo 2^64
_SEED = 1
_WEIGHTS = (0.1, 0.9)  # of false positives and false negatives: the former cost a comparison of signatures, the latter are lost
Signature = NDArray[np.uint64]


@dataclass(frozen=True)
class Similarity:
    """threshold: Jaccard similarity from which on two texts are near-copies. permutations: length of a signature."""

    threshold: float = 0.8
    permutations: int = 128
    shingle_words: int = 5


def signature(text: str, similarity: Similarity) -> Signature | None:
    """uint64[permutations]; None for a text without words, which has no near-copies."""
    found = words(text)
    if not found:
        return None
    from datasketch import MinHash

    made = MinHash(num_perm=similarity.permutations, seed=_SEED, hashfunc=int, scheme=_SCHEME)
    made.update_batch(np.unique(grams(text, min(similarity.shingle_words, len(found)))).tolist())
    return np.asarray(made.hashvalues)


class NearCopies:
    """Texts by their signatures."""

    def __init__(self, similarity: Similarity) -> None:
        from datasketch import MinHashLSH

        self._similarity = similarity
        self._index = MinHashLSH(similarity.threshold, similarity.permutations, weights=_WEIGHTS)
        self._known: dict[int, Signature] = {}

    def of(self, wanted: Signature | None) -> int | None:
        """The key of the most similar text added so far, if it is a near-copy."""
        if wanted is None or not self._known:
            return None
        best, key = 0.0, None
        for other in sorted(self._index.query(self._minhash(wanted))):
            similar = float(np.mean(self._known[other] == wanted))
            if similar > best:
                best, key = similar, other
        return key if best >= self._similarity.threshold else None

    def add(self, key: int, added: Signature | None) -> None:
        """Adds a text under a key that is not in use."""
        if added is not None:
            self._known[key] = added
            self._index.insert(key, self._minhash(added))

    def _minhash(self, values: Signature) -> "MinHash":
        from datasketch import MinHash

        return MinHash(num_perm=self._similarity.permutations, seed=_SEED, hashfunc=int, hashvalues=values, scheme=_SCHEME)
