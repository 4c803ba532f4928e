"""The decoder on a GPU: kvd's kernels between torch's matrix products, over one paged pool of the reference layout.

The residual stream is float32. A step of decodes runs as a captured graph where one holds it; all others launch their kernels one by one. Which bits a product gives depends on
cuBLAS's choice for the number of rows, so that rows are independent of each other in kvd's kernels alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvd.executor.attention.tiles import TileShape, plan_tiles
from kvd.executor.gpu.decode_graphs import DecodeGraphs, Field, GraphMaker, bucket_sizes
from kvd.executor.gpu.transfer import upload
from kvd.executor.input_batch import StepRows
from kvd.executor.kernels.triton.activation import silu_mul
from kvd.executor.kernels.triton.attention import PagedAttention
from kvd.executor.kernels.triton.norm import add_and_norm
from kvd.executor.kernels.triton.rotary import rotate_and_write
from kvd.executor.kv_pool import KvPool
from kvd.executor.models.decoder import DecoderWeights
from kvd.executor.models.rope import inverse_frequencies, rotation
from kvd.executor.models.spec import ModelSpec

_GRAPH_SLOTS = 4096
"""Tiles of all rows together that a graph holds, at least one a row: 32 rows of 16,384 positions, or 256 rows of 2,048."""
_GRAPH_RUN_TOKENS = 8
"""Levels of shared runs that a graph has room for, as a multiple of its rows."""


class TritonModel:
    """``weights`` and ``spec`` over ``pool``. ``graphs`` captures decoding when ``capture`` is called; None: never.

    ``sampled`` int32 ``[max_rows]`` is the token that each row sampled last, on the device; a token id of -1 in a step stands for it.
    """

    warm_up_prompts = (1, 16, 64, 256, 512)
    warm_up_rows = 1 << 16

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        pool: KvPool,
        *,
        max_rows: int,
        max_model_len: int,
        graphs: GraphMaker | None = None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._pool = pool
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        device = pool.device
        turn = rotation(
            inverse_frequencies(spec.rope, spec.head_dim), torch.arange(max_model_len), spec.rope.attention_factor, torch.float32
        )
        self._cosines, self._sines = (each.squeeze(1).contiguous().to(device) for each in turn)
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._attention = PagedAttention(
            pool.positions,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size_tokens=pool.block_size_tokens,
            scale=spec.attention_scale,
            num_programs=max(1, num_processors * 8 // spec.num_kv_heads),
        )
        attention = self._attention
        self._tiles = TileShape(attention.tile_tokens, attention.tile_queries, attention.chunk_queries, spec.num_heads // spec.num_kv_heads)
        self._windows = tuple(sorted(set(spec.windows)))
        self.sampled = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: DecodeGraphs | None = None
        if graphs is not None:
            self._graph_slots = max(_GRAPH_SLOTS, max_rows)
            self._partials = attention.new_partials(self._graph_slots)
            self._graphs = DecodeGraphs(self._run_graph, self._graph_fields, bucket_sizes(max_rows), graphs, device)

    def over(self, pool: KvPool) -> TritonModel:
        return TritonModel(self._spec, self._weights, pool, max_rows=self._max_rows, max_model_len=self._max_model_len)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of decoding; touches no block."""
        if self._graphs is not None:
            self._graphs.capture()

    @torch.inference_mode()
    def forward(self, rows: StepRows) -> TritonHidden:
        attention = rows.attention
        arrays = {
            "token_ids": rows.token_ids.astype(np.int32),
            "source_rows": rows.rows[attention.token_rows].astype(np.int32),
            "positions": attention.positions.astype(np.int32),
            "token_rows": attention.token_rows.astype(np.int32),
        }
        num_slots = 0
        for window in self._windows:
            plan = plan_tiles(attention, self._tiles, window)
            num_slots = max(num_slots, plan.num_slots)
            arrays[f"pieces.{window}"] = plan.pieces
            arrays[f"num_pieces.{window}"] = np.array([len(plan.pieces)], dtype=np.int32)
            arrays[f"piece_tokens.{window}"] = plan.piece_tokens
            arrays[f"slots.{window}"] = plan.slots
            arrays[f"chunks.{window}"] = plan.chunks
        arrays["tables"] = attention.block_tables.T
        residual = None
        if self._graphs is not None and len(attention.positions) == len(rows.rows) and num_slots <= self._graph_slots:
            residual = self._graphs.run(len(rows.rows), arrays)
        if residual is None:
            residual = self._layers(upload(arrays, self._pool.device), self._attention.new_partials(num_slots))
        return TritonHidden(self, residual)

    def logits(self, residual: Tensor) -> Tensor:
        """Float32 ``[N, vocab]`` of rows ``[N, hidden]`` of the residual stream."""
        weights = self._weights
        normal = add_and_norm(residual, None, weights.final_norm, self._spec.rms_norm_eps)
        return functional.linear(normal, weights.head).float()

    def _run_graph(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._layers(inputs, self._partials)

    def _graph_fields(self, num_rows: int) -> Mapping[str, Field]:
        per_row = Field((num_rows,), 0)
        fields = {
            "token_ids": per_row,
            "source_rows": per_row,
            "positions": Field((num_rows,), -1),
            "token_rows": per_row,
        }
        most_pieces = max(num_rows, min(self._graph_slots, num_rows * -(-self._max_model_len // self._tiles.tile_tokens)))
        for window in self._windows:
            fields[f"pieces.{window}"] = Field((most_pieces, 4), None)
            fields[f"num_pieces.{window}"] = Field((1,), 0)
            fields[f"piece_tokens.{window}"] = Field((num_rows * _GRAPH_RUN_TOKENS,), None)
            fields[f"slots.{window}"] = per_row
            fields[f"chunks.{window}"] = Field((0, 4), None)
        # by far the largest, so last, and block by block: a step brings as many as its longest row has
        fields["tables"] = Field((-(-self._max_model_len // self._pool.block_size_tokens) + 1, num_rows), None)
        return fields

    def _layers(self, inputs: Mapping[str, Tensor], partials: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the last layer, float32 ``[T, hidden]``."""
        spec, weights = self._spec, self._weights
        token_ids = torch.where(inputs["token_ids"] < 0, self.sampled[inputs["source_rows"]], inputs["token_ids"])
        residual = functional.embedding(token_ids, weights.embedding).float()
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            normal = add_and_norm(residual, update, layer.attention_norm, spec.rms_norm_eps)
            queries = rotate_and_write(
                functional.linear(normal, layer.qkv, layer.qkv_bias),
                layer.qk_norm,
                spec.rms_norm_eps,
                inputs["positions"],
                inputs["token_rows"],
                inputs["tables"],
                self._cosines,
                self._sines,
                self._pool.positions,
                index,
                num_layers=spec.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                block_size_tokens=self._pool.block_size_tokens,
            )
            update = functional.linear(self._attend(index, queries, inputs, partials).flatten(1), layer.output)
            normal = add_and_norm(residual, update, layer.feed_forward_norm, spec.rms_norm_eps)
            update = functional.linear(silu_mul(functional.linear(normal, layer.gate_up)), layer.down)
        return residual if update is None else residual.add_(update)

    def _attend(self, layer: int, queries: Tensor, inputs: Mapping[str, Tensor], partials: tuple[Tensor, Tensor]) -> Tensor:
        window = self._spec.windows[layer]
        attended = torch.empty_like(queries)
        slots, chunks = inputs[f"slots.{window}"], inputs[f"chunks.{window}"]
        if len(slots):
            self._attention.attend_pieces(
                layer,
                window,
                queries,
                inputs["tables"],
                inputs[f"num_pieces.{window}"],
                inputs[f"pieces.{window}"],
                inputs[f"piece_tokens.{window}"],
                inputs["positions"],
                slots,
                partials,
                attended,
            )
        if len(chunks):
            self._attention.attend_chunks(layer, window, queries, inputs["tables"], chunks, attended)
        return attended


class TritonHidden:
    """The residual stream of a step's tokens, on the device."""

    def __init__(self, model: TritonModel, residual: Tensor) -> None:
        self._model = model
        self._residual = residual

    def finite(self) -> np.ndarray:
        finite: np.ndarray = self.device_finite().cpu().numpy()
        return finite

    def greedy(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = self.logits(tokens)
        return logits.argmax(dim=-1).cpu().numpy(), torch.isfinite(logits.sum(dim=-1)).cpu().numpy()

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self.device_logits(upload({"tokens": tokens}, self._residual.device)["tokens"])

    def device_finite(self) -> Tensor:
        """Bool ``[T]``; the host does not wait."""
        return torch.isfinite(self._residual.sum(dim=-1))

    def device_logits(self, tokens: Tensor) -> Tensor:
        """Float32 ``[len(tokens), vocab]`` of flat tokens named on the device; the host does not wait."""
        return self._model.logits(self._residual[tokens])
