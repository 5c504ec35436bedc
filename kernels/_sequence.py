"""What the two sequence kernels share: how programs wait for one another, where rows lie, which blocks a problem gets.

A program that waits for another one must be sure that the other one runs. So a launch has at most as many programs as
the device has multiprocessors, each of which fits on one by itself, and is cooperative, so that kernels on two streams
cannot hold half of the device each.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._device import DeviceInfo


@triton.jit
def arrive(counter_ptr):
    """Tell the programs that share a counter that this one's stores are made.

    The barrier orders every thread's stores before the one release.
    """
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter_ptr, count):
    """Return when `count` arrivals have been made in all.

    The barrier orders the acquire before every thread's loads. What another program stored must be loaded past the L1
    cache (`cache_modifier=".cg"`).
    """
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < count:
        pass
    tl.debug_barrier()


@triton.jit
def product(rows, weights, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + rows weights^T, [b, n] from [b, k] and [n, k]; transposed if SWAP, acc too.

    The matrix instructions of sm_90 and sm_100 take 64 rows of the left operand at least. A program has fewer rows of
    the batch than of the weights, so there the weights come first.
    """
    if SWAP:
        return tl.dot(weights, tl.trans(rows), acc, input_precision=PRECISION)
    else:
        return tl.dot(rows, tl.trans(weights), acc, input_precision=PRECISION)


