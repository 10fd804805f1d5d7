/* round.h - the life of one bucket: posted, collected, (shared, collected again,) released.
 *
 * The order of these calls, the unit's state and the errors of calls out of order are the same on every transport,
 * so they are here; a transport moves bytes and reports their arrival (zs_round_ops). */
#ifndef ZS_ROUND_H
#define ZS_ROUND_H

#include "comm/comm_types.h"
#include "comm/fingerprint.h"

/* A rank's report with its round, in addition to the parameters that it used. */
enum {
    ZS_ROUND_BUCKET = 1,  /* it has a bucket; set by zs_cunit_post */
    ZS_ROUND_GAVE_UP = 2, /* its backward has failed */
    ZS_ROUND_OVER = 4,    /* its backward will not need the unit again */
    ZS_ROUND_HELD = 8,    /* it has earlier gradients, to which the sum is added */
    ZS_ROUND_NO_SUM = 16, /* it shares no sum; set by zs_cunit_collect */
};

/* Sent with a rank's gradients. */
typedef struct zs_round_header {
    uint64_t flags;
    zs_fingerprint fingerprint; /* the rank's changes to the model */
    uint64_t used[];            /* bitmap of the parameters that had a gradient */
} zs_round_header;

/* Its size in bytes for so many parameters. */
size_t zs_round_header_bytes(size_t n_params);

/* The result of collect(), valid until release(). Arrays of length world are in rank order. */
typedef struct zs_sources {
    bool partial; /* each entry is a host's sum, under its first rank, in zs_dtype_of_partial_sum of the posted dtype */
    const char **data; /* [world] rank r's gradients of this rank's shard of trainable flat f begin at data[r] + at[f];
                          NULL: nothing posted */
    const size_t *at;  /* [n_flats] */
    size_t section;    /* bytes from one section to the next */
    const zs_round_header **headers; /* [world] never NULL */
} zs_sources;

/* Reduction of a unit's gradients. */
typedef enum zs_reduce_mode {
    ZS_REDUCE_SCATTER, /* each rank gets its shard of the sum */
    ZS_REDUCE_ALL, /* each rank gets the full sum: after collect, share() this rank's shard, then collect_shared() */
} zs_reduce_mode;

/* Gradients that are reduced together.
 *
 * Bucket layout: flat after flat, each n_shards * shard_bytes[f] long: shard p of flat f starts at
 * n_shards * (shard_bytes[0] + ... + shard_bytes[f-1]) + p * shard_bytes[f]. */
typedef struct zs_cunit_spec {
    const char *name; /* for messages; copied */
    size_t n_params;
    int n_flats;                      /* trainable flats, <= ZS_MAX_FLATS; 0: nothing to reduce */
    size_t shard_bytes[ZS_MAX_FLATS]; /* of trainable flat f in the bucket (wire dtype), multiples of 64 */
    zs_dtype wire[ZS_MAX_FLATS];      /* of its numbers */
    /* A bucket has so many gradients in this layout, one after the other; 0: one. More than one over self, shm and
     * c10d only. ZS_REDUCE_ALL shares the first. */
    int sections;
    zs_wire code; /* how their sums cross hosts, if a transport sums within hosts first */
    zs_reduce_mode mode;
    int n_shards; /* in a bucket; 0: one for each rank */
    /* [world] which shard a rank sums, if several ranks sum the same (hybrid); copied; NULL: rank r sums shard r.
     * ZS_REDUCE_SCATTER only. */
    const int *shard_of;
} zs_cunit_spec;

/* Bytes of one rank's shards of all flats, in all sections. */
size_t zs_spec_shards_bytes(const zs_cunit_spec *spec);

/* Creates a unit. Units are numbered in creation order; all ranks create the same ones in the same order. */
zs_status zs_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out);

/* Waits for outstanding work, and frees the unit. NULL allowed. */
void zs_cunit_free(zs_comm *comm, zs_cunit *unit);

/* Sets the unit's name to that in an outer model. All ranks do so before its first round, or none. */
zs_status zs_cunit_rename(zs_comm *comm, zs_cunit *unit, const char *name);

/* The header of the next round: fill it before each post, and do not touch it until that round is released.
 * Borrowed. */
zs_round_header *zs_cunit_header(zs_cunit *unit);

/* Posts the header and the packed `bucket` (NULL if no parameter had a gradient here) to the peers. Never waits on
 * shm; collective on c10d. The bucket must not be touched until reusable() allows it. In ZS_REDUCE_ALL it is never
 * NULL: the sum needs room. */
zs_status zs_cunit_post(zs_comm *comm, zs_cunit *unit, const zs_bucket *bucket);

/* Sets *ready and `out` once all ranks have posted this round; see zs_wait for how long to wait for that. Fails with
 * ZS_ERR_MEMORY and *ready if this rank cannot map a peer's post: then it has released the round, or in ZS_REDUCE_ALL
 * reported that it has no sum. */
zs_status zs_cunit_collect(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready, zs_sources *out);

/* (ZS_REDUCE_ALL) The caller has written the sum of its shards into its bucket, in place. */
zs_status zs_cunit_share(zs_comm *comm, zs_cunit *unit);

/* (ZS_REDUCE_ALL) As collect, once all ranks have shared; data[r] + offset of rank r's shard in the bucket is its
 * finished sum. Fails with ZS_ERR_MEMORY and *ready on all ranks where one has shared no sum: release the round. */
zs_status zs_cunit_collect_shared(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready, zs_sources *out);

/* This rank has read the round. */
zs_status zs_cunit_release(zs_comm *comm, zs_cunit *unit);

/* Sets *ready once every peer has released the round that this rank posted last (true if none is out). */
zs_status zs_cunit_reusable(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready);

/* (between rounds) Gradients are multiplied by `factor` from now on. */
void zs_cunit_rescale(zs_comm *comm, zs_cunit *unit, double factor);

/* Is a round out? Not after a failure on all ranks, which undoes it. */
bool zs_cunit_is_out(const zs_cunit *unit);

#endif
