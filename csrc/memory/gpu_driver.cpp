#include "memory/gpu_driver.h"

#include <dlfcn.h>

#include "memory/gpu.h"

namespace monarch::gpu {

namespace {

// HIP calls it "hipSuccess", CUDA "CUDA_SUCCESS".
constexpr int success = 0;

}  // namespace

Driver::Driver(const std::vector<std::string>& candidates) {
  std::string why;
  for (const std::string& candidate : candidates) {
    try {
      load(candidate);
      return;
    } catch (const Failure& failure) {  // a library without a GPU, perhaps: the next one may have one
      why += (why.empty() ? "" : "; ") + std::string(failure.what());
    }
  }
  throw Failure("no driver of a GPU can be used: " + why);
}

void Driver::load(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Failure(dlerror());
  library = name;
  hip = dlsym(handle, "hipInit") != nullptr;
  find(handle);
  check(init(0), "start");
}

void Driver::find(void* handle) {
  const auto get = [&](auto& function, const char* cuda, const char* amd, bool needed = true) {
    const char* name = hip ? amd : cuda;
    void* found = dlsym(handle, name);
    if (found == nullptr && needed) throw Failure(library + " has no " + name + ": its driver is too old for memory that others read");
    reinterpret_cast<void*&>(function) = found;
  };
  get(init, "cuInit", "hipInit");
  get(device_get, "cuDeviceGet", "hipDeviceGet");
  get(context_retain, "cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain");
  get(context_push, "cuCtxPushCurrent_v2", "hipCtxPushCurrent");
  get(context_pop, "cuCtxPopCurrent_v2", "hipCtxPopCurrent");
  get(attribute, "cuPointerGetAttribute", "hipPointerGetAttribute");
  get(range, "cuMemGetAddressRange_v2", "hipMemGetAddressRange");
  get(stream_create, "cuStreamCreate", "hipStreamCreateWithFlags");
  get(stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy");
  get(stream_wait, "cuStreamSynchronize", "hipStreamSynchronize");
  get(copy_async, "cuMemcpyAsync", "hipMemcpyAsync");
  get(pinned_allocate, "cuMemHostAlloc", "hipHostMalloc");
  get(pinned_free, "cuMemFreeHost", "hipHostFree");
  get(ipc_get, "cuIpcGetMemHandle", "hipIpcGetMemHandle");
  get(ipc_open, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle");
  get(ipc_close, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle");
  get(range_handle, "cuMemGetHandleForAddressRange", "hipMemGetHandleForAddressRange", false);
  // ROCm 5 has neither of these two functions.
  get(describe, "cuGetErrorString", "hipDrvGetErrorString", false);
}

void Driver::check(int result, const char* what) const {
  if (result == success) return;
  const char* text = nullptr;
  if (describe != nullptr) describe(result, &text);
  throw Failure("the GPU's driver (" + library + ") says to " + what + ": " + (text != nullptr ? text : "no words for it") + " (" +
                std::to_string(result) + ")");
}

int Driver::copy(void* to, const void* from, std::size_t bytes, void* stream) const {
  if (hip) return reinterpret_cast<int (*)(void*, const void*, std::size_t, int, void*)>(copy_async)(to, from, bytes, hip_copy_default, stream);
  const auto at = [](const void* address) { return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(address)); };
  return reinterpret_cast<int (*)(std::uint64_t, std::uint64_t, std::size_t, void*)>(copy_async)(at(to), at(from), bytes, stream);
}

}  // namespace monarch::gpu
