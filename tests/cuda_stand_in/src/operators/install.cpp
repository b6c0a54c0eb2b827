// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Puts a kernel in front of each of ATen's operators that have one for CUDA. It runs when the
// library is loaded (site/stand_in_ops.py).
//
// The original operator runs first: its host code allocates results, advances the generator and
// calls cuBLAS as on a GPU, while its launches do nothing. The CPU's kernel of the same operator
// then goes into the current stream.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "operators/operator.h"

namespace stand_in {
namespace {

using c10::DispatchKey;

constexpr size_t kNamespaceLength = std::string_view("aten::").size();

// Operators that allocate, change metadata or answer the host: no kernel of theirs computes. The
// sparse and nested ones, and those of cuDNN and cuFFT, are not modelled.
constexpr std::array<std::string_view, 16> kWithoutKernel = {
    "_local_scalar_dense",
    "empty",
    "resize",
    "set_",
    "_efficientzero",
    "record_stream",
    "_pin_memory",
    "is_",
    "as_strided",
    "_reshape",
    "_resize",
    "_fused_sdp_choice",
    "_nested",
    "_to_sparse",
    "_cudnn",
    "cudnn",
};
constexpr std::string_view kCufft = "_cufft";

bool is_left_out(std::string_view name) {
  const auto matches = [&](std::string_view prefix) { return name.starts_with(prefix); };
  return name.starts_with(kCufft) ||
         std::any_of(kWithoutKernel.begin(), kWithoutKernel.end(), matches);
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool returns_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return std::any_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

bool has_result(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return !schema.returns().empty() || std::any_of(arguments.begin(), arguments.end(), writes);
}

int find_generator(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    if (schema.arguments()[i].name() == "generator")
      return static_cast<int>(i);
  }
  return -1;
}

bool has_tag(const c10::OperatorHandle& handle, at::Tag tag) {
  const auto tags = handle.getTags();
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

Mode mode_of(const c10::OperatorHandle& handle, std::string_view base_name, bool is_copy) {
  if (is_copy || base_name == "_foreach_copy_")
    return Mode::kCopy;
  // The original's scan of the mask never ends here: masked_select's backward stood still.
  if (base_name.starts_with("masked_scatter"))
    return Mode::kAtOnce;
  if (has_tag(handle, at::Tag::dynamic_output_shape) ||
      has_tag(handle, at::Tag::data_dependent_output))
    return Mode::kAtOnce;
  return Mode::kInStream;
}

// Add an operator if the stand-in computes it.
bool consider(const c10::OperatorName& name, torch::Library& library) {
  if (name.getNamespace() != std::optional<std::string_view>("aten"))
    return false;
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle)
    return false;
  const std::string full_name = c10::toString(name);
  const std::string base_name = name.name.substr(kNamespaceLength);
  const bool is_copy = full_name == "aten::copy_";
  if (!is_copy && !handle->hasKernelForDispatchKey(DispatchKey::CUDA))
    return false;
  const auto& schema = handle->schema();
  if (returns_view(schema) || has_tag(*handle, at::Tag::inplace_view) || !has_result(schema) ||
      is_left_out(base_name))
    return false;
  const CudaOnlyKernel* cuda_only = find_cuda_only(full_name);
  // Without a kernel of the CPU's the original stays, and its launches are reported.
  if (!cuda_only && !handle->hasComputedKernelForDispatchKey(DispatchKey::CPU))
    return false;
  // copy_ has one kernel for all devices; asked for by CUDA's key, it would soon be ours.
  const DispatchKey original_key = is_copy ? DispatchKey::XPU : DispatchKey::CUDA;
  add_operator(name, {*handle, handle->getComputedKernelForDispatchKey(original_key),
                      mode_of(*handle, base_name, is_copy),
                      has_tag(*handle, at::Tag::nondeterministic_seeded), cuda_only, full_name,
                      find_generator(schema)});
  library.impl(full_name.substr(kNamespaceLength).c_str(),
               torch::CppFunction::makeFromBoxedFunction<&call_operator>());
  return true;
}

// torch warns of each kernel that is replaced.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

int install() {
  // Never destroyed: that would take the kernels out again while other threads run.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  static auto* no_warnings = new NoWarnings;
  c10::WarningUtils::WarningHandlerGuard guard(no_warnings);
  int count = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
    count += consider(name, *library);
  if (getenv("STAND_IN_TRACE"))
    fprintf(stderr, "[stand_in_ops %d] %d operators compute\n", getpid(), count);
  return count;
}

[[maybe_unused]] const int installed = install();

}  // namespace
}  // namespace stand_in
