"""What the pages quote of measurements is what the runs kept in docs/benchmarks measured.

A quote is made from the newest run of its kind, spelled as the page spells it; where one is not
found, the page has other figures than the run. Pages of measurements must hold no further figure.
Tables that have a test of their own (replays, times to first token, block tables) are held there.
"""

import json
import math
import re
from collections.abc import Callable, Iterator

import pytest
from pages import DOCS, text_of

from mamba_cache.integrations.model_shapes import load_shape

RESULTS = DOCS / "benchmarks"


def run(prefix: str) -> dict:
    """The newest run whose file begins so."""
    path = max(RESULTS.glob(f"{prefix}-2*.json"))
    return json.loads(path.read_text(encoding="utf-8"))


def values(prefix: str) -> dict[str, float]:
    """What it measured, by name."""
    return {one["name"]: one["value"] for one in run(prefix)["measurements"]}


def details(prefix: str) -> dict[str, str]:
    """What its figures were derived from, by name."""
    return {one["name"]: one["detail"] for one in run(prefix)["measurements"]}


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


SHARED, LENGTHS, ROLLOUTS = (
    "64 requests, 128 new", "64 requests, 16 to 512 new", "8 x 16 rollouts",
)  # fmt: skip
LIMITS = {SHARED: "2 times", LENGTHS: "3 times", ROLLOUTS: "3 times"}
STEP_OF_64 = "generate_batch: decode step of 64 requests, host time included"


def batches() -> Iterator[str]:
    titles = {
        SHARED: "128 new", LENGTHS: "16 to 512 new", ROLLOUTS: "8 prompts with 16 answers each",
    }  # fmt: skip
    for model, prefix in (
        ("Nemotron-H-8B", "serve-nemotron-h-8b-h200"),
        ("Granite-4-like", "serve-granite-4-like-h200"),
    ):
        found = values(prefix)
        for workload, title in titles.items():
            ways = "generate, one by one", "static batches of generate", "generate_batch"
            names = [f"{way}, {workload}: new tokens" for way in ways]
            if names[0] in found:
                over = found[f"generate_batch over static batches of generate, {workload}"]
                speeds = (f"{found[name]:,.0f}" for name in names)
                yield row(f"{model}, {title}", *speeds, f"{over:.1f} times", LIMITS[workload])
    found = values("serve-nemotron-h-8b-h200")
    times = found[f"generate_batch over generate, one by one, {SHARED}"]
    yield f"128 new tokens each are {times:.0f} times as fast as one by one (20 wanted)"
    yield f"takes {found[STEP_OF_64]:.1f} ms (12 ms)"
    yield f"its decode step takes {values('serve-granite-4-like-h200')[STEP_OF_64]:.1f} ms"
    found = values("serve-granite-4-like-compiled-h200")
    speeds = [f"{found[f'generate_batch, {each}: new tokens']:,.0f}" for each in titles]
    yield f"gives {speeds[0]}, {speeds[1]} and {speeds[2]} new tokens per second"
    name = "generate_batch over static batches of generate"
    over = [f"{found[f'{name}, {each}']:.1f}" for each in titles]
    yield f"{over[0]}, {over[1]} and {over[2]} times what static batches"
    yield f"kernels and {found[STEP_OF_64]:.1f} ms"


def compiled_parts() -> Iterator[str]:
    before, after = (
        values(f"serve-granite-4-like{which}-h200")[STEP_OF_64] for which in ("", "-compiled")
    )
    yield f"shortens a step from {before:.1f} to {after:.1f} ms on an H200"


