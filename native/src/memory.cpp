#include "fmoe/memory.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <fstream>
#include <limits>
#include <system_error>

#include "fmoe/errors.h"

namespace fmoe {

std::size_t available_memory_bytes() {
    std::ifstream meminfo("/proc/meminfo");
    std::string key;
    std::size_t kib = 0;
    while (meminfo >> key >> kib) {
        if (key == "MemAvailable:") return kib * 1024;
        meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    }
    throw CapacityError("/proc/meminfo shows no MemAvailable; memory cannot be reserved safely");
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
