// Memory of GPUs, by the vendor's own driver: copies, pinned memory, and what another process needs to map an allocation.
//
// CUDA's driver (libcuda.so.1) or HIP's (libamdhip64.so) is opened when somebody first has memory of a GPU, so a machine
// without one needs neither. MONARCH_GPU_DRIVER names another library. Nothing here knows of tables, peers or networks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace monarch::gpu {

// What the driver has refused, in its words.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int none = -1;  // no GPU's: memory of the CPU

// Throws Failure where there is no driver, or where this process is a fork of one that has opened it.
void open();
bool is_open();
std::string library();  // that was opened, for people

// The number of the GPU whose memory that is. Before `open` nobody has any.
int device_of(const void* address);

struct Range {
  std::uint64_t address, bytes;
};
// The allocation that an address of a GPU lies in; throws Failure.
Range allocation_of(const void* address);
// Until what was asked of this stream is done: numbers as in __cuda_array_interface__. Throws Failure.
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
  Pinned(int device, std::uint64_t bytes);  // for copies by any GPU; `device`: whose driver is asked for it. Throws Failure
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

inline constexpr std::uint64_t room_bytes = 1 << 20;

// Copies to and from a GPU, in two lanes: what is asked of one is done in that order. A lane has a room of pinned memory.
class Copies {
 public:
  static constexpr int lanes = 2;
  explicit Copies(int device);  // throws Failure
  ~Copies();                    // waits for what is under way
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  char* room(int lane);  // of room_bytes; throws Failure
  // Each side is memory of a GPU or of the CPU. Done when `finish` of the lane returns. Throw Failure.
  void begin(int lane, void* to, const void* from, std::uint64_t bytes);
  void finish(int lane);

 private:
  struct Kit;
  friend struct Shelf;
  std::unique_ptr<Kit> kit_;
  bool busy_[lanes] = {}, failed_ = false;
};

// One copy, done when this returns. Throws Failure.
void copy(int device, void* to, const void* from, std::uint64_t bytes);

}  // namespace monarch::gpu
