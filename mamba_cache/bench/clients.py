"""Clients of a soak: conversations, agents and single questions, drawn without end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt

__all__ = ["Clients", "Turn"]

_VOCAB_SIZE = 256
_SALTS = (None, "tenant a", "tenant b")
_NUM_AGENTS, _NUM_CHATS = 12, 36
_AGENT_SHARE, _CHAT_SHARE = 0.3, 0.5  # of the requests; the rest are asked once


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request that a client makes.

    Attributes:
        prompt: [prompt length] int32 token ids below 256.
        max_new_tokens: Tokens of the answer.
        salt: What keeps tenants apart.
        system_tokens: Tokens of the prompt that others begin with as well.
        client: Who asks; None: somebody who does not come back.
    """

    prompt: npt.NDArray[np.int32]
    max_new_tokens: int
    salt: str | None = None
    system_tokens: int = 0
    client: _Client | None = None


class Clients:
    """A fixed crowd, whose memory does not grow: who has talked for long begins anew.

    Agents share long system prompts, and their tools answer at length; chats share short ones. A
    third of the clients belongs to each tenant, and tenants use the same system prompts.

    Args:
        rng: Draws everything.
        max_tokens: Of the longest prompt and its answer together.
    """

    def __init__(self, rng: np.random.Generator, *, max_tokens: int) -> None:
        self._rng = rng
        self._max_tokens = max_tokens
        salts = cycle(_SALTS)
        prompts = [self._text(max_tokens // 4), self._text(max_tokens // 3)]
        agents = [_Client(prompt, next(salts), 120) for prompt in _repeat(prompts, _NUM_AGENTS)]
        prompts = [self._text(70), self._text(20)]
        chats = [_Client(prompt, next(salts), 40) for prompt in _repeat(prompts, _NUM_CHATS)]
        self._idle = {"agent": agents, "chat": chats}

    def draw(self) -> Turn:
        """Return the next request of a client who waits for no answer, or of a new one."""
        kind = self._rng.choice(
            ("agent", "chat", "once"), p=(_AGENT_SHARE, _CHAT_SHARE, 1 - _AGENT_SHARE - _CHAT_SHARE)
        )
        answer = int(self._rng.integers(1, 25))
        idle = self._idle.get(kind)
        if not idle:
            return Turn(self._text(int(self._rng.integers(5, self._max_tokens // 2))), answer)
        client = idle.pop(int(self._rng.integers(len(idle))))
        said = self._text(1 + int(self._rng.exponential(client.mean_tokens)))
        prompt = np.concatenate((client.context, said))
        if len(prompt) + answer > self._max_tokens:
            prompt = np.concatenate((client.system, said[: self._max_tokens // 4]))
        return Turn(prompt, answer, client.salt, len(client.system), client)

    def end(self, turn: Turn, answer: tuple[int, ...] | None) -> None:
        """Let the client of a turn go on.

        Args:
            turn: As ``draw`` gave it.
            answer: What was said; None: the request was cancelled, and the client asks again.
        """
        client = turn.client
        if client is None:
            return
        if answer is not None:
            client.context = np.concatenate((turn.prompt, np.array(answer, np.int32)))
        self._idle["agent" if client.mean_tokens > 100 else "chat"].append(client)

    def _text(self, num_tokens: int) -> npt.NDArray[np.int32]:
        return self._rng.integers(_VOCAB_SIZE, size=num_tokens, dtype=np.int32)


class _Client:
    """Somebody who goes on where the last answer ended."""

    __slots__ = ("context", "mean_tokens", "salt", "system")

    def __init__(self, system: npt.NDArray[np.int32], salt: str | None, mean_tokens: int) -> None:
        self.system = self.context = system
        self.salt = salt
        self.mean_tokens = mean_tokens


def _repeat(prompts: list[npt.NDArray[np.int32]], number: int) -> list[npt.NDArray[np.int32]]:
    return [prompts[i % len(prompts)] for i in range(number)]
