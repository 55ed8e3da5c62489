#include "memory/gpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include <unistd.h>

#include "memory/gpu_driver.h"

namespace monarch::gpu {

namespace {

constexpr int most_devices = 64;
constexpr std::size_t most_idle = 16;  // kits, of each GPU: each has two megabytes of pinned memory

// Never closed: threads that end late may still use it.
struct Opened {
  explicit Opened(const std::vector<std::string>& libraries) : driver(libraries), pid(getpid()) {}

  // The context that CUDA's and HIP's runtimes use, torch with them.
  void* context(int device) {
    const std::scoped_lock lock(mutex);
    if (device < 0 || device >= most_devices) throw Failure("there is no GPU " + std::to_string(device) + " here");
    void*& known = contexts[device];
    if (known == nullptr) {
      int handle = 0;
      driver.check(driver.device_get(&handle, device), "find the device");
      driver.check(driver.context_retain(&known, handle), "use the device's context");
    }
    return known;
  }

  Driver driver;
  const int pid;
  std::mutex mutex;
  void* contexts[most_devices] = {};
  std::atomic<int> seen{none};  // a device with memory of this process
};

std::atomic<Opened*> opened{nullptr};
std::mutex opening;

Opened& ours() {
  Opened* found = opened.load(std::memory_order_acquire);
  if (found == nullptr) throw Failure("no driver of a GPU was opened in this process");
  if (found->pid != getpid()) {
    throw Failure("this process is a fork of process " + std::to_string(found->pid) +
                  ", which has used a GPU, and drivers do not survive that: start it by spawn or exec");
  }
  return *found;
}

// Makes a device's context current on this thread during its lifetime, then restores the earlier one, such as torch's.
class Current {
 public:
  explicit Current(int device) : driver_(ours().driver) { driver_.check(driver_.context_push(ours().context(device)), "enter the device's context"); }
  ~Current() {
    void* left = nullptr;
    driver_.context_pop(&left);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Driver& driver() const { return driver_; }

 private:
  const Driver& driver_;
};

std::uint64_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

void open(const std::vector<std::string>& libraries) {
  const std::scoped_lock lock(opening);
  if (opened.load() == nullptr) opened.store(new Opened(libraries), std::memory_order_release);
  ours();
}

bool is_open() { return opened.load(std::memory_order_acquire) != nullptr; }

std::string library() { return is_open() ? opened.load()->driver.library : ""; }

int device_of(const void* address) {
  Opened* found = opened.load(std::memory_order_acquire);
  if (found == nullptr || found->pid != getpid()) return none;
  unsigned type = 0;
  int result = found->driver.attribute(&type, memory_type, number(address));
  const int seen = found->seen.load(std::memory_order_relaxed);
  std::optional<Current> current;
  if (result == no_context && seen != none) {  // a thread that no runtime knows
    current.emplace(seen);
    result = found->driver.attribute(&type, memory_type, number(address));
  }
  int device = none;
  if (result != 0 || type != type_device || found->driver.attribute(&device, device_ordinal, number(address)) != 0) return none;
  found->seen.store(device, std::memory_order_relaxed);
  return device;
}

Range allocation_of(const void* address) {
  const Current current(device_of(address));
  std::uint64_t at = 0;
  std::size_t bytes = 0;
  current.driver().check(current.driver().range(&at, &bytes, number(address)), "find the allocation of an address");
  return {at, bytes};
}

void wait_for_stream(int device, std::uint64_t stream) {
  const Current current(device);
  if (current.driver().hip && stream == legacy_stream) stream = 0;
  current.driver().check(current.driver().stream_wait(reinterpret_cast<void*>(stream)), "wait for the stream that fills memory");
}

int dma_buf_of(const Range& range) {
  const Current current(device_of(reinterpret_cast<const void*>(range.address)));
  if (current.driver().range_handle == nullptr) throw Failure("the GPU's driver (" + current.driver().library + ") has no dma-bufs: it is too old");
  int fd = -1;
  current.driver().check(current.driver().range_handle(&fd, range.address, range.bytes, dma_buf_fd, 0), "export a dma-buf");
  return fd;
}

Export exported(const void* address) {
  const Range range = allocation_of(address);
  const Current current(device_of(address));
  Export made{};
  IpcHandle handle{};
  current.driver().check(current.driver().ipc_get(&handle, range.address), "export memory to other processes");
  std::memcpy(made.handle, handle.bytes, sizeof made.handle);
  unsigned long long id = 0;
  if (current.driver().attribute(&id, buffer_id, number(address)) == 0) made.allocation = id;
  made.offset = number(address) - range.address;
  return made;
}

Imported::Imported(const Export& from, int device) : device_(device), pid_(getpid()) {
  const Current current(device);
  IpcHandle handle;
  std::memcpy(handle.bytes, from.handle, sizeof handle.bytes);
  std::uint64_t at = 0;
  current.driver().check(current.driver().ipc_open(&at, handle, lazy_peer_access), "map another process's memory");
  base_ = reinterpret_cast<char*>(at);
}

Imported::~Imported() {
  if (pid_ != getpid()) return;
  try {
    const Current current(device_);
    current.driver().ipc_close(number(base_));
  } catch (const Failure&) {  // the driver is at its end, and so is the mapping
  }
}

Pinned::Pinned(int device, std::uint64_t bytes) : device_(device), pid_(getpid()), bytes_(bytes) {
  const Current current(device);
  void* made = nullptr;
  current.driver().check(current.driver().pinned_allocate(&made, bytes, portable), "allocate pinned memory");
  data_ = static_cast<char*>(made);
}

Pinned::~Pinned() {
  if (pid_ != getpid()) return;
  try {
    const Current current(device_);
    current.driver().pinned_free(data_);
  } catch (const Failure&) {  // the driver is at its end, and so is the memory
  }
}

// Two streams and their pinned memory. They are reused, because creating them takes longer than a copy.
struct Copies::CopyStreams {
  explicit CopyStreams(int of) : device(of) {}
  void make() {
    const Current current(device);
    for (void*& stream : streams) current.driver().check(current.driver().stream_create(&stream, not_blocking), "make a stream");
  }
  ~CopyStreams() {
    try {
      const Current current(device);
      for (void* stream : streams) {
        if (stream != nullptr) current.driver().stream_destroy(stream);
      }
    } catch (const Failure&) {  // as above
    }
  }
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  const int device;
  void* streams[stream_count] = {};
  std::unique_ptr<Pinned> pinned_buffers[stream_count];
};

// Idle streams, for reuse.
struct IdleStreams {
  std::mutex mutex;
  std::vector<std::unique_ptr<Copies::CopyStreams>> idle[most_devices];

