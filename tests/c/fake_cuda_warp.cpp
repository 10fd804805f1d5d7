/* fake_cuda_warp.cpp - the 32 lanes of a warp as fibers of one thread: see fake_device.hpp.
 *
 * In a round, each lane runs until it meets the others or ends. The next round begins when all have.
 */
#include "fake_device.hpp"

#include <memory>
#include <stdlib.h>
#include <ucontext.h>

enum { LANES = 32, STACK_BYTES = 1 << 16 };

struct fake_warp {
    ucontext_t home, lane[LANES];
    bool ended[LANES];
    unsigned now;            // the lane that runs
    unsigned found, largest; // of this round so far, and of the last
    void (*run)(const void *);
    const void *args;
    char stack[LANES][STACK_BYTES];
};

static thread_local std::unique_ptr<fake_warp> warp;

static void run_lane()
{
    fake_warp *mine = warp.get();
    mine->run(mine->args);
    mine->ended[mine->now] = true;
}

unsigned fake_warp_max(unsigned value)
{
    fake_warp *mine = warp.get();
    const unsigned lane = mine->now;
    mine->found = value > mine->found ? value : mine->found;
    if (swapcontext(&mine->lane[lane], &mine->home) != 0) abort();
    return mine->largest;
}

/* Runs each lane that has not ended to its next meeting; false if there is none. All lanes meet, or all end. */
static bool run_round(fake_warp *mine, unsigned first)
{
    unsigned running = 0;
    mine->largest = mine->found;
    mine->found = 0;
    for (mine->now = 0; mine->now < LANES; mine->now++) {
        if (mine->ended[mine->now]) continue;
        threadIdx.x = first + mine->now;
        if (swapcontext(&mine->home, &mine->lane[mine->now]) != 0) abort();
        running += !mine->ended[mine->now];
    }
    if (running != 0 && running != LANES) abort(); /* a GPU would wait for ever */
    return running != 0;
}

void fake_warp_run(void (*run)(const void *), const void *args, unsigned first)
{
    if (warp == nullptr) warp = std::make_unique<fake_warp>();
    fake_warp *mine = warp.get();
    mine->run = run;
    mine->args = args;
    mine->found = 0;
    for (unsigned i = 0; i < LANES; i++) {
        mine->ended[i] = false;
        if (getcontext(&mine->lane[i]) != 0) abort();
        mine->lane[i].uc_link = &mine->home;
        mine->lane[i].uc_stack.ss_sp = mine->stack[i];
        mine->lane[i].uc_stack.ss_size = STACK_BYTES;
        makecontext(&mine->lane[i], run_lane, 0);
    }
    while (run_round(mine, first)) {}
}
