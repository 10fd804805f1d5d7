/* kill_kept.c - kept steps in processes that SIGKILL ends, at a random time, finished by this one.
 *
 *   kill_kept SEED WITHIN     until WITHIN kills were between the first chunk and the last, however busy the machine;
 *                             prints "killed K within W"; exit 1 if a step came out with other bits than the plain step
 *
 * The functions are those of the extension, with threads. A child's memory is files (memfds) that it shares with its
 * parent, which maps them elsewhere afterwards.
 */
#define _GNU_SOURCE /* memfd_create */
#include "kept_cases.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { UNHURT = 50, THREADS = 3, NUMEL = 150000, MOST_BYTES = 1 << 25 };

/* --- threads ------------------------------------------------------------------------------------------------------ */

typedef struct part {
    void (*fn)(void *ctx, int64_t begin, int64_t end);
    void *ctx;
    int64_t begin, end;
} part;

static void *run_part(void *arg)
{
    const part *of = arg;
    of->fn(of->ctx, of->begin, of->end);
    return NULL;
}

/* A thread for each number; there are few. */
void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx)
{
    pthread_t ids[THREADS];
    part parts[THREADS];
    (void)grain;
    if (n > THREADS) abort();
    for (int64_t i = 0; i < n; i++) {
        parts[i] = (part){fn, ctx, i, i + 1};
        if (pthread_create(&ids[i], NULL, run_part, &parts[i]) != 0) abort();
    }
    for (int64_t i = 0; i < n; i++)
        pthread_join(ids[i], NULL);
}

/* --- rounds ------------------------------------------------------------------------------------------------------- */

typedef struct file {
    int fd;
    size_t bytes;
    char *at;
} file;

static char *mapped(const file *of)
{
    void *at = mmap(NULL, of->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, of->fd, 0);
    if (at == MAP_FAILED) exit(2);
    return at;
}

static file new_file(size_t bytes)
{
    file made = {.fd = (int)memfd_create("kept", 0), .bytes = bytes};
    if (made.fd < 0 || ftruncate(made.fd, (off_t)bytes) != 0) exit(2);
    made.at = mapped(&made);
    return made;
}

static int64_t nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static zs_status step_kept(const file *area, const file *memory, uint64_t step)
{
    const zs_kept_range range = {memory->at, memory->bytes, 0, 1};
    return zs_kept_finish(area->at, area->bytes, step, &(zs_kept_files){&range, 1});
}

/* A child that updates what is recorded, killed `after` nanoseconds after it began; `after` < 0: not killed. True: it
 * had not returned. *took: how long it ran. */
static bool child_is_killed(const file *area, const file *memory, uint64_t step, int64_t after, int64_t *took)
{
    static _Atomic uint64_t *begun;
    if (begun == NULL) begun = (void *)new_file(sizeof *begun).at;
    const pid_t child = fork();
    if (child == 0) {
        *begun = step;
        _exit(step_kept(area, memory, step) == ZS_OK ? 0 : 3);
    }
    int status;
    while (child > 0 && *begun != step)
        ;
    const int64_t since = nanoseconds();
    while (nanoseconds() < since + after)
        ;
    if (after >= 0) kill(child, SIGKILL);
    if (child < 0 || waitpid(child, &status, 0) != child) exit(2);
    *took = nanoseconds() - since;
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) exit(2);
    return WIFSIGNALED(status);
}

static void broken(int64_t round)
{
    printf("broken: round %lld (%s)\n", (long long)round, zs_last_message());
    exit(1);
}

/* What the child has left is finished in other mappings of the files. */
static void finish_elsewhere(const file *area, const file *memory, uint64_t step, const char *wanted, size_t bytes)
{
    file area_here = *area, memory_here = *memory;
    area_here.at = mapped(area);
    memory_here.at = mapped(memory);
    if (step_kept(&area_here, &memory_here, step) != ZS_OK) broken((int64_t)step);
    if (memcmp(memory_here.at, wanted, bytes) != 0) broken((int64_t)step);
    munmap(area_here.at, area->bytes);
    munmap(memory_here.at, memory->bytes);
}

int main(int argc, char **argv)
{
    if (argc != 3) return 2;
    random_state = strtoull(argv[1], NULL, 10);
    const int64_t enough = atol(argv[2]);
    const zs_kept_room room = {MOST_RUNS, THREADS};
    file area = new_file(zs_kept_bytes(&room)), memory = new_file(MOST_BYTES);
    static char begin[MOST_BYTES], wanted[MOST_BYTES];
    step_case now = {.base = memory.at};
    for (int i = 0; i < MOST_RUNS; i++)
        add_run(&now, &KINDS[random_below(N_KINDS)], NUMEL / MOST_RUNS + random_below(999));
    memcpy(begin, memory.at, now.bytes);
    step_plainly(&now);
    memcpy(wanted, memory.at, now.bytes);
    if (zs_kept_format(area.at, &room) != ZS_OK) return 2;
    const zs_kept_range range = {memory.at, memory.bytes, 0, 1};
    int64_t killed = 0, within = 0, longest = 0;
    for (int64_t round = 0; within < enough; round++) {
        memcpy(memory.at, begin, now.bytes);
        if (zs_kept_write(area.at, (uint64_t)round + 1, now.jobs, now.n, &(zs_kept_files){&range, 1}) != ZS_OK)
            return 2;
        int64_t took;
        const int64_t after = round % UNHURT == 0 ? -1 : random_below(longest);
        killed += child_is_killed(&area, &memory, (uint64_t)round + 1, after, &took);
        if (after < 0) longest = took; /* as busy as the machine is now */
        within += memcmp(memory.at, begin, now.bytes) != 0 && memcmp(memory.at, wanted, now.bytes) != 0;
        finish_elsewhere(&area, &memory, (uint64_t)round + 1, wanted, now.bytes);
    }
    printf("killed %lld within %lld\n", (long long)killed, (long long)within);
    return 0;
}
