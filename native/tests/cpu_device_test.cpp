#include "fmoe/cpu_device.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "fmoe/errors.h"

using namespace fmoe;

namespace {

std::vector<std::uint64_t> wait_for(CpuDevice& device, std::size_t count) {
    std::vector<std::uint64_t> done;
    const auto deadline = Device::Clock::now() + std::chrono::seconds(60);
    while (done.size() < count) {
        device.wait_done(done, deadline);
        CHECK(Device::Clock::now() < deadline);
    }
    return done;
}

void a_chunk_lands_at_its_place() {
    CpuDevice device(3, 100);
    CHECK(device.slot_stride_bytes() == 128);
    CHECK(reinterpret_cast<std::uintptr_t>(device.arena()) % 4096 == 0);
    const std::vector<std::byte> source(50, std::byte{7});
    device.start({1, 2, 40, source.data(), 50, false});
    CHECK(wait_for(device, 1) == std::vector<std::uint64_t>{1});
    const std::byte* slot = device.arena() + 2 * 128;
    CHECK(std::all_of(slot + 40, slot + 90, [](std::byte b) { return b == std::byte{7}; }));
    CHECK(slot[39] == std::byte{0} && slot[90] == std::byte{0});
}

void an_urgent_chunk_goes_ahead_of_queued_ones() {
    // The first chunk keeps the link for 0.2 s; the others are queued meanwhile.
    CpuDevice device(1, 200'000, 0.001);
    const std::vector<std::byte> source(200'000);
    device.start({1, 0, 0, source.data(), source.size(), false});
    device.start({2, 0, 0, source.data(), 10, false});
    device.start({3, 0, 0, source.data(), 10, true});
    const auto done = wait_for(device, 3);
    const auto position = [&](std::uint64_t ticket) {
        return std::find(done.begin(), done.end(), ticket) - done.begin();
    };
    CHECK(position(3) < position(2));
}

void interrupt_drops_what_has_not_begun_and_wakes_the_waiter() {
    CpuDevice device(1, 1000, 1e-9);  // a chunk would take 1000 s
    const std::vector<std::byte> source(1000);
    device.start({1, 0, 0, source.data(), source.size(), false});
    device.start({2, 0, 0, source.data(), source.size(), false});
    device.interrupt();
    std::vector<std::uint64_t> done;
    device.wait_done(done, Device::Clock::now() + std::chrono::seconds(60));
    CHECK(std::find(done.begin(), done.end(), 2U) == done.end());
}

void what_cannot_be_is_refused() {
    CHECK_THROWS(CapacityError, CpuDevice(1 << 20, std::size_t{1} << 30));
    CHECK_THROWS(std::invalid_argument, CpuDevice(0, 100));
    CHECK_THROWS(std::invalid_argument, CpuDevice(1, 100, 0.0));
}

}  // namespace

int main() {
    a_chunk_lands_at_its_place();
    an_urgent_chunk_goes_ahead_of_queued_ones();
    interrupt_drops_what_has_not_begun_and_wakes_the_waiter();
    what_cannot_be_is_refused();
}
