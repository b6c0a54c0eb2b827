// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "operators/cuda_only.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

namespace stand_in {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Tensor tensor_or_undefined(const IValue& value) {
  return value.isNone() ? Tensor() : value.toTensor();
}

std::optional<Tensor> if_defined(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// A leaf over the same memory, whose gradient the CPU's autograd computes.
Tensor make_leaf(const Tensor& tensor) {
  Tensor leaf = tensor.detach();
  leaf.requires_grad_(true);
  return leaf;
}

void return_results(Stack& stack, std::vector<IValue> results) {
  stack = std::move(results);
}

// ---- RMSNorm ------------------------------------------------------------------------------------

// The backward operator is not given epsilon, so it takes that of the latest forward one. NaN:
// none.
std::atomic<double> g_latest_epsilon{NAN};

// _fused_rms_norm(input, normalized_shape, weight, eps) -> (output, rstd)
void fused_rms_norm(Stack& stack, const PhiloxState&) {
  const Tensor input = stack[0].toTensor();
  const std::vector<int64_t> shape = stack[1].toIntVector();
  const Tensor weight = tensor_or_undefined(stack[2]);
  const std::optional<double> epsilon = stack[3].toOptional<double>();
  g_latest_epsilon = epsilon.value_or(NAN);
  std::vector<int64_t> dimensions;
  for (size_t i = 0; i < shape.size(); i++)
    dimensions.push_back(input.dim() - static_cast<int64_t>(shape.size() - i));
  const double smallest = epsilon.value_or(std::numeric_limits<float>::epsilon());
  const Tensor variance = input.to(at::kFloat).pow(2).mean(dimensions, /*keepdim=*/true);
  return_results(stack, {at::rms_norm(input, shape, if_defined(weight), epsilon),
                         at::rsqrt(variance.add(smallest))});
}

// _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)
//   -> (grad_input, grad_weight)
// By autograd of the CPU's formula, so that the gradients have the CPU's bits.
void fused_rms_norm_backward(Stack& stack, const PhiloxState&) {
  const Tensor gradient = stack[0].toTensor();
  const Tensor input = make_leaf(stack[1].toTensor());
  const std::vector<int64_t> shape = stack[2].toIntVector();
  Tensor weight = tensor_or_undefined(stack[4]);
  std::vector<Tensor> leaves{input};
  if (weight.defined()) {
    weight = make_leaf(weight);
    leaves.push_back(weight);
  }
  std::optional<double> epsilon = g_latest_epsilon.load();
  if (std::isnan(*epsilon))
    epsilon = std::nullopt;
  c10::AutoGradMode with_gradients(true);
  const Tensor output = at::rms_norm(input, shape, if_defined(weight), epsilon);
  const auto gradients = torch::autograd::grad({output}, leaves, {gradient}, false, false, true);
  return_results(stack, {gradients[0], weight.defined() ? gradients[1] : Tensor()});
}

// ---- Attention ----------------------------------------------------------------------------------

struct Attention {
  Tensor query, key, value, bias;  // query, key, value: [batch, head, position, dimension]
  double dropout;
  bool is_causal;
  std::optional<double> scale;
};

struct AttentionResult {
  Tensor output;
  Tensor log_sum_exp;
};

struct AttentionGradients {
  Tensor query, key, value, bias;
};

// The formula, for what the CPU's flash attention lacks: dropout, and the gradient of the bias. The
// mask is a function of the generator's state, which forward saves and backward gets.
AttentionResult attend_by_formula(const Attention& a, const PhiloxState& state) {
  const auto head_dimension = static_cast<double>(a.query.size(-1));
  const double scale = a.scale.value_or(1 / std::sqrt(head_dimension));
  const int64_t heads_per_key = a.query.size(1) / a.key.size(1);
  const Tensor key = a.key.repeat_interleave(heads_per_key, 1).to(at::kFloat);
  const Tensor value = a.value.repeat_interleave(heads_per_key, 1).to(at::kFloat);
  Tensor scores = a.query.to(at::kFloat).matmul(key.transpose(-2, -1)) * scale;
  if (a.bias.defined())
    scores = scores + a.bias;
  if (a.is_causal) {
    const Tensor visible = at::ones_like(scores[0][0], at::kBool).tril();
    scores = scores.masked_fill(visible.logical_not(), -std::numeric_limits<float>::infinity());
  }
  Tensor weights = scores.softmax(-1);
  if (a.dropout > 0) {
    const Tensor drawn = at::rand(scores.sizes(), state.cpu_generator(), at::kFloat);
    weights = weights * drawn.ge(a.dropout).to(at::kFloat) / (1 - a.dropout);
  }
  return {weights.matmul(value).to(a.query.scalar_type()), scores.logsumexp(-1)};
}

AttentionResult attend(const Attention& a, const PhiloxState& state) {
  if (a.dropout > 0)
    return attend_by_formula(a, state);
  const auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      a.query, a.key, a.value, 0.0, a.is_causal, if_defined(a.bias), a.scale);
  return {output, log_sum_exp};
}

AttentionGradients attend_backward_by_formula(Attention a, const Tensor& gradient,
                                              const PhiloxState& state) {
  c10::AutoGradMode with_gradients(true);
  a.query = make_leaf(a.query);
  a.key = make_leaf(a.key);
  a.value = make_leaf(a.value);
  std::vector<Tensor> leaves{a.query, a.key, a.value};
  if (a.bias.defined()) {
    a.bias = make_leaf(a.bias);
    leaves.push_back(a.bias);
  }
  const Tensor output = attend_by_formula(a, state).output;
  const auto gradients = torch::autograd::grad({output}, leaves, {gradient});
  return {gradients[0], gradients[1], gradients[2], a.bias.defined() ? gradients[3] : Tensor()};
}

AttentionGradients attend_backward(const Attention& a, const Tensor& gradient, const Tensor& output,
                                   const Tensor& log_sum_exp, bool wants_bias_gradient,
                                   const PhiloxState& state) {
  if (a.dropout > 0 || wants_bias_gradient)
    return attend_backward_by_formula(a, gradient, state);
  // The CPU's kernel expects the layout that its own forward gives.
  const Tensor as_cpu = log_sum_exp.transpose(1, 2).contiguous().transpose(1, 2);
  const auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, a.query, a.key, a.value, output, as_cpu, 0.0, a.is_causal, if_defined(a.bias),
      a.scale);
  return {query, key, value, Tensor()};
}

