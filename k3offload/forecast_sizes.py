"""Sizes that a forecast adds up: weights, multiply-adds and pairs of keys.  Pure arithmetic."""

from __future__ import annotations

import math

from .config import LATENT_BLOCK, ROW_TILE, align_up
from .precision import quantised, stored_bytes
from .spec import ModelSpec, TensorSpec

TOGETHER = 4  #: pages that are under way at once, as the disk tier reads them
GUESSED = 0.7  #: of what is read on guesses, wanted: 0.8 to 0.9 where measured (see LOG.md)
MOST_GUESSED = 0.5  #: of a layer's misses: lower ranks are not sure enough to be read


def distinct(experts: int, top_k: int, rows: float) -> float:
    """Different experts of one layer that ``rows`` rows ask for, uniform routing."""
    return experts * (1 - math.pow(1 - top_k / experts, rows))


def weight_of(tensor: TensorSpec, trunk: str) -> tuple[str, int]:
    """The format a trunk tensor has in memory under precision ``trunk``, and its bytes."""
    if quantised(tensor.name, tensor.shape, trunk):
        return trunk, stored_bytes(tensor.shape, trunk)
    return "bfloat16", tensor.nbytes


def is_product(tensor: TensorSpec) -> bool:
    """Whether rows are multiplied with ``tensor``: a matrix of more than one row."""
    return len(tensor.shape) == 2 and tensor.shape[0] > 1


def token_macs(spec: ModelSpec) -> int:
    """Multiply-adds of one token with all weights that it uses, attention over others apart."""
    trunk = sum(
        math.prod(t.shape)
        for layer in spec.layers
        for t in spec.layer_tensors(layer.index)
        if is_product(t)
    )
    routed = 3 * spec.moe.width * spec.moe.io * spec.moe.top_k if spec.moe else 0
    return trunk + routed * len(spec.moe_layers) + spec.vocab * spec.hidden


def trunk_elements(spec: ModelSpec) -> int:
    """Weights of all layers' trunk and of the head, in numbers."""
    layers = sum(math.prod(t.shape) for la in spec.layers for t in spec.layer_tensors(la.index))
    return layers + spec.vocab * spec.hidden


def tiled(rows: float, tile: float) -> float:
    """Rows that an expert computes which got ``rows`` on average, ``tile`` of them at a time: its
    last tile is half full on average, and there is at least one."""
    return max(tile, rows + (tile - 1) / 2)


def attended_pairs(position: int, rows: int) -> int:
    """Pairs of a prompt row and a key that attention computes for ``rows`` rows from ``position``
    on: tiles of rows, each with all blocks of latents up to its last row's."""
    ends = range(position + ROW_TILE, position + rows + ROW_TILE, ROW_TILE)
    return ROW_TILE * sum(align_up(end, LATENT_BLOCK) for end in ends)


def longer(
    computing: float,
    reading: float,
    one: float,
    missed: float,
    wanted: float | None,
    before: float | None = None,
) -> float:
    """Seconds until a layer's experts are read, in ``reading`` seconds, and computed.

    Of the ``missed`` pages the last few, ``TOGETHER``, arrive at once and take ``one`` second each
    to compute.  ``wanted``: of so many pages each is missed by chance, so that the mean over all
    numbers of misses counts (binomial); None where many rows even that out.  On guesses the disk
    reads from when the layer above has its pages: while it computes those, and ``before`` seconds.
    None: there are no guesses.
    """
    if not reading or not missed:
        return computing
    if wanted is None:
        return max(computing, reading + min(missed, TOGETHER) * one)
    pages, miss, each = round(wanted), missed / wanted, reading / missed
    early = 0.0 if before is None else GUESSED * (before + min(missed, TOGETHER) * one)
    return sum(
        math.comb(pages, k)
        * miss**k
        * (1 - miss) ** (pages - k)
        * max(computing, k * each - min(early, MOST_GUESSED * k * each) + min(k, TOGETHER) * one)
        for k in range(pages + 1)
    )
