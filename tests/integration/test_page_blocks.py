"""Every block of Python on the pages runs, in order, as a reader pastes it.

What a reader has already (a model, a context, prompts) the tests supply; what is this package's the
page must import. Budgets of a GPU, ports and paths are exchanged. Blocks with output (`testcode`)
are Sphinx's, and the README's have tests/unit/test_readme.py.
"""

import ast
import contextlib
import importlib
import inspect
import re
import runpy
import signal
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import torch
from align_rig import SlotWorld, engine_config
from align_states import Group, Model
from context_rig import BLOCK, MODEL, add, make_config, make_context, run_step
from pages import blocks, names_of_pages, python_blocks
from sources import ROOT

import mamba_cache
from mamba_cache import Request
from mamba_cache.events import Stored
from mamba_cache.reference.engine import compute_prefix

MEGATRON = "tests/integration/test_megatron_real.py::test_the_guides_lines_run"
SERVER = "tests/integration/test_transformers_serve.py::test_the_guides_lines_run"

FOREIGN_CODE = (
    "tests/integration/test_transformers_foreign_code.py"
    "::test_each_call_takes_a_variant_and_bypasses_without_one"
)

ELSEWHERE = {
    ("explanation/guarantees.md", "variant="): FOREIGN_CODE,
    ("index.md", "PrefixCache("): "the README's and the quickstart's, shortened",
    ("how-to/batching.md", "GRPOConfig("): "tests/integration/test_trl.py::test_three_steps",
    ("how-to/megatron.md", "megatron.install()"): MEGATRON,
    ("how-to/megatron.md", "megatron.installed()"): MEGATRON,
    ("how-to/megatron.md", "slots.check_invariants()"): MEGATRON,
    ("how-to/serve.md", "OpenAI("): SERVER,
    ("how-to/serve.md", "serve.install("): SERVER,
}
"""Blocks that need an engine, and the tests that run them there; or why nobody does."""


def reason_not_to_run(page: str, code: str) -> str | None:
    reasons = [why for (name, needle), why in ELSEWHERE.items() if name == page and needle in code]
    assert len(reasons) <= 1
    return reasons[0] if reasons else None


def is_of_the_package(value: object) -> bool:
    named = inspect.isclass(value) or inspect.isfunction(value)
    return named and value.__module__.partition(".")[0] == mamba_cache.__name__


class Page:
    """A page whose blocks run one after the other, for a reader who began above."""

    def __init__(self, path: str, /, **names: object) -> None:
        assert [key for key, value in names.items() if is_of_the_package(value)] == []
        self.path, self.names = path, {"__name__": path, **names}
        self._left = [code for code in python_blocks(path) if not reason_not_to_run(path, code)]
        for code in blocks(path, r"\{testcode\}|\{testsetup\}"):
            for line in ast.parse(code).body:
                if isinstance(line, ast.Import | ast.ImportFrom):
                    self._execute(ast.unparse(line))

    def run(self, exchanged: dict[str, str] | None = None) -> SimpleNamespace:
        """Runs the next block with some of its text exchanged; returns the names by then."""
        code = self._left.pop(0)
        for old, new in (exchanged or {}).items():
            assert old in code
            code = code.replace(old, new)
        self._execute(code)
        return SimpleNamespace(**self.names)

    def end(self) -> None:
        assert self._left == []

    def _execute(self, code: str) -> None:
        exec(compile(code, self.path, "exec"), self.names)


@pytest.fixture
def page() -> Iterator[Callable[..., Page]]:
    """Opens a page, all of whose blocks must have been run in the end."""
    opened: list[Page] = []

    def open_page(path: str, /, **names: object) -> Page:
        opened.append(Page(path, **names))
        return opened[-1]

    yield open_page
    for one in opened:
        one.end()


def test_every_block_of_python_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    opened = set(re.findall(r'page\(\s*"([\w/-]+\.md)"', here))
    left = [
        (name, code)
        for name in names_of_pages()
        for code in python_blocks(name)
        if name not in opened and not reason_not_to_run(name, code)
    ]
    assert left == []
    for name, needle in ELSEWHERE:
        assert sum(needle in code for code in python_blocks(name)) == 1, (name, needle)


