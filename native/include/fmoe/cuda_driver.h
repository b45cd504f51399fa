// fmoe/cuda_driver.h: the few functions of the CUDA driver that we use, loaded at run time from
// libcuda.so.1: one build serves machines with and without a GPU and needs no toolkit. The types
// restate the driver's stable binary interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fmoe {

using CudaAddress = unsigned long long;  // CUdeviceptr
using CudaContext = struct CudaContextOpaque*;
using CudaStream = struct CudaStreamOpaque*;

struct CudaDriver {
    using Result = int;

    // Throws EngineError if there is no driver or it lacks a function.
    static const CudaDriver& get();

    Result (*init)(unsigned flags);
    Result (*device_attribute)(int* value, int attribute, int device);
    Result (*context_retain)(CudaContext* context, int device);
    Result (*context_release)(int device);
    Result (*context_set)(CudaContext context);
    Result (*stream_priorities)(int* least, int* greatest);
    Result (*stream_create)(CudaStream* stream, unsigned flags, int priority);
    Result (*stream_destroy)(CudaStream stream);
    Result (*stream_synchronize)(CudaStream stream);
    Result (*stream_write)(CudaStream stream, CudaAddress address, std::uint32_t value,
                           unsigned flags);
    Result (*stream_wait)(CudaStream stream, CudaAddress address, std::uint32_t value,
                          unsigned flags);
    Result (*allocate)(CudaAddress* address, std::size_t bytes);
    Result (*free)(CudaAddress address);
    Result (*host_allocate)(void** memory, std::size_t bytes, unsigned flags);
    Result (*host_free)(void* memory);
    Result (*host_address)(CudaAddress* address, void* memory, unsigned flags);
    Result (*host_register)(void* memory, std::size_t bytes, unsigned flags);
    Result (*host_unregister)(void* memory);
    Result (*copy_to_device)(CudaAddress to, const void* from, std::size_t bytes,
                             CudaStream stream);
    Result (*error_name)(Result result, const char** name);
    Result (*memory_info)(std::size_t* free, std::size_t* total);

    // Throws EngineError naming the call, or CapacityError if memory ran out.
    void check(Result result, const char* call) const;

private:
    CudaDriver();
};

// The device's primary context, the one that torch uses, held for as long as this lives.
class CudaContextHold {
public:
    explicit CudaContextHold(int device);
    ~CudaContextHold();
    CudaContextHold(const CudaContextHold&) = delete;
    CudaContextHold& operator=(const CudaContextHold&) = delete;

    int device() const noexcept { return device_; }
    // Driver calls of the calling thread go to this context from now on.
    void enter() const;
    // Whether streams can wait for a value in memory, which decode graphs need.
    bool can_wait_on_memory() const;

private:
    int device_;
    CudaContext context_ = nullptr;
};

// Host memory that the GPU reads and writes in place, zeroed.
class CudaMailbox {
public:
    explicit CudaMailbox(std::size_t bytes);
    ~CudaMailbox();
    CudaMailbox(const CudaMailbox&) = delete;
    CudaMailbox& operator=(const CudaMailbox&) = delete;

    std::byte* data() const noexcept { return static_cast<std::byte*>(memory_); }
    CudaAddress address() const noexcept { return address_; }

private:
    void* memory_ = nullptr;
    CudaAddress address_ = 0;
};

}  // namespace fmoe
