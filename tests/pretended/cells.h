// Operators that only CUDA has: the fused cells of nn.LSTM and nn.GRU, and products with another result type.
//
// Written with other operators, each of which goes to the current stream.
#pragma once

#include "operators.h"

namespace pretended {

using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor plus(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto gates = (plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx, const at::Tensor& cy,
    const at::Tensor& workspace, bool has_bias) {
  const bool has_h = grad_hy && grad_hy->defined(), has_c = grad_cy && grad_cy->defined();
  if (!has_h && !has_c) return {};
  const auto gates = workspace.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh = cy.tanh();
  const auto dh = has_h ? *grad_hy : at::zeros_like(cy);
  auto dc = dh * o * (1 - tanh * tanh);
  if (has_c) dc = dc + *grad_cy;
  const auto d_gates = at::cat(
      {dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)}, 1);
  return {d_gates, dc * f, has_bias ? d_gates.sum(0) : at::Tensor()};
}
inline std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto in = plus(input_gates, input_bias).chunk(3, 1), hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = (in[0] + hidden[0]).sigmoid(), z = (in[1] + hidden[1]).sigmoid();
  const auto n = (in[2] + r * hidden[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, hidden[2]}, 1)};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3], &hidden = saved[4];
  const auto dn = grad_hy * (1 - z) * (1 - n * n);
  const auto dz = grad_hy * (hx - n) * z * (1 - z), dr = dn * hidden * r * (1 - r);
  const auto d_in = at::cat({dr, dz, dn}, 1), d_hidden = at::cat({dr, dz, dn * r}, 1);
  const at::Tensor none;
  return {d_in, d_hidden, grad_hy * z, has_bias ? d_in.sum(0) : none, has_bias ? d_hidden.sum(0) : none};
}
inline at::Tensor mm_to(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(dtype), b.to(dtype));
}
inline at::Tensor& mm_to_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, at::Tensor& out) {
  return out.copy_(mm_to(a, b, dtype));
}
inline at::Tensor addmm_to(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha) {
  return at::addmm(self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}
inline at::Tensor bmm_to(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return at::bmm(a.to(dtype), b.to(dtype));
}

}  // namespace pretended
