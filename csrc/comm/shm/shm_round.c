/* shm_round.c - reducing over shm: ranks publish where their buckets are, and read each other's.
 *
 * A round is three counters per unit and rank (posted, shared, released), each raised by its owner alone. Gradients
 * are never copied: peers map a bucket when they first use it, and read their shard in place. */
#define _GNU_SOURCE 1 /* MAP_NORESERVE */

#include "comm/shm/shm.h"
#include "comm/where.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static zs_shm_act act_of(const zs_shm_unit *unit, zs_shm_what what)
{
    return zs_shm_act_make(what, unit->record, unit->base.round);
}

/* Rank `r`'s header of the current round. */
static zs_round_header *header_at(zs_shm_unit_record *record, const zs_cunit *unit)
{
    return (zs_round_header *)(void *)(record->headers + (unit->round % 2) * unit->header_bytes);
}

zs_status zs_shm_unit_init(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_shm_unit *unit = (zs_shm_unit *)cunit;
    ZS_TRY(zs_shm_record(shm, zs_shm_unit_record_bytes(cunit->header_bytes), cunit->spec.name, &unit->record));
    zs_shm_unit_record *own = zs_shm_unit_at(shm, comm->rank, unit->record);
    own->n_params = cunit->spec.n_params;
    own->shards_bytes = cunit->shards_bytes;
    return ZS_OK;
}

void zs_shm_renamed(zs_comm *comm, zs_cunit *cunit)
{
    const zs_shm_unit *unit = (const zs_shm_unit *)cunit;
    zs_shm_unit_record *own = zs_shm_unit_at((zs_shm *)comm, comm->rank, unit->record);
    snprintf(own->name, sizeof own->name, "%s", cunit->spec.name);
}

/* Publishes that this rank has done `what`; `word` counts its rounds. */
static zs_status publish(zs_shm *shm, const zs_shm_unit *unit, zs_shm_what what, _Atomic uint64_t *word)
{
    zs_shm_note(shm, act_of(unit, what));
    zs_shm_set(shm, word, unit->base.round);
    return ZS_OK;
}

/* --- post --------------------------------------------------------------------------------------------------------- */

zs_status zs_shm_send(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_shm_unit *unit = (zs_shm_unit *)cunit;
    zs_shm_unit_record *own = zs_shm_unit_at(shm, comm->rank, unit->record);
    zs_shm_post *post = &own->post[cunit->round % 2];
    *post = (zs_shm_post){0};
    if (cunit->bucket != NULL) {
        zs_region region = zs_file_region(shm->buckets, cunit->bucket->key);
        *post = (zs_shm_post){region.index, region.offset, region.bytes};
    }
    memcpy(header_at(own, cunit), cunit->header, cunit->header_bytes);
    return publish(shm, unit, ZS_SHM_POSTED, &own->posted);
}

/* --- collect ------------------------------------------------------------------------------------------------------ */

/* Address here of the bucket that rank `r` posted; mapped once per bucket, and kept. */
static zs_status view_bucket(zs_shm *shm, int r, const zs_shm_post *post, const char **out)
{
    zs_shm_peer *peer = &shm->peers[r];
    if (post->index >= peer->n_views) {
        size_t count = post->index + 16;
        zs_shm_view *views = realloc(peer->views, count * sizeof *views);
        if (views == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing the buckets of rank %d", r);
        memset(views + peer->n_views, 0, (count - peer->n_views) * sizeof *views);
        peer->views = views;
        peer->n_views = count;
    }
    zs_shm_view *view = &peer->views[post->index];
    if (view->ptr == NULL) {
        void *ptr = mmap(NULL, post->bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, peer->buckets, (off_t)post->offset);
        if (ptr == MAP_FAILED) return ZS_FAIL(ZS_ERR_MEMORY, "cannot map a bucket of rank %d: %s", r, strerror(errno));
        madvise(ptr, post->bytes, MADV_DONTDUMP);
        *view = (zs_shm_view){ptr, post->bytes};
    }
    *out = view->ptr;
    return ZS_OK;
}

/* Before a unit is first read: does its number mean the same unit on all ranks? */
static zs_status compare_records(const zs_shm *shm, const zs_shm_unit *unit)
{
    const zs_shm_unit_record *mine = zs_shm_unit_at(shm, shm->base.rank, unit->record);
    for (int r = 0; r < shm->base.world; r++) {
        const zs_shm_unit_record *other = zs_shm_unit_at(shm, r, unit->record);
        if (strncmp(mine->name, other->name, ZS_SHM_NAME) == 0 && mine->n_params == other->n_params &&
            mine->shards_bytes == other->shards_bytes)
            continue;
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "the model differs between ranks: rank %d has unit '%s' (%llu parameters, %llu bytes per shard) where rank "
            "%d has '%.*s' (%llu parameters, %llu bytes); build and wrap the same model on all ranks",
            shm->base.rank, mine->name, (unsigned long long)mine->n_params, (unsigned long long)mine->shards_bytes, r,
            ZS_SHM_NAME - 1, other->name, (unsigned long long)other->n_params, (unsigned long long)other->shards_bytes);
    }
    return ZS_OK;
}

