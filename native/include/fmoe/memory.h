// fmoe/memory.h: what the machine can still give. MemTotal is never asked: some hosts grow.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

namespace fmoe {

// MemAvailable of /proc/meminfo in bytes, or what the container's limit leaves where that is less.
std::size_t available_memory_bytes();

// What the memory limits (cgroup v2) of `group` and of the groups above it leave, below the folder
// `root` where they are mounted; nothing where there is no limit. Page cache that can be dropped
// counts as available.
std::optional<std::size_t> cgroup_available_bytes(const std::filesystem::path& root,
                                                  const std::filesystem::path& group);

// Free bytes of the file system that holds `directory`.
std::size_t free_filesystem_bytes(const std::string& directory);

// Throws CapacityError naming `what`, both numbers and a remedy if needed > available.
void require_capacity(const std::string& what, std::size_t needed, std::size_t available,
                      const std::string& remedy);

std::size_t page_bytes();

inline std::size_t round_up(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

}  // namespace fmoe
