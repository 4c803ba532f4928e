"""What is read of an adapter's directory, by PEFT's rules, and what is refused, by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lora_directories import CONFIG, make_adapter, module_sizes
from tiny_spec import LLAMA

from kvd.executor.adapter_files import AdapterError, AdapterNotFoundError, adapter_names, read_adapter_files
from kvd.executor.adapters import max_adapter_bytes, plan_adapter

SPEC = replace(LLAMA, num_layers=3, hidden_size=32, intermediate_size=48, head_dim=8, vocab_size=100, windows=(0, 0, 0))
SIZES = module_sizes(num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8)


def plan(directory, sizes=SIZES, *, spec=SPEC, max_rank=16, drop=(), **options):
    """Make an adapter and read it; ``drop`` are names of tensors' ends that the file lacks."""
    make_adapter(directory / "it", {name: size for name, size in sizes.items() if not name.endswith(tuple(drop or ["-"]))}, **options)
    return plan_adapter(read_adapter_files(directory, "it", max_adapter_bytes(spec, max_rank)), spec, max_rank)


def modules(adapter):
    return [(module.layer, module.part, module.first_row, module.num_rows, module.rank, module.scale) for module in adapter.modules]


def test_modules_lie_where_the_fused_products_have_them(tmp_path):
    adapter = plan(tmp_path, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    assert modules(adapter)[:7] == [
        (0, "qkv", 0, 32, 4, 3.0),
        (0, "qkv", 32, 16, 4, 3.0),
        (0, "qkv", 48, 16, 4, 3.0),
        (0, "output", 0, 32, 4, 3.0),
        (0, "gate_up", 0, 48, 4, 3.0),
        (0, "gate_up", 48, 48, 4, 3.0),
        (0, "down", 0, 32, 4, 3.0),
    ]
    assert len(adapter.modules) == 21
    assert adapter.rank == 4
    assert adapter.modules[0].a.shape == (4, 32)
    assert adapter.modules[0].b.shape == (32, 4)
    assert len(adapter.modules[0].b.data) == 4 * 32 * 4


def test_a_gguf_model_takes_the_same_adapters(tmp_path):
    assert modules(plan(tmp_path / "a")) == modules(plan(tmp_path / "b", spec=replace(SPEC, weights_format="gguf")))


def test_rank_and_scale_by_pattern_and_rank_stabilised(tmp_path):
    adapter = plan(
        tmp_path,
        ranks={"model.layers.1.self_attn.q_proj": 2, "model.layers.0.self_attn.v_proj": 16},
        rank_pattern={"layers.1.self_attn.q_proj": 2, "^model.layers.0.self_attn.v_proj": 16},
        alpha_pattern={r"layers\.[12]\.self_attn\.q_proj": 6},
        use_rslora=True,
    )
    found = {(module.layer, module.first_row): (module.rank, module.scale) for module in adapter.modules}
    assert found == {
        (0, 0): (4, 6.0),
        (0, 48): (16, 3.0),
        (1, 0): (2, 6 / 2**0.5),
        (1, 48): (4, 6.0),
        (2, 0): (4, 3.0),
        (2, 48): (4, 6.0),
    }
    assert adapter.rank == 16


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"target_modules": r".*\.[02]\.self_attn\.q_proj"}, [0, 2]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, [1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "layers"}, [2]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["blocks", "layers"]}, [0, 1]),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, [1]),
        ({"target_modules": ["self_attn.q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}, [1, 2]),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, [0, 2]),
    ],
)
def test_targets_by_name_expression_and_layer(tmp_path, options, layers):
    sizes = {name: size for name, size in SIZES.items() if name.endswith("q_proj") and int(name.split(".")[2]) in layers}
    make_adapter(tmp_path / "it", sizes, target_modules=["q_proj"])
    (tmp_path / "it" / "adapter_config.json").write_text(json.dumps({**CONFIG, **options}))
    adapter = plan_adapter(read_adapter_files(tmp_path, "it", 1 << 20), SPEC, 16)
    assert [module.layer for module in adapter.modules] == layers


def test_all_linear_is_all_of_the_layers(tmp_path):
    make_adapter(tmp_path / "it", SIZES, target_modules=[name.rpartition(".")[2] for name in SIZES])
    (tmp_path / "it" / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": "all-linear"}))
    assert len(plan_adapter(read_adapter_files(tmp_path, "it", 1 << 20), SPEC, 16).modules) == 21


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; only CAUSAL_LM"),
        ({"use_dora": True}, "use_dora is set: DoRA"),
        ({"bias": "all"}, "bias is 'all': biases are not adapted"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set: whole modules"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "trained against changed base weights"),
        ({"init_lora_weights": "loftq"}, "trained against changed base weights"),
        ({"from_the_future": 1}, "from_the_future is set, which is not known here"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "it adapts lm_head: only the products"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "it adapts model.embed_tokens"),
        ({"target_modules": ["c_attn"]}, "names no module of the model"),
        ({"target_modules": None}, "names no module of the model"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"target_modules": {"q_proj": 1}}, "a regular expression or a list of names is wanted"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"], "drop": ["o_proj"]}, "o_proj.lora_A.weight is missing"),
        ({"layers_to_transform": "all"}, "layers_to_transform is 'all'"),
        ({"r": 17}, "has rank 17; 1 to 16 are taken"),
        ({"r": 0}, "has rank 0"),
        ({"lora_alpha": "big"}, "lora_alpha is 'big', no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is too large or none"),
        ({"lora_alpha": float("-inf")}, "lora_alpha is too large or none"),
        ({"lora_alpha": 10**400}, "lora_alpha is too large or none"),
        ({"alpha_pattern": {"q_proj": 1e999}}, "lora_alpha is too large or none"),
        ({"target_modules": "(([a-z_.0-9]+)*)*!"}, "it repeats what has repeats or options of its own"),
        ({"rank_pattern": {"(.*a){30}": 4}}, "rank_pattern: .*it repeats what has repeats"),
        ({"exclude_modules": "a?" * 30 + "a" * 30}, "exclude_modules: .*in too many ways"),
        ({"rank_pattern": [1]}, "rank_pattern is"),
        ({"ranks": {"model.layers.0.self_attn.q_proj": 5}}, r"q_proj.lora_A.weight has shape \[5, 32\], this model and configuration want"),
        ({"sizes": {**SIZES, "model.layers.3.self_attn.q_proj": (32, 32)}}, "model.layers.3.self_attn.q_proj.lora_A.weight belongs to no module"),
        ({"sizes": {name: (outputs, 64) for name, (outputs, _) in SIZES.items()}}, r"has shape \[4, 64\]"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path, options, message):
    if not isinstance(options.get("target_modules", []), list):
        make_adapter(tmp_path / "it", SIZES)
        (tmp_path / "it" / "adapter_config.json").write_text(json.dumps({**CONFIG, **options}))
        with pytest.raises(AdapterError, match=message):
            plan_adapter(read_adapter_files(tmp_path, "it", 1 << 20), SPEC, 16)
        return
    with pytest.raises(AdapterError, match=message) as refused:
        plan(tmp_path, **options)
    assert str(refused.value).startswith("adapter it: ")


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva"])
def test_starts_that_leave_the_base_as_it_is(tmp_path, start):
    assert plan(tmp_path, init_lora_weights=start).modules


def test_the_digest_is_of_the_contents(tmp_path):
    digests = set()
    for changes in ({}, {"seed": 1}, {"lora_alpha": 16}):
        digests.add(plan(tmp_path / str(len(digests)), **changes).digest)
    assert len(digests) == 3
    assert plan(tmp_path / "again").digest in digests
    make_adapter(tmp_path / "0" / "other name", SIZES)
    assert read_adapter_files(tmp_path / "0", "it", 1 << 20).digest in digests


def test_what_is_no_adapter(tmp_path):
    make_adapter(tmp_path / "good", SIZES)
    make_adapter(tmp_path / "bad name", SIZES)
    make_adapter(tmp_path / ".hidden", SIZES)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert adapter_names(tmp_path) == ["good"]
    for name in ("missing", "file", "..", "../good", "bad name", ".hidden", "", "x" * 129, "good/."):
        with pytest.raises(AdapterNotFoundError):
            read_adapter_files(tmp_path, name, 1 << 20)
    with pytest.raises(AdapterError, match=r"adapter_config\.json: no such file"):
        read_adapter_files(tmp_path, "empty", 1 << 20)
    with pytest.raises(AdapterError, match="more than 100 bytes"):
        read_adapter_files(tmp_path, "good", 100)
    with pytest.raises(AdapterError, match="adapter_dir"):
        adapter_names(tmp_path / "nowhere")


def test_pickles_and_broken_files(tmp_path):
    it = make_adapter(tmp_path / "it", SIZES)
    weights = (it / "adapter_model.safetensors").read_bytes()
    (it / "adapter_model.safetensors").unlink()
    (it / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterError, match="a pickle, which may run code"):
        read_adapter_files(tmp_path, "it", 1 << 20)
    for damaged in (b"", weights[:7], weights[:100], weights[:-1], b"\xff" * 8 + weights[8:], weights[:8] + b"[" + weights[9:]):
        (it / "adapter_model.safetensors").write_bytes(damaged)
        with pytest.raises(AdapterError, match="damaged safetensors file"):
            read_adapter_files(tmp_path, "it", 1 << 20)
    for shape in (b"[32]", b"[32,1,4]", b"[" + b"9," * 500_000 + b"9]", b"[9" + b"9" * 4000 + b",1]", b'["4",32]', b"[-4,-32]"):
        header = weights[8 : 8 + int.from_bytes(weights[:8], "little")].replace(b"[4, 32]", shape, 1)
        (it / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
        with pytest.raises(AdapterError, match="is no matrix that its file could hold"):
            read_adapter_files(tmp_path, "it", 4 << 20)
    (it / "adapter_model.safetensors").write_bytes(weights.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(AdapterError, match="is stored as 'I32'"):
        read_adapter_files(tmp_path, "it", 1 << 20)
    (it / "adapter_model.safetensors").write_bytes(weights)
    for config, message in (("[1]", "not a JSON object"), ("{", "not JSON"), ("[" * 100_000, "not JSON")):
        (it / "adapter_config.json").write_text(config)
        with pytest.raises(AdapterError, match=message):
            read_adapter_files(tmp_path, "it", 1 << 20)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-5, 99) | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(header=st.dictionaries(st.text(max_size=6), JSON | st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "BF16", 3]), "shape": JSON, "data_offsets": JSON}), max_size=3))  # fmt: skip
