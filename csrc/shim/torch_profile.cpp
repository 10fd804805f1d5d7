// torch_profile.cpp - the profiler behind base/profile.h: torch's observers (torch.profiler, NVTX, execution traces).
#include <ATen/record_function.h>

#include <string>
#include <utility>

extern "C" {
#include "shim/tensor_py.h"
}

struct zs_observed {
    zs_observed(at::StepCallbacks &&observers, const char *text) : name(text), range(std::move(observers))
    {
        range.before(std::string_view(name));
    }
    std::string name; // which the range borrows
    at::RecordFunction range;
};

namespace {

bool records()
{
    return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

// A range that a profiler misses must not end a training run.
zs_observed *begin(const char *name)
{
    auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!observers.has_value()) return nullptr;
    try {
        return new zs_observed(std::move(*observers), name);
    } catch (...) {
        return nullptr;
    }
}

void end(zs_observed *range)
{
    delete range;
}

} // namespace

extern "C" const zs_profiler zs_torch_profiler = {records, begin, end};
