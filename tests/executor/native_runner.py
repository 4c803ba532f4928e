"""Runners on the native kernels for tests: torch's weights packed, and a model that keeps the logits of every row."""

from __future__ import annotations

import torch

from kvd.executor.kernels.cpu import native
from kvd.executor.models.weights.native import NativeLayer, NativeWeights
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.native_model import NativeModel, build_decoder
from kvd.executor.runner import ModelRunner

THREADS = 2


def pack_weights(weights, dtype):
    """Torch's ``DecoderWeights`` as the native kernels want them."""
    module, threads = native.module(), native.pool(THREADS)

    def matrix(tensor):
        packed = module.Matrix({torch.float32: "f32", torch.bfloat16: "bf16"}[dtype], *tensor.shape)
        packed.pack_rows(threads, 0, tensor.float().contiguous())
        return packed

    def vector(tensor):
        return None if tensor is None else tensor.float().contiguous().numpy()

    embedding = matrix(weights.embedding)
    layers = tuple(
        NativeLayer(
            attention_norm=vector(layer.attention_norm),
            qkv=tuple(matrix(rows) for rows in layer.qkv.split(layer.qkv.shape[0] // 2 + 3)),
            qkv_bias=vector(layer.qkv_bias),
            qk_norm=vector(layer.qk_norm),
            output=matrix(layer.output),
            feed_forward_norm=vector(layer.feed_forward_norm),
            gate_up=(matrix(layer.gate_up),),
            down=matrix(layer.down),
        )
        for layer in weights.layers
    )
    head = embedding if weights.head is weights.embedding else matrix(weights.head)
    return NativeWeights(embedding, layers, vector(weights.final_norm), head)


def native_decoder(spec, weights, dtype, max_model_len, max_step_tokens=64):
    packed = pack_weights(weights, dtype)
    return build_decoder(spec, packed, native.pool(THREADS), dtype=dtype, max_model_len=max_model_len, max_step_tokens=max_step_tokens)


class WatchedModel:
    """A model that keeps, for each row, the logits from which its tokens were taken."""

    def __init__(self, model):
        self.model = model
        self.seen = {}

    warm_up_prompts = NativeModel.warm_up_prompts
    warm_up_rows = NativeModel.warm_up_rows

    def over(self, pool):
        return self.model.over(pool)

    def forward(self, rows):
        return _WatchedHidden(self.model.forward(rows), rows, self.seen)


class _WatchedHidden:
    def __init__(self, hidden, rows, seen):
        self.hidden, self.rows, self.seen = hidden, rows, seen
        self.finite = hidden.finite

    def logits(self, tokens):
        logits = self.hidden.logits(tokens)
        for token, row_logits in zip(tokens, logits, strict=True):
            row = int(self.rows.rows[self.rows.attention.token_rows[token]])
            self.seen.setdefault(row, []).append(row_logits.clone())
        return logits

    def greedy(self, tokens):
        logits = self.logits(tokens)
        token_ids, finite = self.hidden.greedy(tokens)
        assert torch.equal(torch.from_numpy(token_ids)[torch.from_numpy(finite)], logits.argmax(-1)[torch.from_numpy(finite)])
        return token_ids, finite


def native_runner(decoder, spec, num_blocks, kv_type="float32", *, max_rows=8, max_model_len=400):
    """The runner, its pool and its watched model."""
    pool = NativeKvPool(spec, num_blocks, kv_type)
    model = WatchedModel(NativeModel(decoder, pool))
    return ModelRunner(model, pool, spec.vocab_size, max_rows=max_rows, max_model_len=max_model_len), pool, model
