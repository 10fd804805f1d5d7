/* comm_local.h - code that the transports share; nothing above comm.h includes it. */
#ifndef ZS_COMM_LOCAL_H
#define ZS_COMM_LOCAL_H

#include "comm/comm.h"
#include "comm/traffic.h"

/* The tables. */
extern const zs_comm_ops zs_self_ops, zs_shm_ops, zs_c10d_ops, zs_hosts_ops;
extern const zs_comm_ops zs_nccl_ops, zs_c10d_gpu_ops; /* gpu_transports.c */

/* State of a unit's current round on this rank. */
typedef enum zs_round_state {
    ZS_ROUND_NONE,      /* no round; next: post */
    ZS_ROUND_POSTED,    /* next: collect */
    ZS_ROUND_COLLECTED, /* next: release, in ZS_REDUCE_ALL share */
    ZS_ROUND_SHARED,    /* next: collect_shared */
    ZS_ROUND_GATHERED,  /* next: release */
} zs_round_state;

/* Head of every transport's own unit. */
struct zs_cunit {
    /* the caller's spec, but `name` and `shard_of` are owned copies, and `n_shards` and `shard_of` are never 0 */
    zs_cunit_spec spec;
    uint64_t round;                  /* number of the last posted round, from 1; 0: none yet */
    zs_round_state state;            /* state of that round */
    const zs_bucket *bucket;         /* of that round; NULL: it has no gradients; borrowed */
    zs_round_header *header;         /* this rank's header; owned */
    size_t header_bytes;             /* of each header, the peers' too */
    size_t shards_bytes;             /* one rank's shards of all flats, in all sections */
    size_t section;                  /* bytes from one section to the next, where `at` counts */
    bool partial;                    /* for zs_sources, as the rest */
    const char **data;               /* [world] */
    size_t at[ZS_MAX_FLATS];         /* offsets of this rank's shards in a bucket */
    const zs_round_header **headers; /* [world] */
};

/* Collects pieces, in which one rank's shards are side by side, instead of buckets: sets `at`. */
void zs_cunit_lay_side_by_side(zs_cunit *unit);

/* Offset of shard `shard` of flat `f` in a section of a bucket, in bytes. */
size_t zs_cunit_shard_at(const zs_cunit *unit, int f, int shard);

/* Undoes a post that failed on all ranks, as if there had been no round: ranks may be at different ones when they
 * continue. No-op if none is out. */
void zs_cunit_undo_post(zs_comm *comm, zs_cunit *unit);

/* Checks arguments of exchange and broadcast: ZS_ERR_VALUE if `bytes` is over 4096, or if rank `root` does not
 * exist. */
zs_status zs_check_exchange(size_t bytes);
zs_status zs_check_root(const zs_comm *comm, int root);

/* As zs_comm_enter and zs_comm_leave, on every transport. */
zs_status zs_comm_hold(zs_comm *comm);
void zs_comm_unhold(zs_comm *comm);

/* Calls the hook of zs_comm_on_wait: has the user interrupted? Waits call this a few times a second. */
bool zs_comm_interrupted(void);

/* --- parts of the table for transports whose memory is private to a rank (self, c10d) ----------------------------- */

/* flat_new: private memory, which is not the full buffer. / flat_free: drops the reference. */
zs_status zs_local_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);
void zs_local_flat_free(zs_comm *comm, zs_flat_mem *flat);

/* bucket_new: private memory. */
zs_status zs_local_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out);

/* bucket_room: `bytes` itself. */
size_t zs_local_bucket_room(size_t bytes);

/* bucket_free: drops the reference. */
void zs_local_bucket_free(zs_comm *comm, zs_bucket *bucket);

/* reader_new: a handle without state, since no peer can read this rank's memory. */
zs_status zs_local_reader_new(zs_comm *comm, const char *name, zs_reader **out);

/* reader_free: frees that handle; NULL allowed. */
void zs_local_reader_free(zs_comm *comm, zs_reader *reader);

/* read_begin and read_end: wait for nothing; the comm's head keeps the pass that gathers report. */
zs_status zs_local_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading);
zs_status zs_local_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase);

/* The table of these four. */
extern const zs_reader_ops zs_local_reader_ops;

#endif
