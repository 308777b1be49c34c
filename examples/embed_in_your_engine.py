"""An inference engine in 100 lines around ``DynamicInferenceContext``.

The engine calls a model by two functions: ``forward`` computes a step, ``sample`` chooses tokens.
The engine batches requests continuously, computes long prompts in chunks, preempts requests when KV
blocks run short, and aborts a step when the model fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from mamba_cache import (
    Admission,
    CacheConfig,
    CapacityError,
    DynamicInferenceContext,
    Request,
    RequestStatus,
    Step,
    StepMetadata,
)
from mamba_cache.reference import HybridModel

Forward = Callable[[StepMetadata, DynamicInferenceContext], torch.Tensor]
Sample = Callable[[torch.Tensor], torch.Tensor]

SCHEDULED, PREFILLING = RequestStatus.SCHEDULED, RequestStatus.PREFILLING
DECODING, PREEMPTED = RequestStatus.DECODING, RequestStatus.PREEMPTED


class TinyEngine:
    """Runs requests to completion.

    Args:
        context: The requests' memory and the cache.
        forward: Computes a step; returns logits [num_requests, vocab_size] in batch order.
        sample: Chooses a token for each row of logits.
        chunk_tokens: Maximum tokens of a prompt in one step.
        max_new_tokens: Tokens of each answer.

    Attributes:
        admissions: Match of each request, by request id.
        answers: The tokens of each finished request.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        forward: Forward,
        sample: Sample,
        *,
        chunk_tokens: int = 256,
        max_new_tokens: int = 8,
    ) -> None:
        self.context, self.forward, self.sample = context, forward, sample
        self.chunk_tokens, self.max_new_tokens = chunk_tokens, max_new_tokens
        self.queue: deque[Request] = deque()
        self.admissions: dict[Hashable, Admission] = {}  # oldest first
        self.answers: dict[Hashable, list[int]] = {}
        self._tokens_left: dict[Hashable, int] = {}  # of running requests, oldest first

    def run(self) -> None:
        """Step until every request is answered."""
        while self.queue or self._tokens_left:
            step = self.begin_step()
            if step is not None:
                self.compute(step)

    def begin_step(self) -> Step | None:
        """Begin a step; if memory is short, preempt the youngest request."""
        while (shortage := self.schedule()) and not self.running(SCHEDULED, DECODING):
            self.make_room(shortage)
        while self.running(SCHEDULED, DECODING):
            try:
                return self.context.begin_step()
            except CapacityError as error:  # noqa: PERF203 - a decoding request needs a block
                self.make_room(error)
        return None

    def schedule(self) -> CapacityError | None:
        """Continue prompts, then resume and admit requests; return a shortage if there is one."""
        try:
            for name in self.running(PREFILLING):
                self.context.schedule_prefill(name, chunk_tokens=self.chunk_tokens)
            for name in self.running(PREEMPTED):
                self.context.resume_request(name, chunk_tokens=self.chunk_tokens)
            while self.queue:
                admission = self.context.add_request(self.queue[0], chunk_tokens=self.chunk_tokens)
                name = self.queue.popleft().request_id
                self.admissions[name] = admission
                self._tokens_left[name] = self.max_new_tokens
        except CapacityError as error:  # requests behind wait for a later step
            return error
        return None

    def compute(self, step: Step) -> None:
        """Run the model, and finish the requests whose answers are complete."""
        try:
            logits = self.forward(step.metadata, self.context)
            tokens = zip(step.requests, self.sample(logits).tolist(), strict=True)
            sampled = {part.request_id: token for part, token in tokens if part.samples}
            self.context.commit_step(sampled)
        except BaseException:
            self.context.abort_step()  # preempts the step's requests, which resume later
            raise
        for name in sampled:
            self._tokens_left[name] -= 1
            if not self._tokens_left[name]:
                del self._tokens_left[name]
                self.answers[name] = self.context.finish(name)

    def make_room(self, shortage: CapacityError) -> None:
        """Preempt the youngest request; raise the shortage if no other request runs."""
        holders = self.running(SCHEDULED, PREFILLING, DECODING)
        if len(holders) < 2:
            raise shortage
        self.context.preempt(holders[-1])

    def running(self, *statuses: RequestStatus) -> list[Hashable]:
        """Return the running requests with these statuses, oldest first."""
        return [name for name in self._tokens_left if self.context.status(name) in statuses]


def make_context(model: HybridModel, *, enable_prefix_caching: bool) -> DynamicInferenceContext:
    """Create a model's context for three requests at a time, so that a fourth must wait."""
    config = CacheConfig(
        block_size_tokens=64,
        ssm_chunk_size=64,
        max_requests=3,
        max_tokens=512,
        max_sequence_length=1024,
        num_kv_blocks=32,
        max_slots=16,
        enable_prefix_caching=enable_prefix_caching,
    )
    return DynamicInferenceContext(
        config, model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    )


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row."""
    return logits.argmax(dim=1)


def main() -> int:
    """Answer questions about one long text with the cache and without; compare the answers."""
    torch.set_num_threads(1)
    model = HybridModel(dtype=torch.float64)
    system = b"You are a patient teacher. Answer in one short sentence. " * 8
    questions = (b"What is a slot?", b"What is a block?", b"What is a state?", b"And a commit?")
    runs = []
    for cached in (True, False):
        context = make_context(model, enable_prefix_caching=cached)
        engine = TinyEngine(context, model.forward, most_likely)
        for question in questions:
            prompt = list(system + question)
            engine.queue.append(
                Request(
                    request_id=question.decode(),
                    prompt_tokens=prompt,
                    checkpoint_positions=[len(system)],
                )
            )
            if question is questions[0]:
                engine.run()  # alone, so that later requests have a match
        engine.run()
        context.check_invariants()
        runs.append(engine)
    print(f"{'request':18}  prompt  skipped")
    for name, found in runs[0].admissions.items():
        print(f"{name:18}  {found.prompt_tokens:6}  {found.skip_tokens:7}")
    same = runs[0].answers == runs[1].answers
    print(f"\nAnswers with and without the cache {'agree' if same else 'DO NOT AGREE'}.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
