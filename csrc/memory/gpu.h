// GPU memory through the vendor's driver: copies, pinned memory, and what another process needs to map an allocation.
//
// CUDA's driver (libcuda.so.1) or HIP's (libamdhip64.so) is opened when GPU memory is first used, so a machine without
// a GPU needs neither. The caller names the libraries to try. Nothing here depends on tables, peers or networks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace monarch::gpu {

// An error of the driver, with its text.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int none = -1;  // no GPU's: memory of the CPU

// Throws Failure if there is no driver, or if this process is a fork of one that has opened it.
void open(const std::vector<std::string>& libraries);
bool is_open();
std::string library();  // name of the open library

// The number of the GPU with this memory; `none` for all memory before `open`.
int device_of(const void* address);

struct Range {
  std::uint64_t address, bytes;
};
// The allocation that an address of a GPU lies in; throws Failure.
Range allocation_of(const void* address);
// Wait until the work of this stream is done; streams are numbered as in __cuda_array_interface__. Throws Failure.
void wait_for_stream(int device, std::uint64_t stream);
// A descriptor of the dma-buf of this range, which begins and ends with a page; the caller's to close. Throws Failure.
int dma_buf_of(const Range& range);

// An allocation, as others of this machine map it, and where in it something lies.
struct Export {
  unsigned char handle[64];
  std::uint64_t allocation;  // its number: an allocation that comes after it at the same address has another one
  std::uint64_t offset;
};
Export exported(const void* address);  // throws Failure: not all memory can be

// Another process's allocation, as long as this lives.
class Imported {
 public:
  Imported(const Export& from, int device);  // for copies by this GPU; throws Failure
  ~Imported();
  Imported(const Imported&) = delete;
  Imported& operator=(const Imported&) = delete;

  char* base() const { return base_; }

 private:
  int device_, pid_;
  char* base_ = nullptr;
};

// Memory of the host that the driver copies to and from straight, and that a NIC may have registered, too.
class Pinned {
 public:
  Pinned(int device, std::uint64_t bytes);  // for copies by any GPU; `device`: the GPU whose context allocates it. Throws Failure
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  char* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  int device_, pid_;
  std::uint64_t bytes_;
  char* data_ = nullptr;
};

inline constexpr std::uint64_t pinned_buffer_bytes = 1 << 20;

// Copies to and from a GPU on two streams. Each stream keeps the order of its copies, and has a buffer of pinned
// memory.
class Copies {
 public:
  static constexpr int stream_count = 2;
  explicit Copies(int device);  // throws Failure
  ~Copies();                    // waits for copies in progress
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  char* pinned_buffer(int stream);  // of pinned_buffer_bytes; throws Failure
  // Each side is memory of a GPU or of the CPU. The copy is done when `finish` of the stream returns. Both throw
  // Failure.
  void begin(int stream, void* to, const void* from, std::uint64_t bytes);
  void finish(int stream);

 private:
  struct CopyStreams;
  friend struct IdleStreams;
  std::unique_ptr<CopyStreams> streams_;
  bool busy_[stream_count] = {}, failed_ = false;
};

// One copy, done when this returns. Throws Failure.
void copy(int device, void* to, const void* from, std::uint64_t bytes);

}  // namespace monarch::gpu
