// What this machine offers: its identity, its kernel's abilities, its processor's vector extensions.
// Nothing here knows torch, Python or any vendor SDK.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace monarch {

// Identity of the running kernel and of the IPC namespace: two processes that agree on both *may* share
// memory; only passing a file descriptor between them proves it.
std::string boot_id();
std::string ipc_namespace();

// Each ability is tried, not guessed from a version: seccomp and container settings decide as well.
std::map<std::string, bool> kernel_features();

// Names as in /proc/cpuinfo ("avx2", "avx512f", "avx512_bf16", "sve"), only those the core can use.
std::vector<std::string> cpu_features();

}  // namespace monarch
