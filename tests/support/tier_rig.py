"""Contexts with a host tier, whose copies can be late, fail or be damaged."""

from context_rig import make_config, make_context
from restart_rig import slow_prefill

from mamba_cache import Request
from mamba_cache.cache import EveryNthBlock
from mamba_cache.tiers import LoadPlanner, ModelIdentity, Rates
from mamba_cache.tiers.entry import EntryKind

KV, STATE = EntryKind.KV, EntryKind.STATE
IDENTITY = ModelIdentity(name="model", weights="w")
PROMPT = [(7 * i + i // 3) % 12 + 1 for i in range(61)]  # seven blocks of 8 tokens, and 5 tokens
OTHER = [(5 * i + i // 7) % 12 + 1 for i in range(61)]


def always():
    """A planner that loads every entry."""
    return LoadPlanner(Rates(1e18, 0.0, 1.0), learns=False)


def make_tiered(*, transfers=None, options=None, **changes):
    """A context with small pools and a tier with room for everything."""
    settings = {
        "num_kv_blocks": 14, "max_slots": 3, "num_host_blocks": 60, "num_host_states": 30,
    }  # fmt: skip
    context = make_context(
        make_config(**(settings | changes)), load_planner=always(), **(options or {})
    )
    if transfers is not None:
        install(context, transfers)
    return context


def make_over(*, planner=None, identity=IDENTITY, **changes):
    """A context that writes all states and blocks to a disk or store, and loads every entry."""
    settings = {
        "num_host_blocks": 40,
        "num_host_states": 20,
        "write_on_use": 1,
        "hash_secret": b"secret",
    }
    return make_context(
        make_config(**(settings | changes)),
        identity=identity,
        load_planner=planner or slow_prefill(),
        placement=EveryNthBlock(1),
    )


def ask(context, prompt=PROMPT, **options):
    """Begin a prefetch for a prompt."""
    return context.prefetch(Request(request_id="one", prompt_tokens=prompt), **options)


def match(context, prompt=PROMPT):
    """The match of a request on the GPU and in host memory."""
    return context.match(Request(request_id="one", prompt_tokens=prompt))


def install(context, transfers):
    """Wrap a context's transfers; return the wrapper."""
    tiering = context._tiering
    tiering.transfers = transfers(tiering.transfers)
    return tiering.transfers


def host_stats(context):
    [stats] = context.tier_stats()
    return stats


def cached_rows(context, kind):
    """Rows of the tier with a findable entry."""
    return sorted(context.host_tier[kind]._row_of.values())


def flip(context, kind, row, bit):
    """Flip a bit of a row, in its bytes or its checksums."""
    data = context.host_tier.memory[kind].row(row)
    data[bit // 8] ^= 1 << bit % 8


def flip_all(context, kind, bit):
    """Flip the same bit of each row with an entry."""
    for row in cached_rows(context, kind):
        flip(context, kind, row, bit)


def flip_header(context, kind, row, bit):
    """Flip a bit of a row's header."""
    context.host_tier[kind].headers[row, bit // 8] ^= 1 << bit % 8


class LateTicket:
    """A ticket of copies that ends when ``finish`` is called."""

    def __init__(self, transfers, run):
        self._transfers, self._run = transfers, run
        self._ticket = None

    def finish(self):
        if self._ticket is None:
            self._ticket = self._run()

    def is_done(self):
        return self._ticket is not None

    def wait(self):
        self._transfers.run_until(self)

    def damaged(self):
        return self._ticket.damaged()

    def seconds(self):
        return self._ticket.seconds()

    @property
    def num_bytes(self):
        return self._ticket.num_bytes


class LateTransfers:
    """Copies of a device that runs behind the host, in order for each direction.

    A spill reads its sources when ``run`` reaches it, not when it was enqueued. A load is done at
    once, because the forward waits for it, but its ticket ends later.
    """

    def __init__(self, transfers):
        self._transfers = transfers
        self.queues = {"spill": [], "load": []}

    def spill(self, jobs):
        return self._enqueue("spill", lambda: self._transfers.spill(jobs))

    def load(self, jobs):
        done = self._transfers.load(jobs)
        return self._enqueue("load", lambda: done)

    def _enqueue(self, way, run):
        ticket = LateTicket(self, run)
        self.queues[way].append(ticket)
        return ticket

    def run(self, count):
        """Finish some copies in each direction."""
        for queue in self.queues.values():
            for ticket in queue[:count]:
                ticket.finish()
            del queue[:count]

    def run_until(self, ticket):
        for queue in self.queues.values():
            if ticket in queue:
                while queue and not ticket.is_done():
                    queue.pop(0).finish()

    def wait(self):
        self.run(len(self.queues["spill"]) + len(self.queues["load"]))

    def __getattr__(self, name):
        return getattr(self._transfers, name)


class CopyError(Exception):
    """Raised by a copy."""


class FailingTransfers:
    """Copies that raise after half of their jobs while their direction is in ``fails``."""

    def __init__(self, transfers):
        self._transfers = transfers
        self.fails = set()

    def spill(self, jobs):
        return self._run("spill", jobs)

    def load(self, jobs):
        return self._run("load", jobs)

    def _run(self, way, jobs):
        if way in self.fails:
            getattr(self._transfers, way)(jobs[: len(jobs) // 2])
            raise CopyError
        return getattr(self._transfers, way)(jobs)

    def __getattr__(self, name):
        return getattr(self._transfers, name)
