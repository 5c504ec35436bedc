"""Gates and cell states of a whole chunk from its pre-activations, in one pass.

With every h known, the pre-activations of all steps of a chunk come from large products. What remains is elementwise,
i, f, o = sigmoid(pre), g = tanh(pre), and a scan that no program shares with another: c_k = f_k c_{k-1} + i_k g_k.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import Config, launch
from fusedrnn.kernels._math import sigmoid, tanh


@triton.jit
def _recompute_kernel(
    # inputs
    pre_ptr,  # [rows, 4H] pre-activations in, gates out
    c0_ptr,  # [B, H] float32; not read unless SCAN
    offsets_ptr,  # [K] int64, first row of each step; not read unless PACKED
    batches_ptr,  # [K] int32, rows of each step; not read unless PACKED
    resets_ptr,  # [rows] uint8, 1 where c starts anew before the row; not read unless RESETS
    # outputs
    c_ptr,  # [rows, H] float32; not written unless SCAN
    # sizes
    K,
    B,
    H,
    row_start,
    row_step,
    # strides
    stride_pre_n,
    stride_c0_n,
    stride_c_n,
    # constants
    SCAN: tl.constexpr,
    PACKED: tl.constexpr,
    RESETS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    zero64 = tl.full((), 0, tl.int64)
    columns = (offs_h < H)[None, :]
    element = pre_ptr.dtype.element_ty
    c = tl.zeros([BLOCK_B, BLOCK_H], dtype=tl.float32)
    if SCAN:
        c0_at = c0_ptr + offs_b[:, None] * stride_c0_n + offs_h[None, :]
        c = tl.load(c0_at, mask=(offs_b < B)[:, None] & columns, other=0.0)
    for k in range(0, K):
        if PACKED:
            row = tl.load(offsets_ptr + k) + offs_b
            active = (offs_b < tl.load(batches_ptr + k))[:, None]
        else:
            row = row_start + (k + zero64) * row_step + offs_b
            active = (offs_b < B)[:, None]
        mask = active & columns
        pre = pre_ptr + row[:, None] * stride_pre_n + offs_h[None, :]
        i = sigmoid(tl.load(pre, mask=mask, other=0.0).to(tl.float32))
        f = sigmoid(tl.load(pre + H, mask=mask, other=0.0).to(tl.float32))
        g = tanh(tl.load(pre + 2 * H, mask=mask, other=0.0).to(tl.float32))
        o = sigmoid(tl.load(pre + 3 * H, mask=mask, other=0.0).to(tl.float32))
        tl.store(pre, i.to(element), mask=mask)
        tl.store(pre + H, f.to(element), mask=mask)
        tl.store(pre + 2 * H, g.to(element), mask=mask)
        tl.store(pre + 3 * H, o.to(element), mask=mask)
        if SCAN:
            if RESETS:
                anew = tl.load(resets_ptr + row, mask=offs_b < B, other=0)
                c = tl.where((anew != 0)[:, None], 0.0, c)
            # A row that is not active keeps its state, which matters where it joins later.
            c = tl.where(active, f * c + i * g, c)
            tl.store(c_ptr + row[:, None] * stride_c_n + offs_h[None, :], c, mask=mask)


def lstm_recompute(
    pre: Tensor,
    c0: Tensor,
    c: Tensor,
    K: int,
    row_start: int = 0,
    row_step: int = 0,
    offsets: Tensor | None = None,
    batches: Tensor | None = None,
    resets: Tensor | None = None,
) -> None:
    """Turn the pre-activations of a chunk into gates, and write its cell states.

    The steps are given in the order in which they are processed. Dense rows: step k has the rows from
    `row_start + k * row_step` on, B of them. Packed rows: `offsets` and `batches` say where each step lies.

    Args:
        pre: Pre-activations [rows, 4H], overwritten with the gates i, f, g, o.
        c0: Cell states before the chunk [B, H], float32.
        c: Cell states [rows, H], float32, written.
        K: Number of steps.
        row_start: First row of the first step (dense).
        row_step: Rows from one step to the next, negative where time runs backwards (dense).
        offsets: First row of each step [K], int64, on the device (packed).
        batches: Rows of each step [K], int32, on the device (packed).
        resets: bool [rows, 1], true where no c passes to a row from the one before, or None. Dense rows only.
    """
    B, H = c0.shape
    config = Config.pick(B, H)
    launch(
        _recompute_kernel,
        config.grid(B, H),
        pre,
        pre,
        c0,
        pre if offsets is None else offsets,
        pre if batches is None else batches,
        pre if resets is None else resets.view(torch.uint8),
        c,
        K,
        B,
        H,
        row_start,
        row_step,
        pre.stride(0),
        c0.stride(0),
        c.stride(0),
        SCAN=True,
        PACKED=offsets is not None,
        RESETS=resets is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )


def lstm_activate(pre: Tensor) -> None:
    """Turn pre-activations into gates, where the cell states are known.

    Args:
        pre: Pre-activations [rows, 4H], overwritten with the gates i, f, g, o.
    """
    rows, H = pre.shape[0], pre.shape[1] // 4
    config = Config.pick(rows, H)
    launch(
        _recompute_kernel,
        config.grid(rows, H),
        pre,
        pre,
        pre,
        pre,
        pre,
        pre,
        pre,
        1,
        rows,
        H,
        0,
        0,
        pre.stride(0),
        0,
        0,
        SCAN=False,
        PACKED=False,
        RESETS=False,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )
