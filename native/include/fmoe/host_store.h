// fmoe/host_store.h: the weights of all experts in shared memory, one contiguous page-aligned blob
// per expert index e = l * J + j, shared by the processes of a node. Knows nothing of tensors.
//
//     [ header page | blob 0 | blob 1 | ... ]      /dev/shm/<name>, or nameless (memfd)
//
// Who creates, locks and unlinks:
//   filling   the creator holds an exclusive flock from before the first byte until seal();
//   complete  every user, the creator too, holds a shared flock;
//   leaving   whoever can still take the exclusive flock was the last user and unlinks the file.
// The kernel drops the locks of a killed process, so an unlocked file is stale: complete and of the
// same fingerprint and shape it is taken over, otherwise the next creator unlinks it and builds
// anew. Only a holder of the exclusive lock unlinks, and nobody ever truncates, so that a mapping
// stays valid for as long as it exists.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

namespace fmoe {

// Where blob i begins: base + i * stride_bytes.
struct Blobs {
    const std::byte* base = nullptr;
    std::size_t stride_bytes = 0;
    std::size_t blob_bytes = 0;

    const std::byte* at(int index) const noexcept {
        return base + static_cast<std::size_t>(index) * stride_bytes;
    }
};

class HostStore {
public:
    // Creates and reserves the store, or takes over one that is complete and matches; is_complete()
    // tells which. Waits while another process fills it. Throws CapacityError before the first byte
    // is written if it does not fit, FingerprintError if a live store of that name has another
    // fingerprint or shape, TimeoutError, invalid_argument for a link or another user's file.
    static std::shared_ptr<HostStore> create(const std::string& name,
                                             const std::string& fingerprint, int num_blobs,
                                             std::size_t blob_bytes, double timeout_s);
    ~HostStore();
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;

    const std::string& name() const noexcept { return name_; }
    int num_blobs() const noexcept { return num_blobs_; }
    std::size_t blob_bytes() const noexcept { return blob_bytes_; }
    bool is_complete() const noexcept { return is_complete_; }

    Blobs blobs() const noexcept;
    // Throws invalid_argument out of range.
    const std::byte* blob(int index) const;
    // Throws invalid_argument out of range or after seal().
    std::byte* writable_blob(int index);
    // All blobs are written: others may map the store now.
    void seal();

private:
    struct Header;
    class File;

    HostStore(std::string name, File file, const Header& header, bool is_writable);
    static std::shared_ptr<HostStore> build(const std::string& name, File file,
                                            const Header& header);
    // Gives up what lock it has first. Throws TimeoutError.
    static void wait_for_shared_lock(const std::string& name, const File& file,
                                     std::chrono::steady_clock::time_point deadline);

    std::string name_;
    std::unique_ptr<File> file_;
    int num_blobs_ = 0;
    std::size_t blob_bytes_ = 0;
    std::size_t mapped_bytes_ = 0;
    std::byte* mapping_ = nullptr;
    bool is_complete_ = false;
};

}  // namespace fmoe
