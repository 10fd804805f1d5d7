/* bucket.h - the memory of an engine's buckets. The schedule (schedule/rounds.c) decides which unit has one, and until
 * when. */
#ifndef ZS_BUCKET_H
#define ZS_BUCKET_H

#include "comm/comm.h"
#include "schedule/schedule.h"

/* The memory behind a lease. */
zs_bucket *zs_bucket_of(zs_lease *lease);

/* Adds one more bucket of at least `bytes` to the schedule. */
zs_status zs_bucket_new(zs_schedule *schedule, zs_comm *comm, size_t bytes, zs_lease **out);

/* Gives the lease memory, if it is at rest. */
zs_status zs_bucket_wake(zs_lease *lease, const zs_device *device);

/* Frees the memory of idle buckets, as zs_arena_rest does. */
void zs_buckets_rest(zs_schedule *schedule, const zs_device *device);

/* Frees all of a schedule's buckets. */
void zs_buckets_free(zs_schedule *schedule, zs_comm *comm);

/* Fits the schedule's buckets to these sizes, as the transport rounds them: creates those that are missing, and frees
 * idle ones that are not needed. */
zs_status zs_buckets_fit(zs_schedule *schedule, zs_comm *comm, const size_t *bytes, size_t n);

/* Bytes of all buckets that are not at rest; `in_use`: of those that are packed, or that peers may read. */
size_t zs_buckets_bytes(const zs_schedule *schedule, bool in_use);

#endif