@triton.jit
def zeros(b: tl.constexpr, n: tl.constexpr, SWAP: tl.constexpr):
    """Return the zeros [b, n] that `product` adds to; transposed if SWAP."""
    if SWAP:
        return tl.zeros([n, b], dtype=tl.float32)
    else:
        return tl.zeros([b, n], dtype=tl.float32)


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
        block_k: Columns of h per product in the forward pass.
        num_warps: Warps per program.
        block_n: Columns of dh per product in the backward pass; 0 means as many as `block_k`.
        ahead: Tiles of h that the forward pass asks for before the first product, besides that product's own.
        swap: Whether the weights are the left operand of products.
    """

    block_b: int
    block_h: int
    block_k: int
    num_warps: int
    block_n: int = 0
    ahead: int = 0
    swap: bool = False

    def __post_init__(self) -> None:
        """Fill in `block_n`."""
        object.__setattr__(self, "block_n", self.block_n or self.block_k)

    def options(self) -> dict[str, Any]:
        """Return the options of a launch."""
        return {
            "num_warps": self.num_warps,
            "num_stages": 1,
            "enable_fp_fusion": True,  # Versions of Triton differ in what they do where nothing is said.
            "launch_cooperative_grid": True,
        }

    def grid(self, B: int, H: int) -> tuple[int, int]:
        """Return the grid: batch blocks, hidden blocks."""
        return triton.cdiv(B, self.block_b), triton.cdiv(H, self.block_h)

    def blocks_k(self, H: int) -> int:
        """Return how many blocks of `block_k` columns cover H."""
        return triton.cdiv(H, self.block_k)

    def blocks_n(self, H: int) -> int:
        """Return how many blocks of `block_n` columns cover H."""
        return triton.cdiv(H, self.block_n)

    def shared_bytes(self, H: int, itemsize: int) -> int:
        """Return the shared memory that a program needs: its slice of W_hh, operands, exchange of layouts.

        An upper bound of what the compiler reports for every entry of `_BLOCKS`, which a test compares.
        """
        padded = max(self.blocks_k(H) * self.block_k, self.blocks_n(H) * self.block_n)
        weights = 4 * padded * self.block_h * itemsize
        tile = 4 * self.block_b * self.block_h
        forward = max((self.ahead + 1) * self.block_b * self.block_k * itemsize, 4 * tile)
        # Where the weights come first, a product changes its layout while the gradients of the gates are still needed.
        gradients, share = tile * itemsize, 4 * self.block_b * self.block_n
        backward = gradients + share if self.swap else max(gradients, share)
        return weights + max(forward, backward) + (2 << 10)

    @staticmethod
    @lru_cache(maxsize=1024)
    def pick(B: int, H: int, itemsize: int, device: DeviceInfo, precision: str = "ieee") -> "Config | str":
        """Choose blocks, or say in words why there are none.

        The programs of a launch wait for one another, so all must run at once: at most one per multiprocessor. Among
        the blocks that allow this the smallest win, because a step's time is the time of one program.

        Args:
            B: Batch size.
            H: Hidden units.
            itemsize: Bytes of an element of the weights.
            device: The device.
            precision: How products are computed where the weights are float32: "ieee", "tf32" or "tf32x3".

        Returns:
            The blocks, or the reason for a refusal with its limit.
        """
        if device.capability >= 100 and _TRITON < (3, 9):
            return f"Triton {triton.__version__} compiles its backward kernel for this device to a trap; take 3.9"
        programs, shared = [], []
        for blocks in blocks_of(device.capability, itemsize, precision):
            config = blocks.fit(H, itemsize, device.shared_bytes)
            batch_blocks, hidden_blocks = config.grid(B, H)
            if config.shared_bytes(H, itemsize) > device.shared_bytes:
                shared.append(config.shared_bytes(H, itemsize))
            elif batch_blocks * hidden_blocks > device.multiprocessors:
                programs.append(batch_blocks * hidden_blocks)
            else:
                return config
        return (
            f"a chunk in one launch needs every program to run at once with its slice of the weights in shared memory; "
            f"B={B}, H={H} with {8 * itemsize}-bit weights would need at best "
            + (
                f"{min(programs)} programs on {device.multiprocessors} multiprocessors"
                if programs
                else f"{min(shared) >> 10} KiB of shared memory of {device.shared_bytes >> 10}"
            )
        )

    def fit(self, H: int, itemsize: int, shared_bytes: int) -> "Config":
        """Return these blocks with products no wider than H, and as many tiles of h ahead as there are and fit."""
        widest = max(16, triton.next_power_of_2(H))
        block_k = min(self.block_k, widest)
        config = replace(self, block_k=block_k, block_n=min(self.block_n, widest))
        for ahead in range(min(self.ahead, config.blocks_k(H) - 1), 0, -1):
            found = replace(config, ahead=ahead)
            if found.shared_bytes(H, itemsize) <= shared_bytes:
                return found
        return replace(config, ahead=0)


_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# What the compiler says of these blocks is in kernels/CONFIGS.md: sm_80 (A100), sm_90 (H100) and sm_100 (B200), H from
# 64 to 1024, Triton 3.9.0, and on sm_90 in half precision 3.6.0 too, December 2026; by compile report, not measured on
# a device. What differs between the architectures, and (128, 32), which is missing, would spill registers. Where a
# block has 16 rows for each warp, as many as a matrix instruction takes, rows come first: the backward pass then
# exchanges fewer layouts.
_BLOCKS = {
    80: (
        Config(16, 16, 128, 4, block_n=64, ahead=7),
        Config(32, 16, 128, 4, ahead=3),
        Config(32, 32, 128, 4, ahead=1),
        Config(64, 16, 128, 8, ahead=3),
        Config(64, 32, 128, 8, block_n=64, ahead=3),
        Config(128, 16, 64, 8, ahead=3),
    ),
    90: (
        Config(16, 16, 128, 4, ahead=7, swap=True),
        Config(32, 16, 128, 4, ahead=3, swap=True),
        Config(32, 32, 128, 8, ahead=3, swap=True),
        Config(64, 16, 64, 4, ahead=2),
        Config(64, 32, 128, 8, ahead=3, swap=True),
        Config(128, 16, 64, 8, ahead=3),
    ),
    100: (
        Config(16, 16, 128, 4, ahead=7, swap=True),
        Config(32, 32, 128, 8, ahead=3, swap=True),
        Config(32, 16, 64, 4, block_n=128, ahead=3),
        Config(64, 16, 128, 4, ahead=1),
        Config(64, 32, 128, 8, ahead=3, swap=True),
        Config(128, 16, 64, 8, block_n=128, ahead=3),
    ),
}
"""Blocks from small to large, by architecture."""
_TF32 = (
    Config(16, 16, 128, 4, block_n=64, ahead=3),
    Config(32, 16, 128, 4, block_n=64, ahead=1),
    Config(32, 32, 128, 8, ahead=1),
    Config(64, 16, 32, 8, block_n=64, ahead=1),
)
_TF32_BLOCKS = {
    80: _TF32,
    90: (
        Config(16, 16, 128, 4, ahead=3, swap=True),
        Config(32, 16, 64, 4, block_n=128, ahead=1, swap=True),
        Config(32, 32, 128, 8, ahead=1, swap=True),
        Config(64, 16, 32, 8, block_n=64, ahead=2),
    ),
    100: _TF32,
}
"""The same for products of float32 that are rounded to tf32."""
_FULL_BLOCKS = (Config(16, 16, 32, 4), Config(32, 16, 32, 8))
"""The same for products of float32 without matrix instructions, on every architecture."""


def blocks_of(capability: int, itemsize: int, precision: str = "ieee") -> tuple[Config, ...]:
    """Return the blocks of an architecture, from small to large; the arguments are those of `Config.pick`."""
    if itemsize == 4 and precision == "ieee":
        return _FULL_BLOCKS
    return (_TF32_BLOCKS if itemsize == 4 else _BLOCKS)[max(80, min(capability // 10 * 10, 100))]