def host_memory() -> Iterator[str]:
    found, derived = values("tiers-copies-h200"), details("tiers-copies-h200")
    load, spill = (found[f"{way} 16 states: share of a plain copy's GB/s"] for way in MOVES)
    yield f"16 states move at {load:.2f} and {spill:.2f} of its GB/s, at least 0.95 times wanted"
    names = [f"{way} a prefix of 4,096 tokens: share of a plain copy's GB/s" for way in MOVES]
    load, spill = (found[name] for name in names)
    taken = float(derived[names[0]].split(" ms")[0])
    yield f"is loaded at {load:.2f} and spilled at {spill:.2f} times: of its {taken:.1f} ms"
    states, prefix = (
        found[f"load {what}: verification"] for what in ("16 states", "a prefix of 4,096 tokens")
    )
    yield f"takes {states:.1f}% of the load of 16 states and {prefix:.1f}% of that prefix"
    yield from first_tokens()
    steps = "a decode step of Nemotron-H-8B", "a step of matrix products"
    runs = values("tiers-h200"), found
    for title, under in {
        "plain copies of as many bytes, both ways": "plain copies of as many bytes",
        "spills": "spills",
        "loads": "loads",
        "spills, and a load before each step": "spills and a load before each step",
        "spills and loads": "spills and loads",
    }.items():
        names = (f"p99 of {step} under saturated {under}" for step in steps)
        yield row(title, *(f"{of[name]:.2f}" for of, name in zip(runs, names, strict=True)))
    alone, products = (
        of[f"p99 of {step} under saturated spills"]
        for of, step in zip((details("tiers-h200"), derived), steps, strict=True)
    )
    [alone] = re.findall(r"without ([\d.]+) ms", alone)
    yield f"64 requests in one CUDA graph, takes {float(alone):.0f} ms"
    [rate] = re.findall(r"reads ([\d.]+) TB/s", products)
    yield f"reads its weights at {float(rate):.1f} TB/s"
    before, ready = values("tiers-few-programs-h200"), values("tiers-ready-h200")
    ratio = before["p99 of a step under saturated spills and loads"]
    yield f"the last row was {ratio:.2f} for"
    name = "64 GiB of tier: until all of it is there"
    yield f"64 GiB of pinned memory were there after {before[name] / 1e3:.1f} s on"
    yield f"and after {ready[name] / 1e3:.1f} s on"
    again = before["64 GiB of tier, of memory used before: until all of it is there"]
    yield f"The same memory a second time takes {again / 1e3:.1f} s"
    waits = [
        value / 1e3
        for each in (before, ready)
        for name, value in each.items()
        if "GiB" in name and name.endswith("until the first request is served")
    ]
    yield f"The first request is served after {min(waits):.1f} to {max(waits):.1f} s"


def first_tokens() -> Iterator[str]:
    name = "first token after 4,096 tokens from {}: over one from the GPU"
    disk, memory = values("tiers-disk-h200"), values("tiers-memory-files-h200")
    yield f"takes {memory[name.format('the host')]:.2f} times one from the GPU if it comes"
    rate, share = disk["the disk alone"], disk["prefetch: share of the disk's GB/s"]
    yield f"It takes {disk[name.format('the disk')]:.2f} times"
    yield f"gives {rate:.2f} GB/s, past the page cache: a prefetch reads at {share:.2f} times"
    yield f"which give {memory['the disk alone']:.1f} GB/s"
    yield f"it takes {memory[name.format('the disk')]:.2f} times"


MOVES = "load", "spill"


def deciding() -> Iterator[str]:
    ratio = values("control-epyc")["the same, 1,000,000 blocks over 1,000"]
    yield f"takes {ratio:.1f} times as long in a pool of a million blocks as in one of a thousand"


def price_of_a_step() -> Iterator[str]:
    found, derived = values("step-epyc"), details("step-epyc")
    ratios = {64: ("0.6", "1.2"), 256: ("0.35", "0.7"), 1024: ("0.25", "0.5")}
    for count in (1, 64, 256, 1024):
        name = f"the same over a plain loop, {count:,} requests"
        now, loop = re.fullmatch(r"([\d,]+ us), loop ([\d,]+ us)", derived[name]).groups()
        drafts = found[f"{name} and 3 drafts each"]
        if count == 1:
            taken = found["begin and commit a step, 1 requests and 3 drafts each"]
            limits = "70 us", f"{taken:.0f} us", "140 us"
        else:
            limits = f"{ratios[count][0]} times", f"{drafts:.2f}", f"{ratios[count][1]} times"
        yield row(f"{count:,}", loop, now, f"{found[name]:.2f}", *limits)
    short, long, fine = (
        found[f"add, step and finish {what}"]
        for what in (
            SHORT_LIFE.partition("finish ")[2],
            "32,768 tokens, block 256",
            "32,768 tokens, block 16",
        )
    )
    yield f"takes {short:.2f} ms for 512 tokens, at most 0.2 ms wanted"
    yield f"{long:.2f} ms for 32,768 tokens in blocks of 256, at most 1.2 ms wanted"
    yield f"{fine:.1f} ms in blocks of 16, at most 4 ms wanted"
    parts = dict(part.split() for part in derived[SHORT_LIFE].split(", "))
    yield (
        f"adding the prompt takes {parts['add']} ms, beginning the step {parts['begin']}, "
        f"committing it {parts['commit']}, and finishing {parts['finish']}"
    )


