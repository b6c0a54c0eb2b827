// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "operators/cpu_view.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace stand_in {
namespace {

// A number that became a tensor takes no part in type promotion; a copy must not either.
void keep_wrapped_number(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor cpu_tensor(const Tensor& tensor, Reader reader) {
  if (!tensor.defined())
    return tensor;
  if (tensor.is_cuda())
    return cpu_view(tensor);
  if (reader == Reader::kNow || !tensor.device().is_cpu())
    return tensor;
  Tensor copy = tensor.detach().clone();
  keep_wrapped_number(tensor, copy);
  return copy;
}

bool has_same_bytes(const Tensor& left, const Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.is_contiguous() &&
         right.is_contiguous() && !right.is_conj() && !right.is_neg();
}

}  // namespace

Tensor cpu_view(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "stand-in: only dense tensors");
  const c10::Storage& memory = tensor.storage();
  void* address = memory.nbytes() ? memory.mutable_data() : nullptr;
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                       at::DataPtr(address, at::kCPU), nullptr, /*resizable=*/false);
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  c10::TensorImpl* implementation = view.unsafeGetTensorImpl();
  implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  keep_wrapped_number(tensor, view);
  if (tensor.is_conj())
    implementation->_set_conj(true);
  if (tensor.is_neg())
    implementation->_set_neg(true);
  return view;
}

IValue cpu_argument(const IValue& argument, Reader reader) {
  if (argument.isTensor())
    return cpu_tensor(argument.toTensor(), reader);
  if (argument.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : argument.toTensorVector())
      tensors.push_back(cpu_tensor(tensor, reader));
    return tensors;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const std::optional<Tensor>& tensor : argument.toOptionalTensorVector()) {
      std::optional<Tensor> converted;
      if (tensor)
        converted = cpu_tensor(*tensor, reader);
      tensors.push_back(converted);
    }
    return tensors;
  }
  if (argument.isDevice() && argument.toDevice().is_cuda())
    return c10::Device(at::kCPU);
  return argument;
}

void write_result(const Tensor& allocated, const Tensor& result) {
  if (!allocated.defined() || !result.defined())
    return;
  TORCH_CHECK(allocated.sizes() == result.sizes() || allocated.numel() == 0, "shape ",
              allocated.sizes(), " on the GPU but ", result.sizes(), " on the CPU");
  if (!has_same_bytes(allocated, result))
    allocated.copy_(result);
  else if (allocated.numel())
    memcpy(allocated.mutable_data_ptr(), result.const_data_ptr(), allocated.nbytes());
}

}  // namespace stand_in
