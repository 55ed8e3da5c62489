// Sleeping until a word in memory that processes share has changed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace monarch {

// Sleep while the word has this value, at most until the deadline; may return earlier. True if a signal ended the sleep.
bool wait_on_address(std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::steady_clock::time_point deadline);

// Wake all threads of all processes that sleep there.
void wake_address(std::atomic<std::uint32_t>& word);

// Whether the system permits both.
bool has_address_wait();

}  // namespace monarch
