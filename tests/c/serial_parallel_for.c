/* serial_parallel_for.c - zs_parallel_for without torch: in turn, in three uneven pieces, for tests/core/test_device.py. */
#include "shim/tensor.h"

void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx)
{
    const int64_t first = n > grain ? n / 3 + 1 : n, second = n > grain ? n - n / 5 : n;
    if (first > 0) fn(ctx, 0, first);
    if (second > first) fn(ctx, first, second);
    if (n > second) fn(ctx, second, n);
}
