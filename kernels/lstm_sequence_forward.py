"""The recurrence of an LSTM layer over a whole chunk in one launch, W_hh resident on the chip.

i, f, o = sigmoid(xproj + W_hh h_prev), g = tanh(.); c = f c_prev + i g; h = o tanh(c), step after step.

The grid is (batch blocks, hidden blocks). A program owns BLOCK_H columns of one batch block: it keeps its slice of W_hh
and its cell states for the whole chunk, and needs all of h for the next step. So h goes through a small buffer in
global memory, two steps deep, and the programs of a batch block meet after each step. Two steps suffice: a program
writes over step k - 1 only when all have arrived after it, for which they must have read it.

What a step waits for is kept short: a program asks for its input projections before it waits for the others, arrives as
soon as its h is stored, and stores what nobody waits for afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import launch
from fusedrnn.kernels._math import sigmoid, tanh
from fusedrnn.kernels._sequence import Config, Rows, arrive, product, wait_for, zeros


@triton.jit(do_not_specialize=["K", "B", "row_start", "row_step"])
def _sequence_forward_kernel(
    # inputs
    xproj_ptr,  # [rows, 4H] input projections in, gates out if STORE_GATES
    whh_ptr,  # [4H, H]
    c0_ptr,  # [B, H] float32
    offsets_ptr,  # [K] int64, first row of each step; not read unless PACKED
    batches_ptr,  # [K] int32, rows of each step; not read unless PACKED
    resets_ptr,  # [rows] uint8, 1 where the states start anew before the row; not read unless RESETS
    # in and out
    h_ptr,  # [2, B, H] the exchange; the first half holds h0, half K % 2 the final h
    barrier_ptr,  # [batch blocks] int32, zero
    # outputs
    y_ptr,  # [rows, H]
    c_ptr,  # [rows, H] float32; not written unless STORE_CELLS
    cT_ptr,  # [B, H] float32
    # sizes
    K,
    B,
    row_start,
    row_step,
    # strides
    stride_x_n,
    stride_y_n,
    stride_c_n,
    stride_c0_n,
    # constants
    H: tl.constexpr,
    STORE_GATES: tl.constexpr,
    STORE_CELLS: tl.constexpr,
    PACKED: tl.constexpr,
    RESETS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    AHEAD: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Addresses are a scalar that moves with the step plus a tile of 32-bit offsets that does not: what is kept per
    # thread for the whole loop decides whether the tiles fit into registers.
    pid_b = tl.program_id(0)
    first_h = tl.program_id(1) * BLOCK_H
    hidden_blocks = tl.num_programs(1)
    zero64 = tl.full((), 0, tl.int64)
    first_b = (zero64 + pid_b) * BLOCK_B
    local_b = tl.arange(0, BLOCK_B)
    local_h = tl.arange(0, BLOCK_H)
    local_k = tl.arange(0, BLOCK_K)
    columns = (first_h + local_h < H)[None, :]
    batch = (first_b + local_b < B)[:, None]
    # The four gates of a column are neighbours, so that one product gives all of them.
    local_n = tl.arange(0, 4 * BLOCK_H)
    w_rows = (first_h + local_n // 4 < H)[:, None]
    w_at = ((local_n % 4) * H + first_h + local_n // 4)[:, None] * H + local_k[None, :]
    w = ()  # BLOCKS_K tiles [4 * BLOCK_H, BLOCK_K], for the whole chunk
    for part in tl.static_range(BLOCKS_K):
        w_mask = w_rows & (part * BLOCK_K + local_k < H)[None, :]
        w += (tl.load(whh_ptr + part * BLOCK_K + w_at, mask=w_mask, other=0.0),)
    element = xproj_ptr.dtype.element_ty
    tile = local_b[:, None]
    x_at = tile * stride_x_n + local_h[None, :]
    y_at = tile * stride_y_n + local_h[None, :]
    c_at = tile * stride_c_n + local_h[None, :]
    own_at = tile * H + local_h[None, :]
    every_at = tile * H + local_k[None, :]
    exchange = h_ptr + first_b * H
    half = (zero64 + B) * H
    c0 = c0_ptr + first_b * stride_c0_n + first_h + tile * stride_c0_n + local_h[None, :]
    c = tl.load(c0, mask=batch & columns, other=0.0)
    h_own = tl.load(exchange + first_h + own_at, mask=batch & columns, other=0.0)
    for k in tl.range(0, K, num_stages=1):
        if PACKED:
            row = tl.load(offsets_ptr + k) + first_b
            active = (first_b + local_b < tl.load(batches_ptr + k))[:, None]
        else:
            row = row_start + (k + zero64) * row_step + first_b
            active = batch
        mask = active & columns
        follows = batch
        if RESETS:
            anew = tl.load(resets_ptr + row + local_b, mask=first_b + local_b < B, other=0)
            follows = batch & (anew == 0)[:, None]
        x = xproj_ptr + row * stride_x_n + first_h
        x_i = tl.load(x + x_at, mask=mask, other=0.0)
        x_f = tl.load(x + H + x_at, mask=mask, other=0.0)
        x_g = tl.load(x + 2 * H + x_at, mask=mask, other=0.0)
        x_o = tl.load(x + 3 * H + x_at, mask=mask, other=0.0)
        wait_for(barrier_ptr + pid_b, k * hidden_blocks)
        before = exchange + (k % 2) * half
        hproj = zeros(BLOCK_B, 4 * BLOCK_H, SWAP)
        h = ()  # Tiles of h are asked for AHEAD of the products, so that their latencies do not add up.
        for part in tl.static_range(BLOCKS_K):
            h_mask = follows & (part * BLOCK_K + local_k < H)[None, :]
            h += (tl.load(before + part * BLOCK_K + every_at, mask=h_mask, other=0.0, cache_modifier=".cg"),)
            if part >= AHEAD:
                hproj = product(h[part - AHEAD], w[part - AHEAD], hproj, SWAP, PRECISION)
        for part in tl.static_range(BLOCKS_K - AHEAD, BLOCKS_K):
            hproj = product(h[part], w[part], hproj, SWAP, PRECISION)
        if SWAP:
            hproj = tl.trans(hproj)
        even, odd = tl.split(tl.reshape(hproj, [BLOCK_B, BLOCK_H, 2, 2]))
        h_i, h_g = tl.split(even)
        h_f, h_o = tl.split(odd)
        i, f = sigmoid(x_i.to(tl.float32) + h_i), sigmoid(x_f.to(tl.float32) + h_f)
        g, o = tanh(x_g.to(tl.float32) + h_g), sigmoid(x_o.to(tl.float32) + h_o)
        if RESETS:
            c = tl.where(follows, c, 0.0)
        # A row that is not active keeps its states.
        c = tl.where(active, f * c + i * g, c)
        h_own = tl.where(active, (o * tanh(c)).to(element), h_own)
        tl.store(exchange + ((k + 1) % 2) * half + first_h + own_at, h_own, mask=batch & columns)
        arrive(barrier_ptr + pid_b)
        tl.store(y_ptr + row * stride_y_n + first_h + y_at, h_own, mask=mask)
        if STORE_CELLS:
            tl.store(c_ptr + row * stride_c_n + first_h + c_at, c, mask=mask)
        if STORE_GATES:
            tl.store(x + x_at, i.to(element), mask=mask)
            tl.store(x + H + x_at, f.to(element), mask=mask)
            tl.store(x + 2 * H + x_at, g.to(element), mask=mask)
            tl.store(x + 3 * H + x_at, o.to(element), mask=mask)
    tl.store(cT_ptr + first_b * H + first_h + own_at, c, mask=batch & columns)


def lstm_sequence_forward(
    xproj: Tensor,
    weight_hh: Tensor,
    h0: Tensor,
    c0: Tensor,
    y: Tensor,
    c: Tensor | None,
    rows: Rows,
    config: Config,
    store_gates: bool = True,
    precision: str = "ieee",
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the steps of a chunk in one launch.

    Args:
        xproj: Input projections [rows, 4H]; overwritten with the gates if `store_gates`.
        weight_hh: Recurrent weights [4H, H], contiguous.
        h0: Outputs before the chunk [B, H].
        c0: Cell states before the chunk [B, H], float32.
        y: Outputs [rows, H], written.
        c: Cell states [rows, H], float32, written; None where nobody reads them again.
        rows: Where the steps lie, in processing order.
        config: Blocks, from `Config.pick`.
        store_gates: Whether the gates are kept.
        precision: "ieee", "tf32" or "tf32x3" for float32 products.
        resets: bool [rows, 1], true where no state passes to a row from the one before, or None. Dense rows only.

    Returns:
        The outputs [B, H] and the cell states [B, H] after the chunk.
    """
    B, H = h0.shape
    exchange = h0.new_empty(2, B, H)
    exchange[0].copy_(h0)
    cT = torch.empty_like(c0, memory_format=torch.contiguous_format)
    grid = config.grid(B, H)
    barrier = torch.zeros(grid[0], dtype=torch.int32, device=h0.device)
    launch(
        _sequence_forward_kernel,
        grid,
        xproj,
        xproj,
        weight_hh,
        c0,
        *rows.pointers(xproj),
        xproj if resets is None else resets.view(torch.uint8),
        exchange,
        barrier,
        y,
        cT if c is None else c,
        cT,
        rows.steps,
        B,
        rows.start,
        rows.step,
        xproj.stride(0),
        y.stride(0),
        0 if c is None else c.stride(0),
        c0.stride(0),
        H=H,
        STORE_GATES=store_gates,
        STORE_CELLS=c is not None,
        PACKED=rows.offsets is not None,
        RESETS=resets is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        BLOCK_K=config.block_k,
        BLOCKS_K=config.blocks_k(H),
        AHEAD=config.ahead,
        SWAP=config.swap,
        PRECISION=precision,
        **config.options(),
    )
    return exchange[rows.steps % 2], cT
