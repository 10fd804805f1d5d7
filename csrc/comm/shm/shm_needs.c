/* shm_needs.c - compares the resources that a rank needs to connect to its peers with the free ones.
 *
 * With many ranks, the process reaches its limits before memory runs out. Its needs are known, so a rank that lacks
 * something reports it, with numbers, before anything is created. See shm.h. */
#define _GNU_SOURCE 1 /* RLIM_INFINITY */
#include "comm/shm/shm.h"

#include "comm/shm/shm_link.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    PER_PEER = 2, /* descriptors: its pidfd, its buckets */
    OWN = 2,      /* the flats, this rank's buckets */
    /* While ranks connect: the listener, a line, this rank's control block and pidfd, and the descriptors just
     * received. */
    MEETING = 4 + ZS_LINK_FDS,
    PROC = 1, /* to read the limits */
};

zs_shm_needs zs_comm_shm_needs(int world)
{
    size_t n = (size_t)world, peers = n - 1;
    return (zs_shm_needs){.descriptors = PER_PEER * peers + OWN,
                          .meeting = PER_PEER * peers + OWN + MEETING + PROC,
                          .mappings = n,
                          .bytes = n * sizeof(zs_shm_control)};
}

/* --- free resources ----------------------------------------------------------------------------------------------- */

enum { UNKNOWN = -1 }; /* or no limit */

static long long left_of(long long limit, long long used)
{
    if (limit < 0 || used < 0) return UNKNOWN;
    return limit > used ? limit - used : 0;
}

static long long limit_of(int what)
{
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)what, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UNKNOWN;
    return (long long)limit.rlim_cur;
}

static long long open_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL) return UNKNOWN;
    long long count = -1; /* the folder itself */
    for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder))
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static long long read_number(const char *path)
{
    char text[32], *end = text;
    FILE *file = fopen(path, "r");
    if (file == NULL) return UNKNOWN;
    long long number = fgets(text, sizeof text, file) != NULL ? strtoll(text, &end, 10) : UNKNOWN;
    fclose(file);
    return end > text ? number : UNKNOWN;
}

static long long mappings(void)
{
    char text[1 << 14];
    long long count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    if (file == NULL) return UNKNOWN;
    size_t got;
    do {
        got = fread(text, 1, sizeof text, file);
        for (size_t i = 0; i < got; i++)
            count += text[i] == '\n';
    } while (got == sizeof text);
    fclose(file);
    return count;
}

static long long address_space(void)
{
    long long pages = read_number("/proc/self/statm");
    return pages < 0 ? UNKNOWN : pages * sysconf(_SC_PAGESIZE);
}

/* --- the verdict -------------------------------------------------------------------------------------------------- */

/* One of the process's limits. */
typedef struct bound {
    const char *what, *remedy;
    long long limit, left, needed;
} bound;

static zs_status check(int rank, int world, const bound *it)
{
    if (it->left < 0 || it->needed <= it->left) return ZS_OK;
    return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                   "rank %d needs %lld %s to connect to %d ranks over shared memory, but has %lld left of %lld: %s",
                   rank, it->needed, it->what, world, it->left, it->limit, it->remedy);
}

zs_status zs_shm_check_limits(int rank, int world)
{
    zs_shm_needs needs = zs_comm_shm_needs(world);
    bound files = {"file descriptors", "raise the limit (ulimit -n)", limit_of(RLIMIT_NOFILE), 0,
                   (long long)needs.meeting};
    bound maps = {"memory mappings", "raise vm.max_map_count", read_number("/proc/sys/vm/max_map_count"), 0,
                  (long long)needs.mappings};
    bound space = {"bytes of address space", "raise the limit (ulimit -v)", limit_of(RLIMIT_AS), 0,
                   (long long)needs.bytes};
    files.left = left_of(files.limit, open_descriptors());
    maps.left = left_of(maps.limit, mappings());
    space.left = left_of(space.limit, space.limit < 0 ? UNKNOWN : address_space());
    ZS_TRY(check(rank, world, &files));
    ZS_TRY(check(rank, world, &maps));
    return check(rank, world, &space);
}
