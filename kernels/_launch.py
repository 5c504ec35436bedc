"""How a kernel is launched, and the sizes of elementwise blocks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], anchor: Tensor, *args: Any, **options: Any) -> None:
    """Launch `kernel` on the device of `anchor`, whatever device is current; a tensor without content needs none."""
    if anchor.is_meta:
        return
    # Versions of Triton differ in whether products and sums are fused where nothing is said.
    options.setdefault("enable_fp_fusion", True)
    if anchor.is_cuda and anchor.device.index != torch.cuda.current_device():
        with torch.cuda.device(anchor.device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@dataclass(frozen=True)
class Config:
    """Blocks of a kernel that works elementwise on rows of H columns.

    Args:
        block_b: Rows per program.
        block_h: Columns per program.
        num_warps: Warps per program.
    """

    block_b: int
    block_h: int
    num_warps: int

    @staticmethod
    @lru_cache(maxsize=256)
    def pick(rows: int, H: int) -> "Config":
        """Choose blocks for `rows` rows of H columns.

        A tile has 512 elements: each thread of four warps has four columns of one row in each of the four gates, so
        that loads are of 16 bytes in float32 and 8 in half precision. By arithmetic, not measured: at B=512, H=512 this
        is 512 programs, four a multiprocessor on an H100; small problems get smaller tiles for more programs.
        """
        block_h = min(triton.next_power_of_2(H), 128)
        tile = 512 if rows * H >= 1 << 16 else 256
        block_b = max(1, min(triton.next_power_of_2(rows), tile // block_h))
        return Config(block_b, block_h, max(1, min(4, block_b * block_h // 128)))

    def grid(self, rows: int, H: int) -> tuple[int, int]:
        """Return the grid that covers `rows` rows of H columns."""
        return triton.cdiv(rows, self.block_b), triton.cdiv(H, self.block_h)
