"""Functions of one number that Triton lacks or gets wrong at the ends of its range."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # Any form with exp(2x) gives inf / inf = NaN for large x; this one only ever underflows.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def clip(x, BOUND: tl.constexpr):
    # By comparison, so that NaN stays NaN.
    return tl.where(x > BOUND, BOUND, tl.where(x < -BOUND, -BOUND, x))


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)