  static IdleStreams& of_this_process() {
    static IdleStreams* const made = new IdleStreams;
    return *made;
  }
};

Copies::Copies(int device) {
  ours().context(device);
  IdleStreams& pool = IdleStreams::of_this_process();
  {
    const std::scoped_lock lock(pool.mutex);
    auto& idle = pool.idle[device];
    if (!idle.empty()) {
      streams_ = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (streams_) return;
  streams_ = std::make_unique<CopyStreams>(device);
  streams_->make();
}

Copies::~Copies() {
  for (int stream = 0; stream < stream_count; ++stream) {
    try {
      finish(stream);
    } catch (const Failure&) {  // callers that need the result have called finish
    }
  }
  if (failed_) return;  // its kit may have failed, too
  IdleStreams& pool = IdleStreams::of_this_process();
  const std::scoped_lock lock(pool.mutex);
  auto& idle = pool.idle[streams_->device];
  if (idle.size() < most_idle) idle.push_back(std::move(streams_));
}

char* Copies::pinned_buffer(int stream) {
  auto& made = streams_->pinned_buffers[stream];
  if (!made) made = std::make_unique<Pinned>(streams_->device, pinned_buffer_bytes);
  return made->data();
}

void Copies::begin(int stream, void* to, const void* from, std::uint64_t bytes) {
  const Current current(streams_->device);
  busy_[stream] = true;
  const int result = current.driver().copy(to, from, bytes, streams_->streams[stream]);
  failed_ = failed_ || result != 0;
  current.driver().check(result, "copy memory");
}

void Copies::finish(int stream) {
  if (!busy_[stream]) return;
  busy_[stream] = false;
  const Current current(streams_->device);
  const int result = current.driver().stream_wait(streams_->streams[stream]);
  failed_ = failed_ || result != 0;
  current.driver().check(result, "wait for a copy");
}

void copy(int device, void* to, const void* from, std::uint64_t bytes) {
  Copies copies(device);
  copies.begin(0, to, from, bytes);
  copies.finish(0);
}

}  // namespace monarch::gpu