# Pages about transformers.


def small(*settings: str) -> dict[str, str]:
    """Budgets of a GPU, exchanged for those of a tiny model."""
    return {setting: re.sub(r"=\d+", "=0.01", setting) for setting in settings}


class Encoding(dict):
    """What a tokenizer returns; all of it is on the CPU."""

    def to(self, device: object) -> "Encoding":
        return self


class Tokenizer:
    """A word a token, as far as the pages go."""

    def __call__(self, text: str, return_tensors: str | None = None, **_: object) -> dict:
        ids = [3 + len(word) for word in text.split()]
        if return_tensors is None:
            return {"input_ids": ids}
        ids = torch.tensor([ids])
        return Encoding(input_ids=ids, attention_mask=torch.ones_like(ids))

    def decode(self, tokens: object) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **options):
        text = "".join(f"<{m['role']}> {m['content']} </> " for m in messages)
        text += "<assistant> " * add_generation_prompt
        return self(text, options.get("return_tensors")) if tokenize else text


TEXT = "a state is saved where it is likely that another prompt will go on from it " * 3


@pytest.fixture
def transformers_rig():
    pytest.importorskip("transformers", reason="needs the extra transformers")
    import transformers_rig  # noqa: PLC0415 - it needs transformers

    return transformers_rig


@pytest.fixture
def model(transformers_rig):
    model = transformers_rig.make_model("granite 4")
    model.generation_config.eos_token_id = None
    return model


BLOCKS_OF_8 = {"kv_cache_gb=8": "kv_cache_gb=0.01, block_size_tokens=8"}


def test_the_quickstart(page, model, monkeypatch, capsys) -> None:
    transformers = importlib.import_module("transformers")
    for loader, loaded in (("AutoTokenizer", Tokenizer()), ("AutoModelForCausalLM", model)):
        stand_in = SimpleNamespace(from_pretrained=lambda *_, loaded=loaded, **__: loaded)
        monkeypatch.setattr(transformers, loader, stand_in)
    opened = page("quickstart.md", MODEL="a model")
    names = opened.run(small("mamba_cache_gb=4") | BLOCKS_OF_8)
    skipped = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert skipped[0] == 0
    assert min(skipped[1:]) > 150
    names.cache.close()


def test_the_page_on_transformers(page, model, generator) -> None:
    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, 97, (1, length), generator=generator)

    system = {"role": "system", "content": TEXT}
    opened = page(
        "how-to/transformers.md", model=model, tokenizer=Tokenizer(), prompt=TEXT,
        inputs={"input_ids": ids(40)}, num_system_tokens=24, system_ids=ids(24),
        messages=[system, {"role": "user", "content": "why is that so"}],
        input_ids=ids(30), next_ids=ids(1),
    )  # fmt: skip
    budgets = small("mamba_cache_gb=4") | BLOCKS_OF_8
    names = opened.run(budgets)
    assert names.output.shape == (1, len(TEXT.split()) + 64)
    saved = names.cache.stats().saved_states
    opened.run()
    assert names.cache.stats().saved_states > saved
    names = opened.run()
    assert names.ends[0] == len(TEXT.split()) + 2
    assert opened.run().pin.num_tokens == 24
    names = opened.run()
    whole = torch.cat([names.input_ids, names.next_ids], dim=1)
    expected = model(whole).logits[:, -1:]
    torch.testing.assert_close(names.logits, expected, rtol=0, atol=1e-4)
    names.cache.close()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of its compiler
def test_the_page_on_batches(page, model) -> None:
    texts = [f"{TEXT} and number {number}" for number in range(3)]
    opened = page("how-to/batching.md", model=model, tokenizer=Tokenizer(), texts=texts)
    names = opened.run(
        small("mamba_cache_gb=8")
        | {"kv_cache_gb=16": "kv_cache_gb=0.01, block_size_tokens=8", "=64": "=4", "=128": "=9"}
    )
    assert [len(output.generated_tokens) for output in names.outputs.values()] == [9] * 3
    assert opened.run().stats.eager_steps > 0
    opened.run()  # compiles nothing before it is called
    names.cache.close()
    opened.names.update(context=waiting_context(), my_kv_cache=torch.zeros(2, 300))
    assert len(opened.run().forks.blocks) == 2


