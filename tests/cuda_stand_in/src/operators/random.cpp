// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "operators/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "common/environment.h"

namespace stand_in {

at::Generator PhiloxState::cpu_generator() const {
  const uint64_t mixed =
      seed * 0x9e3779b97f4a7c15ull ^ (offset + 0x632be59bd9b4e019ull) * 0xd1b54a32d192ed03ull;
  return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 29));
}

PhiloxState philox_state(const c10::IValue* given, int device) {
  at::Generator generator = given && given->isGenerator()
                                ? given->toGenerator()
                                : at::globalContext().defaultGenerator(c10::Device(
                                      at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  const auto* words = static_cast<const uint64_t*>(state.const_data_ptr());
  return {words[0], words[1]};
}

bool draws_as_cpu() {
  static const bool as_cpu = knob_is("STAND_IN_RNG", "cpu");
  return as_cpu;
}

at::Generator generator_for(const c10::IValue* given, int device) {
  if (draws_as_cpu())
    return at::detail::getDefaultCPUGenerator();
  return philox_state(given, device).cpu_generator();
}

}  // namespace stand_in