SHORT_LIFE = "add, step and finish 512 tokens, block 256"


def stores() -> Iterator[str]:
    [one] = [each for each in run("store-epyc")["measurements"] if "p99 of a step" in each["name"]]
    yield (
        f"The slowest hundredth of {one['runs']:,} steps takes {one['value']:.3f} times as long "
        f"with the store as without, at most 1.03 wanted"
    )
    median = values("store-epyc")[one["name"].replace("p99", "median")]
    yield f"the median {median:.3f} times"


def dead_stores() -> Iterator[str]:
    for result in run("store-waits-epyc")["results"]:
        longest = result["longest_of_each_time_ms"]
        figures = " / ".join(f"{longest[name]:.1f}" for name in ("p50", "p99", "max"))
        yield row(result["fault"], str(result["times"]), figures)
    [again] = run("store-waits-holder-xeon")["results"]
    longest = again["longest_of_each_time_ms"]
    figures = " / ".join(f"{longest[name]:.1f}" for name in ("p50", "p99", "max"))
    yield row(f"{again['fault']}, one thread of a tier reads", str(again["times"]), figures)
    [several] = run("store-waits-holder-16-cpus")["results"]
    longest = several["longest_of_each_time_ms"]
    figures = " / ".join(f"{longest[name]:.1f}" for name in ("p50", "p99", "max"))
    yield row(f"{several['fault']}, 16 CPUs", str(several["times"]), figures)
    least = run("store-waits-epyc")["results"][-1]["added_ms"]["Context"]["max"]
    yield f"alone stayed below {math.ceil(10 * least) / 10} ms there"


def decisions() -> Iterator[str]:
    [one] = records("replayed-trace-decisions")
    mean, worst = f"{one['decision_us_mean']:.0f} us", f"{one['decision_us_worst'] / 1e3:.1f} ms"
    yield f"says {mean} of CPU time in the mean at 200 slots, and {worst} at the worst"


def a_dead_holder() -> Iterator[str]:
    longest = values("store-waits-epyc")[
        "Mooncake holder killed: the most that it added to a request"
    ]
    yield f"added {longest:.1f} ms to a request on two CPUs, at most 50 ms wanted"
    again = values("store-waits-holder-xeon")[
        "Mooncake holder killed: the most that it added to a request"
    ]
    yield f"and {again:.1f} ms with one thread that reads"


def records(prefix: str) -> list[dict]:
    return run(prefix)["records"]


def replays() -> Iterator[str]:
    """The sentences around the tables, which tests/unit/test_bench_replay.py holds."""
    for workload in ("agents", "conversations"):
        mean = run(f"replay-{workload}")["workload"]["mean_prompt_tokens"]
        yield f"{round(mean, -3):,.0f}"
    trace = run("replayed-trace")
    yield f"what the first {trace['workload']['requests']:,} requests of a trace"
    yield f"of {round(trace['workload']['mean_prompt_tokens'], -2):,.0f} prompt tokens in the mean"
    yield f"{trace['records'][0]['kv_hit_rate']:.1%} of them cached"
    adaptive = run("replayed-trace-adaptive")
    requests, fifty = adaptive["workload"]["requests"], adaptive["records"][0]
    yield f"({requests:,} requests, {fifty['kv_hit_rate']:.1%} of their tokens cached"
    proposed = fifty["saved_states"] + fifty["refused_states"]
    yield f"Of {proposed:,} states proposed for {fifty['slots']} slots"
    yield f"{fifty['refused_states']:,} were refused"
    for option, hints in (("0", "right"), ("0.2", "fifth-wrong"), ("0.5", "random")):
        [record] = records(f"replayed-trace-hints-{hints}")
        yield f"`--slots 50 --hints-wrong {option}` | {record['token_hit_rate']:.1%} |"
    host, unlimited = records("replayed-trace-host")
    costs = run("replayed-trace-host")["costs"]
    yield (
        f"({costs['prefill_rate']:,.0f} tokens a second; {costs['host_rate']:.0f} GB/s from host "
        f"memory, {costs['disk_rate']:.0f} from the disk)"
    )
    yield f"{host['uncached_ttft_ms_mean']:,.0f} ms in the mean without a cache"
    below = (unlimited["token_hit_rate"] - host["token_hit_rate"]) * 100
    yield f"50 slots with 500 rows do not, by {below:.1f} points"
    for workload in ("agents", "mixed"):
        rates: dict[str, dict[int, float]] = {}
        for record in records(f"drawn-{workload}"):
            rates.setdefault(record["policy"], {})[record["slots"]] = record["token_hit_rate"]
        best = {
            slots: max(of[slots] for policy, of in rates.items() if policy != "adaptive")
            for slots in rates["adaptive"]
        }
        yield row(workload, "adaptive", *(f"{rate:.1%}" for rate in rates["adaptive"].values()))
        yield row("the best of LRU, consumed and score", *(f"{rate:.1%}" for rate in best.values()))


