"""Adapters in the forward pass: what merged weights give, and the same bits whatever shares the step."""

from __future__ import annotations

import json
from array import array

import pytest

pytestmark = pytest.mark.torch

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from lora_directories import CONFIG, make_adapter, module_sizes, write_safetensors  # noqa: E402
from native_runner import native_decoder, native_runner  # noqa: E402
from tiny_spec import LLAMA as TINY  # noqa: E402

from kvd.executor.adapter_files import AdapterError, read_adapter_files  # noqa: E402
from kvd.executor.adapters import max_adapter_bytes, plan_adapter  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402
from kvd.executor.models.decoder import Decoder, DecoderWeights, LayerWeights, allocate_weights  # noqa: E402
from kvd.executor.models.spec import Architecture  # noqa: E402
from kvd.executor.native_adapters import pack_adapter  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel  # noqa: E402
from kvd.executor.native_runner import NativeRunner  # noqa: E402
from kvd.executor.row_adapters import AdapterMissingError, tensor_values  # noqa: E402
from kvd.executor.runner import TorchRunner  # noqa: E402
from kvd.executor.torch_adapters import TorchAdapter  # noqa: E402
from kvd.step import BlockCopy, ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)
LLAMA = replace(TINY, intermediate_size=150)
QWEN = replace(LLAMA, architecture=Architecture.QWEN2, qkv_bias=True, head_dim=32, num_kv_heads=1)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "everything": {"seed": 1, "target_modules": ALL, "r": 3, "size": 0.2},
    "attention": {"seed": 2, "use_rslora": True, "r": 8, "size": 0.3},
    "one-layer": {"seed": 3, "target_modules": ["down_proj"], "r": 2, "size": 0.4},
}
PROMPTS = {name: [(7 * seed + 3 * position) % VOCAB for position in range(length)] for seed, (name, length) in enumerate(
    [("base", 70), ("everything", 83), ("attention", 41), ("one-layer", 130), ("base too", 20), ("everything too", 9)]
)}  # fmt: skip
ADAPTER_OF = {"everything": "everything", "attention": "attention", "one-layer": "one-layer", "everything too": "everything"}


def make_weights(spec, seed=7):
    weights = allocate_weights(spec, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [tensor for name in LayerWeights.__slots__ if (tensor := getattr(layer, name)) is not None]
    for tensor in tensors:
        tensor.normal_(0, 1.0 if tensor is weights.embedding else 0.15, generator=generator).add_(1.0 if tensor.dim() == 1 else 0.0)
    return weights


def merged(weights, adapter):
    """The weights with ``scale * B A`` added, in float64 between."""
    layers = [{name: getattr(layer, name) for name in LayerWeights.__slots__} for layer in weights.layers]
    for module in adapter.modules:
        a, b = (torch.from_numpy(tensor_values(tensor, "test")).double() for tensor in (module.a, module.b))
        old = layers[module.layer][module.part]
        new = old.double().clone()
        new[module.first_row : module.first_row + module.num_rows] += module.scale * (b @ a)
        layers[module.layer][module.part] = new.float()
    return DecoderWeights(weights.embedding, tuple(LayerWeights(**layer) for layer in layers), weights.final_norm, weights.head)


class World:
    """One model and its adapters, in torch and packed."""

    def __init__(self, directory, spec, dtype):
        self.spec, self.dtype = spec, dtype
        self.weights = make_weights(spec)
        names = {"num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"}
        sizes = module_sizes(**{name: getattr(spec, name) for name in names})
        self.adapters = {}
        for name, options in ADAPTERS.items():
            make_adapter(directory / name, sizes, **options)
            self.adapters[name] = plan_adapter(read_adapter_files(directory, name, max_adapter_bytes(spec, 8)), spec, 8)
        self.decoder = native_decoder(spec, self.weights, dtype, 400)
        self.packed = {name: pack_adapter(each, self.decoder, str(dtype).removeprefix("torch.")) for name, each in self.adapters.items()}

    def native(self):
        runner, _, model = native_runner(self.decoder, self.spec, 128, "float32" if self.dtype is torch.float32 else "bfloat16")
        return self.equipped(runner, self.packed), model.seen

    def equipped(self, runner, adapters):
        for name, adapter in adapters.items():
            runner.adapters.install(name.encode(), adapter)
        return runner

    def torch(self, weights=None):
        seen = []

        class Watched(Decoder):
            def logits(self, hidden):
                seen.append(super().logits(hidden))
                return seen[-1].clone()

        pool = KvPool(self.spec, 64, 16, torch.float32, "cpu")
        runner = TorchRunner(Watched(self.spec, weights or self.weights), self.spec, pool, max_rows=8, max_model_len=400)
        made = {name: TorchAdapter(each, dtype=torch.float32, device=torch.device("cpu")) for name, each in self.adapters.items()}
        return self.equipped(runner, made), seen


@pytest.fixture(
    scope="module", params=[(LLAMA, torch.float32), (QWEN, torch.float32), (LLAMA, torch.bfloat16)], ids=["llama", "qwen", "bfloat16"]
)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("adapters"), *request.param)