# Pages about an engine of the reader's.


def waiting_context(**options: object):
    """A context in which a request decodes."""
    context = make_context(**options)
    add(context, "a", [1, 2, 3])
    run_step(context)
    return context


def test_the_page_on_tiers(page, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shape = MODEL.config
    opened = page(
        "how-to/tiers.md", model=model, tokens={"a": 3},
        request=Request(request_id="b", prompt_tokens=[1, 2, 3]),
        state_spec=shape.state_spec(MODEL.dtype), kv_spec=shape.kv_spec(MODEL.dtype),
    )  # fmt: skip
    names = opened.run(small("mamba_cache_gb=4", "host_cache_gb=16") | BLOCKS_OF_8)
    assert [folder.name[:4] for folder in (tmp_path / "cache").glob("mc1*")] == ["mc1-"]
    names.cache.close()
    names = opened.run(
        small("host_cache_gb=64", "disk_cache_gb=500")
        | {"/var/cache/mamba": str(tmp_path / "var"), '"cuda"': '"cpu"'}
        | {"num_kv_blocks=20_000": "num_kv_blocks=9", "max_slots=200": "max_slots=9"}
    )
    assert sorted(each.name[:4] for each in (tmp_path / "var").iterdir()) == ["mc1-", "secr"]
    names.context.close()
    opened.names["context"] = context = waiting_context()
    context.begin_step()
    assert opened.run().preempted == ()
    assert opened.run().context.status("b")
    opened.names["config"] = make_config(num_host_blocks=4, num_host_states=4)
    names = opened.run({'"cuda"': '"cpu"'})
    assert [row.name for row in names.context.tier_stats()] == ["host"]
    names.context.close()


def test_the_page_on_several_ranks(page, tmp_path) -> None:
    shape = MODEL.config
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    try:
        opened = page(
            "how-to/distributed.md", torch=torch, gb=1, pipeline_group=None, secret=b"1" * 32,
            num_kv_blocks=9, ranks=[0], name="tiny", revision="1", rank=0, size=1,
            tensor_parallel_group=None, state_spec=shape.state_spec(MODEL.dtype),
            kv_spec=shape.kv_spec(MODEL.dtype),
        )  # fmt: skip
        assert opened.run({"num_slots = ": "num_slots = 9 or "}).config.hash_secret == b"1" * 32
        assert opened.run({'"cuda"': '"cpu"'}).context.config.max_slots == 9
    finally:
        torch.distributed.destroy_process_group()


def test_the_page_on_policies(page) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "custom_policy.py"))
    opened = page(
        "how-to/policies.md", config=make_config(),
        state_spec=MODEL.config.state_spec(MODEL.dtype),
        PopularSlotPolicy=example["PopularSlotPolicy"],  # included above the block
    )  # fmt: skip
    assert opened.run().context.slot_allocator.policy


def test_the_page_on_graphs(page) -> None:
    """Where a graph would replay the hand-over of each layer, the host replays it."""
    context = make_context()
    layers = MODEL.config.state_spec(MODEL.dtype).tensors[0].num_layers
    add(context, "a", [number % 12 for number in range(3 * BLOCK + 1)])

    def hand_over(*_: object) -> None:
        shape = MODEL.config
        states = torch.zeros(16, *shape.state_spec(MODEL.dtype).tensors[1].shape).double()
        for layer in range(layers):
            inputs = torch.zeros(64, shape.conv_dim).double()
            context.extract_checkpoint_states(layer, states, inputs, None)

    opened = page(
        "how-to/kernels.md", warnings=warnings, mamba_cache=mamba_cache, context=context,
        torch=SimpleNamespace(cuda=SimpleNamespace(graph=contextlib.nullcontext)),
        model=hand_over, graph=SimpleNamespace(replay=lambda: None), num_layers=layers,
    )  # fmt: skip
    with warnings.catch_warnings():
        opened.run()
        opened.run({"commit_step(...)": 'commit_step({"a": 1})'})
        assert context.stats().saved_states == 1
        add(context, "b", [number % 11 for number in range(3 * BLOCK + 1)])
        opened.names["metadata"] = context.begin_step().metadata
        opened.run()
        context.commit_step([1, 1])
    assert context.stats().unwritten_states == 0


