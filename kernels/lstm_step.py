"""One step of an LSTM layer, elementwise: what is left when a product has given the pre-activations.

Forward: i, f, o = sigmoid(pre), g = tanh(pre); c = f c_prev + i g; h = o tanh(c).
Backward, with dh the whole gradient of h: dc' = dc + dh o (1 - tanh(c)^2); the gradients of the pre-activations are
dc' g i (1 - i), dc' c_prev f (1 - f), dc' i (1 - g^2), dh tanh(c) o (1 - o); the gradient of c_prev is dc' f.

Everything is computed in float32 whatever the dtype of gates and h; c and dc are float32 in memory too. The last
dimension of every tensor is contiguous; rows may be any distance apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import Config, launch
from fusedrnn.kernels._math import sigmoid, tanh


@triton.jit
def _forward_kernel(
    # inputs
    pre_ptr,  # [n, 4H] pre-activations in, gates out if STORE_GATES
    c_prev_ptr,  # [n, H] float32
    # outputs
    h_ptr,  # [n, H]
    c_ptr,  # [n, H] float32
    # sizes
    n,
    H,
    # strides
    stride_pre_n,
    stride_c_prev_n,
    stride_h_n,
    stride_c_n,
    # constants
    STORE_GATES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (offs_b < n)[:, None] & (offs_h < H)[None, :]
    pre = pre_ptr + offs_b[:, None] * stride_pre_n + offs_h[None, :]
    element = pre_ptr.dtype.element_ty
    i = sigmoid(tl.load(pre, mask=mask, other=0.0).to(tl.float32))
    f = sigmoid(tl.load(pre + H, mask=mask, other=0.0).to(tl.float32))
    g = tanh(tl.load(pre + 2 * H, mask=mask, other=0.0).to(tl.float32))
    o = sigmoid(tl.load(pre + 3 * H, mask=mask, other=0.0).to(tl.float32))
    c_prev = tl.load(c_prev_ptr + offs_b[:, None] * stride_c_prev_n + offs_h[None, :], mask=mask, other=0.0)
    c = f * c_prev + i * g
    h = o * tanh(c)
    tl.store(c_ptr + offs_b[:, None] * stride_c_n + offs_h[None, :], c, mask=mask)
    tl.store(h_ptr + offs_b[:, None] * stride_h_n + offs_h[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
    if STORE_GATES:
        tl.store(pre, i.to(element), mask=mask)
        tl.store(pre + H, f.to(element), mask=mask)
        tl.store(pre + 2 * H, g.to(element), mask=mask)
        tl.store(pre + 3 * H, o.to(element), mask=mask)


def lstm_step_forward(pre: Tensor, c_prev: Tensor, h: Tensor, c: Tensor, store_gates: bool = True) -> None:
    """Compute one step from its pre-activations.

    Args:
        pre: Pre-activations [n, 4H]; overwritten with the gates i, f, g, o if `store_gates`.
        c_prev: Cell states before the step [n, H], float32.
        h: Outputs [n, H], written.
        c: Cell states after the step [n, H], float32, written; may be the same memory as `c_prev`.
        store_gates: Whether the gates are kept.
    """
    n, H = h.shape
    config = Config.pick(n, H)
    launch(
        _forward_kernel,
        config.grid(n, H),
        pre,
        pre,
        c_prev,
        h,
        c,
        n,
        H,
        pre.stride(0),
        c_prev.stride(0),
        h.stride(0),
        c.stride(0),
        STORE_GATES=store_gates,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )


@triton.jit
def _backward_kernel(
    # inputs
    gates_ptr,  # [n, 4H] gates in
    c_prev_ptr,  # [n, H] float32
    c_ptr,  # [n, H] float32
    dy_ptr,  # [n, H] gradient through the output; not read unless HAS_DY
    dh_ptr,  # [n, H] gradient through the recurrence; not read unless HAS_DH
    # in and out
    dc_ptr,  # [n, H] float32
    # outputs
    dgates_ptr,  # [n, 4H]; may be gates
    # sizes
    n,
    H,
    # strides
    stride_gates_n,
    stride_c_prev_n,
    stride_c_n,
    stride_dy_n,
    stride_dh_n,
    stride_dc_n,
    stride_dgates_n,
    # constants
    HAS_DY: tl.constexpr,
    HAS_DH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (offs_b < n)[:, None] & (offs_h < H)[None, :]
    gates = gates_ptr + offs_b[:, None] * stride_gates_n + offs_h[None, :]
    i = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(gates + H, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gates + 2 * H, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(gates + 3 * H, mask=mask, other=0.0).to(tl.float32)
    c_prev = tl.load(c_prev_ptr + offs_b[:, None] * stride_c_prev_n + offs_h[None, :], mask=mask, other=0.0)
    c = tl.load(c_ptr + offs_b[:, None] * stride_c_n + offs_h[None, :], mask=mask, other=0.0)
    dc_at = dc_ptr + offs_b[:, None] * stride_dc_n + offs_h[None, :]
    dc = tl.load(dc_at, mask=mask, other=0.0)
    dh = tl.zeros([BLOCK_B, BLOCK_H], dtype=tl.float32)
    if HAS_DY:
        dh += tl.load(dy_ptr + offs_b[:, None] * stride_dy_n + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_DH:
        dh += tl.load(dh_ptr + offs_b[:, None] * stride_dh_n + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    tanh_c = tanh(c)
    dc += dh * o * (1.0 - tanh_c * tanh_c)
    dgates = dgates_ptr + offs_b[:, None] * stride_dgates_n + offs_h[None, :]
    element = dgates_ptr.dtype.element_ty
    tl.store(dgates, (dc * g * i * (1.0 - i)).to(element), mask=mask)
    tl.store(dgates + H, (dc * c_prev * f * (1.0 - f)).to(element), mask=mask)
    tl.store(dgates + 2 * H, (dc * i * (1.0 - g * g)).to(element), mask=mask)
    tl.store(dgates + 3 * H, (dh * tanh_c * o * (1.0 - o)).to(element), mask=mask)
    tl.store(dc_at, dc * f, mask=mask)


def lstm_step_backward(
    gates: Tensor, c_prev: Tensor, c: Tensor, dy: Tensor | None, dh: Tensor | None, dc: Tensor, dgates: Tensor
) -> None:
    """Compute the gradients of one step's pre-activations and of the cell states before it.

    Args:
        gates: Gates [n, 4H].
        c_prev: Cell states before the step [n, H], float32.
        c: Cell states after the step [n, H], float32.
        dy: Gradient of h through the output [n, H], or None for zero.
        dh: Gradient of h through the recurrence [n, H], or None for zero.
        dc: Gradient of c [n, H], float32; overwritten with the gradient of c_prev.
        dgates: Gradients of the pre-activations [n, 4H], written; may be the same memory as `gates`.
    """
    n, H = c.shape
    config = Config.pick(n, H)
    launch(
        _backward_kernel,
        config.grid(n, H),
        gates,
        gates,
        c_prev,
        c,
        dc if dy is None else dy,
        dc if dh is None else dh,
        dc,
        dgates,
        n,
        H,
        gates.stride(0),
        c_prev.stride(0),
        c.stride(0),
        0 if dy is None else dy.stride(0),
        0 if dh is None else dh.stride(0),
        dc.stride(0),
        dgates.stride(0),
        HAS_DY=dy is not None,
        HAS_DH=dh is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )
