/* c10d.h - the c10d transport inside.
 *
 *   comm_c10d.c   the table, flats, small collectives
 *   c10d_round.c  reducing
 */
#ifndef ZS_C10D_H
#define ZS_C10D_H

#include "comm_local.h"
#include "tensor.h"

/* Memory for pieces, lent to one round at a time. */
typedef struct zs_c10d_area {
    zs_mem *mem;
    bool busy;
} zs_c10d_area;

typedef struct zs_c10d_comm {
    zs_comm base;
    zs_group *group;
    uint64_t units;      /* created so far */
    zs_c10d_area *areas; /* grows to what one backward has out at a time */
    size_t n_areas;
} zs_c10d_comm;

/* The process group, set to the transport's timeout. Borrowed. */
zs_group *zs_c10d_group(zs_comm *comm);

/* Says in this thread's record what the failed collective was for: "rank 0, `what` 'name': its words". `name` may be "". */
zs_status zs_c10d_explain(zs_status status, int rank, const char *what, const char *name);

/* --- c10d_round.c: units' part of the table, as comm.h has it ------------------------------------------------------- */

/* cunit_new. */
zs_status zs_c10d_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out);

/* cunit_free; waits for a collective that is under way. NULL allowed. */
void zs_c10d_cunit_free(zs_comm *comm, zs_cunit *cunit);

/* post: starts the collective and does not wait. */
zs_status zs_c10d_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used);

/* collect. A round that fails here is over. */
zs_status zs_c10d_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* share. */
zs_status zs_c10d_share(zs_comm *comm, zs_cunit *cunit);

/* collect_shared. */
zs_status zs_c10d_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* release. */
zs_status zs_c10d_release(zs_comm *comm, zs_cunit *cunit);

/* reusable. */
zs_status zs_c10d_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