def start(name, *, row=0, first_block=0, num_tokens=None, adapter=None, **more):
    tokens = PROMPTS[name]
    blocks = tuple(range(first_block, first_block + 12))
    digest = ADAPTER_OF.get(name, "") if adapter is None else adapter
    return StartedRow(row, pack_tokens(tokens), len(tokens), 0, num_tokens or len(tokens), blocks, GREEDY, adapter=digest.encode(), **more)


def step(started=(), rows=(), num_tokens=(), **more):
    return SchedulerOutput(3, tuple(started), ContinuedRows(list(rows), list(num_tokens), [0] * (len(rows) + 1), []), **more)


def alone(world, name, count=6, **more):
    """Ids and logits of a prompt and its output by itself."""
    runner, seen = world.native()
    token_ids = runner.execute(step([start(name, **more)])).token_ids
    for _ in range(count):
        token_ids += runner.execute(step(rows=[0], num_tokens=[1])).token_ids
    return token_ids, seen[0]


def same_bits(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ADAPTERS)
def test_native_and_torch_give_what_merged_weights_give(world, name):
    if world.dtype is not torch.float32:
        pytest.skip("merged weights are others in bfloat16")
    expected, expected_logits = world.torch(merged(world.weights, world.adapters[name]))
    token_ids = expected.execute(step([start(name, adapter="")])).token_ids
    own, own_logits = world.torch()
    assert own.execute(step([start(name)])).token_ids == token_ids
    native_ids, native_logits = alone(world, name, count=5)
    for _ in range(5):
        token_ids += expected.execute(step(rows=[0], num_tokens=[1])).token_ids
        own.execute(step(rows=[0], num_tokens=[1]))
    assert native_ids == token_ids
    scale = torch.cat(expected_logits).abs().max()
    torch.testing.assert_close(torch.cat(own_logits), torch.cat(expected_logits), atol=float(scale) * 2e-6, rtol=1e-5)
    torch.testing.assert_close(torch.stack(native_logits), torch.cat(expected_logits), atol=float(scale) * 2e-6, rtol=1e-5)
    base_ids, _ = alone(world, name, count=5, adapter="")
    assert base_ids != native_ids


def test_a_batch_of_adapters_and_base_gives_each_row_its_own_bits(world):
    runner, seen = world.native()
    rows = {name: row for row, name in enumerate(PROMPTS)}
    runner.execute(step([start(name, row=row, first_block=12 * row) for name, row in rows.items()]))
    for _ in range(6):
        runner.execute(step(rows=list(rows.values()), num_tokens=[1] * len(rows)))
    for name, row in rows.items():
        assert same_bits(seen[row], alone(world, name)[1]), name


def test_chunks_of_a_prompt_give_the_bits_of_the_whole(world):
    runner, seen = world.native()
    runner.execute(step([start("one-layer", num_tokens=37), start("base", row=1, first_block=20)]))
    runner.execute(step(rows=[1, 0], num_tokens=[1, 60]))
    runner.execute(step(rows=[0], num_tokens=[33]))
    for _ in range(6):
        runner.execute(step(rows=[0], num_tokens=[1]))
    assert same_bits(seen[0], alone(world, "one-layer")[1])


def test_a_row_that_begins_anew_has_the_adapter_that_it_begins_with(world):
    runner, seen = world.native()
    runner.execute(step([start("everything")]))
    runner.execute(step([start("everything", adapter="")], released=(0,)))
    runner.execute(step([start("everything", adapter="attention")], released=(0,)))
    assert same_bits(seen[0], [alone(world, "everything", 0, adapter=each)[1][0] for each in ("everything", "", "attention")])


