/* comm_local.h - what the transports share among themselves; nothing above comm.h includes it.
 *
 * The order post, collect, (share, collect_shared,) release is the same everywhere, so it is kept here
 * once, and a call out of order is the same error on every transport.
 */
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
    zs_cunit_spec spec;   /* as given; `name` and `part_of` are the unit's own copies, `parts` and `part_of` never 0 */
    uint64_t round;       /* number of the round posted last, from 1 on; 0: none yet */
    zs_round_state state; /* where that round stands here */
    size_t used_words;    /* length of the used bitmap in 64-bit words, at least 1 */
    size_t piece_bytes;   /* all slices of one rank together */
    const char **data;    /* [world] for zs_sources */
    size_t at[ZS_MAX_FLATS]; /* for zs_sources: where the own slices lie in a bucket */
    const uint64_t **used;   /* [world] for zs_sources */
};

/* Fills the head (zeroed by the caller) of a unit on `comm` after checking `spec`. */
zs_status zs_cunit_init(zs_cunit *unit, const zs_cunit_spec *spec, const zs_comm *comm);

/* What is collected are pieces, in which one rank's slices lie side by side, and no buckets: sets `at`. */
void zs_cunit_lay_side_by_side(zs_cunit *unit);

/* Where slice `part` of flat `f` begins in a bucket, in bytes. */
size_t zs_cunit_slice_at(const zs_cunit *unit, int f, int part);

/* Frees what zs_cunit_init made, not the struct; a zeroed head is allowed. */
void zs_cunit_clear(zs_cunit *unit);

/* Start of post: ZS_ERR_STATE while the round before is still out, ZS_ERR_VALUE for a bucket that does not fit. */
zs_status zs_cunit_may_post(const zs_cunit *unit, const zs_bucket *bucket);

/* ZS_ERR_STATE, naming `call` and the unit, unless the round stands at `state`. */
zs_status zs_cunit_expect(const zs_cunit *unit, zs_round_state state, const char *call);

/* Start of release: ZS_ERR_STATE unless all of the round has been collected. */
zs_status zs_cunit_may_release(const zs_cunit *unit);

/* Bytes of the slices of one rank; words of the bitmap. */
size_t zs_spec_piece_bytes(const zs_cunit_spec *spec);
size_t zs_spec_used_words(const zs_cunit_spec *spec);

/* Hands the unit's arrays out as `out`. */
void zs_cunit_sources(const zs_cunit *unit, zs_sources *out);

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
