"""What the two sequence kernels share: where rows lie, and which blocks a problem gets."""

from dataclasses import dataclass
from functools import lru_cache

import triton
from torch import Tensor

from fusedrnn.kernels._device import DeviceInfo


@dataclass(frozen=True)
class Rows:
    """Where the steps of a chunk lie, in processing order.

    Dense rows: step k has the rows from `start + k * step` on, as many as the batch. Packed rows: step k has
    `batches[k]` rows from `offsets[k]` on.

    Args:
        steps: Number of steps K.
        start: First row of the first step (dense).
        step: Rows from one step to the next, negative where time runs backwards (dense).
        offsets: [K] int64 on the device (packed), or None.
        batches: [K] int32 on the device (packed), or None.
    """

    steps: int
    start: int = 0
    step: int = 0
    offsets: Tensor | None = None
    batches: Tensor | None = None

    def pointers(self, stand_in: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets and batches, or a stand-in that is not read."""
        if self.offsets is None or self.batches is None:
            return stand_in, stand_in
        return self.offsets, self.batches


@dataclass(frozen=True)
class Config:
    """Blocks of the sequence kernels.

    Args:
        block_b: Rows of the batch per program.
        block_h: Hidden columns per program.
        block_k: Columns of h per product in the forward pass, and of dh in the backward pass.
        num_warps: Warps per program.
    """

    block_b: int
    block_h: int
    block_k: int
    num_warps: int

    def grid(self, B: int, H: int) -> tuple[int, int]:
        """Return the grid: batch blocks, hidden blocks."""
        return triton.cdiv(B, self.block_b), triton.cdiv(H, self.block_h)

    def blocks_k(self, H: int) -> int:
        """Return how many blocks of `block_k` columns cover H."""
        return triton.cdiv(H, self.block_k)

    def shared_bytes(self, H: int, itemsize: int) -> int:
        """Return the shared memory that a program needs: its slice of W_hh, one tile of operands, exchange of layouts.

        An upper bound of what the compiler reports for every entry of `_BLOCKS`, which a test compares.
        """
        padded = self.blocks_k(H) * self.block_k
        weights = 4 * padded * self.block_h * itemsize
        tile = max(self.block_b * self.block_k * itemsize, 4 * self.block_b * self.block_h * 4)
        return weights + tile + (8 << 10)

    @staticmethod
    @lru_cache(maxsize=1024)
    def pick(B: int, H: int, itemsize: int, device: DeviceInfo) -> "Config | str":
        """Choose blocks, or say in words why there are none.

        The programs of a launch wait for one another, so all must run at once: at most one per multiprocessor. Among
        the blocks that allow this the smallest win, because a step's time is the time of one program.

        Args:
            B: Batch size.
            H: Hidden units.
            itemsize: Bytes of an element of the weights.
            device: The device.

        Returns:
            The blocks, or the reason for a refusal with its limit.
        """
        reasons = []
        for block_b, block_h, num_warps in _BLOCKS:
            config = Config(block_b, block_h, min(128, max(16, triton.next_power_of_2(H))), num_warps)
            batch_blocks, hidden_blocks = config.grid(B, H)
            programs, shared = batch_blocks * hidden_blocks, config.shared_bytes(H, itemsize)
            if shared > device.shared_bytes:
                reasons.append(f"{shared >> 10} KiB of shared memory of {device.shared_bytes >> 10}")
            elif programs > device.multiprocessors:
                reasons.append(f"{programs} programs on {device.multiprocessors} multiprocessors")
            else:
                return config
        return (
            f"a chunk in one launch needs every program to run at once with its slice of the weights in shared memory; "
            f"B={B}, H={H} with {8 * itemsize}-bit weights would need at best {reasons[-1]}"
        )


_BLOCKS = ((16, 16, 4), (32, 16, 4), (32, 32, 4), (64, 16, 4), (64, 32, 8), (128, 16, 8), (128, 32, 8))
"""(block_b, block_h, num_warps), from small to large."""
