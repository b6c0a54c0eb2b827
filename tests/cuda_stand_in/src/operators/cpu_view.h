// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// CPU tensors over the memory of CUDA tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace stand_in {

using at::Tensor;
using c10::IValue;

// A CPU tensor over the memory of a CUDA tensor. It does not keep the memory alive: as a kernel, it
// has an address alone. Memory that is given back and used anew too early is therefore read and
// written too early, as on a GPU.
Tensor cpu_view(const Tensor& tensor);

enum class Reader {
  kNow,
  // A CPU tensor may change before the stream comes to it, so it is copied. A kernel, too, gets its
  // arguments by value.
  kStream,
};

// An operator's argument for the CPU's kernel.
IValue cpu_argument(const IValue& argument, Reader reader);

// Write a result of the CPU's kernel into the memory that the CUDA operator allocated for it.
void write_result(const Tensor& allocated, const Tensor& result);

// Call `function` with each tensor of an argument, be it one or a list.
template <class Function>
void for_each_tensor(const IValue& argument, Function function) {
  if (argument.isTensor()) {
    function(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const Tensor& tensor : argument.toTensorVector())
      function(tensor);
  } else if (argument.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : argument.toOptionalTensorVector()) {
      if (tensor)
        function(*tensor);
    }
  }
}

}  // namespace stand_in
