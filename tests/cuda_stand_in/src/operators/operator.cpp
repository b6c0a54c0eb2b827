// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "operators/operator.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "common/environment.h"
#include "common/runtime_hooks.h"
#include "operators/cpu_view.h"
#include "operators/random.h"

namespace stand_in {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

constexpr int kStreamErrorExit = 86;

std::unordered_map<c10::OperatorName, Operator*>& operators() {
  static auto* operators = new std::unordered_map<c10::OperatorName, Operator*>;
  return *operators;
}

struct Counts {
  std::atomic<long> in_stream{0};
  std::atomic<long> at_once{0};
  std::atomic<long> nanoseconds_in_stream{0};
};

Counts g_counts;

// How many operators of the stand-in the thread is inside of. Only the outermost one computes: the
// CPU's kernel of a composite operator does all the work of its inner operators.
thread_local int t_depth = 0;

// The original operator runs, or the CPU's kernel: launches and copies do nothing.
class InsideOperator {
 public:
  explicit InsideOperator(const Operator& op) {
    t_depth++;
    fakecuda_guard(1);
    fakecuda_op(op.name.c_str());
  }
  ~InsideOperator() {
    t_depth--;
    fakecuda_guard(-1);
    fakecuda_op("");
  }
};

// An operator whose result the host needs computes also inside of another one.
class OutsideOperators {
 public:
  OutsideOperators() : depth_(std::exchange(t_depth, 0)), guard_(fakecuda_guard(0)) {
    fakecuda_guard(-guard_);
  }
  ~OutsideOperators() {
    t_depth = depth_;
    fakecuda_guard(guard_);
  }

 private:
  const int depth_;
  const int guard_;
};

const c10::impl::VirtualGuardImpl& cuda_guard() {
  static const auto* guard = new c10::impl::VirtualGuardImpl(at::kCUDA);
  return *guard;
}

c10::Device cuda_device(int index) {
  return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

cudaStream_t current_stream(int device) {
  return static_cast<cudaStream_t>(cuda_guard().getStream(cuda_device(device)).native_handle());
}

// The device of the first CUDA tensor, else that of a device argument, else the thread's.
int device_of(const Stack& arguments) {
  int device = -1;
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& tensor) {
      if (device < 0 && tensor.defined() && tensor.is_cuda())
        device = tensor.device().index();
    });
  }
  for (const IValue& argument : arguments) {
    if (device < 0 && argument.isDevice() && argument.toDevice().is_cuda())
      device = argument.toDevice().index();
  }
  return device < 0 ? cuda_guard().getDevice().index() : device;
}

// A result that is one of the arguments, as of an in-place or an out= operator.
bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// More threads would divide sums differently: a run has the bits of a CPU run that has as many.
void limit_threads() {
  static const int threads = knob("FAKE_CUDA_CPU_THREADS", 1);
  thread_local bool done = false;
  if (!std::exchange(done, true))
    at::set_num_threads(threads);
}

void call_cpu_kernel(const Operator& op, Stack& stack, const PhiloxState& state) {
  limit_threads();
  c10::AutoGradMode without_gradients(false);
  if (op.cuda_only) {
    // With autograd's dispatch, for some differentiate a formula.
    (*op.cuda_only)(stack, state);
    return;
  }
  at::AutoDispatchBelowAutograd below_autograd;
  op.handle.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
}

// ---- In the stream ------------------------------------------------------------------------------

struct StreamWork {
  const Operator& op;
  // Arguments, and the memory that the original allocated for results. None of them keeps memory
  // of the device alive.
  Stack arguments;
  Stack allocated;
  PhiloxState state;

  void run() {
    call_cpu_kernel(op, arguments, state);
    const Stack& results = arguments;
    at::AutoDispatchBelowAutograd below_autograd;
    c10::AutoGradMode without_gradients(false);
    for (size_t i = 0; i < allocated.size() && i < results.size(); i++)
      write_results(allocated[i], results[i]);
  }

 private:
  static void write_results(const IValue& target, const IValue& result) {
    if (target.isTensor() && result.isTensor()) {
      write_result(target.toTensor(), result.toTensor());
    } else if (target.isTensorList() && result.isTensorList()) {
      const auto targets = target.toTensorVector();
      const auto results = result.toTensorVector();
      for (size_t i = 0; i < targets.size(); i++)
        write_result(targets[i], results[i]);
    }
  }
};

void run_stream_work(void* argument) {
  const std::unique_ptr<StreamWork> work(static_cast<StreamWork*>(argument));
  const auto begin = std::chrono::steady_clock::now();
  try {
    work->run();
  } catch (const std::exception& error) {
    // As an error of a kernel: no thread is there to catch it, and the context is lost.
    fprintf(stderr, "[stand_in_ops %d] %s: %.900s\n", getpid(), work->op.name.c_str(),
            error.what());
    fflush(stderr);
    _exit(kStreamErrorExit);
  }
  g_counts.in_stream++;
  g_counts.nanoseconds_in_stream += (std::chrono::steady_clock::now() - begin).count();
}

