/* torch_profile.h - torch's profiler, for base/profile.h. */
#ifndef ZS_TORCH_PROFILE_H
#define ZS_TORCH_PROFILE_H

#include "base/profile.h"

extern const zs_profiler zs_torch_profiler;

#endif