// CUDA's memory-efficient attention pads the positions of log_sum_exp to a multiple of 32.
Tensor pad_positions(const Tensor& log_sum_exp) {
  const int64_t positions = log_sum_exp.size(2);
  const int64_t padded = (positions + 31) / 32 * 32;
  if (padded == positions)
    return log_sum_exp;
  Tensor result = at::zeros({log_sum_exp.size(0), log_sum_exp.size(1), padded}, at::kFloat);
  result.narrow(2, 0, positions).copy_(log_sum_exp);
  return result;
}

// _scaled_dot_product_efficient_attention(query, key, value, attn_bias, compute_log_sumexp,
//   dropout_p, is_causal, scale) -> (output, log_sumexp, philox_seed, philox_offset)
// The original's host code fills in seed and offset.
void efficient_attention(Stack& stack, const PhiloxState& state) {
  const Attention a{stack[0].toTensor(),           stack[1].toTensor(), stack[2].toTensor(),
                    tensor_or_undefined(stack[3]), stack[5].toDouble(), stack[6].toBool(),
                    stack[7].toOptional<double>()};
  const bool wants_log_sum_exp = stack[4].toBool();
  const AttentionResult result = attend(a, state);
  IValue log_sum_exp;
  if (wants_log_sum_exp)
    log_sum_exp = pad_positions(result.log_sum_exp);
  return_results(stack, {result.output, log_sum_exp});
}

// _scaled_dot_product_efficient_attention_backward(grad_out, query, key, value, attn_bias, out,
//   logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal, scale)
//   -> (grad_query, grad_key, grad_value, grad_bias)
void efficient_attention_backward(Stack& stack, const PhiloxState&) {
  const Attention a{stack[1].toTensor(),           stack[2].toTensor(), stack[3].toTensor(),
                    tensor_or_undefined(stack[4]), stack[9].toDouble(), stack[11].toBool(),
                    stack[12].toOptional<double>()};
  const bool wants_bias_gradient = a.bias.defined() && stack[10].toBoolList().get(3);
  PhiloxState state;
  if (a.dropout > 0) {
    state.seed = stack[7].toTensor().item<int64_t>();
    state.offset = stack[8].toTensor().item<int64_t>();
  }
  const Tensor log_sum_exp = stack[6].toTensor().narrow(2, 0, a.query.size(2));
  const AttentionGradients gradients = attend_backward(a, stack[0].toTensor(), stack[5].toTensor(),
                                                       log_sum_exp, wants_bias_gradient, state);
  return_results(stack, {gradients.query, gradients.key, gradients.value, gradients.bias});
}

// _scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask,
//   scale) -> (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, mask)
// CUDA's kernel writes rng_state, in the stream.
void flash_attention(Stack& stack, const PhiloxState& state) {
  const Attention a{
      stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(),          Tensor(),
      stack[3].toDouble(), stack[4].toBool(),   stack[6].toOptional<double>()};
  const AttentionResult result = attend(a, state);
  const Tensor words = at::empty({2}, at::kUInt64);
  auto* word = static_cast<uint64_t*>(words.mutable_data_ptr());
  word[0] = state.seed;
  word[1] = state.offset;
  return_results(
      stack, {result.output, result.log_sum_exp, IValue(), IValue(), IValue(), IValue(), words});
}

// _scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, logsumexp,
//   cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, scale)
//   -> (grad_query, grad_key, grad_value)
void flash_attention_backward(Stack& stack, const PhiloxState&) {
  const Attention a{
      stack[1].toTensor(),  stack[2].toTensor(), stack[3].toTensor(),           Tensor(),
      stack[10].toDouble(), stack[11].toBool(),  stack[14].toOptional<double>()};
  PhiloxState state;
  if (a.dropout > 0) {
    const auto* word = static_cast<const uint64_t*>(stack[12].toTensor().const_data_ptr());
    state = {word[0], word[1]};
  }
  const AttentionGradients gradients = attend_backward(a, stack[0].toTensor(), stack[4].toTensor(),
                                                       stack[5].toTensor(), false, state);
  return_results(stack, {gradients.query, gradients.key, gradients.value});
}

}  // namespace

const CudaOnlyKernel* find_cuda_only(const std::string& name) {
  static const auto* kernels = new std::unordered_map<std::string, CudaOnlyKernel>{
      {"aten::_fused_rms_norm", fused_rms_norm},
      {"aten::_fused_rms_norm_backward", fused_rms_norm_backward},
      {"aten::_scaled_dot_product_efficient_attention", efficient_attention},
      {"aten::_scaled_dot_product_efficient_attention_backward", efficient_attention_backward},
      {"aten::_scaled_dot_product_flash_attention", flash_attention},
      {"aten::_scaled_dot_product_flash_attention_backward", flash_attention_backward},
  };
  const auto found = kernels->find(name);
  return found == kernels->end() ? nullptr : &found->second;
}

}  // namespace stand_in
