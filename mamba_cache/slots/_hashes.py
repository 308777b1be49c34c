"""Which hash finds which block's state."""

from __future__ import annotations

__all__ = ["StateHashes"]


class StateHashes:
    """Hash ids and blocks, looked up from either side.

    A block has one hash and a hash finds one block; what was registered last counts.

    Attributes:
        block_of: Block that each hash id finds. An embedder may write here by itself.
        hash_of: Hash id under which each block was registered here.
    """

    __slots__ = ("block_of", "hash_of")

    def __init__(self) -> None:
        self.block_of: dict[int, int] = {}
        self.hash_of: dict[int, int] = {}

    def register(self, block_id: int, hash_id: int) -> None:
        """Makes the hash find the block, and nothing else find it."""
        self.forget_hash(hash_id)
        self.forget_block(block_id)
        self.hash_of[block_id] = hash_id
        self.block_of[hash_id] = block_id

    def forget_block(self, block_id: int) -> None:
        """Forgets the hash under which a block was registered, if it was."""
        if block_id in self.hash_of:
            self.unlink(block_id, self.hash_of.pop(block_id))

    def forget_hash(self, hash_id: int) -> None:
        """Makes a hash find nothing."""
        if hash_id in self.block_of:
            block_id = self.block_of.pop(hash_id)
            if self.hash_of.get(block_id) == hash_id:
                del self.hash_of[block_id]

    def unlink(self, block_id: int, hash_id: int) -> None:
        """Makes a hash find nothing, unless it finds another block by now."""
        if self.block_of.get(hash_id) == block_id:
            del self.block_of[hash_id]

    def clear(self) -> None:
        """Forgets everything."""
        self.block_of.clear()
        self.hash_of.clear()
