"""One step of a GRU layer, elementwise: what is left when products have given both projections.

Forward: r, z = sigmoid(xproj + hproj), n = tanh(xproj_n + r hproj_n), h = n + z (h_prev - n).
Backward, with dh the whole gradient of h: dn = dh (1 - z) (1 - n^2), dz = dh (h_prev - n) z (1 - z),
dr = dn hproj_n r (1 - r) are the gradients of the input projection, dn r that of hproj_n, and dh z that of h_prev
besides what comes through hproj.

Everything is computed in float32 whatever the dtype. The last dimension of every tensor is contiguous; rows may be any
distance apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import Config, launch
from fusedrnn.kernels._math import sigmoid, tanh


@triton.jit
def _forward_kernel(
    # inputs
    pre_ptr,  # [n, 3H] input projection in, r, z, n out if STORE_GATES
    hproj_ptr,  # [n, 3H]
    h_prev_ptr,  # [n, H]; not read unless WRITE_H
    # outputs
    h_ptr,  # [n, H]; not written unless WRITE_H
    hn_ptr,  # [n, H]; not written unless STORE_GATES
    # sizes
    n_rows,
    H,
    # strides
    stride_pre_n,
    stride_hproj_n,
    stride_h_prev_n,
    stride_h_n,
    stride_hn_n,
    # constants
    STORE_GATES: tl.constexpr,
    WRITE_H: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (offs_b < n_rows)[:, None] & (offs_h < H)[None, :]
    pre = pre_ptr + offs_b[:, None] * stride_pre_n + offs_h[None, :]
    hproj = hproj_ptr + offs_b[:, None] * stride_hproj_n + offs_h[None, :]
    element = pre_ptr.dtype.element_ty
    x_r = tl.load(pre, mask=mask, other=0.0).to(tl.float32)
    x_z = tl.load(pre + H, mask=mask, other=0.0).to(tl.float32)
    x_n = tl.load(pre + 2 * H, mask=mask, other=0.0).to(tl.float32)
    r = sigmoid(x_r + tl.load(hproj, mask=mask, other=0.0).to(tl.float32))
    z = sigmoid(x_z + tl.load(hproj + H, mask=mask, other=0.0).to(tl.float32))
    h_n = tl.load(hproj + 2 * H, mask=mask, other=0.0).to(tl.float32)
    n = tanh(x_n + r * h_n)
    if WRITE_H:
        h_prev_at = h_prev_ptr + offs_b[:, None] * stride_h_prev_n + offs_h[None, :]
        h = n + z * (tl.load(h_prev_at, mask=mask, other=0.0).to(tl.float32) - n)
        tl.store(h_ptr + offs_b[:, None] * stride_h_n + offs_h[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
    if STORE_GATES:
        tl.store(pre, r.to(element), mask=mask)
        tl.store(pre + H, z.to(element), mask=mask)
        tl.store(pre + 2 * H, n.to(element), mask=mask)
        tl.store(hn_ptr + offs_b[:, None] * stride_hn_n + offs_h[None, :], h_n.to(element), mask=mask)


def gru_step_forward(pre: Tensor, hproj: Tensor, h_prev: Tensor | None, h: Tensor | None, hn: Tensor | None) -> None:
    """Compute one step, or the gates of many steps of which every h is known.

    Args:
        pre: Input projections [n, 3H]; overwritten with the gates r, z, n unless `hn` is None.
        hproj: Recurrent products with their biases [n, 3H].
        h_prev: Outputs before the step [n, H], or None where the gates are all that is wanted.
        h: Outputs [n, H], written; None together with `h_prev`.
        hn: Recurrent products of n [n, H], written; None where nobody reads gates again.
    """
    rows, H = pre.shape[0], pre.shape[1] // 3
    config = Config.pick(rows, H)
    launch(
        _forward_kernel,
        config.grid(rows, H),
        pre,
        pre,
        hproj,
        hproj if h_prev is None else h_prev,
        hproj if h is None else h,
        hproj if hn is None else hn,
        rows,
        H,
        pre.stride(0),
        hproj.stride(0),
        0 if h_prev is None else h_prev.stride(0),
        0 if h is None else h.stride(0),
        0 if hn is None else hn.stride(0),
        STORE_GATES=hn is not None,
        WRITE_H=h is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )


@triton.jit
def _backward_kernel(
    # inputs
    h_prev_ptr,  # [n, H]
    dy_ptr,  # [n, H]; not read unless HAS_DY
    # in and out
    gates_ptr,  # [n, 3H] r, z, n in, gradients of the input projection out
    hn_ptr,  # [n, H] recurrent product of n in, its gradient out
    dh_ptr,  # [n, H] gradient of h through the recurrence in, the part of h_prev's past hproj out
    # sizes
    n_rows,
    H,
    # strides
    stride_h_prev_n,
    stride_dy_n,
    stride_gates_n,
    stride_hn_n,
    stride_dh_n,
    # constants
    HAS_DY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (offs_b < n_rows)[:, None] & (offs_h < H)[None, :]
    gates = gates_ptr + offs_b[:, None] * stride_gates_n + offs_h[None, :]
    hn_at = hn_ptr + offs_b[:, None] * stride_hn_n + offs_h[None, :]
    dh_at = dh_ptr + offs_b[:, None] * stride_dh_n + offs_h[None, :]
    element = gates_ptr.dtype.element_ty
    r = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gates + H, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(gates + 2 * H, mask=mask, other=0.0).to(tl.float32)
    h_n = tl.load(hn_at, mask=mask, other=0.0).to(tl.float32)
    h_prev_at = h_prev_ptr + offs_b[:, None] * stride_h_prev_n + offs_h[None, :]
    h_prev = tl.load(h_prev_at, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DY:
        dh += tl.load(dy_ptr + offs_b[:, None] * stride_dy_n + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    dn = dh * (1.0 - z) * (1.0 - n * n)
    tl.store(gates, (dn * h_n * r * (1.0 - r)).to(element), mask=mask)
    tl.store(gates + H, (dh * (h_prev - n) * z * (1.0 - z)).to(element), mask=mask)
    tl.store(gates + 2 * H, dn.to(element), mask=mask)
    tl.store(hn_at, (dn * r).to(element), mask=mask)
    tl.store(dh_at, (dh * z).to(dh_ptr.dtype.element_ty), mask=mask)


def gru_step_backward(gates: Tensor, hn: Tensor, h_prev: Tensor, dy: Tensor | None, dh: Tensor) -> None:
    """Compute the gradients of one step's projections.

    Args:
        gates: Gates r, z, n [n, 3H], overwritten with the gradients of the input projection.
        hn: Recurrent products of n [n, H], overwritten with their gradients.
        h_prev: Outputs before the step [n, H].
        dy: Gradient of h through the output [n, H], or None for zero.
        dh: Gradient of h through the recurrence [n, H], overwritten with (dh + dy) z.
    """
    rows, H = hn.shape
    config = Config.pick(rows, H)
    launch(
        _backward_kernel,
        config.grid(rows, H),
        gates,
        h_prev,
        dh if dy is None else dy,
        gates,
        hn,
        dh,
        rows,
        H,
        h_prev.stride(0),
        0 if dy is None else dy.stride(0),
        gates.stride(0),
        hn.stride(0),
        dh.stride(0),
        HAS_DY=dy is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )
