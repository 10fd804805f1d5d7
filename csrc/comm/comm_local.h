/* comm_local.h - what the transports share among themselves; nothing above comm.h includes it. */
#ifndef ZS_COMM_LOCAL_H
#define ZS_COMM_LOCAL_H

#include "comm/comm.h"

/* The tables. */
extern const zs_comm_ops zs_self_ops, zs_shm_ops, zs_c10d_ops, zs_hosts_ops;
extern const zs_comm_ops zs_nccl_ops, zs_c10d_gpu_ops; /* gpu_transports.c */

/* Where the current round of a unit stands on this rank. */
typedef enum zs_round_state {
    ZS_ROUND_NONE,      /* nothing is out; next: post */
    ZS_ROUND_POSTED,    /* next: collect */
    ZS_ROUND_COLLECTED, /* next: release, in ZS_REDUCE_ALL share */
    ZS_ROUND_SHARED,    /* next: collect_shared */
    ZS_ROUND_GATHERED,  /* next: release */
} zs_round_state;

/* Head of every transport's own unit. */
struct zs_cunit {
    /* as given; `name` and `shard_of` are the unit's own copies, `n_shards` and `shard_of` never 0 */
    zs_cunit_spec spec;
    uint64_t round;                  /* number of the round posted last, from 1 on; 0: none yet */
    zs_round_state state;            /* where that round stands here */
    const zs_bucket *bucket;         /* of that round, NULL: it brings nothing; borrowed */
    zs_round_header *header;         /* what this rank says of it; owned */
    size_t header_bytes;             /* likewise of the peers' */
    size_t shards_bytes;             /* one rank's shards of all flats */
    bool partial;                    /* for zs_sources; this and the rest */
    const char **data;               /* [world] */
    size_t at[ZS_MAX_FLATS];         /* where the own shards lie in a bucket */
    const zs_round_header **headers; /* [world] */
};

/* What is collected are pieces, in which one rank's shards lie side by side, and no buckets: sets `at`. */
void zs_cunit_lay_side_by_side(zs_cunit *unit);

/* Where shard `shard` of flat `f` begins in a bucket, in bytes. */
size_t zs_cunit_shard_at(const zs_cunit *unit, int f, int shard);

/* What failed on all ranks has not been a round: they may stand at different ones when they go on. No-op if none is
 * out. */
void zs_cunit_undo_post(zs_comm *comm, zs_cunit *unit);

/* Arguments of exchange and broadcast: ZS_ERR_VALUE if `bytes` is over 4096, or there is no rank `root`. */
zs_status zs_check_exchange(size_t bytes);
zs_status zs_check_root(const zs_comm *comm, int root);

/* Asks the hook of zs_comm_on_wait: has the user interrupted? Called by waits, a few times a second. */
bool zs_comm_interrupted(void);

/* --- parts of the table for transports whose memory is private to a rank (self, c10d) ----------------------------- */

/* flat_free: gives the reference back. */
void zs_local_flat_free(zs_comm *comm, zs_flat_mem *flat);

/* bucket_new: private memory. */
zs_status zs_local_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out);

/* bucket_room: as asked for. */
size_t zs_local_bucket_room(size_t bytes);

/* bucket_free: gives the reference back. */
void zs_local_bucket_free(zs_comm *comm, zs_bucket *bucket);

/* reader_new: a handle that remembers nothing, since no peer can read this rank's memory. */
zs_status zs_local_reader_new(zs_comm *comm, const char *name, zs_reader **out);

/* reader_free: frees that handle; NULL allowed. */
void zs_local_reader_free(zs_comm *comm, zs_reader *reader);

/* read_begin and read_end: nothing to wait for; the comm's head has what a gather says of its pass. */
zs_status zs_local_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading);
zs_status zs_local_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase);

/* These four. */
extern const zs_reader_ops zs_local_reader_ops;

#endif
