"""Reads a link graph in BVGraph form (the WebGraph framework; Boldi and Vigna, WWW 2004): BASENAME.graph and BASENAME.properties.

    offsets, targets = read_bvgraph(Path("cnr-2000"))     -> int64[nodes + 1], uint32[arcs]; each node's targets ascending

Node x is coded as: its outdegree; which node before it it copies from, and which blocks of that list; runs of consecutive targets
(intervals); the targets left, as gaps. The default codes are read: gamma for all of them, unary for the reference, zeta_k for the gaps.
The whole graph is decoded in memory: 4 bytes a link and 8 a node.
"""

from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from craw4llm.errors import InputError


def read_bvgraph(base: Path) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """base: the path without its ending. Raises InputError for other codes, and for a file that does not hold what it announces."""
    properties = read_properties(base)
    flags = properties.get("compressionflags", "")
    if flags:
        raise InputError(f"corpus: {base}.properties says compressionflags={flags}; only BVGraph's default codes are read (an empty value)")
    nodes, arcs = int(properties["nodes"]), int(properties["arcs"])
    if nodes >= 2**32:
        raise InputError(f"corpus: {base} has {nodes:,} nodes; page ids go up to {2**32 - 1:,}")
    data = np.fromfile(f"{base}.graph", dtype=np.uint8)
    if nodes > 8 * len(data):
        raise InputError(
            f"corpus: {base}.properties says nodes={nodes:,}, but {base}.graph has {len(data):,} bytes; every node takes a bit"
        )
    # Eight bytes of ones behind the end: a code that runs over it ends there, and the count of arcs shows it.
    data = np.concatenate([data, np.full(8, 255, dtype=np.uint8)])
    try:
        offsets, targets = np.zeros(nodes + 1, dtype=np.int64), np.empty(arcs, dtype=np.uint32)
    except (MemoryError, ValueError) as error:
        raise InputError(f"corpus: {base}.properties says arcs={arcs:,}; the graph is decoded in memory, and so many do not fit") from error
    window, shortest, zeta = (int(properties[name]) for name in ("windowsize", "minintervallength", "zetak"))
    read = _decode(data, 8 * (len(data) - 8), window, shortest, zeta, offsets, targets)
    if read != nodes or int(offsets[-1]) != arcs:
        raise InputError(f"corpus: {base}.graph is damaged at node {read:,} of {nodes:,}, or not the graph of its .properties")
    return offsets, targets


def read_properties(base: Path) -> dict[str, str]:
    """The .properties file: what BVGraph needs is there and a number, or InputError."""
    path = base.with_name(f"{base.name}.properties")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"corpus: {path} cannot be read: {error}; a BVGraph is a .graph file and a .properties file") from error
    found = dict(line.strip().split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    for name in ("nodes", "arcs", "windowsize", "minintervallength", "zetak"):
        if not found.get(name, "").isdigit():
            raise InputError(f"corpus: {path} says {name}={found.get(name)!r}; expected a number")
    return found


@numba.njit(cache=True)
def _unary(data: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """(value, bit after it)."""
    begin = at
    while not (data[at >> 3] >> (7 - (at & 7))) & 1:
        at += 1
        if at >> 3 >= len(data):
            return at - begin, at - 1
    return at - begin, at + 1


@numba.njit(cache=True)
def _bits(data: NDArray[np.uint8], at: int, width: int) -> int:
    value = 0
    for k in range(at, min(at + width, 8 * len(data))):
        value = (value << 1) | ((data[k >> 3] >> (7 - (k & 7))) & 1)
    return value


@numba.njit(cache=True)
def _gamma(data: NDArray[np.uint8], at: int) -> tuple[int, int]:
    width, at = _unary(data, at)
    return (1 << width) + _bits(data, at, width) - 1, at + width


@numba.njit(cache=True)
def _zeta(data: NDArray[np.uint8], at: int, k: int) -> tuple[int, int]:
    h, at = _unary(data, at)
    left, width = 1 << (h * k), h * k + k - 1
    value = _bits(data, at, width)
    at += width
    if value < left:
        return value + left - 1, at
    return (value << 1) + _bits(data, at, 1) - 1, at + 1


@numba.njit(cache=True)
def _signed(x: int) -> int:
    return x >> 1 if x & 1 == 0 else -((x + 1) >> 1)


@numba.njit(cache=True)
def _decode(
    data: NDArray[np.uint8],
    end: int,
    window: int,
    shortest: int,
    zeta: int,
    offsets: NDArray[np.int64],
    targets: NDArray[np.uint32],
) -> int:
    """Fills offsets and targets. Returns how many nodes were read; fewer than there are where the data is damaged."""
    nodes = len(offsets) - 1
    at = 0
    for x in range(nodes):
        first = offsets[x]
        degree, at = _gamma(data, at)
        stop = first + degree
        if at > end or degree < 0 or stop > len(targets):
            return x
        offsets[x + 1] = stop
        if not degree:
            continue
        out = first
        reference = 0
        if window:
            reference, at = _unary(data, at)
        if reference:
            if reference > x:
                return x
            source, source_end = offsets[x - reference], offsets[x - reference + 1]
            blocks, at = _gamma(data, at)
            keep = True
            for j in range(blocks):
                length, at = _gamma(data, at)
                length += j > 0
                if source + length > source_end or (keep and out + length > stop) or at > end:
                    return x
                if keep:
                    targets[out : out + length] = targets[source : source + length]
                    out += length
                source += length
                keep = not keep
            if keep:
                length = source_end - source
                if out + length > stop:
                    return x
                targets[out : out + length] = targets[source:source_end]
                out += length
        if out < stop and shortest:
            intervals, at = _gamma(data, at)
            before = 0
            for j in range(intervals):
                value, at = _gamma(data, at)
                left = _signed(value) + x if j == 0 else value + before + 1
                length, at = _gamma(data, at)
                length += shortest
                if out + length > stop or left < 0 or left + length > nodes or at > end:
                    return x
                for k in range(length):
                    targets[out] = left + k
                    out += 1
                before = left + length
        if out < stop:
            value, at = _zeta(data, at, zeta)
            target = x + _signed(value)
            while True:
                if target < 0 or target >= nodes or at > end:
                    return x
                targets[out] = target
                out += 1
                if out == stop:
                    break
                value, at = _zeta(data, at, zeta)
                target += value + 1
        targets[first:stop].sort()
    return nodes
