// The driver's functions, found by dlopen: one table for both vendors, whose functions differ in their names. For gpu.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace monarch::gpu {

struct IpcHandle {
  unsigned char bytes[64];
};

// As CUpointer_attribute and hipPointer_attribute, which agree in these.
enum Attribute : int { memory_type = 2, buffer_id = 7, device_ordinal = 9 };
inline constexpr unsigned type_device = 2;       // of memory_type
inline constexpr unsigned not_blocking = 1;      // of a stream: it does not wait for the legacy stream
inline constexpr unsigned portable = 1;          // of pinned memory: for all contexts
inline constexpr unsigned lazy_peer_access = 1;  // of a mapping: from another GPU, where the two reach each other
inline constexpr int dma_buf_fd = 1;             // of a range's handle
inline constexpr int no_context = 201;             // an error: this thread has none
inline constexpr std::uint64_t legacy_stream = 1;  // CUDA's number of it; to HIP it is 0
inline constexpr int hip_copy_default = 4;       // hipMemcpyDefault: the addresses determine the direction

struct Driver {
  // Opens the first of these libraries that works. Throws Failure with the reason of each.
  explicit Driver(const std::vector<std::string>& candidates);

  // Throws Failure, with the driver's text for this result of its function `what`.
  void check(int result, const char* what) const;
  int copy(void* to, const void* from, std::size_t bytes, void* stream) const;

  std::string library;
  bool hip = false;
  int (*init)(unsigned);
  int (*device_get)(int* device, int ordinal);
  int (*context_retain)(void** context, int device);
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  int (*attribute)(void* value, int which, std::uint64_t address);
  int (*range)(std::uint64_t* address, std::size_t* bytes, std::uint64_t in);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_wait)(void* stream);
  void* copy_async;
  int (*pinned_allocate)(void** address, std::size_t bytes, unsigned flags);
  int (*pinned_free)(void* address);
  int (*ipc_get)(IpcHandle* handle, std::uint64_t address);
  int (*ipc_open)(std::uint64_t* address, IpcHandle handle, unsigned flags);
  int (*ipc_close)(std::uint64_t address);
  int (*range_handle)(void* handle, std::uint64_t address, std::size_t bytes, int type, unsigned long long flags);  // or null
  int (*describe)(int result, const char** text);  // or null

 private:
  void load(const std::string& name);
  void find(void* handle);
};

}  // namespace monarch::gpu
