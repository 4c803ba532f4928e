"""A ``Cache`` for Hugging Face transformers that keeps keys and values in kvd's paged pool and shares what prompts begin with between calls.

    pool = KvdPool(model)
    with pool.cache(input_ids, attention_mask) as cache:
        output = model.generate(input_ids, attention_mask=attention_mask, past_key_values=cache)
        cache.store(output)

``generate`` computes only what the pool does not hold: the cache begins with the longest prefix of the prompts that an earlier one computed, be it in the middle of a
block. The tokens are those of transformers' own ``DynamicCache``. ``pool.generate(input_ids, ...)`` is these lines as one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache
from transformers.generation.utils import GenerationMixin

from kvd.cache.hashing import Namespace
from kvd.cache.manager import BlockTable, CacheManager, CopyOnWrite, CostPolicy
from kvd.executor.kv_pool import KvPool, row_bytes
from kvd.integrations.errors import KvdCacheError, PoolFullError
from kvd.integrations.generate_options import Generation, has_guessed_padding, special_token
from kvd.integrations.kv_slots import Slots
from kvd.integrations.model_shape import shape_of
from kvd.integrations.passes import WatchedCache, check_places, tokens_of, watch
from kvd.types import TOKEN_BYTES, PackedTokens, pack_tokens

_DEFAULT_MEMORY = 1 << 30
__all__ = ["KvdCache", "KvdCacheError", "KvdPool", "PoolFullError"]
_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""As this release of transformers calls it."""


