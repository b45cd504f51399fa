#include "fmoe/cuda_driver.h"

#include <dlfcn.h>

#include <cstring>

#include "fmoe/errors.h"

namespace fmoe {

namespace {

constexpr int kOutOfMemory = 2;
constexpr int kHostMemoryAlreadyRegistered = 712;
// CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS; the 32-bit ones come with them.
constexpr int kCanUseStreamMemOps = 122;
constexpr unsigned kPortable = 1;
constexpr unsigned kDeviceMap = 2;

template <class Function>
void load(void* library, const char* symbol, Function& function) {
    void* found = ::dlsym(library, symbol);
    if (found == nullptr)
        throw EngineError(std::string("libcuda.so.1 has no ") + symbol +
                          ": the NVIDIA driver is too old, 525 or newer is needed");
    std::memcpy(&function, &found, sizeof found);
}

}  // namespace

CudaDriver::CudaDriver() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw EngineError("no NVIDIA driver: libcuda.so.1 cannot be loaded; set device: cpu");
    load(library, "cuInit", init);
    load(library, "cuDeviceGetAttribute", device_attribute);
    load(library, "cuDevicePrimaryCtxRetain", context_retain);
    load(library, "cuDevicePrimaryCtxRelease_v2", context_release);
    load(library, "cuCtxSetCurrent", context_set);
    load(library, "cuCtxGetStreamPriorityRange", stream_priorities);
    load(library, "cuStreamCreateWithPriority", stream_create);
    load(library, "cuStreamDestroy_v2", stream_destroy);
    load(library, "cuStreamSynchronize", stream_synchronize);
    load(library, "cuStreamWriteValue32_v2", stream_write);
    load(library, "cuStreamWaitValue32_v2", stream_wait);
    load(library, "cuMemAlloc_v2", allocate);
    load(library, "cuMemFree_v2", free);
    load(library, "cuMemHostAlloc", host_allocate);
    load(library, "cuMemFreeHost", host_free);
    load(library, "cuMemHostGetDevicePointer_v2", host_address);
    load(library, "cuMemHostRegister_v2", host_register);
    load(library, "cuMemHostUnregister", host_unregister);
    load(library, "cuMemcpyHtoDAsync_v2", copy_to_device);
    load(library, "cuGetErrorName", error_name);
    load(library, "cuMemGetInfo_v2", memory_info);
    check(init(0), "cuInit");
}

const CudaDriver& CudaDriver::get() {
    static const CudaDriver driver;
    return driver;
}

void CudaDriver::check(Result result, const char* call) const {
    if (result == 0) return;
    const char* name = "unknown error";
    error_name(result, &name);
    const std::string message = std::string(call) + " failed: " + name;
    if (result == kOutOfMemory) throw CapacityError(message + "; give a smaller expert budget");
    if (result == kHostMemoryAlreadyRegistered)
        throw EngineError(message + ": another offloader of this process uses the same store");
    throw EngineError(message);
}

CudaContextHold::CudaContextHold(int device) : device_(device) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.context_retain(&context_, device), "cuDevicePrimaryCtxRetain");
    enter();
}

CudaContextHold::~CudaContextHold() { CudaDriver::get().context_release(device_); }

void CudaContextHold::enter() const {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.context_set(context_), "cuCtxSetCurrent");
}

bool CudaContextHold::can_wait_on_memory() const {
    const CudaDriver& driver = CudaDriver::get();
    int value = 0;
    driver.check(driver.device_attribute(&value, kCanUseStreamMemOps, device_),
                 "cuDeviceGetAttribute");
    return value != 0;
}

CudaMailbox::CudaMailbox(std::size_t bytes) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.host_allocate(&memory_, bytes, kPortable | kDeviceMap), "cuMemHostAlloc");
    std::memset(memory_, 0, bytes);
    driver.check(driver.host_address(&address_, memory_, 0), "cuMemHostGetDevicePointer");
}

CudaMailbox::~CudaMailbox() {
    if (memory_ != nullptr) CudaDriver::get().host_free(memory_);
}

}  // namespace fmoe
