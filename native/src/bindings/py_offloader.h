// The offloader as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "borrowed.h"
#include "fmoe/cpu_device.h"
#include "fmoe/cuda_device.h"
#include "fmoe/offloader.h"

namespace fmoe::bindings {

// Without Python code inside, nothing that holds the monitor ever wants the GIL: then short calls
// keep it, because giving it up can cost a switch interval. With Python code inside, they must not.
class PyOffloader {
public:
    using Deliveries = std::vector<std::pair<int, int>>;

    template <class Call>
    auto unlocked(Call call) {
        std::optional<nanobind::gil_scoped_release> release;
        if (calls_python_) release.emplace();
        return call();
    }

    PyOffloader(std::shared_ptr<HostStore> store, const std::string& policy,
                const PolicyParams& params, const OffloaderOptions& options,
                std::optional<double> link_gbps, Policy* own_policy, Predictor* own_predictor,
                std::optional<int> cuda_device)
        : calls_python_(own_policy != nullptr || own_predictor != nullptr) {
        PolicyParts parts;
        if (own_policy == nullptr) parts = make_policy(policy, params);
        if (own_policy != nullptr) parts.policy = std::make_unique<BorrowedPolicy>(*own_policy);
        if (own_predictor != nullptr)
            parts.predictor = std::make_unique<BorrowedPredictor>(*own_predictor);
        require(!cuda_device || !link_gbps, "link_gbps throttles the CPU device only");
        const nanobind::gil_scoped_release release;  // page-locking takes seconds
        std::unique_ptr<Device> device;
        if (cuda_device)
            device = std::make_unique<CudaDevice>(*cuda_device, params.num_slots, store->blobs(),
                                                  store->num_blobs());
        else
            device = std::make_unique<CpuDevice>(params.num_slots, store->blob_bytes(), link_gbps);
        offloader_ = std::make_unique<Offloader>(std::move(store), std::move(device),
                                                 std::move(parts), options);
    }
    // The threads may need the GIL to end.
    ~PyOffloader() {
        const nanobind::gil_scoped_release release;
        offloader_.reset();
    }

    Offloader& operator*() { return *offloader_; }
    Offloader* operator->() { return offloader_.get(); }

    Deliveries wait() {
        if (!unlocked([&] { return offloader_->try_wait(deliveries_); })) {
            const nanobind::gil_scoped_release release;
            offloader_->wait(deliveries_);
        }
        Deliveries result;
        result.reserve(deliveries_.size());
        for (const Delivery& delivery : deliveries_)
            result.emplace_back(delivery.expert, delivery.slot);
        return result;
    }

private:
    bool calls_python_;
    std::unique_ptr<Offloader> offloader_;
    std::vector<Delivery> deliveries_;
};

}  // namespace fmoe::bindings
