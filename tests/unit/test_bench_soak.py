"""The soak: what its clients do, what it counts, and that it notices what is broken."""

import json
from functools import partial

import numpy as np
import pytest
from clocks import Clock

from mamba_cache.bench import command
from mamba_cache.bench import soak as soak_module
from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.soak import MODELS, Clients, Soak, run_soak
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError, InvariantError
from mamba_cache.reference import Engine, SamplingParams


@pytest.fixture
def clock(monkeypatch):
    """The soak's clocks: each reading is a second later."""
    monkeypatch.setattr(soak_module, "time", Clock(1))


def run_steps(soak, count):
    for _ in range(count):
        soak.step()


def make_soak(model="none", seed=0):
    return Soak(partial(MODELS[model], "cpu"), seed)


class OtherModel:
    """Makes up tokens as ``NoModel`` does, but is to be believed."""

    def __init__(self, device, *, fails_every=0):
        model = NoModel(seed=fails_every)
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.forward = model.forward


def test_the_engine_runs_without_a_model():
    config = CacheConfig(num_kv_blocks=8, max_slots=4, block_size_tokens=16, ssm_chunk_size=16)
    engine = Engine(NoModel(seed=3), config)
    prompts = [[5] * 40, [5] * 40]
    first, second = (engine.generate([p], SamplingParams(max_new_tokens=20))[0] for p in prompts)
    assert (len(first.tokens), second.skipped_tokens) == (20, 32)
    assert first.tokens != second.tokens, "they are made up"


def test_a_forward_fails_when_its_turn_comes():
    config = CacheConfig(num_kv_blocks=8, max_slots=4, block_size_tokens=16, ssm_chunk_size=16)
    engine = Engine(NoModel(fails_every=3), config)
    engine.submit([1] * 20, SamplingParams(max_new_tokens=4))
    for fails in (False, False, True, False, False):
        if fails:
            with pytest.raises(InterruptedError, match="forward 3 fails"):
                engine.step()
        else:
            engine.step()
    assert engine.num_requests == 0


def test_clients_go_on_where_they_were(rng):
    clients = Clients(rng, max_tokens=400)
    contexts, grown, salts = {}, 0, set()
    for _ in range(2_000):
        turn = clients.draw()
        assert 0 < len(turn.prompt) + turn.max_new_tokens <= 400
        assert turn.prompt.dtype == np.int32
        if turn.client is None:
            continue
        salts.add(turn.salt)
        system = turn.client.system
        before = contexts.get(turn.client, system)
        goes_on = (turn.prompt[: len(before)] == before[: len(turn.prompt)]).all()
        assert goes_on or len(turn.prompt) <= len(system) + 100, "or begins anew"
        assert (turn.prompt[: turn.system_tokens] == system).all()
        grown += goes_on and turn.client in contexts
        answer = None if rng.random() < 0.1 else (1, 2, 3)
        clients.end(turn, answer)
        if answer:
            contexts[turn.client] = np.concatenate((turn.prompt, answer))
    assert (grown > 500, len(contexts), len(salts)) == (True, 48, 3)


def test_a_waiting_client_asks_nothing_else(rng):
    clients = Clients(rng, max_tokens=400)
    asking = [turn.client for turn in (clients.draw() for _ in range(500)) if turn.client]
    assert len(asking) == len(set(asking)) == 48


def test_a_soak_does_everything_that_it_promises():
    soak = make_soak()
    run_steps(soak, 450)
    soak._check()
    stats = soak.engine.context.stats()
    happened = {
        "hits": stats.hits,
        "preemptions": stats.preemptions,
        "evicted_blocks": stats.evicted_blocks,
        "evicted_slots": stats.evicted_slots,
        "aborted_steps": stats.aborted_steps,
    }
    names = ("finished", "cancelled", "cancelled_queued", "failed_forwards")
    happened |= {name: soak.counts[name] for name in names}
    assert all(happened.values()), happened
    assert soak.counts["finished"] > 300


def test_a_seed_repeats_a_soak():
    soaks = [make_soak(seed=5), make_soak(seed=5), make_soak(seed=6)]
    for soak in soaks:
        run_steps(soak, 60)
    first, same, other = ((soak.counts, soak.engine.context.stats().hits) for soak in soaks)
    assert first == same != other


@pytest.mark.parametrize(("model", "minutes"), [("none", 1), ("none", 2), ("tiny", 2)])
def test_a_result_holds_figures_and_windows(model, minutes, monkeypatch, clock):
    monkeypatch.setattr(soak_module, "_WINDOWS", 4)
    result = run_soak(minutes=minutes, model=model)
    assert result["broken"] is None
    rate, flat, rss = result["measurements"]
    limits = (200 if model == "none" else None, 0.8, 1) if minutes > 1 else (None, None, None)
    assert (rate["limit"], flat["limit"], rss["limit"]) == limits
    assert rate["value"] > 0
    assert rss["value"] < 100
    assert len(result["windows"]) == 4
    assert result["counts"]["checks"] == len(result["windows"])
    assert sum(w["requests"] for w in result["windows"]) == result["counts"]["finished"] > 0
    assert all(w["rss_mib"] > 50 and w["gpu_mib"] is None for w in result["windows"])
    assert (result["counts"]["checked_outputs"] > 0) == (model == "tiny")