void call_in_stream(const Operator& op, c10::DispatchKeySet keys, Stack* stack,
                    const Stack& arguments) {
  const auto& results = op.handle.schema().returns();
  const int device = device_of(arguments);
  auto work = std::make_unique<StreamWork>(StreamWork{op, {}, {}, {}});
  // Before the original, which advances the generator.
  std::optional<at::Generator> generator;
  if (op.is_random && op.generator_argument >= 0)
    generator = generator_for(&arguments[op.generator_argument], device);
  else if (op.cuda_only)
    work->state = philox_state(nullptr, device);
  {
    InsideOperator inside(op);
    op.original.callBoxed(op.handle, keys, stack);
  }
  for (const IValue& argument : arguments)
    work->arguments.push_back(cpu_argument(argument, Reader::kStream));
  if (generator)
    work->arguments[op.generator_argument] = *generator;
  const size_t first_result = stack->size() - results.size();
  for (size_t i = 0; i < results.size(); i++) {
    // The CPU's kernel writes into an argument by itself.
    const IValue& result = (*stack)[first_result + i];
    work->allocated.push_back(is_written(results[i]) ? IValue()
                                                     : cpu_argument(result, Reader::kNow));
  }
  const cudaStream_t stream = current_stream(device);
  fakecuda_enqueue_on(device, stream, run_stream_work, work.release());
  // Others draw from the CPU's generator, too: the order of the calls must be the order of draws.
  if (generator && draws_as_cpu())
    fakecuda_sync_on(device, stream);
}

// ---- At once ------------------------------------------------------------------------------------

Tensor copy_to_device(const Tensor& tensor, int device) {
  if (!tensor.defined())
    return tensor;
  const Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(),
                                        tensor.options().device(cuda_device(device)));
  write_result(cpu_view(copy), tensor);
  return copy;
}

IValue copy_to_device(const IValue& result, int device) {
  if (result.isTensor())
    return copy_to_device(result.toTensor(), device);
  if (!result.isTensorList())
    return result;
  c10::List<Tensor> copies;
  for (const Tensor& tensor : result.toTensorVector())
    copies.push_back(copy_to_device(tensor, device));
  return copies;
}

void call_at_once(const Operator& op, Stack* stack, const Stack& arguments) {
  const auto& schema = op.handle.schema();
  OutsideOperators outside;
  const int device = device_of(arguments);
  fakecuda_sync_on(device, current_stream(device));
  g_counts.at_once++;
  Stack results;
  for (const IValue& argument : arguments)
    results.push_back(cpu_argument(argument, Reader::kNow));
  if (op.generator_argument >= 0)
    results[op.generator_argument] = generator_for(&arguments[op.generator_argument], device);
  {
    InsideOperator inside(op);
    call_cpu_kernel(op, results, PhiloxState());
  }
  torch::jit::drop(*stack, arguments.size());
  size_t next_argument = 0;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    if (!is_written(schema.returns()[i])) {
      stack->push_back(copy_to_device(results[i], device));
      continue;
    }
    // The result is the next argument that the operator writes.
    while (next_argument < arguments.size() && !is_written(schema.arguments()[next_argument]))
      next_argument++;
    stack->push_back(arguments.at(next_argument++));
  }
}

// ---- Dispatch -----------------------------------------------------------------------------------

bool has_tensor_elsewhere(const Stack& arguments) {
  bool found = false;
  for (const IValue& argument : arguments) {
    for_each_tensor(argument,
                    [&](const Tensor& tensor) { found |= tensor.defined() && !tensor.is_cuda(); });
  }
  return found;
}

// Indexing by a mask needs the count of its true elements.
bool indexes_by_mask(const Operator& op, const Stack& arguments) {
  if (op.name != "aten::index.Tensor" && op.name != "aten::_index_put_impl_")
    return false;
  bool found = false;
  for (const IValue& argument : arguments) {
    if (!argument.isOptionalTensorList())
      continue;
    for_each_tensor(argument, [&](const Tensor& tensor) {
      found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    });
  }
  return found;
}

}  // namespace

void add_operator(const c10::OperatorName& name, Operator added) {
  operators()[name] = new Operator(std::move(added));
}

void call_operator(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const Operator& op = *operators().at(handle.operator_name());
  if (t_depth && op.mode != Mode::kAtOnce) {
    op.original.callBoxed(handle, keys, stack);
    return;
  }
  const size_t argument_count = handle.schema().arguments().size();
  const Stack arguments(stack->end() - argument_count, stack->end());
  if (op.mode == Mode::kCopy && has_tensor_elsewhere(arguments))
    op.original.callBoxed(handle, keys, stack);
  else if (op.mode == Mode::kAtOnce || indexes_by_mask(op, arguments))
    call_at_once(op, stack, arguments);
  else
    call_in_stream(op, keys, stack, arguments);
}

}  // namespace stand_in

// Operators in streams, operators at once, and microseconds in streams.
extern "C" __attribute__((visibility("default"))) void stand_in_counts(long* counts) {
  counts[0] = stand_in::g_counts.in_stream;
  counts[1] = stand_in::g_counts.at_once;
  counts[2] = stand_in::g_counts.nanoseconds_in_stream / 1000;
}
