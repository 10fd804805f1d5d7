/* traffic.h - the bytes of parameters and gradients that this process gets from other ranks, in all its models.
 *
 * Counted always, when they set out; where memory is mapped, when it is read to be summed. Messages and headers do not
 * count. */
#ifndef ZS_TRAFFIC_H
#define ZS_TRAFFIC_H

#include "comm/comm_types.h"

/* Kinds of bytes: parameters, or gradients and their sums; the number of kinds. */
typedef enum zs_traffic_kind { ZS_TRAFFIC_GATHER, ZS_TRAFFIC_REDUCE } zs_traffic_kind;
enum { ZS_TRAFFIC_KINDS = 2 };

/* Bytes by zs_traffic_kind: from all ranks, and of these, from other hosts. */
typedef struct zs_traffic {
    int64_t all[ZS_TRAFFIC_KINDS], other_hosts[ZS_TRAFFIC_KINDS];
} zs_traffic;

/* Counts bytes from this host and from others. Any thread. */
void zs_traffic_count(zs_traffic_kind kind, size_t this_host, size_t other_hosts);

/* Counts `bytes` from each other rank of `comm`. */
void zs_traffic_from_each(const zs_comm *comm, zs_traffic_kind kind, size_t bytes);

/* All since the process began; a - b. */
zs_traffic zs_traffic_so_far(void);
zs_traffic zs_traffic_between(const zs_traffic *a, const zs_traffic *b);

#endif