def missed_limits() -> Iterator[str]:
    qwen, nemotron, granite = (
        values(f"ttft-{family}-kernels-h200")
        for family in ("qwen3-next-like", "nemotron-h-8b", "granite-4-like")
    )
    worst = "miss over plain, 4,096 + 256 tokens"
    others = [
        value
        for found in (qwen, nemotron, granite)
        for name, value in found.items()
        if re.match(r"miss over plain, ", name) and (found, name) != (qwen, worst)
    ]
    yield (
        f"takes {qwen[worst]:.2f} times what plain transformers takes instead of at most 1.05 "
        f"times (the others {min(others):.2f} to {max(others):.2f})"
    )
    first = nemotron["first prompt of an empty cache over plain, 16,128 + 256 tokens"]
    yield f"of 16,128 after a reset {first:.2f} times"
    beyond = [
        value
        for found in (qwen, nemotron, granite)
        for name, value in found.items()
        if name.startswith("hit beyond") and value > 3
    ]
    yield f"a hit {min(beyond):.1f} to {max(beyond):.1f} ms more than a bare forward"
    chat = nemotron["chat of 2 users and 8 turns, over the new tokens alone"]
    yield f"and a chat {chat:.2f} times its bare forwards"
    copies = values("copy-h200")
    few, many = (
        copies[f"Nemotron-H-8B, bf16 SSM, {count} slots: faster than a loop"] for count in (4, 16)
    )
    assert f"{few:.1f}" in (f"{many:.1f}", "2.6")
    yield f"are copied {many:.1f} times as fast as by a loop, not 2.8 times"
    over = values("ttft-qwen3-next-like-h200")["hit over that forward"]
    yield f"takes {over:.2f} times its forward, not 1.1 times"
    one, two = (
        values(f"ttft-nemotron-h-8b-{tokens}-h200")["hit, faster than plain"]
        for tokens in ("1k", "2k")
    )
    yield f"a hit is {one:.1f} or {two:.1f} times as fast as plain transformers, not 14 times"


def sizes_of_states() -> Iterator[str]:
    """Of Nemotron-H-8B, with windows in bfloat16, and states too or in float32."""
    window, numbers = 10240 * 4 * 2, 128 * 64 * 128
    half, single = (24 * (window + numbers * itemsize) for itemsize in (2, 4))
    yield f"{half / 1e6:.0f} MB each, or {single / 1e6:.0f} MB if its kernels keep"


def windows_and_states() -> Iterator[str]:
    yield f"{24 * (10240 * 4 * 2 + 128 * 64 * 128 * 4) / 2**20:.1f} MiB a request"
    found = values("align-h200")
    steps = [value for name, value in found.items() if "no boundary crossed" in name]
    yield f"takes {min(steps):.1f} to {max(steps):.1f} us on the device"


def bursts() -> Iterator[str]:
    before = values("tiers-few-programs-h200")["p99 of a step under saturated spills and loads"]
    now = values("tiers-copies-h200")[
        "p99 of a step of matrix products under saturated spills and loads"
    ]
    yield f"was {before:.2f} times that of a step alone then, and is {now:.2f} times"


def long_prompt() -> Iterator[str]:
    peak = values("ttft-nemotron-h-8b-16k-h200")["peak memory of a miss"]
    yield f"peaked at {peak:.1f} GiB"


