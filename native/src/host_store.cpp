#include "fmoe/host_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "fmoe/check.h"
#include "fmoe/errors.h"
#include "fmoe/memory.h"

namespace fmoe {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kDirectory[] = "/dev/shm";
constexpr char kMagic[8] = {'f', 'm', 'o', 'e', 'h', 'o', 's', 't'};
constexpr std::uint32_t kVersion = 1;
// flock has no time-out, so a held lock is asked for again this often.
constexpr auto kRetry = std::chrono::milliseconds(20);
// Between an exclusive and a shared lock another process may hold the file, but only to look at it.
constexpr double kHandOverS = 30;

enum class State : std::uint32_t { empty, filling, complete };

[[noreturn]] void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::string path_of(const std::string& name) { return std::string(kDirectory) + "/" + name; }

void check_name(const std::string& name) {
    require(
        name.size() <= 200 && name.find('/') == std::string::npos && name != "." && name != "..",
        "host store name '" + name + "' must be a plain file name of at most 200 characters");
}

}  // namespace

// Written once, in one piece, before anything else of the file; only `state` changes afterwards.
struct HostStore::Header {
    char magic[8];
    std::uint32_t version;
    State state;
    std::uint64_t num_blobs;
    std::uint64_t blob_bytes;
    char fingerprint[256];

    static Header make(const std::string& fingerprint, int num_blobs, std::size_t blob_bytes) {
        Header header{};
        std::memcpy(header.magic, kMagic, sizeof kMagic);
        header.version = kVersion;
        header.state = State::filling;
        header.num_blobs = static_cast<std::uint64_t>(num_blobs);
        header.blob_bytes = blob_bytes;
        require(fingerprint.size() < sizeof header.fingerprint,
                "host store: the fingerprint has more than 255 characters");
        fingerprint.copy(header.fingerprint, fingerprint.size());
        return header;
    }

    std::size_t stride_bytes() const { return round_up(blob_bytes, page_bytes()); }
    std::size_t file_bytes() const {
        return round_up(sizeof(Header), page_bytes()) + num_blobs * stride_bytes();
    }
    bool is_of(const std::string& other) const { return fingerprint == other; }
    bool is_same_shape(const Header& other) const {
        return num_blobs == other.num_blobs && blob_bytes == other.blob_bytes;
    }
};

// Owns the descriptor, and with it the flock.
class HostStore::File {
public:
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    File& operator=(File&&) = delete;
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }

    int fd() const { return fd_; }

    // Anybody may put a file into the folder, with a header that fits and whatever bytes behind it.
    void require_own(const std::string& path) const {
        struct stat mine{};
        if (::fstat(fd_, &mine) != 0) fail(path);
        require(mine.st_uid == ::geteuid(),
                path + " belongs to user " + std::to_string(mine.st_uid) +
                    ", so its weights cannot be trusted; remove it, or run as that user");
    }

    bool try_lock(int kind) const {
        if (::flock(fd_, kind | LOCK_NB) == 0) return true;
        if (errno != EWOULDBLOCK && errno != EINTR) fail("flock");
        return false;
    }

    // False once another holder of the lock unlinked it between our open and our lock.
    bool is_at(const std::string& path) const {
        struct stat mine{};
        struct stat there{};
        if (::fstat(fd_, &mine) != 0) fail(path);
        if (::stat(path.c_str(), &there) != 0) return false;
        return mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
    }

    // Nothing while the file is empty. Refuses a file that is not a host store.
    std::optional<Header> read_header(const std::string& path) const {
        Header header{};
        const ssize_t got = ::pread(fd_, &header, sizeof header, 0);
        if (got < 0) fail(path);
        if (got == 0) return std::nullopt;
        require(got == sizeof header && std::memcmp(header.magic, kMagic, sizeof kMagic) == 0,
                path + " is not a host store; choose another name or remove the file");
        require(header.version == kVersion, path + " is a host store of version " +
                                                std::to_string(header.version) +
                                                "; remove the file");
        return header;
    }

    void write(const void* data, std::size_t bytes, std::size_t offset) const {
        const ssize_t put = ::pwrite(fd_, data, bytes, static_cast<off_t>(offset));
        if (put != static_cast<ssize_t>(bytes)) fail("host store: write of the header");
    }

    // Every page is there afterwards: touching one cannot end in SIGBUS.
    void reserve(std::size_t bytes) const {
        int error = EINTR;
        while (error == EINTR) error = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
        if (error == ENOSPC || error == ENOMEM)
            throw CapacityError("host store: shared memory ran out while " + std::to_string(bytes) +
                                " bytes were reserved; free some or use a smaller model");
        if (error != 0) throw std::system_error(error, std::generic_category(), "posix_fallocate");
    }

private:
    int fd_;
};

