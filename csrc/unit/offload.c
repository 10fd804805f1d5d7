/* offload.c - see offload.h. */
#include "unit/offload.h"

#include "pager/pager.h"
#include "unit/context.h"

/* --- what lies where ---------------------------------------------------------------------------------------------- */

zs_status zs_offload_set(zs_context *context, const char *directory, const zs_offload *what)
{
    const zs_ranks *ranks = &context->ranks;
    zs_offload *offload = &context->offload;
    zs_disk *disk = NULL;
    if (directory != NULL && directory[0] == 0)
        ZS_TRY(zs_disk_new_on_host(zs_context_device(context), &disk));
    else if (directory != NULL)
        ZS_TRY(zs_disk_new(directory, ranks->all, ranks->shards, &disk));
    zs_disk_release(offload->disk);
    *offload = (zs_offload){.params = what->params, .grads = what->grads, .state = what->state};
    offload->fraction = what->fraction;
    offload->on = true;
    offload->disk = disk;
    return ZS_OK;
}

void zs_offload_choose(zs_offload *offload, zs_unit *unit, size_t bytes)
{
    unit->offloads = (zs_unit_offload){0};
    if (!offload->on) return;
    double size = (double)bytes;
    offload->seen += size;
    if (offload->chosen + size / 2 > offload->fraction * offload->seen) return;
    offload->chosen += size;
    if (offload->disk != NULL) unit->offloads.disk = zs_disk_retain(offload->disk);
    unit->offloads.params = offload->params;
    unit->offloads.grads = offload->grads;
    unit->offloads.state = offload->state;
}

void zs_offload_forget(zs_unit *unit)
{
    zs_disk_release(unit->offloads.disk);
    unit->offloads = (zs_unit_offload){0};
}

zs_status zs_offload_flat_new(const zs_unit *unit, zs_comm *shards, size_t shard_bytes, zs_flat_mem *out)
{
    if (unit->offloads.params) return zs_disk_flat_new(unit->offloads.disk, shard_bytes, out);
    return zs_comm_flat_new(shards, shard_bytes, out);
}

zs_status zs_offload_params_new(const zs_unit *unit, size_t bytes, zs_mem **out)
{
    if (unit->offloads.params) return zs_disk_take(unit->offloads.disk, bytes, out);
    return zs_device_mem_new(zs_context_device(unit->context), bytes, out);
}

zs_status zs_offload_state_new(const zs_unit *unit, int64_t numel, const zs_tensor *like, zs_tensor **out)
{
    zs_tensor_info info;
    ZS_TRY(zs_tensor_describe(like, &info));
    zs_mem *mem = NULL;
    ZS_TRY(zs_disk_take(unit->offloads.disk, (size_t)numel * info.itemsize, &mem));
    zs_status status = zs_tensor_new_in(mem, mem->ptr, 1, &numel, like, out);
    zs_mem_release(mem);
    return status;
}

/* --- memory in use ------------------------------------------------------------------------------------------------ */

/* The memory that a gather or cast reads on this rank: with mapped full buffers, all ranks' shards. */
static void span_of(const zs_unit *unit, const zs_flat_mem *from, char **ptr, size_t *bytes)
{
    *ptr = from->full != NULL ? from->full : from->shard;
    *bytes = from->full != NULL || unit->record.is.replicated ? from->mem->bytes : from->shard_bytes;
}

zs_status zs_offload_want_flat(const zs_unit *unit, zs_flat *flat)
{
    if (!unit->offloads.params || flat->in_use != NULL) return ZS_OK;
    char *ptr;
    size_t bytes;
    span_of(unit, unit->record.is.replicated ? &flat->mem : zs_flat_source(unit, flat), &ptr, &bytes);
    ZS_TRY(zs_pager_want(ptr, bytes, ZS_PAGER_READ));
    flat->in_use = ptr;
    flat->in_use_bytes = bytes;
    return ZS_OK;
}

void zs_offload_done_flat(zs_flat *flat)
{
    if (flat->in_use == NULL) return;
    zs_pager_done(flat->in_use, flat->in_use_bytes);
    flat->in_use = NULL;
}

void zs_offload_filled(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->offloads.params; f++) {
        char *ptr;
        size_t bytes;
        span_of(unit, &unit->flats[f].mem, &ptr, &bytes);
        zs_pager_done(ptr, bytes);
    }
}

zs_status zs_offload_want_grads(const zs_unit *unit)
{
    zs_status status = ZS_OK;
    int f = 0;
    for (; f < unit->n_flats && unit->offloads.grads && status == ZS_OK; f++) {
        const zs_mem *mem = unit->flats[f].grad_mem;
        if (mem != NULL) status = zs_pager_want(mem->ptr, mem->bytes, ZS_PAGER_WRITE);
    }
    if (status == ZS_OK) return ZS_OK;
    for (f--; f-- > 0;)
        if (unit->flats[f].grad_mem != NULL)
            zs_pager_done(unit->flats[f].grad_mem->ptr, unit->flats[f].grad_mem->bytes);
    return status;
}

void zs_offload_done_grads(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->offloads.grads; f++) {
        const zs_mem *mem = unit->flats[f].grad_mem;
        if (mem != NULL) zs_pager_done(mem->ptr, mem->bytes);
    }
}

void zs_offload_discard_grads(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->offloads.grads; f++) {
        const zs_mem *mem = unit->flats[f].grad_mem;
        if (mem != NULL) zs_pager_zero(mem->ptr, mem->bytes);
    }
}
