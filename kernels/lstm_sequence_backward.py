"""The backward recurrence of an LSTM layer over a whole chunk in one launch, W_hh resident on the chip.

From the last step to the first, with dh the gradient of h through output and recurrence: dc += dh o (1 - tanh(c)^2);
the gradients of the pre-activations are dc g i (1 - i), dc c_prev f (1 - f), dc i (1 - g^2), dh tanh(c) o (1 - o); then
dc = dc f and dh = dgates W_hh, both clipped where a bound is given, are those of the step before.

A program owns BLOCK_H columns of one batch block, and keeps its dh and dc and the rows of W_hh of its own gates for the
whole chunk. Its gate gradients times those rows are a share of the dh of every column; the programs of a batch block
write their shares to global memory, meet, and each adds up the shares of its own columns, always in the same order. So
no program reads another one's gate gradients, and the product has few, large operands. The shares are two steps deep,
and a program asks for the gates of a step before it waits for the shares of the one after it, for the reasons given in
the forward kernel. Gradients of weights are products over the whole chunk, made afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import launch
from fusedrnn.kernels._math import clip as clipped
from fusedrnn.kernels._math import tanh
from fusedrnn.kernels._sequence import Config, Rows, arrive, product, wait_for, zeros


@triton.jit
def _add_shares(dh, at, share_size, rows, columns, HIDDEN_BLOCKS: tl.constexpr, CLIP: tl.constexpr):
    """Return dh with the sums of all programs' shares in `rows`, clipped, and as it is in others.

    Sixteen loads are on their way at a time: more of them take more registers than there are.
    """
    total = tl.zeros_like(dh)
    for first in tl.range(0, HIDDEN_BLOCKS, 16, num_stages=1):
        for block in tl.static_range(16):
            mask = rows & columns & (first + block < HIDDEN_BLOCKS)
            share = tl.load(at + (first + block) * share_size, mask=mask, other=0.0, cache_modifier=".cg")
            total += share.to(tl.float32)
    if CLIP is not None:
        total = clipped(total, CLIP)
    return tl.where(rows, total, dh)


@triton.jit(do_not_specialize=["K", "B", "row_start", "row_step"])
def _sequence_backward_kernel(
    # inputs
    whh_ptr,  # [4H, H]
    c0_ptr,  # [B, H] float32
    c_ptr,  # [rows, H] float32
    dy_ptr,  # [rows, H] gradient through the output; not read unless HAS_DY
    dcells_ptr,  # [rows, H] float32, gradient of c from outside; not read unless HAS_DCELLS
    offsets_ptr,  # [K] int64, first row of each step; not read unless PACKED
    batches_ptr,  # [K] int32, rows of each step; not read unless PACKED
    resets_ptr,  # [rows] uint8, 1 where the states start anew before the row; not read unless RESETS
    # in and out
    gates_ptr,  # [rows, 4H] gates in, gradients of the pre-activations out
    dh_ptr,  # [B, H] gradient of the h after the chunk in, of the h before it out
    dc_ptr,  # [B, H] float32, the same of c
    share_ptr,  # [2, hidden blocks, B, H] shares of dh, two steps deep
    barrier_ptr,  # [batch blocks] int32, zero
    # sizes
    K,
    B,
    row_start,
    row_step,
    # strides
    stride_gates_n,
    stride_c_n,
    stride_c0_n,
    stride_dy_n,
    stride_dcells_n,
    stride_dh_n,
    stride_dc_n,
    # constants
    H: tl.constexpr,
    HAS_DY: tl.constexpr,
    HAS_DCELLS: tl.constexpr,
    CLIP: tl.constexpr,
    PACKED: tl.constexpr,
    RESETS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS_N: tl.constexpr,
    HIDDEN_BLOCKS: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Addresses are a scalar that moves with the step plus a tile of 32-bit offsets that does not: what is kept per
    # thread for the whole loop decides whether the tiles fit into registers.
    pid_b = tl.program_id(0)
    first_h = tl.program_id(1) * BLOCK_H
    zero64 = tl.full((), 0, tl.int64)
    first_b = (zero64 + pid_b) * BLOCK_B
    local_b = tl.arange(0, BLOCK_B)
    local_h = tl.arange(0, BLOCK_H)
    local_n = tl.arange(0, BLOCK_N)
    columns = (first_h + local_h < H)[None, :]
    batch = (first_b + local_b < B)[:, None]
    # Rows of W_hh for the own columns: dgates of the own columns times these is a share of every column's dh.
    w_at = (first_h + local_h)[None, :] * H + local_n[:, None]
    w = ()  # 4 * BLOCKS_N tiles [BLOCK_N, BLOCK_H], for the whole chunk
    for part in tl.static_range(4 * BLOCKS_N):
        first_n = (part % BLOCKS_N) * BLOCK_N
        w_mask = (first_n + local_n < H)[:, None] & (first_h + local_h < H)[None, :]
        w += (tl.load(whh_ptr + (part // BLOCKS_N) * H * H + first_n + w_at, mask=w_mask, other=0.0),)
    element = gates_ptr.dtype.element_ty
    tile = local_b[:, None]
    gates_at = tile * stride_gates_n + local_h[None, :]
    c_at = tile * stride_c_n + local_h[None, :]
    c0_at = tile * stride_c0_n + local_h[None, :]
    dy_at = tile * stride_dy_n + local_h[None, :]
    dcells_at = tile * stride_dcells_n + local_h[None, :]
    share_at = tile * H + local_n[None, :]
    sum_at = tile * H + local_h[None, :]
    share_size = (zero64 + B) * H
    dh_at = dh_ptr + first_b * stride_dh_n + first_h + tile * stride_dh_n + local_h[None, :]
    dc_at = dc_ptr + first_b * stride_dc_n + first_h + tile * stride_dc_n + local_h[None, :]
    dh = tl.load(dh_at, mask=batch & columns, other=0.0).to(tl.float32)
    dc = tl.load(dc_at, mask=batch & columns, other=0.0)
    after = batch & (local_b < 0)[:, None]  # the rows that have shares of dh from the step after this one
    if RESETS:
        anew_after = after  # the rows that started anew in the step after this one
    for reverse in tl.range(0, K, num_stages=1):
        k = K - 1 - reverse
        not_first = (local_b * 0 + k > 0)[:, None]
        if PACKED:
            row = tl.load(offsets_ptr + k) + first_b
            active = (first_b + local_b < tl.load(batches_ptr + k))[:, None]
            before = tl.maximum(k - 1, 0)
            row_before = tl.load(offsets_ptr + before) + first_b
            follows = active & not_first & (first_b + local_b < tl.load(batches_ptr + before))[:, None]
        else:
            row = row_start + (k + zero64) * row_step + first_b
            active = batch
            row_before = row - row_step
            follows = active & not_first
        linked = active
        if RESETS:
            anew = (tl.load(resets_ptr + row + local_b, mask=first_b + local_b < B, other=0) != 0)[:, None]
            linked = active & (anew == 0)
            follows = follows & linked
        mask = active & columns
        own = gates_ptr + row * stride_gates_n + first_h
        i = tl.load(own + gates_at, mask=mask, other=0.0)
        f = tl.load(own + H + gates_at, mask=mask, other=0.0)
        g = tl.load(own + 2 * H + gates_at, mask=mask, other=0.0)
        o = tl.load(own + 3 * H + gates_at, mask=mask, other=0.0)
        c = tl.load(c_ptr + row * stride_c_n + first_h + c_at, mask=mask, other=0.0)
        c_prev = tl.load(c_ptr + row_before * stride_c_n + first_h + c_at, mask=follows & columns, other=0.0)
        c_prev0 = tl.load(
            c0_ptr + first_b * stride_c0_n + first_h + c0_at, mask=linked & columns & (follows == 0), other=0.0
        )
        if HAS_DY:
            dy = tl.load(dy_ptr + row * stride_dy_n + first_h + dy_at, mask=mask, other=0.0)
        if HAS_DCELLS:
            dcells = tl.load(dcells_ptr + row * stride_dcells_n + first_h + dcells_at, mask=mask, other=0.0)
        wait_for(barrier_ptr + pid_b, reverse * HIDDEN_BLOCKS)
        shares = share_ptr + ((reverse + 1) % 2) * HIDDEN_BLOCKS * share_size + first_b * H
        dh = _add_shares(dh, shares + first_h + sum_at, share_size, after, columns, HIDDEN_BLOCKS, CLIP)
        if RESETS:
            dh = tl.where(anew_after, 0.0, dh)
        total = dh
        if HAS_DY:
            total += dy.to(tl.float32)
        i, f, g, o = i.to(tl.float32), f.to(tl.float32), g.to(tl.float32), o.to(tl.float32)
        c_prev += c_prev0
        tanh_c = tanh(c)
        if HAS_DCELLS:
            dc += dcells
        dc_total = dc + total * o * (1.0 - tanh_c * tanh_c)
        d_i = (dc_total * g * i * (1.0 - i)).to(element)
        d_f = (dc_total * c_prev * f * (1.0 - f)).to(element)
        d_g = (dc_total * i * (1.0 - g * g)).to(element)
        d_o = (total * tanh_c * o * (1.0 - o)).to(element)
        tl.store(own + gates_at, d_i, mask=mask)
        tl.store(own + H + gates_at, d_f, mask=mask)
        tl.store(own + 2 * H + gates_at, d_g, mask=mask)
        tl.store(own + 3 * H + gates_at, d_o, mask=mask)
        dc_prev = dc_total * f
        if CLIP is not None:
            dc_prev = clipped(dc_prev, CLIP)
        if RESETS:
            dc_prev = tl.where(anew, 0.0, dc_prev)
        dc = tl.where(active, dc_prev, dc)
        share = share_ptr + ((reverse % 2) * HIDDEN_BLOCKS + tl.program_id(1)) * share_size + first_b * H
        for part in tl.static_range(BLOCKS_N):
            acc = zeros(BLOCK_B, BLOCK_N, SWAP)
            acc = product(d_i, w[part], acc, SWAP, PRECISION)
            acc = product(d_f, w[BLOCKS_N + part], acc, SWAP, PRECISION)
            acc = product(d_g, w[2 * BLOCKS_N + part], acc, SWAP, PRECISION)
            acc = product(d_o, w[3 * BLOCKS_N + part], acc, SWAP, PRECISION)
            if SWAP:
                acc = tl.trans(acc)
            share_mask = batch & (part * BLOCK_N + local_n < H)[None, :]
            tl.store(share + part * BLOCK_N + share_at, acc.to(share_ptr.dtype.element_ty), mask=share_mask)
        arrive(barrier_ptr + pid_b)
        after = active
        if RESETS:
            anew_after = anew
    wait_for(barrier_ptr + pid_b, K * HIDDEN_BLOCKS)
    shares = share_ptr + ((K + 1) % 2) * HIDDEN_BLOCKS * share_size + first_b * H
    dh = _add_shares(dh, shares + first_h + sum_at, share_size, after, columns, HIDDEN_BLOCKS, CLIP)
    if RESETS:
        dh = tl.where(anew_after, 0.0, dh)
    tl.store(dh_at, dh.to(dh_ptr.dtype.element_ty), mask=batch & columns)
    tl.store(dc_at, dc, mask=batch & columns)


def lstm_sequence_backward(
    gates: Tensor,
    weight_hh: Tensor,
    c0: Tensor,
    c: Tensor,
    dy: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    rows: Rows,
    config: Config,
    precision: str = "ieee",
    resets: Tensor | None = None,
    dcells: Tensor | None = None,
    clip: float | None = None,
) -> None:
    """Run the steps of a chunk backwards in one launch.

    Args:
        gates: Gates [rows, 4H], overwritten with the gradients of the pre-activations.
        weight_hh: Recurrent weights [4H, H], contiguous.
        c0: Cell states before the chunk [B, H], float32.
        c: Cell states [rows, H], float32.
        dy: Gradient of the outputs [rows, H], or None for zero.
        dh: Gradient of the outputs after the chunk [B, H], overwritten with that before it.
        dc: Gradient of the cell states after the chunk [B, H], float32, overwritten with that before it.
        rows: Where the steps lie, in the processing order of the forward pass.
        config: Blocks, from `Config.pick`.
        precision: "ieee", "tf32" or "tf32x3" for float32 products.
        resets: As for `lstm_sequence_forward`.
        dcells: Gradient of the cell states from outside [rows, H], float32, or None for zero.
        clip: Bound of the gradients that pass from a step to the one before it, or None.
    """
    B, H = c0.shape
    grid = config.grid(B, H)
    shares = gates.new_empty(2, grid[1], B, H)
    barrier = torch.zeros(grid[0], dtype=torch.int32, device=gates.device)
    launch(
        _sequence_backward_kernel,
        grid,
        gates,
        weight_hh,
        c0,
        c,
        dc if dy is None else dy,
        dc if dcells is None else dcells,
        *rows.pointers(gates),
        gates if resets is None else resets.view(torch.uint8),
        gates,
        dh,
        dc,
        shares,
        barrier,
        rows.steps,
        B,
        rows.start,
        rows.step,
        gates.stride(0),
        c.stride(0),
        c0.stride(0),
        0 if dy is None else dy.stride(0),
        0 if dcells is None else dcells.stride(0),
        dh.stride(0),
        dc.stride(0),
        H=H,
        HAS_DY=dy is not None,
        HAS_DCELLS=dcells is not None,
        CLIP=clip,
        PACKED=rows.offsets is not None,
        RESETS=resets is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        BLOCKS_N=config.blocks_n(H),
        HIDDEN_BLOCKS=grid[1],
        SWAP=config.swap,
        PRECISION=precision,
        **config.options(),
    )