namespace {

void wait_for_lock(const std::string& name, Clock::time_point deadline) {
    if (Clock::now() >= deadline)
        throw TimeoutError("host store '" + name +
                           "' is still being filled by another process; wait longer or end it");
    std::this_thread::sleep_for(kRetry);
}

Clock::time_point after(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void HostStore::wait_for_shared_lock(const std::string& name, const File& file,
                                     Clock::time_point deadline) {
    while (!file.try_lock(LOCK_SH)) wait_for_lock(name, deadline);
}

std::shared_ptr<HostStore> HostStore::create(const std::string& name,
                                             const std::string& fingerprint, int num_blobs,
                                             std::size_t blob_bytes, double timeout_s) {
    check_name(name);
    require(num_blobs > 0 && blob_bytes > 0, "host store: blobs and their bytes must be positive");
    const Header wanted = Header::make(fingerprint, num_blobs, blob_bytes);
    if (name.empty()) {
        const int fd = ::memfd_create("fmoe-host-store", MFD_CLOEXEC);
        if (fd < 0) fail("memfd_create");
        return build(name, File(fd), wanted);
    }
    const std::string path = path_of(name);
    for (const auto deadline = after(timeout_s);;) {
        File file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        require(file.fd() >= 0 || errno != ELOOP, path + " is a link, not a host store; remove it");
        if (file.fd() < 0) fail(path);
        file.require_own(path);
        const bool is_alone = file.try_lock(LOCK_EX);
        if (is_alone || file.try_lock(LOCK_SH)) {
            if (!file.is_at(path)) continue;
            const auto found = file.read_header(path);
            if (!found && is_alone) return build(name, std::move(file), wanted);
            const bool is_complete = found && found->state == State::complete;
            const bool fits =
                is_complete && found->is_of(fingerprint) && found->is_same_shape(wanted);
            if (fits) {
                if (is_alone) wait_for_shared_lock(name, file, deadline);
                // Between the two locks another creator may have removed it: look again.
                if (!file.is_at(path)) continue;
                return std::shared_ptr<HostStore>(
                    new HostStore(name, std::move(file), *found, false));
            }
            if (is_alone) {
                if (::unlink(path.c_str()) != 0) fail(path);
                continue;
            }
            if (is_complete)
                throw FingerprintError("host store '" + name + "' is in use for '" +
                                       found->fingerprint + "', not for '" + fingerprint +
                                       "' of this shape; choose another name");
        }
        wait_for_lock(name, deadline);
    }
}

std::shared_ptr<HostStore> HostStore::build(const std::string& name, File file,
                                            const Header& header) {
    const std::size_t needed = header.file_bytes();
    const std::string remedy =
        "free memory, enlarge /dev/shm (docker: --shm-size) or use a smaller model";
    try {
        require_capacity("host store", needed, available_memory_bytes(), remedy);
        if (!name.empty())
            require_capacity("host store in shared memory", needed,
                             free_filesystem_bytes(kDirectory), remedy);
        file.write(&header, sizeof header, 0);
        file.reserve(needed);
    } catch (...) {
        if (!name.empty()) ::unlink(path_of(name).c_str());
        throw;
    }
    return std::shared_ptr<HostStore>(new HostStore(name, std::move(file), header, true));
}

HostStore::HostStore(std::string name, File file, const Header& header, bool is_writable)
    : name_(std::move(name)),
      file_(std::make_unique<File>(std::move(file))),
      num_blobs_(static_cast<int>(header.num_blobs)),
      blob_bytes_(header.blob_bytes),
      mapped_bytes_(header.file_bytes()),
      is_complete_(header.state == State::complete) {
    const int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* mapping = ::mmap(nullptr, mapped_bytes_, protection, MAP_SHARED, file_->fd(), 0);
    if (mapping == MAP_FAILED) fail("mmap of host store '" + name_ + "'");
    mapping_ = static_cast<std::byte*>(mapping);
}

HostStore::~HostStore() {
    if (mapping_ != nullptr) ::munmap(mapping_, mapped_bytes_);
    if (name_.empty()) return;
    // Taking the exclusive lock gives up the shared one first: of several that leave at once the
    // last to ask gets it.
    const std::string path = path_of(name_);
    if (::flock(file_->fd(), LOCK_EX | LOCK_NB) == 0 && file_->is_at(path)) ::unlink(path.c_str());
}

Blobs HostStore::blobs() const noexcept {
    return {mapping_ + round_up(sizeof(Header), page_bytes()), round_up(blob_bytes_, page_bytes()),
            blob_bytes_};
}

const std::byte* HostStore::blob(int index) const {
    require(index >= 0 && index < num_blobs_,
            "host store: blob " + std::to_string(index) + " of " + std::to_string(num_blobs_));
    return blobs().at(index);
}

std::byte* HostStore::writable_blob(int index) {
    require(!is_complete_, "host store '" + name_ + "' is sealed: its blobs are read-only");
    return const_cast<std::byte*>(blob(index));
}

void HostStore::seal() {
    require(!is_complete_, "host store '" + name_ + "' is sealed already");
    const State complete = State::complete;
    file_->write(&complete, sizeof complete, offsetof(Header, state));
    is_complete_ = true;
    if (!name_.empty()) wait_for_shared_lock(name_, *file_, after(kHandOverS));
}

}  // namespace fmoe