def int8_slots() -> Iterator[str]:
    window, numbers, columns = 10240 * 4 * 2, 128 * 64 * 128, 128 * 128
    int8, fp32, bf16 = (
        24 * (window + state) for state in (numbers + 4 * columns, 4 * numbers, 2 * numbers)
    )
    yield (
        f"a slot takes {int8 / 2**20:.1f} MiB instead of {fp32 / 2**20:.1f} MiB (fp32, "
        f"{fp32 / int8:.1f} times the slots) or {bf16 / 2**20:.1f} MiB (bf16, "
        f"{bf16 / int8:.1f} times)"
    )
    found, derived = values("quantization-epyc"), details("quantization-epyc")
    for rounding in ("nearest", "stochastic"):
        states = f"int8, {rounding}: error of 6 states"
        logits = f"int8, {rounding}: logits after a hit, largest error over their deviation, median"
        largest = derived[logits].split(";")[0].removeprefix("largest ")
        yield row(
            rounding,
            f"{found[f'{states}, root mean square over the states' + chr(39)]:.2%}",
            f"{found[f'{states}, largest of a head over its largest']:.2%}",
            f"{found[logits]:.5f}, {largest}",
        )


def plans() -> Iterator[str]:
    for record in records("plan-h200"):
        besides = (record["allocated_bytes"] - record["planned_bytes"]) / 2**20
        counts = (record[name] for name in ("max_slots", "num_kv_blocks", "planned_bytes"))
        cells = [f"{each:,}" for each in (*counts, record["allocated_bytes"])]
        yield row(record["model"], *cells, f"{besides:.1f} MiB")


