"""LoRA on a real daemon in float32: the tokens of transformers with the adapter merged into the weights, alone, together, preempted, forked and restored."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.oracle, pytest.mark.socket, pytest.mark.store, pytest.mark.torch]

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from daemon_process import DaemonProcess  # noqa: E402
from kvd_client import Client, Completion  # noqa: E402
from lora_directories import make_adapter, module_sizes  # noqa: E402
from tiny_models import make_model  # noqa: E402

from kvd.executor.adapter_files import read_adapter_files  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"seed": 1, "target_modules": ALL, "r": 4, "lora_alpha": 8, "size": 0.3},
    "attention": {"seed": 2, "use_rslora": True, "r": 8, "size": 0.3},
    "one": {"seed": 3, "target_modules": ["down_proj"], "r": 2, "size": 0.5},
}
NAMES = ("", *ADAPTERS)
TOLERATED_MARGIN = 1e-4
NUM_TOKENS = 24
MOST_TURNS = 20
PROMPTS = [
    [(11 * seed + 5 * position * (1 + seed % 3)) % 318 + 2 for position in range(length)] for seed, length in enumerate((70, 33, 47))
]


class Reference:
    """transformers, with each adapter's ``scale * B A`` added to the weights in turn."""

    def __init__(self, model: Any, adapters: Path) -> None:
        self._model = model
        self._adapters = adapters

    def check(self, adapter: str, prompt: list[int], answers: list[tuple[int, ...]], what: object) -> None:
        """Every token is the model's most likely one after those before it, up to the first place where two are about as likely."""
        parameters = dict(self._model.named_parameters())
        before = {}
        if adapter:
            files = read_adapter_files(self._adapters, adapter, 1 << 30)
            config = files.config
            scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
            for name in files.tensors:
                if "lora_A" in name:
                    a, b = (
                        torch.frombuffer(bytearray(files.tensors[each].data), dtype=torch.float32).view(files.tensors[each].shape).double()
                        for each in (name, name.replace("lora_A", "lora_B"))
                    )
                    weight = parameters[name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")].data
                    before[weight.data_ptr()] = (weight, weight.clone())
                    weight.copy_(weight.double() + scale * (b @ a))
        try:
            for answer in answers:
                self._check(prompt, answer, (adapter, what))
        finally:
            for weight, old in before.values():
                weight.copy_(old)

    @torch.inference_mode()
    def _check(self, prompt: list[int], answer: tuple[int, ...], what: object) -> None:
        logits = self._model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for token_id, ids, values in zip(answer, best.indices.tolist(), best.values.tolist(), strict=True):
            if token_id != ids[0]:
                assert values[0] - values[1] < TOLERATED_MARGIN, f"{what}: {token_id} of {answer} instead of {ids}, {values}"
                return


def ask(client: Client, adapter: str, prompt: list[int], **options: Any) -> Any:
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **options}
    return client.generate(prompt, adapter=adapter, **options)


def ask_together(process: DaemonProcess, client: Client, jobs: list[tuple[str, int]], salt: str) -> list[Completion]:
    """All of them before the daemon sees the first: more than its pool holds at once."""
    with process.suspended():
        streams = [ask(client, name, PROMPTS[number], cache_salt=salt, stream=True) for name, number in jobs]
    for stream in streams:
        for _ in stream:
            pass
    return [stream.completion for stream in streams]


@pytest.fixture(scope="module", params=["native", pytest.param("torch", marks=pytest.mark.full)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...], Reference]:
    import transformers

    root = tmp_path_factory.mktemp(f"oracle-{request.param}")
    model = make_model(root / "model")
    sizes = module_sizes(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    for name, options in ADAPTERS.items():
        make_adapter(root / "adapters" / name, sizes, **options)
    reference = Reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), root / "adapters")
    flags = (
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--kernels",
        request.param,
        "--adapter-dir",
        str(root / "adapters"),
    )
    return root, flags, reference


def test_every_way_to_the_same_tokens(world: tuple[Path, tuple[str, ...], Reference]) -> None:
    root, flags, reference = world
    jobs = [(name, number) for number in range(len(PROMPTS)) for name in NAMES]
    small_pool = ("--kv-memory", "160KiB", "--max-tokens-per-step", "48", "--max-adapters", "3", "--max-pinned-fraction", "0.7")
    with DaemonProcess(root, *flags, *small_pool, "--checkpoint-interval-s", "0.2", fake=False) as process:
        process.wait_ready()
        with process.client() as client:
            alone = [ask(client, name, PROMPTS[number], cache_salt="alone") for name, number in jobs]
            for turn in range(MOST_TURNS):
                together = ask_together(process, client, jobs, f"together {turn}")
                for (name, number), *answers in zip(jobs, alone, together, strict=True):
                    reference.check(name, PROMPTS[number], [answer.choices[0].token_ids for answer in answers], number)
                if client.stats()["scheduler"]["preemptions"]:
                    break
            else:
                pytest.fail(f"nobody was preempted in {MOST_TURNS} turns")
            assert len({answer.choices[0].token_ids for answer in alone[: len(NAMES)]}) == len(NAMES)
            for name in ADAPTERS:
                forked = ask(client, name, PROMPTS[1], n=3)
                reference.check(name, PROMPTS[1], [choice.token_ids for choice in forked.choices], "forked")
                drafted = ask(client, name, PROMPTS[1], speculation="ngram", num_draft=4)
                reference.check(name, PROMPTS[1], [drafted.choices[0].token_ids], "drafted")
                client.pin(name, PROMPTS[0], adapter=name)
        process.kill()
    with DaemonProcess(root, *flags, "--kv-memory", "4MiB", fake=False) as process:
        process.wait_ready()
        with process.client() as client:
            for name in ADAPTERS:
                answer = ask(client, name, PROMPTS[0])
                assert answer.usage.restored_tokens == 64
                reference.check(name, PROMPTS[0], [answer.choices[0].token_ids], "restored")
            assert ask(client, "", PROMPTS[0]).usage.cached_tokens == 0


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_smollm2_with_adapters_is_that_of_merged_weights(smollm2: Path, tmp_path: Path) -> None:
    import transformers

    sizes = module_sizes(num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    for name, options in ADAPTERS.items():
        make_adapter(tmp_path / "adapters" / name, sizes, **{**options, "size": 0.02 if name == "everything" else 0.1})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    reference = Reference(loaded, tmp_path / "adapters")
    prompts = [[7 * position % 9000 + 500 + seed for position in range(20 + 40 * seed)] for seed in range(2)]
    jobs = [(name, number) for number in range(len(prompts)) for name in NAMES]
    with DaemonProcess(
        tmp_path, "--model", str(smollm2), "--dtype", "float32", "--adapter-dir", str(tmp_path / "adapters"), fake=False
    ) as process:
        process.wait_ready()
        with process.client() as client, ThreadPoolExecutor(len(jobs)) as pool:
            together = list(pool.map(lambda job: ask(client, job[0], prompts[job[1]], cache_salt="together"), jobs))
            for (name, number), answer in zip(jobs, together, strict=True):
                reference.check(name, prompts[number], [answer.choices[0].token_ids], number)
                assert ask(client, name, prompts[number]).choices[0].token_ids == answer.choices[0].token_ids
