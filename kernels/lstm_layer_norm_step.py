"""One step of a layer-normalised LSTM, on whole rows: what is left when a product has given `hproj`.

With N(v) = (v - mean v) / sqrt(var v + eps), forward: pre += N(hproj) gain_hh; i, f, o = sigmoid(pre), g = tanh(pre);
c = f c_prev + i g; h = o tanh(N(c) gain_c + bias_c). The mean of `hproj` is over all four gates.
Backward, with dh the whole gradient of h and a = N(c) gain_c + bias_c: da = dh o (1 - tanh(a)^2); dc' = dc + what da
gives c through the normalisation; the gradients of pre are dc' g i (1 - i), dc' c_prev f (1 - f), dc' i (1 - g^2),
dh tanh(a) o (1 - o); the gradient of c_prev is dc' f. Through z = N(v) w the gradient of v is
(w dz - mean(w dz) - N(v) mean(w dz N(v))) / sqrt(var v + eps) (Ba, Kiros and Hinton 2016).

Everything is computed in float32 whatever the dtype of the layer; only h, dy, dh, the forward's hproj and dhproj have
it in memory. The last dimension of every tensor is contiguous; rows may be any distance apart.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from fusedrnn.kernels._launch import Config, launch
from fusedrnn.kernels._math import sigmoid, tanh


@lru_cache(maxsize=256)
def pick(rows: int, H: int) -> Config:
    """Choose blocks for `rows` whole rows of H columns.

    A thread has four columns of one row in each gate, so that loads are of 16 bytes in float32; rows wider than 2048
    leave it eight, which is where registers end (128 a thread at H=4096, no spills). Narrow rows share a program until
    it has 256 columns. By compile report, not measured.
    """
    block_h = triton.next_power_of_2(H)
    block_b = max(1, min(triton.next_power_of_2(rows), 256 // block_h))
    return Config(block_b, block_h, max(1, min(16, block_b * block_h // 128)))


@triton.jit
def _forward_kernel(
    # inputs
    pre_ptr,  # [n, 4H] float32, the input's part
    hproj_ptr,  # [n, 4H]
    c_prev_ptr,  # [n, H] float32
    gain_hh_ptr,  # [4H] float32
    gain_c_ptr,  # [H] float32
    bias_c_ptr,  # [H] float32
    # outputs
    h_ptr,  # [n, H]
    c_ptr,  # [n, H] float32
    # sizes
    n_rows,
    H,
    # strides
    stride_pre_n,
    stride_hproj_n,
    stride_c_prev_n,
    stride_h_n,
    stride_c_n,
    # constants
    EPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    mask = (offs_b < n_rows)[:, None] & mask_h[None, :]
    hproj = hproj_ptr + offs_b[:, None] * stride_hproj_n + offs_h[None, :]
    r_i = tl.load(hproj, mask=mask, other=0.0).to(tl.float32)
    r_f = tl.load(hproj + H, mask=mask, other=0.0).to(tl.float32)
    r_g = tl.load(hproj + 2 * H, mask=mask, other=0.0).to(tl.float32)
    r_o = tl.load(hproj + 3 * H, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(r_i + r_f + r_g + r_o, 1)[:, None] / (4 * H)
    r_i = tl.where(mask, r_i - mean, 0.0)
    r_f = tl.where(mask, r_f - mean, 0.0)
    r_g = tl.where(mask, r_g - mean, 0.0)
    r_o = tl.where(mask, r_o - mean, 0.0)
    var = tl.sum(r_i * r_i + r_f * r_f + r_g * r_g + r_o * r_o, 1)[:, None] / (4 * H)
    rstd = 1.0 / tl.sqrt(var + EPS)
    pre = pre_ptr + offs_b[:, None] * stride_pre_n + offs_h[None, :]
    gain = gain_hh_ptr + offs_h
    gain_i = tl.load(gain, mask=mask_h, other=0.0)[None, :]
    gain_f = tl.load(gain + H, mask=mask_h, other=0.0)[None, :]
    gain_g = tl.load(gain + 2 * H, mask=mask_h, other=0.0)[None, :]
    gain_o = tl.load(gain + 3 * H, mask=mask_h, other=0.0)[None, :]
    i = sigmoid(tl.load(pre, mask=mask, other=0.0) + r_i * rstd * gain_i)
    f = sigmoid(tl.load(pre + H, mask=mask, other=0.0) + r_f * rstd * gain_f)
    g = tanh(tl.load(pre + 2 * H, mask=mask, other=0.0) + r_g * rstd * gain_g)
    o = sigmoid(tl.load(pre + 3 * H, mask=mask, other=0.0) + r_o * rstd * gain_o)
    c_prev = tl.load(c_prev_ptr + offs_b[:, None] * stride_c_prev_n + offs_h[None, :], mask=mask, other=0.0)
    c = f * c_prev + i * g
    tl.store(c_ptr + offs_b[:, None] * stride_c_n + offs_h[None, :], c, mask=mask)
    mean_c = tl.sum(tl.where(mask, c, 0.0), 1)[:, None] / H
    centred = tl.where(mask, c - mean_c, 0.0)
    rstd_c = 1.0 / tl.sqrt(tl.sum(centred * centred, 1)[:, None] / H + EPS)
    gain_c = tl.load(gain_c_ptr + offs_h, mask=mask_h, other=0.0)[None, :]
    bias_c = tl.load(bias_c_ptr + offs_h, mask=mask_h, other=0.0)[None, :]
    h = o * tanh(centred * rstd_c * gain_c + bias_c)
    tl.store(h_ptr + offs_b[:, None] * stride_h_n + offs_h[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


def lstm_layer_norm_step_forward(
    pre: Tensor,
    hproj: Tensor,
    c_prev: Tensor,
    gain_hh: Tensor,
    gain_c: Tensor,
    bias_c: Tensor,
    h: Tensor,
    c: Tensor,
    eps: float,
) -> None:
    """Compute one step.

    Args:
        pre: The input's part of the pre-activations [n, 4H], float32.
        hproj: Recurrent products [n, 4H].
        c_prev: Cell states before the step [n, H], float32.
        gain_hh: Gain of the recurrent products [4H], float32.
        gain_c: Gain of the cell states [H], float32.
        bias_c: Bias of the cell states [H], float32.
        h: Outputs [n, H], written.
        c: Cell states after the step [n, H], float32, written; may be the same memory as `c_prev`.
        eps: What is added to a variance.
    """
    n, H = h.shape
    config = pick(n, H)
    launch(
        _forward_kernel,
        config.grid(n, H),
        pre,
        pre,
        hproj,
        c_prev,
        gain_hh,
        gain_c,
        bias_c,
        h,
        c,
        n,
        H,
        pre.stride(0),
        hproj.stride(0),
        c_prev.stride(0),
        h.stride(0),
        c.stride(0),
        EPS=eps,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )


@triton.jit
def _backward_kernel(
    # inputs
    hproj_ptr,  # [n, 4H] float32
    mean_h_ptr,  # [n] float32
    rstd_h_ptr,  # [n] float32
    c_ptr,  # [n, H] float32
    mean_c_ptr,  # [n] float32
    rstd_c_ptr,  # [n] float32
    c_prev_ptr,  # [n, H] float32
    gain_hh_ptr,  # [4H] float32
    gain_c_ptr,  # [H] float32
    bias_c_ptr,  # [H] float32
    dy_ptr,  # [n, H]; not read unless HAS_DY
    dh_ptr,  # [n, H]
    # in and out
    gates_ptr,  # [n, 4H] float32, gates in, gradients of the pre-activations out
    dc_ptr,  # [n, H] float32
    # outputs
    da_ptr,  # [n, H] float32
    dhproj_ptr,  # [n, 4H]
    # sizes
    n_rows,
    H,
    # strides
    stride_hproj_n,
    stride_c_n,
    stride_c_prev_n,
    stride_dy_n,
    stride_dh_n,
    stride_gates_n,
    stride_dc_n,
    stride_da_n,
    stride_dhproj_n,
    # constants
    HAS_DY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs_b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_h = tl.arange(0, BLOCK_H)
    mask_b, mask_h = offs_b < n_rows, offs_h < H
    mask = mask_b[:, None] & mask_h[None, :]
    dh = tl.load(dh_ptr + offs_b[:, None] * stride_dh_n + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_DY:
        dh += tl.load(dy_ptr + offs_b[:, None] * stride_dy_n + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    gates = gates_ptr + offs_b[:, None] * stride_gates_n + offs_h[None, :]
    o = tl.load(gates + 3 * H, mask=mask, other=0.0)

    # From the output to the cell state.
    mean_c = tl.load(mean_c_ptr + offs_b, mask=mask_b, other=0.0)[:, None]
    rstd_c = tl.load(rstd_c_ptr + offs_b, mask=mask_b, other=0.0)[:, None]
    gain_c = tl.load(gain_c_ptr + offs_h, mask=mask_h, other=0.0)[None, :]
    bias_c = tl.load(bias_c_ptr + offs_h, mask=mask_h, other=0.0)[None, :]
    c = tl.load(c_ptr + offs_b[:, None] * stride_c_n + offs_h[None, :], mask=mask, other=0.0)
    n_c = tl.where(mask, (c - mean_c) * rstd_c, 0.0)
    tanh_a = tanh(n_c * gain_c + bias_c)
    da = dh * o * (1.0 - tanh_a * tanh_a)
    tl.store(da_ptr + offs_b[:, None] * stride_da_n + offs_h[None, :], da, mask=mask)
    v = da * gain_c
    through = v - tl.sum(v, 1)[:, None] / H - n_c * (tl.sum(v * n_c, 1)[:, None] / H)
    dc_at = dc_ptr + offs_b[:, None] * stride_dc_n + offs_h[None, :]
    dc = tl.load(dc_at, mask=mask, other=0.0) + rstd_c * through

    # From there to the pre-activations and the cell state before.
    i = tl.load(gates, mask=mask, other=0.0)
    f = tl.load(gates + H, mask=mask, other=0.0)
    g = tl.load(gates + 2 * H, mask=mask, other=0.0)
    c_prev = tl.load(c_prev_ptr + offs_b[:, None] * stride_c_prev_n + offs_h[None, :], mask=mask, other=0.0)
    d_i = dc * g * i * (1.0 - i)
    d_f = dc * c_prev * f * (1.0 - f)
    d_g = dc * i * (1.0 - g * g)
    d_o = dh * tanh_a * o * (1.0 - o)
    tl.store(dc_at, dc * f, mask=mask)
    tl.store(gates, d_i, mask=mask)
    tl.store(gates + H, d_f, mask=mask)
    tl.store(gates + 2 * H, d_g, mask=mask)
    tl.store(gates + 3 * H, d_o, mask=mask)

    # From the pre-activations to the recurrent products.
    mean_h = tl.load(mean_h_ptr + offs_b, mask=mask_b, other=0.0)[:, None]
    rstd_h = tl.load(rstd_h_ptr + offs_b, mask=mask_b, other=0.0)[:, None]
    hproj = hproj_ptr + offs_b[:, None] * stride_hproj_n + offs_h[None, :]
    gain = gain_hh_ptr + offs_h
    v_i = d_i * tl.load(gain, mask=mask_h, other=0.0)[None, :]
    v_f = d_f * tl.load(gain + H, mask=mask_h, other=0.0)[None, :]
    v_g = d_g * tl.load(gain + 2 * H, mask=mask_h, other=0.0)[None, :]
    v_o = d_o * tl.load(gain + 3 * H, mask=mask_h, other=0.0)[None, :]
    n_i = (tl.load(hproj, mask=mask, other=0.0) - mean_h) * rstd_h
    n_f = (tl.load(hproj + H, mask=mask, other=0.0) - mean_h) * rstd_h
    n_g = (tl.load(hproj + 2 * H, mask=mask, other=0.0) - mean_h) * rstd_h
    n_o = (tl.load(hproj + 3 * H, mask=mask, other=0.0) - mean_h) * rstd_h
    # Outside of the rows every v is 0, so that nothing there counts.
    mean_v = tl.sum(v_i + v_f + v_g + v_o, 1)[:, None] / (4 * H)
    mean_vn = tl.sum(v_i * n_i + v_f * n_f + v_g * n_g + v_o * n_o, 1)[:, None] / (4 * H)
    dhproj = dhproj_ptr + offs_b[:, None] * stride_dhproj_n + offs_h[None, :]
    element = dhproj_ptr.dtype.element_ty
    tl.store(dhproj, ((v_i - mean_v - n_i * mean_vn) * rstd_h).to(element), mask=mask)
    tl.store(dhproj + H, ((v_f - mean_v - n_f * mean_vn) * rstd_h).to(element), mask=mask)
    tl.store(dhproj + 2 * H, ((v_g - mean_v - n_g * mean_vn) * rstd_h).to(element), mask=mask)
    tl.store(dhproj + 3 * H, ((v_o - mean_v - n_o * mean_vn) * rstd_h).to(element), mask=mask)


def lstm_layer_norm_step_backward(
    gates: Tensor,
    hproj: Tensor,
    mean_h: Tensor,
    rstd_h: Tensor,
    c: Tensor,
    mean_c: Tensor,
    rstd_c: Tensor,
    c_prev: Tensor,
    gain_hh: Tensor,
    gain_c: Tensor,
    bias_c: Tensor,
    dy: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    da: Tensor,
    dhproj: Tensor,
) -> None:
    """Compute one step's gradients. All tensors are float32 but for dy, dh and dhproj.

    Args:
        gates: Gates i, f, g, o [n, 4H], overwritten with the gradients of the pre-activations.
        hproj: Recurrent products [n, 4H].
        mean_h: Their means [n, 1], contiguous.
        rstd_h: 1 / sqrt(variance + eps) of them [n, 1], contiguous.
        c: Cell states after the step [n, H].
        mean_c: Their means [n, 1], contiguous.
        rstd_c: 1 / sqrt(variance + eps) of them [n, 1], contiguous.
        c_prev: Cell states before the step [n, H].
        gain_hh: Gain of the recurrent products [4H].
        gain_c: Gain of the cell states [H].
        bias_c: Bias of the cell states [H].
        dy: Gradient of h through the output [n, H], or None for zero.
        dh: Gradient of h through the recurrence [n, H].
        dc: Gradient of c [n, H]; overwritten with the gradient of c_prev.
        da: Gradients of the normalised cell states with gain and bias [n, H], written.
        dhproj: Gradients of the recurrent products [n, 4H], written.
    """
    n, H = c.shape
    config = pick(n, H)
    launch(
        _backward_kernel,
        config.grid(n, H),
        gates,
        hproj,
        mean_h,
        rstd_h,
        c,
        mean_c,
        rstd_c,
        c_prev,
        gain_hh,
        gain_c,
        bias_c,
        dh if dy is None else dy,
        dh,
        gates,
        dc,
        da,
        dhproj,
        n,
        H,
        hproj.stride(0),
        c.stride(0),
        c_prev.stride(0),
        0 if dy is None else dy.stride(0),
        dh.stride(0),
        gates.stride(0),
        dc.stride(0),
        da.stride(0),
        dhproj.stride(0),
        HAS_DY=dy is not None,
        BLOCK_B=config.block_b,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
    )