def copies() -> Iterator[str]:
    found, derived = values("copy-h200"), details("copy-h200")
    for tensor, kind in (("fp32", "float32"), ("bf16", "bfloat16")):
        for rounding in ("nearest", "stochastic"):
            name = f"int8 slots, torch.{kind}, {rounding}, 16 slots"
            shares = [f"{found[f'{name}: {way}: {SHARE}']:.2f}" for way in ("store", "restore")]
            title = f"{tensor} SSM, {'to nearest' if rounding == 'nearest' else rounding}"
            extraction = found[f"int8 slots, torch.{kind}: extract 64 checkpoints: {SHARE}"]
            yield row(title, *shares, f"{extraction:.2f}" if rounding == "nearest" else "").replace(
                "|  |", "| |"
            )
    fp32, bf16 = (
        found[f"extract 64 checkpoints of 16,384 tokens, torch.{kind}: {SHARE}"]
        for kind in ("float32", "bfloat16")
    )
    yield f"{fp32:.2f} of a flat copy's GB/s with fp32 SSM states, {bf16:.2f} with bf16"
    times = {
        kind: [
            [
                found[f"Nemotron-H-8B, {kind} SSM, {count} slots: faster than {way}"]
                for count in (4, 16)
            ]
            for way in ("indexing", "a loop")
        ]
        for kind in ("fp32", "bf16")
    }
    (indexing, loop), (narrow_indexing, narrow_loop) = times.values()
    yield (
        f"takes {indexing[0]:.1f} and {indexing[1]:.1f} times as long with fp32 and "
        f"{narrow_indexing[0]:.1f} and {narrow_indexing[1]:.1f} times with bf16, a loop of `copy_` "
        f"{loop[0]:.1f} and {loop[1]:.1f} times, and {narrow_loop[0]:.2f} and "
        f"{narrow_loop[1]:.2f} times"
    )
    flat = [
        re.search(r"a flat copy is ([\d.]+)x faster", derived[name])[1]
        for name in (f"Nemotron-H-8B, bf16 SSM, {n} slots: faster than a loop" for n in (4, 16))
    ]
    yield f"2.8 times, is missed: even a flat copy is only {flat[0]} and {flat[1]} times faster"
    yield f"A state of 0.5 MiB takes {found['small state, 1 slot']:.1f} us"
    on_device, in_lists = (
        [
            found[f"small state, {count} slots: host time of a call, rows {where}"]
            for count in (1, 4, 16)
        ]
        for where in ("on the device", "in lists on the host")
    )
    yield f"takes {min(on_device):.0f} to {max(on_device):.0f} us of the host's time"
    yield f"on the host, {min(in_lists):.0f} to {max(in_lists):.0f} us"
    extraction = found[
        "extract 64 checkpoints of 16,384 tokens, torch.float32: host time of a call"
    ]
    yield f"An extraction takes {extraction:.0f} us"
    [step] = [text for name, text in derived.items() if name.startswith("a step of 16,384 tokens")]
    with_, without = (round(float(each)) for each in re.findall(r"([\d.]+) ms", step))
    yield f"takes {with_} ms with and without" if with_ == without else f"{with_} and {without} ms"
    for count in (1, 4, 16, 64):
        names = [f"Nemotron-H-8B, {kind} SSM, {count} slots: {OVER}" for kind in ("fp32", "bf16")]
        one, two = (float(derived[name].split(" us")[0].replace(",", "")) for name in names)
        spelled = [f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us" for us in (one, two)]
        pattern = rf"\| {count} \| {spelled[0]} \| [\d. to]+ \| {spelled[1]} \| [\d. to]+ \|"
        [text] = re.findall(pattern, text_of("explanation/kernels.md"))
        for name, cell in zip(names, (text.split(" | ")[2], text.split(" | ")[4]), strict=True):
            low, *high = map(float, cell.strip(" |").split(" to "))
            assert low <= round(found[name], 2) <= (high or [low])[0], (name, cell)
        yield text


SHARE, OVER = "share of the flat copy's GB/s", "time over a flat copy's"


def expectations() -> Iterator[str]:
    shape = load_shape("nemotron-h-8b")
    state = shape.state_spec.bytes_per_slot
    tokens = state / shape.kv_spec.bytes_per_block(1)
    yield f"takes {state / 2**20:.1f} MiB, as much as the keys and values of {tokens:,.0f} tokens"


def hits_beside_bare_forwards() -> Iterator[str]:
    families = "qwen3-next-like", "nemotron-h-8b", "granite-4-like"
    beyond = [
        value
        for family in families
        for name, value in values(f"ttft-{family}-kernels-h200").items()
        if name.startswith("hit beyond the new tokens alone")
    ]
    yield f"a hit took up to {max(beyond):.1f} ms more than the bare forward of its new tokens"


def conversations() -> Iterator[str]:
    found, broken = values("conversations"), records("conversations")
    yield f"{found['calls judged']:,} calls with {found['prompt tokens']:,} tokens of prompts"
    yield f"of which {found['skipped tokens']:,} were skipped in {found['hits']:,} hits"
    yield f"memory ran out in {found['memory runs out']} calls"
    yield f"the forward raised in {found['forward raises']}, weights changed in"
    yield f"weights changed in {found['weights change']}."
    assert (found["wrong"], found["ties"]) == (0, 0)
    last = max(record["found_in_conversation"] for record in broken)
    yield f"in one of {len(broken)} ways"
    yield f"the last one in conversation {last}."


def prefix_caches() -> Iterator[str]:
    found: dict[tuple, dict[str, list[dict]]] = {}
    for record in records("prefix-replay"):
        is_ample = record["kv_blocks"] is None
        ways = found.setdefault((record["requests"], record["limit"], is_ample), {})
        ways.setdefault(record["policy"], []).append(record)
    for (source, limit, is_ample), ways in found.items():
        title = {"conversations": "drawn conversations"}.get(source, source)
        title += f" ({limit:,})" if (source, limit) == ("agents", 3000) else ""
        runs = ways["consumed"]
        blocks = "ample" if is_ample else " / ".join(f"{each['kv_blocks']:,}" for each in runs)
        rates = (
            " / ".join(f"{each['token_hit_rate'] * 100:.1f}" for each in ways[policy]) + "%"
            for policy in ("consumed", "adaptive")
        )
        yield row(title, " / ".join(str(each["slots"]) for each in runs), blocks, *rates)


def readme() -> Iterator[str]:
    found = values("serve-nemotron-h-8b-h200")
    batched, static, single = (
        f"{found[f'{way}, {LENGTHS}: new tokens']:,.0f}"
        for way in ("generate_batch", "static batches of generate", "generate, one by one")
    )
    yield (
        f"{batched} new tokens/s by `generate_batch`; static batches of `generate` {static}, "
        f"one by one {single}"
    )
    state = load_shape("nemotron-h-8b").state_spec.bytes_per_slot / 2**20
    yield f"Copying 16 states of {state:.1f} MiB into slots"


def routers() -> Iterator[str]:
    versions = run("router-rates-xeon")["versions"]
    names = {
        "vllm-router": f"vllm-router {versions['vllm-router']}",
        "dynamo": f"Dynamo {versions['ai-dynamo-runtime']}",
    }
    many, few = (
        [one for one in records("router-rates-xeon") if one["conversations"] == count]
        for count in (40, 8)
    )
    columns = "", *names.values(), "round robin", "one replica of twice the size"
    yield row(*columns).replace("|  |", "| |")
    assert [one["router"] for one in many] == [*names, "round robin", "none"]
    yield row("token hit rate", *(f"{one['hit rate']:.1%}" for one in many))
    assert {one["predicted rightly"] for one in many} == {1.0, None}
    yield "With both routers every continued prompt skipped what was predicted"
    yield f"with {many[0]['conversations']} conversations of three turns"
    yield f"{many[0]['slots']} slots"
    predicted = {(one["router"], one["mode"]): one["predicted rightly"] for one in few}
    modes = {"resident": 0.0, "reachable": 1.0}
    assert predicted == {(name, mode): modes[mode] for name in names for mode in modes}
    assert {one["slots"] for one in few} == {4}
    yield (
        f"With four slots for eight conversations {' and '.join(names.values())} predicted none "
        "of the continued prompts right in mode `resident`, and all of them in mode `reachable`"
    )


def faults_of_tiers() -> Iterator[str]:
    yield f"`{run('tier-faults-xeon')['command']}`"
    for one in records("tier-faults-xeon"):
        yield row(*one.values())


def faults_put_in() -> Iterator[str]:
    yield f"`{run('broken-tiers-xeon')['command']}`"
    for one in records("broken-tiers-xeon"):
        yield row(*one.values())


def kills() -> Iterator[str]:
    titles = {"valkey": "Valkey", "mooncake": "Mooncake", "holder": "holder, one of two"}
    columns = (
        "loads: right",
        "loads: others, by reason",
        "wrong",
        "hung",
        "waited in vain: p50 / p99 / max ms",
        "a wait of 50 ms with no store: p50 / p99 / max",
        "entries again after: p50 / max s",
    )
    for one in records("store-kills-xeon"):
        killed = titles.get(one["killed"], one["killed"])
        yield row(titles[one["store"]], killed, *(one[name] for name in columns))
        assert not one["ended by itself"]
    [count] = {one["kills"] for one in records("store-kills-xeon")}
    yield f"killed, {count} times"


def speeds_of_stores() -> Iterator[str]:
    for one in records("store-rates-xeon"):
        store, version, *figures = one.values()
        yield row(f"{store} {version.partition('.post')[0]}", *figures)
    for check in run("store-rates-xeon")["doctor"]:
        if check["name"] != "store":  # it names the port
            yield f"{check['name']} {check['status']} {check['detail']}"


def steps_beside_a_store() -> Iterator[str]:
    [one] = [each for each in run("store-epyc")["measurements"] if "p99 of a step" in each["name"]]
    yield f"p99 {one['value']:.3f} times that of the same processes without a store"
    yield f"in [{one['runs']:,} steps]"


QUOTES: list[tuple[str, Callable[[], Iterator[str]]]] = [
    ("../README.md", readme),
    ("benchmarks/expect.md", expectations),
    *(
        ("benchmarks/index.md", part)
        for part in (
            a_dead_holder, batches, host_memory, deciding, price_of_a_step, replays, stores,
            missed_limits,
        )
    ),
    ("explanation/architecture.md", bursts),
    ("explanation/eviction.md", decisions),
    *(
        ("explanation/faults.md", part)
        for part in (
            faults_of_tiers, faults_put_in, conversations,
        )
    ),
    ("explanation/kernels.md", copies),
    ("how-to/batching.md", compiled_parts),
    ("how-to/batching.md", sizes_of_states),
    ("how-to/block_tables.md", windows_and_states),
    ("how-to/choosing_budgets.md", plans),
    ("how-to/choosing_policies.md", prefix_caches),
    ("how-to/quantised_slots.md", int8_slots),
    ("how-to/scale_out.md", routers),
    *(
        ("how-to/stores.md", part)
        for part in (dead_stores, kills, speeds_of_stores, steps_beside_a_store)
    ),
    ("how-to/transformers.md", hits_beside_bare_forwards),
    ("how-to/transformers.md", long_prompt),
]  # fmt: skip


@pytest.mark.parametrize(("page", "quotes"), QUOTES)
def test_the_page_quotes_the_run_that_is_kept(page: str, quotes: Callable) -> None:
    text = text_of(page)
    made = list(quotes())
    assert made
    assert [quote for quote in made if quote not in text] == []


FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)? ?(?:%|ms|us|s|times|x|points|[KMGT]i?B(?:/s)?|/s)(?!\w)")
"""A number with a unit: what was measured, unless it is a setting or a limit."""

SETTINGS = (
    "64 GiB of pinned memory",
    "80 GiB for states and KV",
    "entries of 96 MiB",
    "a step waits for 8 ms",
    "At least 97% was wanted",
    "at most 5 % wanted",
    "at most 1.03 times wanted",
    "was taken with checksums of 16 MiB at once",
    "with 32 MiB at once, as they are now",
    "From a disk at most 1.25 times are wanted",
    "10000 ms wanted",
    "at most 1.05 times as long",
    "at most 3 ms more than",
    "instead of 3 ms",
    "chunks* of at most 64 KiB",
    "moves 4 KiB of the chunk",
    "programs of 4 KiB",
    "read for 10 s, or",
    "a lease of 10 s:",
    "at most 512 MB; this package's are 2 MiB",
    "16 chunks of 4 MiB, finds",
    "asks for one of them 200 times",
    "48 chunks of 4 MiB",
    "waits for 30 ms at most",
    "So 50 ms hold",
    "50 ms hold (2026",
    "their steps 8 ms of waiting",
    "silent for 50 ms",
    "a plain wait of 50 ms",
    "asked again every 0.5 s",
    "piece by piece: of at most 32 MiB",
    "64 bits of checksum for each 64 KiB",
    "A 64-bit checksum of each 64 KiB",
    "the first 64 KiB of",
    "draws one tile of 4 KiB",
    "`kv_cache_gb=4` is 4 GiB",
    "in parts of 4 MiB, as many",
    "asked again after 5 s",
    "is asked of it for 5 s",
    "*Slots in use* at 100%",
    "must be at least k + 1 times",
    "it assumes 20 GB/s, 0.3 ms and",
    "how long 64 GiB take",
    "Chunks of 2 MiB, then",
    "at most 2 s each;",
    "asked every 5 s whether",
    "at most 10 s, and computes",
    "the limit is 10 s.",
)
HELD_ELSEWHERE = [
    re.compile(r"<!-- times with kernels.*?<!-- end of times -->"),
    re.compile(r"\| (?:`\w+` )?\| `\w+SlotPolicy` (?:\| [\d.]+% )+\|"),
    re.compile(r"\| [\w-]+ \| [\d,]+ \+ \d+ \| [^|]* \| [\d,]+ ms \| [\d,]+ ms \| [\d,]+ ms \|"),
    re.compile(r"\| slots \| host \|.*?\| unlimited \|[^A-Z]*?ms \|"),
    re.compile(r"\| 50, 200, 800 slots, KV unlimited \| .*?\| [^|]*? \|"),
    re.compile(r"\| `--cache-gb 80 --bound` \| [^|]* \|"),
    re.compile(r"\| (?:Time to first|Copying|Evicting|Admitting|Prefill skipped)[^|]*\|[^|]*\|"),
]
"""By test_docs.py, test_bench_replay.py, test_readme.py and test_prefix_reuse_example.py."""