def test_a_fork_goes_on_with_its_adapter(world):
    runner, seen = world.native()
    (token_id,) = runner.execute(step([start("everything")])).token_ids
    tokens = [*PROMPTS["everything"], token_id]
    fork = StartedRow(1, pack_tokens(tokens), len(tokens) - 1, len(tokens) - 1, 1, (0, 1, 2, 3, 4, 20), GREEDY, adapter=b"everything")
    runner.execute(step([fork], rows=[0], num_tokens=[1], copies=(BlockCopy(5, 20, 5, 1),)))
    assert torch.equal(seen[1][0], seen[0][1])
    assert same_bits(seen[0], alone(world, "everything", 1)[1])


def test_steps_in_the_queue_run_with_their_adapters_even_when_these_have_left(world):
    pool = NativeKvPool(world.spec, 128, "float32" if world.dtype is torch.float32 else "bfloat16")
    runner = NativeRunner(NativeModel(world.decoder, pool), pool, VOCAB, max_rows=8, max_model_len=400)
    world.equipped(
        runner, {name: pack_adapter(each, world.decoder, str(world.dtype).removeprefix("torch.")) for name, each in world.adapters.items()}
    )
    rows = {name: row for row, name in enumerate(PROMPTS)}
    pending = [runner.launch(step([start(name, row=row, first_block=12 * row) for name, row in rows.items()]))]
    for name in world.adapters:
        runner.adapters.remove(name.encode())
    pending += [runner.launch(step(rows=list(rows.values()), num_tokens=[1] * len(rows))) for _ in range(3)]
    outputs = [each.result() for each in pending]
    for name, row in rows.items():
        assert [output.token_ids[output.rows.index(row)] for output in outputs] == alone(world, name, 3)[0], name
    with pytest.raises(AdapterMissingError, match="not loaded"):
        runner.launch(step([start("everything")], released=(1,)))


def test_values_that_are_not_finite_are_refused(world, tmp_path):
    sizes = module_sizes(num_layers=2, hidden_size=48, intermediate_size=150, num_heads=4, num_kv_heads=2, head_dim=16)
    for name, options in (("broken", {"size": float("nan")}), ("scaled", {"size": 1e36, "lora_alpha": 1_000_000})):
        make_adapter(tmp_path / name, sizes, **options)
        adapter = plan_adapter(read_adapter_files(tmp_path, name, 1 << 20), LLAMA, 8)
        with pytest.raises(AdapterError, match="not finite"):
            TorchAdapter(adapter, dtype=torch.float32, device=torch.device("cpu"))
        if world.spec is LLAMA:
            with pytest.raises(AdapterError, match="not finite"):
                pack_adapter(adapter, world.decoder, str(world.dtype).removeprefix("torch."))


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65520.0), (torch.bfloat16, 3.4e38)])
def test_what_the_models_type_can_not_hold_is_refused(tmp_path, dtype, value):
    sizes = {"model.layers.0.self_attn.q_proj": (64, 48)}
    make_adapter(tmp_path / "it", sizes, target_modules=["q_proj"])
    write_safetensors(
        tmp_path / "it" / "adapter_model.safetensors",
        {
            f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": (shape, array("f", [number] * (shape[0] * shape[1])))
            for half, shape, number in (("A", (4, 48), value), ("B", (64, 4), 1.0))
        },
    )
    (tmp_path / "it" / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": r".*\.0\..*q_proj"}))
    adapter = plan_adapter(read_adapter_files(tmp_path, "it", 1 << 20), LLAMA, 8)
    TorchAdapter(adapter, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(AdapterError, match=f"not finite, or not in {str(dtype).removeprefix('torch.')}"):
        TorchAdapter(adapter, dtype=dtype, device=torch.device("cpu"))


def test_matrices_that_do_not_fit_the_product_are_refused():
    decoder = native_decoder(LLAMA, make_weights(LLAMA), torch.float32, 400)
    module = native.module()
    adapter = module.Adapter(decoder)
    down, up = module.Matrix("f32", 4, 48), module.Matrix("f32", 64, 4)
    adapter.set(decoder, 1, "qkv", down, [(64, 0, up)])
    for layer, part, a, b in (
        (2, "qkv", down, [(0, 0, up)]),
        (0, "down", down, [(0, 0, up)]),
        (0, "qkv", down, [(65, 0, up)]),
        (0, "qkv", down, [(0, 1, up)]),
        (0, "head", down, [(0, 0, up)]),
        (0, "qkv", module.Matrix("bf16", 4, 48), [(0, 0, up)]),
        (0, "qkv", down, [(0, 0, module.Matrix("bf16", 64, 4))]),
    ):
        with pytest.raises(ValueError, match=r"adapter of a layer|down:|up:|no such product"):
            adapter.set(decoder, layer, part, a, b)
