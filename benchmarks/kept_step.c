/* kept_step.c - times the plain step and the kept one (optim/kept_step.h), for benchmarks/optim.py.
 *
 *   kept_step ELEMENTS PASSES  AdamW in float32 on one thread; parameters, gradients and state lie in shared memory;
 *                              prints nanoseconds per element: plain kept, a line for each pair of turns
 *
 * A turn is a part of the elements, and the next turn has the next part: neither finds the other's memory in a cache,
 * and both see the same disturbances.
 */
#define _DEFAULT_SOURCE
#include "optim/kept_step.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "optim/optim.h"

enum { TURN = 1 << 17, MEMORIES = 4 };

void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx)
{
    (void)grain;
    if (n > 0) fn(ctx, 0, n);
}

static void *shared(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    return at;
}

static zs_status step_kept(const zs_update_job *job, void *area, size_t bytes, const zs_kept_files *files)
{
    static uint64_t step = 0;
    ZS_TRY(zs_kept_write(area, ++step, job, 1, files));
    return zs_kept_finish(area, bytes, step, files);
}

/* Nanoseconds for an element of the turn that begins at element `at`. */
static double turn(float *const *memory, int64_t at, void *area, size_t bytes, const zs_kept_files *files)
{
    static const zs_hyper HYPER = {
        .lr = 1e-3, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decoupled = true};
    zs_constants constants = {.step = 3};
    constants.adam_f32 = zs_adam_at_f32(&HYPER, 3);
    zs_run run = {.param = memory[0] + at,
                  .grad = memory[1] + at,
                  .factor = 1,
                  .constants = &constants,
                  .numel = TURN,
                  .dtype = ZS_F32};
    run.state[0] = memory[2] + at;
    run.state[1] = memory[3] + at;
    const zs_update_job job = {ZS_RULE_ADAM, false, &run, NULL, 1};
    const int64_t since = zs_clock_ns();
    if (area == NULL)
        zs_update_part(&job, 0, TURN);
    else if (step_kept(&job, area, bytes, files) != ZS_OK)
        exit(3);
    return (double)(zs_clock_ns() - since) / TURN;
}

int main(int argc, char **argv)
{
    if (argc != 3) return 2;
    const int64_t turns = (int64_t)atol(argv[1]) / TURN / 2 * 2;
    const size_t bytes = (size_t)turns * TURN * sizeof(float);
    float *memory[MEMORIES];
    zs_kept_range ranges[MEMORIES];
    for (int i = 0; i < MEMORIES; i++) {
        memory[i] = shared(bytes);
        for (int64_t at = 0; at < turns * TURN; at++)
            memory[i][at] = (float)(at % 1009) / 1009;
        ranges[i] = (zs_kept_range){(char *)memory[i], bytes, 0, (uint32_t)i};
    }
    const zs_kept_files files = {ranges, MEMORIES};
    const zs_kept_room room = {1, 1};
    const size_t area_bytes = zs_kept_bytes(&room);
    void *area = shared(area_bytes);
    if (zs_kept_format(area, &room) != ZS_OK) return 2;
    for (long pass = 0; pass < atol(argv[2]); pass++) {
        for (int64_t i = 0; i < turns; i += 2) {
            const double plain = turn(memory, (i + pass % 2) * TURN, NULL, 0, NULL);
            const double kept = turn(memory, (i + 1 - pass % 2) * TURN, area, area_bytes, &files);
            printf("%.4f %.4f\n", plain, kept);
        }
    }
    return 0;
}
