/* hosts_unit.h - the two-level transport's state of a unit, and of its outstanding round. See hosts_round.c.
 *
 *   piece for a counterpart:  the host's sum of its shard of flat 0 | of flat 1 | ... (or the code of all these) |
 *                             headers of the host's ranks
 */
#ifndef ZS_HOSTS_UNIT_H
#define ZS_HOSTS_UNIT_H

#include "comm/hosts/hosts.h"

typedef struct hosts_unit hosts_unit;

/* A queued round. */
typedef struct hosts_post {
    zs_hosts_op op;
    hosts_unit *unit;
    zs_turn turns[];
} hosts_post;

struct hosts_unit {
    zs_cunit base;
    hosts_post *post; /* of the round that is out, or has failed; owned; NULL: none */
    zs_cunit *local;  /* the unit on the transport of the host's ranks */
    uint64_t number;
    zs_wire_sums sums; /* which begin at `base.at` */
    float *lost;   /* [hosts] of `sums.bytes`: what codes have lost so far of the sums for each; owned; NULL: exact */
    size_t stride; /* from one piece to the next */
    zs_hosts_move *moves;    /* [hosts] in flight; owned */
    zs_mem *sent, *received; /* areas of that round, NULL: none */
};

/* Sums this host's gradients for each counterpart, into `sent`. On either thread, with the lock of `local`. */
zs_status zs_hosts_sum_local(zs_hosts_comm *self, hosts_unit *unit);

/* Starts to receive each host's piece for this rank, and to send those for its counterparts. */
zs_status zs_hosts_start_pieces(zs_hosts_comm *self, hosts_unit *unit);

/* Bytes that this rank reads of the buckets of its host's other ranks, to sum them / to fetch their finished sums. */
size_t zs_hosts_read_bytes(const zs_hosts_comm *self, const hosts_unit *unit);

/* Sets the unit's sources to the received pieces. */
void zs_hosts_find_sources(const zs_hosts_comm *self, hosts_unit *unit);

#endif