def test_the_page_on_block_tables(page, rng) -> None:
    world = SlotWorld(Model(8, groups=(Group(num_layers=1),), max_requests=4), rng)
    on_device = world.on_device
    tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=table) for table in world.by_slot],
        input_block_tables=world.tables,
    )
    batch = SimpleNamespace(
        num_reqs=1, idx_mapping=on_device([3]), query_start_loc=on_device([0, 1]),
        num_reqs_after_padding=1, num_tokens=1, num_tokens_after_padding=1,
        num_scheduled_tokens=np.array([1]), num_draft_tokens_per_req=np.array([0]),
        is_prefilling_np=np.zeros(1, dtype=bool),
        seq_lens_cpu_upper_bound=torch.ones(1, dtype=torch.int32),
    )  # fmt: skip
    opened = page(
        "how-to/vllm.md", device="cpu", model=world.state._model, slot=3, batch=batch,
        engine_config=engine_config(world.model, world.states.forward_context()),
        kv_cache_config=world.config, block_tables=tables,
        new_request=SimpleNamespace(num_computed_tokens=8), num_sampled=on_device([1]),
        num_computed_tokens=on_device([0, 0, 0, 8]),
    )  # fmt: skip
    assert opened.run().metadata.num_accepted_tokens.tolist() == [1]


# Settings, stores and what watches.


def test_the_page_on_int8_slots(page) -> None:
    assert page("how-to/settings.md").run().config.slot_quantization == "int8"


def test_the_page_on_traces(page, tmp_path) -> None:
    context = make_context()
    opened = page("benchmarks/index.md", context=context)
    with contextlib.chdir(tmp_path):
        log = opened.run().log
        context.add_request(Request(request_id="a", prompt_tokens=[1] * 20))
        log.close()
    assert (log.num_written, log.num_errors) == (1, 0)
    assert Path(tmp_path, "requests.jsonl").exists()


def test_the_page_on_stores_and_routers(page, monkeypatch) -> None:
    opened_urls, closed = [], []
    store = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(
        mamba_cache.stores, "open_store", lambda url: opened_urls.append(url) or store
    )
    monkeypatch.setattr(signal, "sigwait", lambda wanted: wanted)
    context = make_context()
    opened = page("how-to/stores.md", context=context)
    opened.run()
    assert (len(opened_urls), closed) == (1, [True])
    pytest.importorskip("zmq", reason="needs the extra events")
    names = opened.run({":5557": ":*", ":5558": ":*"})
    assert context.listeners.wants(Stored)
    names.publisher.close()


def test_the_page_on_hits(page, model, monkeypatch) -> None:
    context = make_context(make_config(verify_hits=1.0))
    prompt = [number % 12 for number in range(3 * BLOCK + 1)]
    for name in "ab":
        add(context, name, prompt)
        run_step(context)
        context.finish(name)

    def compute(hit: object) -> object:
        assert list(hit.tokens) == prompt[: 3 * BLOCK]
        return compute_prefix(MODEL, context, hit)

    opened = page("how-to/hits.md", model=model, context=context, compute=compute)
    opened.run(small("mamba_cache_gb=4") | BLOCKS_OF_8).cache.close()
    opened.run()
    stats = context.verification_stats()
    assert (stats.verified, dict(stats.differences)) == (1, {"state": 0, "kv": 0})
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    names = opened.run(
        {"start_http_server(9000)": "SERVED = start_http_server(0, '127.0.0.1', registry=REGISTRY)"}
    )
    server, thread = names.SERVED
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        assert b'mamba_cache_slots{cache="main"' in answer.read()
    server.shutdown()
    server.server_close()
    thread.join()
    opened.run()
