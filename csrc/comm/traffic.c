/* traffic.c - see traffic.h. */
#include "comm/traffic.h"

#include "comm/comm_ops.h"

#include <stdatomic.h>

static _Atomic int64_t all[ZS_TRAFFIC_KINDS], afar[ZS_TRAFFIC_KINDS];

void zs_traffic_count(zs_traffic_kind kind, size_t this_host, size_t other_hosts)
{
    atomic_fetch_add_explicit(&all[kind], (int64_t)(this_host + other_hosts), memory_order_relaxed);
    atomic_fetch_add_explicit(&afar[kind], (int64_t)other_hosts, memory_order_relaxed);
}

void zs_traffic_from_each(const zs_comm *comm, zs_traffic_kind kind, size_t bytes)
{
    int here = comm->per_host > 0 ? comm->per_host : comm->world;
    zs_traffic_count(kind, (size_t)(here - 1) * bytes, (size_t)(comm->world - here) * bytes);
}

zs_traffic zs_traffic_so_far(void)
{
    zs_traffic found;
    for (int k = 0; k < ZS_TRAFFIC_KINDS; k++) {
        found.all[k] = atomic_load_explicit(&all[k], memory_order_relaxed);
        found.other_hosts[k] = atomic_load_explicit(&afar[k], memory_order_relaxed);
    }
    return found;
}

zs_traffic zs_traffic_between(const zs_traffic *a, const zs_traffic *b)
{
    zs_traffic found;
    for (int k = 0; k < ZS_TRAFFIC_KINDS; k++) {
        found.all[k] = a->all[k] - b->all[k];
        found.other_hosts[k] = a->other_hosts[k] - b->other_hosts[k];
    }
    return found;
}
