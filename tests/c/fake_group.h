/* fake_group.h - the process group below the c10d transport (csrc/shim/tensor.h), played by an shm transport.
 *
 * No torch is needed, every collective that is issued can be counted, and failures can be made: a test sets a
 * countdown, and the collective that it runs out at fails, late or at once, or never ends. Included once in a program.
 */
#ifndef ZS_TEST_FAKE_GROUP_H
#define ZS_TEST_FAKE_GROUP_H

#include "ranks.h"

#include "comm/c10d/c10d.h"
#include "shim/tensor.h"

struct zs_group {
    double timeout;
};

struct zs_work {
    int looks;        /* so often zs_work_done has said no */
    int waits;        /* so many further waits return early */
    zs_status status; /* how it ends */
};

static zs_comm *wire;         /* the transport below the group */
static int calls;             /* collectives so far */
static int under_way;         /* works that have not been waited for to their end */
static int fail_at;           /* the how-many-th collective from now on fails at its start; 0: none */
static int fail_late_at;      /* ... at its end */
static int last_forever_at;   /* ... never ends */
static int slow_at;           /* ... ends after a wait in vain */
static const char *reading;   /* memory that one that never ends may read at any time */
static zs_status failure;     /* the status */
static const char *complaint; /* and the words */
static char last_words[128];  /* of this rank, as the store would have them */
static int speaker = -1;      /* the rank that has left `last_words` */
static int absent;            /* ranks besides the wire's: they gather with this one, and repeat its messages */
static bool ahead;            /* the last of them has made a step more */

zs_status zs_group_new(const char *name, zs_group **out)
{
    static zs_group group;
    if (strcmp(name, "fake") != 0) return ZS_FAIL(ZS_ERR_TORCH, "no group is registered under %s", name);
    *out = &group;
    return ZS_OK;
}

void zs_group_free(zs_group *group)
{
    (void)group;
}

void zs_group_set_timeout(zs_group *group, double seconds)
{
    group->timeout = seconds;
}

/* Is this the collective that `*countdown` was set to? */
static bool is_due(int *countdown)
{
    return *countdown > 0 && --*countdown == 0;
}

/* Every collective goes through here. */
static zs_status begin(const zs_group *group, zs_work **work)
{
    calls++;
    CHECK(group->timeout == wire->timeout);
    bool late = is_due(&fail_late_at), forever = is_due(&last_forever_at), slow = is_due(&slow_at);
    if (is_due(&fail_at)) return ZS_FAIL(failure, "%s", complaint);
    *work = calloc(1, sizeof **work);
    CHECK(*work != NULL);
    **work = (zs_work){.waits = forever ? 1 << 30 : slow, .status = late ? failure : ZS_OK};
    under_way++;
    return ZS_OK;
}

/* Gathers all ranks' `bytes`, in the wire's small messages. */
static void gather_all(const char *in, char *out, size_t bytes, size_t stride)
{
    char box[MAX_RANKS * 4096], call[ZS_CALL] = ""; /* a process group knows no calls */
    zs_call_swap(call);
    for (size_t at = 0; at < bytes; at += 4096) {
        size_t part = bytes - at < 4096 ? bytes - at : 4096;
        OK(zs_comm_exchange(wire, in + at, part, box));
        for (int r = 0; r < wire->world; r++)
            memcpy(out + (size_t)r * stride + at, box + (size_t)r * part, part);
    }
    zs_call_swap(call);
}

/* The same for ranks that are not there. */
static void gather_for_absent(const void *in, void *out, size_t bytes, int world)
{
    for (int r = 0; r < world; r++)
        memcpy((char *)out + (size_t)r * bytes, in, bytes);
    zs_turn *turns = out;
    if (ahead && bytes == sizeof *turns) turns[world - 1].fingerprint.steps++;
}

zs_status zs_group_all_gather(zs_group *group, const void *in, void *out, size_t bytes, int world, zs_work **work)
{
    CHECK(world == wire->world + absent);
    ZS_TRY(begin(group, work));
    if ((*work)->waits > 1) reading = in;
    if ((*work)->waits > 1 || (*work)->status != ZS_OK) return ZS_OK;
    if (absent > 0)
        gather_for_absent(in, out, bytes, world);
    else
        gather_all(in, out, bytes, bytes);
    return ZS_OK;
}

zs_status zs_group_all_to_all(zs_group *group, const void *in, void *out, size_t piece_bytes, int world, zs_work **work)
{
    CHECK(world == wire->world);
    ZS_TRY(begin(group, work));
    if ((*work)->waits > 1 || (*work)->status != ZS_OK) return ZS_OK;
    size_t whole = piece_bytes * (size_t)world;
    char *all = malloc(whole * (size_t)world);
    CHECK(all != NULL);
    gather_all(in, all, whole, whole);
    for (int r = 0; r < world; r++)
        memcpy((char *)out + (size_t)r * piece_bytes, all + (size_t)r * whole + (size_t)wire->rank * piece_bytes,
               piece_bytes);
    free(all);
    return ZS_OK;
}

zs_status zs_group_broadcast(zs_group *group, void *data, size_t bytes, int root, zs_work **work)
{
    ZS_TRY(begin(group, work));
    if ((*work)->waits > 1 || (*work)->status != ZS_OK) return ZS_OK;
    char call[ZS_CALL] = "";
    zs_call_swap(call);
    zs_status status = zs_comm_broadcast(wire, data, bytes, root);
    zs_call_swap(call);
    return status;
}

bool zs_work_done(const zs_work *work)
{
    return ((zs_work *)work)->looks++ >= 2;
}

zs_status zs_work_wait(zs_work *work, double seconds, bool *done)
{
    *done = work->waits == 0;
    if (!*done) {
        work->waits--;
        sleep_us((long)(seconds * 1e6));
        return ZS_OK;
    }
    under_way--;
    return work->status == ZS_OK ? ZS_OK : ZS_FAIL(work->status, "%s", complaint);
}

void zs_work_free(zs_work *work)
{
    free(work);
}

void zs_group_publish_text(zs_group *group, int rank, const char *words)
{
    (void)group;
    speaker = rank;
    snprintf(last_words, sizeof last_words, "%s", words);
}

uint64_t zs_group_ask_positions(zs_group *group)
{
    (void)group;
    return 1;
}

void zs_group_read_answer(zs_group *group, uint64_t number, int rank, char *text, size_t size)
{
    (void)group;
    if (number == 1) snprintf(text, size, "%crank %d's place", rank == wire->rank ? 'w' : '-', rank);
}

bool zs_group_leave_page(zs_group *group, int rank, int world, void *pages, size_t bytes)
{
    (void)group, (void)rank, (void)world, (void)pages, (void)bytes;
    return false;
}

void zs_group_read_text(zs_group *group, int rank, char *words, size_t size)
{
    (void)group;
    snprintf(words, size, "%s", rank == speaker ? last_words : "");
}

#endif
