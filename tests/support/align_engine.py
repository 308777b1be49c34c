"""A minimal engine with states in block tables: it draws the steps that decide copies."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from align_states import NUM_COLUMNS, Model


def cdiv(a, b):
    return -(-a // b)


@dataclass
class Request:
    """A request of the engine's scheduler."""

    req_id: str
    slot: int
    num_computed_tokens: int
    block_ids: list


@dataclass
class Step:
    """One step, the same for all worlds."""

    model: Model
    batch: list = field(default_factory=list)
    num_scheduled: dict = field(default_factory=dict)
    drafts: dict = field(default_factory=dict)
    sampled: dict = field(default_factory=dict)
    added: list = field(default_factory=list)
    finished: set = field(default_factory=set)
    preempted: set | None = None
    resumed: set = field(default_factory=set)

    @property
    def req_ids(self):
        return [request.req_id for request in self.batch]

    def accepted(self, request):
        return max(self.sampled[request.req_id], 1)

    def running_column(self, request):
        tokens = request.num_computed_tokens + self.num_scheduled[request.req_id]
        return cdiv(tokens, self.model.block_size) - 1

    def tokens_after(self, request):
        rejected = len(self.drafts.get(request.req_id, ())) + 1 - self.accepted(request)
        return request.num_computed_tokens + self.num_scheduled[request.req_id] - rejected

    def scheduler_output(self):
        return SimpleNamespace(
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=self.resumed),
            num_scheduled_tokens=self.num_scheduled,
            scheduled_spec_decode_tokens=self.drafts,
        )


class Engine:
    """Draws steps, in which requests arrive, run, are preempted, resumed and finished."""

    def __init__(self, model):
        self.model = model
        self.running, self.waiting = {}, {}
        self.free_slots = list(range(model.max_requests))
        self.free_blocks = [list(range(1, model.num_blocks)) for _ in model.groups]
        self.num_added = 0

    def schedule(self, rng):
        step = Step(self.model)
        forced = rng.random() < 0.5  # then the output lacks the preempted requests
        for request in list(self.running.values()):
            over = request.num_computed_tokens + 2 * self.model.block_size > self.model.max_tokens
            if over or rng.random() < 0.05:
                self.release(request)
                step.finished.add(request.req_id)
            elif rng.random() < 0.1:
                self.release(request)
                self.waiting[request.req_id] = request
                if not forced:
                    step.preempted = {*(step.preempted or ()), request.req_id}
        self.admit(step, rng)
        running = [r for r in self.running.values() if r in step.added or rng.random() < 0.9]
        for index in rng.permutation(len(running)):
            self.draw_tokens(step, running[index], rng)
        return step

    def admit(self, step, rng):
        rush = rng.choice([0.5, 0.9, 0.99])
        while self.free_slots and rng.random() < rush:
            back = self.waiting and rng.random() < 0.5
            if back:
                request = self.waiting.pop(next(iter(self.waiting)))
                step.resumed.add(request.req_id)
            else:
                request = Request(f"r{self.num_added}", 0, self.model.max_tokens // 2, [])
                self.num_added += 1
            # Tokens found in the prefix cache: a multiple of a column.
            most = request.num_computed_tokens // self.model.block_size
            request.num_computed_tokens = int(rng.integers(0, most + 1)) * self.model.block_size
            self.place(request, rng)
            step.added.append(request)

    def place(self, request, rng):
        request.slot = self.free_slots.pop(int(rng.integers(len(self.free_slots))))
        request.block_ids = [[]]
        for free in self.free_blocks:
            rng.shuffle(free)
            request.block_ids.append([free.pop() for _ in range(NUM_COLUMNS)])
        self.running[request.req_id] = request

    def release(self, request):
        del self.running[request.req_id]
        self.free_slots.append(request.slot)
        for free, ids in zip(self.free_blocks, request.block_ids[1:], strict=True):
            free.extend(ids)

    def draw_tokens(self, step, request, rng):
        is_decode = request.num_computed_tokens and rng.random() < 0.8
        most = self.model.num_drafts if rng.random() < 0.7 else int(rng.integers(5))
        num_drafts = min(most, self.model.num_drafts) if is_decode else 0
        length = 1 + num_drafts if is_decode else int(rng.integers(1, 2 * self.model.block_size))
        step.batch.append(request)
        step.num_scheduled[request.req_id] = length
        if num_drafts:
            step.drafts[request.req_id] = [7] * num_drafts
        first = int(rng.integers(2)) if not is_decode else 1
        accepted = num_drafts if rng.random() < 0.5 else int(rng.integers(num_drafts + 1))
        step.sampled[request.req_id] = first + accepted

    def advance(self, step):
        for request in step.batch:
            request.num_computed_tokens = step.tokens_after(request)