class KvdPool:
    """The blocks of one model's keys and values, and the prefix tree over them, in this process.

    Args:
        model: the transformers model (a causal language model without an encoder), for its shape, device and dtype.
        kv_memory: bytes of the pool, at most; blocks that no living cache uses leave it when others need room.
        block_size_tokens: positions in a block.

    A pool belongs to one thread at a time. Where the model is another one than before (other weights, another active adapter), give its caches another ``salt``.

    Raises:
        KvdCacheError: the model keeps something that is no key and value per position, or the memory holds less than two blocks.
    """

    def __init__(self, model: Any, *, kv_memory: int = _DEFAULT_MEMORY, block_size_tokens: int = 16) -> None:
        self._model = model
        shape = shape_of(model.config)
        block_bytes = row_bytes(shape, model.dtype, block_size_tokens)
        num_blocks = kv_memory // block_bytes
        if num_blocks < 2:
            raise KvdCacheError(f"kv_memory = {kv_memory}: a block takes {block_bytes} bytes, and a pool has at least two")
        self.block_size_tokens = block_size_tokens
        self.num_blocks = num_blocks
        self.num_kept_layers = shape.num_kept
        self.blocks = KvPool(shape, num_blocks, block_size_tokens, model.dtype, model.device)
        self.tables = CacheManager(
            num_blocks=num_blocks, block_size_tokens=block_size_tokens, free_watermark=1.0, policy=CostPolicy(num_blocks, block_size_tokens)
        )
        self.watched = watch(model)

    def cache(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None = None, *, salt: bytes | str = b""
    ) -> KvdCache:
        """A cache for these prompts, which holds already what all of them have in the pool.

        Args:
            input_ids: ``[batch, length]``, padded on the left.
            attention_mask: ``[batch, length]``, 0 where there is padding, the same for ``generate``; None: there is none.
            salt: only caches with the same salt share anything.

        Raises:
            PoolFullError: living caches leave too few blocks, or the pool is smaller than a prompt.
            KvdCacheError: padding that is not on the left; nothing but padding; no mask, and a token that ``generate`` would take for padding.
        """
        if attention_mask is None and has_guessed_padding(torch.as_tensor(input_ids), self._model, {}):
            raise KvdCacheError(
                "the pad token is in a prompt: say with attention_mask, here and to generate, what is padding (all ones: nothing)"
            )
        return KvdCache(self, *_prompts_of(input_ids, attention_mask), salt=salt)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, salt: bytes | str = b"", **options: Any
    ) -> Any:
        """``model.generate`` over a cache of this pool, which afterwards holds prompts and answers.

        Assisted generation (an ``assistant_model``, ``prompt_lookup_num_tokens``, ``assistant_early_exit``) of transformers takes no cache that holds something already:
        there the prompt is computed. With ``use_cache=False``, here or in a generation config, it is ``model.generate``, and the pool stays as it is. Without a mask the pad
        token is padding, as in transformers' own.

        Raises:
            PoolFullError: living caches leave too few blocks, or the pool is smaller than a prompt.
            KvdCacheError: an option that makes keys and values depend on more than ``input_ids``, or that is not known not to; prompts that ``cache`` refuses.
        """
        generation = Generation.of(self._model, options)
        if not generation.uses_cache:
            return self._model.generate(input_ids, attention_mask=attention_mask, **options)
        if attention_mask is None:
            is_guessed = has_guessed_padding(input_ids, self._model, options)
            attention_mask = (
                (input_ids != special_token(self._model, options, "pad_token_id")).long() if is_guessed else torch.ones_like(input_ids)
            )
        with self.cache(input_ids, attention_mask, salt=salt) as cache:
            if generation.passes_all:
                cache.reset()
            output = self._model.generate(input_ids, attention_mask=attention_mask, **{_CACHE_ARGUMENT: cache}, **options)
            cache.store(output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def stats(self) -> dict[str, int]:
        """Counters since the start, as the daemon's (``cache`` in its stats), and the blocks as they are."""
        tables = self.tables
        counts = {
            "blocks": self.num_blocks,
            "free_blocks": tables.num_free,
            "cached_blocks": tables.num_cached,
            "used_blocks": tables.num_used,
        }
        return {**tables.stats(), **counts}

    def clear(self) -> None:
        """Forget everything that no living cache uses."""
        self.tables.evict_to_watermark(self.num_blocks)
        self.tables.take_events()


class KvdCache(Cache, WatchedCache):
    """One call's keys and values, a block table for each row. Made by ``KvdPool.cache``; used by one thread.

    It grows, is cropped, reordered and repeated as transformers' caches are: rows that were one share their blocks until one of them writes. ``close`` it (or use a ``with``
    block) when the call is over: its blocks stay in the pool for others as long as there is room.
    """

    def __init__(self, pool: KvdPool, prompts: list[list[int]], length: int, *, salt: bytes | str = b"") -> None:
        self._pool = pool
        self._num_layers = pool.blocks.num_layers
        self._rows: list[_Row] = []
        self._prompt_length = length
        self._is_permuted = False
        self._written = [0] * self._num_layers
        self._is_begun = False
        """Whether a layer has brought keys and values."""
        self._slots = Slots.empty(pool.blocks.device)
        self.layers: list[Any] = [_PagedLayer(self, index) for index in range(self._num_layers)]
        self.layer_class_to_replicate = None
        self.offloading = False
        namespace = Namespace(b"transformers", salt.encode() if isinstance(salt, str) else salt)
        try:
            for prompt in prompts:
                self._rows.append(self._begin(namespace, prompt, length - len(prompt)))
        except BaseException:
            self.close()
            raise
        past = min((row.num_padding + row.table.num_cached_tokens for row in self._rows), default=0)
        past = past if any(row.num_padding < past for row in self._rows) else 0
        self._written = [past] * self._num_layers
        for row in self._rows:
            self._pool.tables.truncate(row.table, max(0, past - row.num_padding))
            row.seen = row.known[: max(0, past - row.num_padding) * TOKEN_BYTES]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_rows"):
            self.close()

    @property
    def num_cached_tokens(self) -> int:
        """Positions that the cache began with or has been given since."""
        return self.get_seq_length()

    def store(self, sequences: torch.Tensor) -> None:
        """What was generated, prompts included, as ``generate`` returns it: the answers' blocks are found by later prompts that go on from them.

        Nothing to do after beam search, which leaves rows in an order of its own: the prompts' blocks are kept without being told.

        Raises:
            KvdCacheError: these are not this cache's prompts, or not the tokens that the model was given.
        """
        if self._is_permuted or len(sequences) != len(self._rows):
            return
        for row, token_ids in zip(self._rows, sequences.tolist(), strict=True):
            known = pack_tokens(token_ids[row.num_padding :])
            if known[: len(row.known)] != row.known:
                raise KvdCacheError("store: a sequence does not begin with its row's prompt")
            length = min(len(known), len(row.seen))
            if known[:length] != row.seen[:length]:
                raise KvdCacheError("store: a sequence is not what the model was given")
            row.known = known
        self._record()

    def close(self) -> None:
        """Give the blocks back: the pool keeps what it can find again by its tokens. Twice is no mistake."""
        if self._rows:
            self._record()
        for row in self._rows:
            self._pool.tables.release(row.table)
        self._rows = []
        self._written = [0] * self._num_layers
        self._pool.tables.take_events()  # nobody writes them to a disk

    # ---------------------------------------------------------------------------------------- what transformers calls

    def begin_pass(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        """The pool's model is about to compute from these inputs.

        Raises:
            KvdCacheError: keys and values would not be those of the prompts' tokens at their places; the whole prompt, of which some is there already.
        """
        if model is not self._pool.watched:
            return
        input_ids = tokens_of(model, inputs)
        self._expect_rows(len(input_ids))
        start, num_new = self.get_seq_length(), input_ids.shape[1]
        self._expect_rest(start, num_new)
        check_places(model, inputs, start, [row.num_padding for row in self._rows])
        for index, (row, token_ids) in enumerate(zip(self._rows, input_ids.tolist(), strict=True)):
            offset = start - row.num_padding
            seen = row.seen[: max(0, offset) * TOKEN_BYTES]
            if len(seen) == max(0, offset) * TOKEN_BYTES:  # else the model was not seen to compute what is before
                seen += pack_tokens(token_ids[max(0, -offset) :])
            length = min(len(seen), len(row.known))
            if seen[:length] != row.known[:length]:
                raise KvdCacheError(
                    f"row {index}: the pass brings other tokens than the prompt that the cache was made for: make one for these"
                )
            row.seen = seen
        self._announced = (start, start + num_new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the keys and values of new positions, ``[batch, num_kv_heads, new, head_dim]``; those of all positions of the layer.

        Raises:
            PoolFullError: living caches hold every block.
            KvdCacheError: another shape than the pool's, or another number of rows than the cache's.
        """
        self._check(key_states, value_states, layer_idx)
        start = self._written[layer_idx]
        self._expect_rest(start, key_states.shape[2])
        end = start + key_states.shape[2]
        if layer_idx == 0 and min(self._written[: self._pool.num_kept_layers]) < start:
            raise KvdCacheError(
                "the last forward pass was interrupted, or left layers out: reset() the cache, or crop() it to what was there before"
            )
        if layer_idx == 0 and self._announced != (start, end):
            self._forget(start)
        if end > self._slots.end:
            self._record()
            self._make_room(end)
            self._slots = Slots.of([(row.table.block_ids, row.num_padding) for row in self._rows], end, self._pool.blocks)
        self._slots.write(self._pool.blocks, layer_idx, start, key_states, value_states)
        self._written[layer_idx] = end
        self._is_begun = True
        return self._slots.read(self._pool.blocks, layer_idx, end)

    def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
        """Positions of a layer, padding included."""
        return self._written[layer_idx] if layer_idx < self._num_layers else 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many positions the next ``update`` returns, and the first of them. ``query_length``: a number, or the new positions as older releases say it."""
        num_new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.get_seq_length(layer_idx) + num_new, 0

    def get_max_cache_shape(self, *_: Any) -> int:
        """No limit but the pool's."""
        return -1

    def crop(self, max_length: int) -> None:
        """Negative: give up that many of the last positions. Positive: keep at most so many, as older releases have it. 0: nothing."""
        length = self.get_seq_length()
        if max_length == 0 or max_length >= length:
            return
        self._record()
        self._set_length(max(0, length + max_length) if max_length < 0 else max_length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``. Nothing is copied before somebody writes."""
        self._is_permuted = True
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, by number or by a mask."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._is_permuted = True
        self._select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times, one after the other."""
        self._select([index for index in range(len(self._rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forget all positions; the rows stay."""
        self._record()
        self._set_length(0)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def max_batch_size(self) -> int:
        return len(self._rows)

    # ---------------------------------------------------------------------------------------------------------- rows

    def _begin(self, namespace: Namespace, prompt: list[int], num_padding: int) -> _Row:
        tables = self._pool.tables
        match = tables.match(pack_tokens(prompt), namespace)
        # one position more than is matched, unless that would promise a full block: what is computed is told when it is there
        num_tokens = match.num_tokens + (match.partial is None)
        table = tables.allocate(match, max(1, num_tokens))
        if table is None:
            raise self._full(num_tokens)
        if table.partial is not None:
            self._copy((table.partial,))
            tables.end_copy(table)
        return _Row(table, match.token_ids, num_padding)

    def _set_length(self, length: int) -> None:
        """The rows hold so many positions, padding included, and know no token of a later one."""
        for row in self._rows:
            num_tokens = max(0, length - row.num_padding)
            if num_tokens < row.table.num_tokens:
                self._pool.tables.truncate(row.table, num_tokens)
            row.known = row.known[: num_tokens * TOKEN_BYTES]
        self._forget(length)
        self._written = [min(length, written) for written in self._written]
        self._slots = Slots.empty(self._pool.blocks.device)

    def _forget(self, length: int) -> None:
        """Nobody saw what positions from this one on were computed from."""
        for row in self._rows:
            row.seen = row.seen[: max(0, length - row.num_padding) * TOKEN_BYTES]
        self._announced = (0, 0)

    def _select(self, indices: list[int]) -> None:
        self._record()
        tables = self._pool.tables
        rows = [self._rows[index].fork(tables) for index in indices]
        for row in self._rows:
            tables.release(row.table)
        self._rows = rows
        self._slots = Slots.empty(self._pool.blocks.device)

    def _record(self) -> None:
        """What every layer was seen to compute, and whose tokens are known, can be found by others."""
        # of a pass that was interrupted the later layers lack what the first ones have
        length = min(self._written[: self._pool.num_kept_layers])
        for row in self._rows:
            num_known = min(length - row.num_padding, min(len(row.known), len(row.seen)) // TOKEN_BYTES)
            if num_known > 0:
                self._pool.tables.record(row.table, row.known, num_known)

    def _make_room(self, end: int) -> None:
        tables = self._pool.tables
        for row in self._rows:
            copies = tables.extend(row.table, end - row.num_padding) if end > row.num_padding else ()
            if copies is None:
                raise self._full(end - row.num_padding)
            self._copy(copies)

    def _copy(self, copies: tuple[CopyOnWrite, ...]) -> None:
        self._pool.blocks.copy_blocks([copy.source for copy in copies], [copy.target for copy in copies])

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        blocks = self._pool.blocks
        if layer_idx >= self._num_layers:
            raise KvdCacheError(f"layer {layer_idx} of a pool for {self._num_layers} layers")
        wanted = (blocks.num_kv_heads, blocks.head_dim)
        for states in (key_states, value_states):
            if (states.shape[1], states.shape[3]) != wanted or states.dtype != blocks.dtype:
                raise KvdCacheError(
                    f"layer {layer_idx} has {states.shape[1]} heads of {states.shape[3]} values in {states.dtype}; "
                    f"the pool was made for {wanted[0]} of {wanted[1]} in {blocks.dtype}: models whose layers differ are not served"
                )
        self._expect_rows(len(key_states))

    def _expect_rest(self, start: int, num_new: int) -> None:
        """The first pass brings what the cache lacks."""
        if start and not self._is_begun and num_new >= self._prompt_length:
            raise KvdCacheError(
                f"the first forward pass brings the whole prompt, of which the cache holds {start} positions already: pass what follows these, "
                "or reset() the cache (assisted generation passes everything)"
            )

    def _expect_rows(self, num_rows: int) -> None:
        if not self._rows:
            raise KvdCacheError("this cache was closed")
        if num_rows > len(self._rows) and num_rows % len(self._rows) == 0:  # beams, or several answers to a prompt
            self.batch_repeat_interleave(num_rows // len(self._rows))
        if num_rows != len(self._rows):
            raise KvdCacheError(f"{num_rows} rows for a cache of {len(self._rows)} prompts")

    def _full(self, num_tokens: int) -> PoolFullError:
        """There are no blocks for a row of so many positions."""
        stats, tables = self._pool.stats(), self._pool.tables
        num_needed = tables.blocks_for(num_tokens)
        if num_needed > stats["blocks"]:
            return PoolFullError(
                f"a prompt of {num_tokens} tokens needs {num_needed} blocks of {tables.block_size_tokens} tokens, and the pool has {stats['blocks']}: "
                "give it more kv_memory"
            )
        return PoolFullError(
            f"{stats['used_blocks']} of {stats['blocks']} blocks are held by living caches: close some, or give the pool more kv_memory"
        )


class _Row:
    """A sequence: its blocks, the tokens that its maker says are its, those that its keys and values were seen computed from, and how much padding stands before it."""

    __slots__ = ("known", "num_padding", "seen", "table")

    def __init__(self, table: BlockTable, known: PackedTokens, num_padding: int, seen: PackedTokens = b"") -> None:
        self.table = table
        self.known = known
        self.num_padding = num_padding
        self.seen = seen

    def fork(self, tables: CacheManager) -> _Row:
        """Another row that goes on from the same blocks."""
        return _Row(tables.fork(self.table), self.known, self.num_padding, self.seen)


class _PagedLayer:
    """A layer of a ``KvdCache``, for those who look at layers: everything is done by the cache."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    is_initialized = True

    def __init__(self, cache: KvdCache, index: int) -> None:
        self._of = weakref.ref(cache)  # the cache ends with its last user, not with a collection
        self._index = index

    @property
    def _cache(self) -> KvdCache:
        cache = self._of()
        assert cache is not None, "a layer is asked for by its cache"
        return cache

    def lazy_initialization(self, *_: Any) -> None:
        """The pool is there already."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_seq_length(self, *_: Any) -> int:
        return self._cache.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def _prompts_of(input_ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None) -> tuple[list[list[int]], int]:
    """Each row's tokens without its padding, and the length of all with it."""
    rows = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else [list(row) for row in input_ids]
    length = len(rows[0]) if rows else 0
    if attention_mask is None:
        return rows, length
    prompts = []
    for row, mask in zip(rows, attention_mask.tolist(), strict=True):
        num_padding = mask.count(0)
        if any(mask[:num_padding]):
            raise KvdCacheError("padding inside or after a prompt: pad on the left (tokenizer.padding_side = 'left')")
        if num_padding == length > 0:
            raise KvdCacheError("a prompt of nothing but padding")
        prompts.append(row[num_padding:])
    return prompts, length
