// A CUDA device that does nothing, for a CPU build of PyTorch. Tensors on it are FakeTensors: it has no memory and no
// kernels. CUDA_VISIBLE_DEVICES hides it like a real one.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex current = 0;

DeviceIndex count() {
  const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
  if (value == nullptr) {
    return 8;
  }
  const std::string visible(value);
  return visible.empty() ? 0 : 1 + std::count(visible.begin(), visible.end(), ',');
}

DeviceIndex exchange(DeviceIndex index) {
  return index < 0 ? current : std::exchange(current, index);
}

struct PretendedGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  Device exchangeDevice(Device device) const override { return {c10::DeviceType::CUDA, exchange(device.index())}; }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct PretendedHooks final : at::CUDAHooksInterface {
  explicit PretendedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasCUDA() const override { return count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return count() > 0; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

} // namespace

namespace at {
using ::PretendedHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
} // namespace at
