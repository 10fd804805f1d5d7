/* shm_round.c - reducing over shm: ranks tell where their buckets lie, and read each other's.
 *
 * A round is three counters per unit and rank (posted, shared, released), each raised by its owner alone.
 * Gradients are never copied: the peers map a bucket when they first meet it and read their slice where it lies.
 */
#define _GNU_SOURCE 1 /* MAP_NORESERVE */
#include "comm/shm/shm_round.h"

#include "comm/shm/shm_wait.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct shm_unit {
    zs_cunit base;
    uint32_t record; /* offset in the heap */
    bool compared;   /* the peers' records describe the same unit */
} shm_unit;

static zs_shm_act act_of(const shm_unit *unit, zs_shm_what what)
{
    return zs_shm_act_make(what, unit->record, unit->base.round);
}

static uint64_t *bitmap(zs_shm_unit_record *record, const zs_cunit *unit)
{
    return record->bitmaps + (unit->round % 2) * unit->used_words;
}

zs_status zs_shm_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    zs_shm *shm = (zs_shm *)comm;
    shm_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    zs_status status = zs_cunit_init(&unit->base, spec, comm);
    if (status == ZS_OK) {
        size_t bytes = zs_shm_unit_record_bytes(unit->base.used_words);
        status = zs_shm_record(shm, bytes, unit->base.spec.name, &unit->record);
    }
    if (status != ZS_OK) {
        zs_shm_cunit_free(comm, &unit->base);
        return status;
    }
    zs_shm_unit_record *own = zs_shm_unit_at(shm, comm->rank, unit->record);
    own->n_params = spec->n_params;
    own->piece_bytes = unit->base.piece_bytes;
    *out = &unit->base;
    return ZS_OK;
}

void zs_shm_cunit_renamed(zs_comm *comm, zs_cunit *cunit)
{
    const shm_unit *unit = (const shm_unit *)cunit;
    zs_shm_unit_record *own = zs_shm_unit_at((zs_shm *)comm, comm->rank, unit->record);
    snprintf(own->name, sizeof own->name, "%s", cunit->spec.name);
}

void zs_shm_cunit_free(zs_comm *comm, zs_cunit *cunit)
{
    (void)comm;
    if (cunit == NULL) return;
    zs_cunit_clear(cunit);
    free(cunit);
}

/* --- post --------------------------------------------------------------------------------------------------------------- */

zs_status zs_shm_post_round(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used)
{
    zs_shm *shm = (zs_shm *)comm;
    shm_unit *unit = (shm_unit *)cunit;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_cunit_may_post(cunit, bucket));
    cunit->round++;
    zs_shm_unit_record *own = zs_shm_unit_at(shm, comm->rank, unit->record);
    zs_shm_post *post = &own->post[cunit->round % 2];
    *post = (zs_shm_post){.present = bucket != NULL};
    if (bucket != NULL) {
        zs_region region = zs_file_region(shm->buckets, bucket->key);
        post->index = region.index;
        post->offset = region.offset;
        post->bytes = region.bytes;
    }
    memcpy(bitmap(own, cunit), used, cunit->used_words * sizeof *used);
    cunit->data[comm->rank] = bucket == NULL ? NULL : bucket->ptr;
    cunit->used[comm->rank] = bitmap(own, cunit);
    cunit->state = ZS_ROUND_POSTED;
    zs_shm_note(shm, act_of(unit, ZS_SHM_POSTED));
    zs_shm_set(shm, &own->posted, cunit->round);
    return ZS_OK;
}

/* --- collect -------------------------------------------------------------------------------------------------------------- */

/* Address here of the bucket that rank `r` posted; mapped once per bucket, for good. */
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

/* Before the first reading of a unit: do all ranks mean the same unit by its number? */
static zs_status compare_records(const zs_shm *shm, const shm_unit *unit)
{
    const zs_shm_unit_record *mine = zs_shm_unit_at(shm, shm->base.rank, unit->record);
    for (int r = 0; r < shm->base.world; r++) {
        const zs_shm_unit_record *other = zs_shm_unit_at(shm, r, unit->record);
        if (strncmp(mine->name, other->name, ZS_SHM_NAME) == 0 && mine->n_params == other->n_params &&
            mine->piece_bytes == other->piece_bytes)
            continue;
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "the model differs between ranks: rank %d has unit '%s' (%llu parameters, %llu bytes per shard) where rank "
            "%d has '%.*s' (%llu parameters, %llu bytes); build and wrap the same model on all ranks",
            shm->base.rank, mine->name, (unsigned long long)mine->n_params, (unsigned long long)mine->piece_bytes, r,
            ZS_SHM_NAME - 1, other->name, (unsigned long long)other->n_params, (unsigned long long)other->piece_bytes);
    }
    return ZS_OK;
}

/* All have posted: finds their buckets and bitmaps. */
static zs_status fill_sources(zs_shm *shm, shm_unit *unit)
{
    zs_cunit *base = &unit->base;
    if (!unit->compared) ZS_TRY(compare_records(shm, unit));
    unit->compared = true;
    for (int r = 0; r < shm->base.world; r++) {
        if (r == shm->base.rank) continue;
        zs_shm_unit_record *record = zs_shm_unit_at(shm, r, unit->record);
        const zs_shm_post *post = &record->post[base->round % 2];
        base->used[r] = bitmap(record, base);
        base->data[r] = NULL;
        if (post->present) ZS_TRY(view_bucket(shm, r, post, &base->data[r]));
    }
    return ZS_OK;
}

/* Sets *ready if nobody is missing for `act`, after waiting for that as `wait` says. */
static zs_status reach(zs_shm *shm, zs_shm_act act, zs_wait wait, bool *ready)
{
    ZS_TRY(zs_shm_usable(shm));
    *ready = zs_shm_missing(shm, shm->base.rank, act) < 0;
    if (*ready) return ZS_OK;
    if (wait == ZS_WAIT_NOT) return zs_shm_check_stop(shm);
    if (wait == ZS_WAIT_OR_YIELD) return zs_shm_wait_or_yield(shm, act, ready);
    zs_status status = zs_shm_wait(shm, act);
    *ready = status == ZS_OK;
    return status;
}

zs_status zs_shm_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    zs_shm *shm = (zs_shm *)comm;
    shm_unit *unit = (shm_unit *)cunit;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_POSTED, "collect"));
    ZS_TRY(reach(shm, act_of(unit, ZS_SHM_POSTED), wait, ready));
    if (!*ready) return ZS_OK;
    zs_status status = fill_sources(shm, unit);
    *ready = status == ZS_OK;
    if (!*ready) return status;
    zs_cunit_sources(cunit, out);
    cunit->state = ZS_ROUND_COLLECTED;
    return ZS_OK;
}

/* --- share, release ------------------------------------------------------------------------------------------------------- */

zs_status zs_shm_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    shm_unit *unit = (shm_unit *)cunit;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_COLLECTED, "share"));
    cunit->state = ZS_ROUND_SHARED;
    zs_shm_note(shm, act_of(unit, ZS_SHM_SHARED));
    zs_shm_set(shm, &zs_shm_unit_at(shm, comm->rank, unit->record)->shared, cunit->round);
    return ZS_OK;
}

zs_status zs_shm_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_SHARED, "collect_shared"));
    ZS_TRY(reach(shm, act_of((shm_unit *)cunit, ZS_SHM_SHARED), wait, ready));
    if (!*ready) return ZS_OK;
    zs_cunit_sources(cunit, out);
    cunit->state = ZS_ROUND_GATHERED;
    return ZS_OK;
}

zs_status zs_shm_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_shm *shm = (zs_shm *)comm;
    shm_unit *unit = (shm_unit *)cunit;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_cunit_may_release(cunit));
    cunit->state = ZS_ROUND_NONE;
    zs_shm_note(shm, act_of(unit, ZS_SHM_RELEASED));
    zs_shm_set(shm, &zs_shm_unit_at(shm, comm->rank, unit->record)->released, cunit->round);
    return ZS_OK;
}

zs_status zs_shm_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_shm *shm = (zs_shm *)comm;
    return reach(shm, act_of((shm_unit *)cunit, ZS_SHM_RELEASED), wait, ready);
}