def test_any_header_is_read_or_refused(tmp_path_factory, header):
    it = tmp_path_factory.mktemp("any") / "it"
    make_adapter(it, {})
    encoded = json.dumps(header).encode()
    (it / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(64))
    try:
        files = read_adapter_files(it.parent, "it", 1 << 20)
    except AdapterError:
        return
    assert all(len(tensor.data) <= 64 for tensor in files.tensors.values())


@settings(max_examples=80, deadline=None)
@example(changes={"layers_pattern": True, "layers_to_transform": []})
@example(changes={"layers_pattern": 5, "layers_to_transform": [0]})
@example(changes={"layers_pattern": [["layers"]], "layers_to_transform": 0})
@example(changes={"layers_pattern": "(layers)", "layers_to_transform": [0]})
@example(changes={"init_lora_weights": [], "lora_alpha": 10**400})
@given(changes=st.dictionaries(st.sampled_from([*CONFIG, "layers_to_transform", "layers_pattern", "exclude_modules"]), JSON, max_size=3))
def test_any_configuration_is_read_or_refused(tmp_path_factory, changes):
    directory = tmp_path_factory.mktemp("any")
    it = make_adapter(directory / "it", {name: size for name, size in SIZES.items() if ".0." in name})
    (it / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    try:
        plan_adapter(read_adapter_files(directory, "it", 1 << 20), replace(SPEC, num_layers=1, windows=(0,)), 16)
    except AdapterError as error:
        assert len(str(error)) < 1000  # noqa: PT017
