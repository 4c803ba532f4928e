"""The two layers, with a shape that is no multiple of anything, that tests of the executor run on; each changes what it is about."""

from __future__ import annotations

from kvd.executor.models.spec import Architecture, ModelSpec, RopeSpec

LLAMA = ModelSpec(
    architecture=Architecture.LLAMA,
    name="tiny",
    num_layers=2,
    hidden_size=48,
    intermediate_size=72,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_positions=512,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    windows=(0, 0),
    qkv_bias=False,
    qk_norm=False,
    tied_head=False,
    eos_token_ids=(0,),
    weights_format="safetensors",
    weights_dtype="float32",
)
