/* grad_memory.c - see grad_memory.h. */
#include "reduce/grad_memory.h"

#include "device/pending.h"
#include "reduce/kept_grads.h"
#include "unit/offload.h"

static zs_status take(zs_unit *unit, const zs_flat *flat, zs_mem **out)
{
    const size_t bytes = zs_flat_own_bytes(unit, flat);
    if (!unit->borrows) return zs_device_mem_lend(zs_context_device(unit->context), bytes, out);
    ZS_TRY(zs_arena_take_own(unit->context->arena, bytes, out));
    zs_mem_retain(*out);
    return ZS_OK;
}

static void give(zs_unit *unit, zs_mem *mem)
{
    bool shared;
    if (zs_arena_has(unit->context->arena, mem, &shared)) zs_arena_give(unit->context->arena, mem);
    zs_mem_release(mem);
}

zs_status zs_grad_memory_take(zs_unit *unit)
{
    const zs_comm *comm = unit->context->ranks.all;
    bool taken = false;
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        zs_mem *mem = NULL;
        if (flat->grads == NULL || flat->grad_mem != NULL) continue;
        ZS_TRY(take(unit, flat, &mem));
        taken = true;
        zs_status status = zs_storage_fill(flat->grads, mem, mem->ptr);
        if (status != ZS_OK) {
            give(unit, mem);
            return status;
        }
        mem->role = unit->record.is.replicated ? ZS_MEM_PLAIN : ZS_MEM_GRAD_SHARD;
        mem->user = unit;
        flat->grad_mem = mem;
        unit->grads_held = true;
    }
    /* Forward's and backward's use of this memory precedes the sums. */
    return taken ? zs_device_fork(comm->device, comm->ops->stream) : ZS_OK;
}

/* The block in which the .grad of all the flat's parameters have their places; NULL: there is none. */
static zs_mem *common_block(const zs_unit *unit, int f)
{
    zs_mem *mem = NULL;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        zs_grad_info grad = {0};
        if (param->flat != f || param->numel == 0) continue;
        if (!zs_tensor_alive(param->tensor) || zs_grad_describe(param->tensor, &grad) != ZS_OK) return NULL;
        if (!grad.defined || !grad.dense || grad.mem == NULL || (mem != NULL && grad.mem != mem)) return NULL;
        mem = grad.mem;
        const zs_flat *flat = &unit->flats[f];
        const char *place = (char *)mem->ptr + (size_t)param->in_shard.begin * flat->layout.itemsize;
        if (mem->bytes != zs_flat_own_bytes(unit, flat) || grad.data != place) return NULL;
    }
    return mem;
}

void zs_grad_memory_reuse(zs_unit *unit)
{
    if (!unit->record.is.replicated || unit->borrows || unit->offloads.grads) return;
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        zs_mem *mem = flat->grads != NULL && flat->grad_mem == NULL ? common_block(unit, f) : NULL;
        if (mem == NULL || zs_storage_fill(flat->grads, mem, mem->ptr) != ZS_OK) continue;
        flat->grad_mem = zs_mem_retain(mem);
        unit->grads_held = true;
    }
}

void zs_grad_memory_clear(zs_unit *unit, const char *message)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (flat->grad_mem == NULL) continue;
        (void)zs_storage_clear(flat->grads, message); /* can only fail on memory for the message */
        zs_pending_drop(flat->grad_mem);
        flat->grad_mem->role = ZS_MEM_PLAIN;
        flat->grad_mem->user = NULL;
        give(unit, flat->grad_mem);
        flat->grad_mem = NULL;
    }
    unit->grads_held = false;
}

/* Is any of the flat's gradients still in use? Only its own handle and its parameters' views should hold it. */
static bool flat_wanted(const zs_unit *unit, int f)
{
    int64_t own = 1;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (param->flat != f || param->grad == NULL) continue;
        if (param->below) return true;
        bool shown = false;
        if (zs_tensor_alive(param->tensor) && zs_grad_is(param->tensor, param->grad, &shown) != ZS_OK) return true;
        if (shown || zs_tensor_is_kept(param->grad)) return true;
        own++;
    }
    return zs_storage_users(unit->flats[f].grads) > own;
}

/* Does any .grad, or a view of one, refer to the unit's gradients? */
static bool are_wanted(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].grads != NULL && flat_wanted(unit, f)) return true;
    return false;
}

void zs_grad_memory_shown(zs_unit *unit, int64_t n)
{
    unit->grads_shown = n;
    if (n > 0) unit->grads_held = true;
}

void zs_grad_memory_forgotten(zs_unit *unit)
{
    if (--unit->grads_shown == 0) zs_grad_memory_drop(unit);
}

/* Drops memory that a script has kept for a while. */
static void drop_spares(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].spare_mem != NULL && !zs_grads_are_kept(unit, f, ZS_VIEW_SPARE))
            zs_kept_grads_free(&unit->flats[f], unit);
}

void zs_grad_memory_drop(zs_unit *unit)
{
    if (!unit->grads_held || unit->in_backward || are_wanted(unit) || zs_context_captured(unit->context)) return;
    if (unit->offloads.grads) {
        unit->grads_held = false;
        zs_offload_discard_grads(unit);
    } else {
        zs_grad_memory_clear(unit, "");
        drop_spares(unit);
    }
}

void zs_grad_memory_set_aside(zs_unit *unit, zs_mem **own, const char *message)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (flat->grad_mem == NULL) continue;
        (void)zs_storage_clear(flat->grads, message);
        own[f] = flat->grad_mem;
        flat->grad_mem = NULL;
    }
}

void zs_grad_memory_put_back(zs_unit *unit, zs_mem **own)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (own[f] == NULL) continue;
        if (flat->grad_mem != NULL) {
            zs_mem_release(own[f]);
        } else {
            flat->grad_mem = own[f];
            (void)zs_storage_fill(flat->grads, own[f], own[f]->ptr);
        }
    }
}