@pytest.mark.parametrize("windows", [1, 120])
def test_the_shortest_soak_serves_one_window(windows, monkeypatch, clock):
    """It divided by zero where no request came to its end: ``--minutes 0.01``."""
    monkeypatch.setattr(soak_module, "_WINDOWS", windows)
    result = run_soak(minutes=0.001)
    assert (result["passed"], result["broken"]) == (True, None)
    assert (len(result["windows"]), result["counts"]["checks"]) == (1, 1)
    rate, rss = result["measurements"]
    assert (rate["value"], rate["limit"], rss["limit"]) == (0, None, None)


def test_an_engine_that_stops_answering_misses_its_limit():
    soak = make_soak()
    soak.windows = [
        soak_module.Window(60.0 * n, 60.0, 1.0, requests, 100.0, None)
        for n, requests in enumerate((500, 500, 0), 1)
    ]
    rate, flat, _ = soak_module._judge(soak, 3, is_rate_limited=True)
    assert (rate.passed, flat.value, flat.passed) == (False, 0, False)


def test_a_leaked_slot_is_found(monkeypatch, clock):
    begin = Engine.step

    def leak(engine):
        engine.context.slot_allocator.pool.free_count -= 1
        return begin(engine)

    monkeypatch.setattr(Engine, "step", leak)
    monkeypatch.setattr(soak_module, "_WINDOWS", 1_000)
    result = run_soak(minutes=1)
    assert (result["passed"], result["measurements"]) == (False, [])
    assert "slots" in result["broken"]


def test_a_wrong_answer_is_found(monkeypatch, clock):
    monkeypatch.setitem(soak_module.MODELS, "none", OtherModel)
    monkeypatch.setattr(soak_module, "_WINDOWS", 4)
    result = run_soak(minutes=1)
    assert not result["passed"]
    assert "without a cache" in result["broken"]


def test_a_request_that_fails_is_found():
    soak = make_soak()
    soak.engine.context.kv_block_allocator.allocate_memory_blocks(550)
    with pytest.raises(InvariantError, match="did not fit"):
        run_steps(soak, 50)


@pytest.mark.parametrize(
    "settings", [*({"minutes": float(text)} for text in ("0", "nan", "inf")), {"model": "big"}]
)
def test_settings_are_checked(settings):
    with pytest.raises(InvalidArgumentError, match=r"minutes must be > 0 and finite, and model"):
        run_soak(**settings)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cuda:99", "meta", "nonsense"])
def test_a_device_that_is_not_there_is_a_line_not_a_traceback(model, device, capsys):
    assert command.main(["soak", "--device", device, "--model", model]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"device must be one that PyTorch finds here, such as 'cpu', got '{device}'" in line


def test_growth_is_limited_after_the_first_minute():
    windows = [
        soak_module.Window(seconds, 5.0, 5.0, 1_000, rss, None)
        for seconds, rss in ((5, 50.0), (60, 100.0), (120, 100.5), (180, 102.0))
    ]
    soak = make_soak()
    for end, passed in ((3, True), (4, False)):
        soak.windows = windows[:end]
        growth = list(soak_module._judge(soak, 10, is_rate_limited=True))[-1]
        assert (growth.limit, growth.passed) == (1, passed)
    assert growth.value == pytest.approx(2.0)


def test_memory_that_goes_up_and_down_does_not_grow():
    soak = make_soak()
    soak.windows = [
        soak_module.Window(5.0 * n, 5.0, 5.0, 1_000, 100.0 + 3 * (n % 3), None)
        for n in range(1, 121)
    ]
    growth = list(soak_module._judge(soak, 10, is_rate_limited=True))[-1]
    assert growth.value == pytest.approx(0)


def test_slowing_down_is_noticed_by_the_time_computed():
    windows = [
        soak_module.Window(60.0 * n, 60.0 * n, cpu, 1_000, 100.0, 10.0 * n)
        for n, cpu in enumerate((1.0, 1.1, 1.3), 1)
    ]
    soak = make_soak()
    soak.windows = windows
    rate, flat, _, gpu = soak_module._judge(soak, 3, is_rate_limited=False)
    assert (rate.value, rate.limit) == (pytest.approx(3_000 / 360), None)
    assert (flat.value, flat.passed) == (pytest.approx(1 / 1.3), False)
    assert (gpu.value, gpu.passed) == (pytest.approx(200), False)


def test_the_command_prints_a_table_or_json(capsys, monkeypatch, clock):
    monkeypatch.setattr(soak_module, "_WINDOWS", 2)
    arguments = ["soak", "--minutes", "1", "--seed", "3"]
    command.main(arguments)
    printed = capsys.readouterr().out
    assert "no invariant broken" in printed
    assert "finished" in printed
    status = command.main([*arguments, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["benchmark"], result["settings"]["seed"]) == ("soak", 3)
    assert status == (0 if result["passed"] else 1)