def further_figures(page: str, text: str) -> list[str]:
    """Figures of a page's text that no quote holds, and no table that is held elsewhere."""
    for part in HELD_ELSEWHERE:
        text = part.sub(" ", text)
    held = [quote for name, quotes in QUOTES if name == page for quote in quotes()]
    for quote in (*held, *SETTINGS):
        text = text.replace(quote, " ")
    return FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text))


GENERATED = "_build", "results"
PAGES = ["../README.md"] + [
    str(path.relative_to(DOCS))
    for path in sorted(DOCS.rglob("*.md"))
    if not any(folder in path.parts for folder in GENERATED)
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_figure_that_nothing_holds(page: str) -> None:
    text = text_of(page)
    assert further_figures(page, text) == []
    assert further_figures(page, f"{text} It takes 1.7 times as long, 5 us.") == [
        "1.7 times",
        "5 us",
    ]


COUNTS = re.compile(r"^\|.*\| *[\d,.]+(?: \([\d,.]+ to [\d,.]+\))? *\|", re.M)
"""A row of a table in which a cell is a figure."""


@pytest.mark.parametrize(
    "page",
    ["explanation/faults.md", "how-to/stores.md"],
)
def test_tables_have_no_row_of_figures_that_nothing_holds(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    held = {quote for name, quotes in QUOTES if name == page for quote in quotes()}

    def unheld(text: str) -> list[str]:
        rows = [line for line in text.splitlines() if COUNTS.match(line)]
        return [line for line in rows if " ".join(line.split()) not in held]

    assert unheld(text) == []
    assert unheld(f"{text}\n| one more | 17 |\n") == ["| one more | 17 |"]
