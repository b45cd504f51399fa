// The one place where a native failure becomes an exception of fmoe_ray.errors. What the core says
// with std::invalid_argument stays ValueError.
#include "fmoe/errors.h"

#include <nanobind/nanobind.h>

#include <system_error>

#include "bindings.h"

namespace nb = nanobind;

namespace fmoe::bindings {

namespace {

void raise(const char* name, const std::exception& error) {
    const nb::object type = nb::module_::import_("fmoe_ray.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
}

void translate(const std::exception_ptr& failure, void*) {
    try {
        std::rethrow_exception(failure);
    } catch (const CapacityError& error) {
        raise("CapacityError", error);
    } catch (const FingerprintError& error) {
        raise("FingerprintError", error);
    } catch (const TimeoutError& error) {
        raise("StepTimeoutError", error);
    } catch (const EngineError& error) {
        raise("EngineError", error);
    } catch (const std::system_error& error) {
        raise("EngineError", error);
    } catch (const std::invalid_argument&) {
        throw;
    } catch (const std::logic_error& error) {  // a broken invariant (check.h)
        raise("EngineError", error);
    }
}

}  // namespace

void bind_errors() { nb::register_exception_translator(translate); }

}  // namespace fmoe::bindings
