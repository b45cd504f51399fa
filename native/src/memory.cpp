#include "fmoe/memory.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>
#include <system_error>

#include "fmoe/errors.h"

namespace fmoe {

namespace {

// Digits at the start of `text`, after blanks. Not by operator>>: where several C++ runtimes share
// a process, as under some builds of torch, it was seen to read every number as 0.
std::optional<std::size_t> parse_number(std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end == text.data()) return std::nullopt;
    return value;
}

// The number behind `key` in a file of "key number" lines, as /proc/meminfo and memory.stat are.
std::optional<std::size_t> read_value(const std::filesystem::path& file, const std::string& key) {
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with(key)) return parse_number(std::string_view(line).substr(key.size()));
    return std::nullopt;
}

// Nothing for "max" and where there is no such file.
std::optional<std::size_t> read_number(const std::filesystem::path& file) {
    std::ifstream lines(file);
    std::string line;
    if (!std::getline(lines, line)) return std::nullopt;
    return parse_number(line);
}

// The group of this process in the unified hierarchy: the line "0::/path".
std::filesystem::path own_cgroup() {
    std::ifstream lines("/proc/self/cgroup");
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with("0::/")) return line.substr(4);
    return {};
}

}  // namespace

std::optional<std::size_t> cgroup_available_bytes(const std::filesystem::path& root,
                                                  const std::filesystem::path& group) {
    std::optional<std::size_t> least;
    for (std::filesystem::path at = group;; at = at.parent_path()) {
        const auto limit = read_number(root / at / "memory.max");
        const auto used = read_number(root / at / "memory.current");
        if (limit && used) {
            const std::size_t droppable =
                read_value(root / at / "memory.stat", "inactive_file ").value_or(0);
            const std::size_t held = *used - std::min(*used, droppable);
            const std::size_t left = *limit - std::min(*limit, held);
            least = std::min(least.value_or(left), left);
        }
        if (at.empty()) return least;
    }
}

std::size_t available_memory_bytes() {
    const auto kib = read_value("/proc/meminfo", "MemAvailable:");
    if (!kib)
        throw CapacityError(
            "/proc/meminfo shows no MemAvailable; memory cannot be reserved safely");
    const std::size_t machine = *kib * 1024;
    return std::min(machine,
                    cgroup_available_bytes("/sys/fs/cgroup", own_cgroup()).value_or(machine));
}

std::size_t free_filesystem_bytes(const std::string& directory) {
    struct statvfs stat{};
    if (::statvfs(directory.c_str(), &stat) != 0)
        throw std::system_error(errno, std::generic_category(), directory);
    return static_cast<std::size_t>(stat.f_bavail) * stat.f_frsize;
}

void require_capacity(const std::string& what, std::size_t needed, std::size_t available,
                      const std::string& remedy) {
    if (needed <= available) return;
    throw CapacityError(what + " needs " + std::to_string(needed) + " bytes, " +
                        std::to_string(available) + " are available; " + remedy);
}

std::size_t page_bytes() {
    static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

}  // namespace fmoe