/* All have posted: finds their buckets and headers. */
static zs_status fill_sources(zs_shm *shm, zs_shm_unit *unit)
{
    zs_cunit *base = &unit->base;
    if (!unit->compared) ZS_TRY(zs_comm_locate(&shm->base, compare_records(shm, unit)));
    unit->compared = true;
    for (int r = 0; r < shm->base.world; r++) {
        if (r == shm->base.rank) continue;
        zs_shm_unit_record *record = zs_shm_unit_at(shm, r, unit->record);
        const zs_shm_post *post = &record->post[base->round % 2];
        base->headers[r] = header_at(record, base);
        base->data[r] = NULL;
        if (post->bytes > 0) ZS_TRY(view_bucket(shm, r, post, &base->data[r]));
    }
    return ZS_OK;
}

/* Sets *ready if no rank is missing for `act`, after waiting for that according to `wait`. */
static zs_status reach(zs_shm *shm, zs_shm_act act, zs_wait wait, bool *ready)
{
    *ready = zs_shm_missing(shm, shm->base.rank, act) < 0;
    if (*ready) return ZS_OK;
    if (wait == ZS_WAIT_NOT) return zs_shm_check_stop(shm);
    if (wait == ZS_WAIT_OR_YIELD) return zs_shm_wait_or_yield(shm, act, ready);
    zs_status status = zs_shm_wait(shm, act);
    *ready = status == ZS_OK;
    return status;
}

zs_status zs_shm_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_shm_unit *unit = (zs_shm_unit *)cunit;
    ZS_TRY(reach(shm, act_of(unit, ZS_SHM_POSTED), wait, ready));
    return *ready ? fill_sources(shm, unit) : ZS_OK;
}

/* --- share, release ----------------------------------------------------------------------------------------------- */

zs_status zs_shm_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    const zs_shm_unit *unit = (const zs_shm_unit *)cunit;
    zs_shm_unit_record *own = zs_shm_unit_at(shm, comm->rank, unit->record);
    zs_round_header *published = header_at(own, cunit);
    if (published->flags != cunit->header->flags) published->flags = cunit->header->flags; /* it has no sum */
    return publish(shm, unit, ZS_SHM_SHARED, &own->shared);
}

zs_status zs_shm_arrive_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    ZS_TRY(zs_shm_usable((zs_shm *)comm));
    return reach((zs_shm *)comm, act_of((zs_shm_unit *)cunit, ZS_SHM_SHARED), wait, ready);
}

zs_status zs_shm_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    const zs_shm_unit *unit = (const zs_shm_unit *)cunit;
    return publish(shm, unit, ZS_SHM_RELEASED, &zs_shm_unit_at(shm, comm->rank, unit->record)->released);
}

zs_status zs_shm_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    ZS_TRY(zs_shm_usable((zs_shm *)comm));
    return reach((zs_shm *)comm, act_of((zs_shm_unit *)cunit, ZS_SHM_RELEASED), wait, ready);
}
