/* bucket.h - the memory of an engine's buckets. Who has one, and until when, is the schedule's matter
 * (schedule/rounds.c).
 */
#ifndef ZS_BUCKET_H
#define ZS_BUCKET_H

#include "comm/comm.h"
#include "schedule/schedule.h"

/* The memory behind a lease. */
zs_bucket *zs_bucket_of(zs_lease *lease);

/* Adds one more bucket of at least `bytes` to the schedule. */
zs_status zs_bucket_new(zs_schedule *schedule, zs_comm *comm, size_t bytes, zs_lease **out);

/* Frees all of a schedule's buckets. */
void zs_buckets_free(zs_schedule *schedule, zs_comm *comm);

/* Has the schedule hold buckets with room for these numbers of bytes, as the transport rounds them: those that are
 * missing are made, idle ones that are not wanted are given back. */
zs_status zs_buckets_fit(zs_schedule *schedule, zs_comm *comm, const size_t *bytes, size_t n);

/* Bytes of all buckets. */
size_t zs_buckets_bytes(const zs_schedule *schedule);

#endif
