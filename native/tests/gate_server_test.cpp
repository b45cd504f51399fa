#include "fmoe/gate_server.h"

#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "fmoe/cpu_device.h"
#include "fmoe/errors.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{3, 6, 2};
constexpr std::size_t kBlobBytes = 3000;

std::uint32_t load(std::byte* at) {
    return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(at))
        .load(std::memory_order_acquire);
}
void store(std::byte* at, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(at))
        .store(value, std::memory_order_release);
}

// Answers by plain stores, as if the stream had reached them.
struct PlainAnswers final : GateAnswers {
    std::byte* mailbox;
    GateMailbox layout;
    std::vector<int> table = std::vector<int>(static_cast<std::size_t>(kGeometry.size()), -1);
    bool fails = false;
    PlainAnswers(std::byte* mailbox, const GateMailbox& layout)
        : mailbox(mailbox), layout(layout) {}
    void place(int expert, int slot) override {
        if (fails) throw EngineError("no answer");
        table[static_cast<std::size_t>(expert)] = slot;
    }
    void answer_after_places(int layer) override { store(mailbox + layout.answer(layer), 1); }
};

struct Rig {
    GateMailbox layout{kGeometry, 2};
    std::vector<std::byte> memory = std::vector<std::byte>(layout.bytes() + 64);
    std::byte* mailbox = reinterpret_cast<std::byte*>(
        (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
    std::unique_ptr<Offloader> offloader;
    PlainAnswers* answers = nullptr;
    std::unique_ptr<GateServer> server;

    explicit Rig(int num_slots, double timeout_s = 5) {
        auto blobs = HostStore::create("", "test", kGeometry.size(), kBlobBytes, 0);
        for (int expert = 0; expert < kGeometry.size(); ++expert)
            std::memset(blobs->writable_blob(expert), expert + 1, kBlobBytes);
        blobs->seal();
        PolicyParams params;
        params.geometry = kGeometry;
        params.num_slots = num_slots;
        OffloaderOptions options;
        options.geometry = kGeometry;
        options.chunk_bytes = 1000;
        options.timeout_s = timeout_s;
        offloader =
            std::make_unique<Offloader>(blobs, std::make_unique<CpuDevice>(num_slots, kBlobBytes),
                                        make_policy("lru", params), options);
        auto plain = std::make_unique<PlainAnswers>(mailbox, layout);
        answers = plain.get();
        server =
            std::make_unique<GateServer>(*offloader, layout, mailbox, std::move(plain), timeout_s);
    }

    void begin(int num_rows) {
        const std::uint64_t requests[] = {1, 2};
        const Phase phases[] = {Phase::decode, Phase::decode};
        const std::int32_t tokens[] = {3, 4};
        IterationContext context;
        context.num_rows = num_rows;
        context.requests = requests;
        context.phases = phases;
        context.token_ids = tokens;
        offloader->begin_iteration(context);
        server->begin_step(num_rows);
    }

    // What a graph does at a layer; false if no answer came for two seconds.
    bool ask(int layer, const std::vector<int>& chosen) {
        auto* ids = reinterpret_cast<std::int32_t*>(mailbox + layout.chosen(layer));
        for (std::size_t i = 0; i < chosen.size(); ++i) ids[i] = chosen[i];
        store(mailbox + layout.request(layer), 1);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (load(mailbox + layout.answer(layer)) != 1)
            if (std::chrono::steady_clock::now() > deadline) return false;
        store(mailbox + layout.answer(layer), 0);
        return true;
    }

    bool holds(int layer, int expert) {
        const int index = kGeometry.index(layer, expert);
        const int slot = answers->table[static_cast<std::size_t>(index)];
        const std::byte* at =
            offloader->device().arena() +
            static_cast<std::size_t>(slot) * offloader->device().slot_stride_bytes();
        return slot >= 0 && at[0] == std::byte(index + 1) &&
               at[kBlobBytes - 1] == std::byte(index + 1);
    }
};

void an_answer_means_that_every_chosen_expert_lies_where_the_table_says() {
    Rig rig(4);
    std::mt19937 random(0);
    for (int step = 0; step < 200; ++step) {
        rig.begin(2);
        for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
            std::vector<int> chosen;
            for (int row = 0; row < 2; ++row) {
                const int first = static_cast<int>(random() % 6);
                chosen.push_back(first);
                chosen.push_back((first + 1 + static_cast<int>(random() % 5)) % 6);
            }
            CHECK(rig.ask(layer, chosen));
            for (int expert : chosen) CHECK(rig.holds(layer, expert));
        }
        rig.server->end_step();
        rig.offloader->end_iteration();
    }
    rig.offloader->check_integrity();
}

void a_row_that_pads_asks_for_nothing() {
    Rig rig(4);
    rig.begin(2);
    for (int layer = 0; layer < kGeometry.num_layers; ++layer) CHECK(rig.ask(layer, {0, 1, 6, 6}));
    rig.server->end_step();
    CHECK(rig.offloader->end_iteration().total.misses == 6);
}

void a_failure_answers_every_layer_and_is_reported_and_the_next_step_works() {
    Rig rig(4);
    rig.answers->fails = true;
    rig.begin(1);
    for (int layer = 0; layer < kGeometry.num_layers; ++layer) CHECK(rig.ask(layer, {2, 3}));
    CHECK_THROWS(EngineError, rig.server->end_step());
    rig.offloader->abort_iteration();
    rig.answers->fails = false;
    rig.begin(1);
    for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
        CHECK(rig.ask(layer, {2, 3}));
        CHECK(rig.holds(layer, 2) && rig.holds(layer, 3));
    }
    rig.server->end_step();
    rig.offloader->end_iteration();
}

void a_step_that_stops_asking_ends_with_an_error() {
    Rig rig(4, 0.05);
    rig.begin(1);
    CHECK(rig.ask(0, {0, 1}));
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    CHECK(rig.ask(1, {0, 1}));  // answered although it came too late
    CHECK_THROWS(EngineError, rig.server->end_step());
    rig.offloader->abort_iteration();
}

void closing_ends_a_step_in_progress() {
    Rig rig(4);
    rig.begin(1);
    rig.server->close();
    CHECK_THROWS(EngineError, rig.server->begin_step(1));
}

}  // namespace

int main() {
    an_answer_means_that_every_chosen_expert_lies_where_the_table_says();
    a_row_that_pads_asks_for_nothing();
    a_failure_answers_every_layer_and_is_reported_and_the_next_step_works();
    a_step_that_stops_asking_ends_with_an_error();
    closing_ends_a_step_in_progress();
}
