"""Cases of ONNX Runtime's attentions to keys in the pages of a cache, or to those that each query has selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.grouped_attention import BATCH, ints


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        yield from _paged(drawer(), shapes)
        yield from _chosen(drawer(), shapes)
        yield from _chosen_in_pages(drawer(), shapes)


def _paged(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """Three samples of 2, 0 and 1 tokens after pasts of 4, 1 and 0, in pages of two rows."""
    sizes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "shapes": shapes}
    name = "PagedAttention"
    cache = [floats(6, 2, 1, 4) for _ in range(2)]
    tables = [ints(0, 2, 2, 3), ints(4, 1, 0), ints([4, 1, 3], [2, -1, -1], [0, 5, -1])]

    def new(size: int = 4) -> list[np.ndarray]:
        return [floats(3, n * size) for n in (2, 1, 1)]

    none: list[np.ndarray | None] = [None]
    rotary = [floats(6, 2) for _ in range(2)]
    yield case(name, *new(), *cache, *tables, **sizes)
    packed = [floats(3, 16), None, None]
    yield case(name, *packed, *cache, *tables, *rotary, outputs=3, do_rotary=1, softcap=0.6, scale=0.4, **sizes)
    slots, weights = ints(10, -1, 3), [floats(4) for _ in range(2)]
    extra = [*none * 2, slots, floats(2), *weights]
    yield case(name, *new(), *cache, *tables, *extra, outputs=3, is_causal=0, qk_norm_epsilon=0.1, **sizes)
    constant = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "attention_metadata")
    hint = [*none * 5, ints(2, 5)]
    yield case(
        name, *new(), *cache, *tables, *rotary, slots, *hint,
        do_rotary=1, rotary_interleaved=1, local_window_size=2, constant=constant, **sizes,
    )  # fmt: skip
    yield case(
        name, floats(3, 28), floats(3, 14), None, floats(6, 2, 1, 14), None, *tables, *rotary,
        do_rotary=1, rotary_offset=8, kv_cache_layout="LATENT", v_head_size=5, scale=0.3, outputs=2, **sizes,
    )  # fmt: skip
    yield case(
        name, *(x[:0] for x in new()), *cache, ints(0, 0, 0, 0), *tables[1:], *none * 8, ints(0, 5), outputs=3, **sizes
    )
    held = [(np.arange(96).reshape(6, 2, 2, 4) * n % 16 - 8).astype(np.int8) for n in (5, 7)]
    steps = [((np.arange(24).reshape(3, 8) * n % 7 - 3 + 0.2) * 0.2).astype(np.float32) for n in (3, 5)]
    scales = [np.full(1, 0.2, np.float32), np.full((1, 2, 4), 0.2, np.float32)]
    tables[2] = ints([4, 1, 3], [2, -1, -1], [-1, 5, -1])  # without a page for a new token
    kinds = {
        "k_quant_type": "PER_TENSOR",
        "v_quant_type": "PER_CHANNEL",
        "k_cache_dtype": "int8",
        "v_cache_dtype": "int8",
    }
    sizes |= {"num_heads": 4, "kv_num_heads": 2}
    yield case(name, floats(3, 16), *steps, *held, *tables, *none * 6, *scales, outputs=3, **kinds, **sizes)


CHOSEN = ints([2, 0, -1], [1, -1, -1], [-1, -1, -1], [1, 2, 0]), ints(2, 1, 0, 3)  # of four queries


def _chosen(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """Two queries of each sample, which choose among the main keys or among others; one that chooses none."""
    sizes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "shapes": shapes}
    name = "DynamicSparseAttention"

    def new(size: int = 4) -> list[np.ndarray]:
        return [floats(BATCH, 2, n * size) for n in (2, 1, 1)]

    none: list[np.ndarray | None] = [None]
    cache = [floats(BATCH, 1, 3, 4) for _ in range(2)]
    other = [floats(BATCH, 1, 4, 4) for _ in range(2)]
    tokens = [ints(4, 2), np.array(5, np.int32)]
    rotary = [floats(6, 2) for _ in range(2)]
    yield case(
        name, *new(), *none * 4, ints([0], [1], [0], [0]), ints(1, 1, 0, 1), ints(1, 1), np.array(2, np.int32), **sizes
    )
    packed = [floats(BATCH, 2, 16), *none * 2]
    yield case(name, *packed, *cache, *none * 2, *CHOSEN, *tokens, *rotary, do_rotary=1, scale=0.4, outputs=3, **sizes)
    local = {"attention_mode": "local_plus_selected", "selected_kv_source": "auxiliary", "local_window_size": 2} | sizes
    positions, weights = np.array([[3, 1], [0, 2]]), [floats(4) for _ in range(2)]
    extra = [*rotary, positions, *weights, floats(2)]
    yield case(
        name, *new(), *cache, *other, *CHOSEN, *tokens, *extra,
        do_rotary=1, rotary_interleaved=1, qk_norm_epsilon=0.1, outputs=3, **local,
    )  # fmt: skip
    wide = [floats(BATCH, 1, n, 14) for n in (6, 6, 4)]
    constant = (
        "selected_indices",
        "selected_counts",
        "seqlens_k",
        "total_sequence_length",
        "position_ids",
        "committed_length",
    )
    yield case(
        name, *new(14), *wide, None, *CHOSEN, *tokens, *rotary, positions, *none * 3, ints(3, 1),
        do_rotary=1, rotary_offset=8, auxiliary_kv_shared=1, smooth_softmax=1, constant=constant, **local,
    )  # fmt: skip
    yield case(
        name, *new(), *none * 2, *other, *CHOSEN, ints(1, 1), np.array(2, np.int32), *none * 6, ints(0),
        selected_kv_source="auxiliary", **sizes,
    )  # fmt: skip
    yield case(
        name,
        *(x[:0] for x in (*new(), *cache)),
        *none * 2,
        *(x[:0] for x in CHOSEN),
        ints(),
        np.array(3, np.int32),
        **sizes,
    )
    held = [(np.arange(48).reshape(BATCH, 2, 3, 4) * n % 16 - 8).astype(np.int8) for n in (5, 7)]
    steps = [((np.arange(32).reshape(BATCH, 2, 8) * n % 7 - 3 + 0.2) * 0.2).astype(np.float32) for n in (3, 5)]
    scales = [np.full(8, 0.2, np.float32)] * 2
    full = [floats(BATCH, 2, 16), *steps, *held, *none * 2, *CHOSEN, *tokens, *none * 7, *scales]
    sizes |= {"num_heads": 4, "kv_num_heads": 2}
    yield case(name, *full, outputs=3, **sizes)


def _chosen_in_pages(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """As the cases in pages; the three tokens choose among the main keys or among others."""
    sizes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "shapes": shapes}
    name = "SparsePagedAttention"
    cache = [floats(6, 2, 1, 4) for _ in range(2)]
    tables = [ints(0, 2, 2, 3), ints(4, 1, 0), ints([4, 1, 3], [2, -1, -1], [0, 5, -1])]
    choice = [ints([2, 0, 3], [1, -1, 4], [0, 2, 1]), ints(3, 0, 3)]  # the last token chooses more than its sample has
    other = [floats(3, 5, 1, 4) for _ in range(2)]
    rotary = [floats(6, 2) for _ in range(2)]

    def new(size: int = 4) -> list[np.ndarray]:
        return [floats(3, n * size) for n in (2, 1, 1)]

    none: list[np.ndarray | None] = [None]
    slots, lengths, weights = ints(10, -1, 3), ints(3, 0, 5), [floats(4) for _ in range(2)]
    yield case(name, *new(), *cache, *tables, None, *choice, **sizes)
    packed = [floats(3, 16), *none * 2]
    turned = {"do_rotary": 1, "softcap": 0.6, "scale": 0.4} | sizes
    yield case(name, *packed, *cache, *tables, slots, *choice, *none * 3, *rotary, outputs=3, is_causal=0, **turned)
    local = {"attention_mode": "local_plus_selected", "selected_kv_source": "auxiliary"} | sizes
    extra = [*rotary, floats(2), *weights]
    yield case(
        name, *new(), *cache, *tables, slots, *choice, *other, lengths, *extra,
        do_rotary=1, rotary_interleaved=1, qk_norm_epsilon=0.1, local_window_size=2, outputs=3, **local,
    )  # fmt: skip
    constant = (
        *("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping"),
        *("selected_indices", "selected_counts", "auxiliary_lengths", "attention_metadata"),
    )
    wide = [floats(6, 2, 1, 14) for _ in range(2)]
    hint = ints(2, 5, 3, 5, 8)
    yield case(
        name, *new(14), *wide, *tables, slots, *choice, floats(3, 5, 1, 14), None, lengths, *rotary, *none * 5, hint,
        do_rotary=1, rotary_offset=8, auxiliary_kv_shared=1, constant=constant, **local,
    )  # fmt: skip
    yield case(
        name, *new(), *cache, *tables, None, *choice, *other, *none * 8, hint, selected_kv_source="auxiliary", **sizes
    )
    nothing = [*(x[:0] for x in new()), *cache, ints(0, 0, 0, 0), *tables[1:], None, *(x[:0] for x in choice)]
    yield case(name, *nothing, outputs=3, **sizes)
    held = [(np.arange(96).reshape(6, 2, 2, 4) * n % 16 - 8).astype(np.int8) for n in (5, 7)]
    steps = [((np.arange(24).reshape(3, 8) * n % 7 - 3 + 0.2) * 0.2).astype(np.float32) for n in (3, 5)]
    scales = [np.full(1, 0.2, np.float32), np.full((1, 2, 4), 0.2, np.float32)]
    tables[2] = ints([4, 1, 3], [2, -1, -1], [-1, 5, -1])  # without a page for a new token
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL"}
    full = [floats(3, 16), *steps, *held, *tables, None, *choice, *none * 8, *scales]
    sizes |= {"num_heads": 4, "kv_num_heads": 2}
    yield case(name, *full, outputs=3, **kinds, **sizes)
