// Memory and kernels for the pretended GPU: those of the host.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

namespace {

using at::IValue;
using at::Tensor;
using Sizes = c10::SymIntArrayRef;

struct PretendedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(size);
    return {data, data, &std::free, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
PretendedMemory memory;
constexpr c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, kCuda, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, kCuda, at::dtype_or_default(dtype));
}

// The tensor on the host, with the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  const auto options = tensor.options().device(c10::DeviceType::CPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensor& copy(Tensor& self, const Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor on_device(const Tensor& host) {
  auto result = at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::DeviceType::CUDA));
  return result.copy_(host);
}

// Calls the kernel of the CPU.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> shared; // on the host, and on the device
  const auto replaced = [&](const Tensor& tensor) {
    shared.emplace_back(on_host(tensor), tensor);
    return shared.back().first;
  };
  for (IValue& value : std::span(*stack).last(op.schema().arguments().size())) {
    if (value.isTensor()) {
      value = replaced(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(replaced(tensor));
      }
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor.has_value() ? std::optional(replaced(*tensor)) : std::nullopt);
      }
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  op.callBoxed(stack);
  for (const auto& [host, device] : shared) {
    if (host.defined() && host.sizes() != device.sizes()) { // an empty result that was resized
      const Tensor resized = on_device(host);
      device.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
      device.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides());
    }
  }
  const auto result = [&](const Tensor& tensor) {
    for (const auto& [host, device] : shared) {
      if (tensor.is_same(host)) {
        return device;
      }
    }
    return tensor.defined() ? on_device(tensor) : tensor;
  };
  for (IValue& value : std::span(*stack).last(op.schema().returns().size())) {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(result(tensor));
      }
      value = tensors;
    }
  }
}

Tensor view(const Tensor& self, Sizes size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("as_strided", TORCH_FN(as_strided));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace
