#include "fmoe/memory.h"

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "fmoe/errors.h"
#include "fmoe/huge_vector.h"

using namespace fmoe;
namespace fs = std::filesystem;

namespace {

void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
}

void the_tightest_limit_above_a_process_counts(const fs::path& root) {
    write(root / "memory.stat", "anon 1\n");  // the top has no limit
    write(root / "pod/memory.max", "1000\n");
    write(root / "pod/memory.current", "700\n");
    write(root / "pod/memory.stat", "anon 500\ninactive_file 200\n");
    write(root / "pod/box/memory.max", "max\n");
    write(root / "pod/box/memory.current", "100\n");
    CHECK(cgroup_available_bytes(root, "pod/box") == 500);
    write(root / "pod/box/memory.max", "150\n");
    CHECK(cgroup_available_bytes(root, "pod/box") == 50);
    write(root / "pod/box/memory.max", "60\n");  // more is used than the limit allows now
    CHECK(cgroup_available_bytes(root, "pod/box") == 0);
    CHECK(!cgroup_available_bytes(root, ""));
}

void what_does_not_fit_is_refused_with_both_numbers() {
    require_capacity("store", 10, 10, "buy more");
    std::string message;
    try {
        require_capacity("store", 11, 10, "buy more");
    } catch (const CapacityError& error) {
        message = error.what();
    }
    CHECK(message == "store needs 11 bytes, 10 are available; buy more");
}

void large_vectors_begin_on_a_huge_page_and_keep_their_content() {
    constexpr std::size_t kPage = HugePageAllocator<int>::kPageBytes;
    const auto address = [](const HugeVector<int>& vector) {
        return reinterpret_cast<std::uintptr_t>(vector.data());
    };
    HugeVector<int> vector(10, 7);
    CHECK(address(vector) % 64 == 0);
    vector.resize(kPage / sizeof(int) + 1, 8);
    CHECK(address(vector) % kPage == 0);
    CHECK(vector.front() == 7 && vector.back() == 8);
    const HugeVector<int> copy = vector;
    CHECK(address(copy) % kPage == 0 && copy == vector);
}

}  // namespace

int main() {
    const fs::path root =
        fs::temp_directory_path() / ("fmoe-memory-test-" + std::to_string(::getpid()));
    the_tightest_limit_above_a_process_counts(root);
    fs::remove_all(root);
    what_does_not_fit_is_refused_with_both_numbers();
    large_vectors_begin_on_a_huge_page_and_keep_their_content();
    CHECK(available_memory_bytes() > 0);
}
